"""Where vLLM's loaders put what they are given: seen by watching them copy.

LA-1: watching changes nothing of what loaders do.
LA-2: only loaders are watched, not what makes weights ready for kernels: compiled code of vLLM would refuse to run.
LA-3: a copy of something that was computed from a tensor, not a part of it, is no landing; that the layer was loaded
      from the tensor is noted all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.model_executor.model_loader.reload import layerwise

from roles.vllm_hidden import own_tensors

__all__ = ["Landing", "Observer", "Region", "storage_of", "watched"]


def storage_of(tensor: Tensor) -> int:
    """Which memory it lies in, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


class Region(NamedTuple):
    """A strided part of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Region:
        return cls(tuple(part.shape), tuple(part.stride()), int(part.storage_offset()) - int(whole.storage_offset()))

    def within(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Landing(NamedTuple):
    """Where a part of a sent tensor comes down."""

    param: str
    whole: Region
    """Of the parameter as loaders see it."""
    place: Region
    name: str
    source: Region


class Observer(TorchDispatchMode):
    """Watches loaders copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.landings: dict[nn.Module, dict[Landing, None]] = {}
        self.fed: dict[nn.Module, dict[str, None]] = {}
        """Layer -> names of the tensors that it is loaded from."""
        self._current = ""
        self._sent: dict[int, tuple[str, weakref.ref[Tensor]]] = {}
        self._places: dict[int, tuple[nn.Module, str, Tensor]] = {}

    def look_at(self, layers: Iterable[nn.Module]) -> None:
        """Once parameters are as loaders want them."""
        for layer in layers:
            for name, tensor in own_tensors(layer).items():
                self._places[storage_of(tensor)] = (layer, name, tensor)

    def sending(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._current = name
            self._sent[storage_of(tensor)] = (name, weakref.ref(tensor))
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and storage_of(args[0]) in self._places:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, place: Tensor, source: Tensor) -> None:
        layer, param, whole = self._places[storage_of(place)]
        name, reference = self._sent.get(storage_of(source), (self._current, None))
        sent = None if reference is None else reference()
        self.fed.setdefault(layer, {})[name] = None
        if sent is not None and source.shape == place.shape:
            landing = Landing(param, Region.of(whole, whole), Region.of(place, whole), name, Region.of(source, sent))
            self.landings.setdefault(layer, {})[landing] = None


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Loaders run under the observer (LA-2)."""
    process = layerwise._layerwise_process

    def unwatched(*args: Any) -> None:
        with _disable_current_modes():
            process(*args)

    layerwise._layerwise_process = unwatched
    try:
        with observer:
            yield
    finally:
        layerwise._layerwise_process = process
