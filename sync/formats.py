"""Number formats of quantised weights, as tags on layouts: which codes, which scales, over which blocks (W7). Pure.

FO-1: a quantised weight is q * s: codes q in an 8-bit float, one scale s for each block of the full tensor. Blocks are
      counted from the corner of the full tensor, whatever part of it a rank holds.
FO-2: a channel is a block of one row, a tensor a block of everything: all three kinds follow the same arithmetic, and
      scales are always a matrix [ceil(rows / block rows), ceil(columns / block columns)] in float32.
FO-3: formats are equal or refused; nothing converts between codes, scales or blocks in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["CODE_LIMIT", "QUANTISED", "Scaling"]

CODE_LIMIT = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0}
"""Largest finite value of a code."""

QUANTISED = tuple(CODE_LIMIT)
"""dtypes that weights are quantised into."""


class Scaling(msgspec.Struct, frozen=True, order=True):
    """How a weight is scaled into an 8-bit float."""

    kind: Literal["block", "channel", "tensor"]
    scale_name: str
    """Name of the scales among the tensors of the rank, such as `model.layers.0.mlp.up_proj.weight_scale_inv`."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block; for kind `block` only."""
    scale: Literal["float32", "ue8m0"] = "float32"
    """Values that a scale may have: any float32, or powers of two."""

    def __str__(self) -> str:
        size = f" {self.block[0]}x{self.block[1]}" if self.kind == "block" else ""
        return f"one {self.scale} scale per {self.kind}{size} in {self.scale_name}"

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns that share a scale (FO-2)."""
        rows, columns = max(1, shape[0]), max(1, shape[1])
        return {"block": self.block, "channel": (1, columns), "tensor": (rows, columns)}[self.kind]

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of all scales of a weight."""
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def scale_range(
        self, shape: Sequence[int], lo: Sequence[int], hi: Sequence[int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Corners of the scales that touch the box from `lo` to `hi` of a weight."""
        block = self.block_of(shape)
        first = (lo[0] // block[0], lo[1] // block[1])
        if hi[0] <= lo[0] or hi[1] <= lo[1]:
            return first, first
        return first, (-(-hi[0] // block[0]), -(-hi[1] // block[1]))

    def cuts(self, shape: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> bool:
        """Whether an edge of the box runs through a block, so that its scale depends on values outside the box."""
        return any(a % b or (z % b and z != n) for a, z, b, n in zip(lo, hi, self.block_of(shape), shape, strict=True))
