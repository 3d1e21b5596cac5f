"""Starting processes, by fork or fresh, and learning how they ended.

PR-1: `exited` of a process resolves within milliseconds of its end, whoever its parent is (fork server or controller).
PR-2: what is left of the process group of a dead worker is killed before its id is free again.
PR-3: the environment of a fresh interpreter is complete before it imports anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

import msgspec

from runtime.auth import without_secret
from runtime.errors import Death, StartError
from runtime.forkserver import MAX_REQUEST, Answer, Exited, Fork, Forked, Fresh, Ready
from runtime.messages import ProcessSpec
from runtime.oom import OomWatch

READ_AT_IMPORT = (
    "CUDA_",
    "HIP_",
    "ROCR_",
    "NVIDIA_",
    "PYTORCH_",
    "TORCH_",
    "NCCL_",
    "RCCL_",
    "LD_",
    "PYTHON",
    "OPENBLAS_",
)
"""Variables that libraries read while they are imported: a process that sets one is started fresh, not forked."""

Start = Literal["auto", "fork", "fresh"]
"""How a process begins: forked from the fork server, as a fresh interpreter, or as its environment requires."""

PRELOAD = ("numpy", "torch", "transformers")
"""Modules worth importing once for all workers, when the controller has imported them itself."""


_log = logging.getLogger(__name__)


class Exit(msgspec.Struct, frozen=True):
    """How a process ended, as the kernel says."""

    status: int | None
    """As of `os.waitpid`; None for a process whose parent is neither we nor the fork server."""
    peak_memory: int = 0


class Process:
    """A started process."""

    def __init__(self, pid: int, *, leads_group: bool = True) -> None:
        self.pid = pid
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.signals: set[int] = set()
        """Signals that we sent."""
        self._leads_group = leads_group

    def kill(self, number: int) -> None:
        """Send a signal to the process and all of its group; nothing when it is gone."""
        if self.exited.done():
            return
        self.signals.add(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads_group and _is_group(self.pid):
                os.killpg(self.pid, number)
            else:  # one that was forked this moment has no group of its own yet
                os.kill(self.pid, number)

    def note_exit(self, record: Exit) -> None:
        """Called once, by whoever learns of the end."""
        if not self.exited.done():
            self.exited.set_result(record)


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


class ForkServerClient:
    """The controller's side of the fork server."""

    def __init__(self, run_directory: str, modules: list[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._environment = without_secret(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                bootstrap("runtime.forkserver", theirs.fileno(), run_directory, os.getpid(), *modules),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._modules = modules
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Process]] = {}
        self._processes: dict[int, Process] = {}
        self._lock = asyncio.Lock()
        self._closed = False
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self._loop.add_reader(self._control.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def fork(self, spec: ProcessSpec, output: tuple[int, int]) -> Process:
        """Start a worker with these descriptors as stdout and stderr. Waits for the imports to be done.

        Raises:
            StartError: the fork server is gone or could not fork.
        """
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[Process] = self._loop.create_future()
        self._waiting[number] = future
        # Its environment is the one of its start; children shall have the one of now.
        now = without_secret(os.environ)
        changed = {k: v for k, v in now.items() if self._environment.get(k) != v}
        removed = self._environment.keys() - now.keys()
        spec = msgspec.structs.replace(spec, env={**changed, **spec.env}, unset=(*spec.unset, *sorted(removed)))
        data = msgspec.msgpack.encode(Fork(number, msgspec.msgpack.encode(spec)))
        if len(data) > MAX_REQUEST:
            raise StartError(
                f"{spec.name} rank {spec.rank}: environment of {len(data)} bytes, at most {MAX_REQUEST} can be passed"
            )
        try:
            await self._send(data, output)
            return await future
        finally:
            self._waiting.pop(number, None)

    def guard(self, pid: int) -> None:
        """Have it kill the group of a fresh worker, our child, when that ends, also if we end first (FS-4)."""
        self._tell_of(pid, os.pidfd_open(pid))

    def _tell_of(self, pid: int, descriptor: int) -> None:
        if not self._closed:
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(Fresh(pid))], [descriptor])
            except BlockingIOError:  # it is importing and its queue is full
                self._loop.call_later(0.005, self._tell_of, pid, descriptor)
                return
            except OSError:
                self._lose()
        os.close(descriptor)

    async def close(self) -> None:
        """End the fork server and wait until it is gone; it removes the run directory."""
        self._lose()
        if not await wait_for_exit(self._popen, 3.0):
            self._popen.kill()
            await wait_for_exit(self._popen, 3.0)

    async def _send(self, data: bytes, descriptors: tuple[int, int]) -> None:
        async with self._lock:
            while not self._closed:
                try:
                    socket.send_fds(self._control, [data], descriptors)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.005)  # it is importing and its queue is full
                except OSError:
                    self._lose()
        raise StartError("the fork server is gone; it was killed, or an imported module ended it (its stderr is above)")

    def _on_readable(self) -> None:
        while not self._closed:
            try:
                data = self._control.recv(MAX_REQUEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            answer = msgspec.msgpack.decode(data, type=Answer)
            if isinstance(answer, Forked):
                self._on_forked(answer)
            elif isinstance(answer, Exited):
                self._processes.pop(answer.pid).note_exit(Exit(answer.status, answer.peak_memory))
            elif not self.ready.done():
                if answer.threads > 1:
                    _log.warning(
                        "the fork server has %d threads after importing %s: forking is not safe with one of these. "
                        "Leave it out: this_host(preload=[...])",
                        answer.threads,
                        ", ".join(self._modules),
                    )
                self.ready.set_result(answer)

    def _on_forked(self, answer: Forked) -> None:
        future = self._waiting.get(answer.number)
        if future is not None and future.done():
            future = None  # whoever asked was cancelled meanwhile
        if answer.pid:
            process = self._processes[answer.pid] = Process(answer.pid)
            if future is not None:
                future.set_result(process)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(answer.pid, signal.SIGKILL)
        elif future is not None:
            future.set_exception(StartError(answer.error))

    def _lose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(StartError("the fork server is gone; its stderr is above"))
        for process in self._processes.values():
            # Its death is the death of its children (PR_SET_PDEATHSIG), but nobody can tell their status any more.
            process.kill(signal.SIGKILL)  # PR-2
            process.note_exit(Exit(None))
        if not self.ready.done():
            self.ready.cancel()


def start_fresh(spec: ProcessSpec, output: tuple[int, int]) -> Process:
    """Start a worker as a new interpreter (PR-3).

    Raises:
        StartError: the interpreter could not be started.
    """
    memory = os.memfd_create("tutti-spec")
    try:
        os.write(memory, msgspec.msgpack.encode(spec))
        os.lseek(memory, 0, os.SEEK_SET)
        threads = str(spec.threads)
        base = {k: v for k, v in without_secret(os.environ).items() if k not in spec.unset}
        environment = {**base, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **spec.env}
        popen = subprocess.Popen(
            bootstrap("runtime.worker", memory),
            pass_fds=(memory,),
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{spec.name} rank {spec.rank}: cannot start {sys.executable}: {error}") from error
    finally:
        os.close(memory)
    process = Process(popen.pid)
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(popen.pid)

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)  # PR-2
        _, status, usage = os.wait4(popen.pid, 0)
        popen.returncode = os.waitstatus_to_exitcode(status)
        process.note_exit(Exit(status, usage.ru_maxrss * 1024))

    loop.add_reader(pidfd, on_exit)
    return process


def watch_foreign(pid: int) -> Process:
    """A process that somebody else started (a rank of torchrun): its end is seen, its status isn't."""
    process = Process(pid, leads_group=False)
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        process.note_exit(Exit(None))
        return process

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.note_exit(Exit(None))

    loop.add_reader(pidfd, on_exit)
    return process


def bootstrap(module: str, *arguments: object) -> list[str]:
    """Command line of an interpreter that runs `module.main` of this very package, wherever the current directory
    is."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    entry = "fresh_main" if module == "runtime.worker" else "main"
    code = f"import sys; sys.path.insert(0, {json.dumps(root)}); from {module} import {entry}; {entry}()"
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return [sys.executable, *flags, "-c", code, *map(str, arguments)]


async def wait_for_exit(popen: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a child by its pidfd; False when it has not ended in time."""
    if popen.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(popen.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    popen.wait()
    return True


def starts_fresh(env: Mapping[str, str]) -> bool:
    """Whether the environment must precede the imports, so that a fork would come too late."""
    return any(name.startswith(READ_AT_IMPORT) for name in env)


def default_preload() -> list[str]:
    """Modules for the fork server: of the usual heavy ones those that the controller has imported."""
    return [name for name in PRELOAD if name in sys.modules]


def death_of(record: Exit, sent: set[int], watch: OomWatch, stderr_tail: tuple[str, ...]) -> Death:
    """The exit record for messages, with evidence about memory."""
    if record.status is None:
        return Death(oom=watch.evidence(), stderr_tail=stderr_tail)
    code = os.waitstatus_to_exitcode(record.status)
    if code >= 0:
        return Death(exit_code=code, stderr_tail=stderr_tail, peak_memory=record.peak_memory)
    oom = ""
    if -code == signal.SIGKILL and signal.SIGKILL not in sent:
        oom = watch.evidence() or (
            "not sent by this job: an operator, or the kernel for lack of memory (look at its log)"
        )
    return Death(signal=-code, oom=oom, stderr_tail=stderr_tail, peak_memory=record.peak_memory)
