"""A training step on CPU beside the inner step of TRL's GRPOTrainer: same model, same tokens, one process, one thread.

The peer needs `pip install --no-deps trl==0.29.1 datasets pyarrow pandas dill multiprocess xxhash fsspec` (seen working
with transformers 5.24 and torch 2.13); without it our numbers stand alone. Ours and the peer's run in processes of
their own (`benchmarks/train_step.py`), in turn, and the best of three rounds counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Row

TITLE = "A training step on CPU, beside TRL's"
ROUNDS = 3


def run() -> list[Row]:
    """Tokens per second of a step, and memory of a long sequence over a large vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        _measure("models", "ours", folder)
        best: dict[tuple[str, str], dict[str, float]] = {}
        for _ in range(ROUNDS):
            for what in ("step", "memory"):
                for who in ("ours", "trl"):
                    said = _measure(what, who, folder)
                    if said is not None and said["score"] > best.get((what, who), {"score": -1e9})["score"]:
                        best[what, who] = said
    rows = []
    for what, name, key, unit, goal in (
        ("step", "step of 64 sequences of 40 to 300 tokens, 6 M parameters", "tokens_per_s", "tokens/s", ">= 1.3x"),
        ("memory", "peak memory of a step, 4096 tokens, vocabulary of 151,936", "peak_MB", "MB", "<= 0.7x"),
        ("memory", "the same, time", "seconds", "s", ""),
    ):
        ours, peer = best[what, "ours"], best.get((what, "trl"))
        note = f"trl {peer['version']}" if peer else "peer: see benchmarks/train.py"
        if peer and "grad_norm" in ours:
            note += f"; gradient norm {ours['grad_norm']:.5f} and {peer['grad_norm']:.5f}"
        rows.append(Row(name=name, ours=ours[key], peer=peer[key] if peer else None, unit=unit, goal=goal, note=note))
    return rows


def _measure(what: str, who: str, folder: str) -> dict[str, float] | None:
    """What one process said; None when the peer is not installed, or could not: ours stand alone then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.train_step", what, who, folder],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        timeout=600,
    )
    if done.returncode == 3:
        return None
    if done.returncode and who == "trl":
        print(f"trl, {what}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    if done.returncode:
        raise RuntimeError(f"benchmarks.train_step {what} {who} failed:\n{done.stderr[-3000:]}")
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return said
