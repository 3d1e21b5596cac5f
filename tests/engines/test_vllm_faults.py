"""Faults of reloads that vLLM has and we cure (research: nine such faults are known in the field)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from roles.publish import FLOAT32_THRESHOLD
from roles.rollout import RolloutConfig, RolloutRank, VllmConfig
from roles.types import Sampling
from roles.vllm_compat import environment_of
from runtime import endpoint, this_host
from tests.engines.models import build, checkpoint, forced_logprobs
from tests.engines.sending import put

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


class Reloads(RolloutRank):
    """A replica that takes weights from a file."""

    @endpoint(concurrency=2)
    async def reload(self, file: str, version: int) -> None:
        await put(self, load_file(file), version)


async def test_without_the_cure_a_reload_leaves_experts_in_the_wrong_layout_and_the_proof_sees_it(
    policy: str, tmp_path: Path
) -> None:
    vllm = VllmConfig(arguments={"worker_extension_cls": "tests.engines.uncured.Uncured"})
    config = RolloutConfig(engine="vllm", max_running=4, max_len=64, vllm=vllm)
    new = build("Qwen3Moe", 1)
    save_file(checkpoint(new, tmp_path / "new"), tmp_path / "all.safetensors")
    async with this_host() as host:
        procs = await host.spawn_procs(1, name="rollout", env=environment_of(config), start="fresh")
        rank = await procs.spawn("rollout", Reloads, config, policy)
        (start,) = await rank.score.call_one([IDS])
        same = forced_logprobs(build("Qwen3Moe", 0), IDS[:1], np.array(IDS[1:]))
        assert np.abs(start - same).mean() < FLOAT32_THRESHOLD
        await rank.reload.call_one(str(tmp_path / "all.safetensors"), 1)
        (after,) = await rank.score.call_one([IDS])
    # If this is small, vLLM has repaired its reload: the cure can go.
    assert np.abs(after - forced_logprobs(new, IDS[:1], np.array(IDS[1:]))).mean() > 100 * FLOAT32_THRESHOLD


async def test_with_the_cure_the_same_reload_is_exact(rank: RolloutRank, tmp_path: Path) -> None:
    new = build("Qwen3Moe", 1)
    await put(rank, checkpoint(new, tmp_path), rank._engine.version + 1)
    (after,) = await rank.score([IDS])
    assert np.abs(after - forced_logprobs(new, IDS[:1], np.array(IDS[1:]))).mean() < 0.1 * FLOAT32_THRESHOLD


async def test_seeds_survive_prompts_that_do_not_fit_into_one_step(rank: RolloutRank) -> None:
    """A prompt that comes in pieces makes vLLM take draws back, which generators of the CPU can't: the engine died."""
    prompts = [tuple((7 * i + 3 * j) % 60 for j in range(480)) for i in range(12)]  # more than the 4,096 of a step
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    together = await asyncio.gather(*[rank.generate(ids, sampling, (5,)) for ids in prompts])
    alone = await rank.generate(prompts[-1], sampling, (5,))
    assert [len(found.token_ids) for (found,) in together] == [2] * len(prompts)
    assert together[-1][0].token_ids.tolist() == alone[0].token_ids.tolist()
