"""Arithmetic as pure functions, the pipeline as plain asyncio objects, each algorithm's loop on one page.

`import algorithms` loads no torch: names are fetched from their file when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.admission import Admission, Closed, Ticket
    from algorithms.advantages import group_advantages, to_samples
    from algorithms.buffer import Buffer, Taken
    from algorithms.catalog import advantage, objective

__all__ = [
    "Admission",
    "Buffer",
    "Closed",
    "Taken",
    "Ticket",
    "advantage",
    "group_advantages",
    "objective",
    "to_samples",
]

_HOME = {
    "Admission": "admission",
    "Buffer": "buffer",
    "Closed": "admission",
    "Taken": "buffer",
    "Ticket": "admission",
    "advantage": "catalog",
    "group_advantages": "advantages",
    "objective": "catalog",
    "to_samples": "advantages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'algorithms' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"algorithms.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
