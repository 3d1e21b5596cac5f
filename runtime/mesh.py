"""Hosts and meshes of processes: start, spawn actors, stop so that nothing is left.

    this_host() -> HostMesh --spawn_procs--> ProcMesh --spawn--> ActorMesh

ME-1: `spawn_procs` returns when every process answers; `spawn` when every constructor has returned. Either all ranks
      are there or an error is raised and those that had started are stopped again.
ME-2: a dead process is explained (signal or exit code, memory evidence, last lines) before its pending calls fail, and
      within `EXPLAIN_SECONDS`.
ME-3: `stop` lets async work and `__cleanup__` end within `grace` seconds; a process whose main thread is busy gets
      SIGTERM, then SIGKILL. After it no process, socket or file of the mesh is left.
ME-4: leaving the host stops all its meshes, ends the fork server and removes the run directory, also when the block
      raised.
ME-5: failures that nobody has handled are raised on leaving the host, when the block itself did not raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from runtime import auth, codec
from runtime.auth import LOOPBACK, Tls, Trust
from runtime.directory import Directory, open_directory
from runtime.errors import Death, ProcessDied, StartError, Stopped
from runtime.frames import MAX_MESSAGE_BYTES
from runtime.logs import Capture, Sink, stderr_sink
from runtime.messages import ActorFailed, Hello, ProcessSpec, Stop
from runtime.peer import Node, actor_error
from runtime.process import (
    ForkServerClient,
    death_of,
    default_preload,
    oom_kills,
    start_fresh,
    starts_fresh,
)
from runtime.procs import ProcMesh, Rank
from runtime.shape import Shape
from runtime.sockets import parse_address, unix_address
from runtime.supervise import Failure, Owner, Supervisor
from runtime.tasks import TaskGroup
from runtime.wire import Connection

START_SECONDS = 120.0
"""How long a process may take until it answers; imports of large libraries on a busy machine are the slow part."""
EXPLAIN_SECONDS = 0.4
"""How long the end of a connection waits for an exit status; a process that still lives then is killed."""
BUSY_SECONDS = 0.25
"""Between Stop, SIGTERM and SIGKILL for a process whose main thread is busy."""

Start = Literal["auto", "fork", "fresh"]
Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]


class HostMesh:
    """This machine. Use as an async context manager: `async with this_host() as host`."""

    def __init__(
        self,
        *,
        log_dir: str | Path | None = None,
        sink: Sink | None = None,
        preload: list[str] | None = None,
        processes: int | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        owner: Owner | None = None,
        listen: str | None = None,
        bind: Sequence[str] = LOOPBACK,
        tls: Tls | None = None,
        pickle: bool = True,
    ) -> None:
        self.name = socket.gethostname()
        self.node: Node
        self.directory: Directory
        self.run_directory: Path
        self._log_directory = None if log_dir is None else Path(log_dir)
        self._sink = sink or stderr_sink
        self._preload = preload
        self._expected = processes
        self._limit = max_message_bytes
        self._trust = Trust(
            secret=auth.secret_from(os.environ) or auth.new_secret(), tls=tls, bind=tuple(bind), pickle=pickle
        )
        self._listen = listen
        if listen is not None:
            self._trust.check_listen(parse_address(listen))
        self._supervisor = Supervisor(owner)
        self._fork_server: ForkServerClient
        self._tasks = TaskGroup("host", on_error=self._on_internal_error)
        self._ranks: dict[str, Rank] = {}
        """By id of the process."""
        self._meshes: dict[str, ProcMesh] = {}
        self._serial = itertools.count()
        self._open = False

    async def __aenter__(self) -> HostMesh:
        self.run_directory = Path(tempfile.mkdtemp(prefix="tutti-"))
        if len(str(self.run_directory)) > 80:  # a socket path has at most 107 bytes
            self.run_directory.rmdir()
            self.run_directory = Path(tempfile.mkdtemp(prefix="tutti-", dir="/tmp"))
        if self._log_directory is not None:
            self._log_directory.mkdir(parents=True, exist_ok=True)
        auth.write_secret(self.run_directory, self._trust.secret)
        self.node = node = Node(self._address("controller"), self._trust, self._limit)
        node.serve = self._serve
        try:
            node.listen()
        except BaseException:
            shutil.rmtree(self.run_directory)
            raise
        self.directory = open_directory(node, self.name)
        node.hello = Hello("controller", "controller", os.getpid(), 0, node.address, self.name)
        codec.allow_pickle(self._trust.pickle)
        self._tasks.open()
        modules = default_preload() if self._preload is None else self._preload
        self._fork_server = ForkServerClient(str(self.run_directory), modules)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if error is None:
            unhandled = self._supervisor.unhandled()
            if unhandled:
                first, *others = unhandled
                for other in others:
                    first.add_note(f"Then: {other}")
                raise first

    async def spawn_procs(
        self,
        shape: Mapping[str, int] | int = 1,
        *,
        name: str = "procs",
        env: Environment | None = None,
        threads: int | None = None,
        start: Start = "auto",
        owner: Owner | None = None,
    ) -> ProcMesh:
        """Start a mesh of processes (ME-1).

        Args:
            shape: sizes by dimension, such as `{"rank": 2}`; a number n means `{"rank": n}`.
            name: role in messages, logs and context; must not be taken by a living mesh.
            env: variables for all ranks, or a function of the rank that returns them.
            threads: of torch and OpenMP in each process. Default: cores / processes of this host.
            start: `fork` from the fork server (fast), `fresh` interpreter (the environment is complete before any
            import), or
                `auto`: fresh when `env` has a variable that libraries read at import (device visibility and such), else
                fork.
            owner: has a `__supervise__` that is told of failures first.

        Raises:
            StartError: a process could not be started or did not answer in time.
            ProcessDied: a process ended before it answered.
        """
        if not self._open:
            raise Stopped("spawn_procs: the host is not running. Call it inside 'async with this_host() as host'")
        extent = Shape({"rank": shape} if isinstance(shape, int) else shape)
        if name in self._meshes and any(not r.ended.is_set() for r in self._meshes[name].ranks):
            raise ValueError(f"spawn_procs: a mesh named {name!r} is running. Choose another name, or stop it first")
        if start not in ("auto", "fork", "fresh"):
            raise ValueError(f"spawn_procs({name!r}): expected start 'auto', 'fork' or 'fresh', got {start!r}")
        size = len(extent)
        if threads is None:
            living = sum(not r.ended.is_set() for r in self._ranks.values())
            threads = max(1, len(os.sched_getaffinity(0)) // max(living + size, self._expected or 0))
        serial = next(self._serial)
        ranks = [self._make_rank(name, rank, size, serial, _environment(env, rank), threads) for rank in range(size)]
        mesh = ProcMesh(self, name, extent, ranks, Supervisor(owner, self._supervisor))
        self._meshes[name] = mesh
        try:
            await asyncio.gather(*[self._start(mesh, rank, start) for rank in ranks])
        except BaseException:
            await self.stop_ranks(ranks, 0.0)
            raise
        return mesh

    async def watch(self) -> None:
        """As `ProcMesh.watch`, for all meshes of this host."""
        await self._supervisor.watch()

    async def stop(self) -> None:
        """Stop everything (ME-4). Stopping twice does nothing."""
        if not self._open:
            return
        self._open = False
        codec.allow_pickle(True)
        try:
            await self.stop_ranks(list(self._ranks.values()), 3.0)
        finally:
            for rank in self._ranks.values():
                if rank.process is not None:
                    rank.process.kill(signal.SIGKILL)
            await self._tasks.close()
            self.node.close()
            await self._fork_server.close()
            shutil.rmtree(self.run_directory, ignore_errors=True)

    # Starting

    def _make_rank(self, name: str, rank: int, size: int, serial: int, env: dict[str, str], threads: int) -> Rank:
        identity = f"{serial}-{rank}"
        spec = ProcessSpec(
            id=identity,
            name=name,
            rank=rank,
            size=size,
            controller=self.node.address,
            address=self._address(identity),
            host=self.name,
            trust=self._trust,
            env=env,
            threads=threads,
            sys_path=[os.path.abspath(p) for p in sys.path],
            working_directory=os.getcwd(),
            max_message_bytes=self._limit,
            parent=os.getpid(),
        )
        entry = self._ranks[identity] = Rank(spec, None)
        return entry

    def _address(self, identity: str) -> str:
        """Where a process of this job listens: a socket in the run directory, or a TCP port that the kernel chooses."""
        if self._listen is None:
            return unix_address(str(self.run_directory / identity))
        return str(parse_address(self._listen)._replace(port=0, path=self.run_directory.name))

    async def _start(self, mesh: ProcMesh, rank: Rank, start: Start) -> None:
        spec = rank.spec
        await self._launch(rank, start)
        self._tasks.start(self._observe(mesh, rank, oom_kills()), name=f"observe {spec.name} {spec.rank}")
        ended = asyncio.ensure_future(rank.ended.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                await first_of(rank.ready, ended)
        except TimeoutError:
            raise StartError(
                f"{spec.name} rank {spec.rank}: did not answer within {START_SECONDS} s of its start"
            ) from None
        finally:
            ended.cancel()
        if not rank.ready.done():
            raise ProcessDied(spec.name, spec.rank, spec.host, "start", rank.death or Death())

    async def _launch(self, rank: Rank, start: Start) -> None:
        spec = rank.spec
        rank.capture = capture = Capture(spec.name, spec.rank, self._sink, self._log_directory)
        try:
            if start == "fresh" or (start == "auto" and starts_fresh(spec.env)):
                rank.process = start_fresh(spec, capture.output)
            else:
                rank.process = await self._fork_server.fork(spec, capture.output)
        except BaseException:
            rank.ended.set()
            capture.close()
            raise
        capture.started()
        if rank.stopping:
            rank.process.kill(signal.SIGKILL)

    def _serve(self, connection: Connection, message: Any, payload: Any) -> None:
        """The first message of a worker, or of one that calls what lives in the controller."""
        if isinstance(message, Hello) and message.kind in ("peer", "controller"):
            return
        if not isinstance(message, Hello) or message.kind != "worker" or message.process not in self._ranks:
            connection.close()
            return
        rank = self._ranks[message.process]
        rank.address = message.address
        rank.peer = peer = self.node.adopt(connection, message.address, self.name)
        peer.on_lost = rank.lost.set
        peer.on_stopping = lambda busy: rank.busy.set() if busy else None
        mesh = self._meshes[rank.spec.name]
        peer.on_actor_failed = lambda failed: self._on_actor_failed(mesh, message.address, failed)
        peer.on_death_seen = lambda: mesh.supervisor.seen(rank.death)
        if not rank.ready.done():
            rank.ready.set_result(peer)

    # Failing

    async def _observe(self, mesh: ProcMesh, rank: Rank, oom_before: int) -> None:
        """Wait for the end of a process and explain it (ME-2)."""
        process = rank.process
        assert process is not None
        lost = asyncio.ensure_future(rank.lost.wait())
        await first_of(process.exited, lost)
        lost.cancel()
        if not process.exited.done() and not rank.stopping:
            await asyncio.wait([process.exited], timeout=EXPLAIN_SECONDS)
            process.kill(signal.SIGKILL)  # it has closed its connection but lives: it can't be used any more
        record = await process.exited
        tail: tuple[str, ...] = ()
        if rank.capture is not None:
            # What it started may still hold the pipes: wait only for what lies in them.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await rank.capture.ended.wait()
            rank.capture.close()
            tail = tuple(rank.capture.tail)
        rank.death = death = death_of(record, process.signals, oom_before, tail)
        peer = rank.peer
        if rank.stopping:
            if peer is not None:
                peer.stop()
        else:
            waited_for = peer is not None and any(not p.future.done() for p in peer.pending.values())
            if peer is not None:
                peer.died(death)
            if rank.ready.done():
                error = ProcessDied(mesh.name, rank.spec.rank, rank.spec.host, "", death)
                await mesh.supervisor.report(Failure(mesh.name, error), handled=waited_for)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.run_directory / rank.spec.id)
        rank.ended.set()

    def _on_actor_failed(self, mesh: ProcMesh, address: str, failed: ActorFailed) -> None:
        error = actor_error(failed.error, mesh.reference(address, failed.actor), failed.endpoint)
        self._tasks.start(mesh.supervisor.report(Failure(mesh.name, error)), name="report")

    def _on_internal_error(self, error: BaseException, task: str) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": f"{task} failed", "exception": error})

    # Stopping

    async def stop_ranks(self, ranks: Sequence[Rank], grace: float) -> None:
        """Stop processes (ME-3); for their mesh."""
        results = await asyncio.gather(*[self._stop_rank(rank, grace) for rank in ranks], return_exceptions=True)
        for rank in ranks:
            self._ranks.pop(rank.spec.id, None)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _stop_rank(self, rank: Rank, grace: float) -> None:
        if rank.ended.is_set():
            return
        rank.stopping = True
        process = rank.process
        if process is None:  # not started yet; `_launch` will see that it is no longer wanted
            rank.ended.set()
            return
        if rank.peer is None:
            process.kill(signal.SIGKILL)
        else:
            rank.peer.connection.send(Stop(grace))
            busy = asyncio.ensure_future(rank.busy.wait())
            await first_of(busy, process.exited, timeout=grace + 1)
            busy.cancel()
            for number in (signal.SIGTERM, signal.SIGKILL):
                if not process.exited.done():
                    await asyncio.wait([process.exited], timeout=BUSY_SECONDS)
                    process.kill(number)
        await rank.ended.wait()


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of them is done, for at most `timeout` seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def this_host(
    log_dir: str | Path | None = None,
    *,
    sink: Sink | None = None,
    preload: list[str] | None = None,
    processes: int | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    owner: Owner | None = None,
    listen: str | None = None,
    bind: Sequence[str] = LOOPBACK,
    tls: Tls | None = None,
    pickle: bool = True,
) -> HostMesh:
    """This machine, as a place for processes. Use it as an async context manager.

    Args:
        log_dir: folder for one log file a rank; None keeps none.
        sink: gets each line that a worker prints, with its prefix. Default: stderr.
        preload: modules that the fork server imports once, in the background. Default: those of numpy, torch and
        transformers
            that this process has imported.
        processes: how many processes will run here in all, for the default of their threads. Default: those that run.
        max_message_bytes: limit of one message; a larger one raises Oversize at the sender.
        owner: has a `__supervise__` that is told of failures which the owners of meshes did not handle.
        listen: `tcp://ADDRESS:0` lets its processes talk over TCP, which also reaches other hosts. Default: Unix
        sockets.
        bind: networks to which they may bind TCP sockets; nothing beyond this machine unless it stands here.
        tls: certificates for TCP.
        pickle: whether values without a type that msgspec knows may cross, as pickles. They run code on arrival.

    Every connection is proven by the secret of the job: `TUTTI_SECRET_FILE` or `TUTTI_SECRET`, or a fresh one.

    Raises:
        ValueError: the listen address isn't allowed, or the secret is too short.
        OSError: the secret or a certificate can't be read.
    """
    return HostMesh(
        log_dir=log_dir,
        sink=sink,
        preload=preload,
        processes=processes,
        max_message_bytes=max_message_bytes,
        owner=owner,
        listen=listen,
        bind=bind,
        tls=tls,
        pickle=pickle,
    )


def _environment(env: Environment | None, rank: int) -> dict[str, str]:
    chosen = env(rank) if callable(env) else env or {}
    for key, value in chosen.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"env of rank {rank}: expected text for {key!r}, got {value!r}. Write str(value)")
    return dict(chosen)
