"""Python code that a model wrote, in a process of its own: limited time and memory, no network, no files.

SB-1: the code gets no network: the process leaves the host's network namespace first. Where a machine does not allow
      that, nothing is run and the result says so.
SB-2: wall time, processor time, memory of a process, output and open files are limited. The code is the first process
      of a process namespace: whatever it starts ends with it.
SB-3: the code sees an empty environment and the standard library only. It may read what the user of this process may
      read: on machines with secrets run the whole role under a user of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

import msgspec

REFUSED = 97
"""Exit code of a process that could not give up its network."""

_PROGRAM = """
import ctypes, os, resource, signal, sys
NEW_USER, NEW_PIDS, NEW_NETWORK, DEATH_SIGNAL = 0x10000000, 0x20000000, 0x40000000, 1
libc = ctypes.CDLL(None)
if libc.unshare(NEW_USER | NEW_PIDS | NEW_NETWORK):
    os._exit({refused})
child = os.fork()
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
code = sys.stdin.read()
for kind, limit in ((resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_FSIZE, 0),
                    (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
exec(compile(code, "code", "exec"), {{"__name__": "__main__"}})
"""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    output: str
    """What it printed, errors included, at most `max_output` characters."""
    exit_code: int | None
    """None: it took too long. Above 128: 128 + the signal that ended it."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


async def run_python(code: str, *, seconds: float = 5.0, memory: int = 512 << 20, max_output: int = 10_000) -> Outcome:
    """Run code and wait for its end.

    Args:
        seconds: wall time; processor time is limited to the next whole number.
        memory: bytes of address space.
        max_output: characters; what prints more is ended.

    Raises:
        RuntimeError: this machine does not let a process give up its network (SB-1).
    """
    program = _PROGRAM.format(refused=REFUSED, memory=memory, seconds=int(seconds) + 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,
    )
    output = bytearray()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            process.stdin.write(code.encode())
            process.stdin.close()
            while len(output) < 4 * max_output and (part := await process.stdout.read(65536)):
                output += part
            if len(output) < 4 * max_output:
                await process.wait()
        exit_code = process.returncode
    except TimeoutError:
        exit_code = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if exit_code == REFUSED:
        raise RuntimeError(
            "sandbox: this machine does not let a process give up its network (user namespaces are off), so code is "
            "not run; allow them, or leave this tool out"
        )
    text = output.decode(errors="replace")
    return Outcome(output=text[:max_output], exit_code=exit_code)
