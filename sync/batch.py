"""Whole segments between a bucket and tensors, copied or cast: at once on the host, on a device all copies by one
kernel at the end, and all casts by another.

BT-1: what lies in the bucket, or in the tensors, is the row-major content of each segment in its dtype, and the digests
      are of those bytes (PK-1, PK-3).
BT-2: on a device nothing is read back, and tensors are held until their kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sync.digest import Later
from sync.memory import as_bytes, copy_hashed, digest_of, move_hashed, view
from sync.plan import Bucket, Segment
from sync.repeat import Launch, Moves, Origin, in_order

if TYPE_CHECKING:
    from sync.kernels import Copies
    from sync.kernels_cast import PlainCasts

__all__ = ["Batch", "Digest", "by_kernels", "stored"]

Digest = int | Tensor | Later
"""A 64-bit digest: a number, or where it lies on the device that computes it: a 0-d int64 tensor, or a place in one."""


def by_kernels(memory: Tensor) -> bool:
    """Whether what happens to this memory is done by kernels, which are launched and not waited for."""
    return memory.device.type != "cpu"


class Batch:
    """What is not quantised of one bucket.

    Args:
        memory: of the bucket.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._on_device = by_kernels(memory)
        self._start = memory.data_ptr()
        self._moves: list[tuple[int, int, int]] = []
        """Target, source and bytes of the copies that were made on the host as they stand."""
        self._jobs: list[tuple[int, int, int]] = []
        self._sources: list[Tensor] = []
        """Kept until the kernel is launched."""
        self._to_cast: list[tuple[Tensor, Tensor]] = []
        self.cast_segments: list[Segment] = []
        self.origins: list[Origin] = []
        """Of each digest that `filled` has, in the order of the segments."""
        self.copies: Copies | None = None
        self.casts: PlainCasts | None = None
        """What `filled` has launched."""
        self.broken: Tensor | None = None
        """For each of `cast_segments` how many of its tiles hold a value that is not finite."""

    def add(self, segment: Segment, tensor: Tensor, *, into_memory: bool) -> Digest | None:
        """Copy a segment to or from a tensor of its box, or just hash it where it lies in the bucket already.

        Returns:
            Its digest, or None where `filled` has it.
        """
        num_bytes = segment.num_bytes
        at = tensor.data_ptr()
        there = self._start + segment.offset
        if self._on_device:
            if tensor.device == self._memory.device and tensor.is_contiguous() and not at % 8:
                self._sources.append(tensor)
                self._jobs.append((at, there, num_bytes) if into_memory else (there, at, num_bytes))
                self.origins.append("copies")
                return None
        elif tensor.is_cpu and tensor.is_contiguous():
            target, source = (there, at) if into_memory else (at, there)
            self._moves.append((target, source, num_bytes))
            return move_hashed(target, source, num_bytes)
        inside = view(self._memory, segment.offset, segment.dtype, segment.box.shape)
        return stored(inside, tensor) if into_memory else stored(tensor, inside)

    def cast(self, segment: Segment, part: Tensor, target: Tensor) -> bool:
        """Cast a tensor into its segment; False where no kernel is made for it."""
        from sync.kernels_cast import fits

        if not fits(part, target):
            return False
        self._to_cast.append((part, target))
        self.cast_segments.append(segment)
        self.origins.append("cast")
        return True

    def again(self, bucket: Bucket) -> Launch | Moves | None:
        """What makes the same copies once more; None if torch has made some of them."""
        if len(self._moves) == len(bucket.segments):
            return Moves(self._moves)
        if len(self._jobs) == len(bucket.segments):
            return Launch([], self.origins, copies=self.copies)
        return None

    def filled(self, digests: Sequence[Digest | None]) -> list[Digest]:
        """Carry out what is left, and put its digests where None stands."""
        blocks: dict[Origin, Tensor] = {}
        if self._jobs:
            from sync.kernels import copies

            self.copies = copies(self._jobs, self._memory.device)
            blocks["copies"] = self.copies.run()
        if self._to_cast:
            from sync.kernels_cast import PlainCasts

            self.casts = PlainCasts(self._to_cast)
            blocks["cast"], self.broken = self.casts.run()
        made = iter(in_order(self.origins, blocks))
        return [next(made) if digest is None else digest for digest in digests]


def stored(target: Tensor, source: Tensor) -> Digest:
    """Copy into `target`, from any device, dtype and strides, and return the digest of what lies there, row-major."""
    if by_kernels(target):
        from sync.kernels import copy_mixed

        return copy_mixed(target, source)
    if target.is_contiguous() and source.is_contiguous() and source.dtype == target.dtype and source.is_cpu:
        return copy_hashed(as_bytes(target), as_bytes(source))
    target.copy_(source)
    return digest_of(as_bytes(target.contiguous()))
