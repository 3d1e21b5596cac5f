"""Largest values of blocks that several trainer ranks hold parts of: merged on the controller, a few numbers each
(QU-1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sync.layout import Box
from sync.messages import Largest

__all__ = ["agreed"]


def agreed(measured: Iterable[Largest]) -> dict[str, Largest]:
    """One table of blocks per weight, around those that were measured. NaN and infinity stay: the owner refuses
    them."""
    parts: dict[str, list[Largest]] = {}
    for item in measured:
        parts.setdefault(item.name, []).append(item)
    return {name: _merged(name, items) for name, items in parts.items()}


def _merged(name: str, items: list[Largest]) -> Largest:
    lo = tuple(min(axis) for axis in zip(*(item.blocks.lo for item in items), strict=True))
    hi = tuple(max(axis) for axis in zip(*(item.blocks.hi for item in items), strict=True))
    around = Box(lo, hi)
    most = np.zeros(around.shape, np.float32)
    for item in items:
        part = np.frombuffer(item.values, np.float32).reshape(item.blocks.shape)
        where = item.blocks.slices_in(around)
        most[where] = np.maximum(most[where], part)
    return Largest(name=name, blocks=around, values=most.tobytes())
