"""Actors, meshes and processes for one controller. See `docs/` for a guide; every name here is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.actor import (
        Actor as Actor,
        Context as Context,
        context as context,
        current_rank as current_rank,
        current_size as current_size,
        endpoint as endpoint,
        on_main_thread as on_main_thread,
    )
    from runtime.calls import ActorMesh as ActorMesh, EndpointHandle as EndpointHandle
    from runtime.errors import (
        ActorError as ActorError,
        ConnectionRefused as ConnectionRefused,
        DeadlineExceeded as DeadlineExceeded,
        Death as Death,
        MailboxFull as MailboxFull,
        Oversize as Oversize,
        ProcessDied as ProcessDied,
        RendezvousError as RendezvousError,
        SelfCall as SelfCall,
        StartError as StartError,
        Stopped as Stopped,
        TuttiError as TuttiError,
    )
    from runtime.mesh import HostMesh as HostMesh, ProcMesh as ProcMesh, this_host as this_host
    from runtime.rendezvous import in_torchrun as in_torchrun, join as join, join_main as join_main, torchrun_host as torchrun_host
    from runtime.shape import Point as Point, Shape as Shape, ValueMesh as ValueMesh
    from runtime.supervise import Failure as Failure, Owner as Owner
    from runtime.tasks import TaskGroup as TaskGroup

_HOME = {
    "runtime.actor": ("Actor", "Context", "context", "current_rank", "current_size", "endpoint", "on_main_thread"),
    "runtime.calls": ("ActorMesh", "EndpointHandle"),
    "runtime.errors": (
        "ActorError", "ConnectionRefused", "DeadlineExceeded", "Death", "MailboxFull", "Oversize", "ProcessDied",
        "RendezvousError", "SelfCall", "StartError", "Stopped", "TuttiError",
    ),
    "runtime.mesh": ("HostMesh", "ProcMesh", "this_host"),
    "runtime.rendezvous": ("in_torchrun", "join", "join_main", "torchrun_host"),
    "runtime.shape": ("Point", "Shape", "ValueMesh"),
    "runtime.supervise": ("Failure", "Owner"),
    "runtime.tasks": ("TaskGroup",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
