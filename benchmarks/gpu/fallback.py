"""vLLM's own ways to move weights in a real job, beside ours: `rollout.vllm.weight_transfer`.

    python -m benchmarks.gpu.fallback --out DIR [--cases nccl ipc kill sync2 sync1]

Qwen3-0.6B shapes with random weights, S = 1, 16 prompts x 8 samples of 128 tokens a step, bfloat16; the engine is asked
for the trainer's logprobs after every publication (`rollout.prove_every = 1`), so a case that ends well has served the
weights that it was sent. Each case is a job of its own, written down as it ends (`DIR/fallback.jsonl`).

    nccl    trainer on the first GPU, vLLM on the second, weights by vLLM's nccl engine
    ipc     both on the first GPU, weights by vLLM's ipc engine
    kill    as nccl; vLLM's engine is killed after four steps, and four more must follow with exact books
    sync2   as nccl by our own way
    sync1   as ipc by our own way
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import ROOT, Launch, end_well, last_lines, named, read_facts, run_case, saying
from benchmarks.gpu.moe import write_model
from benchmarks.gpu.shapes import COMMON, ON_GPU, TINY, TINY_SHAPES
from benchmarks.gpu.sync_ranks import SIZES
from benchmarks.table import Row, to_markdown

FILE = "fallback.jsonl"
CASES = {"nccl": ("nccl", 2), "ipc": ("ipc", 1), "kill": ("nccl", 2), "sync2": ("sync", 2), "sync1": ("sync", 1)}
"""Name -> (weight_transfer, GPUs)."""
PROVEN = ["rollout.prove_every=1", "rollout.vllm.eager=true", "rollout.probe_seconds=0.5"]
STEPS = 4
"""Before and after the kill."""


@contextlib.contextmanager
def seeing(count: int) -> Iterator[None]:
    """Jobs that begin meanwhile see the first GPUs alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    given = before.split(",") if before else [str(gpu) for gpu in range(8)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given[:count])
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def killed(say: Callable[[dict[str, Any]], None], settings: list[str], out: Path, seconds: float) -> None:
    """SIGKILL of the engine of a job that runs."""
    until = time.monotonic() + seconds
    with Launch("fallback_kill", settings, out) as running:

        def steps() -> int:
            return sum("time/step" in record for record in running.records())

        running.wait_for(lambda _: steps() >= STEPS, seconds)
        before, began = steps(), time.monotonic()
        engines = named(running.process.pid, "VLLM::Engine")
        for pid in engines[:1]:
            os.kill(pid, signal.SIGKILL)
        back = running.wait_for(lambda _: steps() >= before + STEPS, until - time.monotonic())
        recovered = time.monotonic() - began
        running.process.send_signal(signal.SIGTERM)
        run = running.finish(30)
    say({**run.as_facts(), "name": "kill", "killed": len(engines), "recovered_s": recovered if back else None})
    if not back:
        print(last_lines(out / "fallback_kill.log"), flush=True)


def rows(found: list[dict[str, Any]]) -> list[Row]:
    table = []
    for facts in found:
        name = facts["name"]
        note = f"exit code {facts['code']}, {facts['steps']} steps, books exact: {facts['exact']}"
        if name == "kill":
            table.append(Row(name="kill: until four more steps", ours=facts["recovered_s"], unit="s", note=note))
            continue
        gap = f"{note}; mean gap of logprobs {facts['gap'] or 0:.4f}"
        table.append(Row(name=f"{name}: publish", ours=facts["sync_ms"], unit="ms", note=gap))
        table.append(Row(name=f"{name}: pause of generation", ours=facts["pause_ms"], unit="ms"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.fallback")
    parser.add_argument("--out", type=Path, default=Path("fallback"))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=200, help="most seconds of a case, start included")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the jobs")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU, by our own way in every case")
    options = parser.parse_args()
    end_well()
    out = options.out.resolve()
    shapes = TINY_SHAPES if options.tiny else SIZES["0.6B"]
    folder = Path("/tmp") / f"tutti-qwen3-fallback{'-tiny' if options.tiny else ''}"
    model = write_model(folder, ROOT / "recipes" / "start_policy", shapes)
    common = [f"model.path={model}", *COMMON, *PROVEN]
    common += TINY if options.tiny else [*ON_GPU, "rollout.vllm.memory=0.3", "trainer.token_budget=32768"]
    with saying(out, FILE) as say:
        for case in options.cases:
            way, gpus = CASES[case]
            way = "sync" if options.tiny else way
            settings = [*common, f"rollout.vllm.weight_transfer={way}", *options.set]
            with seeing(gpus):
                if case == "kill":
                    killed(say, [*settings, "steps=2000"], out, options.seconds)
                else:
                    run_case(say, f"fallback_{case}", [*settings, f"steps={options.steps}"], out, options.seconds, case)
    print(to_markdown(rows(read_facts(out, FILE))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
