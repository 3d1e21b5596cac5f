"""The trainer's side of bytes: slice, cast or quantise, pack and hash a bucket.

PK-1: a packed segment is the row-major content of its box in its dtype, bit for bit what `tensor[box].to(dtype)` gives,
      or the codes and scales that `sync.quantise` defines.
PK-2: a cast clips what the target can't hold and refuses what is not finite, naming the tensor (W7).
PK-3: the digest is of the bytes as they lie in the bucket: xxh3 of host memory, `sync.kernels` on a device, where it is
      read back once per version and not once per segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sync.batch import Batch, Digest, by_kernels, stored
from sync.digest import Later
from sync.layout import Box, Entry
from sync.memory import view
from sync.plan import Bucket, Segment
from sync.quantise import Cast, by_definition, largest
from sync.repeat import Launch, Repeats
from sync.transport import SyncError

if TYPE_CHECKING:
    from sync.kernels_fp8 import Casts

__all__ = ["Agreed", "Packer", "dtype_name", "measure", "to_ints"]


class _Made(NamedTuple):
    """What a cast has written."""

    blocks: Box
    scales: Tensor
    """Of `blocks`."""
    digest: Later | None
    """Of the codes, where the kernel took it."""


Agreed = Mapping[str, tuple[Box, Tensor]]
"""Name of a weight -> its largest values by block over all trainer ranks, and the box of blocks that they are for."""

Weight = Callable[[str], "Tensor | Sequence[Tensor]"]
Parts = Mapping[str, tuple[Entry, ...]]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype as layouts spell it: `torch.bfloat16` is `bfloat16`."""
    return str(dtype).removeprefix("torch.")


