"""vLLM through our engine beside bare vLLM, on CPU, and the agreement of their logprobs with the trainer's.

Needs the environment of `make engines`: `.venv-vllm/bin/python -m benchmarks rollout_vllm`. Both sides start vLLM's
AsyncLLM with the same arguments in turn and get the same requests: 32 of 32 prompt tokens and 64 sampled ones, a seed
each. The best of three rounds counts; rounds of one side follow each other, since two engines would share the cores.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Row

TITLE = "Rollout: vLLM through our engine against bare vLLM (CPU)"

REQUESTS, PROMPT, TOKENS, ROUNDS = 32, 32, 64, 3


def run() -> list[Row]:
    if importlib.util.find_spec("vllm") is None:
        return [Row(name=f"{REQUESTS} x {TOKENS} tokens", note="not run: vLLM is in .venv-vllm (make engines)")]
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(folder))


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * j) % 60 for j in range(PROMPT)] for i in range(REQUESTS)]


async def _run(folder: str) -> list[Row]:
    import numpy as np

    from roles.rollout_config import RolloutConfig
    from tests.engines.models import build, forced_logprobs, save_policy

    policy = save_policy(Path(folder), "Qwen3")
    config = RolloutConfig(engine="vllm", max_running=REQUESTS, max_len=256)
    ours, completions = await _ours(policy, config)
    bare = await _bare(policy, config)
    model = build("Qwen3")
    gaps = [
        np.abs(forced_logprobs(model, ids, completion.token_ids) - completion.logprobs)
        for ids, completion in zip(prompts(), completions, strict=True)
    ]
    gap = float(np.concatenate(gaps).mean())
    return [
        Row(name=f"{REQUESTS} x {TOKENS} tokens", ours=ours, peer=bare, unit="tokens/s", goal=">= 0.95x", note="bare"),
        Row(name="logprobs, mean |difference| to float32", ours=gap, unit="nat", goal="<= 0.0001", note="transformers"),
    ]


async def _ours(policy: str, config: Any) -> tuple[float, list[Any]]:
    from roles.engine import Finished, Request
    from roles.engine_vllm import VllmEngine
    from roles.types import Sampling
    from runtime import TaskGroup

    engine = VllmEngine(policy, config)
    best, number = 0.0, 0
    found: dict[int, Any] = {}
    async with TaskGroup("benchmark") as tasks:
        engine.open(tasks, lambda error: print(error, file=sys.stderr))
        for _ in range(ROUNDS + 1):
            done = asyncio.Event()
            found = {}
            first = number

            def ended(finished: Finished, first: int = first, found: Any = found, done: Any = done) -> None:
                found[finished.request_id - first] = finished.completion
                if len(found) == REQUESTS:
                    done.set()

            began = time.perf_counter()
            for ids in prompts():
                sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
                engine.submit(Request(id=number, prompt_ids=tuple(ids), seeds=(number,), sampling=sampling), ended)
                number += 1
            await done.wait()
            best = max(best, REQUESTS * TOKENS / (time.perf_counter() - began))
        await engine.close()
    return best, [found[i] for i in range(REQUESTS)]


async def _bare(policy: str, config: Any) -> float:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from roles import vllm_compat

    arguments = vllm_compat.engine_arguments(config, policy)
    for name in ("worker_extension_cls", "weight_transfer_config"):
        del arguments[name]
    llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def one(ids: list[int], number: int) -> None:
        parameters = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=0,
            seed=number,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in llm.generate({"prompt_token_ids": ids}, parameters, str(number)):
            pass

    best = 0.0
    for turn in range(ROUNDS + 1):
        began = time.perf_counter()
        await asyncio.gather(*[one(ids, turn * REQUESTS + i) for i, ids in enumerate(prompts())])
        best = max(best, REQUESTS * TOKENS / (time.perf_counter() - began))
    await asyncio.to_thread(llm.shutdown, 1.0)
    return best
