"""Hosts and meshes of processes: start, spawn actors, stop so that nothing is left.

    this_host() -> HostMesh --spawn_procs--> ProcMesh --spawn--> ActorMesh

HO-1: `spawn_procs` returns when every process answers. Either all ranks are there or an error is raised and those that
      had started are stopped again.
HO-2: leaving the host stops all its meshes, ends the fork server and removes the run directory, also when the block
      raised.
HO-3: failures that nobody has handled are raised on leaving the host, when the block itself did not raise.

What happens to a process between its start and its end: `keeper.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime import auth, codec
from runtime.auth import LOOPBACK, Tls
from runtime.directory import Directory, Ownership, open_directory
from runtime.errors import Death, Stopped
from runtime.frames import MAX_MESSAGE_BYTES
from runtime.keeper import Keeper, Rank
from runtime.logs import Capture, Sink, stderr_sink
from runtime.messages import Hello
from runtime.node import Node
from runtime.owned import RemoteOwner
from runtime.places import Environment, Places, Wanted
from runtime.posting import ActorRef
from runtime.process import (
    ForkServerClient,
    Start,
    default_preload,
    start_fresh,
    starts_fresh,
)
from runtime.procs import ProcMesh
from runtime.restart import Restart
from runtime.settings import HostSettings
from runtime.shape import Selector, Shape
from runtime.snapshot import collect, watch_standstill
from runtime.sockets import unix_address
from runtime.supervise import Owner, Supervisor
from runtime.tasks import TaskGroup
from runtime.waits import Report
from runtime.wire import Connection

CONTROLLER = "controller"
"""Name of the controller's socket in the run directory. It is there too when processes talk over TCP, for programs of
this host that look in from outside."""


class HostMesh:
    """This machine. Use as an async context manager: `async with this_host() as host`."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.name = socket.gethostname()
        self.node: Node
        self.directory: Directory
        self.run_directory: Path
        self._trust = settings.trust()
        self._log_directory = None if settings.log_dir is None else Path(settings.log_dir)
        self._supervisor = Supervisor(settings.owner)
        self._fork_server: ForkServerClient
        self._tasks = TaskGroup("host", on_error=self._on_internal_error)
        self._ranks: dict[str, Rank] = {}
        """By id of the process."""
        self._meshes: dict[str, ProcMesh] = {}
        self._owned: dict[str, Ownership] = {}
        """Owners of meshes that actors have started, by name of the mesh."""
        self._open = False

    def __repr__(self) -> str:
        return f"<HostMesh {self.name} {self.shape}>"

    @property
    def shape(self) -> Shape:
        """One host, by now."""
        return Shape({"host": 1})

    @property
    def refused(self) -> Mapping[str, int]:
        """Peers that the controller has dropped, by reason: unauthenticated, slow, malformed, oversized, crowd."""
        return self.node.refusals.count

    def slice(self, **selectors: Selector) -> HostMesh:
        """Some of the hosts, to spawn processes on; with one host, that one. Raises as `Shape.select`."""
        self.shape.select(**selectors)
        return self

    async def __aenter__(self) -> HostMesh:
        _allow_files()
        self.run_directory = Path(tempfile.mkdtemp(prefix="tutti-"))
        if len(str(self.run_directory)) > 80:  # a socket path has at most 107 bytes
            self.run_directory.rmdir()
            self.run_directory = Path(tempfile.mkdtemp(prefix="tutti-", dir="/tmp"))
        if self._log_directory is not None:
            self._log_directory.mkdir(parents=True, exist_ok=True)
        self._places = Places(self.settings, self._trust, self.name, self.run_directory)
        self.node = Node(self._places.address(CONTROLLER), self._trust, self.settings.max_message_bytes)
        try:
            self._begin()
        except BaseException:
            await self._tasks.close()
            self.node.close()
            shutil.rmtree(self.run_directory, ignore_errors=True)
            raise
        self._open = True
        return self

    def _begin(self) -> None:
        auth.write_secret(self.run_directory, self._trust.secret)
        node = self.node
        node.serve = self._serve
        local = unix_address(str(self.run_directory / CONTROLLER))
        node.listen(*([] if node.address == local else [local]))
        node.hello = Hello("controller", "controller", os.getpid(), 0, node.address, self.name)
        node.on_actors_stopped = self._on_actors_stopped
        codec.allow_pickle(self._trust.pickle)
        self.directory = open_directory(node, self)
        self._tasks.open()
        self._keeper = Keeper(node, self.run_directory, self._launch, self._tasks)
        self._open_launcher()
        if self.settings.standstill is not None:
            watching = watch_standstill(self.settings.standstill, node, node.peers.values, self.report)
            self._tasks.start(watching, name="watch for a standstill")

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
        restart: Restart | None = None,
        gpus: int | Sequence[Sequence[int]] = 0,
        pin: bool | None = None,
    ) -> ProcMesh:
        """Start a mesh of processes (HO-1).

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
            restart: how often a process that died is started again, with its actors (KE-3, KE-4). None: never.
            gpus: of each process, for itself until the mesh is stopped; or the indices of each, which may be shared.
                Its own are devices 0 .. n-1 there; those of the others stay visible behind them.
            pin: bind each process to cores / processes cores of its own. Default: when the number of processes is known
                (`this_host(processes=...)`), since a share can't be right otherwise.

        Raises:
            NotEnoughGpus: there are fewer GPUs, or fewer free ones.
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
        wanted = Wanted(name=name, size=len(extent), env=env, threads=threads, gpus=gpus, pin=pin, restart=restart)
        living = sum(not r.ended.is_set() for r in self._ranks.values())
        ranks = self._places.take(wanted, self.node.address, living)
        try:
            self._reserve(name, len(extent), start)
        except BaseException:
            for rank in ranks:
                self._places.give_back(rank)
            raise
        self._ranks.update({rank.id: rank for rank in ranks})
        mesh = ProcMesh(self, name, extent, ranks, Supervisor(owner, self._supervisor))
        self._meshes[name] = mesh
        try:
            await asyncio.gather(*[self._keeper.start(rank, mesh.supervisor, start) for rank in ranks])
        except BaseException:
            await self.stop_ranks(ranks, 0.0)
            raise
        return mesh

    # For actors that own processes (`owned.py`)

    async def spawn_owned(self, owner: Ownership, shape: dict[str, int], settings: dict[str, Any]) -> None:
        """Start processes that end with the actor that owns them (OW-1, OW-2)."""
        rank = next((r for r in self._ranks.values() if r.address == owner.address), None)
        if rank is None:
            raise Stopped(f"spawn_procs: the process of {owner.name} is gone")
        ended = rank.ended
        mesh = await self.spawn_procs(shape, owner=RemoteOwner(self.node, owner, rank.spec.host), **settings)
        self._owned[mesh.name] = owner

        async def end_with_owner() -> None:
            await ended.wait()
            if self._owned.get(mesh.name) is owner:
                await self.stop_named(mesh.name)

        self._tasks.start(end_with_owner(), name=f"{mesh.name} ends with {owner.name}")

    def procs_named(self, name: str) -> ProcMesh:
        """A living mesh of processes. Raises Stopped."""
        mesh = self._meshes.get(name)
        if mesh is None:
            raise Stopped(f"{name}: these processes were stopped")
        return mesh

    async def stop_named(self, name: str) -> None:
        """Stop a mesh of processes, if it lives."""
        self._owned.pop(name, None)
        if name in self._meshes:
            await self._meshes[name].stop()

    async def death_at(self, address: str) -> Death | None:
        """How the process at an address has ended; None when it isn't known within a second."""
        rank = next((rank for rank in self._ranks.values() if rank.address == address), None)
        if rank is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await rank.ended.wait()
        return rank.death

    def status(self) -> list[dict[str, Any]]:
        """As `ProcMesh.status`, for all meshes, with their names."""
        return [{"mesh": mesh.name, **row} for mesh in self._meshes.values() for row in mesh.status()]

    async def report(self) -> Report:
        """What every process does now: what runs and for how long, what waits and for whom. Calls that wait for each
        other in a circle are named in its `deadlocks`; as text it is meant for a person.
        """
        ranks = [rank for rank in self._ranks.values() if rank.peer is not None and not rank.ended.is_set()]
        return await collect(self.node, ranks)

    def _reserve(self, name: str, size: int, start: Start) -> None:
        """Refuse what this host has no room for."""

    async def watch(self) -> None:
        """As `ProcMesh.watch`, for all meshes of this host."""
        await self._supervisor.watch()

    async def stop(self) -> None:
        """Stop everything (HO-2). Stopping twice does nothing."""
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
            await self._close_launcher()
            shutil.rmtree(self.run_directory, ignore_errors=True)

    # Starting

    def _open_launcher(self) -> None:
        modules = default_preload() if self.settings.preload is None else self.settings.preload
        self._fork_server = ForkServerClient(str(self.run_directory), modules)

    async def _close_launcher(self) -> None:
        await self._fork_server.close()

    async def _launch(self, rank: Rank, start: Start) -> None:
        spec = rank.spec
        rank.capture = capture = Capture(spec.name, spec.rank, (self.settings.sink or stderr_sink), self._log_directory)
        try:
            if start == "fresh" or (start == "auto" and starts_fresh(spec.env)):
                rank.process = start_fresh(spec, capture.output)
                self._fork_server.guard(rank.process.pid)
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
        rank = self._ranks.get(message.process.partition(".")[0]) if isinstance(message, Hello) else None
        if rank is None or message.kind != "worker" or message.process != rank.spec.id:
            connection.close()
            return
        if rank.num_starts == 1:
            rank.address = message.address
        mesh = self._meshes[rank.spec.name]
        peer = self.node.adopt(connection, rank.address, self.name)
        self._keeper.connected(rank, peer, mesh.supervisor, functools.partial(mesh.reference, rank.address))

    def _on_actors_stopped(self, refs: Sequence[ActorRef]) -> None:
        keys = {ref.key for ref in refs}
        self.directory.stopped(keys)
        for mesh in self._meshes.values():
            mesh.forget(list(keys))
        for name, owner in list(self._owned.items()):
            if owner.key in keys:
                self._tasks.start(self.stop_named(name), name=f"stop {name}")

    def _on_internal_error(self, error: BaseException, task: str) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": f"{task} failed", "exception": error})

    # For meshes

    async def stop_ranks(self, ranks: Sequence[Rank], grace: float) -> None:
        """Stop processes."""
        await self._keeper.stop(ranks, grace)
        for rank in ranks:
            if self._ranks.pop(rank.id, None) is not None:
                self._places.give_back(rank)
        self._meshes = {k: m for k, m in self._meshes.items() if not all(r.ended.is_set() for r in m.ranks)}
        self._owned = {name: owner for name, owner in self._owned.items() if name in self._meshes}

    async def restart_ranks(self, ranks: Sequence[Rank], supervisor: Supervisor) -> None:
        """Start dead processes again; see `ProcMesh.restart`."""
        for rank in ranks:
            if rank.history is None:
                raise ValueError(
                    f"{rank.spec.name}: its actors aren't known. Spawn it with spawn_procs(restart=Restart(...))"
                )
        dead = [rank for rank in ranks if rank.ended.is_set() and not rank.stopping]
        await asyncio.gather(*[self._keeper.restart(rank, supervisor, "auto") for rank in dead])


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
    abort_after: float = 5.0,
    standstill: float | None = 300.0,
    log: Mapping[str, str] | None = None,
) -> HostMesh:
    """This machine, as a place for processes. Use it as an async context manager. `HostSettings` tells what each
    setting means, and what it raises.

    Every connection between its processes is proven by the secret of the job: that of `TUTTI_SECRET_FILE` or
    `TUTTI_SECRET`, or a fresh one.
    """
    settings = HostSettings(
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
        abort_after=abort_after,
        standstill=standstill,
        log=log or {},
    )
    return HostMesh(settings)


def _allow_files() -> None:
    """Each process costs the controller a few descriptors, and the usual limit is made for programs of one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
