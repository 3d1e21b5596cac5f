"""64-bit digests of bytes in motion: position-sensitive, several GB/s on one CPU core.

DG-1: equal bytes give equal digests on every host; bytes that are changed, swapped, cut or appended give another
      digest, except with probability 2^-64. Against accidents, not against an attacker: XXH3 is not cryptographic.
DG-2: long inputs are hashed in steps, so that a thread that hashes gives others their turn.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

__all__ = ["combine", "digest64"]

_STEP = 8 << 20


def digest64(memory: memoryview) -> int:
    """Digest of contiguous memory, in 0 .. 2^64 - 1."""
    flat = memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory
    if len(flat) <= _STEP:
        return int(xxhash.xxh3_64_intdigest(flat))
    state = xxhash.xxh3_64()
    for start in range(0, len(flat), _STEP):
        state.update(flat[start : start + _STEP])
    return int(state.intdigest())


def combine(digests: Iterable[int]) -> int:
    """One digest of a sequence of digests; the order counts."""
    return int(xxhash.xxh3_64_intdigest(b"".join(d.to_bytes(8, "little") for d in digests)))
