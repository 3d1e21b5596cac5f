"""Tasks of reasoning-gym as episodes: several tries at one question, with a hint after each that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roles.dialogue import Message
from roles.environment import Reply
from roles.gym import is_right
from roles.types import Prompt

WRONG = "That is not right. Try again."


class GymEnvironment:
    """A `roles.environment.Environment` over prompts whose task is a family of reasoning-gym.

    Args:
        tries: turns before the episode ends.
        discount: a right answer in try k (from 0) earns discount ** k.
    """

    def __init__(self, tries: int = 3, discount: float = 0.8) -> None:
        if tries < 1 or not 0 < discount <= 1:
            raise ValueError(f"gym environment: expected tries >= 1 and discount in (0, 1], got {tries}, {discount}")
        self._left = tries
        self._worth, self._discount = 1.0, discount
        self._prompt: Prompt

    async def reset(self, prompt: Prompt) -> Sequence[Message] | None:
        self._prompt = prompt
        return None

    async def step(self, text: str) -> Reply:
        entry = self._prompt.entry
        right = await asyncio.to_thread(is_right, self._prompt.task, entry.get("params", {}), text.strip(), entry)
        if right:
            return Reply(done=True, reward=self._worth)
        self._left -= 1
        self._worth *= self._discount
        return Reply(done=True, reward=0.0) if self._left == 0 else Reply(WRONG)

    async def close(self) -> None:
        """It holds nothing."""
