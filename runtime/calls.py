"""Meshes of actors: parts of them, handles that can be sent, their end. `adverbs.py` has the ways to call them.

AM-1: a slice is a mesh of its own, with ranks from 0 (CA-3).
AM-2: a mesh can be an argument or result; who gets it can call it, from any process of the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from runtime import records
from runtime.adverbs import EndpointHandle
from runtime.interface import Interface
from runtime.node import Node, node_for
from runtime.posting import AGENT, ActorRef
from runtime.shape import Selector, Shape


class ActorMesh:
    """Actors of one class, one for each rank. Every endpoint is an attribute with the adverbs of `EndpointHandle`.

    A mesh can be sent as an argument (AM-2).
    """

    def __init__(self, name: str, shape: Shape, refs: Sequence[ActorRef], interface: Interface, node: Node) -> None:
        self.name = name
        self.shape = shape
        self.refs = tuple(refs)
        self.interface = interface
        self._node = node

    def __getattr__(self, name: str) -> EndpointHandle:
        # Reached only for names that the mesh itself doesn't have.
        interface = self.__dict__.get("interface")
        if interface is None or name not in interface.endpoints:
            cls = interface.class_name if interface is not None else "?"
            known = ", ".join(interface.endpoints) if interface is not None else ""
            raise AttributeError(
                f"{self.__dict__.get('name', '?')}: {cls} has no endpoint {name!r}; it has {known or 'none'}. "
                "Methods that other processes call need @endpoint"
            )
        handle = EndpointHandle(self, interface.endpoints[name])
        self.__dict__[name] = handle
        return handle

    def __len__(self) -> int:
        return len(self.refs)

    def __repr__(self) -> str:
        return f"<ActorMesh {self.name} of {self.interface.class_name} {self.shape}>"

    def __reduce__(self) -> Any:
        return _rebuild_mesh, (self.name, self.shape.to_dict(), self.refs, self.interface)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by dimension."""
        return self.shape.to_dict()

    def size(self, name: str | None = None) -> int:
        """Size of one dimension, or number of actors."""
        return len(self.refs) if name is None else self.shape.size(name)

    def is_alive(self) -> bool:
        """Whether, as far as this process knows, one of the actors can still be called."""
        peers = self._node.peers
        return any(ref.address not in peers or peers[ref.address].serves(ref) for ref in self.refs)

    def slice(self, **selectors: Selector) -> ActorMesh:
        """A part of the mesh (AM-1): `slice(replica=0, tp=slice(0, 2))`."""
        shape, ranks = self.shape.select(**selectors)
        return self._with(shape, [self.refs[rank] for rank in ranks])

    def flatten(self, name: str) -> ActorMesh:
        """The same actors along one dimension."""
        return self._with(self.shape.flatten(name), self.refs)

    def split(self, name: str, **parts: int) -> ActorMesh:
        """The same actors with one dimension split into several."""
        return self._with(self.shape.split(name, **parts), self.refs)

    def rename(self, **names: str) -> ActorMesh:
        """The same actors with other names of dimensions."""
        return self._with(self.shape.rename(**names), self.refs)

    async def stop(self) -> None:
        """Stop these actors, running `__cleanup__`; their processes go on. Later calls raise Stopped.

        Raises:
            ProcessDied: a process is gone; the other actors are stopped.
        """
        from runtime.directory import directory_of

        node = self._node
        agents = [ActorMesh(self.name, Shape({}), [agent_of(ref)], agent_interface(), node) for ref in self.refs]
        removals = [agent.remove.call_one(ref.key) for agent, ref in zip(agents, self.refs, strict=True)]
        results = await asyncio.gather(*removals, return_exceptions=True)
        node.forget_actors(self.refs)
        if node.controller != node.address:  # it must neither find them nor make them again
            await directory_of(node).forget.call_one(list(self.refs))
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _with(self, shape: Shape, refs: Sequence[ActorRef]) -> ActorMesh:
        return ActorMesh(self.name, shape, refs, self.interface, self._node)


def _rebuild_mesh(name: str, sizes: dict[str, int], refs: tuple[ActorRef, ...], interface: Interface) -> ActorMesh:
    return ActorMesh(name, Shape(sizes), refs, interface, node_for(refs[0].address))


def _mesh_from_parts(name: str, sizes: dict[str, int], refs: list[dict[str, Any]], class_name: str) -> ActorMesh:
    """Without pickle: the interface is read from the class once more."""
    interface = Interface.of(records.class_named(class_name))
    return _rebuild_mesh(name, sizes, tuple(ActorRef(**ref) for ref in refs), interface)


records.register_handle(
    ActorMesh,
    lambda mesh: (
        mesh.name,
        mesh.shape.to_dict(),
        [msgspec.structs.asdict(ref) for ref in mesh.refs],
        mesh.interface.importable_name(),
    ),
    _mesh_from_parts,
)


def agent_of(ref: ActorRef) -> ActorRef:
    """The agent in the process of an actor."""
    return ActorRef(ref.address, AGENT, ref.mesh, ref.rank, ref.host)


def agent_interface() -> Interface:
    """The endpoints of the agent."""
    from runtime.agent import Agent

    return Interface.of(Agent)
