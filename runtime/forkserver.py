"""A small process that has imported what workers need and forks them in milliseconds. `python -m runtime.forkserver`.

    controller --socketpair--> fork server --fork--> worker, worker, ...

FS-1: it has one thread whenever it forks: its modules are imported with all thread pools of size one.
FS-2: it reports the exit status and peak memory of each worker at once, after having killed what is left of its process
      group.
FS-3: when the controller ends, for whatever reason, it kills all workers, removes the run directory and exits. While it
      imports it learns of that by signal.
FS-4: what a fresh worker has started ends with it, also when the controller, its parent, has ended: the kernel kills
      the worker then, but not the group of it. The group is told by a descriptor of the worker: its number may be
      another's by then.

Assumed: nothing here touches a GPU, so that workers may.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

import msgspec

from runtime import worker

WHEN_IDLE = ("runtime.mesh", "runtime.channels", "runtime.blocking_calls", "runtime.owned", "numpy.random")
"""What `from runtime import ...` in the modules of actors brings, and what they often use: imported once here while
nobody asks for a process, rather than by each worker. Of packages that were not imported nothing is."""

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that keep libraries from starting threads at import (FS-1)."""

MAX_REQUEST = 128 * 1024

PIDFD_SIGNAL_PROCESS_GROUP = 4
"""Of linux/pidfd.h."""


class Fork(msgspec.Struct, tag=True):
    """Request, with the write ends of stdout and stderr: start a worker. Answered by `Forked`."""

    number: int
    spec: bytes


class Fresh(msgspec.Struct, tag=True):
    """Request, with a descriptor of the process: a fresh worker, the controller's child, leads a group (FS-4). Not
    answered."""

    pid: int


class Forked(msgspec.Struct, tag=True):
    number: int
    pid: int
    """0 when the fork failed."""
    error: str = ""


class Exited(msgspec.Struct, tag=True):
    pid: int
    status: int
    """As of `os.waitpid`."""
    peak_memory: int
    """Bytes."""


class Ready(msgspec.Struct, tag=True):
    """All modules are imported. `missing` tells which could not be."""

    missing: dict[str, str]
    threads: int


Answer = Forked | Exited | Ready
Request = Fork | Fresh
_read_request = msgspec.msgpack.Decoder(Request).decode


class ForkServer:
    """The loop of the process."""

    def __init__(self, control: socket.socket, run_directory: str) -> None:
        self._control = control
        self._run_directory = run_directory
        self._children: set[int] = set()
        self._fresh: dict[int, int] = {}
        """By descriptor that tells of its end: the process id of a fresh worker."""
        self._poll = select.poll()

    def preload(self, modules: list[str]) -> None:
        """Import modules with pools of size one (FS-1), then say Ready."""
        missing: dict[str, str] = {}
        added = [name for name in POOLS if name not in os.environ]
        os.environ.update(dict.fromkeys(added, "1"))
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a module may fail in any way; workers that need it will say so themselves
                missing[name] = f"{type(error).__name__}: {error}"
        for name in added:
            del os.environ[name]
        worker.warm_up()
        gc.collect()
        gc.freeze()
        self._send(Ready(missing, len(os.listdir("/proc/self/task"))))

    def run(self) -> NoReturn:
        """Serve until the controller is gone."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(wake_read, select.POLLIN)
        when_idle = [name for name in reversed(WHEN_IDLE) if name.partition(".")[0] in sys.modules]
        while True:
            events = self._poll.poll(0 if when_idle else None)
            if not events:
                importlib.import_module(when_idle.pop())
                gc.freeze()
            for descriptor, _ in events:
                if descriptor == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                elif descriptor in self._fresh:
                    self._fresh_ended(descriptor)
                else:
                    self._serve((wake_read, wake_write))

    def _serve(self, close_in_child: tuple[int, ...]) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 2)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.end()
        request = _read_request(data)
        if isinstance(request, Fresh):
            (descriptor,) = descriptors
            self._fresh[descriptor] = request.pid
            self._poll.register(descriptor, select.POLLIN)
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(Forked(request.number, 0, f"fork failed: {error}"))
        else:
            if pid == 0:
                close = (*close_in_child, self._control.fileno(), *self._fresh)
                become_worker(request.spec, descriptors, close, parent)
            self._children.add(pid)
            self._send(Forked(request.number, pid))
        for descriptor in descriptors:
            os.close(descriptor)

    def _reap(self) -> None:
        for pid in list(self._children):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is None:
                continue
            _kill_group(pid)  # the dead process still holds its id, so the group can't be anybody else's
            _, status, usage = os.wait4(pid, 0)
            self._children.discard(pid)
            self._send(Exited(pid, status, usage.ru_maxrss * 1024))

    def _fresh_ended(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        _kill_group_of(descriptor, self._fresh.pop(descriptor))
        os.close(descriptor)

    def _send(self, answer: Answer) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(answer))
        except OSError:
            self.end()

    def end(self) -> NoReturn:
        """The controller is gone (FS-3)."""
        self._hear_the_rest()
        for pid in self._children:
            _kill_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for descriptor, pid in self._fresh.items():
            _kill_group_of(descriptor, pid)
        # Some aren't children of ours, and may still create a file while they end.
        deadline = time.monotonic() + 2
        shutil.rmtree(self._run_directory, ignore_errors=True)
        while os.path.exists(self._run_directory) and time.monotonic() < deadline:
            time.sleep(0.02)
            shutil.rmtree(self._run_directory, ignore_errors=True)
        os._exit(0)

    def _hear_the_rest(self) -> None:
        """Of fresh workers that were told while this process imported. They may be gone, unlike their groups."""
        self._control.setblocking(False)  # `recv_fds` of Python 3.11 forgets the flags that it is given
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 2)
                if not data:
                    return
                request = _read_request(data)
                if isinstance(request, Fresh):
                    _kill_group_of(descriptors[0], request.pid)


def _kill_group_of(descriptor: int, pid: int) -> None:
    """Kill the group of a leader that has ended, perhaps long ago."""
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)
    except (ProcessLookupError, PermissionError):
        return
    except OSError:  # Linux 6.9 is the first that knows it
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def become_worker(spec: bytes, output: list[int], close: tuple[int, ...], parent: int) -> NoReturn:
    """In the forked child: turn into a worker."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for target, descriptor in zip((1, 2), output, strict=True):
            os.dup2(descriptor, target)
        for descriptor in {*output, *close} - {0, 1, 2}:
            os.close(descriptor)
        worker.die_with_parent(parent)
        worker.main(worker.read_spec(spec))
    except BaseException:  # nothing may return into the loop of the fork server
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(70)


def main() -> NoReturn:
    """Arguments: descriptor of the control socket, run directory, process id of the controller, modules to import."""
    descriptor, run_directory, parent, *modules = sys.argv[1:]
    server = ForkServer(socket.socket(fileno=int(descriptor)), run_directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    worker.end_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        server.end()
    server.preload(modules)
    server.run()


if __name__ == "__main__":
    main()
