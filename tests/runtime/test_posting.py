"""UW-1 and UW-2 of runtime/posting.py, CE-7 and CE-8 of cell.py: calls under way, and how they follow each other."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import pytest_asyncio

from runtime import DeadlineExceeded, MailboxFull, Stopped, TaskGroup, this_host
from tests.runtime.lane_actors import Notebook
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def procs():
    async with this_host(preload=[]) as host:
        # Large payloads are copied in a thread; the only one of this loop exists before the first test.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        yield await host.spawn_procs(2, name="books")


@pytest_asyncio.fixture(loop_scope="module")
async def books(procs):
    books = await procs.spawn("notebook", Notebook)
    yield books
    await books.stop()


@pytest.fixture
def book(books):
    return books.slice(rank=0)


async def test_a_call_is_under_way_before_anybody_awaits_it_uw1(book):
    call = book.note.call_one(1)
    assert await book.notes_so_far.call_one() == [1]
    assert await call == 1
    assert await call == 1, "its answer stays"


async def test_a_call_goes_wherever_a_coroutine_goes(book):
    assert await asyncio.gather(*[book.note.call_one(n) for n in range(3)]) == [0, 1, 2]
    assert await asyncio.create_task(book.note.call_one(3)) == 3
    assert await asyncio.ensure_future(book.note.call_one(4)) == 4
    assert await asyncio.wait_for(book.note.call_one(5), 10) == 5
    assert await asyncio.shield(book.note.call_one(6)) == 6
    done, _ = await asyncio.wait([asyncio.ensure_future(book.note.call_one(7))])
    assert done.pop().result() == 7
    async with TaskGroup("test") as tasks:
        task = tasks.start(book.note.call_one(8), name="note")
    assert task.result() == 8
    assert await book.note.call_one(9).as_asyncio() == 9
    assert await book.notes_so_far.call_one() == list(range(10))


async def test_calls_made_on_another_thread_are_made_by_the_loop(books, book):
    loop, found = asyncio.get_running_loop(), []

    def elsewhere() -> None:
        def result(call) -> object:
            return asyncio.run_coroutine_threadsafe(call, loop).result(10)

        found.append(result(book.note.call_one(1)))
        found.append(result(books.note.choose(2)))
        for call in (book.note.call_one("one"), book.wait.options(timeout=0.05).call_one()):
            with pytest.raises((TypeError, DeadlineExceeded)):
                result(call)
        cancelled = asyncio.run_coroutine_threadsafe(book.wait.call_one(), loop)
        cancelled.cancel()
        found.append(result(book.note.options(timeout=10).call_one(3)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await until(lambda: not thread.is_alive(), pause=0.001)
    assert found == [1, 2, 3]


async def test_large_and_small_calls_arrive_in_the_order_made_r1(book):
    """A large one is copied in another thread first; nobody behind it overtakes it, awaited or not."""
    large = np.zeros(8 * 2**20, np.uint8)
    calls = [book.note.call_one(n, large if n % 3 == 0 else None) for n in range(12)]
    assert await asyncio.gather(*calls) == list(range(12))
    assert await book.notes_so_far.call_one() == list(range(12))


async def test_sync_and_async_calls_of_a_lane_run_in_the_order_made_ce8(book):
    calls = [(book.note_on_main if n % 5 < 2 else book.note).call_one(n) for n in range(200)]
    assert await asyncio.gather(*calls) == list(range(200))
    assert await book.notes_so_far.call_one() == list(range(200))


async def test_calls_that_share_a_task_share_nothing_else_ce8(book):
    calls = [book.swap_variable.call_one(str(n)) for n in range(50)]
    assert set(await asyncio.gather(*calls)) == {"unset"}
    assert await asyncio.gather(*[book.task_is_usable.call_one() for _ in range(20)]) == [True] * 20


async def test_a_call_that_cancels_its_task_leaves_the_next_ones_alone_ce8(book):
    calls = [book.note.call_one(0), book.cancel_yourself.call_one(), book.wait_twice.call_one(), book.note.call_one(1)]
    assert await asyncio.gather(*calls) == [0, None, "waited", 1]


async def test_a_call_cancelled_in_the_turn_of_its_sending_leaves_its_lane_free_ce3(book):
    """Both messages arrive together: the call has been started, its task has not run yet."""
    for _ in range(20):
        call = book.wait.call_one().as_asyncio()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await book.note.options(timeout=10).call_one(1) == 1


async def test_a_cancel_ends_the_call_that_waits_and_no_other_ce8(book):
    first, waits, last = book.note.call_one(1), book.wait.call_one().as_asyncio(), book.note.call_one(2)
    assert await first == 1
    waits.cancel()
    assert await last == 2
    with pytest.raises(asyncio.CancelledError):
        await waits


async def test_a_cancelled_call_leaves_the_line_before_a_full_mailbox_uw2(book):
    waits = book.wait.call_one().as_asyncio()
    large = np.zeros(24 * 2**20, np.uint8)
    calls = [book.note.call_one(n, large).as_asyncio() for n in range(4)]
    await asyncio.sleep(0.05)
    with pytest.raises(MailboxFull):
        await book.note.options(wait=False).call_one(99, large)
    calls[2].cancel()
    waits.cancel()
    await asyncio.wait(calls)
    assert [call.cancelled() for call in calls] == [False, False, True, False]
    assert await book.notes_so_far.call_one() == [0, 1, 3]


async def test_a_deadline_names_the_rank_and_stops_the_endpoint_uw2(books):
    busy = books.wait.choose().as_asyncio()
    with pytest.raises(DeadlineExceeded, match=r"notebook\.wait: deadline of 0\.05 s has passed; rank 1 had not"):
        await books.wait.options(timeout=0.05).choose()
    assert await books.slice(rank=1).note.call_one(1) == 1
    busy.cancel()


async def test_what_is_wrong_is_raised_where_the_call_is_made(book, books):
    with pytest.raises(TypeError, match="note"):
        book.note.call_one("one")
    with pytest.raises(ValueError, match="expected a mesh of 1 actor"):
        books.note.call_one(1)


async def test_an_actor_that_is_gone_is_an_error_of_the_answer(procs):
    book = await procs.slice(rank=0).spawn("short-lived", Notebook)
    await book.stop()
    calls = [book.note.call_one(n) for n in range(3)]
    assert [type(e) for e in await asyncio.gather(*calls, return_exceptions=True)] == [Stopped] * 3


async def test_many_answers_take_few_writes_ce7(book, monkeypatch):
    """Counted where they arrive: the answers to quick calls come many at a time."""
    peer = book._node.peers[book.refs[0].address]
    reads = 0
    receive = peer.connection._stream.receive

    def counted(targets):
        nonlocal reads
        reads += 1
        return receive(targets)

    monkeypatch.setattr(peer.connection._stream, "receive", counted)
    for _ in range(2):  # what a call takes is known after the first
        reads = 0
        await asyncio.gather(*[book.note.call_one(n) for n in range(1000)])
    assert reads < 200
