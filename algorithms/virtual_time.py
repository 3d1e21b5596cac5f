"""An event loop whose clock is virtual: it jumps to the next timer instead of waiting for it.

    hours = run(main())          # `asyncio.sleep(3600)` inside takes no time

VT-1: time moves only when nothing is ready to run, and then exactly to the next timer.
VT-2: when nothing is ready and there is no timer, nobody can ever go on: `Deadlock`, at once.
VT-3: the same coroutines run in the same order every time: nothing of the outside world has a say.

For code that waits for timers and for other coroutines alone. Threads and sockets are not waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

__all__ = ["Deadlock", "VirtualLoop", "run"]


class Deadlock(RuntimeError):
    """All coroutines wait for each other (VT-2)."""


class _Clock(selectors.SelectSelector):
    """Stands where the loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._told = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None and not self._told:
            self._told = True  # once: what is cancelled because of it may wait again
            raise Deadlock(f"at {self.now:.6g} s of virtual time every coroutine waits and no timer is set")
        self.now += max(timeout or 0.0, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. `loop.time()` is seconds since its start."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        # The loop runs timers that are due within this. Small against what is simulated, large against the rounding of
        # a clock that has run for years.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Raises:
        Deadlock: it can't end (VT-2).
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
