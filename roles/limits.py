"""A wall-clock limit for code that can't be trusted to end: two stages, both inside the process that runs it.

LI-1: soft. At the limit the code is interrupted wherever it executes Python, by a timer signal: `TimeUp` is raised.
LI-2: hard. Code that can't be interrupted (it sits in C and may hold the interpreter, or it swallows `TimeUp`) ends the
      *process* HARD_MARGIN later, from a thread that needs no interpreter, after writing to stderr where it was stuck.
LI-3: what takes longer than the limit never counts as done, even if it swallows `TimeUp` or takes over the timer.
LI-4: timer and handler that were set before are as before afterwards; their time has gone on.
LI-5: a process that the limited code forked ends where it would leave that code: it never goes on as a second self.

Assumed: the main thread of the process (Python runs signal handlers nowhere else; elsewhere it is a ValueError), Linux.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

HARD_MARGIN = 1.0
"""Seconds between the two stages: time for Python code to unwind on a loaded machine."""

STDERR = 2
"""File descriptor; `sys.stderr` may have been replaced by something that is not a file."""

STUCK = "Timeout ("
"""How the first line begins that the hard stage writes to stderr; the stack of each thread follows, innermost first."""


class TimeUp(BaseException):
    """The limit has passed. Not an Exception, so that `except Exception` in the limited code does not take it."""


def limited(function: Callable[[], T], seconds: float) -> T:
    """Run a function for at most `seconds` of wall-clock time.

    Raises:
        TimeUp: it took longer.
        ValueError: this is not the main thread.
    """
    armed, own = True, os.getpid()

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal armed
        if armed:  # once: a second one could strike after the function has ended
            armed = False
            raise TimeUp

    started, outer_delay, outer_interval = time.monotonic(), 0.0, 0.0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            outer_delay, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds)
            faulthandler.dump_traceback_later(seconds + HARD_MARGIN, exit=True, file=STDERR)
            result = function()
        finally:
            armed = False
            if os.getpid() != own:
                os._exit(0)
    finally:  # from here on `interrupt` raises no more: either it has, or `armed` is off
        faulthandler.cancel_dump_traceback_later()
        elapsed = time.monotonic() - started
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer_delay:
            signal.setitimer(signal.ITIMER_REAL, max(outer_delay - elapsed, 1e-6), outer_interval)
    if elapsed >= seconds:
        raise TimeUp
    return result


def stuck_at(stderr: Sequence[str]) -> str | None:
    """Where the limited code was when the hard stage ended its process: `File "x.py", line 3 in f`.

    Args:
        stderr: the last lines that the process wrote.

    Returns:
        None when it was not the hard stage that ended it; "unknown" when the lines don't tell.
    """
    lines = [line.strip() for line in stderr]
    if not any(line.startswith(STUCK) for line in lines):
        return None
    innermost = "unknown"
    for above, line in pairwise(lines):
        if "(most recent call first)" in above:
            innermost = line
        if line.endswith(f"in {limited.__name__}") and __name__.rpartition(".")[2] in line:
            return innermost
    return "unknown"
