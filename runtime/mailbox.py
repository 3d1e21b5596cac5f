"""Room in the mailbox of an actor or port: `Room` is how a sender counts it, `Mailbox` how the receiver does.

    acquire      sent          taken out by the actor      credit arrives
    |-- waits --|---- message lies in the mailbox ----|-- on the way --| release

A message counts as its bytes plus `OVERHEAD`, so a bound in bytes bounds the number of messages as well.

MB-1: a mailbox holds at most `FIRST_BYTES` of each sender, and `MAX_BYTES` beyond that of all senders together. The
      first needs no asking; the rest is lent by the receiver on demand (`Want`, `Grant`), first come, first served.
MB-2: who waits is served in the order of asking, one at a time: whoever comes later, by whatever way, gets no room
      before the one that has it has sent (R1).
MB-3: a cancelled waiter leaves the queue and holds nothing; what was lent for it goes back.
MB-4: a message larger than `MAX_BYTES` is admitted alone: when nothing else is lent, not never.
MB-5: after `close(error)` every waiter and whoever comes later raises that error.
MB-6: before a shut mailbox everybody waits, in the order of asking; `open` lets them in.
MB-7: when the actor or port ends, whoever waits for more room of it gets it, and is refused with what it sends.

Credits come in batches: a receiver may hold back less than a quarter of `FIRST_BYTES` of a sender while it is busy. It
gives everything back when it is idle or when somebody asks for more. The sender counts what is held back as used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from runtime.errors import MailboxFull
from runtime.messages import Credit, Grant, Message

OVERHEAD = 1024
"""Bytes that a message counts for beside its payload: about what its objects take."""
FIRST_BYTES = 2 * 2**20
"""What each sender may have in a mailbox without asking."""
MAX_BYTES = 32 * 2**20
"""What a mailbox lends to all its senders beyond that."""

Ask = Callable[[int, int, bool], None]
"""Ask the receiver for more: bytes that the first waiter lacks, bytes that all waiters lack, answer at once or not."""


class Place:
    """A place in the line before a mailbox."""

    __slots__ = ("future", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Room:
    """What one sender has in one mailbox. `posting.line_up` adds the waiting, for several of them at once."""

    def __init__(self, ask: Ask, first_bytes: int = FIRST_BYTES, *, shut: bool = False) -> None:
        self.shut = shut
        """Its actor is being made again (MB-6)."""
        self.nbytes = 0
        """Of messages that were sent and not credited yet."""
        self.lent = 0
        """Bytes that the receiver allows beyond `first_bytes`."""
        self._first = first_bytes
        self._ask = ask
        self._asking = False
        self._waiting: deque[Place] = deque()
        self._admitted: Place | None = None
        """It has room, and its message was not sent yet (MB-2)."""
        self._error: Callable[[], Exception] | None = None

    def try_acquire(self, nbytes: int) -> bool:
        """Take room if there is some, nobody waits and it isn't shut.

        Raises:
            what `close` was given.
        """
        if self._error is not None:
            raise self._error()
        if self._waiting or self._admitted is not None or self.shut or self.nbytes + nbytes > self._first + self.lent:
            return False
        self.nbytes += nbytes
        return True

    def enqueue(self, nbytes: int, *, wait: bool = True) -> Place:
        """Stand in line. Await its `future`, send, and call `free`; or `leave` (MB-3).

        Raises:
            MailboxFull: with `wait=False`, if it is shut, or others wait already.
        """
        if not wait and (self._waiting or self._admitted is not None or self._asking or self.shut):
            raise self._full()
        place = Place(nbytes)
        self._waiting.append(place)
        self._admit(at_once=not wait)
        return place

    def leave(self, place: Place) -> None:
        """Give up a place, whether it holds room already or not."""
        if place is self._admitted:
            self.nbytes -= place.nbytes
            self.free()
        elif place in self._waiting:
            self._waiting.remove(place)
            self._admit()
        elif place.future.done() and not place.future.cancelled():
            place.future.exception()  # that of one of several mailboxes is enough

    def free(self) -> None:
        """Who had room has sent: the next may come."""
        self._admitted = None
        self._admit()

    def release(self, nbytes: int) -> None:
        """A message was not sent after all."""
        self.nbytes -= nbytes
        self._admit()

    def credit(self, nbytes: int) -> None:
        """Messages have left the mailbox. What was lent is paid back first, on both sides alike."""
        self.nbytes -= nbytes
        if self.lent:
            self.lent -= min(self.lent, nbytes)
        if self._waiting or self.lent:
            self._admit()

    def grant(self, nbytes: int) -> None:
        """The answer to what was asked; 0 means that there is no room now."""
        self._asking = False
        self.lent += nbytes
        if not nbytes and self._waiting:
            place = self._waiting.popleft()
            if not place.future.done():
                place.future.set_exception(self._full())
        self._admit()

    def open(self, ask: Ask) -> None:
        """The actor is there (MB-6). `ask` reaches its receiver."""
        self._ask = ask
        self.shut = False
        self._admit()

    def close(self, error: Callable[[], Exception]) -> None:
        """The mailbox is gone (MB-5). `error` makes a fresh exception for each waiter."""
        self._error = error
        while self._waiting:
            place = self._waiting.popleft()
            if not place.future.done():
                place.future.set_exception(error())

    @property
    def closed(self) -> bool:
        """Whether the mailbox is gone."""
        return self._error is not None

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for room."""
        return len(self._waiting)

    def _full(self) -> MailboxFull:
        if self.shut:
            return MailboxFull("its process is being started again. Await the call without wait=False, or call later")
        return MailboxFull(
            f"the mailbox is full ({self.nbytes} bytes of this sender are in it or on the way). Await the call without "
            "wait=False, or send less"
        )

    def _admit(self, *, at_once: bool = False) -> None:
        while self._waiting and self._admitted is None and not self.shut:
            place = self._waiting[0]
            if place.future.done():  # cancelled; its task will leave
                self._waiting.popleft()
                continue
            if self.nbytes + place.nbytes > self._first + self.lent:
                self._ask_for_more(at_once)
                return
            self._admitted = self._waiting.popleft()
            self.nbytes += place.nbytes
            place.future.set_result(None)
        if self._waiting:
            return
        surplus = self.lent - max(0, self.nbytes - self._first)
        if surplus > 0 and not self._asking:  # lent for waiters that have gone (MB-3)
            self.lent -= surplus
            self._ask(0, -surplus, False)

    def _ask_for_more(self, at_once: bool) -> None:
        if self._asking or self._error is not None:
            return
        lacking = self.nbytes - self._first - self.lent
        first = lacking + self._waiting[0].nbytes
        if first > 0:
            self._asking = True
            self._ask(first, lacking + sum(place.nbytes for place in self._waiting), at_once)


