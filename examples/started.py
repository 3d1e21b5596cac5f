"""What the examples share: roles over the small policy of the embedded job, and its questions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from roles.prompts import DataConfig, PromptEncoder, PromptSource
from roles.questions import FamilyConfig
from roles.reward import RewardConfig, RewardPool
from roles.rollout import Rollout, RolloutConfig
from roles.trainer import Trainer, TrainerConfig
from roles.types import Sampling
from runtime import HostMesh, this_host
from sync.session import SyncConfig, WeightSession

POLICY = str(Path(__file__).parents[1] / "recipes" / "start_policy")
SAMPLING = Sampling(max_tokens=48)


class Roles(NamedTuple):
    """Handles, ready to use."""

    host: HostMesh
    trainer: Trainer
    rollout: Rollout
    reward: RewardPool
    weights: WeightSession
    prompts: PromptSource


@asynccontextmanager
async def started(reward: RewardConfig | None = None, lr: float = 3e-4) -> AsyncIterator[Roles]:
    """One trainer, one rollout and one reward process; the rollout serves the weights of the trainer."""
    family = FamilyConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2})
    data = DataConfig(families=[family], max_prompt_tokens=100)
    async with this_host() as host:
        trainer = await Trainer.start(host, TrainerConfig(lr=lr, threads=1), POLICY)
        rollout = await Rollout.start(host, RolloutConfig(max_len=256, threads=1), POLICY)
        weights = WeightSession(trainer.mesh, rollout.mesh, SyncConfig())
        await weights.open()
        pool = await RewardPool.start(host, reward or RewardConfig())
        prompts = PromptSource(data, PromptEncoder(POLICY, data))
        yield Roles(host, trainer, rollout, pool, weights, prompts)
        prompts.close()
        await weights.close()
