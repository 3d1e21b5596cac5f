"""Our vLLM engine beside bare vLLM on one GPU: speed, weights swapped while it decodes, agreement, routes.

    python -m benchmarks.gpu.rollout --out DIR [--cases bare ours swap fp8 moe]

Each case is a process of its own, with a time limit; results are written as they come (`DIR/rollout.jsonl`), a table
ends the run. Shapes are Qwen3-0.6B's (and a small mixture of experts') with random weights: 256 requests of 64 prompt
tokens and 256 sampled ones.

    bare   vllm.LLM.generate, with and without a seed for each request; logprobs on
    ours   the same requests through roles.engine_vllm
    swap   weights of two random models, one after the other, put into service while 256 requests decode; logprobs of
           the tokens against a transformers model in float32, by the version of their label
    fp8    the engine quantised per 128x128 block: reload and agreement
    moe    Qwen3-MoE shapes: reload, agreement and routes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Row, to_markdown

REQUESTS, PROMPT, TOKENS = 256, 64, 256
CASES = {"bare": 170, "ours": 170, "swap": 170, "fp8": 110, "moe": 110}
"""Name -> time limit in seconds."""

BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "hidden_size": 1024,
    "intermediate_size": 3072,
}
DENSE = BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28}
MOE = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}


def prompts() -> list[list[int]]:
    return [[(7 * i + j) % 1000 + 5 for j in range(PROMPT)] for i in range(REQUESTS)]


def folder_of(config: dict[str, Any]) -> str:
    """A model folder without weights."""
    folder = Path("/tmp") / f"tutti-bench-{config['model_type']}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def settings(config: dict[str, Any], **more: Any) -> Any:
    from roles.rollout_config import RolloutConfig, VllmConfig

    vllm = {"memory": 0.5, "arguments": {"load_format": "dummy"}, **more.pop("vllm", {})}
    return RolloutConfig(
        engine="vllm", dtype="bfloat16", max_running=REQUESTS, max_len=2048, vllm=VllmConfig(**vllm), **more
    )


def bare(say: Any) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder_of(DENSE),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=2048,
        gpu_memory_utilization=0.5,
        max_num_seqs=REQUESTS,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    work = [{"prompt_token_ids": ids} for ids in prompts()]
    for seeded in (False, True):
        for turn in range(3):
            parameters = [
                SamplingParams(
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                    seed=1000 * turn + i if seeded else None,
                )
                for i in range(REQUESTS)
            ]
            began = time.perf_counter()
            outputs = llm.generate(work, parameters, use_tqdm=False)
            seconds = time.perf_counter() - began
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            say(case="bare", seeded=seeded, turn=turn, tokens_per_s=count / seconds)


class Driver:
    """Sends the requests of the benchmark through an engine of ours."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.number = 0

    async def all(self, tokens: int = TOKENS, requests: int = REQUESTS) -> list[Any]:
        """Completions of all requests, in order."""
        from roles.engine import Request
        from roles.types import Sampling

        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: dict[int, Any] = {}
        first = self.number

        def ended(finished: Any) -> None:
            found[finished.request_id - first] = finished.completion
            if len(found) == requests:
                done.set_result(None)

        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        for i, ids in enumerate(prompts()[:requests]):
            self.engine.submit(
                Request(id=first + i, prompt_ids=tuple(ids), seeds=(first + i,), sampling=sampling), ended
            )
        self.number += requests
        await done
        return [found[i] for i in range(requests)]


async def with_engine(config: dict[str, Any], body: Any, **more: Any) -> None:
    from roles.engine_vllm import VllmEngine
    from runtime import TaskGroup

    began = time.perf_counter()
    engine = VllmEngine(folder_of(config), settings(config, **more))
    print(f"engine up after {time.perf_counter() - began:.0f} s", flush=True)
    async with TaskGroup("benchmark") as tasks:
        engine.open(tasks, lambda error: print("failed:", error, flush=True))
        await body(engine, Driver(engine))
        await engine.close()


def ours(say: Any) -> None:
    async def body(engine: Any, driver: Driver) -> None:
        for seeded in (False, True):
            engine._seeded = seeded
            for turn in range(3):
                began = time.perf_counter()
                completions = await driver.all()
                seconds = time.perf_counter() - began
                count = sum(len(c.token_ids) for c in completions)
                say(case="ours", seeded=seeded, turn=turn, tokens_per_s=count / seconds)

    asyncio.run(with_engine(DENSE, body))


