"""Our vLLM engine beside bare vLLM on GPUs: speed, what a swap of weights costs, agreement, SIGKILL.

    python -m benchmarks.gpu.rollout --out DIR [--gpus 0 1] [--cases ours bare swap8 moe fp8 kill fp16 tp2]

Each case is a process of its own with a time limit; cases that need one GPU run one on each at the same time. Results
are written as they come (`DIR/rollout.jsonl`), a table ends the run. Shapes are Qwen3-0.6B's (8B's, and a small mixture
of experts') with random weights: 256 requests of 64 prompt tokens and 256 sampled ones.

    ours   256 requests through roles.engine_vllm; weights of two random models put into service while they decode, with
           the parts of a swap; logprobs against transformers in float32, by the version of their label; then all that
           with a head in float32
    bare   the same requests through vllm.LLM.generate, with and without a seed each
    swap8  the parts of a swap with the shapes of Qwen3-8B
    moe    Qwen3-MoE shapes: swap, agreement, with and without tokens whose experts differ; routes
    fp8    the engine quantised per 128x128 block: swap and agreement
    fp16   agreement of an engine in float16
    kill   SIGKILL of vLLM's engine process: memory of the GPU back, calls answered by a new one, nothing left behind
    tp2    a replica on two GPUs: swap and agreement
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.table import Row, to_markdown

TINY = bool(os.environ.get("TUTTI_TINY"))
"""Shapes for trying this program out, on a CPU too."""
REQUESTS, PROMPT, TOKENS = (8, 16, 32) if TINY else (256, 64, 256)
CASES = {
    "ours": (1, 150),
    "bare": (1, 120),
    "swap8": (1, 130),
    "moe": (1, 110),
    "fp8": (1, 110),
    "kill": (1, 150),
    "fp16": (1, 80),
    "tp2": (2, 120),
}
"""Name -> (GPUs, time limit in seconds)."""

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


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


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


def model_of(config: dict[str, Any], seed: int) -> Any:
    """A random transformers model in bfloat16 values, computed in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device()):
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


class Parts:
    """Clocks the calls that a swap makes of the workers."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def swap(self, weights: Any, version: int) -> dict[str, Any]:
        """Milliseconds of each part, and how many calls."""
        engine, call = self.engine, self.engine._workers
        spent: dict[str, list[float]] = {}

        async def clocked(method: str, *arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(method, *arguments)
            finally:
                spent.setdefault(method, []).append(1000 * (time.perf_counter() - began))

        engine._workers = clocked
        began = time.perf_counter()
        await engine.swap(weights, version)
        whole = 1000 * (time.perf_counter() - began)
        del engine._workers
        facts = (await engine._workers("tutti_facts"))[0]
        parts: dict[str, Any] = {f"{name}_ms": sum(times) for name, times in spent.items()}
        parts |= {f"{name}_calls": len(times) for name, times in spent.items()}
        return {
            "all_ms": whole,
            "fill_ms": whole - sum(sum(times) for times in spent.values()),
            "pause_host_ms": 1000 * facts.pop("host_seconds"),
            "pause_device_ms": 1000 * facts.pop("device_seconds"),
            **parts,
            **facts,
        }

    async def call_ms(self) -> float:
        """Median round trip of a call of the workers that does nothing: between two steps where some are made."""
        times = []
        for _ in range(20):
            began = time.perf_counter()
            await self.engine._workers("tutti_probe")
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)


async def speed(driver: Driver, say: Say, case: str, **facts: Any) -> None:
    for seeded in (False, True):
        driver.engine._seeded = seeded
        for turn in range(3):
            began = time.perf_counter()
            completions = await driver.all()
            seconds = time.perf_counter() - began
            count = sum(len(c.token_ids) for c in completions)
            say(case=case, seeded=seeded, turn=turn, tokens_per_s=count / seconds, **facts)


async def agreement(driver: Driver, model: Any, other: Any, say: Say, case: str, **facts: Any) -> list[Any]:
    """Of 24 completions with `model`'s logprobs, and, for scale, with those of other weights."""
    completions = await driver.all(min(64, TOKENS), min(24, REQUESTS))
    gap, wrong = (differences(one, completions, driver.engine.version) for one in (model, other))
    tokens = len(gap)
    say(case=case, tokens=tokens, mean=float(gap.mean()), most=float(gap.max()), other=float(wrong.mean()), **facts)
    return completions


def ours(say: Say) -> None:
    async def body(engine: Any, driver: Driver) -> None:
        models = [model_of(DENSE, seed) for seed in (1, 2, 3)]
        weights = [tensors_of(model) for model in models]
        parts = Parts(engine)
        say(case="ours", version=1, recorded=True, **await parts.swap(weights[0], 1))
        await driver.all(8)  # warm
        say(case="ours", idle_call_ms=await parts.call_ms())
        await speed(driver, say, "ours")
        began = time.perf_counter()
        await driver.all()
        alone = time.perf_counter() - began
        running = asyncio.ensure_future(driver.all())
        began = time.perf_counter()
        await asyncio.sleep(alone / 4)
        say(case="ours", busy_call_ms=await parts.call_ms())
        for number in (2, 3):
            say(case="ours", version=number, **await parts.swap(weights[number - 1], number))
        completions = await running
        disturbed = time.perf_counter() - began
        say(case="ours", seconds_alone=alone, seconds_with_two_swaps=disturbed)
        seen = {len(set(c.versions.tolist())) for c in completions}
        say(case="ours", versions_of_a_completion=sorted(seen))
        for version in (1, 3):
            gap = differences(models[version - 1], completions[:24], version)
            if version == 1:
                say(case="ours", label=version, tokens=len(gap), mean=float(gap.mean()) if len(gap) else None)
        await agreement(driver, models[2], models[1], say, "ours", head="model")
        began = time.perf_counter()
        await engine.score([ids[:32] for ids in prompts()[:4]])
        say(case="ours", probe_ms=1000 * (time.perf_counter() - began))
        await engine._llm.collective_rpc(_widen)
        await agreement(driver, models[2], models[1], say, "ours", head="float32")
        await speed(driver, say, "ours", head="float32")

    asyncio.run(with_engine(DENSE, body))


