"""Several turns with tools: the policy may call a calculator or run Python before it answers.

The tokens of the policy are trained, what the tools said is read and masked. The small policy of the examples has never
seen a tool, so that it answers at once; a model that was taught to call them needs no other code than this.

    python -m examples.tool_use
"""

from __future__ import annotations

import asyncio

from transformers import AutoTokenizer

from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import POLICY, SAMPLING, Roles, started
from roles.dialogue import Dialogue
from roles.environment import EpisodeLimits, Episodes
from roles.tools import ToolEnvironment, calculator, python
from roles.types import Group, Prompt
from roles.verify import by_task, verdict


async def judge(prompt: Prompt, answer: str) -> float:
    """Reward of the final answer: what the source of the question says."""
    return verdict(await asyncio.to_thread(by_task, prompt, answer)).value


async def train(roles: Roles, steps: int, prompts_per_step: int = 4, samples: int = 4) -> list[Group]:
    """Returns the groups of the last step."""
    episodes = Episodes(
        roles.rollout,
        lambda: ToolEnvironment([calculator, python], judge),
        Dialogue(AutoTokenizer.from_pretrained(POLICY)),
        EpisodeLimits(turns=4, tokens=250),
    )
    groups: list[Group] = []
    await roles.weights.publish(roles.trainer.version)
    for _ in range(steps):
        asked = [roles.prompts.take() for _ in range(prompts_per_step)]
        played = await asyncio.gather(*(episodes.group(prompt, samples, SAMPLING, 0) for prompt in asked))
        groups = [group for group in played if isinstance(group, Group)]
        result = await roles.trainer.train_step(to_samples(groups), objective("grpo"))
        await roles.weights.publish(result.version)
    return groups


async def main() -> None:
    async with started() as roles:
        for group in await train(roles, steps=3):
            print(f"{group.prompt.text!r}: {group.completions[0].text!r}")


if __name__ == "__main__":
    asyncio.run(main())
