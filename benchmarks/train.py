"""A training step on CPU beside the inner step of TRL's GRPOTrainer: same model, same tokens, one thread each.

The peer needs, in an environment that has ours (seen working with transformers 5.24, torch 2.13, Python 3.11):

    pip install --no-deps trl==1.16.0 datasets==5.2.0 pyarrow pandas dill==0.4.1 multiprocess xxhash fsspec accelerate

Without it our numbers stand alone. Ours and the peer's are two processes (`benchmarks/train_step.py`) that load side by
side and then step in turn, so that neither computes while the other is timed. The middle one of the steps counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.table import Row
from benchmarks.train_step import NOT_INSTALLED
from benchmarks.train_work import WORKS

TITLE = "A training step on CPU, beside TRL's"
LIMIT = 240
"""Seconds of one work, both sides."""


def run() -> list[Row]:
    """Tokens per second of a step, and memory of a long sequence over a large vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        mixed = measure("cpu", ["mixed"], {"ours": "ours", "trl": "trl"}, Path(folder, "mixed"))["mixed"]
        long = measure("cpu", ["long"], {"ours": "ours", "trl": "trl"}, Path(folder, "long"))["long"]
    return [
        speed_row("step of 64 sequences of 40 to 300 tokens, 6 M parameters", mixed, ">= 1.3x"),
        memory_row("peak memory of a step, 4096 tokens, vocabulary of 151,936", long, "<= 0.7x"),
        speed_row("the same, speed", long),
    ]


def speed_row(name: str, found: dict[str, Facts], goal: str = "", ours: str = "ours", peer: str = "trl") -> Row:
    a, b = found[ours], found.get(peer)
    rates = (a.tokens_per_s, b.tokens_per_s if b else None)
    return Row(name=name, ours=rates[0], peer=rates[1], unit="tokens/s", goal=goal, note=_note(a, b))


def memory_row(name: str, found: dict[str, Facts], goal: str = "", ours: str = "ours", peer: str = "trl") -> Row:
    a, b = found[ours], found.get(peer)
    return Row(name=name, ours=a.peak_mib, peer=b.peak_mib if b else None, unit="MiB", goal=goal, note=_note(a, b))


def _note(ours: Facts, peer: Facts | None) -> str:
    if peer is None:
        return "peer: see benchmarks/train.py"
    return f"trl {peer.version}; gradient norm {ours.grad_norms[0]:.5f} and {peer.grad_norms[0]:.5f}"


@dataclass(kw_only=True)
class Facts:
    """What one side said of one work."""

    tokens: int
    version: str
    seconds: list[float] = field(default_factory=list)
    """Of each step; the first warms up."""
    cpu_s: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    def add(self, said: dict[str, Any]) -> None:
        """One more step."""
        self.seconds.append(said["seconds"])
        self.cpu_s.append(said["cpu_s"])
        self.grad_norms.append(said["grad_norm"])
        self.peak_mib = said["peak_MiB"]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds[1:])


def measure(
    place: str,
    works: Sequence[str],
    sides: dict[str, str],
    folder: Path,
    *,
    turns: Sequence[Sequence[str]] = (),
    ends: float = math.inf,
    heard: Callable[..., None] = lambda **_: None,
    **paths: str,
) -> dict[str, dict[str, Facts]]:
    """Steps of each side in turn, work by work; a peer that is not installed, or cannot, is left out.

    Args:
        works: of one model, in order of value.
        sides: what each is called -> which of `train_step.SIDES` it is.
        folder: of the model; it is made there first, if it isn't yet.
        turns: who steps in turn with whom, one set after another, in order of value; empty: all with all.
        ends: of `time.monotonic`: what is not done by then is left out.
        heard: told what a side says, as it comes.
        paths: more for the PYTHONPATH of a side, by what it is called.

    Returns:
        By work and side; of a side without two steps of a work there is nothing.
    """
    names = ",".join(works)
    if not (folder / "config.json").exists():
        command = _command(place, names, "model", folder)
        subprocess.run(command, check=True, env=_environment(), timeout=min(LIMIT, ends - time.monotonic()))
    limit = min(LIMIT, ends - time.monotonic())
    found: dict[str, dict[str, Facts]] = {name: {} for name in works}
    with contextlib.ExitStack() as stack:
        started = {
            called: stack.enter_context(Side(_command(place, names, side, folder), limit, paths.get(called, "")))
            for called, side in sides.items()
        }
        for some in turns or [list(sides)]:
            running = {}
            for called in some:
                if (said := started[called].listen()) is not None:
                    heard(side=called, **said)
                    running[called] = started[called]
                    for name in works:
                        found[name][called] = Facts(tokens=WORKS[place][name].total, version=said["version"])
            for name in works:
                _step_in_turn(running, name, WORKS[place][name].steps + 1, found[name], heard)
            for called in some:
                started[called].end()
    return {name: {called: one for called, one in of.items() if len(one.seconds) > 1} for name, of in found.items()}


def _step_in_turn(
    running: dict[str, Side], name: str, rounds: int, found: dict[str, Facts], heard: Callable[..., None]
) -> None:
    for _ in range(rounds):
        for called, side in list(running.items()):
            if (said := side.ask(name)) is None:
                del running[called]
            else:
                found[called].add(said)
                heard(work=name, side=called, **said)


class Side:
    """A process of `benchmarks.train_step`, killed after so many seconds."""

    def __init__(self, command: list[str], limit: float, path: str = "") -> None:
        self._command = command
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(path),
            cwd=Path(__file__).parents[1],
        )
        self._timer = threading.Timer(limit, self._process.kill)

    def __enter__(self) -> Side:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.end()
        self._errors.close()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, word: str) -> dict[str, Any] | None:
        """Its answer; None when it has ended, having said why."""
        with contextlib.suppress(BrokenPipeError):
            print(word, file=self._process.stdin, flush=True)
        return self.listen()

    def listen(self) -> dict[str, Any] | None:
        for facts in _results(self._process.stdout or []):
            return facts
        if self._process.wait() != NOT_INSTALLED:
            self._errors.seek(0)
            print(f"{' '.join(self._command)}: exit code {self._process.returncode}", file=sys.stderr)
            print("".join(self._errors.readlines()[-15:]), file=sys.stderr, flush=True)
        return None


def _results(lines: IO[str] | list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))


def _command(place: str, name: str, side: str, folder: Path) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.train_step", place, name, side, str(folder)]


def _environment(path: str = "") -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": os.pathsep.join([path, *sys.path] if path else sys.path),
    }
