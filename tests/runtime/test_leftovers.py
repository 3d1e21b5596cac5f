"""R10, counted: after stop, and after many rounds of it, there is what there was before."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import numpy as np
import pytest

from runtime import ProcessDied, memory, this_host
from runtime.memory import SHARED_THRESHOLD
from tests.runtime.actors import Greeter


def descriptors() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(links)


def resident() -> int:
    """Bytes of memory of this process alone."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


def unix_sockets(folder: str) -> list[str]:
    with open("/proc/net/unix") as file:
        return [line for line in file if folder in line]


async def round_of(host) -> None:
    """Start two processes, send something small, large and broadcast, stop."""
    procs = await host.spawn_procs(2, name="round")
    greeters = await procs.spawn("greeter", Greeter)
    assert len(await greeters.hello.call("x")) == 2
    assert len(await greeters.echo.call(np.ones(SHARED_THRESHOLD))) == 2
    await greeters.note.broadcast(1)
    await greeters.stop()
    await procs.stop()


async def test_stop_leaves_no_socket_descriptor_or_block():
    gc.collect()
    memory.pool.trim(0.0)
    before = descriptors()
    async with this_host(preload=[]) as host:
        folder = str(host.run_directory)
        await round_of(host)
        assert len(unix_sockets(folder)) == 1  # its own
        greeters = await (await host.spawn_procs(2)).spawn("greeter", Greeter)
        held = (await greeters.echo.call(np.ones(SHARED_THRESHOLD))).values()
    assert unix_sockets(folder) == []
    assert held[0].sum() == SHARED_THRESHOLD  # what the user holds stays good
    del held
    gc.collect()
    memory.pool.trim(0.0)
    assert descriptors() == before
    with open("/proc/self/maps") as file:
        assert "memfd:tutti" not in file.read()


async def test_twenty_rounds_leave_descriptors_and_tables_as_they_were():
    async with this_host(preload=[]) as host:
        await round_of(host)
        memory.pool.trim(0.0)
        before = len(descriptors())
        for _ in range(20):
            await round_of(host)
        gc.collect()
        memory.pool.trim(0.0)
        assert len(descriptors()) == before
        assert host.node.peers == {}
        assert host._ranks == {}
        assert host._meshes == {}
        assert sorted(os.listdir(host.run_directory)) == ["controller", "secret"]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_hundred_rounds_leave_memory_as_it_was():
    async with this_host(preload=[]) as host:
        for _ in range(20):
            await round_of(host)
        gc.collect()
        before, files = resident(), len(descriptors())
        for _ in range(200):
            await round_of(host)
        gc.collect()
        memory.pool.trim(0.0)
        assert len(descriptors()) <= files
        assert resident() - before < 8 * 2**20


async def test_rounds_of_death_leave_nothing_either():
    async with this_host(preload=[]) as host:
        before = 0
        for number in range(6):
            procs = await host.spawn_procs(2, name="round")
            greeters = await procs.spawn("greeter", Greeter)
            call = asyncio.create_task(greeters.echo.call(np.ones(SHARED_THRESHOLD)))
            os.kill(procs.pids[1], signal.SIGKILL)
            with pytest.raises(ProcessDied):
                await call
            await procs.stop()
            gc.collect()
            memory.pool.trim(0.0)
            before = before if number else len(descriptors())
        assert len(descriptors()) == before
        assert host.node.peers == {}
