"""What workers print: read through pipes, forwarded once, line by line.

LO-1: every line that a worker writes to stdout or stderr reaches the sink once, prefixed `[mesh rank]`, and never mixed
      with another; a last line without newline too.
LO-2: lines up to `MAX_LINE` bytes are whole; longer ones are broken there, not cut.
LO-3: the last `TAIL_LINES` lines of stderr are kept for `ProcessDied`.
LO-4: with a log directory each rank also has a file `<mesh>-<rank>.log` with the same lines, unprefixed.
LO-5: records of `logging` come with their severity (`WARNING urllib3: ...`), from the level of their role on; the
      default is warning. A process whose code sets up `logging` itself is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

MAX_LINE = 64 * 1024
TAIL_LINES = 40

LEVELS = ("debug", "info", "warning", "error", "critical")

Sink = Callable[[str], None]
"""Gets one line, with prefix and without newline."""


def stderr_sink(line: str) -> None:
    """The default sink: the stderr of the controller."""
    sys.stderr.write(line + "\n")


def check_levels(levels: Mapping[str, str]) -> dict[str, str]:
    """Levels by role, in lower case.

    Raises:
        ValueError: one isn't a level; the message names the role.
    """
    for role, level in levels.items():
        if level.lower() not in LEVELS:
            raise ValueError(f"log level of {role!r}: expected {', '.join(LEVELS)}, got {level!r}")
    return {role: level.lower() for role, level in levels.items()}


def set_up_logging(level: str) -> None:
    """Print records from this level on to stderr, with their severity (LO-5), unless other handlers do it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.lastResort = handler
    logging.getLogger().setLevel(level.upper())


class Capture:
    """The output of one worker. Create it, pass `output` to the process, then call `started`."""

    def __init__(self, name: str, rank: int, sink: Sink, log_directory: Path | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = asyncio.Event()
        """Both streams have ended: nobody holds their write ends."""
        self._prefix = f"[{name} {rank}] "
        self._sink = sink
        self._file: BinaryIO | None = None
        if log_directory is not None:
            self._file = open(log_directory / f"{name}-{rank}.log", "ab", buffering=0)
        self._loop = asyncio.get_running_loop()
        self._rest: dict[int, bytes] = {}
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        self.output = (out_write, err_write)
        self._stderr = err_read
        for descriptor in (out_read, err_read):
            os.set_blocking(descriptor, False)
            self._rest[descriptor] = b""
            self._loop.add_reader(descriptor, self._on_readable, descriptor)

    def started(self) -> None:
        """The process has its own copies of the write ends."""
        for descriptor in self.output:
            os.close(descriptor)
        self.output = (-1, -1)

    def close(self) -> None:
        """Forward what has come so far and stop reading."""
        for descriptor in list(self._rest):
            self._on_readable(descriptor)
            if descriptor in self._rest:
                self._end(descriptor)
        if self.output[0] >= 0:
            self.started()

    def _on_readable(self, descriptor: int) -> None:
        while True:
            try:
                data = os.read(descriptor, MAX_LINE)
            except BlockingIOError:
                return
            if not data:
                self._end(descriptor)
                return
            *lines, rest = (self._rest[descriptor] + data).split(b"\n")
            while len(rest) >= MAX_LINE:
                lines.append(rest[:MAX_LINE])
                rest = rest[MAX_LINE:]
            self._rest[descriptor] = rest
            for line in lines:
                self._forward(line, descriptor)
            if len(data) < MAX_LINE:
                return

    def _end(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        rest = self._rest.pop(descriptor)
        if rest:
            self._forward(rest, descriptor)
        if not self._rest:
            self.ended.set()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _forward(self, line: bytes, descriptor: int) -> None:
        text = line.decode("utf-8", "replace")
        if descriptor == self._stderr:
            self.tail.append(text)
        if self._file is not None:
            self._file.write(line + b"\n")
        self._sink(self._prefix + text)
