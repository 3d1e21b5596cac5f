"""Whole tensors of a model that is spread over ranks, one after the other on rank 0, by the names of its checkpoint.

WH-1: every rank makes it, and asks for the same names in the same order: boxes go to rank 0, each from the first rank
      that has it.
WH-2: what the ranks do not hold as a whole is an error that names it, the same on every rank, before anything is sent.
WH-3: a tensor is made when it is asked for and is nobody's memory: whoever has it may keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roles.measures import gather
from sync.layout import Box, Entry, Layout, LayoutError

__all__ = ["WholeWeights", "by_layer"]

Views = Callable[[str], Sequence[Tensor]]
"""Name -> this rank's boxes of it, in the order of its layout."""


@dataclass
class _Part:
    """What one rank has of a tensor."""

    shape: tuple[int, ...]
    boxes: list[Box]
    dtype: torch.dtype


class WholeWeights:
    """Of the default group of torch.distributed, or of the only rank.

    Args:
        layout: what this rank holds.
        views: the memory of it.
    """

    def __init__(self, layout: Layout, views: Views) -> None:
        self._views = views
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        mine = {name: _part(entries, views) for name, entries in layout.parts.items()}
        self._everywhere = gather(mine)
        self._known = {name: part for there in self._everywhere for name, part in there.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor that a rank has a part of."""
        return {name: part.shape for name, part in self._known.items()}

    def check(self, wanted: Iterable[Entry]) -> None:
        """Raise LayoutError, on all ranks alike, if these are not here whole (WH-2)."""
        for entry in wanted:
            part = self._known.get(entry.name)
            if part is None:
                raise LayoutError(
                    f"{entry.name}: wanted as {entry}, and no trainer rank has it; trainer and rollout must load one "
                    "model"
                )
            if part.shape != entry.shape:
                raise LayoutError(
                    f"{entry.name}: wanted as {entry}, trainer ranks have {list(part.shape)}; trainer and rollout must "
                    "load one model"
                )
            covered = sum(box.numel for _, _, box in self._owners(entry.name))
            if covered != entry.box.numel:
                raise LayoutError(
                    f"{entry.name}: trainer ranks have {covered} of its {entry.box.numel} elements; all of it must be "
                    "somewhere"
                )

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """The tensor on rank 0, where its own parts lie; None on the others, which have sent their boxes.

        Args:
            dtype: cast to before it is sent; None: as the ranks hold it.
        """
        part = self._known[name]
        kind = dtype or part.dtype
        own = self._views(name) if name in self._everywhere[self._rank] else []
        whole = torch.empty(part.shape, dtype=kind, device=self._device) if self._rank == 0 else None
        for rank, at, box in self._owners(name):
            if whole is not None:
                place = whole[box.slices_in(Box.whole(part.shape))]
                if rank == 0:
                    place.copy_(own[at])
                else:
                    arrived = torch.empty(box.shape, dtype=kind, device=self._device)
                    dist.recv(arrived, rank)
                    place.copy_(arrived)
            elif rank == self._rank:
                dist.send(own[at].to(self._device, kind).contiguous(), 0)
        return whole

    @property
    def _device(self) -> torch.device:
        """Where the group's transfers have their tensors."""
        on_gpu = dist.get_backend() == "nccl" if dist.is_initialized() else torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _owners(self, name: str) -> Iterator[tuple[int, int, Box]]:
        """(rank, which of its boxes, box): each box once, of the first rank that has it."""
        seen: set[Box] = set()
        for rank, there in enumerate(self._everywhere):
            for at, box in enumerate(there[name].boxes if name in there else ()):
                if box not in seen and not box.is_empty:
                    seen.add(box)
                    yield rank, at, box


def _part(entries: Sequence[Entry], views: Views) -> _Part:
    first = entries[0]
    return _Part(first.shape, [entry.box for entry in entries], views(first.name)[0].dtype)


def by_layer(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that keeps the tensors of a layer, and its experts, together and in the order of their numbers: vLLM's
    loaders keep what they have of a layer until it is whole.

    >>> sorted(["layers.10.w", "layers.9.w", "embed"], key=by_layer)
    ['embed', 'layers.9.w', 'layers.10.w']
    """
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))
