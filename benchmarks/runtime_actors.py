"""The actor that `benchmarks/runtime.py` calls: in a module of its own, so that its processes import no more than it
needs. (Those of the peers travel by value and import nothing.)"""

from __future__ import annotations

import time

import numpy as np

from runtime import Actor, endpoint


class Echo(Actor):
    @endpoint
    async def ping(self) -> int:
        return 1

    @endpoint
    def ping_main(self) -> int:
        return 1

    @endpoint
    async def nbytes(self, payload: np.ndarray) -> int:
        return int(payload.nbytes)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def take_slowly(self, payload: np.ndarray) -> None:
        time.sleep(0.002)
