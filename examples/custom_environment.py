"""An environment of your own in thirty lines, and GRPO on its episodes.

The policy guesses a hidden number below 100; each reply says whether to go higher or lower.

    python -m examples.custom_environment
"""

from __future__ import annotations

import asyncio
import re

from transformers import AutoTokenizer

from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import POLICY, SAMPLING, Roles, started
from roles.dialogue import Dialogue
from roles.environment import EpisodeLimits, Episodes, Reply
from roles.types import Group, Prompt


# --8<-- [start:environment]
class HigherLower:
    """One episode: made anew for each."""

    async def reset(self, prompt: Prompt) -> list[dict[str, str]]:
        self.hidden = prompt.position * 37 % 100
        self.left = 4
        return [{"role": "user", "content": "Guess my number from 0 to 99."}]

    async def step(self, text: str) -> Reply:
        numbers = re.findall(r"\d+", text)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 4 else None
        self.left -= 1
        if guess == self.hidden:
            return Reply(done=True, reward=1.0)
        if self.left == 0:
            closeness = 0.0 if guess is None else 0.5 * (1 - min(abs(guess - self.hidden), 100) / 100)
            return Reply(done=True, reward=closeness)
        if guess is None:
            return Reply("Say a number.")
        return Reply("Higher." if guess < self.hidden else "Lower.")

    async def close(self) -> None:
        pass


# --8<-- [end:environment]


async def train(roles: Roles, steps: int, prompts_per_step: int = 4, samples: int = 4) -> list[Group]:
    """Episodes take the place of completions; returns the groups of the last step."""
    dialogue = Dialogue(AutoTokenizer.from_pretrained(POLICY))
    episodes = Episodes(roles.rollout, HigherLower, dialogue, EpisodeLimits(turns=4, tokens=250))
    groups: list[Group] = []
    await roles.weights.publish(roles.trainer.version)
    for _ in range(steps):
        asked = [roles.prompts.take() for _ in range(prompts_per_step)]
        played = await asyncio.gather(*(episodes.group(prompt, samples, SAMPLING, 0) for prompt in asked))
        groups = [group for group in played if isinstance(group, Group)]
        batch = to_samples(groups, version=roles.trainer.version)
        result = await roles.trainer.train_step(batch, objective("grpo"))
        await roles.weights.publish(result.version)
    return groups


async def main() -> None:
    async with started() as roles:
        for group in await train(roles, steps=5):
            print(f"number {group.prompt.position * 37 % 100}: {list(group.rewards)}")


if __name__ == "__main__":
    asyncio.run(main())
