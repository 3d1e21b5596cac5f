"""MB-1 to MB-7 of runtime/mailbox.py."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import Channel, MailboxFull, Stopped
from runtime.actor import CancelToken, Context
from runtime.cell import Cell
from runtime.interface import Interface
from runtime.mailbox import FIRST_BYTES, MAX_BYTES, Mailbox, Room
from runtime.messages import ActorFailed, Credit, Grant, Message, Want
from runtime.posting import line_up, try_room
from runtime.testing import local_host
from tests.runtime.actors import Greeter
from tests.waiting import SECONDS, value_of


async def turn() -> None:
    """Let every ready task run."""
    for _ in range(5):
        await asyncio.sleep(0)


def room_of(first: int) -> Room:
    """A room whose receiver never lends."""
    return Room(lambda first, total, at_once: None, first)


async def acquire(room: Room, nbytes: int, *, wait: bool = True) -> None:
    """As a call does: wait for room, and send at once."""
    if not try_room([(room, nbytes)]):
        await line_up([(room, nbytes)], wait)
        room.free()


class Link:
    """A sender of a mailbox, in this process: what the receiver sends reaches the room when `settle` is called."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.to_receiver: list[Callable[[], None]] = []
        self.to_sender: list[Message] = []
        self.room = Room(
            lambda first, total, at_once: self.to_receiver.append(lambda: mailbox.want(self, first, total, at_once))
        )

    def send(self, message: Message) -> None:
        self.to_sender.append(message)

    def settle(self) -> None:
        while self.to_receiver or self.to_sender:
            for job in self.to_receiver[:]:
                self.to_receiver.remove(job)
                job()
            for message in self.to_sender[:]:
                self.to_sender.remove(message)
                if isinstance(message, Grant):
                    self.room.grant(message.nbytes)
                elif isinstance(message, Credit):
                    self.room.credit(message.nbytes)


async def test_a_full_mailbox_makes_the_sender_wait_in_order():
    room = room_of(1)
    order: list[int] = []

    async def send(number: int) -> None:
        await acquire(room, 1)
        order.append(number)

    tasks = [asyncio.create_task(send(n)) for n in range(4)]
    await turn()
    assert order == [0]
    assert room.waiting == 3
    for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        room.credit(1)
        await turn()
        assert order == expected
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_leaves_the_queue_and_holds_nothing():
    room = room_of(1)
    assert room.try_acquire(1)
    first, second = (asyncio.create_task(acquire(room, 1)) for _ in range(2))
    await turn()
    first.cancel()
    await turn()
    assert room.waiting == 1
    room.credit(1)
    await second
    assert room.nbytes == 1


async def test_a_waiter_cancelled_after_it_was_granted_gives_the_room_on():
    room = room_of(1)
    assert room.try_acquire(1)
    first, second = (asyncio.create_task(acquire(room, 1)) for _ in range(2))
    await turn()
    room.credit(1)  # grants the first, whose task has not run yet
    first.cancel()
    await second
    assert room.nbytes == 1


async def test_nobody_overtakes_a_waiter_that_was_granted_room_but_has_not_run():
    room = room_of(2)
    assert room.try_acquire(2)
    order: list[str] = []

    async def send(name: str) -> None:
        await acquire(room, 1)
        order.append(name)

    waiter = asyncio.create_task(send("waiter"))
    await turn()
    room.credit(2)
    assert not room.try_acquire(1)
    late = asyncio.create_task(send("late"))
    await asyncio.gather(waiter, late)
    assert order == ["waiter", "late"]


async def test_nobody_overtakes_one_that_has_room_but_has_not_sent():
    """However the later one waits: asyncio wakes tasks in the order of their futures only if all wait for one already,
    and who is admitted without waiting isn't woken at all."""
    room = room_of(10)
    places = [room.enqueue(1) for _ in range(3)]
    for index, place in enumerate(places):
        assert [p.future.done() for p in places] == [i <= index for i in range(3)]
        assert not room.try_acquire(1)
        await place.future
        room.free()
    assert room.try_acquire(1)
    room.leave(room.enqueue(1))
    assert room.nbytes == 4


async def test_before_a_shut_mailbox_everybody_waits_in_order_until_it_opens():
    asked: list[int] = []
    room = Room(lambda first, total, at_once: None, 1, shut=True)
    assert not room.try_acquire(1)
    places = [room.enqueue(1) for _ in range(2)]
    with pytest.raises(MailboxFull, match="started again"):
        room.enqueue(1, wait=False)
    assert [place.future.done() for place in places] == [False, False]
    room.open(lambda first, total, at_once: asked.append(first))
    assert [place.future.done() for place in places] == [True, False]
    room.free()
    assert asked == [1]


async def test_closing_fails_waiters_and_later_senders():
    room = room_of(1)
    assert room.try_acquire(1)
    waiter = asyncio.create_task(acquire(room, 1))
    await turn()
    room.close(lambda: Stopped("gone"))
    with pytest.raises(Stopped, match="gone"):
        await waiter
    with pytest.raises(Stopped):
        await acquire(room, 1)


