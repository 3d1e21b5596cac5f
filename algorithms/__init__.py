"""Arithmetic as pure functions, the pipeline as plain asyncio objects, each algorithm's loop on one page.

`import algorithms` loads no torch: names are fetched from their file when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.admission import Admission, Closed, Ticket
    from algorithms.advantages import Advantage, group_advantages
    from algorithms.buffer import Buffer, Taken
    from algorithms.catalog import advantage, objective
    from algorithms.samples import to_samples, whiten

__all__ = [
    "Admission",
    "Advantage",
    "Buffer",
    "Closed",
    "Taken",
    "Ticket",
    "advantage",
    "group_advantages",
    "objective",
    "to_samples",
    "whiten",
]

_HOME = {
    "Admission": "admission",
    "Advantage": "advantages",
    "Buffer": "buffer",
    "Closed": "admission",
    "Taken": "buffer",
    "Ticket": "admission",
    "advantage": "catalog",
    "group_advantages": "advantages",
    "objective": "catalog",
    "to_samples": "samples",
    "whiten": "samples",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'algorithms' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"algorithms.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
