"""Copies, casts and digests on a GPU, one kernel each (W3)."""

from __future__ import annotations

from torch import Tensor

from sync.digest import mix64
from sync.memory import as_bytes

__all__ = ["copy_mixed"]


def copy_mixed(target: Tensor, source: Tensor) -> Tensor:
    """Copy, and return the `mix64` of the bytes that now lie in `target`, row-major: a 0-d int64 on its device."""
    target.copy_(source)
    return mix64(as_bytes(target.contiguous()))
