"""Bytes as tensors, and copies that are hashed as they are made.

MM-1: memory in motion is a flat uint8 tensor, on the host or on a device; what lies in it is viewed, never copied.
MM-2: a copy is made and hashed piece by piece, while the piece is still in the cache: one pass over main memory (W3).
      The digest is of what lies in the target.
MM-3: large memory of our own is of huge pages where the system has them on request: a copy into pages of 4 KiB takes a
      quarter longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from sync.digest import digest64

__all__ = ["allocate", "as_bytes", "copy_hashed", "digest_of", "empty", "move_hashed", "over", "view"]

_STEP = 512 << 10
"""Bytes copied and then hashed at a time: half of a core's second-level cache."""

_SHORT = 64 << 10
"""Copies up to here keep the interpreter's lock: giving it up and asking for it again takes longer."""

_HUGE = 2 << 20
"""Size of a huge page."""


def over(memory: memoryview) -> Tensor:
    """The flat uint8 tensor that shares writable host memory and keeps it alive."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocate(num_bytes: int) -> Tensor:
    """Private, page-aligned host memory, given back when its last view goes (MM-3)."""
    memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return over(memoryview(memory))[:num_bytes]


def empty(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    """A tensor that is to be written: on the host, when it is large, in memory of `allocate`."""
    kind = getattr(torch, dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    if device.type != "cpu" or num_bytes < _HUGE:
        return torch.empty(tuple(shape), dtype=kind, device=device)
    return view(allocate(num_bytes), 0, dtype, shape)


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
    return move_hashed(target.data_ptr(), source.data_ptr(), target.numel())


def move_hashed(target: int, source: int, num_bytes: int) -> int:
    """The same between addresses, whose memory the caller keeps alive. Equal addresses: only hashed."""
    if num_bytes <= _STEP:
        if target != source:
            (_move_locked if num_bytes <= _SHORT else _move)(target, source, num_bytes)
        return int(xxhash.xxh3_64_intdigest((ctypes.c_char * num_bytes).from_address(target)))
    state = xxhash.xxh3_64()
    for start in range(0, num_bytes, _STEP):
        size = min(_STEP, num_bytes - start)
        if target != source:
            _move(target + start, source + start, size)
        state.update((ctypes.c_char * size).from_address(target + start))
    return int(state.intdigest())


_move, _move_locked = ctypes.CDLL(None).memmove, ctypes.PyDLL(None).memmove
for _function in (_move, _move_locked):
    _function.argtypes, _function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
