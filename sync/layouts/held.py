"""Boxes tied to the memory they lie in: what a trainer rank needs to be a `sync.ports.WeightSource`.

HE-1: a part is a view of the parameter's live memory: describing, asking and packing never copy.
HE-2: parts of one name keep their order in `layout` and in what `views` returns (`WeightSource.weight`).
HE-3: asking for a name costs as much in a large model as in a small one: a publication asks for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from sync.layout import Box, Entry, Layout, LayoutError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Held", "Live", "Part"]


class Part(msgspec.Struct, frozen=True):
    """A box of a named tensor, and where in the local memory of a parameter it lies."""

    entry: Entry
    param: str
    """Name of the parameter in its module."""
    index: tuple[tuple[int, int], ...]
    """Half-open range of each dimension of the local parameter; as many elements as the box."""
    chunk: int = 0
    """Which model chunk of the rank has the parameter: above 0 only with virtual pipeline stages."""

    @classmethod
    def of_rows(
        cls, name: str, shape: tuple[int, ...], dtype: str, box: Box, param: str, at: tuple[int, ...], chunk: int = 0
    ) -> Part:
        """The box at offset `at` of a parameter with as many dimensions as the box."""
        index = tuple((a, a + n) for a, n in zip(at, box.shape, strict=True))
        return cls(Entry(name, box, shape, dtype), param, index, chunk)


class Held:
    """All that one trainer rank holds."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)

    @cached_property
    def layout(self) -> Layout:
        return Layout(tuple(part.entry for part in self.parts))

    @cached_property
    def _by_name(self) -> Mapping[str, tuple[Part, ...]]:
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.entry.name, []).append(part)
        return {name: tuple(parts) for name, parts in found.items()}

    def views(self, name: str, chunks: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The local memory of each box of a name, in the order of the entries, in the shapes of the boxes.

        Args:
            chunks: for each model chunk of this rank (one, but for virtual pipeline stages) its local parameters.

        Raises:
            LayoutError: the module has no such parameter, or it is smaller than was described.
        """
        return [_view(part, chunks) for part in self._by_name[name]]


class Live(Mapping[str, "Tensor"]):
    """Parameters and buffers of a module by name, as they are when they are asked for (HE-3)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        try:
            module = self._module.get_submodule(owner)
        except AttributeError:
            raise KeyError(name) from None
        for tensors in (module._parameters, module._buffers):
            if (found := tensors.get(last)) is not None:
                return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, _ in self._module.named_parameters(remove_duplicate=False))
        yield from (name for name, _ in self._module.named_buffers(remove_duplicate=False))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _view(part: Part, chunks: Sequence[Mapping[str, Tensor]]) -> Tensor:
    if part.chunk >= len(chunks) or part.param not in chunks[part.chunk]:
        known = ", ".join(sorted(chunks[part.chunk])[:3]) if part.chunk < len(chunks) else f"{len(chunks)} model chunks"
        raise LayoutError(
            f"{part.entry.name}: expected in parameter {part.param!r} of model chunk {part.chunk}, found {known}; the "
            f"module was built otherwise than described"
        )
    param = chunks[part.chunk][part.param].detach()
    if param.ndim != len(part.index) or any(b > n for (_, b), n in zip(part.index, param.shape, strict=True)):
        raise LayoutError(
            f"{part.entry.name}: expected at {list(part.index)} of parameter {part.param!r}, which has shape "
            f"{list(param.shape)}; the module was built otherwise than described"
        )
    return param[tuple(slice(a, b) for a, b in part.index)].view(part.entry.box.shape)
