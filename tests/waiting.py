"""Waiting in tests for what can only be polled, never without an end.

WT-1: a wait that is in vain fails with what was seen last. Its bound measures nothing: it is far longer than a slow
      machine takes, and shorter than what a test may take, so that the reason is told and not just the place.
WT-2: what has to be under way meanwhile (`during`) ends the wait: with its error or, when all of it is over, as a
      failure. Nobody waits for work to be seen running that was done before anyone looked.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar, overload

import pytest

T = TypeVar("T")

SECONDS = 30.0


@overload
async def until(
    look: Callable[[], Awaitable[T]],
    holds: Callable[[T], object] = ...,
    *,
    during: Collection[asyncio.Future[Any]] = ...,
    pause: float = ...,
    seconds: float = ...,
) -> T: ...
@overload
async def until(
    look: Callable[[], T],
    holds: Callable[[T], object] = ...,
    *,
    during: Collection[asyncio.Future[Any]] = ...,
    pause: float = ...,
    seconds: float = ...,
) -> T: ...
async def until(
    look: Callable[[], Any],
    holds: Callable[[Any], object] = bool,
    *,
    during: Collection[asyncio.Future[Any]] = (),
    pause: float = 0.005,
    seconds: float = SECONDS,
) -> Any:
    """Look again and again until what is seen holds (or is true); returns it."""
    __tracebackhide__ = True  # the line to show is the caller's
    seen: Any = "nothing yet"
    try:
        async with asyncio.timeout(seconds) as limit:
            while not holds(seen := await value_of(look())):
                check_under_way(during, seen)
                await asyncio.sleep(pause)
            return seen
    except TimeoutError:
        if not limit.expired():
            raise
    pytest.fail(f"waited {seconds:g} s in vain; seen last: {seen!r}")


async def value_of(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def check_under_way(during: Collection[asyncio.Future[Any]], seen: Any) -> None:
    __tracebackhide__ = True
    over = [call for call in during if call.done()]
    for call in over:
        call.result()  # its error says more
    if over and len(over) == len(during):
        pytest.fail(f"what should have been under way was over before it was seen; seen last: {seen!r}")
