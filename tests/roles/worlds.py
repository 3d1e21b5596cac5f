"""Environments of the package `verifiers` for its tests, as it loads them: `load_environment` of a module."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import verifiers as vf
from datasets import Dataset  # type: ignore[import-not-found]

ROWS = [{"question": f"w{n} w2", "answer": "w5", "info": {"number": n}} for n in range(4)]


async def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def says_the_answer(completion: Any, answer: str, info: Any) -> float:
    assert isinstance(info["number"], int)
    return float(answer in completion[-1].content)


def longest(completions: list[Any]) -> list[float]:
    """Of a group: 1 for the longest."""
    lengths = [sum(len(str(message.content)) for message in completion) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


class Nods(vf.MultiTurnEnv):
    """Says w3 after each turn; `fault` says what goes wrong then."""

    def __init__(self, fault: str, **more: Any) -> None:
        super().__init__(**more)
        self._fault = fault

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        if self._fault == "raises":
            raise KeyError("w9")
        if self._fault == "hangs":
            await asyncio.Event().wait()
        if self._fault == "blocks":
            time.sleep(3600)  # noqa: ASYNC251  # what nobody should do
        return [{"role": "user", "content": "w3"}]


def load_environment(kind: str = "single", fault: str = "") -> Any:
    rows = Dataset.from_list(ROWS)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[says_the_answer]), system_prompt="w7")
    if kind == "tools":
        return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[says_the_answer]))
    rubric = vf.Rubric(funcs=[says_the_answer, longest], weights=[1.0, 0.5])
    return Nods(fault, dataset=rows, rubric=rubric, max_turns=3)
