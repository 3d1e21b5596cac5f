"""Buckets that are packed, or stored, as they were for the version before: the same kernels or copies over the same
memory.

Weights keep their places between versions. Slicing and looking up each of hundreds of tensors anew takes longer than
packing them; comparing where they lie takes a tenth of it.

RP-1: kernels are launched and copies made again only while every weight of the bucket lies where it lay, with the
      dtype, shape and strides it had, and the bucket goes to the same memory. Of the weights nothing is kept but that;
      while it is done they are held.
RP-2: a bucket is not repeated when anything in it was made by torch on the way: views that were copied together, casts
      of views, blocks whose largest values several ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from sync.digest import Later
from sync.memory import move_hashed
from sync.plan import Bucket, Segment

if TYPE_CHECKING:
    from sync.kernels import Copies
    from sync.kernels_cast import PlainCasts
    from sync.kernels_fp8 import Casts

__all__ = ["Launch", "Moves", "Origin", "Repeats", "Result", "in_order"]

Given = Tensor | Sequence[Tensor]
Weight = Callable[[str], Given]


Told = tuple[list[Later], "Tensor | None"]
"""Digests of the segments, and for each cast how many of its tiles hold a value that is not finite."""


Origin = int | Literal["copies", "cast"]
"""Where a segment's digest comes from: its place among those that are quantised, or the next of the others."""


def in_order(origins: Iterable[Origin], blocks: Mapping[Origin, Tensor]) -> list[Later]:
    """Digests of what one kernel each has made, taken in turn."""
    places = {origin: count() for origin in blocks}
    return [Later(blocks[origin], next(places[origin])) for origin in origins]


class Launch:
    """What was launched for a bucket.

    Args:
        cast_segments: those of `quantised`, then those of `cast`.
        origins: of the digest of each segment.
    """

    def __init__(
        self,
        cast_segments: list[Segment],
        origins: Sequence[Origin],
        *,
        quantised: Casts | None = None,
        cast: PlainCasts | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.cast_segments = cast_segments
        self._quantised = quantised
        self._cast = cast
        self._copies = copies
        self._origins = origins

    def run(self) -> Told:
        """Launch again."""
        quantised: dict[int, Later] = {}
        broken: list[Tensor] = []
        blocks: dict[Origin, Tensor] = {}
        if self._quantised is not None:
            quantised, counts = self._quantised.run()
            broken.append(counts)
        if self._cast is not None:
            blocks["cast"], counts = self._cast.run()
            broken.append(counts)
        if self._copies is not None:
            blocks["copies"] = self._copies.run()
        others = iter(in_order([o for o in self._origins if not isinstance(o, int)], blocks))
        found = [quantised[o] if isinstance(o, int) else next(others) for o in self._origins]
        return found, torch.cat(broken) if broken else None


class Moves:
    """Copies on the host that make a bucket: target, source, bytes."""

    cast_segments: Sequence[Segment] = ()

    def __init__(self, moves: Sequence[tuple[int, int, int]]) -> None:
        self._moves = moves

    def run(self) -> tuple[list[int], None]:
        """Copy again; digests of the segments."""
        return [move_hashed(*move) for move in self._moves], None


class Result(NamedTuple):
    """What came of a bucket that was done again."""

    digests: Sequence[Later] | Sequence[int]
    cast_segments: Sequence[Segment]
    broken: Tensor | None
    """For each of them how many tiles hold a value that is not finite."""
    elements: Sequence[tuple[str, int]]
    """Of each segment: its name, how many elements it has."""


class _Known(NamedTuple):
    names: Sequence[str]
    launch: Launch | Moves
    elements: Sequence[tuple[str, int]]


class Repeats:
    """Of one rank and one plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], dict[tuple[object, ...], _Known]] = {}
        """Bucket and where it lies -> where the weights lie -> what was done."""

    def run(self, bucket: Bucket, memory: Tensor, weight: Callable[[str], Given | None]) -> Result | None:
        """Do for a bucket what was done before, if all is where it was (RP-1); else None."""
        known = self._known.get((bucket.index, memory.data_ptr()))
        if not known:
            return None
        weights = [weight(name) for name in next(iter(known.values())).names]  # held: some are made on asking
        found = known.get(tuple(map(_print, weights)))
        if found is None:
            return None
        digests, broken = found.launch.run()
        return Result(digests, found.launch.cast_segments, broken, found.elements)

    def keep(
        self, bucket: Bucket, memory: Tensor, weight: Weight, names: Iterable[str], launch: Launch | Moves
    ) -> None:
        """Remember what was done, and where the weights of these names that it was done with lie."""
        names = tuple(dict.fromkeys(names))
        known = self._known.setdefault((bucket.index, memory.data_ptr()), {})
        if len(known) == _SETS:
            del known[next(iter(known))]
        prints = tuple(_print(weight(name)) for name in names)
        known[prints] = _Known(names, launch, [(s.name, s.box.numel) for s in bucket.segments])


_SETS = 2
"""Sets of weights that take turns: those in service and those that the next version is staged in."""


def _print(weight: Given | None) -> object:
    if weight is None:
        return None
    if not isinstance(weight, Tensor):
        return tuple(map(_print, weight))
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()
