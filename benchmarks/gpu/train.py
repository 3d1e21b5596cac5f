"""Training steps on NVIDIA GPUs: utilisation, memory and what parallelism and offload cost.

    python -m benchmarks.gpu.train [--out DIR] [--gpus 0 1] [--cases mfu offload deep logprobs ...]

Random weights in the shapes of Qwen3. `pairs` and `shards` need two GPUs, the others one: those run beside each other,
one on each of `--gpus`. Each case is a process of its own with a limit; each line is printed as it comes and written to
DIR/train.jsonl, so that a run that is cut short has said what it knew. Without a GPU the cases run in small on the
CPU, to see that they run.

Model FLOPs of a step (utilisation is these over seconds over the card's dense bf16 peak, 989 TFLOP/s on H200):
    6 x (parameters of all matrices, head included, embedding not) x tokens      products, forward and backward
    + 6 x layers x heads x head_dim x sum(length^2)                              attention, causal
Recomputed activations are work of the machine, not of the model, and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from benchmarks.table import Row, to_markdown

MODULES = {
    **dict.fromkeys(("checks", "logprobs", "attention", "kernels"), "train_parts"),
    **dict.fromkeys(("mfu", "offload", "deep", "shards"), "train_torch"),
    **dict.fromkeys(("megatron", "pairs"), "train_megatron"),
}
"""Where each case is."""
CASES = ("checks", "mfu", "offload", "deep", "logprobs", "attention", "kernels", "megatron", "pairs", "shards")
SECONDS = {"checks": 45, "mfu": 110, "offload": 110, "deep": 120, "logprobs": 45, "attention": 45, "kernels": 60}
"""Limit of each case; what it has not said by then stays unsaid."""
LIMIT = 150
"""Of the cases without one."""


def rows_of(results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for result in results:
        name = result["case"]
        if "mfu" in result:
            goal = ">= 40" if "compiled" in name else ""
            note = f"{result['tokens_per_s']:.0f} tokens/s, {result['peak_GiB']:.0f} GiB"
            rows.append(Row(name=name, ours=100 * result["mfu"], unit="% MFU", goal=goal, note=note))
        elif "step_s" in result:
            note = f"{result['tokens_per_s']:.0f} tokens/s, {result['peak_GiB']:.1f} GiB"
            rows.append(Row(name=name, ours=min(result["step_s"][1:]), unit="s", note=note))
        elif "ours_GiB" in result and "peer_GiB" in result:
            rows.append(Row(name=name, ours=result["ours_GiB"], peer=result["peer_GiB"], unit="GiB", goal="<= 0.7x"))
            rows.append(Row(name="the same, time", ours=result["ours_ms"], peer=result["peer_ms"], unit="ms"))
        elif "ours_ms" in result:
            rows.append(Row(name=name, ours=result["ours_ms"], peer=result["peer_ms"], unit="ms", note="peer: torch"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--gpus", nargs="*", default=["0"])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        getattr(importlib.import_module(f"benchmarks.gpu.{MODULES[options.case]}"), f"case_{options.case}")()
        return 0
    with (options.out / "train.jsonl").open("a") as record:
        runner = Runner(record)
        together = [case for case in options.cases if case in ("pairs", "shards")]
        runner.side_by_side([case for case in options.cases if case not in together], options.gpus)
        for case in together:
            runner.case(case, ",".join(options.gpus))
    print(to_markdown(rows_of(runner.results)))
    return 0


class Runner:
    """Cases as processes; what they say is kept at once."""

    def __init__(self, record: IO[str]) -> None:
        self.results: list[dict[str, Any]] = []
        self._record = record
        self._lock = threading.Lock()

    def side_by_side(self, cases: list[str], gpus: list[str]) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            waiting.put(case)

        def work(gpu: str) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.case(waiting.get_nowait(), gpu)

        threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def case(self, case: str, gpus: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.train", "--case", case]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpus,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            timer = threading.Timer(SECONDS.get(case, LIMIT), os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
            reader.start()
            for line in process.stdout or ():
                if line.startswith("RESULT "):
                    self._keep(line)
            reader.join()
            timer.cancel()
        spent = time.perf_counter() - began
        with self._lock:
            print(f"{case}: exit code {process.returncode}, {spent:.0f} s", flush=True)
            if process.returncode:
                print("".join(errors[-15:]), flush=True)

    def _keep(self, line: str) -> None:
        with self._lock:
            print(line, end="", flush=True)
            self._record.write(line.removeprefix("RESULT "))
            self._record.flush()
            self.results.append(json.loads(line.removeprefix("RESULT ")))


if __name__ == "__main__":
    sys.exit(main())
