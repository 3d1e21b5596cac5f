"""A line of coroutines that wait for a synchronous attempt to succeed.

The one place where `Admission` and `Buffer` meet asyncio: what they decide is synchronous and lives elsewhere.

LI-1: who came first is served first; a newcomer never overtakes.
LI-2: waiting is event-driven: an attempt is made when the state changed (`wake`), never by a timer.
LI-3: a cancelled waiter leaves no trace: nothing was taken for it, and the next in line gets its turn.

Assumed: one event loop, one thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Line:
    """Waiters in the order they came. It holds as many entries as there are coroutines inside `wait`."""

    def __init__(self) -> None:
        self._queue: deque[asyncio.Event] = deque()
        self._finished_seconds = 0.0
        self._waiting_since: float | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def seconds(self) -> float:
        """Seconds, so far, during which at least one coroutine waited here."""
        if self._waiting_since is None:
            return self._finished_seconds
        return self._finished_seconds + asyncio.get_running_loop().time() - self._waiting_since

    def wake(self) -> None:
        """Let the first in line try again. To be called after every change that could make its attempt succeed."""
        if self._queue:
            self._queue[0].set()

    def wake_all(self) -> None:
        """Let everybody try again, for a change that ends all waiting."""
        for turn in self._queue:
            turn.set()

    async def wait(self, attempt: Callable[[], T | None]) -> T:
        """Return the first result of `attempt` that is not None; its exceptions pass through.

        `attempt` runs only when it is the caller's turn, at once if nobody waits. Between an attempt that succeeds and
        the return there is no await, so that nothing has to be undone (LI-3).
        """
        if not self._queue:
            if (result := attempt()) is not None:
                return result
            self._waiting_since = asyncio.get_running_loop().time()
        turn = asyncio.Event()
        self._queue.append(turn)
        try:
            while True:
                await turn.wait()
                turn.clear()
                if (result := attempt()) is not None:
                    return result
        finally:
            self._queue.remove(turn)
            if self._queue:
                self.wake()  # our success, or our leaving after a wake-up, may be the turn of the next
            elif self._waiting_since is not None:
                self._finished_seconds += asyncio.get_running_loop().time() - self._waiting_since
                self._waiting_since = None
