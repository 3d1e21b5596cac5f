"""Publishing a version to one rollout rank, against what TRL and OpenRLHF do: one gloo broadcast per tensor.

    python -m benchmarks sync              python -m benchmarks.sync --json sync.json --sizes 4 64

One trainer process and one rollout process, bfloat16, one thread each; rounds of ours, of the peer and of a copy inside
one process alternate, the best of each counts. Ours is the time of `publish`: digests on both sides, transfer, staging
in memory of its own, decision, swap. The peer receives into a buffer and copies it into the live tensor, with no
digest, no staging and no decision; it pauses for all of it. Where nixl and torchmonarch are installed, they read the
largest size from another process in the same minutes (`benchmarks.sync_peers`). The last rows plan and simulate a model
of 1.03 T parameters from 256 trainer GPUs to 128, and the reference job's 16 to 8.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import Row, to_markdown
from runtime import Actor, endpoint, this_host
from sync.bounds import Links, simulate
from sync.layout import Entry, Layout
from sync.layouts import megatron
from sync.layouts.megatron import MegatronParallel
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.plan import Plan, make_plan
from sync.ports import ReceiverPort, SenderPort
from sync.session import SyncConfig, WeightSession

TITLE = "Weights: publish a version to one rollout rank, against one broadcast per tensor (gloo)"

SIZES_MB = (4, 64, 1000)
ROUNDS = 5

DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": 64, "n_shared_experts": 1, "kv_lora_rank": 512} | {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
}
KIMI_K2 = DEEPSEEK | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "vocab_size": 163840,
}
REFERENCE = DEEPSEEK | {
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "n_routed_experts": 256,
    "q_lora_rank": 1024,
    "vocab_size": 129280,
}


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """A transformer of that size in bfloat16: an eighth is the embedding, the rest 12 layers of matrices and norms."""
    width = 256
    rows = megabytes * 10**6 // 2 // width
    found: dict[str, tuple[int, ...]] = {"embed": (rows // 8, width)}
    for layer in range(12):
        found |= {f"layers.{layer}.m{i}": (rows * 7 // 8 // 84, width) for i in range(7)}
        found |= {f"layers.{layer}.norm{i}": (width,) for i in range(2)}
    return found


def random_weights(megabytes: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes(megabytes).items()}


def layout_of(megabytes: int) -> Layout:
    return Layout(tuple(Entry.whole(name, shape, "bfloat16") for name, shape in shapes(megabytes).items()))


class BenchTrainer(SenderPort, Actor):
    """A trainer of random tensors."""

    def __init__(self, megabytes: int) -> None:
        self.weights = random_weights(megabytes)
        self.layout = layout_of(megabytes)
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


class BenchRollout(ReceiverPort, Actor):
    """Tensors in service: keeps what it is given and hands back what it had."""

    def __init__(self, megabytes: int) -> None:
        self.weights: Mapping[str, Tensor] = random_weights(megabytes)
        self.layout = layout_of(megabytes)
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        self.weights, before = dict(weights), self.weights
        return before


class BenchPeer(Actor):
    """Rank 0 broadcasts each tensor, rank 1 receives it and copies it into place."""

    def __init__(self, megabytes: int) -> None:
        self.weights = random_weights(megabytes)
        self.copy = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    @endpoint
    def copy_each(self) -> float:
        """Seconds to copy every tensor inside this process."""
        began = time.perf_counter()
        for name, tensor in self.weights.items():
            self.copy[name].copy_(tensor)
        return time.perf_counter() - began

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
    gigabytes = sum(2 * torch.Size(s).numel() for s in shapes(megabytes).values()) / 1e9
    seconds: dict[str, list[float]] = {"shm": [], "gloo": [], "peer": [], "copy": []}
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
            seconds["copy"].append(await peer.slice(rank=0).copy_each.call_one())
        for session in sessions.values():
            await session.close()
    best = {name: min(values[2:]) for name, values in seconds.items()}
    rows = []
    for name, goal in (("shm", "<= 0.5x"), ("gloo", "<= 2x")):
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
    rows.append(
        Row(
            name=f"{megabytes} MB, shm: verified publish against a copy in one process",
            ours=gigabytes / best["shm"],
            peer=gigabytes / best["copy"],
            unit="GB/s",
            goal=">= 0.55x",
        )
    )
    return rows


def plan_rows() -> list[Row]:
    """What planning a trillion parameters costs, and how near simulated transfers come to their bounds."""
    trillion = ModelShape.of(KIMI_K2)
    parallel = MegatronParallel(tp=8, pp=8, ep=32, etp=1, layers=(8, 8, 8, 8, 8, 8, 8, 5))
    serving = Serving(tp=16, expert_parallel=True)
    sources = [megatron.held(trillion, parallel, parallel.rank(rank, 256)).layout for rank in range(256)]
    sinks = [served(trillion, serving, rank) for rank in range(16)] * 8
    began = time.perf_counter()
    plan = make_plan(sources, sinks, bucket_bytes=256 << 20, spread=True)
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    big = simulate(plan, Links())
    small = simulate(reference_plan(), Links())
    note = "simulated on links of 50 GB/s a GPU; peer: the lower bound"
    return [
        Row(name="plan of 1.03 T parameters, 256 -> 128 GPUs", ours=seconds, unit="s", goal="<= 5"),
        Row(name="memory of the process that planned it", ours=memory, unit="GB", goal="<= 2"),
        Row(
            name="1.03 T in bf16, 256 -> 128 GPUs",
            ours=big.seconds,
            peer=big.bound,
            unit="s",
            goal="<= 1.25x",
            note=note,
        ),
        Row(
            name="reference job, 16 -> 8 GPUs",
            ours=small.seconds,
            peer=small.bound,
            unit="s",
            goal="<= 1.25x",
            note=note,
        ),
    ]


def reference_plan() -> Plan:
    """16 megatron GPUs (TP4, PP4, EP4) to one engine of TP8; a mixture of experts of the reference job's dimensions, in
    DeepSeek-V3's names."""
    model = ModelShape.of(REFERENCE)
    parallel = MegatronParallel(tp=4, pp=4, ep=4, etp=1, layers=(11, 11, 11, 10))
    sources = [megatron.held(model, parallel, parallel.rank(rank, 16)).layout for rank in range(16)]
    sinks = [served(model, Serving(tp=8), rank) for rank in range(8)]
    return make_plan(sources, sinks, bucket_bytes=256 << 20, spread=True)


