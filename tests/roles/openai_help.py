"""A server for agents and a client of it: help of the tests of the endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from roles.dialogue import Dialogue
from roles.openai_server import OpenAIServer
from roles.types import Sampling

FUNCTION = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
ENDLESS = Sampling(max_tokens=16_000, ignore_eos=True)
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


@asynccontextmanager
async def serving(rollout: Any, tokenizer: Any, **more: Any) -> AsyncIterator[OpenAIServer]:
    async with OpenAIServer(rollout, Dialogue(tokenizer), **more).serving() as server:
        yield server


@asynccontextmanager
async def client_of(server: OpenAIServer, session: str = "", key: str = "") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.url(session), api_key=key or server.key, max_retries=0) as client:
        yield client


def user(text: str) -> Any:
    return {"role": "user", "content": text}
