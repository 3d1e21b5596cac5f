"""CO-6 of runtime/codec.py with real processes: a job that allows no pickle."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import Actor, ActorError, Channel, endpoint, lookup, this_host
from tests.runtime.actors import Answer, Caller, Greeter, OddError, Plain
from tests.runtime.stream_actors import Sender, Teller


async def test_a_job_without_pickle_spawns_calls_streams_and_raises(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    async with this_host(preload=[], pickle=False) as host:
        monkeypatch.setattr("pickle.loads", refuse)
        monkeypatch.setattr("cloudpickle.Pickler.dump", refuse)
        monkeypatch.setattr("cloudpickle.dumps", refuse)
        procs = await host.spawn_procs(2, name="trainer")
        greeters = await procs.spawn("greeter", Greeter, "hello")
        assert (await greeters.hello.call("x")).values() == ["hello x from 0 of 2", "hello x from 1 of 2"]
        one = greeters.slice(rank=0)
        back = await one.echo.call_one((1, {2: Plain("n", np.arange(10_000))}))
        assert (type(back), type(back[1][2])) == (tuple, Plain)
        answer = Answer(token_ids=np.arange(3), logprobs=np.zeros(1), finish="stop")
        assert type(await one.typed.call_one(answer)) is Answer
        with pytest.raises(OddError) as caught:
            await one.fail.call_one("odd")
        assert isinstance(caught.value, ActorError)
        callers = await procs.spawn("caller", Caller)
        assert await callers.slice(rank=1).ask.call_one(one, "y") == ["hello y from 0 of 1"]
        assert await (await lookup("greeter")).slice(rank=1).hello.call_one("z") == "hello z from 0 of 1"
        port, receiver = Channel.open(int)
        async with receiver:
            await (await procs.spawn("sender", Sender)).slice(rank=0).send.call_one(port, [1, 2])
            assert [await receiver.recv(), await receiver.recv()] == [1, 2]
        teller = (await procs.spawn("teller", Teller)).slice(rank=0)
        assert [value async for value in teller.count.stream_one(3)] == [0, 1, 2]
        with pytest.raises(TypeError, match=r"value' can't be sent: value\[0\] is a function .*not allow pickle"):
            await one.echo.call_one([lambda: 1])
        with pytest.raises(TypeError, match="Define it at the top of a module"):

            class Local(Actor):
                @endpoint
                def work(self) -> None: ...

            await procs.spawn("local", Local)


async def test_an_argument_of_a_constructor_that_can_not_be_sent_is_named():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        with pytest.raises(TypeError, match="Greeter: argument word can't be sent"):
            await procs.spawn("greeter", Greeter, word=(x for x in [1]))
        with pytest.raises(TypeError, match="Greeter: argument number 0 can't be sent"):
            await procs.spawn("greeter", Greeter, (x for x in [1]))
