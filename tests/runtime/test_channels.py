"""CH-1 to CH-5 of runtime/channels.py, NA-1, NA-2 of directory.py, BK-1, BK-2 of blocking_calls.py: real processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import pytest_asyncio

from runtime import (
    ActorError,
    Channel,
    DeadlineExceeded,
    Port,
    ProcessDied,
    SelfCall,
    Stopped,
    UnknownActor,
    lookup,
    this_host,
)
from tests.runtime.actors import Answer, Gates, Greeter, OddError
from tests.runtime.stream_actors import Sender
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host():
    async with this_host(preload=[]) as host:
        yield host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def procs(host):
    procs = await host.spawn_procs(2, name="senders")
    # Connections between processes stay; all of them exist before the first test.
    senders = await procs.spawn("warm", Sender)
    port, receiver = Channel.open()
    await asyncio.gather(port.send(1), senders.send.call(port, [1]))
    for rank in range(2):
        await senders.slice(rank=rank).send.call_one(await senders.slice(rank=1 - rank).give.call_one(1), [1])
    receiver.close()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await asyncio.to_thread(int)
    await senders.stop()
    return procs


@pytest_asyncio.fixture(loop_scope="module")
async def senders(procs):
    senders = await procs.spawn("sender", Sender)
    yield senders
    await senders.stop()


@pytest.mark.parametrize("name", ["send", "send_from_main"])
async def test_values_of_one_sender_arrive_in_order(senders, name):
    port, receiver = Channel.open(int)
    async with receiver:
        await getattr(senders.slice(rank=0), name).call_one(port, list(range(300)))
        assert [await receiver.recv() for _ in range(300)] == list(range(300))


async def test_several_senders_and_the_controller_itself_share_a_port(senders):
    port, receiver = Channel.open()
    async with receiver:
        await senders.send.call(port, ["x"] * 3)
        await port.send("mine")
        assert sorted([await receiver.recv() for _ in range(7)]) == ["mine"] + ["x"] * 6


async def test_an_actor_can_open_a_channel_and_give_its_port_away(senders):
    one, other = senders.slice(rank=0), senders.slice(rank=1)
    port = await one.give.call_one(20)
    assert isinstance(port, Port)
    await other.send.call_one(port, list(range(10)))
    for number in range(10, 20):
        await port.send(number)
    await until(one.summed.call_one, lambda total: total == sum(range(20)))


async def test_values_are_decoded_into_the_type_of_the_channel(senders):
    port, receiver = Channel.open(Answer)
    async with receiver:
        sent = Answer(token_ids=np.arange(100_000), logprobs=np.zeros(1), finish="stop")
        await port.send(sent)
        got = await receiver.recv()
        assert type(got) is Answer
        assert np.array_equal(got.token_ids, sent.token_ids)
        with pytest.raises(TypeError, match=r"port.send: wrong argument: .*got `str` - at `value`"):
            await port.send("text")
        with pytest.raises(TypeError, match="value is a generator"):
            await Channel.open()[0].send(x for x in [1])


async def test_a_full_port_makes_its_sender_wait(senders):
    port, receiver = Channel.open(name="slow")
    async with receiver:
        sending = asyncio.create_task(senders.slice(rank=0).send.call_one(port, [np.zeros(2**18)] * 60))  # 2 MB each
        await asyncio.sleep(0.3)
        assert receiver._mailbox.messages < 20
        assert not sending.done()
        for _ in range(60):
            await receiver.recv()
        await sending


async def test_an_exception_comes_after_what_was_sent_before(senders):
    port, receiver = Channel.open()
    async with receiver:
        await senders.slice(rank=0).fail_into.call_one(port)
        assert await receiver.recv() == 1
        with pytest.raises(OddError) as caught:
            await receiver.recv()
        assert isinstance(caught.value, ActorError)
        assert caught.value.detail == "seven"


async def test_closing_a_port_ends_the_loop_of_the_receiver(senders):
    port, receiver = Channel.open()
    await senders.slice(rank=0).close.call_one(port)
    assert [value async for value in receiver] == [1]
    with pytest.raises(Stopped, match="port: the channel is closed"):
        await receiver.recv()


async def test_a_channel_for_one_value_can_be_awaited_and_ends_by_itself(senders):
    port, receiver = Channel.open(once=True)
    await senders.slice(rank=0).send.call_one(port, ["the answer"])
    assert await receiver == "the answer"
    await port.send("lost")  # CH-4: the first one may be
    with pytest.raises(Stopped):
        for _ in range(100):
            await port.send("too late")
            await asyncio.sleep(0.01)


async def test_a_receiver_that_closes_frees_a_sender_that_waits(senders):
    port, receiver = Channel.open()
    sending = asyncio.create_task(senders.slice(rank=1).send.call_one(port, [np.zeros(2**18)] * 60))
    await asyncio.sleep(0.1)
    receiver.close()
    with pytest.raises(Stopped, match="its receiver has closed"):
        await sending


async def test_recv_has_a_deadline_and_the_channel_stays_open():
    port, receiver = Channel.open(name="quiet")
    async with receiver:
        with pytest.raises(DeadlineExceeded, match=r"quiet: no value came within 0.01 s"):
            await receiver.recv(timeout=0.01)
        await port.send(1)
        assert await receiver.recv(timeout=10) == 1


async def test_tasks_that_share_a_receiver_get_each_value_once():
    port, receiver = Channel.open()
    async with receiver:
        tasks = [asyncio.create_task(receiver.recv()) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        for number in range(4):
            await port.send(number)
        assert sorted(await asyncio.gather(*tasks[1:])) == [0, 1, 2, 3]


async def test_a_receiver_can_not_be_sent(senders):
    _, receiver = Channel.open()
    with pytest.raises(TypeError, match="Send the port"):
        pickle.dumps(receiver)
    receiver.close()


async def test_sending_to_a_dead_process_raises():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="victim")
        port = await (await procs.spawn("sender", Sender)).give.call_one(5)
        os.kill(procs.pids[0], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="numbers rank 0"):
            for _ in range(100):
                await port.send(1)
                await asyncio.sleep(0.02)


async def test_a_name_finds_actors_from_the_controller_and_from_inside_others(host, procs, senders):
    greeters = await procs.spawn("greeter", Greeter, "hello")
    assert (await (await lookup("greeter")).hello.call("x")).values() == ["hello x from 0 of 2", "hello x from 1 of 2"]
    assert await senders.slice(rank=1).greet_by_name.call_one("senders/greeter", "y") == [
        "hello y from 0 of 2",
        "hello y from 1 of 2",
    ]
    await greeters.stop()
    with pytest.raises(UnknownActor, match=r"lookup\('greeter'\): no living actors of this name; there are .*sender"):
        await lookup("greeter")
    with pytest.raises(UnknownActor):
        await senders.slice(rank=1).greet_by_name.call_one("greeter", "y")
    again = await procs.spawn("greeter", Greeter, "again")
    others = await host.spawn_procs(1, name="other")
    await others.spawn("greeter", Greeter)
    with pytest.raises(
        UnknownActor, match=r"^lookup\(.greeter.\): 2 meshes have this name: say senders/greeter or other/greeter"
    ):
        await lookup("greeter")
    assert (await (await lookup("other/greeter")).hello.call_one("z")) == "hi z from 0 of 1"
    await again.stop()
    await others.stop()


async def test_a_sync_endpoint_can_wait_for_other_actors(procs, senders):
    greeters = await procs.spawn("greeter", Greeter)
    one = senders.slice(rank=0)
    assert await one.ask_blocking.call_one(greeters.slice(rank=1), "x") == "hi x from 0 of 1"
    with pytest.raises(SelfCall, match="it needs the main thread of a process that waits for it there"):
        await one.ask_blocking.call_one(greeters.slice(rank=0), "x")
    with pytest.raises(RuntimeError, match=r"would stop its event loop\. Use await"):
        await one.block_on_the_loop.call_one(greeters.slice(rank=1))
    await greeters.stop()


async def test_a_cancelled_sync_endpoint_that_waits_cancels_what_it_waits_for(procs, senders):
    gates = await procs.spawn("gates", Gates)
    with pytest.raises(DeadlineExceeded):
        await senders.slice(rank=0).wait_blocking.options(timeout=0.2).call_one(gates.slice(rank=1))
    await until(gates.slice(rank=1).traced.call_one, lambda traced: traced == ["serial cancelled"])
    await gates.stop()


async def test_check_cancelled_ends_a_sync_endpoint_whose_caller_has_given_up(senders):
    one = senders.slice(rank=0)
    with pytest.raises(DeadlineExceeded):
        await one.check.options(timeout=0.1).call_one(60.0)
    async with asyncio.timeout(10):
        await one.check.call_one(0.0)
