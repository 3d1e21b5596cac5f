"""Untrusted Python in a process of its own: for a limited time, with limited memory, without network and other files.

    result = run("print(input())", stdin="7", seconds=2.0, memory_mb=256)

SB-1: the code runs in a fresh interpreter in an empty folder that is removed afterwards, with no environment of ours
      and the standard library alone.
SB-2: time is wall-clock time, and then the process is gone, with everything in it. Memory (address space), the size of
      each file it writes, and what it prints are limited by the kernel (setrlimit).
SB-3: it can make no socket, and start, signal, trace or reach into no process (seccomp; it may start threads); it can
      read the interpreter's own files and write in its folder alone (Landlock). Neither needs privileges. Where the
      kernel has no Landlock or no seccomp for this architecture, `SandboxError` is raised rather than run with less,
      unless `weaker` allows it.
SB-4: it dies with the process that runs it.

What this is not: a virtual machine. A fault of the kernel is a way out, code can use a whole core until its time is up
and its limits of memory, and it can read what the interpreter's installation holds. Code that shares its interpreter
with the checks on it can cheat them; `verify.code` therefore compares what a program prints where it can.

Assumed: Linux. The parts that talk to the kernel run in the child before any of the untrusted code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Result", "SandboxError", "run", "run_async"]

OUTPUT_LIMIT = 1 << 20
"""Bytes that a program may print, and that each file of its may have."""

REFUSED = 97
"""Exit code of a child that could not lock itself in."""

BOOT = Path(__file__).with_name("sandbox_child.py")


class SandboxError(RuntimeError):
    """The sandbox could not be set up. Says nothing about the code."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    outcome: Literal["ok", "error", "time", "killed"]
    """"ok": exit code 0. "error": another one, or an exception. "time": ended at its time limit. "killed": by a signal,
    such as one of the kernel for its limits."""
    stdout: str
    stderr: str
    exit_code: int | None


def run(code: str, *, stdin: str = "", seconds: float = 2.0, memory_mb: int = 512, weaker: bool = False) -> Result:
    """Run a program and wait for its end.

    Args:
        code: Python source.
        stdin: what it reads.
        seconds: of wall-clock time, the start of the interpreter (some hundredths of a second) included.
        memory_mb: of address space, the interpreter's own 30 included.
        weaker: run even where seccomp or Landlock are missing, with what there is.

    Raises:
        SandboxError: it could not be locked in (SB-3).
    """
    with _Cell(code, stdin, seconds, memory_mb, weaker) as cell, cell.opened() as options:
        with subprocess.Popen(cell.command, **options) as child:
            try:
                child.wait(seconds)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:  # also when the caller is interrupted
                child.kill()
        return cell.result(child.returncode, timed_out)


async def run_async(
    code: str, *, stdin: str = "", seconds: float = 2.0, memory_mb: int = 512, weaker: bool = False
) -> Result:
    """As `run`, for a coroutine: the loop goes on meanwhile, and a cancelled call ends the program."""
    with _Cell(code, stdin, seconds, memory_mb, weaker) as cell, cell.opened() as options:
        child = await asyncio.create_subprocess_exec(*cell.command, **options)
        try:
            async with asyncio.timeout(seconds):
                await child.wait()
            timed_out = False
        except TimeoutError:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return cell.result(child.returncode or 0, timed_out)


class _Cell:
    """The folder of one run, and what it says afterwards."""

    def __init__(self, code: str, stdin: str, seconds: float, memory_mb: int, weaker: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-")
        self._path = Path(self._folder.name)
        self._home = self._path / "home"
        self._home.mkdir()
        job = {
            "code": code,
            "seconds": seconds,
            "memory": memory_mb << 20,
            "file": OUTPUT_LIMIT,
            "weaker": weaker,
            "home": str(self._home),
            "parent": os.getpid(),
        }
        (self._path / "job.json").write_text(json.dumps(job))
        (self._path / "stdin").write_text(stdin)
        self.command = [sys.executable, "-I", "-S", str(BOOT), str(self._path / "job.json")]

    def __enter__(self) -> _Cell:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """How its process is started."""
        with (
            (self._path / "stdin").open("rb") as stdin,
            (self._path / "stdout").open("wb") as stdout,
            (self._path / "stderr").open("wb") as stderr,
        ):
            yield {
                "stdin": stdin,
                "stdout": stdout,
                "stderr": stderr,
                "cwd": self._home,
                "env": {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
                "start_new_session": True,
            }

    def result(self, exit_code: int, timed_out: bool) -> Result:
        stdout, stderr = ((self._path / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
        if exit_code == REFUSED:
            raise SandboxError(f"sandbox: {stderr.strip() or 'the child could not lock itself in'}")
        if timed_out:
            return Result(outcome="time", stdout=stdout, stderr=stderr, exit_code=None)
        if exit_code < 0:
            told = stderr or f"ended by {signal.Signals(-exit_code).name}"
            return Result(outcome="killed", stdout=stdout, stderr=told, exit_code=exit_code)
        return Result(outcome="error" if exit_code else "ok", stdout=stdout, stderr=stderr, exit_code=exit_code)
