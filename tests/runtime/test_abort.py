"""AB-1 to AB-3 of runtime/abort.py: ranks that wait in a real collective for one that failed (R3)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time

import pytest

from runtime import Actor, ActorError, ProcessDied, Restart, endpoint, this_host
from runtime.abort import abort_collectives, gloo_connections

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)  # processes import torch, which takes its time on a busy machine


class Summer(Actor):
    """Sums over its mesh; one rank may fail before it joins."""

    def __init__(self) -> None:
        self.subgroup = None

    @endpoint
    def sum(self, failing: int, exit: bool = False) -> float:
        import torch.distributed as dist

        if dist.get_rank() == failing:
            if exit:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"no data on rank {failing}")
        value = torch.ones(1000)
        dist.all_reduce(value, group=self.subgroup)
        return float(value[0])

    @endpoint
    def make_subgroup(self) -> None:
        import torch.distributed as dist

        self.subgroup = dist.new_group(list(range(dist.get_world_size())))

    @endpoint
    def hang(self) -> None:
        while True:
            time.sleep(1.0)

    @endpoint
    def abort_here(self) -> list[str]:
        return abort_collectives()


async def test_kind_45_the_first_error_surfaces_at_once_and_the_ranks_in_the_collective_are_freed():
    async with this_host(abort_after=0.3) as host:
        procs = await host.spawn_procs(3, name="trainer")
        await procs.init_process_group("gloo")
        summer = await procs.spawn("summer", Summer)
        assert (await summer.sum.call(-1)).values() == [3.0] * 3
        for subgroup in (False, True):
            if subgroup:
                await procs.init_process_group("gloo")
                await summer.make_subgroup.call()
            with pytest.raises(ValueError, match="no data on rank 1") as caught:
                await summer.sum.call(1)
            assert isinstance(caught.value, ActorError)
            assert caught.value.rank == 1
            # Serial actors: these run once the stuck ones are free.
            assert (await asyncio.wait_for(summer.abort_here.call(), 30)).values()
        await procs.init_process_group("gloo")
        again = await procs.spawn("again", Summer)
        assert (await again.sum.call(-1)).values() == [3.0] * 3


async def test_a_killed_rank_frees_the_others_and_comes_back():
    async with this_host(abort_after=0.3) as host:
        procs = await host.spawn_procs(2, name="trainer", restart=Restart(backoff=0.0))
        await procs.init_process_group("gloo")
        summer = await procs.spawn("summer", Summer)
        ended = procs.ranks[0].ended
        with pytest.raises((ProcessDied, RuntimeError)):
            await summer.sum.call(0, exit=True)
        await ended.wait()
        await summer.abort_here.call()  # waits for the one that comes back, and for the one that was stuck
        await procs.init_process_group("gloo")
        assert (await summer.sum.call(-1)).values() == [2.0] * 2


async def test_abort_frees_what_waits_and_kills_what_does_not_answer():
    async with this_host() as host:
        procs = await host.spawn_procs(2, name="trainer", restart=Restart(backoff=0.0))
        await procs.init_process_group("gloo")
        summer = await procs.spawn("summer", Summer)
        alone = asyncio.create_task(summer.slice(rank=0).sum.call_one(-1))
        await asyncio.sleep(0.3)
        assert not alone.done()
        assert await procs.abort(grace=20.0) == []
        with pytest.raises(RuntimeError):
            await alone
        hanging = asyncio.create_task(summer.slice(rank=1).hang.call_one())
        await asyncio.sleep(0.2)
        pid = procs.pids[1]
        assert await procs.abort(grace=1.0) == [1]
        with pytest.raises(ProcessDied, match="SIGKILL"):
            await hanging
        await summer.abort_here.call()  # waits for the one that comes back
        assert procs.pids[1] != pid


def test_other_sockets_of_the_process_are_left_alone_ab3():
    """An epoll set with a pipe and connections, as an event loop of the user has it, is not one of gloo."""
    assert abort_collectives() == []
    left, right = socket.socketpair()
    done = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            assert gloo_connections() == []
        done.set()

    asyncio.run(serve())
    assert done.is_set()
    left.send(b"x")
    assert right.recv(1) == b"x"
    left.close()
    right.close()