class Sender(Protocol):
    """The connection of a sender, as its receiver sees it."""

    def send(self, message: Message) -> None:
        """Send without a payload."""


class Mailbox:
    """The receiver's account of one mailbox: what lies in it, what it owes its senders, what it has lent them."""

    def __init__(self, key: str, max_bytes: int = MAX_BYTES) -> None:
        self.key = key
        """Of the actor or port that it belongs to."""
        self.messages = 0
        self.nbytes = 0
        """What lies in it."""
        self._max = max_bytes
        self._owed: dict[Sender, int] = {}
        """Bytes that were taken out and not credited yet."""
        self._lent: dict[Sender, int] = {}
        self._asked: dict[Sender, tuple[int, int]] = {}
        """(first, all) that each sender lacks, in the order of asking."""

    def put(self, nbytes: int) -> None:
        """A message has arrived."""
        self.messages += 1
        self.nbytes += nbytes

    def take(self, sender: Sender, nbytes: int) -> None:
        """A message leaves the mailbox."""
        self.messages -= 1
        self.nbytes -= nbytes
        owed = self._owed.get(sender, 0) + nbytes
        self._owed[sender] = owed
        if owed >= FIRST_BYTES // 4 or self._asked:
            self.give_credit(sender)

    def owed(self, sender: Sender) -> int:
        """What the next answer to the sender gives back; it counts as given."""
        owed = self._owed.pop(sender, 0)
        if self._lent:
            self._pay_back(sender, owed)
        return owed

    def give_credit(self, sender: Sender) -> None:
        """Give back now what is owed to one sender."""
        owed = self._owed.pop(sender, 0)
        if owed:
            sender.send(Credit(self.key, owed))
            self._pay_back(sender, owed)

    def give_all(self) -> None:
        """Give back what is owed to all senders."""
        for sender in list(self._owed):
            self.give_credit(sender)

    def want(self, sender: Sender, first: int, total: int, at_once: bool) -> None:
        """A sender asks for more, or gives back what it was lent (a negative total)."""
        if total < 0:
            self._pay_back(sender, -total)
            return
        self._asked[sender] = (first, total)
        self.give_all()
        self._lend()
        if at_once and self._asked.pop(sender, None) is not None:
            sender.send(Grant(self.key, 0))

    def close(self) -> None:
        """Its actor or port has ended (MB-7)."""
        for sender, (_, total) in self._asked.items():
            sender.send(Grant(self.key, total))
        self._asked.clear()

    def lost(self, sender: Sender) -> None:
        """The sender is gone."""
        self._owed.pop(sender, None)
        self._asked.pop(sender, None)
        self._pay_back(sender, self._lent.get(sender, 0))

    def _pay_back(self, sender: Sender, nbytes: int) -> None:
        lent = self._lent.get(sender, 0)
        if lent > nbytes:
            self._lent[sender] = lent - nbytes
        elif lent:
            del self._lent[sender]
        self._lend()

    def _lend(self) -> None:
        """Serve those who ask, in order: what the first waiter lacks or nothing, and more if there is more."""
        while self._asked:
            sender, (first, total) = next(iter(self._asked.items()))
            used = sum(self._lent.values())
            if used and used + first > self._max:
                return
            nbytes = max(first, min(total, self._max - used))
            del self._asked[sender]
            self._lent[sender] = self._lent.get(sender, 0) + nbytes
            sender.send(Grant(self.key, nbytes))
