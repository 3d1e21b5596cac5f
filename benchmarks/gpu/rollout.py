"""Our vLLM engine beside bare vLLM on GPUs: speed, what new weights cost, agreement, SIGKILL.

    python -m benchmarks.gpu.rollout --out DIR [--gpus 0 1] [--cases ours bare swap8 moe fp8 kill fp16 tp2]

Each case is a process of its own with a time limit; cases that need one GPU run one on each at the same time. Results
are written as they come (`DIR/rollout.jsonl`), a table ends the run. Weights come from another process by a
WeightSession, on the GPU of the engine or, in cases that take two, on the other one. Shapes are Qwen3-0.6B's (8B's, and
a small mixture of experts') with random weights: 256 requests of 64 prompt tokens and 256 sampled ones.

    ours   256 requests through roles.engine_vllm; two versions published while they decode: from the call to the last
           swap, and the pause; logprobs against transformers in float32, by the version of their label; then all that
           with a head in float32
    ours2  publications of the same shapes from the other GPU, and a batch with two of them in it
    bare   the same requests through vllm.LLM.generate, with and without a seed each
    swap8  as `ours2` with the shapes of Qwen3-8B, from the other GPU
    swap8one   the same with both on one GPU
    moe    Qwen3-MoE shapes: swap, agreement, with and without tokens whose experts differ; routes
    fp8    the engine quantised per 128x128 block: swap and agreement
    fp8_channel  the same per channel, with CUDA graphs: publications, also with a batch under way
    fp16   agreement of an engine in float16
    kill   SIGKILL of vLLM's engine process: memory of the GPU back, calls answered by a new one, nothing left behind
    tp2    a replica on two GPUs: swap and agreement
    speculative  drafts (n-gram, the policy itself, its first layers) beside none, for 8 and for all requests: speed,
           how many are kept, whether the tokens are those without a draft, agreement, versions over a publication
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.lanes import Lanes
from benchmarks.gpu.rollout_ranks import Pair, device, model_of, pair
from benchmarks.table import Row, to_markdown

TINY = bool(os.environ.get("TUTTI_TINY"))
"""Shapes for trying this program out, on a CPU too."""
REQUESTS, PROMPT, TOKENS = (8, 16, 32) if TINY else (256, 64, 256)
CASES = {
    "ours": (1, 150),
    "bare": (1, 120),
    "swap8": (2, 130),
    "swap8one": (1, 130),
    "ours2": (2, 90),
    "moe": (1, 110),
    "fp8": (1, 110),
    "fp8_channel": (1, 150),
    "kill": (1, 150),
    "fp16": (1, 80),
    "tp2": (2, 120),
    "speculative": (1, 400),
}
"""Name -> (GPUs, time limit in seconds)."""
SWAPPED = (
    ("ours", "0.6B, one GPU"),
    ("ours2", "0.6B, two GPUs"),
    ("swap8one", "8B, one GPU"),
    ("swap8", "8B, two GPUs"),
    ("fp8", "0.6B FP8"),
    ("fp8_channel", "0.6B FP8 per channel"),
    ("moe", "MoE"),
    ("tp2", "0.6B TP2"),
)

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
LARGE = DENSE | {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
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
if TINY:
    for shapes in (DENSE, LARGE, MOE):
        shapes |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048}
        shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    MOE |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
Say = Callable[..., None]


def taken_bytes() -> int:
    """Memory of the first GPU that is in use."""
    import torch

    free, whole = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return whole - free


def prompts() -> list[list[int]]:
    return [[(7 * i + j) % 1000 + 5 for j in range(PROMPT)] for i in range(REQUESTS)]


def folder_of(config: dict[str, Any]) -> str:
    """A model folder without weights."""
    folder = Path("/tmp") / f"tutti-bench-{config['model_type']}-{config['hidden_size']}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def settings(config: dict[str, Any], **more: Any) -> Any:
    from roles.rollout_config import RolloutConfig, VllmConfig

    vllm = {"memory": 0.5, "arguments": {"load_format": "dummy"}, **more.pop("vllm", {})}
    given = {"dtype": "bfloat16", "max_running": REQUESTS, "max_len": 2048, **more}
    return RolloutConfig(engine="vllm", vllm=VllmConfig(**vllm), **given)


def bare(say: Say) -> None:
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


def differences(model: Any, completions: list[Any], version: int) -> Any:
    """|engine - float32| of the tokens of a version, over completions whose whole context it computed."""
    import numpy as np
    import torch

    found = []
    for ids, completion in zip(prompts(), completions, strict=False):
        if completion.versions[0] != version:
            continue
        row = torch.tensor([[*ids, *completion.token_ids.tolist()]], device=device())
        with torch.no_grad():
            logits = model(input_ids=row, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, row[0, len(ids) :, None])[:, 0].cpu().numpy()
        found.append(np.abs(expected - completion.logprobs)[completion.versions == version])
    return np.concatenate(found) if found else np.zeros(0)


def run(config: dict[str, Any], body: Any, seeds: tuple[int, ...] = (1, 2, 3), **more: Any) -> None:
    async def inside() -> None:
        async with pair(folder_of(config), settings(config, **more), prompts(), seeds) as both:
            await body(both)

    asyncio.run(inside())


async def speed(both: Pair, say: Say, case: str, **facts: Any) -> None:
    for seeded in (False, True):
        for turn in range(3):
            seconds, completions = await both.all(TOKENS, REQUESTS, seeded=seeded)
            count = sum(len(c.token_ids) for c in completions)
            say(case=case, seeded=seeded, turn=turn, tokens_per_s=count / seconds, **facts)


async def agreement(both: Pair, model: Any, other: Any, say: Say, case: str, **facts: Any) -> list[Any]:
    """Of 24 completions with `model`'s logprobs, and, for scale, with those of other weights."""
    _, completions = await both.all(min(64, TOKENS), min(24, REQUESTS))
    version = int(completions[0].versions[-1])
    gap, wrong = (differences(one, completions, version) for one in (model, other))
    tokens = len(gap)
    say(case=case, tokens=tokens, mean=float(gap.mean()), most=float(gap.max()), other=float(wrong.mean()), **facts)
    return completions


