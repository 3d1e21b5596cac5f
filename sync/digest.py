"""64-bit digests of bytes in motion, sensitive to position.

DG-1: equal bytes give equal digests on every host; bytes that are changed, swapped, cut or appended give another
      digest, except with probability about 2^-64. Against accidents, not against an attacker.
DG-2: `digest64` is XXH3 of host memory, several GB/s on one core. `mix64` is what a device computes beside its copies,
      with two multiplications for 8 bytes: a sum over the 64-bit words w_i of the bytes, little-endian, the last one
      padded with zeros, whose terms may be added in any order:

          sum w_i * k_i + num_bytes * C   mod 2^64      x = (i + 1) * G,  k_i = (x xor (x >> 32)) or 1

      A change of one word always shows: k_i is odd. Written here in torch, on any device; `sync.kernels` equals it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LENGTH", "Later", "digest64", "key_of", "mix64"]

_STEP = 8 << 20
_WORLD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
"""G of DG-2."""
LENGTH = 0xC2B2AE3D27D4EB4F
"""C of DG-2."""


class Later(NamedTuple):
    """A digest among those that one kernel computes."""

    block: Tensor
    """int64, on the device."""
    place: int


def digest64(memory: memoryview) -> int:
    """XXH3 of contiguous memory, in 0 .. 2^64 - 1."""
    flat = memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory
    if len(flat) <= _STEP:
        return int(xxhash.xxh3_64_intdigest(flat))
    state = xxhash.xxh3_64()
    for start in range(0, len(flat), _STEP):
        state.update(flat[start : start + _STEP])
    return int(state.intdigest())


def mix64(memory: Tensor) -> Tensor:
    """DG-2 of flat uint8 memory: a 0-d int64 tensor on its device, to be read modulo 2^64."""
    import torch

    num_bytes = memory.numel()
    padding = -num_bytes % 8
    if padding:
        memory = torch.cat([memory, memory.new_zeros(padding)])
    if memory.storage_offset() % 8:
        memory = memory.clone()
    words = memory.view(torch.int64)
    key = torch.arange(1, len(words) + 1, dtype=torch.int64, device=memory.device) * _signed(_GOLDEN)
    key = (key ^ (key >> 32 & 0xFFFFFFFF)) | 1
    return (words * key).sum() + _signed(num_bytes * LENGTH)


def key_of(index: int) -> int:
    """k_i of DG-2, as a signed number."""
    key = (index + 1) * _GOLDEN % _WORLD
    return _signed((key ^ key >> 32) | 1)


def _signed(value: int) -> int:
    value %= _WORLD
    return value - _WORLD if value >> 63 else value
