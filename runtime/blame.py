"""Which part of a value can't be sent: `config.model.lock` says more than "cannot pickle '_thread.lock' object".

BL-1: the path leads from the value to the innermost part that fails by itself. Only run when sending has failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

MAX_DEPTH = 20
MAX_CHILDREN = 10_000
"""Parts of one object that are looked at."""


def blame(value: Any, name: str, can_be_sent: Callable[[Any], bool]) -> tuple[str, Any]:
    """The path of the part that can't be sent, starting with `name`, and that part."""
    seen: set[int] = set()
    for _ in range(MAX_DEPTH):
        seen.add(id(value))
        for index, (suffix, child) in enumerate(_children(value)):
            if index >= MAX_CHILDREN:
                return name, value
            if id(child) not in seen and not can_be_sent(child):
                name, value = name + suffix, child
                break
        else:
            return name, value
    return name, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Parts of a value, each with how Python code would reach it."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield f"[{key!r}]", child
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        for index, child in enumerate(value):
            yield (f".{names[index]}" if names else f"[{index}]"), child
    elif isinstance(value, set | frozenset):
        for child in value:
            yield f"{{{child!r}}}", child
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif inspect.isfunction(value):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f" (its variable {variable})", cell.cell_contents
            except ValueError:  # an empty cell
                continue
    else:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = list(value.__struct_fields__) if isinstance(value, msgspec.Struct) else list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for attribute in dict.fromkeys(names):
        try:
            yield f".{attribute}", getattr(value, attribute)
        except Exception:  # a property of user code may raise anything; then it isn't what pickling met
            continue
