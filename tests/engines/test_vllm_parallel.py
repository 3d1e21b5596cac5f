"""A replica over two tensor-parallel ranks: each takes its own boxes of the new weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from roles.rollout import RolloutConfig, RolloutRank, VllmConfig
from roles.types import Sampling
from tests.engines.models import build, checkpoint, forced_logprobs
from tests.engines.sending import put, sides_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


async def test_both_ranks_of_a_replica_swap_together_and_exactly(policy: str, tmp_path: Path) -> None:
    config = RolloutConfig(engine="vllm", max_running=4, max_len=128, vllm=VllmConfig(tensor_parallel=2))
    rank = RolloutRank(config, policy)
    first, second = [{e.name: e for e in side.layout.entries} for side in await sides_of(rank) if side.layout]
    for name, entry in first.items():
        replicated = entry.box == second[name].box
        assert replicated or entry.box.numel + second[name].box.numel == torch.Size(entry.shape).numel(), name
        assert replicated == ("norm" in name or "mlp.gate." in name), name
    for version, seed in enumerate((1, 2, 1), 1):
        model = build("Qwen3Moe", seed)
        await put(rank, checkpoint(model, tmp_path / str(version)), version)
        (scores,) = await rank.score([IDS])
        np.testing.assert_allclose(scores, forced_logprobs(model, IDS[:1], np.array(IDS[1:])), atol=1e-4)
        (completion,) = await rank.generate(tuple(IDS), Sampling(max_tokens=12, ignore_eos=True), (7,))
        np.testing.assert_allclose(completion.logprobs, forced_logprobs(model, IDS, completion.token_ids), atol=1e-4)
        assert set(completion.versions.tolist()) == {version}
    await rank.__cleanup__()
    await rank.tasks.close()
