"""Where the time of a step goes at the sizes people train: the shapes of Qwen3-0.6B and 8B with random weights.

    python -m benchmarks.gpu.shapes --out DIR [--cases 0.6B 8B]

Trainer on the first GPU, vLLM on the last, S = 1, 16 prompts x 8 samples of 128 tokens a step, bfloat16. The reward
says nothing (whether the text has an even number of characters), so that weights move and are sent as in any run. 8B
trains with the moments of Adam in CPU memory and activations recomputed: 8 billion parameters in float32 with their
gradients fill half of an H200.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import ROOT, end_well, failed_rows, measured, read_facts, run_case, saying, shown
from benchmarks.gpu.moe import write_model
from benchmarks.gpu.sync_ranks import SIZES
from benchmarks.table import Row, to_markdown

FILE = "shapes.jsonl"
COMMON = [
    "staleness=1",
    "trainer.lr=1e-6",
    "trainer.dtype=bfloat16",
    "rollout.engine=vllm",
    "rollout.dtype=bfloat16",
    "rollout.prove_every=0",
    "reward.verifier=benchmarks.gpu.moe:even",
    "evaluation.prompts=0",
    "checkpoint.every=0",
    "watch.min_correlation=0",
]
ON_GPU = ["grpo.prompts_per_step=16", "sampling.max_tokens=128", "reward.workers=4", "rollout.vllm.memory=0.5"]
CASES = {
    "0.6B": ["trainer.token_budget=32768"],
    "8B": [
        "trainer.token_budget=16384",
        "trainer.offload_optimizer=true",
        "trainer.activation_checkpointing=true",
    ],
}
TINY = [
    "rollout.max_running=32",
    "grpo.prompts_per_step=4",
    "grpo.samples_per_prompt=4",
    "sampling.max_tokens=24",
    "data.max_prompt_tokens=64",
]
TINY_SHAPES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def rows(found: list[dict[str, Any]]) -> list[Row]:
    table = []
    for facts in found:
        name = facts["name"]
        table += failed_rows(facts)
        if not measured(facts):
            continue
        parts = ", ".join(f"{part} {shown(seconds, '.2f')}" for part, seconds in facts["parts_s"].items())
        rate, idle = shown(facts["tokens_per_s"], ".0f"), shown(facts["idle_rollout"], ".0%")
        note = f"{parts} s; {rate} trained tokens/s, idle rollout {idle}"
        table.append(Row(name=f"{name}: step", ours=facts["step_s"], unit="s", note=note))
        note = f"{shown(facts['sync_bytes'], '.2f', 1e-9)} GB, from the end of a step to the swap"
        seconds = None if facts["sync_ms"] is None else facts["sync_ms"] / 1000
        table.append(Row(name=f"{name}: publish", ours=seconds, unit="s", note=note))
        goal = "<= 50" if name == "8B" else ""
        table.append(Row(name=f"{name}: pause of generation", ours=facts["pause_ms"], unit="ms", goal=goal))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.shapes")
    parser.add_argument("--out", type=Path, default=Path("shapes"))
    parser.add_argument("--model", default="/tmp/smollm2", help="whose tokenizer to take")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=200, help="most seconds of a case, start included")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU")
    options = parser.parse_args()
    end_well()
    out = options.out.resolve()
    tokenizer = ROOT / "recipes" / "start_policy" if options.tiny else Path(options.model)
    out.mkdir(parents=True, exist_ok=True)
    with saying(out, FILE) as say:
        for case in options.cases:
            began = time.monotonic()
            kind = "-tiny" if options.tiny else ""
            model = write_model(Path(f"/tmp/tutti-qwen3-{case}{kind}"), tokenizer, TINY_SHAPES if kind else SIZES[case])
            steps = 5 if kind else options.steps
            settings = [f"model.path={model}", f"steps={steps}", *COMMON, *(TINY if kind else ON_GPU)]
            left = options.seconds - (time.monotonic() - began)
            run_case(say, f"qwen3_{case}", [*settings, *([] if kind else CASES[case])], out, left, case)
    print(to_markdown(rows(read_facts(out, FILE))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
