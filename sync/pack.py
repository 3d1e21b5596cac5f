"""Slice, cast, pack and hash on the trainer; verify and assemble on the rollout. The one file of sync that wraps torch.

PK-1: a packed segment is the row-major content of its box in its dtype, bit for bit what `tensor[box].to(dtype)` gives.
PK-2: a cast clips what the target can't hold and refuses what is not finite, naming the tensor (W7).
PK-3: nothing of a bucket is looked at before its digests were compared, segment by segment.
PK-4: a tensor that arrives as one segment is a view of the transport's memory; only split tensors are copied together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sync.coverage import sent_entries
from sync.digest import combine, digest64
from sync.layout import Box, Entry, Layout
from sync.plan import Bucket, Segment
from sync.transport import SyncError

__all__ = ["Shadow", "dtype_name", "pack", "part_of", "tensor_over"]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype as layouts spell it: `torch.bfloat16` is `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_over(memory: memoryview, offset: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor that shares `memory` from byte `offset` on, and keeps it alive.

    Memory may be read-only; writing to such a tensor ends the process, as the mapping is meant to guarantee.
    """
    kind = getattr(torch, dtype)
    numel = int(np.prod(shape, dtype=np.int64))
    if numel == 0:
        return torch.empty(tuple(shape), dtype=kind)
    part = memory[offset : offset + numel * kind.itemsize]
    if part.readonly:
        # torch warns about every read-only buffer, so it is handed the address; the attribute keeps the mapping alive.
        block: Any = (ctypes.c_uint8 * len(part)).from_address(np.frombuffer(part, np.uint8).ctypes.data)
        block.owner = part
        return torch.frombuffer(block, dtype=kind, count=numel).view(tuple(shape))
    return torch.frombuffer(part, dtype=kind, count=numel).view(tuple(shape))


def part_of(
    weight: Tensor | Sequence[Tensor], held: Sequence[Entry], segment: Segment, where: str
) -> tuple[Tensor, Box]:
    """The tensor among those of a name that holds a segment, and its box.

    Args:
        weight: what `WeightSource.weight` returned.
        held: the entries of that name in the layout of this rank.
    """
    tensors = [weight] if isinstance(weight, Tensor) else list(weight)
    if len(tensors) != len(held):
        raise SyncError(
            f"{segment.name}: {where}: the layout has {len(held)} boxes of it and `weight()` returned {len(tensors)} "
            f"tensors; return one tensor per box, in the order of the entries"
        )
    for tensor, entry in zip(tensors, held, strict=True):
        if entry.box.contains(segment.box):
            return tensor, entry.box
    raise SyncError(f"{segment.name}: {where}: no box of this rank holds {segment.box}; open the session again")


def pack(tensor: Tensor, held: Box, segment: Segment, memory: memoryview, where: str) -> int:
    """Write one segment into its bucket and return its digest.

    Args:
        tensor: what the rank holds of the segment's tensor, in the shape of `held`; any strides, any device.
        held: the box that `tensor` is.
        memory: the whole bucket, writable.
        where: rank and version, for errors.

    Raises:
        SyncError: the tensor has another shape or dtype than the layout said, or is not finite where it is cast.
    """
    if tuple(tensor.shape) != held.shape or dtype_name(tensor.dtype) != segment.cast_from:
        raise SyncError(
            f"{segment.name}: {where}: the layout says {segment.cast_from} {list(held.shape)}, the weight is "
            f"{dtype_name(tensor.dtype)} {list(tensor.shape)}; declare what `weight()` returns"
        )
    part = tensor.detach()[segment.box.slices_in(held)]
    if segment.cast_from != segment.dtype:
        part = _clipped(part, segment, where)
    tensor_over(memory, segment.offset, segment.dtype, segment.box.shape).copy_(part)
    return digest64(memory[segment.offset : segment.offset + segment.num_bytes])


def _clipped(part: Tensor, segment: Segment, where: str) -> Tensor:
    limit = torch.finfo(getattr(torch, segment.dtype)).max
    low, high = (float(x) for x in part.aminmax())
    if not np.isfinite(low) or not np.isfinite(high):
        raise SyncError(
            f"{segment.name}: {where}: box {segment.box} holds values that are not finite ({low} to {high}); the "
            f"trainer has diverged, look at its loss and gradient norm"
        )
    return part.clamp(-limit, limit) if low < -limit or high > limit else part


class Shadow:
    """One version on its way into one rollout rank: verified bytes that nothing serves yet (W4)."""

    def __init__(self, layout: Layout, version: int, where: str) -> None:
        self.version = version
        self._layout = layout
        self._where = where
        self._entries = {entry.name: entry for entry in sent_entries(layout)}
        self._tensors: dict[str, Tensor] = {}
        self._missing = {name: entry.box.numel for name, entry in self._entries.items()}

    def add(self, bucket: Bucket, memory: memoryview, digests: Sequence[int]) -> int:
        """Verify a bucket against the digests of its segments, take its tensors and return the combined digest.

        Raises:
            SyncError: a segment is not what its owner packed; names tensor, box, both ranks and both digests.
        """
        got = [digest64(memory[s.offset : s.offset + s.num_bytes]) for s in bucket.segments]
        for segment, expected, found in zip(bucket.segments, digests, got, strict=True):
            if expected != found:
                raise SyncError(
                    f"{segment.name}: {self._where}, version {self.version}: the bytes of box {segment.box} have "
                    f"digest {found:016x}, trainer rank {bucket.owner} packed {expected:016x}; they changed on the "
                    f"way. Nothing was applied; publish the version again, and look for faulty memory if it repeats"
                )
        for segment in bucket.segments:
            self._take(segment, memory)
        return combine(got)

    def check_complete(self) -> None:
        """Raises SyncError when an element of a sent tensor did not arrive; names the tensors."""
        missing = {name: count for name, count in self._missing.items() if count}
        if missing:
            some = ", ".join(f"{name} ({count} elements)" for name, count in list(missing.items())[:5])
            raise SyncError(f"{self._where}, version {self.version}: incomplete after the last bucket: {some}")

    def weights(self) -> Mapping[str, Tensor]:
        """Every sent entry, and every derived one that the layout lists, in the shape of its box."""
        for name, entry in self._entries.items():
            if entry.box.is_empty:
                self._tensors[name] = torch.empty(entry.box.shape, dtype=getattr(torch, entry.dtype))
        derived = {n: self._tensors[origin] for n, origin in self._layout.derived.items() if n in self._layout.by_name}
        return {**self._tensors, **derived}

    def _take(self, segment: Segment, memory: memoryview) -> None:
        entry = self._entries[segment.name]
        arrived = tensor_over(memory, segment.offset, segment.dtype, segment.box.shape)
        if segment.box == entry.box:
            self._tensors[segment.name] = arrived
        else:
            whole = self._tensors.get(segment.name)
            if whole is None:
                whole = torch.empty(entry.box.shape, dtype=arrived.dtype)
                self._tensors[segment.name] = whole
            whole[segment.box.slices_in(entry.box)].copy_(arrived)
        self._missing[segment.name] -= segment.box.numel
