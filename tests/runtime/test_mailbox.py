"""MB-1 to MB-5 of runtime/mailbox.py."""

from __future__ import annotations

import asyncio

import pytest

from runtime.errors import MailboxFull, Stopped
from runtime.mailbox import Room


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_full_mailbox_makes_the_sender_wait_in_order():
    room = Room(max_messages=1, max_bytes=100)
    order: list[int] = []

    async def send(number: int) -> None:
        await room.acquire(1)
        order.append(number)

    tasks = [asyncio.create_task(send(n)) for n in range(4)]
    await turn()
    assert order == [0]
    assert room.waiting == 3
    for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
        room.release(1, 1)
        await turn()
        assert order == expected
    await asyncio.gather(*tasks)


async def test_bytes_count_too():
    room = Room(max_messages=10, max_bytes=100)
    room.acquire_nowait(60)
    with pytest.raises(MailboxFull, match="1 messages, 60 bytes"):
        room.acquire_nowait(60)
    room.release(1, 60)
    room.acquire_nowait(60)


async def test_a_message_larger_than_the_mailbox_is_admitted_alone():
    room = Room(max_messages=10, max_bytes=100)
    room.acquire_nowait(500)
    with pytest.raises(MailboxFull):
        room.acquire_nowait(1)
    room.release(1, 500)
    room.acquire_nowait(1)


async def test_a_cancelled_waiter_leaves_the_queue_and_holds_nothing():
    room = Room(max_messages=1, max_bytes=100)
    room.acquire_nowait(1)
    first, second = (asyncio.create_task(room.acquire(1)) for _ in range(2))
    await turn()
    first.cancel()
    await turn()
    assert room.waiting == 1
    room.release(1, 1)
    await second
    assert (room.messages, room.nbytes) == (1, 1)


async def test_a_waiter_cancelled_after_it_was_granted_gives_the_room_on():
    room = Room(max_messages=1, max_bytes=100)
    room.acquire_nowait(1)
    first, second = (asyncio.create_task(room.acquire(1)) for _ in range(2))
    await turn()
    room.release(1, 1)  # grants the first, whose task has not run yet
    first.cancel()
    await second
    assert (room.messages, room.nbytes) == (1, 1)


async def test_nobody_overtakes_a_waiter_that_was_granted_room_but_has_not_run():
    room = Room(max_messages=2, max_bytes=100)
    room.acquire_nowait(1)
    room.acquire_nowait(1)
    order: list[str] = []

    async def send(name: str) -> None:
        await room.acquire(1)
        order.append(name)

    waiter = asyncio.create_task(send("waiter"))
    await turn()
    room.release(2, 2)
    with pytest.raises(MailboxFull):
        room.acquire_nowait(1)
    late = asyncio.create_task(send("late"))
    await asyncio.gather(waiter, late)
    assert order == ["waiter", "late"]


async def test_closing_fails_waiters_and_later_senders():
    room = Room(max_messages=1, max_bytes=100)
    room.acquire_nowait(1)
    waiter = asyncio.create_task(room.acquire(1))
    await turn()
    room.close(lambda: Stopped("gone"))
    with pytest.raises(Stopped, match="gone"):
        await waiter
    with pytest.raises(Stopped):
        await room.acquire(1)
