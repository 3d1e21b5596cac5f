"""Named n-d extents, and values laid out on them. Pure: no process, no clock.

SH-1: ranks count row-major over the dimensions in the order given: the last dimension varies fastest.
SH-2: selecting with an int removes the dimension, with a slice keeps it; ranks of the result start at 0 again.
SH-3: an operation never changes its operand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, overload

from runtime.errors import OutOfRange, ShapeError, UnknownDimension

T = TypeVar("T")
Selector = int | slice


class Point(Mapping[str, int]):
    """Coordinates of one rank, such as `{"replica": 1, "tp": 0}`."""

    __slots__ = ("rank", "shape")

    def __init__(self, rank: int, shape: Shape) -> None:
        self.rank = rank
        self.shape = shape

    def __getitem__(self, name: str) -> int:
        return self.shape.coordinates(self.rank)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shape.names)

    def __len__(self) -> int:
        return len(self.shape.names)

    def __hash__(self) -> int:
        return hash((self.rank, self.shape))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={index}" for name, index in self.items()) or f"rank {self.rank}"


class Shape:
    """Sizes by name, in order. No dimension at all is one single element."""

    __slots__ = ("names", "sizes")

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """
        Raises:
            ShapeError: a size below 1, or a name that is not an identifier.
        """
        for name, size in sizes.items():
            if not name.isidentifier():
                raise ShapeError(f"shape {dict(sizes)}: {name!r} is not a name; use letters, digits and underscores")
            if not isinstance(size, int) or size < 1:
                raise ShapeError(f"shape {dict(sizes)}: expected a size of at least 1 for {name!r}, got {size!r}")
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self.names, self.sizes) == (other.names, other.sizes)

    def __hash__(self) -> int:
        return hash((self.names, self.sizes))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in zip(self.names, self.sizes, strict=True)) + "}"

    def to_dict(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    def size(self, name: str) -> int:
        """Size of one dimension. Raises UnknownDimension."""
        self._check_dimension(name)
        return self.sizes[self.names.index(name)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank (SH-1).

        Raises:
            OutOfRange: no such rank.
        """
        if not 0 <= rank < len(self):
            raise OutOfRange(f"shape {self}: expected a rank of 0 to {len(self) - 1}, got {rank}")
        result = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates, all of which must be given; negative ones count from the end."""
        shape, ranks = self.select(**coordinates)
        if shape.names:
            raise ShapeError(f"shape {self}: one element wanted, but {', '.join(shape.names)} is not given")
        return ranks[0]

    def select(self, **selectors: Selector) -> tuple[Shape, list[int]]:
        """A part of the shape (SH-2) and, for each of its ranks, the rank here.

        Raises:
            UnknownDimension: no dimension of this name.
            OutOfRange: an index out of range, or a slice that selects nothing.
            TypeError: neither an index nor a slice.
        """
        for name in selectors:
            self._check_dimension(name)
        kept: dict[str, int] = {}
        ranks = [0]
        for name, size in zip(self.names, self.sizes, strict=True):
            selector = selectors.get(name, slice(None))
            if isinstance(selector, slice):
                indices = range(*selector.indices(size))
                if not indices:
                    raise OutOfRange(
                        f"shape {self}: {name} has {size} entries, "
                        f"{name}={selector.start}:{selector.stop} selects nothing"
                    )
                kept[name] = len(indices)
            else:
                if not isinstance(selector, int):
                    raise TypeError(f"shape {self}: expected an index or a slice for {name}, got {selector!r}")
                if not -size <= selector < size:
                    raise OutOfRange(f"shape {self}: {name} has {size} entries, got index {selector}")
                indices = range(selector % size, selector % size + 1)
            ranks = [rank * size + index for rank in ranks for index in indices]
        return Shape(kept), ranks

    def flatten(self, name: str) -> Shape:
        """One dimension over all elements."""
        return Shape({name: len(self)})

    def split(self, name: str, **parts: int) -> Shape:
        """Replace a dimension by several; one part may be -1 and is derived.

        Raises:
            UnknownDimension: no dimension of this name.
            ShapeError: the parts don't multiply to the size of the dimension, or a name would stand twice.
        """
        self._check_dimension(name)
        sizes = self.to_dict()
        size = sizes[name]
        open_parts = [n for n, part in parts.items() if part == -1]
        known = math.prod(part for part in parts.values() if part != -1)
        if len(open_parts) == 1 and known and size % known == 0:
            parts = {**parts, open_parts[0]: size // known}
        elif open_parts or known != size:
            raise ShapeError(
                f"shape {self}: cannot split {name} of size {size} into {parts}; the product must be {size}"
            )
        result: dict[str, int] = {}
        for old, old_size in sizes.items():
            for new, new_size in parts.items() if old == name else ((old, old_size),):
                if new in result or (new != old and new in sizes and new != name):
                    raise ShapeError(f"shape {self}: splitting {name} would give two dimensions named {new!r}")
                result[new] = new_size
        return Shape(result)

    def rename(self, **names: str) -> Shape:
        """Other names for dimensions: `rename(rank="dp")`.

        Raises:
            UnknownDimension: no dimension of this name.
            ShapeError: two of the same name.
        """
        for old in names:
            self._check_dimension(old)
        renamed = [names.get(name, name) for name in self.names]
        if len(set(renamed)) < len(renamed):
            raise ShapeError(f"shape {self}: renaming {names} gives two dimensions of one name")
        return Shape(dict(zip(renamed, self.sizes, strict=True)))

    def _check_dimension(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise UnknownDimension(f"shape {self}: no dimension {name!r}; it has {known}")


class ValueMesh(Generic[T]):
    """One value for each rank, with coordinates. `mesh[rank]`, `mesh.item(tp=0)`, `mesh.values()`, `mesh.items()`."""

    __slots__ = ("_values", "shape")

    def __init__(self, shape: Shape, values: list[T]) -> None:
        if len(values) != len(shape):
            raise ShapeError(f"shape {shape} has {len(shape)} ranks, got {len(values)} values")
        self.shape = shape
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __getitem__(self, rank: int) -> T:
        return self._values[rank]

    def values(self) -> list[T]:
        """The values by rank."""
        return list(self._values)

    def items(self) -> Iterator[tuple[Point, T]]:
        """(coordinates, value) by rank."""
        for rank, value in enumerate(self._values):
            yield Point(rank, self.shape), value

    @overload
    def item(self) -> T: ...
    @overload
    def item(self, **coordinates: int) -> T: ...
    def item(self, **coordinates: int) -> T:
        """The value at these coordinates.

        Raises:
            ShapeError: the coordinates leave more than one value.
        """
        _, ranks = self.shape.select(**coordinates)
        if len(ranks) != 1:
            raise ShapeError(
                f"mesh of shape {self.shape}: {coordinates} selects {len(ranks)} values, expected exactly 1"
            )
        return self._values[ranks[0]]

    def slice(self, **selectors: Selector) -> ValueMesh[T]:
        """A part of the mesh (SH-2)."""
        shape, ranks = self.shape.select(**selectors)
        return ValueMesh(shape, [self._values[rank] for rank in ranks])

    def flatten(self, name: str) -> ValueMesh[T]:
        """The same values along one dimension."""
        return ValueMesh(self.shape.flatten(name), self.values())

    def split(self, name: str, **parts: int) -> ValueMesh[T]:
        """The same values with one dimension split into several; one part may be -1."""
        return ValueMesh(self.shape.split(name, **parts), self.values())

    def rename(self, **names: str) -> ValueMesh[T]:
        """The same values with other names of dimensions."""
        return ValueMesh(self.shape.rename(**names), self.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by dimension."""
        return self.shape.to_dict()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueMesh) and self.shape == other.shape and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ValueMesh(" + ", ".join(f"{point}: {value!r}" for point, value in self.items()) + ")"
