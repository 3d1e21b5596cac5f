"""A3 with real processes: staleness 0 is plain synchronous training, bit for bit, when the engine is deterministic.

The engine gets one group at a time (max_running = samples of a group), so that what is computed together never depends
on when a request came. Then two runs that train the same groups in the same order have the same weights, to the bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from algorithms.admission import Admission
from algorithms.buffer import Buffer
from algorithms.catalog import advantage, objective
from algorithms.grpo import GRPO, GRPOConfig
from algorithms.play import Recorder
from algorithms.samples import to_samples
from algorithms.simulated import Replica, SimulatedTrainer, Speeds
from algorithms.watchdog import WatchConfig, Watchdog
from roles.reward import RewardConfig, RewardPool
from roles.rollout import Rollout, RolloutConfig
from roles.trainer import Trainer, TrainerConfig
from roles.types import Prompt, Sampling
from runtime import this_host
from sync.session import SyncConfig, WeightSession
from tests.roles.tiny import prompt_at, save_tiny_policy

STEPS, P, G, SEED = 2, 3, 4, 11
SAMPLING = Sampling(max_tokens=6)
GRPO_LOSS = objective("grpo")


def even(prompt: Prompt, text: str) -> float:
    """Reward: the share of even words."""
    words = text.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / len(words) if words else 0.0


class Words:
    """An endless stream of prompts."""

    def __init__(self) -> None:
        self.position = -1

    def take(self) -> Prompt:
        self.position += 1
        return prompt_at(self.position)


class Roles(NamedTuple):
    trainer: Trainer
    rollout: Rollout
    reward: RewardPool
    weights: WeightSession


@asynccontextmanager
async def started(policy: str) -> AsyncIterator[Roles]:
    async with this_host() as host:
        trainer = await Trainer.start(host, TrainerConfig(lr=1e-2, threads=1, device="cpu"), policy)
        rollout = await Rollout.start(host, RolloutConfig(max_running=G, max_len=64, threads=1, device="cpu"), policy)
        reward = await RewardPool.start(host, RewardConfig(verifier="tests.algorithms.test_synchronous:even"))
        weights = WeightSession(trainer.mesh, rollout.mesh, SyncConfig())
        await weights.open()
        yield Roles(trainer, rollout, reward, weights)
        await weights.close()


async def by_the_page(policy: str, folder: Path) -> list[list[int]]:
    async with started(policy) as roles:
        admission = Admission(Words(), groups_per_step=P, staleness=0, num_groups=P * STEPS)
        buffer = Buffer(admission)
        idle = Speeds(step_base=1, step_per_sequence=0, train_base=0, train_per_token=0, publish=0)
        recorder = Recorder(admission, [Replica(idle)], SimulatedTrainer(idle))  # counts ages; nothing is simulated
        page = GRPO(
            rollout=roles.rollout,
            reward=roles.reward,
            trainer=roles.trainer,
            weights=roles.weights,
            evaluator=None,
            admission=admission,
            buffer=buffer,
            checkpoints=None,
            report=recorder,
            watchdog=Watchdog(WatchConfig(), buffer.who_waits),
            config=GRPOConfig(prompts_per_step=P, samples_per_prompt=G),
            sampling=SAMPLING,
            advantage=advantage("grpo"),
            objective=GRPO_LOSS,
            evaluate_every=0,
            seed=SEED,
        )
        assert await page.run(0, STEPS) == STEPS
        await roles.trainer.export(folder, "float32")
        return recorder.ages


async def by_a_plain_loop(policy: str, folder: Path) -> None:
    async with started(policy) as roles:
        words = Words()
        await roles.weights.publish(roles.trainer.version)
        for _ in range(STEPS):
            groups = []
            for _ in range(P):
                group = await roles.rollout.generate(words.take(), G, SAMPLING, SEED)
                groups.append(await roles.reward.score(group))
            result = await roles.trainer.train_step(to_samples(groups, version=roles.trainer.version), GRPO_LOSS)
            await roles.weights.publish(result.version)
        await roles.trainer.export(folder, "float32")


@pytest.mark.timeout(180)
def test_staleness_zero_gives_the_weights_of_a_plain_synchronous_loop_bit_for_bit(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    ages = asyncio.run(by_the_page(policy, tmp_path / "page"))
    asyncio.run(by_a_plain_loop(policy, tmp_path / "loop"))
    assert ages == [[0] * P] * STEPS
    start, page, loop = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "page", "loop"))
    assert page.keys() == loop.keys()
    assert all(torch.equal(page[name], loop[name]) for name in page)
    assert any(not torch.equal(page[name], start[name]) for name in page)  # and something was learned
