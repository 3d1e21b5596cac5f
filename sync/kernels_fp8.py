"""Weights into 8-bit floats on a GPU: Triton, on CUDA and ROCm (W3). All matrices of a bucket by one kernel.

A program reads a tile of a weight once: it finds the largest value, makes the scale, and writes codes and scale where
they travel; the codes are hashed before they leave the registers. Scales of channels and of whole tensors reach over
tiles: a kernel before finds their largest values.

KF-1: codes and scales are those of `sync.quantise`, digests those of `sync.digest`, bit for bit.
KF-2: nothing is read back: digests and the count of tiles that hold a value which is not finite stay on the device.
KF-3: codes are rounded in integers, on every device alike: each vendor casts to its own e4m3 only, and what Triton 3.6
      makes of the cast on an H200 is wrong in half of the codes.
KF-4: blocks that no tile fits are quantised by the torch definitions on the same device.

Sums of 64-bit terms are added atomically, in any order: modulo 2^64 the order doesn't show. The same is true of the
largest value: the bits of floats that are not negative are ordered like the floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sync.digest import LENGTH, Later
from sync.formats import CODE_LIMIT
from sync.kernels import as_signed, key_at
from sync.quantise import TINY, Cast, by_definition

__all__ = ["Casts"]

_FIELDS = 12
_MOST_ELEMENTS = 1 << 14
"""Of a tile: what 256 threads hold in registers."""
_SOURCES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Form(NamedTuple):
    """What a kernel is compiled for."""

    source: torch.dtype
    codes: torch.dtype
    kind: str
    scale: str
    block: tuple[int, int]
    given: bool
    hashed: bool
    aligned: bool


@triton.jit  # type: ignore[untyped-decorator]
def _tile(table, tiles, SOURCE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of this program's tile as float32, with what it takes to write them: see the fields in `_Table`."""
    place = tiles + 3 * tl.program_id(0)
    job = tl.load(place).to(tl.int64)
    block_row = tl.load(place + 1)
    block_column = tl.load(place + 2)
    fields = table + 12 * job  # _FIELDS
    rows = tl.load(fields + 4)
    columns = tl.load(fields + 5)
    row_stride = tl.load(fields + 6)
    row = block_row.to(tl.int64) * ROWS - tl.load(fields + 8) + tl.arange(0, ROWS)[:, None]
    first = block_column.to(tl.int64) * COLUMNS - tl.load(fields + 9)
    source = tl.load(fields).to(tl.pointer_type(SOURCE))
    if ALIGNED:  # rows begin at multiples of 16 bytes and have no gaps between columns
        source = tl.multiple_of(source, 16)
        columns = tl.multiple_of(columns, 16)
        row_stride = tl.multiple_of(row_stride, 16)
        first = tl.multiple_of(first, 16)
    column = first + tl.arange(0, COLUMNS)[None, :]
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    if ALIGNED:
        values = tl.load(source + row * row_stride + column, mask=inside, other=0.0)
    else:
        values = tl.load(source + row * row_stride + column * tl.load(fields + 7), mask=inside, other=0.0)
    return fields, job, block_row, block_column, row, column, columns, inside, values.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    table, tiles,
    SOURCE: tl.constexpr, ALIGNED: tl.constexpr, CHANNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Largest values of rows, or of everything, into `most`. NaN and infinity count as larger than any number."""
    fields, _job, block_row, _block_column, _row, _column, _columns, _inside, values = _tile(
        table, tiles, SOURCE, ALIGNED, ROWS, COLUMNS
    )
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.load(fields + 3).to(tl.pointer_type(tl.int32))
    if CHANNEL:
        lines = block_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.atomic_max(most + lines, tl.max(bits, 1), mask=lines < tl.load(fields + 4))
    else:
        tl.atomic_max(most, tl.max(bits))


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(values, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
    """8-bit codes of float32 values that are inside the range: nearest, ties to even, as int32."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    near = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    if FNUZ:
        # Below 2^-7 codes count steps of 2^-10: the steps of float32 just above 2^13.
        steps = (size.to(tl.float32, bitcast=True) + 8192.0).to(tl.int32, bitcast=True) - 0x46000000
        code = tl.where(size < 0x3C000000, steps, near - (119 << 3))
        return tl.where((bits < 0) & (code != 0), code | 0x80, code)  # there is no negative zero
    else:
        # Below 2^-6 codes count steps of 2^-9: the steps of float32 just above 2^14.
        steps = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, steps, near - (120 << 3))
        return tl.where(bits < 0, code | 0x80, code)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    table, tiles, digests, broken,
    SOURCE: tl.constexpr, LIMIT: tl.constexpr, TINIEST: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr,
    GIVEN: tl.constexpr, HASH: tl.constexpr, FNUZ: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile: its largest value (or the one given), its scale, its codes and their share of the digest."""
    fields, job, block_row, block_column, row, column, columns, inside, values = _tile(
        table, tiles, SOURCE, ALIGNED, ROWS, COLUMNS
    )
    size = tl.abs(values)
    bad = tl.sum((size < float("inf")).to(tl.int32)) < ROWS * COLUMNS  # false for NaN too
    scales = tl.load(fields + 2).to(tl.pointer_type(tl.float32))
    lines = block_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if KIND == "channel":
        place = lines
        there = lines < tl.load(fields + 4)
        writes = there & (block_column == 0)
    elif KIND == "tensor":
        place = block_row * 0
        there = block_row >= 0
        writes = (block_row == 0) & (block_column == 0)
    else:
        place = block_row.to(tl.int64) * tl.load(fields + 10) + block_column
        there = block_row >= 0
        writes = there
    if GIVEN:
        most = tl.load(tl.load(fields + 3).to(tl.pointer_type(tl.float32)) + place, mask=there, other=0.0)
    else:
        most = tl.max(size)
    if bad:
        tl.atomic_add(broken + job, 1)
    most = tl.maximum(most, TINIEST)
    scale = tl.div_rn(most, tl.zeros_like(most) + LIMIT)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + place, scale, mask=writes)
    divisor = scale[:, None] if KIND == "channel" else scale
    scaled = tl.div_rn(values, tl.zeros((ROWS, COLUMNS), tl.float32) + divisor)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    codes = _rounded(scaled, FNUZ)
    target = tl.load(fields + 1).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target + row * columns + column, codes.to(tl.uint8), mask=inside)
    if HASH:
        # Eight codes are a word: row-major, each row a whole number of words.
        parts = codes << (8 * (tl.arange(0, COLUMNS) % 4))[None, :]
        halves = tl.sum(tl.reshape(tl.where(inside, parts, 0), (ROWS, COLUMNS // 8, 2, 4)), 3)
        shifts = (32 * tl.arange(0, 2))[None, None, :].to(tl.int64)
        words = tl.sum((halves.to(tl.int64) & 0xFFFFFFFF) << shifts, 2)
        word = block_column.to(tl.int64) * COLUMNS - tl.load(fields + 9) + 8 * tl.arange(0, COLUMNS // 8)[None, :]
        tl.atomic_add(digests + job, tl.sum(words * key_at((row * columns + word) >> 3)))


class _Table:
    """Boxes of one form as the kernels read them. Fields of a row: source, codes, scales,
    most; rows, columns, row stride, column stride; row and column of the box in its first block; blocks in a row.
    """

    def __init__(self, casts: Sequence[Cast], form: _Form) -> None:
        device = casts[0].part.device
        rows, columns = form.block
        self.own = None if form.given or form.kind == "block" else _measured(casts, device)
        table = np.zeros((len(casts), _FIELDS), np.int64)
        tiles = []
        for index, cast in enumerate(casts):
            height, width = cast.box.shape
            top, left, across = 0, 0, -(-width // columns)
            if form.kind == "block":
                (first_row, first_column), (_, last_column) = cast.scaling.scale_range(
                    cast.shape, cast.box.lo, cast.box.hi
                )
                top, left = cast.box.lo[0] - first_row * rows, cast.box.lo[1] - first_column * columns
                across = last_column - first_column
            most = cast.most if self.own is None else self.own[index]
            table[index] = (
                *(cast.part.data_ptr(), cast.codes.data_ptr(), cast.scales.data_ptr()),
                *(0 if most is None else most.data_ptr(), height, width, *cast.part.stride()),
                *(top, left, across, 0),
            )
            down = -(-(top + height) // rows) if width else 0
            grid = np.indices((down, across), np.int32).reshape(2, -1).T
            tiles.append(np.concatenate([np.full((len(grid), 1), index, np.int32), grid], 1))
        sizes = [cast.codes.numel() * LENGTH for cast in casts]
        self.rows = torch.from_numpy(table).to(device)
        self.tiles = torch.from_numpy(np.ascontiguousarray(np.concatenate(tiles))).to(device)
        self.start = torch.tensor([as_signed(size) for size in sizes], dtype=torch.int64, device=device)


class Casts:
    """Boxes on one device, ready to be quantised any number of times, as long as their memory stays where it is."""

    def __init__(self, casts: Sequence[Cast]) -> None:
        self._device = casts[0].part.device
        self._count = len(casts)
        self._by_definition = [(place, cast) for place, cast in enumerate(casts) if not _fits(cast)]
        forms: dict[_Form, list[int]] = {}
        for place, cast in enumerate(casts):
            if _fits(cast):
                forms.setdefault(_form(cast), []).append(place)
        self._tables = [(form, places, _Table([casts[p] for p in places], form)) for form, places in forms.items()]

    @property
    def keeps_nothing(self) -> bool:
        """Whether no weight is kept alive: kernels know addresses only."""
        return not self._by_definition

    def run(self) -> tuple[dict[int, Later], Tensor]:
        """Quantise.

        Returns:
            For each box whose codes the kernel has hashed, by its place, their digest; and for each box how many of its
            tiles hold a value that is not finite, int32.
        """
        broken = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        digests: dict[int, Later] = {}
        for place, cast in self._by_definition:
            broken[place] = by_definition(cast)
        for form, places, table in self._tables:
            counts = broken if len(places) == self._count else torch.zeros_like(broken[: len(places)])
            found = _launch(table, form, counts)
            if counts is not broken:
                broken[places] = counts
            if form.hashed:
                digests |= {place: Later(found, n) for n, place in enumerate(places)}
        return digests, broken


def _launch(table: _Table, form: _Form, broken: Tensor) -> Tensor:
    digests = table.start.clone()
    count = len(table.tiles)
    if not count:
        return digests
    code = str(form.codes).removeprefix("torch.")
    rows, columns = form.block
    shared = {"SOURCE": _SOURCES[form.source], "ALIGNED": form.aligned, "ROWS": rows, "COLUMNS": columns}
    if table.own is not None:
        for most in table.own:
            most.zero_()
        _measure[(count,)](table.rows, table.tiles, CHANNEL=form.kind == "channel", num_warps=16, **shared)
    _quantise[(count,)](
        table.rows, table.tiles, digests, broken,
        LIMIT=CODE_LIMIT[code], TINIEST=TINY, POWER=form.scale == "ue8m0", KIND=form.kind,
        GIVEN=form.given or table.own is not None, HASH=form.hashed, FNUZ=code.endswith("fnuz"),
        num_warps=16, **shared,
    )  # fmt: skip
    return digests


def _form(cast: Cast) -> _Form:
    part, scaling, box = cast.part, cast.scaling, cast.box
    block = scaling.block if scaling.kind == "block" else (64, 256)
    left, width = (box.lo[1] % block[1] if scaling.kind == "block" else 0), box.shape[1]
    sixteen = (part.data_ptr(), part.stride(0) * part.element_size(), cast.codes.data_ptr())
    aligned = part.stride(1) == 1 and not any(n % 16 for n in (*sixteen, part.stride(0), left, width))
    return _Form(
        source=part.dtype,
        codes=cast.codes.dtype,
        kind=scaling.kind,
        scale=scaling.scale,
        block=block,
        given=cast.most is not None,
        hashed=not (width % 8 or left % 8 or block[1] % 8),
        aligned=aligned,
    )


def _measured(casts: Sequence[Cast], device: torch.device) -> list[Tensor]:
    """Room for the largest values that a kernel finds."""
    return [torch.zeros(cast.scales.shape, dtype=torch.float32, device=device) for cast in casts]


def _fits(cast: Cast) -> bool:
    """Whether the kernels are made for these blocks: powers of two, not larger than a tile."""
    rows, columns = cast.scaling.block
    small = not (rows & rows - 1 or columns & columns - 1) and rows * columns <= _MOST_ELEMENTS
    return cast.part.dtype in _SOURCES and (cast.scaling.kind != "block" or small)
