"""Programs that the tests of signals and failures start: a controller with workers, busy in a given way. Argument: the
name of a plan."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Literal

import numpy as np

from runtime import HostMesh, ProcMesh, this_host
from tests.runtime.actors import Greeter


async def started(host: HostMesh, start: Literal["fork", "fresh"]) -> ProcMesh:
    """Four processes of two roles, two of which have started one more; prints the run directory and the pids."""
    procs = await host.spawn_procs(2, name="trainer", start=start)
    idle = await host.spawn_procs(1, name="idle", start=start)
    theirs = (await procs.run(sleeper)).values()
    print(host.run_directory, host._fork_server.pid, *procs.pids, *idle.pids, *theirs, flush=True)
    return procs


def sleeper() -> int:
    """Start a program, as engines do; its process id."""
    return subprocess.Popen(["sleep", "1000"]).pid


async def busy(start: Literal["fork", "fresh"], listen: str | None = None) -> None:
    """Sync endpoints that hear nothing, with large arguments still in their hands."""
    async with this_host(preload=[], listen=listen) as host:
        greeters = await (await started(host, start)).spawn("greeter", Greeter)
        held = [asyncio.ensure_future(greeters.slice(rank=r).deaf.call_one(100.0)) for r in (0, 1)]
        # Together: a signal may come at any moment, and the error of a call must not be nobody's.
        await asyncio.gather(*held, greeters.echo.broadcast(np.ones(2**20, np.uint8)))


async def raising() -> None:
    """A mistake of the user after processes were started."""
    async with this_host(preload=[]) as host:
        await started(host, "fork")
        raise LookupError("no such data set")


async def torn() -> None:
    """Something ends the loop from outside of every task."""
    async with this_host(preload=[]) as host:
        greeters = await (await started(host, "fork")).spawn("greeter", Greeter)
        asyncio.get_running_loop().call_later(0.2, sys.exit, 3)
        await greeters.deaf.call(100.0)


async def greedy() -> None:
    """A worker that takes more memory than its control group allows."""
    async with this_host(preload=[]) as host:
        procs = await started(host, "fork")
        await procs.slice(rank=1).run(take, 4096)


def take(megabytes: int) -> int:
    """Touch so much memory."""
    return len([bytearray(b"x" * 2**20) for _ in range(megabytes)])


PLANS = {
    "fork": lambda: busy("fork"),
    "fresh": lambda: busy("fresh"),
    "tcp": lambda: busy("fork", "tcp://127.0.0.1:0"),
    "raising": raising,
    "torn": torn,
    "greedy": greedy,
}

if __name__ == "__main__":
    asyncio.run(PLANS[sys.argv[1]]())
