"""Replayed routes: KL between rollout and trainer of a mixture of experts, with and without.

    python -m benchmarks.gpu.moe --out DIR [--cases replay plain] [--layout ep|tp|one]

Qwen3-MoE shapes with random weights (8 layers, 32 experts, 4 per token): megatron-core on both GPUs, experts split over
them, vLLM beside it on the first, both in bfloat16. The policy trains on a reward that says nothing (whether the text
has an even number of characters), so that weights move and are sent as in any run.

    replay  `rollout.record_routes`: the trainer takes the experts that the engine used
    plain   each side routes by itself: near-ties fall either way in bfloat16
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import ROOT, end_well, failed_rows, read_facts, run_case, saying, shown
from benchmarks.table import Row, to_markdown
from roles.types import Prompt

FILE = "moe.jsonl"
CASES = {"replay": ["rollout.record_routes=true"], "plain": ["rollout.record_routes=false"]}
LAYOUTS = {
    "ep": ["trainer.backend=megatron", "trainer.ranks=2", "trainer.expert_parallel=2"],
    "tp": ["trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2"],
    "one": ["trainer.backend=megatron"],
    "fsdp": ["trainer.backend=fsdp"],
}
COMMON = [
    "staleness=0",
    "trainer.lr=1e-5",
    "rollout.engine=vllm",
    "rollout.vllm.eager=true",
    "rollout.vllm.memory=0.15",
    "rollout.prove_every=0",
    "reward.verifier=benchmarks.gpu.moe:even",
    "evaluation.prompts=0",
    "checkpoint.every=0",
    "watch.min_correlation=0",
    "sampling.max_tokens=64",
]
ON_GPU = [
    "trainer.dtype=bfloat16",
    "trainer.token_budget=8192",
    "rollout.dtype=bfloat16",
    "rollout.vllm.arguments.kv_cache_memory_bytes=6442450944",  # other engines may start at the same time
    "grpo.prompts_per_step=32",
    "reward.workers=4",
]
TINY = [
    "trainer.dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "rollout.max_running=32",
    "grpo.prompts_per_step=4",
    "grpo.samples_per_prompt=4",
    "data.max_prompt_tokens=64",
]
SHAPES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
TINY_SHAPES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
EVERY: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,  # of trained models: routers and heads that prefer something
}


def even(prompt: Prompt, text: str) -> float:
    """A verifier that no policy can have an opinion about."""
    return float(len(text) % 2 == 0)


def write_model(folder: Path, tokenizer: Path, shapes: dict[str, Any]) -> str:
    """A random model of these shapes, with the tokenizer of another. Once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return str(folder)
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = AutoConfig.for_model(
        **{"vocab_size": json.loads((tokenizer / "config.json").read_text())["vocab_size"], **EVERY, **shapes},
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.cpu().save_pretrained(partial)
    words.save_pretrained(partial)
    partial.rename(folder)
    torch.cuda.empty_cache()  # the job that comes next shares the GPU with this process
    return str(folder)


def rows(found: list[dict[str, Any]]) -> list[Row]:
    table = []
    for facts in found:
        name = facts["name"]
        table += failed_rows(facts)
        if facts["kl_k3"] is None:
            continue
        gap, ess, step = (shown(facts[key], form) for key, form in (("gap", ".4f"), ("ess", ".4f"), ("step_s", ".2f")))
        note = f"{facts['steps']} steps of {step} s, gap {gap} nat, ESS {ess}"
        table.append(Row(name=f"{name}: KL(rollout || trainer), k3", ours=facts["kl_k3"], unit="nat", note=note))
    kl = {facts["name"].split()[0]: facts["kl_k3"] for facts in found if facts["kl_k3"]}
    if len(kl) == len(CASES):
        table.append(Row(name="KL with replay, of the one without", ours=kl["replay"] / kl["plain"], goal="<= 0.5"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.moe")
    parser.add_argument("--out", type=Path, default=Path("moe"))
    parser.add_argument("--model", default="/tmp/smollm2", help="whose tokenizer to take")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--layout", default="ep", choices=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of a case, start included")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU")
    options = parser.parse_args()
    end_well()
    out = options.out.resolve()
    tokenizer = ROOT / "recipes" / "start_policy" if options.tiny else Path(options.model)
    layout = "fsdp" if options.tiny else options.layout
    shapes, common = (TINY_SHAPES, TINY) if options.tiny else (SHAPES, ON_GPU)
    out.mkdir(parents=True, exist_ok=True)
    model = write_model(Path(f"/tmp/tutti-moe{'-tiny' if options.tiny else ''}"), tokenizer, shapes)
    with saying(out, FILE) as say:
        for case in options.cases:
            steps = min(options.steps, 5) if options.tiny else options.steps
            settings = [f"model.path={model}", f"steps={steps}", *COMMON, *common, *LAYOUTS[layout]]
            run_case(say, f"moe_{case}", [*settings, *CASES[case]], out, options.seconds, f"{case} {layout}")
    print(to_markdown(rows(read_facts(out, FILE))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
