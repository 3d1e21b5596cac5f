"""Publishing a version from one GPU to another of the same host, verified and committed, beside a raw NCCL broadcast.

    python -m benchmarks.gpu.sync [--out DIR] [--rounds 8] [--sizes 0.6B 8B]

A trainer process on GPU 0 and a rollout process on GPU 1, random weights in the shapes of Qwen3-0.6B and Qwen3-8B. Each
line is printed as it comes, a table ends the run. The raw broadcast moves the same bytes in pieces of 256 MiB with
no digest, no staging and no decision. "decoding" is a loop over the weights in service: matrix products of 64 rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import Row, to_markdown
from runtime import Actor, ActorMesh, TuttiError, endpoint, this_host
from sync.explain import quantised
from sync.formats import Scaling
from sync.layout import Entry, Layout
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.ports import ReceiverPort, SenderPort
from sync.session import SyncConfig, WeightSession

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
GOALS = {("8B", "bf16"): "<= 0.055", ("8B", "fp8"): "<= 0.035", ("0.6B", "bf16"): "<= 0.012"}


def layouts(size: str, wire: str) -> tuple[Layout, Layout]:
    """Of the trainer and of the rollout."""
    model = ModelShape.of(SIZES[size])
    trainer = Layout(tuple(Entry.whole(w.name, w.shape, w.dtype) for w in model.weights()))
    rollout = served(model, Serving(), 0)
    if wire == "fp8":
        matrices = [w.name for w in model.weights() if w.role == "matrix"]
        rollout = quantised(rollout, matrices, "float8_e4m3fn", Scaling("block", "weight_scale_inv"))
    return trainer, rollout


class Trainer(SenderPort, Actor):
    """Random weights on GPU 0."""

    def __init__(self, size: str) -> None:
        torch.cuda.set_device(0)
        self.layout, _ = layouts(size, "bf16")
        self.weights = {e.name: torch.randn(e.shape, device="cuda").to(torch.bfloat16) for e in self.layout.entries}
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


class Rollout(ReceiverPort, Actor):
    """Weights on GPU 1: keeps what it is given and hands back what it had."""

    def __init__(self, size: str, wire: str) -> None:
        last = torch.cuda.device_count() - 1
        torch.cuda.set_device(last)
        self.weight_device = f"cuda:{last}"
        _, self.layout = layouts(size, wire)
        self.weights: Mapping[str, Tensor] = {
            e.name: torch.zeros(e.box.shape, dtype=getattr(torch, e.dtype), device="cuda")
            for e in self.layout.entries
            if e.name not in self.layout.derived
        }
        self.rows = {n: torch.randn(64, n, device="cuda").to(torch.bfloat16) for n in (1024, 2048, 3072, 4096, 12288)}
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        self.weights, before = dict(weights), self.weights
        return before

    @endpoint
    def decode(self, seconds: float) -> tuple[int, float]:
        """Products of 64 rows with every matrix in service; how many passes in how many seconds."""
        began, passes = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for weight in self.weights.values():
                if weight.ndim == 2 and weight.dtype == torch.bfloat16 and weight.shape[1] in self.rows:
                    torch.matmul(self.rows[weight.shape[1]], weight.t())
            torch.cuda.synchronize()
            passes += 1
        return passes, time.perf_counter() - began

    @endpoint
    def used(self) -> float:
        """GB in use on this GPU."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9


