"""Adam's moments in CPU memory, brought to the device bucket by bucket while it computes.

    CPU, pinned     bucket 0  bucket 1  bucket 2 ...        each [2, n]: pieces of flat parameters, both moments
                       |  arriving                ^ leaving
    device          slot 0    slot 1    slot 2  --'         a slot is written again when what was in it has left

MO-1: a bucket is written back when it was worked on; at any time `read` gives the values after the last update.
MO-2: the device holds `SLOTS` buckets at a time, or as many as `prefetch` was given room for. The number does not
      depend on how far the host runs ahead of the device.
MO-3: arriving, work and leaving are ordered on the device alone: the host never waits, and buckets still leave while
      the next step's forward pass runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

BUCKET_ELEMENTS = 2**25
"""Parameters of a bucket: 256 MiB of moments. A power of two, since torch rounds pinned memory up to one."""

ALIGNED = 64
"""A parameter is cut at multiples of this, so that vector units see the same groups and give the same bits."""

SLOTS = 3
"""One arrives, one is worked on, one leaves."""


class Piece(NamedTuple):
    """Elements `start : stop` of a flat parameter, with their moments on the device."""

    name: str
    start: int
    stop: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _Bucket:
    """Pieces of parameters and their place in pinned memory."""

    def __init__(self, pieces: list[tuple[str, int, int]], *, pinned: bool) -> None:
        self.pieces = pieces
        self.size = sum(stop - start for _, start, stop in pieces)
        self.kept = torch.zeros(2, self.size, pin_memory=pinned)
        self.used = False
        """Whether it was ever written; until then it is zero, and need not travel."""
        self.left: Any = None
        """Event after which `kept` has what was written last."""

    def split(self, moments: Tensor) -> Iterator[Piece]:
        at = 0
        for name, start, stop in self.pieces:
            both = moments[:, at : at + stop - start]
            yield Piece(name, start, stop, both[0], both[1])
            at += stop - start


class _Slot:
    """Memory of one bucket on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(2, size, device=device)
        self.left: Any = None
        """Event after which the memory may be written again."""
        self.arrived: Any = None


class Travelling:
    """The moments of a rank's parameters.

    Args:
        params: local tensors by name, contiguous.
    """

    def __init__(self, params: Mapping[str, Tensor], *, bucket: int = BUCKET_ELEMENTS) -> None:
        self._params = params
        self._most = bucket
        self._device = next(iter(params.values())).device if params else torch.device("cpu")
        cuda = self._device.type == "cuda"
        self._arriving = torch.cuda.Stream() if cuda else None
        self._leaving = torch.cuda.Stream() if cuda else None
        self._buckets: list[_Bucket] = []
        self._known: set[str] = set()
        self._here: deque[tuple[_Bucket, _Slot]] = deque()
        """Buckets on the device or on their way, in order; always the first that wait for work."""
        self._next = 0
        """Bucket to bring next."""

    def reserve(self, names: Iterable[str]) -> None:
        """Make place for parameters that have none yet; their moments are zero."""
        run: list[tuple[str, int, int]] = []
        room = self._most
        for name in names:
            if name in self._known:
                continue
            self._known.add(name)
            start, size = 0, self._params[name].numel()
            while start < size:
                stop = size if size - start <= room else start + room // ALIGNED * ALIGNED
                if stop == start:
                    self._add(run)
                    run, room = [], self._most
                    continue
                run.append((name, start, stop))
                room -= stop - start
                start = stop
        if run:
            self._add(run)

    def _add(self, run: list[tuple[str, int, int]]) -> None:
        self._buckets.append(_Bucket(run, pinned=self._device.type == "cuda"))

    def prefetch(self, room: int) -> None:
        """Start to bring buckets that the next update needs first, as many as fit into `room` bytes."""
        while self._next < len(self._buckets) and (size := 8 * self._slot_size) <= room:
            self._bring(_Slot(self._slot_size, self._device))
            room -= size

    def drop(self) -> None:
        """Give back what `prefetch` brought: no update follows."""
        while self._here:
            _, slot = self._here.popleft()
            self._release(slot, self._arriving)
        self._next = 0

    def in_turn(self) -> Iterator[list[Piece]]:
        """All buckets in turn, their moments on the device to be worked on in place by the current stream (MO-1)."""
        slots = len(self._here)
        while self._next < len(self._buckets) and slots < SLOTS:
            self._bring(_Slot(self._slot_size, self._device))
            slots += 1
        while self._here:
            bucket, slot = self._here.popleft()
            if slot.arrived is not None:
                torch.cuda.current_stream().wait_event(slot.arrived)
            moments = slot.memory[:, : bucket.size]
            yield list(bucket.split(moments))
            self._send_back(bucket, slot, moments)
            if self._next < len(self._buckets):
                self._bring(slot)
            else:
                self._release(slot, self._leaving)
        self._next = 0

    def read(self, name: str) -> tuple[Tensor, Tensor]:
        """A copy of the moments of a parameter, in CPU memory."""
        self._wait()
        shape = self._params[name].shape
        exp_avg, exp_avg_sq = torch.zeros(shape), torch.zeros(shape)
        for bucket in self._buckets:
            for piece in bucket.split(bucket.kept):
                if piece.name == name:
                    exp_avg.view(-1)[piece.start : piece.stop] = piece.exp_avg
                    exp_avg_sq.view(-1)[piece.start : piece.stop] = piece.exp_avg_sq
        return exp_avg, exp_avg_sq

    def write(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Set the moments of a parameter that has a place."""
        self._wait()
        self.drop()
        for bucket in self._buckets:
            for piece in bucket.split(bucket.kept):
                if piece.name == name:
                    piece.exp_avg.copy_(exp_avg.reshape(-1)[piece.start : piece.stop])
                    piece.exp_avg_sq.copy_(exp_avg_sq.reshape(-1)[piece.start : piece.stop])
                    bucket.used = True

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def _slot_size(self) -> int:
        return max(bucket.size for bucket in self._buckets)

    def _bring(self, slot: _Slot) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._here.append((bucket, slot))
        moments = slot.memory[:, : bucket.size]
        if self._arriving is None:
            moments.copy_(bucket.kept)
            return
        # memory that is new was in use by the current stream, perhaps until now; a slot until its bucket had left
        if slot.left is None:
            self._arriving.wait_stream(torch.cuda.current_stream())
        else:
            self._arriving.wait_event(slot.left)
        if bucket.left is not None:
            self._arriving.wait_event(bucket.left)
        with torch.cuda.stream(self._arriving):
            if bucket.used:
                _copy(moments, bucket.kept)
            else:
                moments.zero_()
        slot.arrived = self._arriving.record_event()

    def _send_back(self, bucket: _Bucket, slot: _Slot, moments: Tensor) -> None:
        bucket.used = True
        if self._leaving is None:
            bucket.kept.copy_(moments)
            return
        self._leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._leaving):
            _copy(bucket.kept, moments)
        slot.left = bucket.left = self._leaving.record_event()

    def _release(self, slot: _Slot, user: Any) -> None:
        """The allocator hands the memory out again when its last user is done."""
        if user is not None:
            slot.memory.record_stream(user)

    def _wait(self) -> None:
        if self._leaving is not None:
            self._leaving.synchronize()


def _copy(to: Tensor, source: Tensor) -> None:
    """Row by row: each is one run of bytes on both sides, which a copy engine takes without a copy in between."""
    for row in range(len(to)):
        to[row].copy_(source[row], non_blocking=True)
