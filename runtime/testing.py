"""Tests of code that uses actors: the same meshes and calls without processes, and faults on demand.

    async with local_host() as host:                      # instead of this_host()
        procs = await host.spawn_procs(2, name="workers")
        workers = await procs.spawn("worker", Worker)

TE-1: what `local_host` starts are no processes, but each has its own main thread, serial lanes and connections:
      arguments cross them encoded, with the same checks, bounds, errors, order and cancels as between processes.
TE-2: what only a process can have is shared with the test: memory of modules, environment, signals, standard output.
      `env`, `threads`, `gpus` and logs are ignored.
TE-3: `kill`, `drop_connection` and `delayed` do to processes, real or local, what operators and networks do. The job
      meets the fault as it would meet a real one. A killed local process can't take a running sync endpoint along: it
      is told to stop and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from runtime.keeper import Rank
from runtime.mesh import HostMesh
from runtime.messages import ProcessSpec
from runtime.process import Exit, Process, Start
from runtime.procs import ProcMesh
from runtime.settings import HostSettings
from runtime.worker import MainThread, Worker


def local_host(**settings: Any) -> HostMesh:
    """A host for tests, whose processes live in this one (TE-1, TE-2). Use it as an async context manager.

    Args:
        settings: as of `this_host`.
    """
    return _LocalHost(HostSettings(**settings))


def kill(procs: ProcMesh, number: int = signal.SIGKILL) -> None:
    """Kill these processes, as somebody else would: `kill(procs.slice(rank=1))`."""
    for rank in procs.ranks:
        if isinstance(rank.process, _LocalProcess):
            rank.process.kill(number)
        elif rank.process is not None and not rank.process.exited.done():
            os.kill(rank.process.pid, number)


def drop_connection(procs: ProcMesh) -> None:
    """Break the connections between the controller and these processes, which live on: what a network may do."""
    for rank in procs.ranks:
        if rank.peer is not None:
            rank.peer.connection.drop()


@contextlib.contextmanager
def delayed(procs: ProcMesh, seconds: float) -> Iterator[None]:
    """Within the block, what these processes send reaches the controller so much later, in the same order."""
    delays = []
    for rank in procs.ranks:
        if rank.peer is not None:
            connection = rank.peer.connection
            delay = connection.on_message
            if not isinstance(delay, _Delay):
                delay = connection.on_message = _Delay(delay)
            delays.append(delay)
    for delay in delays:
        delay.seconds = seconds
    try:
        yield
    finally:
        for delay in delays:
            delay.seconds = 0.0


class _Delay:
    """Delivers messages later, and never one before another that came first."""

    def __init__(self, deliver: Callable[..., None]) -> None:
        self.seconds = 0.0
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._last_due = 0.0

    def __call__(self, *message: Any) -> None:
        now = self._loop.time()
        due = now + self.seconds
        if due <= now and self._last_due <= now:
            self._deliver(*message)
            return
        self._last_due = max(due, self._last_due + 1e-6)
        self._loop.call_at(self._last_due, self._deliver, *message)


class _LocalProcess(Process):
    """What `keeper.Rank` takes for a process."""

    def __init__(self, spec: ProcessSpec) -> None:
        super().__init__(os.getpid())
        self._main = MainThread()
        self._worker = _LocalWorker(spec, self._main, self._end)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"{spec.name} {spec.rank}")
        loop = asyncio.get_running_loop()
        name = f"main thread of {spec.name} {spec.rank}"
        threading.Thread(target=self._main.run, args=(loop,), name=name, daemon=True).start()

    def kill(self, number: int) -> None:
        """Kill it, and nothing else of this process."""
        if not self.exited.done():
            self.signals.add(number)
            self._end(number)

    async def _run(self) -> None:
        await self._worker.run()
        self._end(0)

    def _end(self, status: int) -> None:
        if self.exited.done():
            return
        self.exited.set_result(Exit(status))
        self._main.jobs.put(None)
        if status:
            self._task.cancel()
            self._worker.vanish()


class _LocalWorker(Worker):
    """A worker that does not own its process."""

    def __init__(self, spec: ProcessSpec, main: MainThread, end: Callable[[int], None]) -> None:
        super().__init__(spec, main, own_process=False)
        self._end = end

    def end_at_once(self, number: int | None = None) -> None:
        self._end(number if number is not None else 1 << 8)


class _LocalHost(HostMesh):
    """A host that starts no process."""

    def _open_launcher(self) -> None:
        return

    async def _close_launcher(self) -> None:
        return

    async def _launch(self, rank: Rank, start: Start) -> None:
        rank.process = _LocalProcess(rank.spec)
