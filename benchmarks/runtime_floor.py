"""What no runtime can beat by much: a message to another process and back without any actor.

Also the ways to look at a process from outside that `benchmarks/runtime.py` needs.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

MESSAGE = b"x" * 100
"""About the size of a small call."""


def median_seconds(call: Callable[[], object], count: int) -> float:
    """Median duration of a call."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def socket_round_trip() -> float:
    """Seconds for a small message there and back: two processes, blocking Unix sockets, one loop each."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        while data := theirs.recv(4096):
            theirs.sendall(data)
        os._exit(0)
    theirs.close()

    def once() -> None:
        ours.sendall(MESSAGE)
        ours.recv(4096)

    try:
        median_seconds(once, 500)
        return median_seconds(once, 3000)
    finally:
        ours.close()
        os.waitpid(child, 0)


def copy_seconds(array: np.ndarray) -> float:
    """Seconds to copy an array within this process, into memory that is there."""
    target = np.empty_like(array)
    target[:] = 0
    return median_seconds(lambda: np.copyto(target, array), 9)


def resident_bytes(pid: int) -> int:
    """Memory of a process, with its proportion of what it shares."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024


class PeakMemory:
    """Watches processes: the largest sum of their memory above that at the start, while the block runs."""

    def __init__(self, *pids: int) -> None:
        self.peak = 0
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = 0

    def __enter__(self) -> PeakMemory:
        self._start = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._now() - self._start)

    def _now(self) -> int:
        return sum(resident_bytes(pid) for pid in self._pids)


def kill(pid: int) -> float:
    """Kill a process; returns the time."""
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return start