async def test_a_message_larger_than_the_mailbox_is_admitted_alone():
    mailbox = Mailbox("a")
    one, other = Link(mailbox), Link(mailbox)
    large = asyncio.create_task(acquire(one.room, FIRST_BYTES + 2 * MAX_BYTES))
    await turn()
    one.settle()
    await large
    second = asyncio.create_task(acquire(other.room, FIRST_BYTES + 1))
    await turn()
    other.settle()
    assert not second.done()
    mailbox.put(FIRST_BYTES + 2 * MAX_BYTES)
    mailbox.take(one, FIRST_BYTES + 2 * MAX_BYTES)  # gives back at once, since somebody asks
    other.settle()
    await second


async def test_who_must_not_wait_is_refused_by_a_full_mailbox_and_only_then():
    mailbox = Mailbox("a")
    one, other = Link(mailbox), Link(mailbox)
    first = asyncio.create_task(acquire(one.room, MAX_BYTES, wait=False))  # more than is its own, but there is room
    await turn()
    one.settle()
    await first
    second = asyncio.create_task(acquire(other.room, MAX_BYTES, wait=False))
    await turn()
    other.settle()
    with pytest.raises(MailboxFull, match="Await the call without wait=False"):
        await second
    assert other.room.try_acquire(10)  # what is its own is still there


async def test_what_was_lent_for_a_cancelled_waiter_goes_back():
    mailbox = Mailbox("a")
    one, other = Link(mailbox), Link(mailbox)
    waiter = asyncio.create_task(acquire(one.room, MAX_BYTES))
    await turn()
    waiter.cancel()
    await turn()
    one.settle()
    second = asyncio.create_task(acquire(other.room, MAX_BYTES))
    await turn()
    other.settle()
    await second


async def test_what_a_dead_sender_was_lent_goes_to_the_others():
    mailbox = Mailbox("a")
    one, other = Link(mailbox), Link(mailbox)
    first = asyncio.create_task(acquire(one.room, MAX_BYTES))
    await turn()
    one.settle()
    await first
    second = asyncio.create_task(acquire(other.room, MAX_BYTES))
    await turn()
    other.settle()
    assert not second.done()
    mailbox.lost(one)
    other.settle()
    await second


@given(
    sizes=st.lists(st.lists(st.integers(1, 3 * MAX_BYTES // 2), max_size=12), min_size=1, max_size=4),
    choices=st.randoms(use_true_random=False),
)
def test_a_mailbox_is_bounded_over_all_senders_and_everything_arrives(sizes, choices):
    """MB-1, MB-4: whatever order things happen in."""

    async def run() -> None:
        mailbox = Mailbox("a")
        links = [Link(mailbox) for _ in sizes]
        lying: list[tuple[Link, int]] = []

        async def send(link: Link, messages: list[int]) -> None:
            for nbytes in messages:
                await acquire(link.room, nbytes)
                mailbox.put(nbytes)
                lying.append((link, nbytes))

        tasks = [asyncio.create_task(send(link, messages)) for link, messages in zip(links, sizes, strict=True)]
        taken = 0
        while taken < sum(map(len, sizes)):
            await turn()
            choices.choice(links).settle()
            beyond_the_first = [max(0, sum(n for at, n in lying if at is link) - FIRST_BYTES) for link in links]
            largest = max((n for _, n in lying), default=0)
            assert sum(beyond_the_first) <= max(MAX_BYTES, largest)
            if lying and choices.random() < 0.5:
                link, nbytes = lying.pop(0)
                taken += 1
                mailbox.take(link, nbytes)
                if not lying:
                    mailbox.give_all()
        await asyncio.gather(*tasks)
        assert (mailbox.messages, mailbox.nbytes) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), SECONDS))


async def test_who_waits_for_room_of_an_actor_or_port_that_ends_is_let_in_to_be_refused_mb7():
    """Also when what was lent to others has not come back: it never will, to a mailbox that is gone."""
    async with local_host() as host:
        _, receiver = Channel.open()
        place = Context(rank=0, size=1, proc_name="", actor_name="", host="", node=host.node)
        cell = Cell(_Process(), "key", Greeter(), Interface.of(Greeter), place)
        for served, end in ((receiver, receiver.close), (cell, functools.partial(cell.stop, 1.0))):
            rich: Any = _Sender()
            poor: Any = _Sender()
            served.want(rich, Want("key", MAX_BYTES, MAX_BYTES, False))
            served.want(poor, Want("key", 1, 1, False))
            assert [type(message) for message in rich.sent] == [Grant]
            assert poor.sent == []
            await value_of(end())
            assert [type(message) for message in poor.sent] == [Grant]


class _Sender:
    """A connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class _Process:
    """What a cell needs of its process when nothing runs."""

    limit = 0

    def run_on_main(self, job: Callable[[], Any], label: str, done: Callable[[Any], None] | None) -> None:
        raise AssertionError

    def peer_failed(self, token: CancelToken) -> None:
        raise AssertionError

    def report(self, failure: ActorFailed) -> None:
        raise AssertionError