class Packer:
    """Packs buckets of one version on one rank.

    Args:
        weight: as `WeightSource.weight`.
        held: the entries of each name in this rank's layout.
        where: rank and version, for errors.
        agreed: for segments that are `shared` (PL-8).
        repeats: what was launched for the versions before, on a device.
    """

    def __init__(
        self, weight: Weight, held: Parts, where: str, agreed: Agreed | None = None, repeats: Repeats | None = None
    ) -> None:
        self._weight = weight
        self._held = held
        self._where = where
        self._agreed = agreed or {}
        self._repeats = repeats
        self._digests: dict[int, Sequence[Digest]] = {}
        self._suspects: list[tuple[Sequence[Segment], Tensor]] = []
        """On a device: segments that were cast, and a count for each of what is not finite, not read yet."""

    def pack(self, bucket: Bucket, memory: Tensor) -> None:
        """Write a bucket into uint8 memory.

        Raises:
            SyncError: a tensor has another shape or dtype than the layout said, or is not finite where it is cast; on a
                device `digests` tells the latter.
        """
        weight = _once(self._weight)
        again = None if self._repeats is None else self._repeats.run(bucket, memory, weight)
        if again is None:
            self._digests[bucket.index] = self._pack(bucket, memory, weight)
            return
        self._digests[bucket.index] = again.digests
        if again.broken is not None:
            self._suspects.append((again.cast_segments, again.broken))

    def _pack(self, bucket: Bucket, memory: Tensor, weight: Weight) -> list[Digest]:
        digests: list[Digest | None] = []
        made, casts = self._quantised(bucket, memory, weight)
        batch = Batch(memory)
        for place, segment in enumerate(bucket.segments):
            if segment.scaling is not None:
                digest = made[place].digest
                codes = view(memory, segment.offset, segment.dtype, segment.box.shape)
                digests.append(batch.add(segment, codes, into_memory=True) if digest is None else digest)
            elif segment.scales_of:
                blocks, scales = made[place - 1].blocks, made[place - 1].scales
                some = scales if segment.box == blocks else scales[segment.box.slices_in(blocks)].contiguous()
                digests.append(batch.add(segment, some, into_memory=True))
            elif segment.cast_from == segment.dtype:
                part = _slice(weight, self._held, segment, self._where)
                digests.append(batch.add(segment, part, into_memory=True))
            else:
                part = _slice(weight, self._held, segment, self._where)
                digests.append(self._plainly(segment, part, memory, batch))
        filled = batch.filled(digests)
        if batch.broken is not None:
            self._suspects.append((batch.cast_segments, batch.broken))
        self._remember(bucket, memory, weight, casts, batch, digests)
        return filled

    def _remember(
        self,
        bucket: Bucket,
        memory: Tensor,
        weight: Weight,
        casts: Casts | None,
        batch: Batch,
        digests: Sequence[Digest | None],
    ) -> None:
        """Keep what was done, if nothing else made the bucket (RP-2)."""
        if self._repeats is None:
            return
        names = [s.name for s in bucket.segments if not s.scales_of]
        if not by_kernels(memory):
            if again := batch.again(bucket):
                self._repeats.keep(bucket, memory, weight, names, again)
            return
        weights = [weight(name) for name in names]
        parts = [t for w in weights for t in ([w] if isinstance(w, Tensor) else w)]
        if any(t.device != memory.device for t in parts):
            return
        if casts is not None and not casts.keeps_nothing:
            return
        scales = {s.name: s for s in bucket.segments if s.scales_of}
        for place, segment in enumerate(bucket.segments):
            if segment.shared or not (digests[place] is None or isinstance(digests[place], Later)):
                return
            if segment.scaling is not None:
                touched = segment.scaling.scale_range(segment.shape, segment.box.lo, segment.box.hi)
                sent = scales.get(segment.scaling.scale_name)
                if sent is None or (sent.box.lo, sent.box.hi) != touched:
                    return
        cast_segments = [s for s in bucket.segments if s.scaling is not None]
        order, made = {s.offset: n for n, s in enumerate(cast_segments)}, iter(batch.origins)
        origins = [
            order[s.offset] if isinstance(d, Later) else next(made)
            for s, d in zip(bucket.segments, digests, strict=True)
        ]
        cast_segments += batch.cast_segments
        launch = Launch(cast_segments, origins, quantised=casts, cast=batch.casts, copies=batch.copies)
        self._repeats.keep(bucket, memory, weight, names, launch)

    def digests(self) -> dict[int, tuple[int, ...]]:
        """Bucket index -> digests of its segments. Raises SyncError when a value that was cast is not finite."""
        if self._suspects:
            found = torch.cat([broken for _, broken in self._suspects]).tolist()
            for segment, broken in zip((s for some, _ in self._suspects for s in some), found, strict=True):
                if broken:
                    raise _not_finite(segment, self._where)
        return to_ints(self._digests)

    def _quantised(self, bucket: Bucket, memory: Tensor, weight: Weight) -> tuple[dict[int, _Made], Casts | None]:
        """Write the codes of all segments that are quantised, and their scales where they travel whole."""
        places = [place for place, segment in enumerate(bucket.segments) if segment.scaling is not None]
        if not places:
            return {}, None
        casts = [self._cast(bucket, place, memory, weight) for place in places]
        digests: dict[int, Later] = {}
        ready: Casts | None = None
        if not by_kernels(memory):
            for place, cast in zip(places, casts, strict=True):
                if by_definition(cast):
                    raise _not_finite(bucket.segments[place], self._where)
        else:
            from sync.kernels_fp8 import Casts

            ready = Casts(casts)
            digests, broken = ready.run()
            self._suspects.append(([bucket.segments[place] for place in places], broken))
        made = {
            place: _Made(Box(*c.scaling.scale_range(c.shape, c.box.lo, c.box.hi)), c.scales, digests.get(n))
            for n, (place, c) in enumerate(zip(places, casts, strict=True))
        }
        return made, ready

    def _cast(self, bucket: Bucket, place: int, memory: Tensor, weight: Weight) -> Cast:
        segment = bucket.segments[place]
        box, shape, scaling = segment.box, segment.shape, segment.scaling
        assert scaling is not None
        touched = Box(*scaling.scale_range(shape, box.lo, box.hi))
        after = bucket.segments[place + 1] if place + 1 < len(bucket.segments) else None
        if after is not None and after.scales_of and after.box == touched:
            scales = view(memory, after.offset, after.dtype, after.box.shape)
        else:
            scales = torch.empty(touched.shape, dtype=torch.float32, device=memory.device)
        most: Tensor | None = None
        if segment.shared:
            blocks, values = self._agreed[segment.name]
            most = values[touched.slices_in(blocks)].to(memory.device).contiguous()
        part = _slice(weight, self._held, segment, self._where)
        return Cast(
            part.to(memory.device),
            view(memory, segment.offset, segment.dtype, box.shape),
            scales,
            box,
            shape,
            scaling,
            most,
        )

    def _plainly(self, segment: Segment, part: Tensor, memory: Tensor, batch: Batch) -> Digest | None:
        """A cast without scales; None where `batch` will have made it."""
        target = view(memory, segment.offset, segment.dtype, segment.box.shape)
        if by_kernels(memory) and batch.cast(segment, part, target):
            return None
        return stored(target, self._clipped(part, segment, on_device=by_kernels(memory)))

    def _clipped(self, part: Tensor, segment: Segment, *, on_device: bool) -> Tensor:
        limit = torch.finfo(getattr(torch, segment.dtype)).max
        if on_device:
            self._suspects.append(([segment], (~torch.isfinite(part)).sum(dtype=torch.int32).view(1)))
            return _wide(part).clamp(-limit, limit)
        low, high = (float(x) for x in part.aminmax())
        if not low > -float("inf") or not high < float("inf"):
            raise _not_finite(segment, self._where)
        return _wide(part).clamp(-limit, limit) if low < -limit or high > limit else part


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
    """Digests as numbers in 0 .. 2^64 - 1; those on a device are read at once."""
    alone = [d for found in digests.values() for d in found if isinstance(d, Tensor)]
    blocks = {id(d.block): d.block for found in digests.values() for d in found if isinstance(d, Later)}
    together = [*blocks.values(), *(d.view(1) for d in alone)]
    read: list[int] = torch.cat(together).tolist() if together else []
    starts = dict(zip(blocks, accumulate((len(b) for b in blocks.values()), initial=0), strict=False))
    single = iter(read[len(read) - len(alone) :])

    def number(digest: Digest) -> int:
        if isinstance(digest, int):
            return digest
        value = read[starts[id(digest.block)] + digest.place] if isinstance(digest, Later) else next(single)
        return value & (1 << 64) - 1

    return {index: tuple(map(number, found)) for index, found in digests.items()}


def _once(weight: Weight) -> Weight:
    """Asks for each weight once and holds it: one that is made on asking lies elsewhere the next time."""
    seen: dict[str, Tensor | Sequence[Tensor]] = {}

    def one(name: str) -> Tensor | Sequence[Tensor]:
        if name not in seen:
            seen[name] = weight(name)
        return seen[name]

    return one


def _wide(part: Tensor) -> Tensor:
    """In a dtype that holds the limits of all others: 65504 of float16 is 65536 in bfloat16, infinity in float16."""
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


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
        whole = segment.box == entry.box
        return tensor.detach() if whole else tensor.detach()[segment.box.slices_in(entry.box)]
    raise SyncError(f"{segment.name}: {where}: no box of this rank holds {segment.box}; open the session again")


def _not_finite(segment: Segment, where: str) -> SyncError:
    return SyncError(
        f"{segment.name}: {where}: box {segment.box} holds values that are not finite; the trainer has diverged, look "
        f"at its loss and gradient norm"
    )
