"""A program for torchrun: rank 0 is the controller, the others join. Argument: what shall happen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from runtime import RendezvousError, in_torchrun, join_main, torchrun_host
from tests.runtime.actors import Greeter


async def main(plan: str) -> None:
    if plan == "leave":
        async with torchrun_host(preload=[]):
            return  # before the others have joined
    async with torchrun_host(preload=[]) as host:
        trainer = await host.spawn_procs({"rank": 2}, name="trainer")
        greeters = await trainer.spawn("greeter", Greeter)
        print("places", [(p["proc"], p["rank"], p["size"]) for p in await greeters.place.call()], flush=True)
        if plan == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await host.spawn_procs({"rank": 2}, name="rollout")
        except RendezvousError as error:
            print("refused", error, flush=True)


if __name__ == "__main__":
    assert in_torchrun()
    if os.environ["RANK"] == "0":
        asyncio.run(main(sys.argv[1]))
    else:
        if sys.argv[1] == "leave":
            time.sleep(2)  # the controller has gone by then
        join_main()
