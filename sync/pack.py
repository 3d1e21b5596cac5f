"""The trainer's side of bytes: slice, cast or quantise, pack and hash a bucket.

PK-1: a packed segment is the row-major content of its box in its dtype, bit for bit what `tensor[box].to(dtype)` gives,
      or the codes and scales that `sync.quantise` defines.
PK-2: a cast clips what the target can't hold and refuses what is not finite, naming the tensor (W7).
PK-3: the digest is of the bytes as they lie in the bucket: xxh3 of host memory, `sync.kernels` on a device, where it is
      read back once per version and not once per segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sync.layout import Box, Entry
from sync.memory import as_bytes, copy_hashed, digest_of, view
from sync.plan import Bucket, Segment
from sync.quantise import largest, quantised, scales_of
from sync.transport import SyncError

__all__ = ["Agreed", "Digest", "dtype_name", "measure", "pack_bucket", "to_ints"]

Digest = int | Tensor
"""A 64-bit digest: a number, or a 0-d int64 tensor on the device that computed it."""

Agreed = Mapping[str, tuple[Box, Tensor]]
"""Name of a weight -> its largest values by block over all trainer ranks, and the box of blocks that they are for."""

Weight = Callable[[str], "Tensor | Sequence[Tensor]"]
Parts = Mapping[str, tuple[Entry, ...]]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype as layouts spell it: `torch.bfloat16` is `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def pack_bucket(
    bucket: Bucket, memory: Tensor, weight: Weight, held: Parts, where: str, agreed: Agreed
) -> list[Digest]:
    """Write a bucket; returns the digest of each of its segments.

    Args:
        memory: uint8, as many bytes as the bucket.
        weight: as `WeightSource.weight`.
        held: the entries of each name in this rank's layout.
        where: rank and version, for errors.
        agreed: for segments that are `shared` (PL-8).

    Raises:
        SyncError: a tensor has another shape or dtype than the layout said, or is not finite where it is cast.
    """
    digests: list[Digest] = []
    scales: Tensor | None = None
    for segment in bucket.segments:
        if segment.scales_of:
            assert scales is not None
            digests.append(_store(scales, segment, memory))
            continue
        part = _slice(weight, held, segment, where)
        if segment.scaling is not None:
            part, scales = _quantise(part, segment, where, agreed)
        elif segment.cast_from != segment.dtype:
            part = _clipped(part, segment, where)
        digests.append(_store(part, segment, memory))
    return digests


def measure(buckets: Sequence[Bucket], weight: Weight, held: Parts, where: str) -> dict[str, list[tuple[Box, Tensor]]]:
    """Largest values by block of the segments whose blocks reach beyond them: what ranks agree on before packing."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for segment in (s for bucket in buckets for s in bucket.segments if s.shared):
        assert segment.scaling is not None
        part = _slice(weight, held, segment, where)
        lo, hi = segment.scaling.scale_range(segment.shape, segment.box.lo, segment.box.hi)
        most = largest(part, segment.box, segment.shape, segment.scaling).cpu()
        found.setdefault(segment.name, []).append((Box(lo, hi), most))
    return found


def to_ints(digests: Mapping[int, Sequence[Digest]]) -> dict[int, tuple[int, ...]]:
    """Digests as numbers in 0 .. 2^64 - 1; those on a device are read in one go."""
    flat = [d for found in digests.values() for d in found]
    on_device = [d for d in flat if isinstance(d, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    numbers = iter([(next(read) if isinstance(d, Tensor) else d) & (1 << 64) - 1 for d in flat])
    return {index: tuple(next(numbers) for _ in found) for index, found in digests.items()}


def _slice(weight: Weight, held: Parts, segment: Segment, where: str) -> Tensor:
    """The values of a segment, in this rank's memory, from that of the boxes of its name which holds it."""
    given, entries = weight(segment.name), held[segment.name]
    tensors = [given] if isinstance(given, Tensor) else list(given)
    if len(tensors) != len(entries):
        raise SyncError(
            f"{segment.name}: {where}: the layout has {len(entries)} boxes of it and `weight()` returned "
            f"{len(tensors)} tensors; return one tensor per box, in the order of the entries"
        )
    for tensor, entry in zip(tensors, entries, strict=True):
        if not entry.box.contains(segment.box):
            continue
        if tuple(tensor.shape) != entry.box.shape or dtype_name(tensor.dtype) != segment.cast_from:
            raise SyncError(
                f"{segment.name}: {where}: the layout says {segment.cast_from} {list(entry.box.shape)}, the weight is "
                f"{dtype_name(tensor.dtype)} {list(tensor.shape)}; declare what `weight()` returns"
            )
        return tensor.detach()[segment.box.slices_in(entry.box)]
    raise SyncError(f"{segment.name}: {where}: no box of this rank holds {segment.box}; open the session again")


def _store(part: Tensor, segment: Segment, memory: Tensor) -> Digest:
    target = view(memory, segment.offset, segment.dtype, segment.box.shape)
    if memory.device.type != "cpu":
        from sync.kernels import copy_mixed

        return copy_mixed(target, part)
    raw = as_bytes(target)
    if part.is_contiguous() and part.dtype == target.dtype and part.device == target.device:
        return copy_hashed(raw, as_bytes(part))
    target.copy_(part)
    return digest_of(raw)


def _quantise(part: Tensor, segment: Segment, where: str, agreed: Agreed) -> tuple[Tensor, Tensor]:
    """Codes of a segment, and the scales that follow it in the bucket."""
    scaling, box, shape = segment.scaling, segment.box, segment.shape
    assert scaling is not None
    lo, hi = scaling.scale_range(shape, box.lo, box.hi)
    touched = Box(lo, hi)
    if segment.shared:
        blocks, values = agreed[segment.name]
        most = values[touched.slices_in(blocks)].to(part.device)
    else:
        most = largest(part, box, shape, scaling)
    if not bool(torch.isfinite(most).all()):
        raise _not_finite(segment, where)
    scales = scales_of(most, segment.dtype, scaling)
    return quantised(part, scales, box, shape, segment.dtype, scaling), scales


def _clipped(part: Tensor, segment: Segment, where: str) -> Tensor:
    limit = torch.finfo(getattr(torch, segment.dtype)).max
    low, high = (float(x) for x in part.aminmax())
    if not low > -float("inf") or not high < float("inf"):
        raise _not_finite(segment, where)
    return part.clamp(-limit, limit) if low < -limit or high > limit else part


def _not_finite(segment: Segment, where: str) -> SyncError:
    return SyncError(
        f"{segment.name}: {where}: box {segment.box} holds values that are not finite; the trainer has diverged, look "
        f"at its loss and gradient norm"
    )
