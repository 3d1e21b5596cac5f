"""Tensors that a layer of vLLM keeps beside its parameters and buffers: what a copy into those would leave behind.

Kernels keep packed copies, absorbed products and scales as attributes, in objects of vLLM, or in closures. All of them
are found that Python can reach; what lies in handles of C++ code is not (see `Reloader.record`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

_DEPTH = 8
_SKIPPED = ("kv_cache", "_parameters", "_buffers", "_modules")
"""Attributes of layers that hold no weights, or those that are known."""


def own_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the layer itself."""
    both = {**layer._parameters, **layer._buffers}
    return {n: t for n, t in both.items() if t is not None and not isinstance(t, UninitializedParameter)}


def own_floats(layer: nn.Module) -> dict[str, str]:
    """Numbers that it keeps as attributes, as text: scales, for kernels that take them by value."""
    return {name: repr(value) for name, value in vars(layer).items() if isinstance(value, float)}


def hidden_tensors(layer: nn.Module, known: Collection[int]) -> dict[str, Tensor]:
    """By path. `known` are the storages of all parameters and buffers of the model."""
    found: dict[str, Tensor] = {}
    seen: set[int] = {id(layer)}

    def walk(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_meta and value.untyped_storage()._cdata not in known:
                found[path] = value.detach()
            return
        for name, part in _parts_of(value):
            walk(part, f"{path}.{name}", depth + 1)

    for name, value in list(vars(layer).items()):
        if name not in _SKIPPED:
            walk(value, name, 0)
    return found


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif isinstance(value, FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            with suppress(ValueError):  # a variable that was never assigned
                yield str(index), cell.cell_contents
        yield from (("default", part) for part in value.__defaults__ or ())
    elif isinstance(value, partial):
        yield from (("args", value.args), ("keywords", value.keywords))
    elif _of_vllm(value):
        names = list(getattr(value, "__dict__", ())) + list(getattr(type(value), "__slots__", ()))
        yield from ((n, getattr(value, n)) for n in names if n not in _SKIPPED and hasattr(value, n))


def _of_vllm(value: Any) -> bool:
    module = type(value).__module__
    return module.startswith("vllm.") and not module.startswith("vllm.config") and not isinstance(value, nn.Module)