async def disturbed(both: Pair, say: Say, case: str, tokens: int, first: int) -> list[Any]:
    """A batch alone, and one with two publications in it; returns the completions of the latter."""
    alone, _ = await both.all(tokens, REQUESTS)
    running = asyncio.ensure_future(both.all(tokens, REQUESTS))
    await asyncio.sleep(alone / 4)
    say(case=case, busy_call_ms=await both.replica.call_ms.call_one())
    for version in (first, first + 1):
        say(case=case, busy=True, **await both.publish(version))
    seconds, completions = await running
    say(case=case, seconds_alone=alone, seconds_with_two_swaps=seconds)
    return completions


def ours(say: Say) -> None:
    async def body(both: Pair) -> None:
        models = [model_of(folder_of(DENSE), seed) for seed in (1, 2, 3)]
        say(case="ours", recorded=True, **await both.publish(1))
        await both.all(8, REQUESTS)  # warm
        say(case="ours", idle_call_ms=await both.replica.call_ms.call_one())
        await speed(both, say, "ours")
        completions = await disturbed(both, say, "ours", TOKENS, 2)
        seen = {len(set(c.versions.tolist())) for c in completions}
        say(case="ours", versions_of_a_completion=sorted(seen))
        gap = differences(models[0], completions[:24], 1)
        say(case="ours", label=1, tokens=len(gap), mean=float(gap.mean()) if len(gap) else None)
        await agreement(both, models[2], models[1], say, "ours", head="model")
        say(case="ours", probe_ms=await both.replica.score_ms.call_one())
        await both.replica.widen.call_one()
        await agreement(both, models[2], models[1], say, "ours", head="float32")
        await speed(both, say, "ours", head="float32")

    run(DENSE, body)


