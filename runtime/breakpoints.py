"""`breakpoint()` in an actor: the rank stops there and waits for somebody to come (`python -m runtime.debug`).

    breakpoint() -> notice on stderr -> waits at a socket in the run directory -> pdb for whoever has the secret

BP-1: only a peer that proves the secret of the job gets to the debugger.
BP-2: a stopped rank isn't dead and isn't taken for it: in a sync endpoint its loop goes on with heartbeats and async
      endpoints; an async endpoint stops the whole process, which is still a living one.
BP-3: who leaves without `continue` leaves the rank stopped; the next one sees where it is.
BP-4: what a stopped rank puts into the run directory is gone when it goes on.
"""

from __future__ import annotations

import itertools
import linecache
import os
import pdb
import socket
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

from runtime.auth import prove
from runtime.errors import PeerRefused
from runtime.messages import ProcessSpec

PROMPT = "(Pdb) "
SUFFIX = ".stopped"
"""Of the files that tell who is stopped; the socket beside it has the same name with `.debug`."""
_KEPT = 64 * 1024

_numbers = itertools.count()


class StoppedAt(msgspec.Struct, frozen=True):
    """What a stopped rank tells about itself."""

    mesh: str
    rank: int
    pid: int
    thread: str
    file: str
    line: int
    function: str
    address: str
    """Path of the socket."""

    def describe(self) -> str:
        return f"{self.mesh}/{self.rank} stopped at {self.file}:{self.line} in {self.function}"


class Door:
    """Standard input and output of a debugger, for one visitor at a time."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self._path = path
        self._secret = secret
        self._listener: socket.socket | None = None
        self._visitor: socket.socket | None = None
        self._lines: Any = None
        self._where = ""
        self._said = ""
        """What a newcomer gets to see: where it stopped, and what was said since the last command."""

    def open(self, stopped: StoppedAt) -> None:
        """Let visitors in; told to them by the file beside the socket."""
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self._listener.listen(8)
        source = linecache.getline(stopped.file, stopped.line).strip()
        self._where = f"> {stopped.file}({stopped.line}){stopped.function}()\n-> {source}\n"
        notice = self._path.with_suffix(SUFFIX)
        unfinished = notice.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(stopped))
        unfinished.rename(notice)

    def close(self) -> None:
        """The rank goes on (BP-4)."""
        self._leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for path in (self._path, self._path.with_suffix(SUFFIX)):
            path.unlink(missing_ok=True)

    # What pdb calls

    def readline(self) -> str:
        while True:
            if self._visitor is None:
                self._welcome()
            try:
                line = self._lines.readline()
            except OSError:
                line = ""
            if line:
                self._said = self._where
                return str(line)
            self._leave()  # BP-3

    def write(self, text: str) -> None:
        self._said = (self._said + text)[-_KEPT:]
        if self._visitor is not None:
            try:
                self._visitor.sendall(text.encode())
            except OSError:
                self._leave()

    def flush(self) -> None:
        """Nothing is held back."""

    def _welcome(self) -> None:
        assert self._listener is not None
        while self._visitor is None:
            visitor, _ = self._listener.accept()
            try:
                prove(visitor, self._secret, dialled=False)
                visitor.sendall(self._said.encode())
            except (PeerRefused, OSError):  # BP-1
                visitor.close()
                continue
            self._visitor, self._lines = visitor, visitor.makefile("r", encoding="utf-8", errors="replace")

    def _leave(self) -> None:
        if self._visitor is not None:
            self._lines.close()
            self._visitor.close()
            self._visitor = self._lines = None


class Debugger(pdb.Pdb):
    """pdb behind a door."""

    def __init__(self, door: Door, spec: ProcessSpec, place: str) -> None:
        super().__init__(stdin=door, stdout=door, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.prompt = PROMPT
        self._door = door
        self._spec = spec
        self._place = place

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        shown = frame or (traceback.tb_frame if traceback is not None else sys._getframe())
        code = shown.f_code
        self._door.open(
            StoppedAt(
                self._spec.name,
                self._spec.rank,
                os.getpid(),
                threading.current_thread().name,
                code.co_filename,
                shown.f_lineno,
                code.co_qualname,
                self._place,
            )
        )
        super().interaction(frame, traceback)

    def set_continue(self) -> None:
        super().set_continue()
        self._door.close()

    def set_quit(self) -> None:
        super().set_quit()
        self._door.close()


def stop_here(spec: ProcessSpec, frame: FrameType) -> None:
    """Stop this process in a frame until somebody has come and lets it go on."""
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    path = Path(spec.run_directory) / f"{spec.id}-{next(_numbers)}.debug"
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    print(f"stopped at {where}; python -m runtime.debug attach {spec.name}/{spec.rank}", file=sys.stderr)  # noqa: T201
    Debugger(Door(path, spec.trust.secret), spec, str(path)).set_trace(frame)
