"""The runtime against its peers on this host: calls, payloads, start, stop, death.

BR-1: ours and theirs run one after the other in the same minutes; compare numbers of one table only.
BR-2: a peer that can't be imported here leaves its column empty; nothing is copied from elsewhere.

Peers are timed in a process of their own (`benchmarks.runtime_peers`), so that they share nothing with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.table import Row, to_markdown
from runtime import Actor, ProcessDied, endpoint, this_host

TITLE = "Runtime: calls, payloads, processes"
PEERS = ("monarch", "ray")

GOALS = {
    "call round trip": ("us", "<= 0.5x"),
    "call round trip, sync endpoint": ("us", "<= 0.5x"),
    "1000 pipelined calls": ("1/s", ">= 2x"),
    "send 1 MB": ("ms", "<= 0.5x"),
    "send 64 MB": ("ms", "<= 0.5x"),
    "spawn 8": ("s", "<= 0.5x"),
    "stop 8": ("s", "<= 1"),
    "death seen": ("s", "<= 0.5"),
}
"""What is measured, its unit, and the goal."""


class Echo(Actor):
    @endpoint
    async def ping(self) -> int:
        return 1

    @endpoint
    def ping_main(self) -> int:
        return 1

    @endpoint
    async def nbytes(self, payload: np.ndarray) -> int:
        return int(payload.nbytes)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


async def seconds_of(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Median seconds of a call."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


async def measure() -> dict[str, float]:
    """Our numbers, in the units of `GOALS`."""
    found: dict[str, float] = {}
    async with this_host(sink=lambda line: None) as host:
        first = await host.spawn_procs(1, name="first")
        one = await first.spawn("echo", Echo)
        await seconds_of(one.ping.call_one, 200)
        found["call round trip"] = await seconds_of(one.ping.call_one, 1000) * 1e6
        found["call round trip, sync endpoint"] = await seconds_of(one.ping_main.call_one, 1000) * 1e6
        best = 0.0
        for _ in range(5):
            start = time.perf_counter()
            await asyncio.gather(*[one.ping.call_one() for _ in range(1000)])
            best = max(best, 1000 / (time.perf_counter() - start))
        found["1000 pipelined calls"] = best
        for megabytes, count in ((1, 50), (64, 8)):
            array = np.ones(megabytes << 20, dtype=np.uint8)
            found[f"send {megabytes} MB"] = await seconds_of(lambda a=array: one.nbytes.call_one(a), count) * 1e3  # type: ignore[misc]
        start = time.perf_counter()
        eight = await host.spawn_procs(8, name="eight")
        await (await eight.spawn("echo", Echo)).ping.call()
        found["spawn 8"] = time.perf_counter() - start
        start = time.perf_counter()
        await eight.stop()
        found["stop 8"] = time.perf_counter() - start
        call = asyncio.ensure_future(one.sleep.call_one(60.0))
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        os.kill(first.pids[0], signal.SIGKILL)
        try:
            await call
        except ProcessDied:
            found["death seen"] = time.perf_counter() - start
    return found


def of_peer(name: str) -> dict[str, float]:
    """The numbers of a peer, empty when it isn't installed or fails."""
    if importlib.util.find_spec(name) is None:
        return {}
    command = [sys.executable, "-m", "benchmarks.runtime_peers", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{name}: no result\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    return {key: float(value) for key, value in json.loads(lines[-1]).items()}


def run() -> list[Row]:
    """Measure ours, then each peer that is installed."""
    ours = asyncio.run(measure())
    peers = {name: numbers for name in PEERS if (numbers := of_peer(name))}
    rows = []
    for name, (unit, goal) in GOALS.items():
        for peer, numbers in peers.items() or {"": dict[str, float]()}.items():
            rows.append(Row(name=name, ours=ours.get(name), peer=numbers.get(name), unit=unit, goal=goal, note=peer))
    return rows


def main() -> None:
    """`python -m benchmarks.runtime [--json FILE]`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtime", description=TITLE)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = run()
    print(to_markdown(rows))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode([row.as_dict() for row in rows])))


if __name__ == "__main__":
    main()
