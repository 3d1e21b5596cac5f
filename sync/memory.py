"""Bytes as tensors, and copies that are hashed as they are made.

MM-1: memory in motion is a flat uint8 tensor, on the host or on a device; what lies in it is viewed, never copied.
MM-2: a copy is made and hashed piece by piece, while the piece is still in the cache: one pass over main memory (W3).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from sync.digest import digest64

__all__ = ["allocate", "as_bytes", "copy_hashed", "digest_of", "over", "view"]

_STEP = 512 << 10
"""Bytes copied and then hashed at a time: half of a core's second-level cache."""


def over(memory: memoryview) -> Tensor:
    """The flat uint8 tensor that shares writable host memory and keeps it alive."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocate(num_bytes: int) -> Tensor:
    """Private, page-aligned host memory, given back when its last view goes."""
    return over(memoryview(mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))[:num_bytes]


def view(memory: Tensor, offset: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor that shares `memory` from byte `offset` on. `offset` must be aligned to the dtype."""
    kind = getattr(torch, dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    return memory[offset : offset + num_bytes].view(kind).view(tuple(shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """The flat bytes of a contiguous tensor, shared."""
    return tensor.reshape(-1).view(torch.uint8)


def digest_of(memory: Tensor) -> int:
    """The digest of flat host bytes."""
    return digest64(memoryview(memory.numpy().data))


def copy_hashed(target: Tensor, source: Tensor) -> int:
    """Copy flat host bytes and return the digest of what now lies in `target` (MM-2)."""
    into, out_of = target.numpy(), source.numpy()
    if len(into) <= _STEP:
        np.copyto(into, out_of)
        return digest64(memoryview(into.data))
    state = xxhash.xxh3_64()
    for start in range(0, len(into), _STEP):
        piece = into[start : start + _STEP]
        np.copyto(piece, out_of[start : start + _STEP])
        state.update(piece.data)
    return int(state.intdigest())
