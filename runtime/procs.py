"""A mesh of processes: spawn actors on it, slice it, watch it, stop it. `mesh.py` starts them.

PM-1: `spawn` returns when every constructor has returned; a constructor's error raises there, and the processes stay
      usable.
PM-2: a slice shares the processes of its mesh; stopping it stops its ranks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from runtime.actor import Actor
from runtime.agent import pack_actor
from runtime.calls import ActorMesh, agent_interface
from runtime.directory import Directory
from runtime.errors import ActorError, ConnectionRefused, DeadlineExceeded, ProcessDied, Stopped
from runtime.interface import Interface
from runtime.keeper import Made, Rank
from runtime.node import Node
from runtime.posting import AGENT, ActorRef
from runtime.shape import Selector, Shape, ValueMesh
from runtime.supervise import Supervisor

_actors = itertools.count(1)


class Host(Protocol):
    """What a mesh needs of the host that started it."""

    name: str
    node: Node
    directory: Directory
    run_directory: Path

    async def stop_ranks(self, ranks: Sequence[Rank], grace: float) -> None:
        """Stop processes so that nothing of them is left."""

    async def restart_ranks(self, ranks: Sequence[Rank], supervisor: Supervisor) -> None:
        """Start dead processes again, with their actors."""


class ProcMesh:
    """Processes of one role, by rank."""

    def __init__(self, host: Host, name: str, shape: Shape, ranks: list[Rank], supervisor: Supervisor) -> None:
        self.name = name
        self.shape = shape
        self._host = host
        self._ranks = ranks
        self._supervisor = supervisor
        self._actor_refs: dict[str, ActorRef] = {}
        """By key, of the actors that live on these processes."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return f"<ProcMesh {self.name} {self.shape}>"

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Its processes; for the host."""
        return tuple(self._ranks)

    @property
    def supervisor(self) -> Supervisor:
        """Takes its failures."""
        return self._supervisor

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    def slice(self, **selectors: Selector) -> ProcMesh:
        """A part of the mesh. It shares the processes: stopping it stops these ranks only."""
        shape, ranks = self.shape.select(**selectors)
        part = ProcMesh(self._host, self.name, shape, [self._ranks[r] for r in ranks], self._supervisor)
        part._actor_refs = self._actor_refs
        return part

    async def spawn(self, name: str, actor: type[Actor], *args: Any, **kwargs: Any) -> ActorMesh:
        """Construct one actor on each process (PM-1), on its main thread.

        Args:
            name: of the mesh of actors, in messages and logs; must not be taken by a living one of this mesh of
            processes.
            actor: class. One that other processes can't import (of `__main__`, or local) is sent by value.

        Raises:
            ActorError: a constructor raised; also an instance of what it raised.
            TypeError: not an Actor class, or an argument that can't be sent.
            ProcessDied, Stopped: a process is gone.
        """
        if not (isinstance(actor, type) and issubclass(actor, Actor)):
            raise TypeError(f"{self.name}.spawn({name!r}): expected a subclass of Actor, got {actor!r}")
        interface = Interface.of(actor)
        return await self.spawn_made(name, interface, pack_actor(actor, interface, args, kwargs))

    async def spawn_made(self, name: str, interface: Interface, made: bytes) -> ActorMesh:
        """As `spawn`, with what `agent.pack_actor` made."""
        number = next(_actors)
        refs = [ActorRef(r.address, f"{name}#{number}.{i}", name, i, r.spec.host) for i, r in enumerate(self._ranks)]
        makings = [Made(ref.key, name, ref.rank, len(refs), made) for ref in refs]
        for rank in self._ranks:
            await rank.revived()
        self._actor_refs.update({ref.key: ref for ref in refs})
        for rank, making in zip(self._ranks, makings, strict=True):
            if rank.history is not None:  # now: a process may die, and come back, before all constructors have returned
                rank.actors[making.key] = making
        try:
            await self._agents(name).make.scatter([msgspec.structs.astuple(making) for making in makings])
        except BaseException as error:
            await self._remove(refs)
            if isinstance(error, ActorError) and error.endpoint == "make":
                error.endpoint = "__init__"
            raise
        mesh = ActorMesh(name, self.shape, refs, interface, self._host.node)
        self._host.directory.add(self.name, mesh)
        return mesh

    async def _remove(self, refs: Sequence[ActorRef]) -> None:
        """Have actors removed whose mesh did not come to be, without waiting for it."""
        self.forget([ref.key for ref in refs])
        agents = self._agents(self.name)
        for index, ref in enumerate(refs):
            with contextlib.suppress(ActorError, Stopped, ConnectionRefused):  # that process is gone
                await self._one(agents, index).remove.broadcast(ref.key)

    def _one(self, mesh: ActorMesh, index: int) -> ActorMesh:
        return ActorMesh(mesh.name, Shape({"rank": 1}), [mesh.refs[index]], mesh.interface, self._host.node)

    async def run(self, function: Callable[..., Any], *args: Any) -> ValueMesh[Any]:
        """Run a function on the main thread of every process; the results by rank. Raises as `EndpointHandle.call`."""
        return await self._agents(self.name).run.call(function, args)

    async def init_process_group(self, backend: str = "gloo", *, timeout: float = 300.0) -> None:
        """Make the default torch.distributed group of these processes; no other mesh sees it.

        Args:
            backend: `gloo`, `nccl`, or what torch knows.
            timeout: seconds for this and, as torch's default, for each later collective.
        """
        store = str(self._host.run_directory / f"group-{next(_actors)}")
        size = len(self._ranks)
        await self._agents(self.name).init_process_group.scatter(
            [(backend, store, rank, size, timeout) for rank in range(size)]
        )

    async def abort(self, *, grace: float = 10.0) -> list[int]:
        """Free ranks that wait in a collective for others that will not come: their endpoints raise. Make new groups
        with `init_process_group` before the next collective.

        A call in which a rank fails does this by itself for the others (`this_host(abort_after=...)`).

        Args:
            grace: seconds for the main threads to become free. Processes whose aren't by then are killed; a restart
                policy brings them back.

        Returns:
            The ranks that were killed.
        """
        agents = self._agents(self.name)

        async def free(index: int) -> bool:
            agent = self._one(agents, index)
            try:
                await agent.abort.options(timeout=grace).call_one()
                await agent.run.options(timeout=grace).call_one(int, ())
            except DeadlineExceeded:
                return False
            except (ProcessDied, Stopped):
                return True
            return True

        freed = await asyncio.gather(*[free(index) for index in range(len(self._ranks))])
        stuck = [index for index, ok in enumerate(freed) if not ok]
        for index in stuck:
            process = self._ranks[index].process
            if process is not None:
                process.kill(signal.SIGKILL)
        return stuck

    async def watch(self) -> None:
        """Never returns: raises the first failure that these processes have. Put it into a task group.

        Raises:
            ProcessDied: a process ended that was not stopped.
            ActorError: a background task of an actor, or an endpoint called by `broadcast`, raised.
        """
        await self._supervisor.watch()

    def status(self) -> list[dict[str, Any]]:
        """For each rank: pid, whether it is alive, number of restarts, age of its last heartbeat (s), and what that
        said: what runs on its main thread and for how long (s), by how much its event loop is late (s), messages and
        bytes in the mailboxes of its actors."""
        now = asyncio.get_running_loop().time()
        rows = []
        for index, rank in enumerate(self._ranks):
            beat = rank.peer.beat if rank.peer is not None else None
            rows.append(
                {
                    "rank": index,
                    "pid": rank.process.pid if rank.process is not None else None,
                    "alive": not rank.ended.is_set(),
                    "restarts": rank.num_starts - 1,
                    "heartbeat_age": None if beat is None or rank.peer is None else now - rank.peer.beat_at,
                    "running": "" if beat is None else beat.running,
                    "running_seconds": 0.0 if beat is None else beat.seconds,
                    "loop_lag": 0.0 if beat is None else beat.lag,
                    "mailbox_messages": 0 if beat is None else beat.queued,
                    "mailbox_bytes": 0 if beat is None else beat.queued_bytes,
                }
            )
        return rows

    async def restart(self) -> None:
        """Start those processes again that have died, with their actors; the others aren't touched. For owners that
        handle deaths themselves; a policy (`spawn_procs(restart=...)`) needs no help.

        Raises:
            StartError, ProcessDied: one could not be started.
            ActorError: a constructor raised.
            ValueError: the mesh was spawned without a policy, so that its actors aren't known.
        """
        await self._host.restart_ranks(self._ranks, self._supervisor)

    async def stop(self, *, grace: float = 3.0) -> None:
        """Stop the processes (KE-2). Pending and later calls raise Stopped. Stopping twice does nothing.

        Args:
            grace: seconds for `__cleanup__` and for async endpoints to handle their cancellation.
        """
        await self._host.stop_ranks(self._ranks, grace)

    async def __aenter__(self) -> ProcMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _agents(self, name: str) -> ActorMesh:
        refs = [ActorRef(r.address, AGENT, name, i, r.spec.host) for i, r in enumerate(self._ranks)]
        return ActorMesh(name, self.shape, refs, agent_interface(), self._host.node)

    def reference(self, address: str, key: str) -> ActorRef:
        """The actor of a key; for the host."""
        return self._actor_refs.get(key) or ActorRef(address, key, key.partition("#")[0], 0, self._host.name)

    def forget(self, keys: Sequence[str]) -> None:
        """These actors were stopped; for the host."""
        for key in keys:
            self._actor_refs.pop(key, None)
            for rank in self._ranks:
                rank.actors.pop(key, None)
