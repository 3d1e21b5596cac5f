"""ST-1 to ST-5 of runtime/streams.py and CE-6 of runtime/cell.py, with real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from runtime import ActorError, DeadlineExceeded, ProcessDied, this_host
from runtime.streams import WINDOW
from tests.runtime.actors import Answer
from tests.runtime.stream_actors import Teller
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATORS = pytest.mark.parametrize("name", ["count", "count_on_main"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def procs():
    async with this_host(preload=[]) as host:
        yield await host.spawn_procs({"rank": 2}, name="rollout")


@pytest_asyncio.fixture(loop_scope="module")
async def tellers(procs):
    tellers = await procs.spawn("teller", Teller)
    yield tellers
    await tellers.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def one(tellers):
    return tellers.slice(rank=0)


async def traced(mesh: Any, line: str) -> Any:
    """Wait for a line of the trace; how many values were made."""
    made, _ = await until(mesh.look.call_one, lambda looked: line in looked[1])
    return made


@GENERATORS
async def test_the_values_of_a_generator_arrive_in_order(one, name):
    assert [value async for value in getattr(one, name).stream_one(500)] == list(range(500))
    assert [value async for value in getattr(one, name).stream_choose(3)] == [0, 1, 2]
    assert [value async for value in getattr(one, name).stream_one(0)] == []


async def test_values_are_decoded_into_the_annotated_type(one):
    sizes = [3, 5000, 200_000]  # in the message, beside it, in shared memory
    answers = [answer async for answer in one.answers.stream_one(sizes)]
    assert all(type(answer) is Answer for answer in answers)
    assert all(np.array_equal(a.token_ids, np.arange(n)) for a, n in zip(answers, sizes, strict=True))


async def test_over_a_mesh_values_come_by_arrival_with_coordinates(tellers):
    seen: list[tuple[int, int]] = []
    with pytest.raises(DeadlineExceeded, match=r"teller.slow_from: deadline of 0.5 s has passed; rank 1 had not ended"):
        async for point, value in tellers.slow_from.options(timeout=0.5).stream(1):
            seen.append((point["rank"], value))
    assert sorted(seen) == [(0, 0), (0, 0), (1, 1)]


@GENERATORS
async def test_a_slow_consumer_holds_the_producer(one, name):
    async with getattr(one, name).stream_one(100_000) as values:
        assert await anext(values) == 0
        made, before = 0, -1
        while made != before:  # until it stands still
            before = made
            await asyncio.sleep(0.05)
            made, _ = await one.look.call_one()
        assert made <= WINDOW
        assert await one.slice().look.call_one()  # the process serves others meanwhile
    assert await traced(one, f"{name} closed") <= WINDOW


async def test_the_window_can_be_set(one):
    async with one.count.options(window=3).stream_one(1000) as values:
        await anext(values)
        await asyncio.sleep(0.1)
        made, _ = await one.look.call_one()
        assert made <= 4


async def test_a_sync_generator_that_waits_for_its_consumer_leaves_the_main_thread_to_others(procs, one):
    async with one.count_on_main.stream_one(100_000) as values:
        await anext(values)
        other = await procs.spawn("other", Teller)
        assert await other.slice(rank=0).on_main.call_one() == "served"
        await other.stop()


@GENERATORS
async def test_leaving_the_loop_closes_the_generator_where_it_runs(one, name):
    async for value in getattr(one, name).stream_one(100_000):
        if value == 5:
            break
    assert await traced(one, f"{name} closed") < 1000
    assert await one.on_main.call_one() == "served"  # its lane is free again


async def test_a_stream_that_nobody_holds_any_more_is_closed(one):
    values = one.count.stream_one(100_000)
    await anext(values)
    del values
    gc.collect()
    await traced(one, "count closed")


async def test_cancelling_the_consumer_cancels_a_generator_that_waits(one):
    values = one.wait_between.stream_one()
    assert await anext(values) == 1
    task = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await traced(one, "cancelled in the generator")


async def test_a_deadline_stops_the_producer_also_while_its_consumer_is_elsewhere(one):
    values = one.wait_between.options(timeout=0.1).stream_one()
    assert await anext(values) == 1
    await traced(one, "cancelled in the generator")
    with pytest.raises(DeadlineExceeded, match="rank 0 had not ended and was told to stop"):
        await anext(values)
    with pytest.raises(StopAsyncIteration):
        await anext(values)


@GENERATORS
async def test_an_error_surfaces_after_the_values_that_came_before(one, name):
    values = getattr(one, name).stream_one(70, fail=True)
    assert [await anext(values) for _ in range(70)] == list(range(70))
    with pytest.raises(LookupError, match="no more numbers") as caught:
        await anext(values)
    assert isinstance(caught.value, ActorError)
    assert (caught.value.rank, caught.value.endpoint) == (0, name)


async def test_an_error_of_one_rank_closes_the_generators_of_the_others(tellers):
    seen: set[int] = set()
    with pytest.raises(LookupError, match="no more numbers") as caught:
        async for point, _ in tellers.count_or_fail.stream(1):
            seen.add(point["rank"])
            if seen == {0, 1}:  # before that there may be no generator to close
                await tellers.let_fail.call()
    assert isinstance(caught.value, ActorError)
    assert caught.value.rank == 1
    await traced(tellers.slice(rank=0), "count closed")


async def test_a_generator_may_consume_the_stream_of_another_actor(tellers):
    one, other = tellers.slice(rank=0), tellers.slice(rank=1)
    assert [value async for value in other.retell.stream_one(one, 100)] == [n * 10 for n in range(100)]
    async for _ in other.retell.stream_one(one, 100_000):
        break
    await traced(one, "count closed")  # closed through the one in between


async def test_the_wrong_adverb_says_which_one_to_use(one, tellers):
    with pytest.raises(
        TypeError, match=r"the endpoint is a generator. Use 'async for value in teller.count.stream_one"
    ):
        await one.count.call_one(3)
    with pytest.raises(TypeError, match=r"returns one value. Use 'await teller.look.call_one\(...\)'"):
        one.look.stream_one()
    with pytest.raises(ValueError, match="expected a mesh of 1 actor"):
        tellers.count.stream_one(3)
    with pytest.raises(TypeError, match="missing a required argument"):
        one.count.stream_one()
    with pytest.raises(ValueError, match="window of at least 1"):
        one.count.options(window=0)


async def test_the_death_of_a_producer_surfaces_after_what_it_had_sent():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="victim")
        teller = await procs.spawn("teller", Teller)
        values = teller.wait_between.stream_one()
        assert await anext(values) == 1
        os.kill(procs.pids[0], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="killed by SIGKILL"):
            await anext(values)


async def test_a_task_that_waits_for_a_value_learns_that_another_has_closed_the_stream(one):
    values = one.wait_between.stream_one()
    assert await anext(values) == 1
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0)
    await values.aclose()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 5)