def model_of(config: dict[str, Any], seed: int) -> Any:
    """A random transformers model in bfloat16 values, computed in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder_of(config)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def tensors_of(model: Any) -> dict[str, Any]:
    """On CPU, by the names of checkpoints."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to("cpu", torch.bfloat16)
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(part.chunk(2, 0) for part in tensor):
                base = name.removesuffix("gate_up_proj")
                found[f"{base}{e}.gate_proj.weight"], found[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": part for e, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def differences(model: Any, completions: list[Any], version: int) -> Any:
    """|engine - float32| of the tokens of a version, over some completions whose whole context it computed."""
    import numpy as np
    import torch

    found = []
    for ids, completion in zip(prompts(), completions, strict=False):
        if completion.versions[0] != version:
            continue
        row = torch.tensor([[*ids, *completion.token_ids.tolist()]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=row, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, row[0, len(ids) :, None])[:, 0].cpu().numpy()
        found.append(np.abs(expected - completion.logprobs)[completion.versions == version])
    return np.concatenate(found) if found else np.zeros(0)


async def timed_swap(engine: Any, weights: Any, version: int) -> dict[str, float]:
    """Seconds of each part of a swap."""
    parts: dict[str, float] = {}
    call = engine._workers

    async def clocked(method: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = await call(method, *arguments)
        parts[method] = parts.get(method, 0.0) + time.perf_counter() - began
        return result

    engine._workers = clocked
    began = time.perf_counter()
    await engine.swap(weights, version)
    parts["all"] = time.perf_counter() - began
    del engine._workers
    return parts


def swap(say: Any) -> None:
    reload(DENSE, say, "swap", decode=True)


def fp8(say: Any) -> None:
    reload(DENSE, say, "fp8", decode=False, vllm={"quantization": "fp8_per_block", "eager": True})


def moe(say: Any) -> None:
    reload(MOE, say, "moe", decode=False, vllm={"eager": True}, record_routes=True)


def reload(config: dict[str, Any], say: Any, case: str, *, decode: bool, **more: Any) -> None:
    async def body(engine: Any, driver: Driver) -> None:
        models = [model_of(config, seed) for seed in (1, 2, 3)]
        weights = [tensors_of(model) for model in models]
        await engine.swap(weights[0], 1)
        await driver.all(8)  # warm
        if decode:
            began = time.perf_counter()
            await driver.all()
            alone = time.perf_counter() - began
            running = asyncio.ensure_future(driver.all())
            began = time.perf_counter()
            await asyncio.sleep(alone / 3)
            for number in (2, 3):
                say(case=case, version=number, **await timed_swap(engine, weights[number - 1], number))
            completions = await running
            seconds = time.perf_counter() - began
            say(case=case, seconds_alone=alone, seconds_with_two_swaps=seconds)
            versions = sorted({int(v) for c in completions for v in c.versions})
            borders = [int((c.versions == 1).sum()) for c in completions]
            say(case=case, versions=versions, border_least=min(borders), border_most=max(borders))
            first = differences(models[0], completions[:24], 1)
            say(case=case, tokens=len(first), mean_before=float(first.mean()), max_before=float(first.max()))
        else:
            for number in (2, 3):
                say(case=case, version=number, **await timed_swap(engine, weights[number - 1], number))
        completions = await driver.all(64, 24)
        after = differences(models[2], completions, 3)
        wrong = differences(models[1], completions, 3)
        say(
            case=case,
            tokens=len(after),
            mean_after=float(after.mean()),
            max_after=float(after.max()),
            mean_to_other_weights=float(wrong.mean()),
        )
        if completions[0].routes is not None:
            say(case=case, routes=list(completions[0].routes.shape), routes_dtype=str(completions[0].routes.dtype))
        (scores,) = await engine.score([prompts()[0]])
        import numpy as np
        import torch

        with torch.no_grad():
            row = torch.tensor([prompts()[0]], device="cuda")
            expected = models[2](input_ids=row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        gap = np.abs(expected.gather(1, row[0, 1:, None])[:, 0].cpu().numpy() - scores)
        say(case=case, score_mean=float(gap.mean()), score_max=float(gap.max()))

    asyncio.run(with_engine(config, body, **more))


def rows(results: list[dict[str, Any]]) -> list[Row]:
    def best(case: str, seeded: bool) -> float | None:
        rates = [r["tokens_per_s"] for r in results if r["case"] == case and r.get("seeded") is seeded]
        return max(rates, default=None)

    def value(case: str, key: str) -> float | None:
        found: list[float] = [r[key] for r in results if r["case"] == case and key in r]
        return found[-1] if found else None

    table = [
        Row(
            name=f"{REQUESTS} x {TOKENS} tokens, {'a seed each' if seeded else 'no seeds'}",
            ours=best("ours", seeded),
            peer=best("bare", seeded),
            unit="tokens/s",
            goal=">= 0.98x",
            note="peer: vllm.LLM.generate",
        )
        for seeded in (False, True)
    ]
    alone, disturbed = value("swap", "seconds_alone"), value("swap", "seconds_with_two_swaps")
    if alone and disturbed:
        table.append(Row(name="batch with two swaps in it", ours=alone / disturbed, note="share of undisturbed speed"))
    pause = value("swap", "tutti_swap")
    if pause is not None:
        table.append(Row(name="pause of a swap, 0.6B", ours=1000 * pause, unit="ms", goal="<= 50"))
    table += [
        Row(
            name=f"{case}: logprobs after the reload, mean |difference|",
            ours=value(case, "mean_after"),
            goal="<= 0.005" if case != "fp8" else "",
            note="float32 transformers",
        )
        for case in ("swap", "fp8", "moe")
    ]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rollout")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    file = options.out / "rollout.jsonl"

    def say(**facts: Any) -> None:
        line = json.dumps(facts, default=str)
        print(line, flush=True)
        with file.open("a") as out:
            out.write(line + "\n")

    if options.case:
        {"bare": bare, "ours": ours, "swap": swap, "fp8": fp8, "moe": moe}[options.case](say)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        began = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.gpu.rollout", "--out", str(options.out), "--case", case]
        with (options.out / f"{case}.log").open("w") as log:
            try:
                code: int | str = subprocess.run(command, timeout=CASES[case], stdout=log, stderr=log).returncode
            except subprocess.TimeoutExpired:
                code = "too long"
        print(f"{case}: {code}, {time.perf_counter() - began:.0f} s", flush=True)
        if code:
            print((options.out / f"{case}.log").read_text()[-2500:], flush=True)
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(to_markdown(rows(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
