"""A policy gradient of your own: the loop, the advantage and the objective are plain functions over the role handles.

python -m examples.custom_algorithm
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import SAMPLING, Roles, started
from roles.types import Group, Scored


def best_against_rest(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """+1 for the best of a group, shared by its equals, minus the same for all others."""
    best = rewards == rewards.max()
    return np.asarray(np.where(best, 1 / best.sum(), -1 / (~best).sum()))


# --8<-- [start:algorithm]
async def train(roles: Roles, steps: int, prompts_per_step: int = 8, samples: int = 4) -> list[float]:
    """The whole algorithm; returns the mean reward of each step."""

    async def scored_group(seed: int) -> Group:
        group = await roles.rollout.generate(roles.prompts.take(), samples, SAMPLING, seed)
        return await roles.reward.score(group)

    history: list[float] = []
    await roles.weights.publish(roles.trainer.version)
    for _ in range(steps):
        groups = await asyncio.gather(*(scored_group(seed=0) for _ in range(prompts_per_step)))
        batch = to_samples(groups, best_against_rest, version=roles.trainer.version)
        result = await roles.trainer.train_step(batch, objective("cispo", {"clip_high": 0.5}))
        await roles.weights.publish(result.version)
        rewards = [reward.value for group in groups for reward in group.rewards if isinstance(reward, Scored)]
        history.append(sum(rewards) / len(rewards))
    return history


# --8<-- [end:algorithm]


async def main() -> None:
    async with started() as roles:
        for step, reward in enumerate(await train(roles, steps=10), 1):
            print(f"step {step}: mean reward {reward:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
