"""Shared memory and semaphores that vLLM's processes name, gone with them however they end (R10).

Python keeps a process beside that unlinks such names when the last one that may use them has ended. But it belongs to
the process group of the rank, so that a SIGKILL of the group takes it along and the names stay. Here it leads a session
of its own: it ends by itself, milliseconds after all others, having unlinked what they left.

VL-1: names are those that processes of this rank registered, from its start on; never another job's.
VL-2: the tracker outlives the rank by the time of its clean-up, and no longer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_NAMES = re.compile(r"/dev/shm/(psm_\w+|sem\.mp-\w+|vllm_dist_[^\s/]+)")


class Tracker:
    """The resource tracker of this process, and of those that it will spawn, in a session of its own."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, "-c", f"from multiprocessing.resource_tracker import main; main({reading})"]
        self._process = subprocess.Popen(command, pass_fds=(reading,), start_new_session=True, stdin=subprocess.DEVNULL)
        os.close(reading)
        tracker: Any = resource_tracker._resource_tracker
        # One that runs already keeps what it knows: its pipe stays open.
        self._before = tracker._fd, tracker._pid
        self._writing = writing
        tracker._fd, tracker._pid = writing, self._process.pid

    def end(self) -> None:
        """Have it unlink what is left, once all that share it have ended; this process has its tracker of before."""
        tracker: Any = resource_tracker._resource_tracker
        os.close(self._writing)
        if tracker._fd == self._writing:
            tracker._fd, tracker._pid = self._before
        with suppress(subprocess.TimeoutExpired):  # somebody still lives: it ends with them
            self._process.wait(1.0)


def children_of(pid: int) -> list[int]:
    """Processes below one, at any depth."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *children_of(child)]
    return found


def shared_memory_of(pids: Sequence[int]) -> list[Path]:
    """Named shared memory and semaphores, of Python's kind and of vLLM's on CPU, that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            found |= set(_NAMES.findall(Path(f"/proc/{pid}/maps").read_text()))
    return [Path("/dev/shm") / name for name in sorted(found)]
