"""Room in the mailbox of an actor, as its sender counts it.

    acquire      sent          taken out by the actor      credit arrives
    |-- waits --|---- message lies in the mailbox ----|-- on the way --| release

MB-1: at most `max_messages` messages and `max_bytes` bytes of one sender are in the mailbox of one actor; the next one
      waits.
MB-2: who waits is served in the order of asking, also among tasks that were granted room but have not run yet (R1).
MB-3: a cancelled waiter leaves the queue and holds nothing.
MB-4: a message larger than `max_bytes` is admitted alone: it waits until the mailbox is (nearly) empty, not for ever.
MB-5: after `close(error)` every waiter and every later `acquire` raises that error.

Credits come in batches: a receiver may hold back less than a quarter of the limits (`worth_returning`) while it is
busy, and gives everything back when it is idle. The sender counts what is held back as used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from runtime.errors import MailboxFull

MAX_MESSAGES = 2048
"""Messages of one sender that may wait in the mailbox of one actor."""
MAX_BYTES = 256 * 2**20
"""Bytes of those messages."""


def worth_returning(messages: int, nbytes: int) -> bool:
    """Whether the receiver should send a credit now rather than with its next reply."""
    return messages >= MAX_MESSAGES // 4 or nbytes >= MAX_BYTES // 4


class Room:
    """Bounds what one sender has in one mailbox. The synchronous half decides; `acquire` only adds the waiting."""

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.messages = 0
        self.nbytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._granted = 0
        """Waiters that hold room already but whose task has not run since: nobody may overtake them (MB-2)."""
        self._error: Callable[[], Exception] | None = None

    def acquire_nowait(self, nbytes: int) -> None:
        """
        Raises:
            MailboxFull: no room now, or others wait.
        """
        if self._error is not None:
            raise self._error()
        if self._waiting or self._granted or not self._fits(nbytes):
            raise MailboxFull(
                f"mailbox holds {self.messages} messages, {self.nbytes} bytes of this sender (limits "
                f"{self.max_messages}, {self.max_bytes}); await the call without wait=False, or send less"
            )
        self._take(nbytes)

    async def acquire(self, nbytes: int) -> None:
        """Wait for room (MB-2, MB-3). Does not suspend when there is room and nobody waits."""
        if self._error is not None:
            raise self._error()
        if not self._waiting and not self._granted and self._fits(nbytes):
            self._take(nbytes)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, future)
        self._waiting.append(entry)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._granted -= 1
                self.release(1, nbytes)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._grant()
            raise
        self._granted -= 1
        self._grant()

    def release(self, messages: int, nbytes: int) -> None:
        """A credit has arrived, or a message was not sent after all."""
        self.messages -= messages
        self.nbytes -= nbytes
        self._grant()

    def close(self, error: Callable[[], Exception]) -> None:
        """The mailbox is gone (MB-5). `error` makes a fresh exception for each waiter."""
        self._error = error
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error())

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for room."""
        return len(self._waiting)

    def _fits(self, nbytes: int) -> bool:
        if self.messages >= self.max_messages:
            return False
        return self.nbytes + nbytes <= self.max_bytes or self.nbytes < self.max_bytes // 4

    def _take(self, nbytes: int) -> None:
        self.messages += 1
        self.nbytes += nbytes

    def _grant(self) -> None:
        while self._waiting:
            nbytes, future = self._waiting[0]
            if future.done():  # cancelled; its task removes nothing more
                self._waiting.popleft()
                continue
            if not self._fits(nbytes):
                return
            self._waiting.popleft()
            self._take(nbytes)
            self._granted += 1
            future.set_result(None)