def published(config: dict[str, Any], say: Say, case: str, **more: Any) -> None:
    """Times only: any numbers do."""

    async def body(both: Pair) -> None:
        for version in (1, 2, 3):
            say(case=case, **({"recorded": True} if version == 1 else {}), **await both.publish(version))
        await both.all(8, REQUESTS)
        await disturbed(both, say, case, TOKENS // 2, 4)

    run(config, body, (), **more)


def ours2(say: Say) -> None:
    published(DENSE, say, "ours2")


def swap8(say: Say) -> None:
    published(LARGE, say, "swap8", vllm={"eager": True})


def swap8one(say: Say) -> None:
    published(LARGE, say, "swap8one", vllm={"eager": True})


def fp8(say: Say) -> None:
    swapped(DENSE, say, "fp8", vllm={"quantization": "fp8_per_block", "eager": True})


def fp8_channel(say: Say) -> None:
    published(DENSE, say, "fp8_channel", vllm={"quantization": "fp8_per_channel"})


def fp16(say: Say) -> None:
    swapped(DENSE, say, "fp16", vllm={"eager": True}, dtype="float16")


def tp2(say: Say) -> None:
    swapped(DENSE, say, "tp2", vllm={"eager": True, "tensor_parallel": 2})


def moe(say: Say) -> None:
    swapped(MOE, say, "moe", vllm={"eager": True}, record_routes=True)


def speculative(say: Say) -> None:
    from benchmarks.gpu.rollout_drafts import speculative

    speculative(say)


def swapped(config: dict[str, Any], say: Say, case: str, **more: Any) -> None:
    """Three publications, the last two after the proof, and agreement; then with a wide head."""

    async def body(both: Pair) -> None:
        models = [model_of(folder_of(config), seed) for seed in (1, 2, 3)]
        for number in (1, 2, 3):
            say(case=case, **({"recorded": True} if number == 1 else {}), **await both.publish(number))
        completions = await agreement(both, models[2], models[1], say, case, head="model")
        if config is MOE:
            routed(models[2], completions, say)
        await both.replica.widen.call_one()
        await agreement(both, models[2], models[1], say, case, head="float32")

    run(config, body, **more)


def routed(model: Any, completions: list[Any], say: Say) -> None:
    """How far tokens are off whose experts, and all before them, are those of float32: the rest is the router's."""
    import numpy as np
    import torch

    clean, flipped, tokens = [], 0, 0
    for ids, completion in zip(prompts(), completions, strict=False):
        seen: list[Any] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[2]))
            for layer in model.model.layers
        ]
        (gap,) = [differences_of(model, ids, completion)]
        for hook in hooks:
            hook.remove()
        theirs = np.sort(torch.stack(seen, dim=1).cpu().numpy()[:-1])
        same = (np.sort(completion.routes) == theirs[: len(completion.routes)]).all((1, 2))
        good = np.minimum.accumulate(same.astype(bool))[len(ids) - 1 :]
        clean.append(gap[good[: len(gap)]])
        flipped += int((~same).sum())
        tokens += len(same)
    found = np.concatenate(clean)
    mean = float(found.mean()) if len(found) else None
    say(case="moe", tokens_rerouted=flipped / tokens, tokens_clean=len(found), mean_of_clean=mean)
    routes = completions[0].routes
    say(case="moe", routes=list(routes.shape), routes_dtype=str(routes.dtype))


def differences_of(model: Any, ids: list[int], completion: Any) -> Any:
    import numpy as np
    import torch

    row = torch.tensor([[*ids, *completion.token_ids.tolist()]], device=device())
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, len(ids) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, row[0, len(ids) :, None])[:, 0].cpu().numpy()
    return np.abs(expected - completion.logprobs)


def kill(say: Say) -> None:
    asyncio.run(_kill(say))


def what_is(pid: int) -> str:
    """Name and command line of a process."""
    texts = [Path(f"/proc/{pid}/{file}") for file in ("comm", "cmdline")]
    return " ".join(text.read_text() for text in texts if text.exists())


async def _kill(say: Say) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from roles.rollout import Rollout
    from roles.types import Prompt, Sampling
    from roles.vllm_leftovers import children_of
    from runtime import TaskGroup, this_host

    path = folder_of(DENSE)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    shared = set(os.listdir("/dev/shm"))
    before = taken_bytes()
    began = time.perf_counter()
    config = settings(DENSE, probe_seconds=0.5, vllm={"eager": True, "memory": 0.3})
    sampling = Sampling(max_tokens=500 if TINY else 1000, ignore_eos=True)
    prompt = Prompt(position=0, text="", token_ids=tuple(prompts()[0]), task="", entry={})
    async with this_host() as host, TaskGroup("kill") as tasks:
        rollout = await Rollout.start(host, config, path)
        say(case="kill", start_s=time.perf_counter() - began)
        watch = tasks.forever(rollout.watch(), name="watch")
        calls = [asyncio.ensure_future(rollout.group(prompt, 2, sampling, seed)) for seed in range(8)]
        while (await rollout.stats())[0].running == 0:  # noqa: ASYNC110  # another process's
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert rollout.procs is not None
        children = children_of(rollout.procs.pids[0])
        named = [pid for pid in children if "EngineCore" in what_is(pid)]
        engine = (named or children[-1:])[0]
        taken = taken_bytes() - before
        os.kill(engine, signal.SIGKILL)
        killed = time.perf_counter()
        while taken_bytes() - before > taken / 10 and time.perf_counter() - killed < 30:  # noqa: ASYNC110  # a device's
            await asyncio.sleep(0.01)
        say(case="kill", taken_gib=taken / 2**30, memory_back_s=time.perf_counter() - killed)
        groups = await asyncio.gather(*calls)
        seconds = time.perf_counter() - killed
        say(case="kill", answered=len(groups), recovered_s=seconds, restarts=rollout.restarted)
        watch.cancel()
    await asyncio.sleep(1.0)
    left = sorted(set(os.listdir("/dev/shm")) - shared)
    say(case="kill", left_in_shared_memory=left, left_gib=(taken_bytes() - before) / 2**30)


