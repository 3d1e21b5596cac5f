"""The runtime against its peers on this host: calls, payloads, start, stop, death; and against the floor.

BR-1: ours and theirs run one after the other in the same minutes; compare numbers of one table only.
BR-2: a peer that can't be imported here leaves its column empty; nothing is copied from elsewhere.
BR-3: rows about ourselves compare with something measured in the same run: a plain socket loop, a plain copy, or fewer
      processes. The note says which.

Peers are timed in a process of their own (`benchmarks.runtime_peers`), so that they share nothing with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.runtime_actors import Echo
from benchmarks.runtime_floor import PeakMemory, copy_seconds, kill, socket_round_trip
from benchmarks.table import Row, to_markdown
from runtime import ActorMesh, HostMesh, ProcessDied, this_host
from runtime.worker import new_event_loop

TITLE = "Runtime: calls, payloads, processes"
PEERS = ("monarch", "ray")

AGAINST_PEERS = {
    "call round trip": ("us", "<= 0.2x"),
    "call round trip, sync endpoint": ("us", "<= 0.2x"),
    "call on 4 processes": ("us", "<= 0.25x"),
    "1000 pipelined calls": ("1/s", ">= 10x"),
    "send 1 MB": ("ms", "<= 0.5x"),
    "send 64 MB": ("ms", "<= 0.2x"),
    "send 64 MB to 4 processes": ("ms", "<= 0.5x"),
    "start, to the first reply": ("s", "<= 0.5x"),
    "spawn 8 to the first reply": ("s", "<= 0.1x"),
    "stop 8": ("s", "<= 1"),
    "death seen": ("s", "<= 0.1"),
}
"""What is measured on both sides, its unit, and the goal. That of `send 64 MB` is about Monarch: Ray keeps arguments in
a store of shared memory. That of `spawn 8` too: Ray has started as many processes as there are cores in advance."""

SIZES = (4, 16, 64, 256)
"""Processes of the meshes by which the cost of the controller is measured."""
IN_PROCESS = 10_000
"""Actors in one process."""


async def seconds_of(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Median seconds of a call."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


async def spawned(host: HostMesh, count: int, name: str) -> ActorMesh:
    return await (await host.spawn_procs(count, name=name, threads=1)).spawn("echo", Echo)


async def measure_calls(host: HostMesh) -> dict[str, float]:
    """Round trips and throughput."""
    one = await spawned(host, 1, "one")
    await seconds_of(one.ping.call_one, 200)
    found = {
        "call round trip": await seconds_of(one.ping.call_one, 2000) * 1e6,
        "call round trip, sync endpoint": await seconds_of(one.ping_main.call_one, 2000) * 1e6,
    }
    four = await spawned(host, 4, "four")
    await seconds_of(four.ping.call, 100)
    found["call on 4 processes"] = await seconds_of(four.ping.call, 1000) * 1e6
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        await asyncio.gather(*[one.ping.call_one().as_asyncio() for _ in range(1000)])
        rates.append(1000 / (time.perf_counter() - start))
    found["1000 pipelined calls"] = statistics.median(rates)
    return found


async def measure_payloads(host: HostMesh) -> dict[str, float]:
    """Arrays to one process and to four. The first of a size makes its shared block; the median is of later ones."""
    one, four = await spawned(host, 1, "bytes one"), await spawned(host, 4, "bytes four")
    found = {}
    for megabytes, count in ((1, 50), (64, 9)):
        array = np.ones(megabytes << 20, dtype=np.uint8)
        await one.nbytes.call_one(array)
        found[f"send {megabytes} MB"] = await seconds_of(lambda a=array: one.nbytes.call_one(a), count) * 1e3  # type: ignore[misc]
    found["send 64 MB to 4 processes"] = await seconds_of(lambda: four.nbytes.call(array), 9) * 1e3
    found["copy 64 MB"] = copy_seconds(array) * 1e3
    return found


async def measure_start() -> dict[str, float]:
    """From nothing to the first reply of one process. Each runtime is imported by then, and nothing of it runs."""
    start = time.perf_counter()
    async with this_host(sink=lambda line: None) as host:
        await (await spawned(host, 1, "first")).ping.call_one()
        return {"start, to the first reply": time.perf_counter() - start}


async def measure_life(host: HostMesh) -> dict[str, float]:
    """Eight more processes beside those that run, as with the peers; stop; death."""
    await (await spawned(host, 4, "four")).ping.call()
    start = time.perf_counter()
    eight = await host.spawn_procs(8, name="eight")
    await (await eight.spawn("echo", Echo)).ping.call()
    found = {"spawn 8 to the first reply": time.perf_counter() - start}
    start = time.perf_counter()
    await eight.stop()
    found["stop 8"] = time.perf_counter() - start
    samples = []
    for _ in range(5):
        procs = await host.spawn_procs(1, name="victim")
        call = asyncio.ensure_future((await procs.spawn("echo", Echo)).sleep.call_one(60.0))
        await asyncio.sleep(0.2)
        start = kill(procs.pids[0])
        try:
            await call
        except ProcessDied:
            samples.append(time.perf_counter() - start)
        await procs.stop()
    found["death seen"] = statistics.median(samples)
    return found


async def measure_bounds(host: HostMesh) -> float:
    """MB above the start of both ends, while 1000 messages of 1 MB go to an actor that takes 2 ms for each."""
    procs = await host.spawn_procs(1, name="slow")
    slow = await procs.spawn("echo", Echo)
    await slow.ping.call_one()
    payload = np.ones(1 << 20, dtype=np.uint8)
    with PeakMemory(os.getpid(), *procs.pids) as memory:
        for _ in range(1000):
            await slow.take_slowly.broadcast(payload)
        await slow.ping_main.call_one()
    return memory.peak / 2**20


async def measure_scale(host: HostMesh) -> list[Row]:
    """What a call costs the controller as meshes grow: its CPU time by process, compared with the smallest mesh. (The
    wall time of hundreds of processes on a few cores says how fast the kernel wakes them.)"""
    rows = []
    smallest = 0.0
    for size in SIZES:
        mesh = await host.spawn_procs(size, name=f"light {size}", threads=1)
        echo = await mesh.spawn("echo", Echo)
        await seconds_of(echo.ping.call, 5)
        calls = 4000 // size
        start = time.process_time()
        await seconds_of(echo.ping.call, calls)
        each = (time.process_time() - start) / calls / size * 1e6
        smallest = smallest or each
        name, note = f"controller, call on {size}", f"CPU by process, compared with {SIZES[0]} processes"
        rows.append(Row(name=name, ours=each, peer=smallest, unit="us", goal="<= 1.2x", note=note))
        await mesh.stop()
    procs = await host.spawn_procs(1, name="crowd")
    first = await procs.spawn("first", Echo)
    alone = await seconds_of(lambda: asyncio.gather(*[first.ping.call_one() for _ in range(1000)]), 5) / 1000 * 1e6
    crowd: list[ActorMesh] = []
    while len(crowd) < IN_PROCESS:
        names = range(len(crowd), min(len(crowd) + 500, IN_PROCESS))
        crowd += await asyncio.gather(*[procs.spawn(f"echo {n}", Echo) for n in names])

    async def call_each() -> None:
        for at in range(0, IN_PROCESS, 1000):
            await asyncio.gather(*[actor.ping.call_one() for actor in crowd[at : at + 1000]])

    await call_each()
    among = await seconds_of(call_each, 3) / IN_PROCESS * 1e6
    note = "compared with as many calls of a single actor"
    rows.append(Row(name=f"call among {IN_PROCESS} actors", ours=among, peer=alone, unit="us", goal="<= 2x", note=note))
    return rows


async def measure() -> tuple[dict[str, float], list[Row]]:
    """Our numbers in the units of `AGAINST_PEERS`, and the rows about ourselves."""
    floor = socket_round_trip() * 1e6  # forks, so before there are threads
    found = await measure_start()
    for part in (measure_calls, measure_payloads, measure_life):
        async with this_host(sink=lambda line: None) as host:
            found |= await part(host)
    async with this_host(sink=lambda line: None, preload=["benchmarks.runtime_actors"]) as host:
        peak = await measure_bounds(host)
        scale = await measure_scale(host)
    copy, one = found["copy 64 MB"], found["send 64 MB"]
    rows = [
        Row(
            name="call round trip above the floor",
            ours=found["call round trip"],
            peer=floor,
            unit="us",
            note="compared with a blocking socket loop of two processes",
        ),
        Row(
            name="send 64 MB, share of a copy",
            ours=64 / one,
            peer=64 / copy,
            unit="GB/s",
            goal=">= 0.45x",
            note="compared with one copy within a process",
        ),
        Row(
            name="send 64 MB to 4, one copy for all",
            ours=found["send 64 MB to 4 processes"],
            peer=one,
            unit="ms",
            goal="<= 1.5x",
            note="compared with 1 process",
        ),
        Row(
            name="1000 x 1 MB to a slow actor",
            ours=peak,
            unit="MB",
            goal="<= 64",
            note="memory of both ends above start",
        ),
    ]
    return found, rows + scale


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
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # the loop of `launch`
        ours, own_rows = runner.run(measure())
    peers = {name: numbers for name in PEERS if (numbers := of_peer(name))}
    rows = []
    for name, (unit, goal) in AGAINST_PEERS.items():
        for peer, numbers in peers.items() or {"": dict[str, float]()}.items():
            rows.append(Row(name=name, ours=ours.get(name), peer=numbers.get(name), unit=unit, goal=goal, note=peer))
    return rows + own_rows


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
