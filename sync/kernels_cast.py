"""Weights from one float format into another on a GPU: Triton, on CUDA and ROCm (W3). All tensors of a bucket that are
cast alike by one kernel, read once.

KC-1: what is written is `tensor.float().clamp(-limit, limit).to(dtype)`, limit the largest of that dtype, bit for bit
      where nothing is NaN; digests equal `mix64` of `sync.digest`.
KC-2: nothing is read back: digests and the count of tiles that hold a value which is not finite stay on the device.
KC-3: what no kernel is made for (views, rarer formats) is cast by torch on the same device: `fits` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sync.digest import LENGTH
from sync.kernels import as_signed, key_at

__all__ = ["PlainCasts", "fits"]

_WORDS = 2048
"""64-bit words that one program makes."""
_WARPS = 16
_SOURCES = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16}
_TARGETS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Form(NamedTuple):
    """What a kernel is compiled for."""

    source: torch.dtype
    target: torch.dtype
    aligned: bool


@triton.jit  # type: ignore[untyped-decorator]
def _cast_words(  # type: ignore[no-untyped-def]
    table, tiles, digests, broken,
    SOURCE: tl.constexpr, BITS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr, ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One tile of a job. A job is a row of the table: source, target, elements. A tile is (job, first word)."""
    job = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    source = tl.load(table + 3 * job).to(tl.pointer_type(SOURCE))
    target = tl.load(table + 3 * job + 1)
    count = tl.load(table + 3 * job + 2)
    LANES: tl.constexpr = 2 if TARGET == "float32" else 4  # elements of a word
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        first = tl.multiple_of(first, 16)
    word = first + tl.arange(0, WORDS).to(tl.int64)
    lane = tl.arange(0, LANES)
    index = word[:, None] * LANES + lane[None, :]
    inside = index < count
    values = tl.load(source + index, mask=inside, other=0)
    if BITS:  # bfloat16 is the upper half of float32
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = values.to(tl.float32)
    if tl.max(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)) >= 0x7F800000:  # infinity, and above it NaN
        tl.atomic_add(broken + job, 1)
    values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
    if TARGET == "float16":
        codes = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        codes = values.to(tl.int32, bitcast=True)
        if TARGET == "bfloat16":  # to nearest, ties to even, on every device alike
            codes = ((codes + 0x7FFF + ((codes >> 16) & 1)) >> 16).to(tl.int16)
    if TARGET == "float32":
        tl.store(target.to(tl.pointer_type(tl.int32)) + index, codes, mask=inside)
        parts = (codes.to(tl.int64) & 0xFFFFFFFF) << (32 * lane.to(tl.int64))[None, :]
    else:
        tl.store(target.to(tl.pointer_type(tl.int16)) + index, codes, mask=inside)
        parts = (codes.to(tl.int64) & 0xFFFF) << (16 * lane.to(tl.int64))[None, :]
    parts = tl.where(inside, parts, 0)
    tl.atomic_add(digests + job, tl.sum(tl.sum(parts, 1) * key_at(word)))


def fits(source: Tensor, target: Tensor) -> bool:
    """Whether a kernel is made for this cast (KC-3)."""
    known = source.dtype in _SOURCES and target.dtype in _TARGETS
    return known and source.device == target.device and source.is_contiguous() and target.is_contiguous()


class PlainCasts:
    """Pairs of tensors that `fits`, ready to be cast any number of times, as long as their memory stays where it is."""

    def __init__(self, casts: Sequence[tuple[Tensor, Tensor]]) -> None:
        device = casts[0][1].device
        table = np.array([(s.data_ptr(), t.data_ptr(), t.numel()) for s, t in casts], np.int64)
        tiles: dict[_Form, list[np.ndarray]] = {}
        for job, (source, target) in enumerate(casts):
            aligned = not (source.data_ptr() % 16 or target.data_ptr() % 16)
            firsts = np.arange(0, -(-target.nbytes // 8), _WORDS)
            form = _Form(source.dtype, target.dtype, aligned)
            tiles.setdefault(form, []).append(np.stack([np.full_like(firsts, job), firsts], 1))
        self._table = torch.from_numpy(table).to(device)
        self._tiles = {form: torch.from_numpy(np.concatenate(some)).to(device) for form, some in tiles.items()}
        start = [as_signed(target.nbytes * LENGTH) for _, target in casts]
        self._start = torch.tensor(start, dtype=torch.int64, device=device)

    def run(self) -> tuple[Tensor, Tensor]:
        """Cast. Returns the `mix64` of each target, int64, and for each how many of its tiles hold a value that is not
        finite, int32; both on the device."""
        digests, broken = self._start.clone(), torch.zeros_like(self._start, dtype=torch.int32)
        for form, tiles in self._tiles.items():
            if len(tiles):
                _cast_words[(len(tiles),)](
                    self._table, tiles, digests, broken,
                    SOURCE=_SOURCES[form.source], BITS=form.source == torch.bfloat16, TARGET=_TARGETS[form.target],
                    LIMIT=torch.finfo(form.target).max, ALIGNED=form.aligned, WORDS=_WORDS, num_warps=_WARPS,
                )  # fmt: skip
        return digests, broken