class Raw(Actor):
    """A bare broadcast of as many bytes."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(min(rank, torch.cuda.device_count() - 1))
        self.piece = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    @endpoint
    def broadcast(self, num_bytes: int, rounds: int) -> float:
        """Best time of all bytes, in seconds."""
        best = float("inf")
        for _ in range(rounds + 2):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                dist.broadcast(self.piece[: min(len(self.piece), num_bytes - start)], src=0)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def copy(self, num_bytes: int, rounds: int) -> float:
        """Best time of copying as many bytes inside this GPU, in seconds."""
        other = torch.empty_like(self.piece)
        best = float("inf")
        for _ in range(rounds + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                size = min(len(self.piece), num_bytes - start)
                other[:size].copy_(self.piece[:size])
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def gpus(self) -> int:
        return torch.cuda.device_count()


class Report:
    """Rows as they come."""

    def __init__(self, out: Path | None) -> None:
        self.rows: list[Row] = []
        self._out = out

    def add(self, **fields: Any) -> None:
        row = Row(**fields)
        self.rows.append(row)
        print(json.dumps(row.as_dict()), flush=True)
        if self._out is not None:
            with (self._out / "sync.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.as_dict()) + "\n")


async def raw_seconds(host: Any, sizes: Sequence[str], rounds: int) -> tuple[str, dict[str, float]]:
    """Raw NCCL broadcast of each size between two GPUs; with one GPU a copy inside it. What it is, and seconds."""
    procs = await host.spawn_procs(2, name="raw", start="fresh")
    parts = [await procs.slice(rank=r).spawn(f"raw{r}", Raw, r) for r in range(2)]
    both = await parts[0].gpus.call_one() > 1
    if both:
        await procs.init_process_group("nccl")
    found = {}
    for size in sizes:
        num_bytes = sum(entry.num_bytes for entry in layouts(size, "bf16")[0].entries)
        if both:
            found[size] = max(await asyncio.gather(*(part.broadcast.call_one(num_bytes, rounds) for part in parts)))
        else:
            found[size] = await parts[0].copy.call_one(num_bytes, rounds)
    await procs.stop()
    return "raw NCCL broadcast" if both else "raw copy inside the GPU", found


async def measure(host: Any, size: str, wire: str, name: str, rounds: int, raw: float, report: Report) -> None:
    """One size, wire format and transport."""
    procs = await host.spawn_procs(2, name=f"{size}-{wire}-{name}", start="fresh")
    trainer = await procs.slice(rank=0).spawn("trainer", Trainer, size)
    rollout = await procs.slice(rank=1).spawn("rollout", Rollout, size, wire)
    what = f"{size} bf16 -> {wire}, {name}"
    try:
        config = SyncConfig(transport=name, deadline_s=30.0)  # type: ignore[arg-type]
        async with WeightSession(trainer, rollout, config) as session:
            commits = [await session.publish(version) for version in range(rounds + 3)]
            good = commits[3:]
            best = min(good, key=lambda c: c.seconds)
            median = statistics.median(c.seconds for c in good)
            note = (
                f"median {median * 1e3:.1f} ms; pack {best.pack_seconds * 1e3:.1f}, stage "
                f"{best.stage_seconds * 1e3:.1f}; {best.bytes / 1e9:.2f} GB, {best.bytes / best.seconds / 1e9:.0f} GB/s"
            )
            goal = GOALS.get((size, wire), "")
            report.add(name=f"{what}: publish", ours=best.seconds, peer=raw, unit="s", goal=goal, note=note)
            pause = statistics.median(c.pause_seconds for c in good)
            report.add(name=f"{what}: pause", ours=pause, unit="s", goal="<= 0.05", note="swap, median")
            before = await rollout.used.call_one()
            for version in range(rounds + 3, rounds + 33):
                await session.publish(version)
            grown = await rollout.used.call_one() - before
            report.add(name=f"{what}: memory grown over 30 syncs", ours=grown, unit="GB", goal="<= 0.01")
            report.add(name=f"{what}: memory in use", ours=before, unit="GB", note="model, shadow, staging, context")
            if wire == "bf16" and size == "8B":
                await decoding(session, rollout, rounds + 33, what, report)
    finally:
        await procs.stop()


async def decoding(session: WeightSession, rollout: ActorMesh, version: int, what: str, report: Report) -> None:
    """Throughput of decoding alone, and while versions are published one after the other."""

    async def rate(until: asyncio.Event) -> float:
        passes, busy = 0, 0.0
        while not until.is_set():
            count, seconds = await rollout.decode.call_one(0.03)
            passes, busy = passes + count, busy + seconds
        return passes / busy

    async def publish_for(seconds: float) -> int:
        nonlocal version
        count, ends = 0, time.perf_counter() + seconds
        while time.perf_counter() < ends:
            await session.publish(version)
            version, count = version + 1, count + 1
        return count

    over = asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, over.set)
    alone = await rate(over)
    over = asyncio.Event()
    running = asyncio.ensure_future(rate(over))
    count = await publish_for(2.0)
    over.set()
    beside = await running
    report.add(
        name=f"{what}: decoding during transfers",
        ours=beside,
        peer=alone,
        unit="passes/s",
        goal=">= 0.95x",
        note=f"{count} versions in 2 s, one after the other",
    )


async def run(sizes: Sequence[str], rounds: int, out: Path | None) -> list[Row]:
    """All cases; one that fails is told and the others go on."""
    report = Report(out)
    async with this_host() as host:
        peer, raw = await raw_seconds(host, sizes, rounds)
        for size, seconds in raw.items():
            num_bytes = sum(entry.num_bytes for entry in layouts(size, "bf16")[0].entries)
            rate = f"{num_bytes / seconds / 1e9:.0f} GB/s"
            report.add(name=f"{size} bf16: {peer}", ours=seconds, unit="s", note=rate)
        for size in sizes:
            for wire in ("bf16", "fp8"):
                for name in ("ipc", "nccl") if "NCCL" in peer else ("ipc",):
                    try:
                        await measure(host, size, wire, name, rounds, raw[size], report)
                    except TuttiError as error:
                        print(f"{size} {wire} {name}: {str(error).partition(chr(10))[0]}", flush=True)
    return report.rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args(arguments)
    rows = asyncio.run(run(options.sizes, options.rounds, options.out))
    print(to_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
