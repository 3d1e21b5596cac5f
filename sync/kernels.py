"""Copies and digests on a GPU: Triton, on CUDA and ROCm (W3). All segments of a bucket by one kernel, read once; those
that are quantised have another one, in `sync.kernels_fp8`.

KE-1: copies are whole, and digests equal `mix64` of `sync.digest` bit for bit.
KE-2: nothing is read back: digests stay on the device.
KE-3: what no kernel is made for (views, odd addresses) is done by torch on the same device, with the same result.

Sums of 64-bit terms are added atomically, in any order: modulo 2^64 the order doesn't show.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from sync.digest import LENGTH
from sync.memory import as_bytes

__all__ = ["Copies", "Job", "as_signed", "copies", "copy_many", "copy_mixed", "key_at", "mixed"]


@triton.jit
def key_at(index):  # type: ignore[no-untyped-def]
    """k_i of DG-2, in wrapping 64-bit arithmetic."""
    key = (index.to(tl.int64) + 1) * -7046029254386353131
    return (key ^ ((key >> 32) & 0xFFFFFFFF)) | 1


_WORDS = 4096
"""64-bit words that one program copies and hashes."""
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(  # type: ignore[no-untyped-def]
    table, tiles, digests, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile of a job. A job is a row of the table: source, target, words, bytes after them. A tile is (job, first
    word)."""
    job = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    source = tl.load(table + 4 * job).to(tl.pointer_type(tl.int64))
    target = tl.load(table + 4 * job + 1).to(tl.pointer_type(tl.int64))
    count = tl.load(table + 4 * job + 2)
    tail = tl.load(table + 4 * job + 3)
    if ALIGNED:  # to 16 bytes, so that they are moved two words at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        first = tl.multiple_of(first, 2)
        count = tl.multiple_of(count, 2)
    index = first + tl.arange(0, BLOCK).to(tl.int64)
    inside = index < count
    words = tl.load(source + index, mask=inside, other=0)
    if COPY:
        tl.store(target + index, words, mask=inside)
    digest = tl.sum(words * key_at(index))
    if (tail > 0) & (first + BLOCK >= count):
        byte = tl.arange(0, 8)
        at = tl.load(table + 4 * job) + 8 * count
        rest = tl.load(at.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < tail, other=0)
        if COPY:
            to = tl.load(table + 4 * job + 1) + 8 * count
            tl.store(to.to(tl.pointer_type(tl.uint8)) + byte, rest, mask=byte < tail)
        digest += tl.sum(rest.to(tl.int64) << (8 * byte).to(tl.int64)) * key_at(count)
    tl.atomic_add(digests + job, digest)


Job = tuple[int, int, int]
"""Address of the source, address of the target, both multiples of 8; bytes."""


class Copies:
    """Jobs, ready to be run any number of times, as long as their memory stays where it is."""

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        words = np.array([(source, target, *divmod(num_bytes, 8)) for source, target, num_bytes in jobs], np.int64)
        start = [as_signed(num_bytes * LENGTH) for _, _, num_bytes in jobs]
        aligned = [not any(n % 16 for n in job) for job in jobs]  # a tail is not
        self._words = torch.from_numpy(words).to(device)
        self._start = torch.tensor(start, dtype=torch.int64, device=device)
        self._tiles = {
            kind: torch.from_numpy(_tiles(words, [i for i, a in enumerate(aligned) if a == kind])).to(device)
            for kind in set(aligned)
        }
        """By whether their jobs are aligned to 16 bytes."""

    def run(self, *, copy: bool = True) -> Tensor:
        """Copy and hash, or only hash; returns the `mix64` of each target, int64 on the device."""
        digests = self._start.clone()
        for aligned, tiles in self._tiles.items():
            if len(tiles):
                _copy_words[(len(tiles),)](
                    self._words, tiles, digests, COPY=copy, ALIGNED=aligned, BLOCK=_WORDS, num_warps=_WARPS
                )
        return digests


def _tiles(words: npt.NDArray[np.int64], jobs: Sequence[int]) -> npt.NDArray[np.int64]:
    """(job, first word) of each tile."""
    firsts = [np.arange(0, max(words[job, 2], min(1, words[job, 3])), _WORDS) for job in jobs]
    return np.concatenate([np.stack([np.full_like(f, job), f], 1) for job, f in zip(jobs, firsts, strict=True)])


_KNOWN: OrderedDict[tuple[object, ...], Copies] = OrderedDict()
_MOST_KNOWN = 4096
"""More than a version asks for, else it would find none of them again: what is cast is hashed tensor by tensor."""


def copies(jobs: Sequence[Job], device: torch.device) -> Copies:
    """Jobs, ready. Weights keep their places: a version finds what the one before has made."""
    key = (device, *jobs)
    known = _KNOWN.pop(key, None) or Copies(jobs, device)
    _KNOWN[key] = known
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.popitem(last=False)
    return known


def copy_many(jobs: Sequence[Job], device: torch.device, *, copy: bool = True) -> Tensor:
    """Copy device memory, job by job in one kernel; returns the `mix64` of each target, int64 on the device."""
    return copies(jobs, device).run(copy=copy)


def mixed(memory: Tensor) -> Tensor:
    """`mix64` of flat uint8 device memory, aligned to 8 bytes: a 0-d int64 on its device."""
    return copy_many([(memory.data_ptr(), memory.data_ptr(), memory.numel())], memory.device, copy=False)[0]


def copy_mixed(target: Tensor, source: Tensor) -> Tensor:
    """Copy, and return the `mix64` of the bytes that now lie in `target`, row-major.

    Both on one device, of one shape; dtypes and strides may differ.
    """
    alike = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if alike and source.device == target.device and not (source.data_ptr() % 8 or target.data_ptr() % 8):
        return copy_many([(source.data_ptr(), target.data_ptr(), source.nbytes)], source.device)[0]
    target.copy_(source)
    there = as_bytes(target.contiguous())
    return mixed(there.clone() if there.data_ptr() % 8 else there)


def as_signed(value: int) -> int:
    """A number modulo 2^64, as int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
