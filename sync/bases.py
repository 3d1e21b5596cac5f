"""Both ends of differences between versions: what was packed last, what is held of it, and what it takes to go on (W4).

BA-1: a trainer rank keeps the packed bytes of the version that was sent last, on the host, and packs the next one
      beside them: two copies of its share. They are a base only once the session says that this version was the last.
BA-2: a rollout rank rebuilds the bytes of a bucket from the tensors that it put into service, in the version that the
      session names, and refuses if it holds another one. If the engine has changed those tensors since, the digests of
      the result tell, and the session sends whole buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sync.delta import UNIT, apply, difference
from sync.layout import Layout
from sync.memory import allocate, view
from sync.messages import BaseMissing
from sync.pack import Packer
from sync.plan import Bucket

__all__ = ["HeldBase", "SentBase"]


class SentBase:
    """The trainer's end."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._now = {b.index: _room(b) for b in buckets}
        self._before = {b.index: _room(b) for b in buckets}
        self._differences: dict[int, Tensor] = {}
        self._version: int | None = None
        self._digests: dict[int, tuple[int, ...]] = {}

    def prepare(self, version: int, base: int | None, packer: Packer) -> dict[int, int]:
        """Pack a version, and find what differs from `base` if that is what was packed before.

        Returns:
            Bytes of the difference of each bucket, where it is worth its making.
        """
        if self._version is not None and self._version != version:
            self._now, self._before = self._before, self._now
        known = base is not None and base == self._version
        self._differences = {}
        self._version = None
        for bucket in self._buckets:
            now = self._now[bucket.index]
            packer.pack(bucket, now[: bucket.num_bytes])
            found = difference(self._before[bucket.index].numpy(), now.numpy()) if known else None
            if found is not None:
                self._differences[bucket.index] = torch.from_numpy(found)
        self._digests = packer.digests()
        self._version = version
        return {index: len(found) for index, found in self._differences.items()}

    @property
    def version(self) -> int | None:
        """What is prepared."""
        return self._version

    @property
    def digests(self) -> dict[int, tuple[int, ...]]:
        """Of the prepared version's segments, whole."""
        return self._digests

    def payload(self, bucket: Bucket, *, whole: bool) -> Tensor:
        """The bytes to send of the prepared version."""
        return self._now[bucket.index][: bucket.num_bytes] if whole else self._differences[bucket.index]


class HeldBase:
    """The rollout's end: the tensors of the version in service."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._tensors: Mapping[str, Tensor] = {}
        self._scratch: Tensor | None = None

    def keep(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """These are in service now."""
        self._version, self._tensors = version, tensors

    def rebuilt(
        self, fetched: Iterator[tuple[Bucket, Tensor]], buckets: Mapping[int, Bucket], base: int | None, layout: Layout
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """The whole bytes of buckets of which some came as differences, marked by their smaller size.

        Raises:
            BaseMissing: this rank does not hold version `base`.
        """
        for bucket, memory in fetched:
            whole = buckets[bucket.index]
            if bucket.num_bytes == whole.num_bytes:
                yield whole, memory
                continue
            if base is None or base != self._version:
                raise BaseMissing(f"differences from version {base} have come, this rank holds version {self._version}")
            room = self._old(whole, layout)
            apply(memory.numpy(), room.numpy())
            yield whole, room[: whole.num_bytes]

    def _old(self, bucket: Bucket, layout: Layout) -> Tensor:
        size = _rounded(bucket.num_bytes)
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = allocate(size)
        room = self._scratch[:size]
        room.zero_()  # between segments a bucket holds zeros
        entries = layout.by_name
        for segment in bucket.segments:
            held = self._tensors[segment.name][segment.box.slices_in(entries[segment.name].box)]
            view(room, segment.offset, segment.dtype, segment.box.shape).copy_(held)
        return room


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // UNIT) * UNIT


def _room(bucket: Bucket) -> Tensor:
    return allocate(_rounded(bucket.num_bytes))
