"""Where bytes of weights live: boxes of named tensors, as one rank declares them. Pure; torch is never imported.

LA-1: both sides describe themselves in one coordinate space: (Hugging Face name, half-open n-d box, dtype) (W1).
LA-2: a Layout is a value. Equal content means equal objects and equal digests, whatever the order of declaration;
      any change of a name, shape, box, dtype, derivation or constant changes the digest.
LA-3: every box lies inside the full shape of its tensor, and the boxes that one rank declares of a name are disjoint:
      several on a trainer rank where its memory is interleaved (fused q, k, v; strided shards), one on a rollout rank.
LA-4: boxes may be empty (a trainer rank whose share of an uneven division is nothing) and scalars are 0-d boxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import combinations

import msgspec

from sync.formats import QUANTISED, Scaling

__all__ = ["ITEM_BYTES", "Box", "Entry", "Layout", "LayoutError"]

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes of one element, by torch's dtype name without the `torch.` in front."""


class LayoutError(ValueError):
    """A layout contradicts itself or the other side. The text names the tensor and says what to change."""


class Box(msgspec.Struct, frozen=True, order=True):
    """A half-open n-d interval: index i of dimension d is inside when `lo[d] <= i < hi[d]`."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise LayoutError(
                f"box {self}: lo has {len(self.lo)} dimensions, hi has {len(self.hi)}; give both the same"
            )
        if any(a < 0 or b < a for a, b in zip(self.lo, self.hi, strict=True)):
            raise LayoutError(f"box {self}: expected 0 <= lo <= hi in every dimension")

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box of a full tensor of this shape."""
        hi = tuple(shape)
        return cls((0,) * len(hi), hi)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([b - a for a, b in zip(self.lo, self.hi, strict=True)])

    @property
    def numel(self) -> int:
        """Elements inside; 1 for a scalar (no dimensions), 0 when any dimension is empty."""
        count = 1
        for a, b in zip(self.lo, self.hi, strict=True):
            count *= b - a
        return count

    @property
    def is_empty(self) -> bool:
        return self.numel == 0

    def contains(self, other: Box) -> bool:
        """Whether every index of `other` is inside; true for an empty box only if its corners are inside too."""
        return len(self.lo) == len(other.lo) and all(
            a <= c and d <= b for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when nothing is common. Both must have the same number of dimensions."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        for a, b in zip(lo, hi, strict=True):
            if b <= a:
                return None
        return Box(lo, hi)

    def minus(self, other: Box) -> list[Box]:
        """What is left of this box without `other`: disjoint boxes, at most two per dimension."""
        common = self.intersect(other)
        if common is None:
            return [] if self.is_empty else [self]
        rest: list[Box] = []
        lo, hi = list(self.lo), list(self.hi)
        for d in range(len(lo)):
            if lo[d] < common.lo[d]:
                rest.append(Box(tuple(lo), (*hi[:d], common.lo[d], *hi[d + 1 :])))
            if common.hi[d] < hi[d]:
                rest.append(Box((*lo[:d], common.hi[d], *lo[d + 1 :]), tuple(hi)))
            lo[d], hi[d] = common.lo[d], common.hi[d]
        return rest

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Indices of this box inside a tensor that holds exactly `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.lo, self.hi, outer.lo, strict=True))


class Entry(msgspec.Struct, frozen=True):
    """One tensor, or the part of it that a rank holds (sources) or needs (sinks)."""

    name: str
    """Hugging Face checkpoint name, such as `model.layers.0.mlp.down_proj.weight`."""
    box: Box
    shape: tuple[int, ...]
    """Shape of the full tensor, over all ranks."""
    dtype: str
    """torch's dtype name: `float32`, `bfloat16`. On a sink: the dtype it wants to receive."""
    scaling: Scaling | None = None
    """How the weight is quantised, where `dtype` is an 8-bit float: a format that both sides must share (W7)."""

    def __str__(self) -> str:
        scaled = f" with {self.scaling}" if self.scaling else ""
        return f"{self.dtype} {self.box} of {list(self.shape)}{scaled}"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(
                f"{self.name}: dtype {self.dtype!r} is unknown; expected torch's name, one of {', '.join(ITEM_BYTES)}"
            )
        box = self.box
        if len(box.hi) != len(self.shape) or any(b > n for b, n in zip(box.hi, self.shape, strict=True)):
            raise LayoutError(
                f"{self.name}: box {self.box} is not inside the full shape {list(self.shape)}; "
                f"give the box in coordinates of the full tensor"
            )
        if self.scaling is not None and (self.dtype not in QUANTISED or len(self.shape) != 2):
            raise LayoutError(
                f"{self.name}: {self}: scales go with a matrix in {' or '.join(QUANTISED)}; leave out `scaling` or "
                f"change the dtype"
            )

    @classmethod
    def whole(cls, name: str, shape: Iterable[int], dtype: str) -> Entry:
        """A tensor held or needed in full."""
        full = tuple(shape)
        return cls(name, Box.whole(full), full, dtype)

    @classmethod
    def rows(cls, name: str, shape: Iterable[int], dtype: str, start: int, stop: int) -> Entry:
        """Rows `start:stop` of a tensor: what an FSDP2 `Shard(0)` rank holds."""
        full = tuple(shape)
        return cls(name, Box((start, *(0 for _ in full[1:])), (stop, *full[1:])), full, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box in this entry's dtype."""
        return self.box.numel * ITEM_BYTES[self.dtype]

    def scales(self) -> Entry:
        """The scales of the box, as an entry of their own. Only where there is a `scaling`."""
        assert self.scaling is not None
        lo, hi = self.scaling.scale_range(self.shape, self.box.lo, self.box.hi)
        return Entry(self.scaling.scale_name, Box(lo, hi), self.scaling.scale_shape(self.shape), "float32")


class Layout(msgspec.Struct, frozen=True, dict=True, eq=False):
    """All tensors of one rank. On a sink the entries are *every* runtime tensor, so that coverage can be proven
    (W2)."""

    entries: tuple[Entry, ...]
    derived: dict[str, str] = {}
    """Sinks only: tensors made on the sink from another one, as `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    constant: tuple[str, ...] = ()
    """Sinks only: tensors that training never changes (rotary tables), as the sink holds them already."""

    def __post_init__(self) -> None:
        for name, entries in self.parts.items():
            for first, second in combinations(entries, 2):
                if first.box == second.box or first.box.intersect(second.box) is not None:
                    raise LayoutError(
                        f"{name}: declared twice by one rank, as {first.box} and {second.box}; declare disjoint boxes"
                    )
        for name in self.constant:
            if name in self.derived:
                raise LayoutError(f"{name}: declared both derived and constant; keep one of the two")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def parts(self) -> Mapping[str, tuple[Entry, ...]]:
        """All entries of each name, in the order of declaration."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        """The entry of each name. Raises LayoutError when a name has several boxes: `parts` has them all."""
        for name, entries in self.parts.items():
            if len(entries) > 1:
                raise LayoutError(f"{name}: this rank has {len(entries)} boxes of it, and one is expected here")
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def digest(self) -> str:
        """Hex digest of the content, independent of the order of entries (LA-2)."""
        content = (
            sorted(self.entries, key=lambda entry: (entry.name, entry.box)),
            sorted(self.derived.items()),
            sorted(self.constant),
        )
        return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()
