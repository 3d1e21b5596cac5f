"""Times a peer with the same steps as `benchmarks/runtime.py`: `python -m benchmarks.runtime_peers monarch|ray`.

Prints one JSON object on its last line. Imports nothing of ours, so that it also runs in an environment of the peer.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def median(call: Callable[[], object], count: int) -> float:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def ray_numbers() -> dict[str, float]:
    ray: Any = importlib.import_module("ray")

    class Echo:
        def ping(self) -> int:
            return 1

        def pid(self) -> int:
            return os.getpid()

        def nbytes(self, payload: np.ndarray) -> int:
            return int(payload.nbytes)

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

    start = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    remote = ray.remote(num_cpus=0)(Echo)
    one = remote.remote()
    get = ray.get
    get(one.ping.remote())
    found = {"start, to the first reply": time.perf_counter() - start}
    median(lambda: get(one.ping.remote()), 100)
    found["call round trip, sync endpoint"] = median(lambda: get(one.ping.remote()), 500) * 1e6
    four = [remote.remote() for _ in range(4)]
    ping_four = lambda: get([actor.ping.remote() for actor in four])  # noqa: E731
    median(ping_four, 50)
    found["call on 4 processes"] = median(ping_four, 300) * 1e6
    found["1000 pipelined calls"] = 1000 / median(lambda: get([one.ping.remote() for _ in range(1000)]), 3)
    for megabytes, count in ((1, 50), (64, 8)):
        array = np.ones(megabytes << 20, dtype=np.uint8)
        found[f"send {megabytes} MB"] = median(lambda a=array: get(one.nbytes.remote(a)), count) * 1e3  # type: ignore[misc]

    def send_four() -> None:
        reference = ray.put(array)
        get([actor.nbytes.remote(reference) for actor in four])

    found["send 64 MB to 4 processes"] = median(send_four, 8) * 1e3
    start = time.perf_counter()
    eight = [remote.remote() for _ in range(8)]
    get([actor.ping.remote() for actor in eight])
    found["spawn 8 to the first reply"] = time.perf_counter() - start
    start = time.perf_counter()
    for actor in eight:
        ray.kill(actor)
    found["stop 8"] = time.perf_counter() - start
    pid = get(one.pid.remote())
    call = one.sleep.remote(60.0)
    time.sleep(0.2)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        get(call)
    except ray.exceptions.RayError:
        found["death seen"] = time.perf_counter() - start
    ray.shutdown()
    return found


async def monarch_numbers() -> dict[str, float]:
    monarch: Any = importlib.import_module("monarch.actor")
    endpoint = monarch.endpoint

    class Echo(monarch.Actor):  # type: ignore[misc]
        @endpoint  # type: ignore[untyped-decorator]
        async def ping(self) -> int:
            return 1

        @endpoint  # type: ignore[untyped-decorator]
        async def nbytes(self, payload: Any) -> int:
            return int(payload.nbytes)

    async def timed(call: Callable[[], Any], count: int) -> float:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            await call()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    start = time.perf_counter()
    one = monarch.this_host().spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)
    await one.ping.call_one()
    found = {"start, to the first reply": time.perf_counter() - start}
    await timed(one.ping.call_one, 100)
    found["call round trip"] = await timed(one.ping.call_one, 500) * 1e6
    four = monarch.this_host().spawn_procs(per_host={"procs": 4}).spawn("four", Echo)
    await timed(four.ping.call, 50)
    found["call on 4 processes"] = await timed(four.ping.call, 300) * 1e6
    start = time.perf_counter()
    await asyncio.gather(*(one.ping.call_one().as_asyncio() for _ in range(1000)))
    found["1000 pipelined calls"] = 1000 / (time.perf_counter() - start)
    for megabytes, count in ((1, 50), (64, 8)):
        array = np.ones(megabytes << 20, dtype=np.uint8)
        found[f"send {megabytes} MB"] = await timed(lambda a=array: one.nbytes.call_one(a), count) * 1e3  # type: ignore[misc]
    found["send 64 MB to 4 processes"] = await timed(lambda: four.nbytes.call(array), 8) * 1e3
    start = time.perf_counter()
    mesh = monarch.this_host().spawn_procs(per_host={"procs": 8})
    await mesh.spawn("echo", Echo).ping.call()
    found["spawn 8 to the first reply"] = time.perf_counter() - start
    start = time.perf_counter()
    await mesh.stop()
    found["stop 8"] = time.perf_counter() - start
    return found


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop that ours has, where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def main() -> None:
    """Time the peer named on the command line."""
    if sys.argv[1] == "ray":
        numbers = ray_numbers()
    else:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            numbers = runner.run(monarch_numbers())
    print(json.dumps(numbers), flush=True)
    os._exit(0)  # a peer's exit hooks are not what is measured


if __name__ == "__main__":
    main()
