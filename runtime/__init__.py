"""Actors, meshes and processes for one controller. Every name here is imported on first use."""

from __future__ import annotations

import importlib

# Type checkers take it for true. Importing `typing` for it would be most of the cost of importing this package.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from runtime.actor import Actor as Actor
    from runtime.actor import Context as Context
    from runtime.actor import context as context
    from runtime.actor import current_rank as current_rank
    from runtime.actor import current_size as current_size
    from runtime.actor import endpoint as endpoint
    from runtime.actor import on_main_thread as on_main_thread
    from runtime.adverbs import EndpointHandle as EndpointHandle
    from runtime.auth import Tls as Tls
    from runtime.blocking_calls import blocking as blocking
    from runtime.calls import ActorMesh as ActorMesh
    from runtime.channels import Channel as Channel
    from runtime.channels import Port as Port
    from runtime.channels import PortReceiver as PortReceiver
    from runtime.directory import lookup as lookup
    from runtime.errors import ActorError as ActorError
    from runtime.errors import ConnectionRefused as ConnectionRefused
    from runtime.errors import DeadlineExceeded as DeadlineExceeded
    from runtime.errors import Death as Death
    from runtime.errors import MailboxFull as MailboxFull
    from runtime.errors import NotEnoughGpus as NotEnoughGpus
    from runtime.errors import OutOfRange as OutOfRange
    from runtime.errors import Oversize as Oversize
    from runtime.errors import PeerRefused as PeerRefused
    from runtime.errors import ProcessDied as ProcessDied
    from runtime.errors import RendezvousError as RendezvousError
    from runtime.errors import SelfCall as SelfCall
    from runtime.errors import ShapeError as ShapeError
    from runtime.errors import StartError as StartError
    from runtime.errors import Stopped as Stopped
    from runtime.errors import TuttiError as TuttiError
    from runtime.errors import UnknownActor as UnknownActor
    from runtime.errors import UnknownDimension as UnknownDimension
    from runtime.mesh import HostMesh as HostMesh
    from runtime.mesh import this_host as this_host
    from runtime.owned import OwnedProcs as OwnedProcs
    from runtime.owned import spawn_procs as spawn_procs
    from runtime.procs import ProcMesh as ProcMesh
    from runtime.rendezvous import in_torchrun as in_torchrun
    from runtime.rendezvous import join as join
    from runtime.rendezvous import join_main as join_main
    from runtime.rendezvous import torchrun_host as torchrun_host
    from runtime.restart import Restart as Restart
    from runtime.shape import Point as Point
    from runtime.shape import Shape as Shape
    from runtime.shape import ValueMesh as ValueMesh
    from runtime.streams import Stream as Stream
    from runtime.supervise import Failure as Failure
    from runtime.supervise import Owner as Owner
    from runtime.tasks import TaskGroup as TaskGroup
    from runtime.tasks import wait as wait

_HOME = {
    "runtime.actor": ("Actor", "Context", "context", "current_rank", "current_size", "endpoint", "on_main_thread"),
    "runtime.auth": ("Tls",),
    "runtime.blocking_calls": ("blocking",),
    "runtime.channels": ("Channel", "Port", "PortReceiver"),
    "runtime.adverbs": ("EndpointHandle",),
    "runtime.calls": ("ActorMesh",),
    "runtime.directory": ("lookup",),
    "runtime.errors": (
        "ActorError", "ConnectionRefused", "DeadlineExceeded", "Death", "MailboxFull", "NotEnoughGpus", "OutOfRange",
        "Oversize", "PeerRefused", "ProcessDied", "RendezvousError", "SelfCall", "ShapeError", "StartError", "Stopped",
        "TuttiError", "UnknownActor", "UnknownDimension",
    ),
    "runtime.mesh": ("HostMesh", "this_host"),
    "runtime.owned": ("OwnedProcs", "spawn_procs"),
    "runtime.procs": ("ProcMesh",),
    "runtime.rendezvous": ("in_torchrun", "join", "join_main", "torchrun_host"),
    "runtime.restart": ("Restart",),
    "runtime.shape": ("Point", "Shape", "ValueMesh"),
    "runtime.streams": ("Stream",),
    "runtime.supervise": ("Failure", "Owner"),
    "runtime.tasks": ("TaskGroup", "wait"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
