"""Buckets on a device that are packed as they were for the version before: the same kernels over the same memory.

Weights keep their places between versions. Slicing and looking up each of hundreds of tensors anew takes longer than
packing them; comparing where they lie takes a tenth of it.

RP-1: kernels are launched again only while every weight of the bucket lies where it lay, with the dtype, shape and
      strides it had, and the bucket goes to the same memory. Of the weights nothing is kept but that.
RP-2: a bucket is not repeated when anything in it was made by torch on the way: views that were copied together, casts,
      blocks whose largest values several ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sync.digest import Later
from sync.plan import Bucket, Segment

if TYPE_CHECKING:
    from torch import Tensor

    from sync.kernels import Copies
    from sync.kernels_fp8 import Casts

__all__ = ["Launch", "Repeats"]

Weight = Callable[[str], "Tensor | Sequence[Tensor]"]


class Launch(NamedTuple):
    """What was launched for a bucket."""

    casts: Casts | None
    cast_segments: list[Segment]
    copies: Copies | None
    digests: list[int | None]
    """For each segment the place of its digest among those of `casts`; None: the next of `copies`."""

    def run(self) -> tuple[list[Later], Tensor | None]:
        """Digests of the segments, and for each cast how many of its tiles hold a value that is not finite."""
        cast: dict[int, Later] = {}
        broken: Tensor | None = None
        if self.casts is not None:
            cast, broken = self.casts.run()
        copied = None if self.copies is None else self.copies.run()
        found: list[Later] = []
        count = 0
        for place in self.digests:
            if place is not None:
                found.append(cast[place])
                continue
            assert copied is not None
            found.append(Later(copied, count))
            count += 1
        return found, broken


class Repeats:
    """Of one rank and one plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[tuple[str, ...], list[object], Launch]] = {}

    def find(self, bucket: Bucket, memory: Tensor, weight: Weight) -> Launch | None:
        """What to launch for a bucket, if that is what was launched before (RP-1)."""
        known = self._known.get((bucket.index, memory.data_ptr()))
        if known is None:
            return None
        names, prints, launch = known
        return launch if [_print(weight(name)) for name in names] == prints else None

    def keep(self, bucket: Bucket, memory: Tensor, weight: Weight, launch: Launch) -> None:
        """Remember what was launched, and where the weights of the bucket lie."""
        names = tuple(dict.fromkeys(s.name for s in bucket.segments if not s.scales_of))
        prints = [_print(weight(name)) for name in names]
        self._known[bucket.index, memory.data_ptr()] = names, prints, launch


def _print(weight: Tensor | Sequence[Tensor]) -> object:
    if isinstance(weight, Sequence):
        return tuple(map(_print, weight))
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()
