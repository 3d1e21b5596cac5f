"""The rollout's side of bytes: take buckets into memory that nothing serves yet, hashed as they are stored (W4).

SH-1: what lies in the shadow is private to this rank: it is copied out of the transport once, straight to its place.
SH-2: digests are of the bytes stored. Nothing is applied before the session has compared them with what was packed.
SH-3: a shadow is made from the memory that the version before it left over, so that memory is flat over versions: one
      copy of the model beside the one in service.
SH-4: in place there is no shadow: pieces go straight over the live tensors, whose engine is stopped (PO-7).
SH-5: a bucket is stored again as it was (RP-1) only into tensors that were looked at when it was stored there first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from sync.batch import Batch, Digest
from sync.coverage import sent_entries
from sync.layout import Entry, Layout
from sync.memory import empty
from sync.pack import dtype_name
from sync.plan import Bucket, Segment
from sync.repeat import Repeats
from sync.transport import SyncError

__all__ = ["Shadow"]


class Shadow:
    """One version on its way into one rollout rank.

    Args:
        where: rank, for errors.
        spare: tensors that may be overwritten, by name; those that don't fit are left alone.
        in_place: they are the live ones, and nothing else may be taken.
        repeats: how buckets of the versions before were stored.
    """

    def __init__(
        self,
        layout: Layout,
        version: int,
        where: str,
        spare: Mapping[str, Tensor] | None = None,
        *,
        in_place: bool = False,
        repeats: Repeats | None = None,
    ) -> None:
        self._repeats = repeats
        self.version = version
        self._layout = layout
        self._where = where
        self._spare = spare or {}
        self._in_place = in_place
        self._entries, sizes = _comes(layout)
        self._tensors: dict[str, Tensor] = {}
        self._missing = dict(sizes)

    def add(self, bucket: Bucket, memory: Tensor) -> list[Digest]:
        """Store a bucket; returns the digest of each of its segments as it lies here now."""
        again = None if self._repeats is None else self._repeats.run(bucket, memory, self._at_hand)
        if again is not None:
            for name, elements in again.elements:
                self._missing[name] -= elements
                if name not in self._tensors:
                    self._tensors[name] = self._spare[name]
            return list(again.digests)
        batch = Batch(memory)
        digests = batch.filled([batch.add(s, self._place(s, memory), into_memory=False) for s in bucket.segments])
        if self._repeats is not None and (stored := batch.again(bucket)):
            names = [segment.name for segment in bucket.segments]
            self._repeats.keep(bucket, memory, self._tensors.__getitem__, names, stored)
        return digests

    def _at_hand(self, name: str) -> Tensor | None:
        return self._tensors.get(name, self._spare.get(name))

    def check_complete(self) -> None:
        """Raises SyncError when an element of a sent tensor did not arrive; names the tensors."""
        missing = {name: count for name, count in self._missing.items() if count}
        if missing:
            some = ", ".join(f"{name} ({count} elements)" for name, count in list(missing.items())[:5])
            raise SyncError(f"{self._where}, version {self.version}: incomplete after the last bucket: {some}")

    def moved(self, device: str, spare: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring what came through memory of the host to a device, into tensors that may be overwritten if they fit.

        Returns:
            The memory of the host that it lay in, by name; nothing if it lies on the device already.
        """
        there = {name: t for name, t in self._tensors.items() if t.device.type != torch.device(device).type}
        for name, tensor in there.items():
            room = spare.get(name)
            fits = room is not None and (room.shape, room.dtype) == (tensor.shape, tensor.dtype)
            target = room if room is not None and fits else torch.empty_like(tensor, device=device)
            self._tensors[name] = target.copy_(tensor)
        return there

    def weights(self) -> dict[str, Tensor]:
        """Every sent entry, with scales, and every derived one that the layout lists, in the shape of its box."""
        for name, entry in self._entries.items():
            if entry.box.is_empty:
                self._tensors[name] = torch.empty(entry.box.shape, dtype=getattr(torch, entry.dtype))
        derived = {n: self._tensors[origin] for n, origin in self._layout.derived.items() if n in self._layout.by_name}
        return {**self._tensors, **derived}

    def _place(self, segment: Segment, memory: Tensor) -> Tensor:
        """Where a segment belongs."""
        entry = self._entries[segment.name]
        whole = self._tensors.get(segment.name)
        if whole is None:
            whole = self._tensors[segment.name] = self._room(entry, memory.device)
        self._missing[segment.name] -= segment.box.numel
        return whole if segment.box == entry.box else whole[segment.box.slices_in(entry.box)]

    def _room(self, entry: Entry, device: torch.device) -> Tensor:
        spare = self._spare.get(entry.name)
        fits = (
            spare is not None
            and tuple(spare.shape) == entry.box.shape
            and dtype_name(spare.dtype) == entry.dtype
            and spare.device == device
            and spare.is_contiguous()
        )
        if spare is not None and fits:
            return spare
        if self._in_place:
            found = "nothing" if spare is None else f"{dtype_name(spare.dtype)} {list(spare.shape)} on {spare.device}"
            raise SyncError(
                f"{entry.name}: {self._where}: can't be written in place: the engine offers {found}, the layout says "
                f"{entry.dtype} {list(entry.box.shape)}, contiguous, on {device}"
            )
        return empty(entry.box.shape, entry.dtype, device)


@lru_cache(maxsize=16)
def _comes(layout: Layout) -> tuple[Mapping[str, Entry], Mapping[str, int]]:
    """What comes over: entries that are sent, and scales, by name; and the elements of each."""
    scales = [entry.scales() for entry in layout.entries if entry.scaling is not None]
    entries = {entry.name: entry for entry in (*sent_entries(layout), *scales)}
    return entries, {name: entry.box.numel for name, entry in entries.items()}
