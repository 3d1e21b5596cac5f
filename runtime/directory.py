"""Named actors: what was spawned under which name, known to the controller and asked from anywhere.

NA-1: a name finds the living actors that were spawned last under it on one mesh of processes. Two meshes of processes
      may use one name: then `processes/name` says which.
NA-2: stopped actors, and those all of whose processes have ended, are not found. A name can be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from runtime import codec
from runtime.actor import Actor, CancelToken, Context, endpoint
from runtime.calls import ActorMesh
from runtime.cell import Cell
from runtime.errors import ActorError, Death, UnknownActor
from runtime.interface import Interface, unpack_interface
from runtime.messages import ActorFailed
from runtime.node import Node, current_node
from runtime.posting import ActorRef
from runtime.records import class_named
from runtime.shape import Shape

DIRECTORY = "directory"
"""Its key in the controller."""


class Ownership(msgspec.Struct, frozen=True):
    """The actor that owns processes."""

    address: str
    key: str
    name: str
    rank: int


class Spawner(Protocol):
    """What the directory needs of a mesh of processes."""

    async def spawn_made(self, name: str, interface: Interface, made: bytes) -> ActorMesh:
        """Make actors of what `agent.pack_actor` made."""


class Host(Protocol):
    """What the directory needs of the host."""

    name: str
    node: Node

    async def spawn_owned(self, owner: Ownership, shape: dict[str, int], settings: dict[str, Any]) -> None:
        """Start processes that end with their owner."""

    def procs_named(self, name: str) -> Spawner:
        """A living mesh of processes."""

    async def stop_named(self, name: str) -> None:
        """Stop a mesh of processes, if it lives."""

    def status(self) -> list[dict[str, Any]]:
        """Of all its processes."""

    async def death_at(self, address: str) -> Death | None:
        """How the process at an address has ended; None when it isn't known."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process of a job, as its last heartbeat said."""

    mesh: str
    rank: int
    pid: int | None
    alive: bool
    restarts: int
    heartbeat_age: float | None
    """Seconds; None before the first one."""
    running: str
    """The endpoint on its main thread, empty when idle."""
    running_seconds: float
    loop_lag: float
    """Seconds by which its event loop is late."""
    mailbox_messages: int
    mailbox_bytes: int


class Directory(Actor):
    """The names of a job, and what others may ask about it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._meshes: dict[str, ActorMesh] = {}
        """By `processes/name`."""
        self._living: dict[str, set[str]] = {}
        """Keys of their actors that were not stopped."""

    def add(self, procs: str, mesh: ActorMesh) -> None:
        """Actors were spawned."""
        full = f"{procs}/{mesh.name}"
        self._meshes[full], self._living[full] = mesh, {ref.key for ref in mesh.refs}

    def stopped(self, keys: set[str]) -> None:
        """Actors were stopped: also when their process is started again they are not there (NA-2)."""
        for full, living in list(self._living.items()):
            living -= keys
            if not living:
                del self._meshes[full], self._living[full]

    @endpoint(concurrency=64)
    async def find(self, name: str) -> ActorMesh:
        """The actors of a name (NA-1). Raises UnknownActor."""
        found = [full for full, mesh in self._meshes.items() if name in (full, mesh.name) and mesh.is_alive()]
        if len(found) == 1:
            return self._meshes[found[0]]
        known = ", ".join(full for full, mesh in self._meshes.items() if mesh.is_alive()) or "none"
        if found:
            raise UnknownActor(f"lookup({name!r}): {len(found)} meshes have this name: say {' or '.join(found)}")
        raise UnknownActor(f"lookup({name!r}): no living actors of this name; there are {known}")

    @endpoint(concurrency=64)
    async def status(self) -> list[ProcessStatus]:
        """All processes, for whoever looks in (`top.py`)."""
        return [msgspec.convert(row, ProcessStatus) for row in self._host.status()]

    @endpoint(concurrency=64)
    async def death_at(self, address: str) -> Death | None:
        """How a process has ended, for others that called it."""
        return await self._host.death_at(address)

    @endpoint(concurrency=64)
    async def forget(self, refs: list[ActorRef]) -> None:
        """Another process has stopped these actors."""
        self._host.node.forget_actors(refs)

    @endpoint(concurrency=64)
    async def spawn_procs(self, owner: Ownership, shape: dict[str, int], settings: dict[str, Any]) -> None:
        """Start processes for an actor that owns them (`owned.py`)."""
        await self._host.spawn_owned(owner, shape, settings)

    @endpoint(concurrency=64)
    async def spawn_actors(self, procs: str, name: str, interface: bytes, made: bytes) -> ActorMesh:
        """Make actors on processes of an owner. Raises as `ProcMesh.spawn`."""
        known = (
            unpack_interface(interface) if codec.pickle_is_allowed() else Interface.of(class_named(interface.decode()))
        )
        return await self._host.procs_named(procs).spawn_made(name, known, made)

    @endpoint(concurrency=64)
    async def stop_procs(self, procs: str) -> None:
        """Stop processes of an owner; nothing when they are stopped."""
        await self._host.stop_named(procs)


class _Controller:
    """The process around the actors that live in the controller."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run_on_main(self, job: Callable[[], object], label: str, done: Callable[[Any], None] | None) -> None:
        raise RuntimeError(f"{label}: the controller has no main thread for endpoints; make it async")

    def peer_failed(self, token: CancelToken) -> None:
        """There are no collectives here."""

    def report(self, failure: ActorFailed) -> None:
        raise RuntimeError(f"{failure.actor}.{failure.endpoint} failed in the controller: {failure.error.text}")


def open_directory(node: Node, host: Host) -> Directory:
    """Let a controller have one."""
    directory = Directory(host)
    place = Context(rank=0, size=1, proc_name="controller", actor_name=DIRECTORY, host=host.name, node=node)
    cell = Cell(_Controller(node.limit), DIRECTORY, directory, Interface.of(Directory), place)
    node.serving.add(DIRECTORY, cell)
    return directory


def directory_of(node: Node) -> ActorMesh:
    """The directory of the job of a node."""
    ref = ActorRef(node.controller, DIRECTORY, "controller", 0, "")
    return ActorMesh("controller", Shape({}), [ref], Interface.of(Directory), node)


async def death_at(node: Node, address: str) -> Death | None:
    """Ask the controller how the process at an address has ended."""
    death: Death | None = await directory_of(node).death_at.call_one(address)
    return death


async def lookup(name: str) -> ActorMesh:
    """The actors that were spawned under a name, from the controller or from inside any actor of the job.

    Args:
        name: as given to `spawn`, or `processes/name` with the name given to `spawn_procs`.

    Raises:
        UnknownActor: no living actors have it, or several meshes do.
        Stopped: no host runs in this process.
    """
    try:
        found = await directory_of(current_node()).find.call_one(name)
    except UnknownActor as error:
        raise UnknownActor(error.text if isinstance(error, ActorError) else str(error)) from None
    assert isinstance(found, ActorMesh)
    return found
