"""Processes that an actor starts and owns.

    class Team(Actor):
        @endpoint
        async def gather(self) -> None:
            self.procs = await spawn_procs(4, name="team")
            self.members = await self.procs.spawn("member", Member)

OW-1: the controller starts them, so that they are accounted, named, restarted and stopped as any others.
OW-2: they end with their owner: when its process has ended, or when it was stopped.
OW-3: their failures go to the `__supervise__` of the owner first, on its loop; what it does not handle goes up (SU-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime import codec
from runtime.actor import Actor, context
from runtime.agent import pack_actor
from runtime.calls import ActorMesh, agent_interface
from runtime.directory import DIRECTORY, Ownership, directory_of
from runtime.errors import TuttiError, pack_error
from runtime.interface import Interface
from runtime.node import Node
from runtime.posting import AGENT, ActorRef
from runtime.process import Start
from runtime.restart import Restart
from runtime.shape import Shape
from runtime.supervise import Failure

DECIDE_SECONDS = 10.0
"""How long a `__supervise__` elsewhere may take; then the failure goes up."""


async def spawn_procs(
    shape: Mapping[str, int] | int = 1,
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    start: Start = "auto",
    restart: Restart | None = None,
    gpus: int | Sequence[Sequence[int]] = 0,
    pin: bool | None = None,
) -> OwnedProcs:
    """Start a mesh of processes that this actor owns. Arguments and errors as `HostMesh.spawn_procs`.

    Raises:
        RuntimeError: called outside of actors.
    """
    here = context()
    if not here.actor_key or here.actor_key == DIRECTORY:
        raise RuntimeError("spawn_procs: no actor is running here that could own them. Use host.spawn_procs()")
    owner = Ownership(here.node.address, here.actor_key, here.actor_name, here.rank)
    settings: dict[str, Any] = {
        "name": name, "env": dict(env or {}), "threads": threads, "start": start, "restart": restart, "gpus": gpus,
        "pin": pin,
    }  # fmt: skip
    extent = Shape({"rank": shape} if isinstance(shape, int) else shape)
    await directory_of(here.node).spawn_procs.call_one(owner, extent.to_dict(), settings)
    return OwnedProcs(name, extent)


class OwnedProcs:
    """Processes that an actor owns. An async context manager that stops them at the end of the block."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape

    def __repr__(self) -> str:
        return f"<OwnedProcs {self.name} {self.shape}>"

    async def spawn(self, name: str, actor: type[Actor], *args: Any, **kwargs: Any) -> ActorMesh:
        """Construct one actor on each process. Raises as `ProcMesh.spawn`."""
        if not (isinstance(actor, type) and issubclass(actor, Actor)):
            raise TypeError(f"{self.name}.spawn({name!r}): expected a subclass of Actor, got {actor!r}")
        interface = Interface.of(actor)
        made = pack_actor(actor, interface, args, kwargs)
        packed = interface.packed() if codec.pickle_is_allowed() else interface.importable_name().encode()
        mesh = await directory_of(context().node).spawn_actors.call_one(self.name, name, packed, made)
        assert isinstance(mesh, ActorMesh)
        return mesh

    async def stop(self) -> None:
        """Stop them. Stopping twice does nothing."""
        await directory_of(context().node).stop_procs.call_one(self.name)

    async def __aenter__(self) -> OwnedProcs:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class RemoteOwner:
    """The owner of a mesh that is an actor elsewhere (OW-3)."""

    def __init__(self, node: Node, owner: Ownership, host: str) -> None:
        self._owner = owner
        agent = ActorRef(owner.address, AGENT, owner.name, owner.rank, host)
        self._agent = ActorMesh(owner.name, Shape({}), [agent], agent_interface(), node)

    async def __supervise__(self, failure: Failure) -> bool:
        """What the hook of the actor says; False when it has none, is gone or takes too long."""
        error = failure.error
        try:
            handled = await self._agent.supervise.options(timeout=DECIDE_SECONDS).call_one(
                self._owner.key, failure.mesh, pack_error(error), error.mesh, error.rank, error.host, error.endpoint
            )
        except (TimeoutError, TuttiError):
            return False
        return bool(handled)
