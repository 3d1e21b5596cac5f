"""What packing reaches inside one GPU: weights read a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.sync_ranks import Report, bytes_of, layouts
from sync.layout import Layout
from sync.pack import Packer, dtype_name
from sync.plan import Plan, make_plan
from sync.repeat import Repeats

__all__ = ["kernels"]

ROUNDS = 8


class Times(NamedTuple):
    """Seconds of packing all buckets once."""

    seconds: float
    """Until the digests are read, the best of some."""
    told: float
    """Until everything is launched, in the same round."""


def kernels(report: Report) -> None:
    """A row for each size and wire format, and one for a trainer that holds float32."""
    for size, wire, held in (
        ("8B", "fp8", torch.bfloat16),
        ("8B", "bf16", torch.bfloat16),
        ("8B", "bf16", torch.float32),
        ("0.6B", "bf16", torch.bfloat16),
        ("0.6B", "bf16", torch.float32),
        ("0.6B", "fp8", torch.bfloat16),
    ):
        trainer, rollout = layouts(size, "bf16", dtype_name(held))[0], layouts(size, wire)[1]
        weights = {e.name: torch.randn(e.shape, device="cuda").to(held) for e in trainer.entries}
        plan = make_plan([trainer], [rollout], bucket_bytes=128 << 20)
        times = _packed(plan, trainer, weights)
        num_bytes = bytes_of(size) * held.itemsize // 2
        rate = num_bytes / times.seconds / 1e9
        report.add(
            name=f"{size} {'fp32' if held == torch.float32 else 'bf16'} -> {wire}: pack, cast and hash",
            ours=times.seconds,
            peer=_copy_seconds() * bytes_of(size),
            unit="s",
            note=f"{rate:.0f} GB/s read, launched after {times.told * 1e3:.1f} ms; peer: a plain copy in bf16",
        )


def _packed(plan: Plan, trainer: Layout, weights: Mapping[str, Tensor]) -> Times:
    repeats = Repeats()
    ring = torch.empty(4 * plan.largest_bucket, dtype=torch.uint8, device="cuda").view(4, -1)
    found: list[Times] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        packer = Packer(weights.__getitem__, trainer.parts, "trainer rank 0", repeats=repeats)
        for bucket in plan.buckets:
            packer.pack(bucket, ring[bucket.index % 4][: bucket.num_bytes])
        told = time.perf_counter() - began
        packer.digests()
        found.append(Times(time.perf_counter() - began, told))
    return min(found)


def _copy_seconds() -> float:
    """Of a byte that is copied inside this GPU."""
    one, other = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return min(_timed(lambda: one.copy_(other)) for _ in range(6)) / len(one)


def _timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began
