"""R1, R6 and R7 with real processes: order, memory and the last resort, with senders too fast and endpoints deaf."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from runtime import DeadlineExceeded, ProcessDied, Restart, this_host
from tests.runtime.actors import Caller, Greeter
from tests.waiting import until


def memory_of(*pids: int) -> int:
    """Bytes of the processes and of the shared blocks that they hold, each block once."""
    total = 0
    blocks: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                total += int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:tutti" in line:
                start, end = (int(text, 16) for text in line.split()[0].split("-"))
                blocks[int(line.split()[4])] = end - start
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "memfd:tutti" in os.readlink(entry):
                    status = entry.stat()
                    blocks[status.st_ino] = status.st_size
    return total + sum(blocks.values())


async def test_a_thousand_megabytes_to_a_slow_actor_keep_both_ends_below_64_megabytes():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        greeter = await procs.spawn("greeter", Greeter)
        megabyte = np.zeros(2**20, np.uint8)
        pids = (os.getpid(), *procs.pids)
        for _ in range(3):
            await greeter.echo.broadcast(megabyte)
        await greeter.hello.call_one("warm")
        before = memory_of(*pids)
        most = 0
        sent = 0

        def measure() -> int:
            nonlocal most
            most = max(most, memory_of(*pids) - before)
            return most

        busy = asyncio.create_task(greeter.busy.call_one(60.0))  # the first are sent while nothing is taken out

        async def send() -> None:
            nonlocal sent
            for _ in range(1000):
                await greeter.echo.broadcast(megabyte)
                sent += 1

        sending = asyncio.create_task(send())
        at = -1
        while at != sent:
            at = sent
            await asyncio.sleep(0.1)
            measure()
        assert sent < 64
        assert most > 16 * 2**20  # what is measured is what was sent
        busy.cancel()
        await until(measure, lambda _: sending.done())
        await sending
        assert await greeter.hello.call_one("x") == "hi x from 0 of 1"
        assert most < 64 * 2**20


async def test_a_call_that_waits_for_one_rank_is_not_overtaken_at_another():
    async with this_host(preload=[]) as host:
        greeters = await (await host.spawn_procs(2)).spawn("greeter", Greeter)
        first, second = greeters.slice(rank=0), greeters.slice(rank=1)
        busy = asyncio.create_task(second.busy.call_one(60.0))
        filling = [asyncio.create_task(second.echo.broadcast(np.zeros(2**20))) for _ in range(10)]  # 8 MB each
        await asyncio.sleep(0.1)
        assert not all(task.done() for task in filling)
        both = asyncio.create_task(greeters.note.call(1))  # waits for room at the second
        await asyncio.sleep(0)
        later = asyncio.create_task(first.note.call_one(2))
        await asyncio.sleep(0.1)
        assert not later.done()
        busy.cancel()
        await asyncio.gather(both, later, *filling)
        assert await first.noted.call_one() == [1, 2]


@pytest.mark.parametrize("by", ["the controller", "another actor"])
async def test_an_endpoint_that_does_not_stop_has_its_process_killed_as_last_resort(by):
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="deaf", restart=Restart())
        deaf = await procs.spawn("greeter", Greeter)
        if by == "the controller":
            with pytest.raises(DeadlineExceeded):
                await deaf.deaf.options(timeout=0.1, kill_after=0.2).call_one(60.0)
        else:
            caller = await (await host.spawn_procs(1, name="caller")).spawn("caller", Caller)
            await caller.give_up_on.call_one(deaf)
        with pytest.raises(ProcessDied, match="SIGKILL"):
            await deaf.hello.call_one("it waits behind the other one")
        async with asyncio.timeout(20):
            assert await deaf.hello.call_one("x") == "hi x from 0 of 1"
