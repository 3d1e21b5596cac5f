"""Times a peer that reads the memory of another process of this host:

    python -m benchmarks.sync_peers nixl|monarch MEGABYTES

One side holds that many bytes, registered once; the other reads all of them into registered memory, several times. No
digest, no decision, one tensor: what they are asked is less than what a `publish` does. Prints one JSON object on its
last line: seconds of the best of the reads. Imports nothing of ours, so that it also runs in the peer's environment.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

ROUNDS = {"nixl": 6, "monarch": 3}
PIECE = 64 << 20


def nixl_agent(name: str, num_bytes: int) -> tuple[Any, Any]:
    """An agent, and the memory that it has registered."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    numpy, nixl = importlib.import_module("numpy"), importlib.import_module("nixl")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    memory = numpy.full(num_bytes, 1 if name == "holder" else 0, numpy.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return agent, memory


def nixl_holder(connection: Connection, num_bytes: int) -> None:
    agent, memory = nixl_agent("holder", num_bytes)
    connection.send((agent.get_agent_metadata(), memory.ctypes.data))
    agent.add_remote_agent(connection.recv())
    while not connection.poll(0.001):  # its thread moves bytes where the path is not one-sided
        agent.get_new_notifs()


def nixl_seconds(num_bytes: int) -> float:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=nixl_holder, args=(there, num_bytes))
    process.start()
    agent, memory = nixl_agent("reader", num_bytes)
    metadata, address = here.recv()
    name = agent.add_remote_agent(metadata)
    here.send(agent.get_agent_metadata())
    starts = range(0, num_bytes, PIECE)
    sizes = [min(PIECE, num_bytes - start) for start in starts]
    local = agent.get_xfer_descs([(memory.ctypes.data + a, n, 0) for a, n in zip(starts, sizes, strict=True)], "DRAM")
    remote = agent.get_xfer_descs([(address + a, n, 0) for a, n in zip(starts, sizes, strict=True)], "DRAM")
    handle = agent.initialize_xfer("READ", local, remote, name, b"read")
    found = []
    for _ in range(ROUNDS["nixl"]):
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        found.append(time.perf_counter() - began)
        assert state == "DONE", state
    assert memory.all()
    here.send("stop")
    process.join(20)
    return min(found[1:])


def monarch_seconds(num_bytes: int) -> float:
    torch = importlib.import_module("torch")
    monarch: Any = importlib.import_module("monarch")
    actor: Any = importlib.import_module("monarch.actor")
    rdma: Any = importlib.import_module("monarch.rdma")
    monarch.configure(rdma_allow_tcp_fallback=True)

    class Holder(actor.Actor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.weights = torch.ones(num_bytes, dtype=torch.uint8)

        @actor.endpoint  # type: ignore[untyped-decorator]
        async def handle(self) -> Any:
            return rdma.RDMABuffer(self.weights)

    class Reader(actor.Actor):  # type: ignore[misc]
        def __init__(self) -> None:
            monarch.configure(rdma_allow_tcp_fallback=True)
            self.weights = torch.zeros(num_bytes, dtype=torch.uint8)

        @actor.endpoint  # type: ignore[untyped-decorator]
        async def read(self, handle: Any) -> float:
            best = float("inf")
            for _ in range(ROUNDS["monarch"]):
                began = time.perf_counter()
                await handle.read_into(self.weights, timeout=60)
                best = min(best, time.perf_counter() - began)
            assert bool(self.weights.all())
            return best

    async def measure() -> float:
        mesh = actor.this_host().spawn_procs(per_host={"procs": 2})
        handle = await mesh.slice(procs=0).spawn("holder", Holder).handle.call_one()
        seconds = float(await mesh.slice(procs=1).spawn("reader", Reader).read.call_one(handle))
        await mesh.stop()
        return seconds

    return asyncio.run(measure())


def main() -> None:
    peer, num_bytes = sys.argv[1], int(sys.argv[2]) * 10**6
    print(json.dumps({"seconds": {"nixl": nixl_seconds, "monarch": monarch_seconds}[peer](num_bytes)}))


if __name__ == "__main__":
    main()
