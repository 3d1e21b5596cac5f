"""Best-of-n distillation: sample n answers, keep the best one if it is right, imitate it.

No baseline and no ratio: every kept answer has advantage 1, and -A log pi is the loss of supervised training.

    python -m examples.best_of_n
"""

from __future__ import annotations

import asyncio

import msgspec

from algorithms.advantages import Advantage, reward
from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import SAMPLING, Roles, started
from roles.types import Group, Scored

IMITATE = objective("reinforce", {"tis_cap": None, "aggregate": "token-mean"})
AS_IT_IS = Advantage(group=reward, contrast=False)


def best(group: Group) -> Group | None:
    """The group with its shortest right answer alone; None when none is right."""
    right = [
        (len(completion.token_ids), index)
        for index, (completion, verdict) in enumerate(zip(group.completions, group.rewards, strict=True))
        if isinstance(verdict, Scored) and verdict.value >= 1.0
    ]
    if not right:
        return None
    _, index = min(right)
    return msgspec.structs.replace(group, completions=[group.completions[index]], rewards=[Scored(1.0)])


async def train(roles: Roles, steps: int, prompts_per_step: int = 8, n: int = 8) -> list[int]:
    """Returns how many answers were kept in each step."""
    kept: list[int] = []
    await roles.weights.publish(roles.trainer.version)
    for _ in range(steps):
        asked = [roles.prompts.take() for _ in range(prompts_per_step)]
        groups = await asyncio.gather(*(roles.rollout.generate(prompt, n, SAMPLING, 0) for prompt in asked))
        scored = await asyncio.gather(*(roles.reward.score(group) for group in groups))
        chosen = [one for group in scored if (one := best(group)) is not None]
        kept.append(len(chosen))
        if chosen:
            result = await roles.trainer.train_step(to_samples(chosen, AS_IT_IS), IMITATE)
            await roles.weights.publish(result.version)
    return kept


async def main() -> None:
    async with started() as roles:
        for step, count in enumerate(await train(roles, steps=10), 1):
            print(f"step {step}: {count} of 8 questions had a right answer to imitate")


if __name__ == "__main__":
    asyncio.run(main())
