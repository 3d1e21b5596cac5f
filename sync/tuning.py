"""What decides how fast the kernels of packing are, and nothing else: `benchmarks.gpu.sync kernels` compares."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["NOW", "Tuning"]


class Tuning(NamedTuple):
    """What decides how fast kernels are, and nothing else. `TUTTI_SYNC_KERNELS="graph words=2048"` sets some of it."""

    words: int = 4096
    """64-bit words that one program copies and hashes."""
    copy_warps: int = 16
    stage_programs: int = 0
    """How many programs store what has come, beside those that decode; 0: as many as there is work for."""
    cast_warps: int = 16
    fused: int = 0
    """Whether codes are divided by their scale through its reciprocal and two corrections, or by a division."""
    by_cuda: int = 0
    """Whether e4m3fn is rounded by the GPU's own conversion, where it has one, or in integers."""
    graph: int = 0
    """Whether a bucket that is packed again is one graph or several launches."""

    @classmethod
    def of(cls, text: str) -> Tuning:
        """Of words like `graph` or `words=2048`."""
        given = dict(word.partition("=")[::2] for word in text.split())
        return cls()._replace(**{name: int(value or 1) for name, value in given.items()})


NOW = Tuning.of(os.environ.get("TUTTI_SYNC_KERNELS", ""))
