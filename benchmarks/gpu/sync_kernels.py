"""What packing reaches inside one GPU, in each way that its kernels can be tuned: weights read a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.sync_ranks import Report, bytes_of, layouts
from sync import tuning as tuned
from sync.layout import Layout
from sync.pack import Packer, dtype_name
from sync.plan import Plan, make_plan
from sync.repeat import Repeats
from sync.tuning import Tuning

__all__ = ["kernels"]

COPYING = ("", "graph", "graph words=2048 copy_warps=8", "graph words=2048 copy_warps=4", "graph words=8192")
CASTING = (
    "",
    "graph",
    "fused",
    "fused by_cuda",
    "graph fused by_cuda",
    "graph fused by_cuda cast_warps=8",
    "graph cast_warps=8",
    "graph fused by_cuda cast_warps=4",
)
ROUNDS = 8


class Times(NamedTuple):
    """Seconds of packing all buckets once."""

    seconds: float
    """Until the digests are read, the best of some."""
    told: float
    """Until everything is launched, in the same round."""


def kernels(report: Report) -> None:
    """One row for each size, wire format and tuning; the digests of all tunings must be the same."""
    for size, wire, tunings, held in (
        ("8B", "fp8", CASTING, torch.bfloat16),
        ("8B", "bf16", COPYING, torch.bfloat16),
        ("8B", "bf16", COPYING[:2], torch.float32),
        ("0.6B", "bf16", COPYING[:2], torch.bfloat16),
        ("0.6B", "bf16", COPYING[:2], torch.float32),
        ("0.6B", "fp8", ("", "graph fused by_cuda"), torch.bfloat16),
    ):
        _measure(report, size, wire, tunings, held)


def _measure(report: Report, size: str, wire: str, tunings: tuple[str, ...], held: torch.dtype) -> None:
    trainer, rollout = layouts(size, "bf16", dtype_name(held))[0], layouts(size, wire)[1]
    weights = {e.name: torch.randn(e.shape, device="cuda").to(held) for e in trainer.entries}
    copy = _copy_seconds() * bytes_of(size)
    plan = make_plan([trainer], [rollout], bucket_bytes=128 << 20)
    truth: dict[int, tuple[int, ...]] | None = None
    for tuning in tunings:
        tuned.NOW = Tuning.of(tuning)
        what = f"{size} {dtype_name(held)}" if held != torch.bfloat16 else size
        name = f"{what} -> {wire}: pack, cast and hash [{tuning or 'as it is'}]"
        try:
            times, digests = _packed(plan, trainer, weights)
        except Exception as error:
            torch.cuda.synchronize()
            report.add(name=name, ours=None, unit="s", note=f"failed: {type(error).__name__}: {error}"[:300])
            continue
        truth = truth or digests
        rate = bytes_of(size) * held.itemsize / 2 / times.seconds / 1e9
        equal = "digests equal" if digests == truth else "DIGESTS DIFFER"
        note = f"{rate:.0f} GB/s read, launched after {times.told * 1e3:.1f} ms; {equal}; peer: a plain copy"
        report.add(name=name, ours=times.seconds, peer=copy, unit="s", note=note)
    tuned.NOW = Tuning()


def _packed(plan: Plan, trainer: Layout, weights: Mapping[str, Tensor]) -> tuple[Times, dict[int, tuple[int, ...]]]:
    repeats = Repeats()
    ring = torch.empty(4 * plan.largest_bucket, dtype=torch.uint8, device="cuda").view(4, -1)
    found: list[Times] = []
    digests: dict[int, tuple[int, ...]] = {}
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        packer = Packer(weights.__getitem__, trainer.parts, "trainer rank 0", repeats=repeats)
        for bucket in plan.buckets:
            packer.pack(bucket, ring[bucket.index % 4][: bucket.num_bytes])
        told = time.perf_counter() - began
        digests = packer.digests()
        found.append(Times(time.perf_counter() - began, told))
    return min(found), digests


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
