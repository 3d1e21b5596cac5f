"""Named actors: what was spawned under which name, known to the controller and asked from anywhere.

DI-1: a name finds the living actors that were spawned last under it on one mesh of processes. Two meshes of processes
      may use one name: then `processes/name` says which.
DI-2: stopped actors, and those all of whose processes have ended, are not found. A name can be used again.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.actor import Actor, CancelToken, Context, endpoint
from runtime.calls import ActorMesh
from runtime.cell import Cell
from runtime.errors import UnknownActor
from runtime.interface import Interface
from runtime.messages import ActorFailed
from runtime.node import Node, current_node
from runtime.posting import ActorRef
from runtime.shape import Shape

DIRECTORY = "directory"
"""Its key in the controller."""


class Directory(Actor):
    """The names of a job."""

    def __init__(self) -> None:
        self._meshes: dict[str, ActorMesh] = {}
        """By `processes/name`."""

    def add(self, procs: str, mesh: ActorMesh) -> None:
        """Actors were spawned."""
        self._meshes[f"{procs}/{mesh.name}"] = mesh

    @endpoint(concurrency=64)
    async def find(self, name: str) -> ActorMesh:
        """The actors of a name (DI-1). Raises UnknownActor."""
        found = [full for full, mesh in self._meshes.items() if name in (full, mesh.name) and mesh.is_alive()]
        if len(found) == 1:
            return self._meshes[found[0]]
        known = ", ".join(full for full, mesh in self._meshes.items() if mesh.is_alive()) or "none"
        if found:
            raise UnknownActor(f"lookup({name!r}): {len(found)} meshes have this name: say {' or '.join(found)}")
        raise UnknownActor(f"lookup({name!r}): no living actors of this name; there are {known}")


class _Controller:
    """The process around the actors that live in the controller."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run_on_main(self, job: Callable[[], object], label: str, done: Callable[[object], None]) -> None:
        raise RuntimeError(f"{label}: the controller has no main thread for endpoints; make it async")

    def peer_failed(self, token: CancelToken) -> None:
        """There are no collectives here."""

    def report(self, failure: ActorFailed) -> None:
        raise RuntimeError(f"{failure.actor}.{failure.endpoint} failed in the controller: {failure.error.text}")


def open_directory(node: Node, host: str) -> Directory:
    """Let a controller have one."""
    directory = Directory()
    place = Context(rank=0, size=1, proc_name="controller", actor_name=DIRECTORY, host=host, node=node)
    node.serving.by_key[DIRECTORY] = Cell(_Controller(node.limit), DIRECTORY, directory, Interface.of(Directory), place)
    return directory


async def lookup(name: str) -> ActorMesh:
    """The actors that were spawned under a name, from the controller or from inside any actor of the job.

    Args:
        name: as given to `spawn`, or `processes/name` with the name given to `spawn_procs`.

    Raises:
        UnknownActor: no living actors have it, or several meshes do.
        Stopped: no host runs in this process.
    """
    node = current_node()
    ref = ActorRef(node.controller, DIRECTORY, DIRECTORY, 0, "")
    found = await ActorMesh(DIRECTORY, Shape({}), [ref], Interface.of(Directory), node).find.call_one(name)
    assert isinstance(found, ActorMesh)
    return found
