"""Publishing a version to one rollout rank, against what TRL and OpenRLHF do: one gloo broadcast per tensor.

    python -m benchmarks sync              python -m benchmarks.sync --json sync.json --sizes 4 64

One trainer process and one rollout process, float32, one thread each; rounds of ours and of the peer alternate, the
best of each counts. Ours is the time of `publish`: snapshot, digests on both sides, transfer, decision, swap. The peer
receives into a buffer and copies it into the live tensor, with no digest, no snapshot and no decision; it pauses for
all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import Row, to_markdown
from runtime import Actor, endpoint, this_host
from sync.layout import Entry, Layout
from sync.ports import ReceiverPort, SenderPort
from sync.session import SyncConfig, WeightSession

TITLE = "Weights: publish a version to one rollout rank, against one broadcast per tensor (gloo)"

SIZES_MB = (4, 64, 512)
ROUNDS = 5


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """A transformer of that size in float32: an eighth is the embedding, the rest 12 layers of matrices and norms."""
    width = 256
    rows = megabytes * 10**6 // 4 // width
    found: dict[str, tuple[int, ...]] = {"embed": (rows // 8, width)}
    for layer in range(12):
        found |= {f"layers.{layer}.m{i}": (rows * 7 // 8 // 84, width) for i in range(7)}
        found |= {f"layers.{layer}.norm{i}": (width,) for i in range(2)}
    return found


class BenchTrainer(SenderPort, Actor):
    """A trainer of random tensors."""

    def __init__(self, megabytes: int) -> None:
        self.weights = {name: torch.randn(shape) for name, shape in shapes(megabytes).items()}
        self.layout = Layout(tuple(Entry.whole(n, s, "float32") for n, s in shapes(megabytes).items()))
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


class BenchRollout(ReceiverPort, Actor):
    """Tensors in service."""

    def __init__(self, megabytes: int) -> None:
        self.weights = {name: torch.zeros(shape) for name, shape in shapes(megabytes).items()}
        self.layout = Layout(tuple(Entry.whole(n, s, "float32") for n, s in shapes(megabytes).items()))
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])


class BenchPeer(Actor):
    """Rank 0 broadcasts each tensor, rank 1 receives it and copies it into place."""

    def __init__(self, megabytes: int) -> None:
        self.weights = {name: torch.randn(shape) for name, shape in shapes(megabytes).items()}

    @endpoint
    def broadcast_each(self) -> None:
        for tensor in self.weights.values():
            if dist.get_rank() == 0:
                dist.broadcast(tensor, src=0)
            else:
                received = torch.empty_like(tensor)
                dist.broadcast(received, src=0)
                tensor.copy_(received)


async def measure(megabytes: int, rounds: int) -> list[Row]:
    """Rows of one size: seconds and pause by shm and by gloo, each against the peer."""
    gigabytes = sum(4 * torch.Size(s).numel() for s in shapes(megabytes).values()) / 1e9
    seconds: dict[str, list[float]] = {"shm": [], "gloo": [], "peer": []}
    pauses: dict[str, list[float]] = {"shm": [], "gloo": []}
    async with this_host() as host:
        trainers = await host.spawn_procs(1, name="trainer", threads=1)
        rollouts = await host.spawn_procs(1, name="rollout", threads=1)
        peers = await host.spawn_procs({"rank": 2}, name="peer", threads=1)
        await peers.init_process_group("gloo")
        peer = await peers.spawn("peer", BenchPeer, megabytes)
        sessions = {
            name: WeightSession(
                await trainers.spawn(f"trainer-{name}", BenchTrainer, megabytes),
                await rollouts.spawn(f"rollout-{name}", BenchRollout, megabytes),
                SyncConfig(transport=name),
            )
            for name in ("shm", "gloo")
        }
        for version in range(rounds + 2):  # two rounds touch all memory and are not counted
            for name, session in sessions.items():
                commit = await session.publish(version)
                seconds[name].append(commit.seconds)
                pauses[name].append(commit.pause_seconds)
            began = time.perf_counter()
            await peer.broadcast_each.call()
            seconds["peer"].append(time.perf_counter() - began)
        for session in sessions.values():
            await session.close()
    best = {name: min(values[2:]) for name, values in seconds.items()}
    rows = []
    for name, goal in (("shm", "<= 1x"), ("gloo", "<= 2x")):
        pause = min(pauses[name][2:])
        rate = f"{gigabytes / best[name]:.2f} GB/s, peer {gigabytes / best['peer']:.2f} GB/s"
        rows.append(
            Row(
                name=f"{megabytes} MB, {name}: publish",
                ours=best[name],
                peer=best["peer"],
                unit="s",
                goal=goal,
                note=rate,
            )
        )
        rows.append(
            Row(
                name=f"{megabytes} MB, {name}: pause",
                ours=pause,
                peer=best["peer"],
                unit="s",
                goal="<= 0.5x",
                note="swap only",
            )
        )
    return rows


def run() -> list[Row]:
    """All sizes."""
    return run_sizes(SIZES_MB, ROUNDS)


def run_sizes(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Rows of these sizes in megabytes."""
    return [row for megabytes in sizes for row in asyncio.run(measure(megabytes, rounds))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with --json also write the rows."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), help="megabytes of weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    rows = run_sizes(options.sizes, options.rounds)
    print(to_markdown(rows))
    if options.json:
        options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
