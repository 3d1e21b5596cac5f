"""Programs that the tests of signals start: a controller with workers, busy in a given way. Prints the pids, then
waits."""

from __future__ import annotations

import asyncio
import sys

from runtime import this_host
from tests.runtime.actors import Greeter


async def main(start: str) -> None:
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, name="trainer", start=start)  # type: ignore[arg-type]
        greeters = await procs.spawn("greeter", Greeter)
        idle = await host.spawn_procs(1, name="idle", start=start)  # type: ignore[arg-type]
        call = asyncio.ensure_future(greeters.deaf.call(100.0))
        await asyncio.sleep(0.1)
        print(host.run_directory, host._fork_server.pid, *procs.pids, *idle.pids, flush=True)
        await call


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
