"""Fairness and cancellation of the waiting line (LI-1 to LI-3)."""

from __future__ import annotations

import asyncio

import pytest

from algorithms.line import Line


class Tokens:
    """Something to wait for: a number of tokens, taken one at a time."""

    def __init__(self) -> None:
        self.line = Line()
        self.left = 0
        self.attempts = 0

    def give(self, n: int) -> None:
        self.left += n
        self.line.wake()

    def attempt(self) -> int | None:
        self.attempts += 1
        if self.left == 0:
            return None
        self.left -= 1
        return self.left

    async def take(self, name: str, log: list[str]) -> None:
        await self.line.wait(self.attempt)
        log.append(name)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_waiters_are_served_in_the_order_they_came():
    tokens = Tokens()
    log: list[str] = []
    tasks = [asyncio.create_task(tokens.take(name, log)) for name in "abc"]
    await settle()
    assert len(tokens.line) == 3
    tokens.give(3)
    await asyncio.gather(*tasks)
    assert log == ["a", "b", "c"]
    assert len(tokens.line) == 0


async def test_a_newcomer_does_not_overtake_a_waiter_that_was_woken_but_did_not_run_yet():
    tokens = Tokens()
    log: list[str] = []

    async def give_and_take() -> None:
        tokens.give(1)
        await tokens.take("second", log)

    first = asyncio.create_task(tokens.take("first", log))
    await settle()
    second = asyncio.create_task(give_and_take())
    await settle()
    assert log == ["first"]
    tokens.give(1)
    await asyncio.gather(first, second)
    assert log == ["first", "second"]


async def test_a_waiter_cancelled_after_its_wake_up_passes_the_turn_on():
    tokens = Tokens()
    log: list[str] = []
    first, second = (asyncio.create_task(tokens.take(name, log)) for name in ("first", "second"))
    await settle()
    tokens.give(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert log == ["second"]
    assert (tokens.left, len(tokens.line)) == (0, 0)


async def test_nothing_is_attempted_while_nothing_changes():
    tokens = Tokens()
    log: list[str] = []
    task = asyncio.create_task(tokens.take("a", log))
    await settle()
    assert tokens.attempts == 1
    tokens.give(1)
    await task
    assert tokens.attempts == 2


async def test_an_error_of_the_attempt_reaches_its_waiter_and_the_next_gets_its_turn():
    line = Line()
    failures: list[str] = []

    def attempt() -> int | None:
        if failures:
            raise KeyError(failures.pop())
        return None

    tasks = [asyncio.create_task(line.wait(attempt)) for _ in range(2)]
    await settle()
    failures += ["second", "first"]
    line.wake()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [repr(r) for r in results] == ["KeyError('first')", "KeyError('second')"]
    assert len(line) == 0


async def test_seconds_count_only_time_in_which_somebody_waited():
    tokens = Tokens()
    log: list[str] = []
    assert tokens.line.seconds == 0
    task = asyncio.create_task(tokens.take("a", log))
    await settle()
    waiting = tokens.line.seconds
    assert waiting > 0
    tokens.give(1)
    await task
    finished = tokens.line.seconds
    await settle()
    assert tokens.line.seconds == finished >= waiting