def _widen(worker: Any) -> None:
    from roles.vllm_head import widen_heads

    widen_heads(worker.model_runner.model)


def swap8(say: Say) -> None:
    """Any numbers do for the times."""

    async def body(engine: Any, driver: Driver) -> None:
        import torch

        weights = {}
        for entry in engine.weight_layout().entries:
            drawn = torch.randn(entry.shape, dtype=torch.bfloat16, device=device())
            weights[entry.name] = (drawn * 0.02).cpu()
        parts = Parts(engine)
        say(case="swap8", version=1, recorded=True, **await parts.swap(weights, 1))
        say(case="swap8", version=2, **await parts.swap(weights, 2))
        await driver.all(8)
        began = time.perf_counter()
        await driver.all(TOKENS // 2)
        alone = time.perf_counter() - began
        running = asyncio.ensure_future(driver.all(TOKENS // 2))
        began = time.perf_counter()
        await asyncio.sleep(0.5)
        for version in (3, 4):
            say(case="swap8", version=version, **await parts.swap(weights, version))
        await running
        say(case="swap8", seconds_alone=alone, seconds_with_two_swaps=time.perf_counter() - began)

    asyncio.run(with_engine(LARGE, body, vllm={"eager": True}))


def fp8(say: Say) -> None:
    swapped(DENSE, say, "fp8", vllm={"quantization": "fp8_per_block", "eager": True})


def fp16(say: Say) -> None:
    swapped(DENSE, say, "fp16", vllm={"eager": True}, dtype="float16")


def tp2(say: Say) -> None:
    swapped(DENSE, say, "tp2", vllm={"eager": True, "tensor_parallel": 2})


def moe(say: Say) -> None:
    swapped(MOE, say, "moe", vllm={"eager": True}, record_routes=True)


def swapped(config: dict[str, Any], say: Say, case: str, **more: Any) -> None:
    """Three swaps, the last two after the record, and agreement; then with a wide head."""

    async def body(engine: Any, driver: Driver) -> None:
        models = [model_of(config, seed) for seed in (1, 2, 3)]
        parts = Parts(engine)
        for number, model in enumerate(models, 1):
            recorded = {"recorded": True} if number == 1 else {}
            say(case=case, version=number, **recorded, **await parts.swap(tensors_of(model), number))
        completions = await agreement(driver, models[2], models[1], say, case, head="model")
        if config is MOE:
            routed(models[2], completions, say)
        await engine._llm.collective_rpc(_widen)
        await agreement(driver, models[2], models[1], say, case, head="float32")

    asyncio.run(with_engine(config, body, **more))


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

    table = []
    for seeded in (False, True):
        what = f"{REQUESTS} x {TOKENS} tokens, {'a seed each' if seeded else 'no seeds'}"
        peer = best("bare", seeded)
        note = "peer: vllm.LLM.generate"
        table.append(Row(name=what, ours=best("ours", seeded), peer=peer, unit="tokens/s", goal=">= 0.98x", note=note))
        wide = best("ours", seeded, "float32")
        table.append(Row(name=f"{what}, head in float32", ours=wide, peer=peer, unit="tokens/s", note=note))
    for case, shapes in (("ours", "0.6B"), ("swap8", "8B"), ("fp8", "0.6B FP8"), ("moe", "MoE"), ("tp2", "0.6B TP2")):
        host, device = value(case, "pause_host_ms"), value(case, "pause_device_ms")
        if host is not None and device is not None:
            row = Row(name=f"pause of a swap, {shapes}", ours=max(host, device), unit="ms", goal="<= 50")
            table.append(row)
        alone, disturbed = value(case, "seconds_alone"), value(case, "seconds_with_two_swaps")
        if alone and disturbed:
            name = f"batch with two swaps in it, {shapes}"
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


class Runs:
    """Cases over GPUs, one at a time on each."""

    def __init__(self, out: Path, gpus: list[str]) -> None:
        self.out, self.gpus = out, gpus
        self._told = threading.Lock()

    def all(self, cases: list[str]) -> None:
        alone: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            if CASES[case][0] == 1:
                alone.put(case)
        lanes = [threading.Thread(target=self._lane, args=(gpu, alone)) for gpu in self.gpus]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        for case in cases:
            if CASES[case][0] > 1 and len(self.gpus) >= CASES[case][0]:
                self._one(case, self.gpus[: CASES[case][0]])

    def _lane(self, gpu: str, cases: queue.SimpleQueue[str]) -> None:
        while not cases.empty():
            self._one(cases.get(), [gpu])

    def _one(self, case: str, gpus: list[str]) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.gpu.rollout", "--out", str(self.out), "--case", case]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        log = self.out / f"rollout.{case}.log"
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            try:
                code: int | str = process.wait(CASES[case][1] * (4 if TINY else 1))
            except subprocess.TimeoutExpired:
                code = "too long"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with self._told:
            print(f"{case}: {code}, {time.perf_counter() - began:.0f} s", flush=True)
            if code:
                print(log.read_text()[-2500:], flush=True)


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
    Runs(options.out, options.gpus).all(options.cases)
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(to_markdown(rows(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
