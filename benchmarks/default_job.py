"""The embedded job: how much held-out accuracy it gains and how soon, against a plain loop in one process.

Ours is the whole of `python -m runtime.launch`, from the start of the command: processes, evaluations, checkpoints and
all. The peer (`benchmarks/one_process_grpo.py`: same policy, tasks, seeds, objective, both cores for each phase) counts
sampling and training alone: neither start-up nor evaluations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import Row
from runtime.journal import latest_run, read_metrics

TITLE = "The embedded job"
ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
STALENESS = (0, 1)
GAIN = 0.30
"""What is asked for: held-out accuracy (avg@8, temperature 1), absolute."""
LIMIT_SECONDS = 240
PEER_SECONDS = 120


class Score(NamedTuple):
    seconds: float
    """Since the start of the command (ours) or of the loop (peer)."""
    accuracy: float
    greedy: float


def ours(staleness: int, seed: int, folder: Path, *job: str) -> tuple[list[Score], float]:
    """Scores of a whole run, and the mean seconds of its steps without evaluation. `job`: a job file."""
    name = f"s{staleness}-seed{seed}"
    began = time.time()
    words = [*job, f"run_dir={folder}", f"name={name}", f"staleness={staleness}", f"seed={seed}"]
    subprocess.run([sys.executable, "-m", "runtime.launch", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run = latest_run(folder, name)
    assert run is not None
    rows = read_metrics(run)
    scores = [Score(r["time"] - began, r["eval/accuracy"], r["eval/greedy"]) for r in rows if "eval/accuracy" in r]
    steps = [row["time/step"] for row in rows if "time/step" in row and row.get("time/evaluate", 0) < 0.1]
    return scores, sum(steps) / len(steps)


def peer(seed: int) -> tuple[list[Score], float]:
    """The same of the plain loop."""
    words = ["--seconds", str(PEER_SECONDS), "--eval-seconds", "10", "--seed", str(seed), "--threads", "2", "--json"]
    command = [sys.executable, "-m", "benchmarks.one_process_grpo", *words]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    scores = [Score(line["seconds"], line["avg"], line["greedy"]) for line in lines if line["kind"] == "eval"]
    steps = [line["seconds"] for line in lines if line["kind"] == "step"]
    return scores, sum(steps) / len(steps)


def seconds_to(scores: list[Score], gain: float) -> float | None:
    """When an evaluation first was that much above the first one."""
    return next((score.seconds for score in scores if score.accuracy >= scores[0].accuracy + gain), None)


def run() -> list[Row]:
    """Six runs of ours, one of the peer, and one of the harder job; about forty minutes."""
    rows: list[Row] = []
    plain, plain_step = peer(SEEDS[0])
    with tempfile.TemporaryDirectory() as folder:
        for staleness in STALENESS:
            for seed in SEEDS:
                scores, step = ours(staleness, seed, Path(folder))
                rows += rows_of(f"S = {staleness}, seed {seed}", scores, step, plain, plain_step)
                print(f"S = {staleness}, seed {seed}: {scores[-1]}", flush=True)
        scores, _ = ours(1, SEEDS[0], Path(folder) / "harder", str(ROOT / "recipes" / "harder.toml"))
    return [*rows, harder_row(scores)]


def harder_row(scores: list[Score]) -> Row:
    """Greedy accuracy. Sharpening alone may reach .586, what the majority of 64 samples scores at the start."""
    first, last = scores[0], scores[-1]
    return Row(
        name="harder job, S = 1, seed 0: greedy accuracy gained",
        ours=last.greedy - first.greedy,
        goal=">= 0.15",
        note=f"greedy {first.greedy:.3f} -> {last.greedy:.3f}, avg@8 {first.accuracy:.3f} -> {last.accuracy:.3f} "
        f"in {last.seconds:.0f} s",
    )


def rows_of(what: str, scores: list[Score], step: float, plain: list[Score], plain_step: float) -> list[Row]:
    first, last = scores[0], scores[-1]
    within = [score.accuracy for score in scores if score.seconds <= LIMIT_SECONDS]
    return [
        Row(
            name=f"{what}: accuracy gained within 4 minutes",
            ours=max(within) - first.accuracy,
            peer=plain[-1].accuracy - plain[0].accuracy,
            goal=f">= {GAIN}",
            note=f"{first.accuracy:.3f} -> {last.accuracy:.3f} in {last.seconds:.0f} s, greedy {first.greedy:.3f} -> "
            f"{last.greedy:.3f}; peer: {PEER_SECONDS} s of sampling and training",
        ),
        Row(
            name=f"{what}: time to +{GAIN:.2f}",
            ours=seconds_to(scores, GAIN),
            peer=seconds_to(plain, GAIN),
            unit="s",
            goal=f"<= {LIMIT_SECONDS}",
            note="ours with start-up and evaluations, every 20 steps; peer without either, every 10 s",
        ),
        Row(name=f"{what}: one step", ours=step, peer=plain_step, unit="s", goal="<= 1x"),
    ]
