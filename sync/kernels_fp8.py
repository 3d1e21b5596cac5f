"""Weights into 8-bit floats on a GPU: Triton, on CUDA and ROCm (W3). All matrices of a bucket by one kernel.

A program reads a tile of a weight once: it finds the largest value, makes the scale, and writes codes and scale where
they travel; the codes are hashed before they leave the registers. Scales of channels and of whole tensors reach over
tiles: a kernel before finds their largest values.

KF-1: codes and scales are those of `sync.quantise`, digests those of `sync.digest`, bit for bit.
KF-2: nothing is read back: digests and the count of tiles that hold a value which is not finite stay on the device.
KF-3: codes are rounded in integers, on every device alike: each vendor casts to its own e4m3 only, and what Triton 3.6
      makes of the cast on an H200 is wrong in half of the codes. Where NVIDIA's GPUs have the instruction itself it
      makes the same codes of e4m3fn, and all of it takes a fifth less.
KF-4: blocks that no tile fits are quantised by the torch definitions on the same device.

Sums of 64-bit terms are added atomically, in any order: modulo 2^64 the order doesn't show. The same is true of the
largest value: the bits of floats that are not negative are ordered like the floats.
"""

from __future__ import annotations

import os
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
_WARPS = 16
_MOST_ELEMENTS = 1 << 14
"""Of a tile: what 256 threads hold in registers."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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
def _tile(  # type: ignore[no-untyped-def]
    table, tiles,
    SOURCE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The values of this program's tile as float32, with where it lies: see the fields in `_Table`.

    Inside a tile offsets are 32-bit numbers: 64-bit ones cost several instructions for each element.
    """
    place = tiles + 3 * tl.program_id(0)
    job = tl.load(place).to(tl.int64)
    block_row = tl.load(place + 1)
    block_column = tl.load(place + 2)
    fields = table + 12 * job  # _FIELDS
    row_stride = tl.load(fields + 6)
    top = block_row.to(tl.int64) * ROWS - tl.load(fields + 8)
    left = block_column.to(tl.int64) * COLUMNS - tl.load(fields + 9)
    source = tl.load(fields).to(tl.pointer_type(SOURCE))
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    above = (tl.load(fields + 4) - top).to(tl.int32)
    beyond = (tl.load(fields + 5) - left).to(tl.int32)
    before = tl.maximum(-left, 0).to(tl.int32)
    if ALIGNED:  # rows begin at multiples of 16 bytes and have no gaps between columns
        source = tl.multiple_of(source + top * row_stride + left, 16)
        offset = row * tl.multiple_of(row_stride.to(tl.int32), 16) + column
        beyond = tl.multiple_of(beyond, 16)
        before = tl.multiple_of(before, 16)
    else:
        column_stride = tl.load(fields + 7)
        source = source + top * row_stride + left * column_stride
        offset = row * row_stride + column * column_stride
    if WHOLE:
        inside = (row >= 0) & (column >= 0)
        values = tl.load(source + offset)
    else:
        inside = (row >= -top) & (row < above) & (column >= before) & (column < beyond)
        values = tl.load(source + offset, mask=inside, other=0.0)
    return fields, job, block_row, block_column, top, left, inside, values.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    table, tiles,
    SOURCE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, CHANNEL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Largest values of rows, or of everything, into `most`. NaN and infinity count as larger than any number."""
    fields, _job, block_row, _block_column, _top, _left, _inside, values = _tile(
        table, tiles, SOURCE, ALIGNED, WHOLE, ROWS, COLUMNS
    )
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.load(fields + 3).to(tl.pointer_type(tl.int32))
    if CHANNEL:
        lines = block_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.atomic_max(most + lines, tl.max(bits, 1), mask=lines < tl.load(fields + 4))
    else:
        tl.atomic_max(most, tl.max(bits))


@triton.jit  # type: ignore[untyped-decorator]
def _divided(values, divisor, FUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """values / divisor, rounded to nearest even.

    FUSED: by the reciprocal, which is one for many values, and two corrections; after the first the quotient is off by
    one place at most, and the second then rounds as a division does (Markstein). What is left over is exact down to
    quotients of 2^-12 for divisors of 2^-49 and more; smaller ones are a code of zero in any case. An interpreter that
    doesn't fuse needs the division.
    """
    if FUSED:
        one = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
        minus = -divisor
        found = values * one
        found = tl.fma(tl.fma(found, minus, values), one, found)
        return tl.fma(tl.fma(found, minus, values), one, found)
    else:
        return tl.div_rn(values, divisor)


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
        return code | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _words(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four codes in a 32-bit word, the first one lowest: [ROWS, COLUMNS / 4]. They are neighbours in one thread."""
    even, odd = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 4, 2, 2)))
    low, high = tl.split(even | (odd << 8))
    return low | (high << 16)


