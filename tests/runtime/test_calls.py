"""CA-1 to CA-5 of runtime/adverbs.py, AM-1, AM-2 of calls.py and CE-1 to CE-5 of cell.py, with real processes."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import pytest_asyncio

from runtime import (
    ActorError,
    DeadlineExceeded,
    MailboxFull,
    Oversize,
    SelfCall,
    Stopped,
    this_host,
)
from tests.runtime.actors import Answer, Caller, Gates, Greeter, Knotted, OddError, Plain, Scored, Unscored
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host():
    async with this_host(max_message_bytes=64 * 2**20, preload=[]) as host:
        # Large payloads are copied in a thread; the only one of this loop exists before the first test.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        yield host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def procs(host):
    return await host.spawn_procs({"rank": 3}, name="trainer")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(host):
    return await host.spawn_procs(2, name="other")


@pytest_asyncio.fixture(loop_scope="module")
async def greeters(procs):
    greeters = await procs.spawn("greeter", Greeter, "hi")
    yield greeters
    await greeters.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def gates(other):
    gates = await other.slice(rank=0).spawn("gates", Gates)
    yield gates
    await gates.stop()


async def test_call_returns_values_with_coordinates(greeters):
    values = await greeters.hello.call("bob")
    assert values.values() == [f"hi bob from {r} of 3" for r in range(3)]
    assert [(dict(point), value[-6:]) for point, value in values.items()] == [
        ({"rank": r}, f"{r} of 3") for r in range(3)
    ]


async def test_a_slice_counts_its_own_ranks(greeters):
    assert (await greeters.slice(rank=slice(1, None)).hello.call(name="x")).values() == [
        "hi x from 0 of 2",
        "hi x from 1 of 2",
    ]
    place = await greeters.slice(rank=2).place.call_one()
    assert (place["rank"], place["size"], place["current_rank"], place["current_size"]) == (2, 3, 0, 1)
    assert (place["proc"], place["actor"], place["main_thread"]) == ("trainer", "greeter", True)


async def test_async_endpoints_run_beside_the_main_thread_and_reach_it(greeters):
    assert await greeters.slice(rank=0).async_place.call_one() == {"main_thread": False, "through": True}


async def test_call_one_wants_exactly_one(greeters):
    with pytest.raises(ValueError, match=r"greeter.hello.call_one: expected a mesh of 1 actor, got \{rank: 3\}"):
        await greeters.hello.call_one("x")


async def test_scatter_gives_each_rank_its_own_arguments(greeters):
    assert (await greeters.hello.scatter([("a",), ("b",), ("c",)])).values() == [
        f"hi {name} from {rank} of 3" for rank, name in enumerate("abc")
    ]
    with pytest.raises(ValueError, match="expected 3 argument tuples"):
        await greeters.hello.scatter([("a",)])
    with pytest.raises(TypeError, match=r"Write \(value,\)"):
        await greeters.hello.scatter(["a", "b", "c"])


async def test_stream_yields_by_arrival(greeters):
    async for point, value in greeters.fail_on.stream(9, 0.0):
        assert value is None
        assert point.rank in range(3)
    with pytest.raises(ValueError, match="rank 1 fails"):
        async for _ in greeters.fail_on.stream(1, 0.2):
            pass


async def test_choose_takes_the_least_busy(greeters):
    waiting = [asyncio.create_task(greeters.busy.choose(60.0)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert (await greeters.place.choose())["rank"] == 2
    for task in waiting:
        task.cancel()


async def test_messages_of_one_sender_arrive_in_order(greeters):
    one = greeters.slice(rank=0)
    large = np.zeros(2 * 2**20)
    calls = []
    for number in range(300):
        if number % 100 == 50:
            calls.append(asyncio.create_task(one.echo.call_one(large)))  # copied in a thread, the next ones must wait
        calls.append(asyncio.create_task(one.note.call_one(number)))
        if number % 7 == 0:
            await one.note.broadcast(1000 + number)
            calls.append(asyncio.create_task(one.note.call_one(2000 + number)))
    await asyncio.gather(*calls)
    noted = await one.noted.call_one()
    assert [n for n in noted if n < 1000] == list(range(300))
    assert sorted(noted) == sorted([*range(300), *range(1000, 1300, 7), *range(2000, 2300, 7)])


async def test_values_of_all_kinds_cross(greeters):
    one = greeters.slice(rank=0)
    answer = Answer(
        token_ids=np.arange(5000, dtype=np.int32),
        logprobs=np.ones(2, np.float32),
        finish="stop",
        verdicts=[Unscored("x"), Scored(1.0)],
    )
    back = await one.typed.call_one(answer)
    assert isinstance(back, Answer)
    assert np.array_equal(back.token_ids, answer.token_ids)
    assert back.verdicts == answer.verdicts
    plain = await one.echo.call_one(Plain("p", np.arange(100_000)))
    assert isinstance(plain, Plain)
    assert np.array_equal(plain.values, np.arange(100_000))
    for value in (b"x" * 1_000_000, {"k": (1, b"y" * 10_000)}, None, np.float32(1.0)):
        assert await one.echo.call_one(value) == value
    assert await one.numbers.call_one(1, 2.0, 3, flag=True, more=4) == (
        1,
        2.0,
        [3],
        True,
        {"more": 4},
    )  # typed tuple[Any, ...]


def received_blocks() -> set[str]:
    """Blocks of others that this process maps."""
    with open("/proc/self/maps") as file:
        return {line for line in file if "memfd:tutti" in line and " rw-s " not in line}


async def test_large_arrays_arrive_at_all_ranks_and_leave_no_memory(greeters):
    array = np.arange(2**20)
    before = received_blocks()
    values = (await greeters.echo.call(array)).values()
    assert all(np.array_equal(v, array) for v in values)
    values[0][:] = 0
    assert np.array_equal(values[1], array)
    del values
    await asyncio.sleep(0)  # the loop itself holds the result until this turn is over
    gc.collect()
    assert not received_blocks() - before


async def test_wrong_arguments_raise_at_the_caller(greeters):
    with pytest.raises(TypeError, match=r"greeter.hello\(name\): missing a required argument: 'name'") as caught:
        await greeters.hello.call()
    assert not isinstance(caught.value, ActorError)
    with pytest.raises(
        TypeError, match=r"greeter.hello: wrong argument: Expected `str`, got `int` - at `name`"
    ) as caught:
        await greeters.hello.call(3)
    assert not isinstance(caught.value, ActorError)
    with pytest.raises(AttributeError, match=r"Greeter has no endpoint 'helo'; it has"):
        greeters.helo  # noqa: B018
    with pytest.raises(TypeError, match="say how to call it"):
        greeters.hello("x")


@pytest.mark.parametrize(
    ("kind", "cls", "text"),
    [
        ("ValueError", ValueError, "bad word"),
        ("odd", OddError, "code 7"),
        ("os", FileNotFoundError, "No such file"),
        ("unpicklable", RuntimeError, "holds a lock"),
        ("local", KeyError, "here only"),
        ("exit", ActorError, "SystemExit"),
    ],
)
async def test_errors_arrive_as_the_users_class_with_place_and_traceback(greeters, kind, cls, text):
    with pytest.raises(cls) as caught:
        await greeters.slice(rank=1).fail.call_one(kind)
    error = caught.value
    assert isinstance(error, ActorError)
    assert (error.mesh, error.rank, error.endpoint) == ("greeter", 1, "fail")
    assert text in str(error)
    assert "in fail" in error.remote_traceback
    assert await greeters.slice(rank=1).hello.call_one("still here") == "hi still here from 0 of 1"


async def test_first_error_surfaces_before_the_others_have_answered(greeters):
    with pytest.raises(ValueError, match="rank 1 fails") as caught:
        async with asyncio.timeout(10):
            await greeters.fail_on.call(1, 30.0)
    assert isinstance(caught.value, ActorError)
    assert caught.value.rank == 1
    # The others were told to stop, so they are free again.
    async with asyncio.timeout(10):
        await greeters.hello.call("x")


async def test_async_endpoints_overlap_up_to_their_concurrency(gates):
    waiting = [asyncio.create_task(gates.wait.call_one()) for _ in range(20)]
    await until(gates.count.call_one, lambda count: count == 8)
    await gates.open.call_one()
    assert max(await asyncio.gather(*waiting)) == 8


async def test_a_concurrent_endpoint_runs_while_a_serial_one_waits(gates):
    waiting = asyncio.create_task(gates.serial_wait.call_one())
    await asyncio.sleep(0.02)
    await gates.open.call_one()
    assert await waiting == "through"


async def test_cancelling_the_await_cancels_the_endpoint(gates):
    for endpoint, trace in ((gates.wait, "cancelled"), (gates.serial_wait, "serial cancelled")):
        waiting = asyncio.create_task(endpoint.call_one())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(gates.traced.call_one, lambda traced: trace in traced)  # noqa: B023


async def test_a_deadline_stops_the_endpoint_and_says_who_was_late(gates):
    with pytest.raises(DeadlineExceeded, match=r"gates.wait: deadline of 0.05 s has passed; rank 0 had not answered"):
        await gates.wait.options(timeout=0.05).call_one()
    await until(gates.count.call_one, lambda count: count == 0)
    assert await gates.traced.call_one() == ["cancelled"]


async def test_a_cancelled_sync_endpoint_sees_it(greeters):
    one = greeters.slice(rank=0)
    with pytest.raises(TimeoutError):
        await one.busy.options(timeout=0.1).call_one(30.0)
    async with asyncio.timeout(10):
        assert await one.noted.call_one() == [-1]


async def test_a_call_cancelled_in_the_mailbox_never_runs(greeters):
    one = greeters.slice(rank=0)
    busy = asyncio.create_task(one.busy.call_one(60.0))
    waiting = asyncio.create_task(one.note.call_one(5))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.sleep(0)
    busy.cancel()
    assert await one.noted.call_one() == [-1]


async def test_a_full_mailbox_makes_the_sender_wait(greeters):
    one = greeters.slice(rank=0)
    busy = asyncio.create_task(one.busy.call_one(60.0))
    megabytes = np.zeros(4 * 2**20, np.uint8)
    sends = [asyncio.create_task(one.echo.broadcast(megabytes)) for _ in range(12)]
    await until(lambda: sum(task.done() for task in sends) == 8)  # 8 of 4 MiB fit into the 34 MiB of one sender
    with pytest.raises(MailboxFull):
        await one.echo.options(wait=False).broadcast(megabytes)
    assert sum(task.done() for task in sends) == 8
    busy.cancel()
    await asyncio.gather(*sends)
    await one.hello.call_one("all taken")


async def test_oversize_names_size_and_limit_and_the_connection_stays_good(greeters):
    with pytest.raises(Oversize, match=r"the limit is 67108864"):
        await greeters.echo.call(np.zeros(65 * 2**20, np.uint8))
    assert len((await greeters.hello.call("x")).values()) == 3


async def test_an_unsendable_argument_or_result_is_an_error_of_the_call(greeters):
    with pytest.raises(TypeError, match="echo: argument 'value' can't be sent: value is a generator"):
        await greeters.slice(rank=0).echo.call_one(x for x in range(3))
    with pytest.raises(TypeError, match="unsendable: its result can't be sent: result is a lock") as caught:
        await greeters.slice(rank=0).unsendable.call_one()
    assert isinstance(caught.value, ActorError)


async def test_a_serial_actor_calling_itself_raises(other):
    callers = await other.spawn("caller", Caller)
    caller, second = callers.slice(rank=0), callers.slice(rank=1)
    with pytest.raises(SelfCall, match=r"caller rank 0, echo_serial: this call could never run"):
        await caller.ask_again.call_one(caller)
    with pytest.raises(SelfCall):  # through another actor
        await caller.through.call_one(second, caller)
    assert await second.ask_again.call_one(caller) == "x"


async def test_a_lane_for_one_call_that_waits_for_itself_raises_ca4(other):
    callers = await other.spawn("caller", Caller)
    caller, second = callers.slice(rank=0), callers.slice(rank=1)
    with pytest.raises(SelfCall, match=r"ask_once: this call could never run, because the endpoint runs one call at a"):
        await caller.ask_once.options(timeout=5).call_one(caller)
    with pytest.raises(SelfCall):
        await second.ask_once.options(timeout=5).call_one(caller)
    assert await caller.ask_beside.call_one(caller) == "x"  # another lane


async def test_actors_call_actors_of_other_processes_through_handles(other, greeters):
    caller = (await other.spawn("caller", Caller)).slice(rank=0)
    assert await caller.ask.call_one(greeters.slice(rank=slice(0, 2)), "x") == ["hi x from 0 of 2", "hi x from 1 of 2"]
    with pytest.raises(ValueError, match="bad word") as caught:
        await caller.fail_below.call_one(greeters.slice(rank=1))
    assert isinstance(caught.value, ActorError)
    assert (caught.value.mesh, caught.value.rank) == ("caller", 0)
    assert "greeter rank 1" in caught.value.remote_traceback


async def test_stopped_actors_say_so_and_their_process_goes_on(procs, greeters):
    second = await procs.spawn("second", Greeter)
    await greeters.stop()
    with pytest.raises(Stopped, match="greeter was stopped"):
        await greeters.hello.call("x")
    assert len(await second.hello.call("x")) == 3


async def test_what_a_large_actor_was_made_of_is_not_walked_over_and_goes_with_it_ag1(other):
    small = await other.spawn("small", Knotted, 10)
    before, _ = await small.slice(rank=0).counts.call_one()
    large = await other.spawn("large", Knotted, 150_000)
    frozen, alive = await large.slice(rank=0).counts.call_one()
    assert frozen > before + 150_000
    assert alive == 2
    larger = await other.spawn("larger", Knotted, 200_000)
    await small.stop()
    frozen, alive = await larger.slice(rank=0).counts.call_one()
    assert frozen > before + 350_000
    assert alive == 2
    await large.stop()
    frozen, alive = await larger.slice(rank=0).counts.call_one()
    assert before + 200_000 < frozen < before + 350_000  # what stays is left out as before
    assert alive == 1
    await larger.stop()
    again = await other.spawn("again", Knotted, 10)
    assert (await again.slice(rank=0).counts.call_one())[1] == 1
    await again.stop()
