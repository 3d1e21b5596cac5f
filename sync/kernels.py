"""Copies, 8-bit casts and digests on a GPU: Triton, on CUDA and ROCm (W3).

All segments of a bucket are copied and hashed by one kernel. A weight that is quantised is sliced, scaled, cast and
packed by one of its own; the kernel of the bucket then hashes its codes where they lie, while they are in the cache.

KE-1: results equal the torch definitions bit for bit: `mix64` of `sync.digest`, codes and scales of `sync.quantise`.
KE-2: nothing is read back: digests and the flag of values that are not finite stay on the device.
KE-3: what a kernel is not made for (blocks that are no power of two, formats that the device can't cast to) is done by
      the torch definitions on the same device, with the same result.

Sums of 64-bit terms are added atomically, in any order: modulo 2^64 the order doesn't show.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sync.digest import LENGTH, key_of
from sync.formats import CODE_LIMIT, Scaling
from sync.layout import Box
from sync.memory import as_bytes
from sync.quantise import TINY, largest, quantised, scales_of

__all__ = ["Job", "copy_many", "copy_mixed", "mixed", "quantise"]

_WORDS = 8192
"""32-bit words that one program copies and hashes."""


@triton.jit
def _key(index):  # type: ignore[no-untyped-def]
    """k_i of DG-2, in wrapping 64-bit arithmetic."""
    key = (index.to(tl.int64) + 1) * -7046029254386353131
    key = (key ^ ((key >> 32) & 0xFFFFFFFF)) * -2960836687051489901
    return (key ^ ((key >> 32) & 0xFFFFFFFF)) | 1


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(table, tiles, digests, COPY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of one job. A job is a row of the table: source, target, words. A tile is (job, first word)."""
    job = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    source = tl.load(table + 3 * job).to(tl.pointer_type(tl.int32))
    target = tl.load(table + 3 * job + 1).to(tl.pointer_type(tl.int32))
    index = first + tl.arange(0, BLOCK).to(tl.int64)
    inside = index < tl.load(table + 3 * job + 2)
    words = tl.load(source + index, mask=inside, other=0)
    if COPY:
        tl.store(target + index, words, mask=inside)
    terms = ((words.to(tl.int64) & 0xFFFFFFFF) + 1) * _key(index)
    tl.atomic_add(digests + job, tl.sum(tl.where(inside, terms, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_blocks(  # type: ignore[no-untyped-def]
    source, codes, scales, most, broken,
    rows, columns, row_stride, column_stride,
    row_offset, column_offset,
    LIMIT: tl.constexpr, TINIEST: tl.constexpr, POWER: tl.constexpr, GIVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One block: its largest value (or the one given), its scale, its codes.

    `row_offset` and `column_offset` are those of the box inside its first block. The block is read twice, `STEP` rows
    at a time: the second time it is in the cache.
    """
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    column = block_column * COLUMNS + tl.arange(0, COLUMNS)[None, :] - column_offset
    first = block_row * ROWS + tl.arange(0, STEP)[:, None] - row_offset
    high = tl.zeros((STEP, COLUMNS), tl.float32)
    bad = tl.zeros((STEP, COLUMNS), tl.int32)
    for start in range(0, ROWS, STEP):
        row = first + start
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
        size = tl.abs(tl.load(source + at, mask=inside, other=0.0).to(tl.float32))
        finite = size < float("inf")  # false for NaN too
        high = tl.maximum(high, tl.where(finite, size, 0.0))
        bad += tl.where(finite, 0, 1)
    if tl.sum(bad) > 0:
        tl.atomic_add(broken, 1)
    place = block_row * tl.num_programs(1) + block_column
    if GIVEN:
        largest = tl.load(most + place)
    else:
        largest = tl.max(high)
    scale = tl.div_rn(tl.maximum(largest, TINIEST), tl.full((), LIMIT, tl.float32))
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + place, scale)
    divisor = tl.zeros((STEP, COLUMNS), tl.float32) + scale
    for start in range(0, ROWS, STEP):
        row = first + start
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
        values = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.div_rn(values, divisor), -LIMIT), LIMIT)
        index = row.to(tl.int64) * columns + column
        tl.store(codes + index, scaled.to(codes.dtype.element_ty), mask=inside)


Job = tuple[int, int, int]
"""Address of the source, address of the target, bytes; all multiples of 4."""


class _Table:
    """Jobs as the kernel reads them. Weights keep their places: a version finds the tables of the one before."""

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        words = np.array([(source, target, num_bytes // 4) for source, target, num_bytes in jobs], np.int64)
        tiles = [(job, first) for job, count in enumerate(words[:, 2].tolist()) for first in range(0, count, _WORDS)]
        start = [_as_signed(num_bytes * LENGTH) for _, _, num_bytes in jobs]
        self.words = torch.from_numpy(words).to(device)
        self.tiles = torch.tensor(tiles or [(0, 0)], dtype=torch.int64, device=device)
        self.start = torch.tensor(start, dtype=torch.int64, device=device)
        self.num_tiles = len(tiles)


_TABLES: OrderedDict[tuple[object, ...], _Table] = OrderedDict()
_MOST_TABLES = 4096


def copy_many(jobs: Sequence[Job], device: torch.device, *, copy: bool = True) -> Tensor:
    """Copy device memory, job by job in one kernel; returns the `mix64` of each target, int64 on the device."""
    key = (device, *jobs)
    table = _TABLES.pop(key, None) or _Table(jobs, device)
    _TABLES[key] = table
    if len(_TABLES) > _MOST_TABLES:
        _TABLES.popitem(last=False)
    digests = table.start.clone()
    if table.num_tiles:
        _copy_words[(table.num_tiles,)](
            table.words, table.tiles, digests, COPY=copy, BLOCK=_WORDS, num_warps=8
        )  # fmt: skip
    return digests


def mixed(memory: Tensor) -> Tensor:
    """`mix64` of flat uint8 device memory, aligned to 4 bytes: a 0-d int64 on its device."""
    return _whole(memory, memory, copy=False)


def copy_mixed(target: Tensor, source: Tensor) -> Tensor:
    """Copy, and return the `mix64` of the bytes that now lie in `target`, row-major.

    Both on one device, of one shape; dtypes and strides may differ.
    """
    alike = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if alike and source.device == target.device and source.data_ptr() % 4 == 0 and target.data_ptr() % 4 == 0:
        return _whole(as_bytes(source), as_bytes(target), copy=True)
    target.copy_(source)
    return mixed(as_bytes(target.contiguous()))


def quantise(
    part: Tensor,
    codes: Tensor,
    box: Box,
    shape: tuple[int, ...],
    scaling: Scaling,
    most: Tensor | None,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise a box into `codes`.

    Args:
        part: values of the box, [rows, columns], bfloat16, float16 or float32, any strides.
        codes: contiguous, in the shape of the box, an 8-bit float; written.
        shape: of the full tensor.
        most: largest values of the blocks that the box touches, where other ranks hold parts of them; else None.
        room: where to put the scales; made here if None.

    Returns:
        The scales of those blocks, float32; and how many blocks hold values that are not finite, int32.
    """
    dtype = str(codes.dtype).removeprefix("torch.")
    rows, columns = scaling.block
    fits = scaling.kind == "block" and not (rows & rows - 1 or columns & columns - 1) and _casts_to(codes.dtype)
    if not fits:
        high = largest(part, box, shape, scaling) if most is None else most
        scales = scales_of(high, dtype, scaling)
        codes.copy_(quantised(part, scales, box, shape, dtype, scaling))
        scales = scales if room is None else room.copy_(scales)
        return scales, (~torch.isfinite(part)).sum(dtype=torch.int32)
    (first_row, first_column), (last_row, last_column) = scaling.scale_range(shape, box.lo, box.hi)
    grid = (last_row - first_row, last_column - first_column)
    scales = torch.empty(grid, dtype=torch.float32, device=part.device) if room is None else room
    broken = torch.zeros((), dtype=torch.int32, device=part.device)
    _quantise_blocks[grid](
        part, codes, scales, scales if most is None else most.contiguous(), broken,
        box.shape[0], box.shape[1], part.stride(0), part.stride(1),
        box.lo[0] - first_row * rows, box.lo[1] - first_column * columns,
        LIMIT=CODE_LIMIT[dtype], TINIEST=TINY, POWER=scaling.scale == "ue8m0", GIVEN=most is not None,
        ROWS=rows, COLUMNS=columns, STEP=min(rows, max(1, 1024 // columns)), num_warps=4,
    )  # fmt: skip
    return scales, broken


def _whole(source: Tensor, target: Tensor, *, copy: bool) -> Tensor:
    """`copy_many` of one job, with a tail that is no whole word."""
    count, tail = divmod(source.numel(), 4)
    digest: Tensor = copy_many([(source.data_ptr(), target.data_ptr(), count * 4)], source.device, copy=copy)[0]
    if not tail:
        return digest
    rest = source[count * 4 :]
    if copy:
        target[count * 4 :].copy_(rest)
    shifts = torch.arange(0, 8 * tail, 8, device=source.device)
    last: Tensor = ((rest.to(torch.int64) << shifts).sum() + 1) * key_of(count)
    return digest + last + _as_signed(tail * LENGTH)


def _casts_to(dtype: torch.dtype) -> bool:
    """Whether Triton casts to this format here: each vendor's GPUs have their own e4m3."""
    if torch.version.hip is not None:
        return dtype == torch.float8_e4m3fnuz
    return dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() >= (8, 9)


def _as_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
