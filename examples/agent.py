"""An agent with a loop of its own, written against the `openai` client, and trained by its address alone.

    python -m runtime.launch recipes/agent.toml

It asks, has its answer judged, and asks once more if that was wrong. Any program that takes a base URL and a key can
stand here: what it samples is recorded by the endpoint, token by token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI

from roles.agents import Address
from roles.environment_config import Judge
from roles.types import Prompt


@cache
def client() -> AsyncOpenAI:
    """One for all episodes: making one takes as long as a few answers of a small model."""
    return AsyncOpenAI(base_url="http://", api_key="none", timeout=None)


async def second_try(prompt: Prompt, address: Address, judge: Judge, worth: float = 0.5) -> float:
    """Args: worth: of an answer that is right the second time."""
    policy = client().with_options(base_url=address.url, api_key=address.key)
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    for reward in (1.0, worth):
        answer = await policy.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        if await judge(prompt, text) >= 1:
            return reward
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"\n{prompt.text}"}]
    return 0.0
