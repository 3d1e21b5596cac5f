"""Values in places without a type when pickle is not allowed: containers, records and classes that can be imported.

RC-1: a value arrives with its own Python types, also tuples, sets and keys that are no text, or is refused by the
      sender; nothing is changed on the way.
RC-2: reading makes instances of `msgspec.Struct` classes, dataclasses, enums and what was registered as a handle, and
      calls nothing else that the message names. A class is named by its module and name, so it must be importable on
      both sides.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable
from typing import Any

import msgspec

TUPLE, SET, FROZENSET, PAIRS, RECORD, CLASS, INTEGER = 16, 17, 18, 19, 20, 21, 22
"""Codes of extensions."""

CODES = frozenset((TUPLE, SET, FROZENSET, PAIRS, RECORD, CLASS, INTEGER))

_handles: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {}


def register_handle(kind: type, to_parts: Callable[[Any], tuple[Any, ...]], from_parts: Callable[..., Any]) -> None:
    """Let instances of a class of this package travel: as the parts that `to_parts` gives, made again by
    `from_parts(*parts)`."""
    _handles[kind] = (to_parts, from_parts)


def write(value: Any, loosely: Callable[[Any], Any], encode: Callable[[Any], bytes]) -> Any:
    """A value as msgpack can hold it, its parts wrapped by `loosely`.

    Raises:
        TypeError: a part is neither a container nor a record.
    """
    kind = type(value)
    if kind is list:
        return [loosely(part) for part in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: loosely(part) for key, part in value.items()}
        return msgspec.msgpack.Ext(PAIRS, encode([[loosely(key), loosely(part)] for key, part in value.items()]))
    if kind in _CONTAINERS:
        return msgspec.msgpack.Ext(_CONTAINERS[kind], encode([loosely(part) for part in value]))
    if kind is int:  # beyond 64 bits
        return msgspec.msgpack.Ext(INTEGER, str(value).encode())
    if kind in _handles:
        return msgspec.msgpack.Ext(RECORD, encode([_name(kind), [loosely(part) for part in _handles[kind][0](value)]]))
    if isinstance(value, enum.Enum):
        return msgspec.msgpack.Ext(RECORD, encode([_name(kind), loosely(value.value)]))
    if _is_record(kind):
        fields = {name: loosely(getattr(value, name)) for name in _fields(kind)}
        return msgspec.msgpack.Ext(RECORD, encode([_name(kind), fields]))
    if isinstance(value, type):
        return msgspec.msgpack.Ext(CLASS, _name(value).encode())
    raise TypeError(
        f"a value of type {kind.__qualname__} can't be sent: this job does not allow pickle. Use a msgspec.Struct or a "
        "dataclass, or annotate the endpoint with a type that msgspec knows"
    )


def read(code: int, data: memoryview, decode: Callable[[memoryview], Any]) -> Any:
    """The reverse of `write`.

    Raises:
        ValueError: what the message names is no class of a record, or can't be imported.
    """
    if code == CLASS:
        return class_named(bytes(data).decode())
    if code == INTEGER:
        return int(bytes(data))
    content = decode(data)
    if code == PAIRS:
        return dict(content)
    if code == RECORD:
        name, fields = content
        return _make(class_named(name), fields)
    return _MAKERS[code](content)


_CONTAINERS: dict[type, int] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {TUPLE: tuple, SET: set, FROZENSET: frozenset}


def _is_record(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def _fields(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(field.name for field in dataclasses.fields(kind))


def _make(kind: type, fields: Any) -> Any:
    if kind in _handles:
        return _handles[kind][1](*fields)
    if issubclass(kind, enum.Enum):
        return kind(fields)
    if not _is_record(kind):
        raise ValueError(f"message: {kind.__qualname__} is neither a Struct nor a dataclass nor an enum")
    if issubclass(kind, msgspec.Struct):
        return kind(**fields)
    made = object.__new__(kind)  # its __init__ may want other arguments
    for name in _fields(kind):
        object.__setattr__(made, name, fields[name])
    return made


def _name(kind: type) -> str:
    return name_of(kind.__module__, kind.__qualname__)


def is_importable(module: str, name: str) -> bool:
    """Whether another process can import a class."""
    return module != "__main__" and "<locals>" not in name


def name_of(module: str, name: str) -> str:
    """`module:name` of a class.

    Raises:
        TypeError: another process can't import it.
    """
    if not is_importable(module, name):
        raise TypeError(
            f"class {name} of {module} can't be sent: other processes can't import it, and this job does not allow "
            "pickle. Define it at the top of a module"
        )
    return f"{module}:{name}"


def class_named(name: str) -> type:
    """The class of a `module:name`.

    Raises:
        ValueError: there is no such class.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"message: no class {name} here: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"message: {name} is no class")
    return found