@triton.jit  # type: ignore[untyped-decorator]
def _words_by_cuda(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same from float32 values, into e4m3fn, by the conversion that NVIDIA's GPUs have since 8.9."""
    even, odd = tl.split(tl.reshape(values, (ROWS, COLUMNS // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    table, tiles, digests, broken,
    SOURCE: tl.constexpr, LIMIT: tl.constexpr, TINIEST: tl.constexpr, POWER: tl.constexpr, KIND: tl.constexpr,
    GIVEN: tl.constexpr, HASH: tl.constexpr, FNUZ: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    FUSED: tl.constexpr, BY_CUDA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile: its largest value (or the one given), its scale, its codes and their share of the digest."""
    fields, job, block_row, block_column, top, left, inside, values = _tile(
        table, tiles, SOURCE, ALIGNED, WHOLE, ROWS, COLUMNS
    )
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if largest >= 0x7F800000:  # infinity, and above it NaN
        tl.atomic_add(broken + job, 1)
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
        most = largest.to(tl.float32, bitcast=True)
    most = tl.maximum(most, TINIEST)
    scale = tl.div_rn(most, tl.zeros_like(most) + LIMIT)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + place, scale, mask=writes)
    if KIND == "channel":
        divisor = scale[:, None]
    else:
        divisor = tl.zeros((1, 1), tl.float32) + scale
    scaled = _divided(values, divisor, FUSED)
    if GIVEN:  # a scale that was made of these values can't bring them beyond the limit
        scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    columns = tl.load(fields + 5)
    start = top * columns + left
    row = tl.arange(0, ROWS)[:, None]
    if ALIGNED:  # four codes are written at once: boxes begin and end at multiples of 16 columns
        words = _words_by_cuda(scaled, ROWS, COLUMNS) if BY_CUDA else _words(_rounded(scaled, FNUZ), ROWS, COLUMNS)
        quarter = tl.arange(0, COLUMNS // 4)[None, :]
        target = tl.multiple_of((tl.load(fields + 1) + start).to(tl.pointer_type(tl.int32)), 8)
        offset = row * tl.multiple_of((columns // 4).to(tl.int32), 2) + quarter
        if WHOLE:
            tl.store(target + offset, words)
        else:
            above = (tl.load(fields + 4) - top).to(tl.int32)
            beyond = ((columns - left) // 4).to(tl.int32)
            before = (tl.maximum(-left, 0) // 4).to(tl.int32)
            there = (row >= -top) & (row < above) & (quarter >= before) & (quarter < beyond)
            tl.store(target + offset, words, mask=there)
            words = tl.where(there, words, 0)
    else:
        codes = _rounded(scaled, FNUZ)
        target = tl.load(fields + 1).to(tl.pointer_type(tl.uint8))
        tl.store(target + start + row * columns + tl.arange(0, COLUMNS)[None, :], codes.to(tl.uint8), mask=inside)
        if HASH:
            words = _words(tl.where(inside, codes, 0), ROWS, COLUMNS)
    if HASH:
        # Eight codes are a word of the digest, row-major: each row is a whole number of them.
        low, high = tl.split(tl.reshape(words, (ROWS, COLUMNS // 8, 2)))
        pairs = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        place = row * (columns // 8).to(tl.int32) + tl.arange(0, COLUMNS // 8)[None, :]
        tl.atomic_add(digests + job, tl.sum(pairs * key_at((start >> 3) + place)))


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
            first, last = grid * (rows, columns) - (top, left), (grid + 1) * (rows, columns) - (top, left)
            whole = ((first >= 0) & (last <= (height, width))).all(1, keepdims=True).astype(np.int32)
            tiles.append(np.concatenate([np.full((len(grid), 1), index, np.int32), grid, whole], 1))
        sizes = [cast.codes.numel() * LENGTH for cast in casts]
        self.rows = torch.from_numpy(table).to(device)
        together = np.concatenate(tiles)
        self.tiles = {
            bool(kind): torch.from_numpy(np.ascontiguousarray(together[together[:, 3] == kind, :3])).to(device)
            for kind in set(together[:, 3].tolist())
        }
        """(box, row and column of the block), by whether a tile lies inside its box."""
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
        self._tables = [
            (form, places, torch.tensor(places, device=self._device), _Table([casts[p] for p in places], form))
            for form, places in forms.items()
        ]

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
        for form, places, index, table in self._tables:
            counts = broken if len(places) == self._count else torch.zeros_like(broken[: len(places)])
            found = _launch(table, form, counts)
            if counts is not broken:
                broken.index_copy_(0, index, counts)
            if form.hashed:
                digests |= {place: Later(found, n) for n, place in enumerate(places)}
        return digests, broken


def _launch(table: _Table, form: _Form, broken: Tensor) -> Tensor:
    digests = table.start.clone()
    code = str(form.codes).removeprefix("torch.")
    rows, columns = form.block
    shared = {"SOURCE": _SOURCES[form.source], "ALIGNED": form.aligned, "ROWS": rows, "COLUMNS": columns}
    shared["num_warps"] = _WARPS
    if table.own is not None:
        for most in table.own:
            most.zero_()
        for whole, tiles in table.tiles.items():
            _measure[(len(tiles),)](table.rows, tiles, WHOLE=whole, CHANNEL=form.kind == "channel", **shared)
    for whole, tiles in table.tiles.items():
        _quantise[(len(tiles),)](
            table.rows, tiles, digests, broken,
            LIMIT=CODE_LIMIT[code], TINIEST=TINY, POWER=form.scale == "ue8m0", KIND=form.kind,
            GIVEN=form.given or table.own is not None, HASH=form.hashed, FNUZ=code.endswith("fnuz"),
            WHOLE=whole, FUSED=not _INTERPRETED,
            BY_CUDA=code == "float8_e4m3fn" and _converts(broken.device), **shared,
        )  # fmt: skip
    return digests


def _converts(device: torch.device) -> bool:
    """Whether a GPU has an instruction that rounds to e4m3fn."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _form(cast: Cast) -> _Form:
    part, scaling, box = cast.part, cast.scaling, cast.box
    block = scaling.block if scaling.kind == "block" else (64, 256)
    left, width = (box.lo[1] % block[1] if scaling.kind == "block" else 0), box.shape[1]
    sixteen = (part.data_ptr(), part.stride(0) * part.element_size(), cast.codes.data_ptr())
    aligned = part.stride(1) == 1 and not any(n % 16 for n in (*sixteen, part.stride(0), left, width, block[1]))
    aligned = aligned and block[0] * part.stride(0) < 1 << 31
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
