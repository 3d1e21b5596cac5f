"""TE-1 to TE-3 of runtime/testing.py."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from runtime import (
    Actor,
    ActorError,
    Channel,
    DeadlineExceeded,
    HostMesh,
    Oversize,
    ProcessDied,
    Restart,
    SelfCall,
    Stopped,
    endpoint,
    lookup,
    this_host,
)
from runtime.testing import delayed, drop_connection, kill, local_host
from tests.runtime.actors import Caller, Gates, Greeter, OddError, Tidy
from tests.runtime.stream_actors import Sender, Teller
from tests.waiting import until


class Counter(Actor):
    """The smallest actor that there can be many of."""

    def __init__(self, number: int) -> None:
        self.number = number

    @endpoint
    async def add(self, other: int) -> int:
        return self.number + other


@pytest.fixture(params=["local", "processes"])
async def host(request):
    """The same tests run without and with processes: the semantics are the same (TE-1)."""
    make = local_host if request.param == "local" else this_host
    async with make(preload=[], max_message_bytes=2**20) as host:
        yield host


async def test_calls_errors_deadlines_and_checks_are_the_same(host: HostMesh):
    procs = await host.spawn_procs({"rank": 2}, name="trainer")
    greeters = await procs.spawn("greeter", Greeter, "hello")
    assert (await greeters.hello.call("bob")).values() == [f"hello bob from {rank} of 2" for rank in range(2)]
    one = greeters.slice(rank=1)
    assert (await one.place.call_one())["proc"] == "trainer"
    assert (await one.async_place.call_one())["through"] in (True, False)
    with pytest.raises(OddError) as caught:
        await one.fail.call_one("odd")
    assert isinstance(caught.value, ActorError)
    assert caught.value.rank == 1
    with pytest.raises(TypeError, match="wrong argument"):
        await one.hello.call_one(3)
    with pytest.raises(Oversize):
        await one.echo.call_one(np.zeros(2**20))
    with pytest.raises(DeadlineExceeded):
        await one.busy.options(timeout=0.05).call_one(60.0)
    assert await one.noted.call_one() == [-1]
    sent = {"list": [1]}
    back = await one.echo.call_one(sent)
    assert back == sent
    assert back is not sent  # it has crossed
    with pytest.raises(ValueError, match="no such word"):
        await procs.spawn("other", Greeter, "fail")


async def test_actors_call_each_other_stream_and_send_through_ports(host: HostMesh):
    first, second = await host.spawn_procs(1, name="first"), await host.spawn_procs(1, name="second")
    greeter = await first.spawn("greeter", Greeter)
    caller = await second.spawn("caller", Caller)
    assert await caller.ask.call_one(greeter, "x") == ["hi x from 0 of 1"]
    with pytest.raises(SelfCall):
        await caller.ask_again.call_one(caller)
    teller = await first.spawn("teller", Teller)
    assert [value async for value in teller.count.stream_one(5)] == list(range(5))
    async for value in teller.count_on_main.stream_one(10**6):
        if value == 3:
            break
    await until(teller.look.call_one, lambda looked: "count_on_main closed" in looked[1])
    sender = await second.spawn("sender", Sender)
    port, receiver = Channel.open(int)
    async with receiver:
        await sender.send_from_main.call_one(port, [1, 2])
        assert [await receiver.recv(), await receiver.recv()] == [1, 2]
    assert await sender.greet_by_name.call_one("greeter", "y") == ["hi y from 0 of 1"]
    assert (await lookup("greeter")).name == "greeter"


async def test_a_killed_process_fails_its_calls_and_comes_back_with_a_policy(host: HostMesh):
    procs = await host.spawn_procs(1, name="victim", restart=Restart())
    gates = await procs.spawn("gates", Gates)
    waiting = asyncio.create_task(gates.serial_wait.call_one())
    await asyncio.sleep(0.05)
    kill(procs)
    with pytest.raises(ProcessDied, match="killed by SIGKILL"):
        await waiting
    assert await gates.count.call_one() == 0  # waits until it is there again


async def test_a_dropped_connection_is_a_death_that_is_told(host: HostMesh):
    procs = await host.spawn_procs(2, name="victim")
    gates = await procs.spawn("gates", Gates)
    waiting = asyncio.create_task(gates.slice(rank=0).serial_wait.call_one())
    await asyncio.sleep(0.05)
    drop_connection(procs.slice(rank=0))
    with pytest.raises(ProcessDied, match="gates rank 0"):
        await waiting
    assert await gates.slice(rank=1).count.call_one() == 0


async def test_delayed_answers_come_later_and_in_order(host: HostMesh):
    procs = await host.spawn_procs(1)
    greeter = await procs.spawn("greeter", Greeter)
    with delayed(procs, 0.3):
        with pytest.raises(DeadlineExceeded):
            await greeter.hello.options(timeout=0.1).call_one("x")
        slow = asyncio.create_task(greeter.hello.call_one("slow"))
        await asyncio.sleep(0.05)
    assert not slow.done()
    await greeter.hello.call_one("later")
    assert slow.done()


async def test_stop_runs_clean_up_and_later_calls_say_so(host: HostMesh, tmp_path):
    procs = await host.spawn_procs(1)
    tidy = await procs.spawn("tidy", Tidy, str(tmp_path / "clean"))
    await procs.stop()
    assert (tmp_path / "clean").read_text() == "None"
    with pytest.raises(Stopped):
        await tidy.nothing.call()


async def test_a_local_host_starts_no_process():
    async with local_host() as host:
        procs = await host.spawn_procs(3)
        assert procs.pids == [os.getpid()] * 3
        assert (await procs.run(os.getpid)).values() == [os.getpid()] * 3


@pytest.mark.timeout(180)  # two threads hand over to each other some thousand times, which a busy machine makes slow
async def test_thousands_of_actors_share_a_process():
    async with local_host() as host:
        procs = await host.spawn_procs(1)
        meshes = [await procs.spawn(f"counter-{n}", Counter, n) for n in range(1000)]
        assert await asyncio.gather(*[m.add.call_one(1) for m in meshes]) == list(range(1, 1001))
        assert (await lookup("counter-999")).name == "counter-999"