PEERS = {"nixl": "one READ of all bytes over UCX", "monarch": "one RDMABuffer.read_into, over TCP without a card"}
"""Packages that are timed where they are installed."""


def peer_rows(megabytes: int, ours: float | None) -> list[Row]:
    """A verified publish against peers that read the memory of another process, in the same minutes."""
    return [
        Row(
            name=f"{megabytes} MB, shm: publish against {peer}",
            ours=ours,
            peer=seconds_of(peer, megabytes),
            unit="s",
            goal="<= 0.5x",
            note=what if importlib.util.find_spec(peer) else f"{peer} is not installed here",
        )
        for peer, what in PEERS.items()
    ]


def seconds_of(peer: str, megabytes: int) -> float | None:
    """Of a peer, in a process of its own; None when it isn't installed or fails."""
    if importlib.util.find_spec(peer) is None:
        return None
    command = [sys.executable, "-m", "benchmarks.sync_peers", peer, str(megabytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        print(f"{peer}: not done in 300 s", file=sys.stderr)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{peer}: no result\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return float(json.loads(lines[-1])["seconds"])


def run() -> list[Row]:
    """All sizes, and plans."""
    return [*run_sizes(SIZES_MB, ROUNDS), *plan_rows()]


def run_sizes(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Rows of these sizes in megabytes."""
    rows = []
    for megabytes in sizes:
        rows += asyncio.run(measure(megabytes, rounds))
        if megabytes == max(sizes):
            ours = next(row.ours for row in rows if row.name == f"{megabytes} MB, shm: publish")
            rows += peer_rows(megabytes, ours)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with --json also write the rows."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), help="megabytes of weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    rows = [*run_sizes(options.sizes, options.rounds), *plan_rows()]
    print(to_markdown(rows))
    if options.json:
        options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
