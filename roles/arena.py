"""Memory in which one process hands a set of named tensors to others of its host, again and again.

AR-1: the memory has no name on any file system: it is gone with the last process that holds it, however that ends.
AR-2: `fill` checks every name and shape before it writes a byte.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sync.layout import Entry

_ALIGN = 256


class Arena:
    """Room for the tensors of a layout.

    Args:
        entries: whole tensors; readers get them layer by layer, in the order of their numbers.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.table: list[tuple[str, str, tuple[int, ...], int]] = []
        """(name, dtype, shape, offset in bytes) of each."""
        end = 0
        for entry in sorted(entries, key=lambda entry: by_layer(entry.name)):
            self.table.append((entry.name, entry.dtype, entry.shape, end))
            end += -(-entry.num_bytes // _ALIGN) * _ALIGN
        self.num_bytes = max(end, _ALIGN)
        self._file = os.memfd_create("tutti-weights")
        os.ftruncate(self._file, self.num_bytes)
        self._whole = torch.frombuffer(mmap.mmap(self._file, self.num_bytes), dtype=torch.uint8)

    @property
    def path(self) -> str:
        """For other processes of the same user, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def fill(self, weights: Mapping[str, Tensor], derived: Mapping[str, str], version: int) -> None:
        """Copy all tensors in. Raises ValueError if one is missing, unknown or of another shape (AR-2)."""
        shapes = {name: shape for name, _, shape, _ in self.table}
        unknown, missing = weights.keys() - shapes.keys() - derived.keys(), shapes.keys() - weights.keys()
        if unknown or missing:
            raise ValueError(
                f"swap to version {version}: expected the {len(shapes)} tensors of weight_layout(), missing "
                f"{sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}; trainer and rollout must load one model"
            )
        for name, shape in shapes.items():
            if tuple(weights[name].shape) != shape:
                raise ValueError(
                    f"swap to version {version}: {name}: expected shape {list(shape)}, got "
                    f"{list(weights[name].shape)}; trainer and rollout must load one model"
                )
        for name, dtype, shape, offset in self.table:
            kind = getattr(torch, dtype)
            count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            self._whole[offset : offset + count].view(kind).view(shape).copy_(weights[name])

    def close(self) -> None:
        """Let go of the file; mappings stay until nobody uses them."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def by_layer(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that keeps the tensors of a layer, and its experts, together and in the order of their numbers.

    >>> sorted(["layers.10.w", "layers.9.w", "embed"], key=by_layer)
    ['embed', 'layers.9.w', 'layers.10.w']
    """
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"\.", name))
