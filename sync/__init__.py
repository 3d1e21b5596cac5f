"""Weights in motion: layouts, plans, transports and the commit of a fleet. Knows tensors and names, nothing of RL.

Names are loaded on first use, so that `import sync` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sync.layout import Box as Box
    from sync.layout import Entry as Entry
    from sync.layout import Layout as Layout
    from sync.layout import LayoutError as LayoutError
    from sync.plan import Plan as Plan
    from sync.plan import make_plan as make_plan
    from sync.ports import ReceiverPort as ReceiverPort
    from sync.ports import SenderPort as SenderPort
    from sync.ports import WeightSink as WeightSink
    from sync.ports import WeightSource as WeightSource
    from sync.session import Commit as Commit
    from sync.session import SyncConfig as SyncConfig
    from sync.session import WeightSession as WeightSession
    from sync.transport import SyncError as SyncError
    from sync.transport import TransportError as TransportError

_HOME = {
    "Box": "layout",
    "Commit": "session",
    "Entry": "layout",
    "Layout": "layout",
    "LayoutError": "layout",
    "Plan": "plan",
    "ReceiverPort": "ports",
    "SenderPort": "ports",
    "SyncConfig": "session",
    "SyncError": "transport",
    "TransportError": "transport",
    "WeightSession": "session",
    "WeightSink": "ports",
    "WeightSource": "ports",
    "make_plan": "plan",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'sync' has no attribute {name!r}") from None
    return getattr(importlib.import_module(f"sync.{home}"), name)


def __dir__() -> list[str]:
    return __all__
