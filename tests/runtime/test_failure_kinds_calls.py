"""What users of other runtimes ran into, with calls, meshes and errors: each kind once, under its number in our list of
failures. Kinds 38 and 41 are in the tests of bounds and of the codec; those of processes in `test_failure_kinds.py`."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from runtime import (
    Actor,
    ActorError,
    Channel,
    Failure,
    ProcessDied,
    Stopped,
    UnknownActor,
    context,
    endpoint,
    lookup,
    this_host,
)
from runtime.testing import kill, local_host
from tests.runtime.actors import Greeter, Knot, OddError
from tests.waiting import until


class Odd(Actor):
    """Raises what is hard to carry."""

    @endpoint
    def two_arguments(self) -> None:
        raise OddError(7, "seven")

    @endpoint
    def holds_a_lock(self) -> None:
        error = RuntimeError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    @endpoint
    def refuses(self) -> None:
        class RefusesError(Exception):
            def __reduce__(self):
                raise TypeError("not me")

            def __str__(self) -> str:
                raise ZeroDivisionError

        raise RefusesError("lost?")


@pytest.mark.parametrize(
    ("name", "cls", "text"),
    [
        ("two_arguments", OddError, "OddError: code 7"),
        ("holds_a_lock", RuntimeError, "RuntimeError: holds a lock"),
        ("refuses", ActorError, r"RefusesError: <no text: __str__ raised ZeroDivisionError>"),
    ],
)
async def test_kind_9_an_odd_exception_does_not_hide_the_real_failure(name, cls, text):
    async with local_host() as host:
        odd = await (await host.spawn_procs(1)).spawn("odd", Odd)
        with pytest.raises(cls, match=text) as caught:
            await getattr(odd, name).call_one()
        assert isinstance(caught.value, ActorError)
        assert f"in {name}" in caught.value.remote_traceback


async def test_kind_10_the_error_of_a_constructor_is_the_error():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, name="trainer")
        with pytest.raises(ValueError, match=r"greeter rank \d on .*, __init__ raised ValueError: no such word"):
            await procs.spawn("greeter", Greeter, "fail")
        with pytest.raises(UnknownActor):
            await lookup("greeter")
        assert len(await (await procs.spawn("greeter", Greeter)).hello.call("x")) == 2


async def test_kind_11_a_supervising_hook_runs_on_the_loop_and_may_await():
    class Keeper:
        told: list[Failure] = []

        async def __supervise__(self, failure: Failure) -> bool:
            await asyncio.sleep(0)
            await other.stop()
            self.told.append(failure)
            return True

    async with local_host() as host:
        other = await host.spawn_procs(1, name="other")
        procs = await host.spawn_procs(1, name="victim", owner=Keeper())
        kill(procs)
        await until(lambda: Keeper.told)
        assert isinstance(Keeper.told[0].error, ProcessDied)
        with pytest.raises(Stopped):
            await other.run(int)


async def test_kind_12_one_failed_actor_leaves_the_other_names_alone_and_its_own_name_free():
    async with local_host() as host:
        first, second = await host.spawn_procs(1, name="first"), await host.spawn_procs(1, name="second")
        failing = await first.spawn("one", Greeter)
        await second.spawn("two", Greeter)
        kill(first)
        with pytest.raises(ProcessDied):
            await failing.hello.call_one("x")
        assert await (await lookup("two")).hello.call_one("x") == "hi x from 0 of 1"
        with pytest.raises(UnknownActor, match=r"lookup\('one'\): no living actors of this name; there are second/two"):
            await lookup("one")
        await second.spawn("one", Greeter, "again")
        assert await (await lookup("one")).hello.call_one("x") == "again x from 0 of 1"


async def test_kind_30_outside_of_actors_everything_works_or_raises_at_once():
    with pytest.raises(Stopped, match="no host is running in this process"):
        Channel.open()
    with pytest.raises(Stopped):
        await lookup("x")
    assert context().rank == 0
    async with local_host() as host:
        port, receiver = Channel.open()
        await port.send(1)
        assert await receiver.recv() == 1
        receiver.close()
        greeter = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
    with pytest.raises(Stopped, match="the mesh was stopped"):
        await greeter.hello.call_one("late")


async def test_kind_36_sync_and_async_endpoints_mix_and_a_sync_one_does_not_stop_the_loop():
    class Mixed(Actor):
        @endpoint
        def compute(self) -> str:
            end = time.monotonic() + 60
            while not context().cancelled and time.monotonic() < end:
                time.sleep(0.005)
            return "computed"

        @endpoint(concurrency=2)
        async def look(self) -> str:
            await asyncio.sleep(0)
            return "looked"

    async with this_host(preload=[]) as host:
        mixed = await (await host.spawn_procs(1)).spawn("mixed", Mixed)
        computing = asyncio.create_task(mixed.compute.call_one())
        await asyncio.sleep(0.05)
        assert await mixed.look.call_one() == "looked"
        assert not computing.done()
        computing.cancel()


async def test_kind_37_an_endpoint_that_waits_for_a_message_behind_it_is_reported_with_the_queue():
    class Lock(Actor):
        def __init__(self) -> None:
            self.released = asyncio.Event()

        @endpoint
        async def acquire(self) -> None:
            await self.released.wait()

        @endpoint
        async def release(self) -> None:
            self.released.set()

        @endpoint(concurrency=2)
        async def release_beside(self) -> None:
            self.released.set()

    async with local_host() as host:
        lock = await (await host.spawn_procs(1)).spawn("lock", Lock)
        acquire = asyncio.create_task(lock.acquire.call_one())
        await asyncio.sleep(0)
        release = asyncio.create_task(lock.release.call_one())
        text = str(await until(host.report, lambda report: "lock rank 0 has 1 waiting" in str(report)))
        assert "lock rank 0 runs acquire for" in text
        assert "release (" in text
        await lock.release_beside.call_one()  # what the remedy looks like
        await asyncio.gather(acquire, release)


async def test_kind_37_two_actors_in_each_others_way_are_named():
    async with local_host() as host:
        procs = await host.spawn_procs(2, name="knots")
        knots = await procs.spawn("knot", Knot)
        left, right = knots.slice(rank=0), knots.slice(rank=1)
        calls = [
            asyncio.create_task(left.hold_and_ask.call_one(right)),
            asyncio.create_task(right.hold_and_ask.call_one(left)),
        ]
        await until(host.report, lambda report: str(report).count("runs hold_and_ask") == 2)
        await knots.open.call()
        deadlocks = (await until(host.report, lambda report: report.deadlocks)).deadlocks
        assert "knot rank 0 (hold_and_ask) waits for knot rank 1 (hold_and_ask) waits for knot rank 0" in deadlocks[0]
        for call in calls:
            call.cancel()