def rows(results: list[dict[str, Any]]) -> list[Row]:
    def best(case: str, seeded: bool, head: str | None = None) -> float | None:
        mine = [r for r in results if r["case"] == case and r.get("seeded") is seeded and r.get("head") == head]
        return max([r["tokens_per_s"] for r in mine], default=None)

    def value(case: str, key: str, **where: Any) -> float | None:
        mine = [r for r in results if r["case"] == case and key in r and not r.get("recorded")]
        found = [r[key] for r in mine if all(r.get(k) == v for k, v in where.items())]
        return found[-1] if found else None

    def way(case: str) -> str:
        return next((f"by {r['transport']}" for r in results if r["case"] == case and "transport" in r), "")

    table = []
    for seeded in (False, True):
        what = f"{REQUESTS} x {TOKENS} tokens, {'a seed each' if seeded else 'no seeds'}"
        peer = best("bare", seeded)
        note = "peer: vllm.LLM.generate"
        table.append(Row(name=what, ours=best("ours", seeded), peer=peer, unit="tokens/s", goal=">= 0.98x", note=note))
        wide = best("ours", seeded, "float32")
        table.append(Row(name=f"{what}, head in float32", ours=wide, peer=peer, unit="tokens/s", note=note))
    for case, shapes in SWAPPED:
        host, on_device = value(case, "pause_host_ms"), value(case, "pause_device_ms")
        if host is not None and on_device is not None:
            row = Row(name=f"pause of a swap, {shapes}", ours=max(host, on_device), unit="ms", goal="<= 50")
            table.append(row)
        share = value(case, "share_host_ms")
        if share:
            note = "longest of those between steps, before the swap"
            table.append(Row(name=f"a share of layers made ready, {shapes}", ours=share, unit="ms", note=note))
        idle, busy = value(case, "publish_ms", busy=None), value(case, "publish_ms", busy=True)
        for name, found in (("publish to swap", idle), ("publish to swap in a batch", busy)):
            if found is not None:
                table.append(Row(name=f"{name}, {shapes}", ours=found, unit="ms", note=way(case)))
        alone, disturbed = value(case, "seconds_alone"), value(case, "seconds_with_two_swaps")
        if alone and disturbed:
            name = f"batch with two publications in it, {shapes}"
            table.append(Row(name=name, ours=alone / disturbed, note="share of undisturbed speed"))
    for case in ("ours", "tp2", "fp16", "moe", "fp8"):
        for wide_head in ("model", "float32"):
            name = f"{case}, head in {wide_head}: logprobs after a swap, mean |difference|"
            goal = "<= 0.005" if case != "fp8" else ""
            mean = value(case, "mean", head=wide_head)
            table.append(Row(name=name, ours=mean, goal=goal, note="float32 transformers"))
    for key, unit in (("memory_back_s", "s"), ("recovered_s", "s")):
        table.append(Row(name=f"SIGKILL of the engine: {key}", ours=value("kill", key), unit=unit))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rollout")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--gpus", nargs="*", default=["0", "1"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rollout.jsonl"

    def say(**facts: Any) -> None:
        line = json.dumps(facts, default=str)
        print(f"RESULT {line}", flush=True)
        with file.open("a") as out:
            out.write(line + "\n")

    if options.case:
        globals()[options.case](say)
        return 0
    limits = {case: (gpus, seconds * (4 if TINY else 1)) for case, (gpus, seconds) in CASES.items()}
    Lanes("rollout", limits, options.out, options.gpus).run(options.cases)
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(to_markdown(rows(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
