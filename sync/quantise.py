"""Weights into 8-bit floats with scales, in plain torch: the definition that every kernel must equal bit for bit (W7).

For a block b of the full tensor, in float32, every operation rounded to nearest even:

    a = max |w|  over b           s = max(a, TINY) / limit          ue8m0: s = 2^ceil(log2 s)
    q = round_to_8_bit(clip(w / s, -limit, limit))                  w is about q * s

with limit 448 for e4m3fn and 240 for e4m3fnuz. w / s is a division, not a product with the reciprocal: the two differ
in about one code of 3000.

QU-1: blocks are those of the full tensor; a rank that holds part of a block needs the largest values of all parts, and
      with them every rank computes the same scales.
QU-2: values are clipped before they are cast: what a cast does beyond its range differs between versions of torch.
QU-3: a value that is not finite is an error that names tensor and box. A cast would hide it: a diverged trainer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sync.formats import CODE_LIMIT, Scaling
from sync.layout import Box

__all__ = ["TINY", "Cast", "by_definition", "largest", "quantised", "scales_of", "spread_scales"]

TINY = 1e-12
"""Least value that a block is scaled for: a block of zeros gets a scale that is finite and not zero."""


class Cast(NamedTuple):
    """One box of one weight on its way into an 8-bit float."""

    part: Tensor
    """Its values, [rows, columns], bfloat16, float16 or float32, any strides."""
    codes: Tensor
    """Contiguous, in the shape of the box, an 8-bit float; written."""
    scales: Tensor
    """Contiguous float32, one for each block that the box touches; written."""
    box: Box
    shape: tuple[int, ...]
    """Of the full weight."""
    scaling: Scaling
    most: Tensor | None = None
    """float32, contiguous: largest values of those blocks, where other ranks hold parts of them; else None."""


def by_definition(cast: Cast) -> Tensor:
    """Write codes and scales of a box; returns, as int32, how many of the largest values are not finite."""
    dtype = str(cast.codes.dtype).removeprefix("torch.")
    most = largest(cast.part, cast.box, cast.shape, cast.scaling) if cast.most is None else cast.most
    cast.scales.copy_(scales_of(most, dtype, cast.scaling))
    cast.codes.copy_(quantised(cast.part, cast.scales, cast.box, cast.shape, dtype, cast.scaling))
    return (~torch.isfinite(most)).sum(dtype=torch.int32)


def largest(part: Tensor, box: Box, shape: tuple[int, ...], scaling: Scaling) -> Tensor:
    """max |w| of each block that a box touches, over the values inside the box.

    Args:
        part: the values of the box, any float dtype and strides.
        shape: of the full tensor.

    Returns:
        float32, one value per block, in the shape of `scaling.scale_range`. NaN and infinity stay what they are.
    """
    values = part.abs()
    if scaling.kind == "tensor":
        return values.amax().to(torch.float32).view(1, 1)
    if scaling.kind == "channel":
        return values.amax(1, keepdim=True).to(torch.float32)
    rows, columns = scaling.block
    (first_row, first_column), (last_row, last_column) = scaling.scale_range(shape, box.lo, box.hi)
    padding = (
        box.lo[1] - first_column * columns,
        last_column * columns - box.hi[1],
        box.lo[0] - first_row * rows,
        last_row * rows - box.hi[0],
    )
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    blocks = values.reshape(last_row - first_row, rows, last_column - first_column, columns)
    return blocks.amax((1, 3)).to(torch.float32)


def scales_of(most: Tensor, dtype: str, scaling: Scaling) -> Tensor:
    """Scales, float32, for the largest values of blocks."""
    # Divided by a tensor: by a number, torch multiplies with the reciprocal on a GPU.
    scales = most.clamp_min(TINY) / torch.full_like(most, CODE_LIMIT[dtype])
    if scaling.scale == "float32":
        return scales
    mantissa, exponent = torch.frexp(scales)  # scales = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))


def spread_scales(scales: Tensor, box: Box, shape: tuple[int, ...], scaling: Scaling) -> Tensor:
    """The scale of every element of a box, broadcastable to it, from the scales of the blocks that it touches."""
    if scaling.kind != "block":
        return scales
    rows, columns = scaling.block
    row = torch.arange(box.lo[0], box.hi[0], device=scales.device) // rows - box.lo[0] // rows
    column = torch.arange(box.lo[1], box.hi[1], device=scales.device) // columns - box.lo[1] // columns
    return scales[row][:, column]


def quantised(part: Tensor, scales: Tensor, box: Box, shape: tuple[int, ...], dtype: str, scaling: Scaling) -> Tensor:
    """The codes of a box, contiguous, from its values and the scales of the blocks that it touches."""
    limit = CODE_LIMIT[dtype]
    scaled = part.to(torch.float32) / spread_scales(scales, box, shape, scaling)
    codes = scaled.clamp_(-limit, limit).to(getattr(torch, dtype))
    return codes.contiguous()
