"""WT-1 and WT-2 of tests/waiting.py."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from tests.waiting import until


async def test_a_wait_returns_what_it_saw_of_a_function_or_a_coroutine() -> None:
    numbers = count()

    async def later() -> int:
        return next(numbers)

    assert await until(lambda: next(numbers), lambda number: number > 2, pause=0) == 3
    assert await until(later, lambda number: number > 5, pause=0) == 6
    assert await until(lambda: [7]) == [7]


async def test_a_wait_in_vain_fails_with_what_was_seen_last_wt1() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"waited 0.01 s in vain; seen last: \[\]"):
        await until(list, seconds=0.01, pause=0.001)
    with pytest.raises(pytest.fail.Exception, match="in vain; seen last: 'nothing yet'"):
        await until(asyncio.Event().wait, seconds=0.01)


async def test_an_error_of_what_is_looked_at_is_raised_wt1() -> None:
    async def late() -> bool:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await until(late)


async def test_work_that_is_over_ends_the_wait_wt2() -> None:
    async def work() -> int:
        return 1

    async def fail() -> int:
        raise ValueError("failed")

    endless = asyncio.create_task(asyncio.Event().wait())
    done = asyncio.create_task(work())
    with pytest.raises(pytest.fail.Exception, match="over before it was seen; seen last: 0"):
        await until(lambda: 0, during=[done])
    with pytest.raises(pytest.fail.Exception, match="in vain"):  # some of it goes on
        await until(lambda: 0, during=[done, endless], seconds=0.01)
    with pytest.raises(ValueError, match="failed"):
        await until(lambda: 0, during=[endless, asyncio.create_task(fail())])
    endless.cancel()
