"""Boxes of sent tensors into live parameters of a vLLM model: the copies that its loaders were seen to make.

CO-1: `run` copies from where the weights lie to where the model has them, and makes nothing in between: launched as one
      copy of many. What it finds out about a set of tensors it keeps as long as these are given again.
CO-2: `elsewhere`, `uncovered` and `unlike` look at live tensors and leave them as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roles.vllm_hidden import own_tensors
from sync.layout import Box
from sync.layouts.loaders import Copy, Recorded

__all__ = ["Copies", "Key", "as_bytes", "key_of", "storage_of"]

Key = tuple[int, int, tuple[int, ...]]


def storage_of(tensor: Tensor) -> int:
    """Which memory it lies in, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def key_of(tensor: Tensor) -> Key:
    return storage_of(tensor), int(tensor.storage_offset()), tuple(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of 8-bit floats that every operation of torch knows; others as they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


class Copies:
    """Of one model."""

    def __init__(self, model: nn.Module, recorded: Recorded) -> None:
        self._boxes = {entry.name: entry.box for entry in recorded.wanted}
        self._shapes, self._dtypes = recorded.shapes, recorded.dtypes
        self._layers: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self._by_layer: dict[nn.Module, list[Copy]] = {}
        self.fed: dict[nn.Module, dict[str, None]] = {}
        """Layer -> names of the tensors that it is loaded from."""
        self._computed = {self._layer(parameter) for parameter in recorded.computed}
        for copy in recorded.copies:
            layer = self._layer(copy.parameter)
            if not self._is_view(copy):
                self._computed.add(layer)
            self._by_layer.setdefault(layer, []).append(copy)
            self.fed.setdefault(layer, {})[copy.name] = None
        for parameter, names in recorded.computed.items():
            self.fed.setdefault(self._layer(parameter), {}).update(dict.fromkeys(names))
        self._ready: tuple[Sequence[Copy], Mapping[str, Tensor]] = ([], {})
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []

    def of(self, layers: Iterable[nn.Module]) -> list[Copy]:
        """The copies into these layers."""
        return [copy for layer in layers for copy in self._by_layer.get(layer, ())]

    def places_of(self, copies: Iterable[Copy]) -> list[Tensor]:
        """The live tensors that they go to."""
        return [self._live(name) for name in dict.fromkeys(copy.parameter for copy in copies)]

    def bytes_of(self, copies: Iterable[Copy]) -> int:
        return sum(copy.target.numel * self._live(copy.parameter).element_size() for copy in copies)

    def run(self, copies: Sequence[Copy], weights: Mapping[str, Tensor]) -> None:
        """Make these copies, on the current stream (CO-1)."""
        before, given = self._ready
        if copies is not before or any(weights[name] is not tensor for name, tensor in given.items()):
            self._pairs = self._paired(copies, weights)
            self._ready = copies, {copy.name: weights[copy.name] for copy in copies}
        for places, parts in self._pairs:
            torch._foreach_copy_(places, parts)

    def fill(self, layer: nn.Module, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Make the copies into a layer in tensors that stand for its own, by their names in it."""
        places, parts = [], []
        for copy in self._by_layer[layer]:
            place = tensors[copy.parameter.rpartition(".")[2]].detach()
            places.append(place[tuple(map(slice, copy.target.lo, copy.target.hi))])
            parts.append(self._part(copy, weights))
        torch._foreach_copy_(places, parts)

    def filled(self, layer: nn.Module) -> dict[str, int]:
        """Elements of each of its tensors that copies fill; none where a loader computes."""
        found: dict[str, int] = {}
        for copy in () if layer in self._computed else self._by_layer.get(layer, ()):
            name = copy.parameter.rpartition(".")[2]
            found[name] = found.get(name, 0) + copy.target.numel
        return found

    def _paired(self, copies: Sequence[Copy], weights: Mapping[str, Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Places and what belongs there; together what one launch can do: of equal types, laid out alike."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for copy in copies:
            place, part = self._place(copy), self._part(copy, weights)
            if place.dtype == part.dtype:
                place, part = as_bytes(place), as_bytes(part)
            places, parts = groups.setdefault((place.dtype, part.dtype, place.stride() == part.stride()), ([], []))
            places.append(place)
            parts.append(part)
        return list(groups.values())

    def elsewhere(self, weights: Mapping[str, Tensor]) -> set[nn.Module]:
        """Layers whose live tensors do not hold these, box by box."""
        wrong = set(self._computed)
        by_name: dict[str, list[tuple[nn.Module, Copy]]] = {}
        for layer, copies in self._by_layer.items():
            for copy in copies:
                by_name.setdefault(copy.name, []).append((layer, copy))
        for name, made in by_name.items():
            sent = {name: weights[name]}
            for layer, copy in made:
                if layer not in wrong and not self._holds(copy, sent):
                    wrong.add(layer)
        return wrong

    def targets(self) -> dict[Key, set[Box]]:
        """By live tensor, for a tied head has no copies of its own: where something is copied to."""
        found: dict[Key, set[Box]] = {}
        for copies in self._by_layer.values():
            for copy in copies:
                if self._is_as_loaded(copy.parameter):
                    found.setdefault(key_of(self._live(copy.parameter)), set()).add(copy.target)
        return found

    def uncovered(self, layer: nn.Module, covered: Mapping[Key, Collection[Box]]) -> dict[str, Tensor]:
        """A copy of the live elements of a layer that are in none of these boxes; padding is among them."""
        found = {}
        for name, tensor in own_tensors(layer).items():
            live = tensor.detach()
            targets = covered.get(key_of(live), ())
            if sum(box.numel for box in targets) < live.numel():
                loose = torch.ones(live.shape, dtype=torch.bool, device=live.device)
                for box in targets:
                    loose[tuple(map(slice, box.lo, box.hi))] = False
                found[name] = as_bytes(live)[loose].clone()
        return found

    def unlike(self, copies: Sequence[Copy], weights: Mapping[str, Tensor]) -> set[Key]:
        """Live tensors, which hold these weights, that `run` would not make of them."""
        by_place: dict[str, list[Copy]] = {}
        for copy in copies:
            by_place.setdefault(copy.parameter, []).append(copy)
        wrong: set[Key] = set()
        for name, some in by_place.items():
            live = self._live(name)
            before = live.clone()
            for copy in some:
                self._place(copy).zero_()
            self.run(some, {n: weights[n] for n in {copy.name for copy in some}})
            if not torch.equal(as_bytes(live), as_bytes(before)):
                wrong.add(key_of(live))
            live.copy_(before)
        self._ready, self._pairs = ([], {}), []  # numbers of a proof
        return wrong

    def _holds(self, copy: Copy, weights: Mapping[str, Tensor]) -> bool:
        live, sent = self._live_or_none(copy.parameter), weights[copy.name]
        if live is None or not self._is_as_loaded(copy.parameter) or live.element_size() < sent.element_size():
            return False  # quantised, in the last case
        place, part = self._place(copy), self._part(copy, weights)
        return torch.equal(as_bytes(place), as_bytes(part.to(place.dtype)))

    def _is_as_loaded(self, parameter: str) -> bool:
        live = self._live_or_none(parameter)
        return live is not None and live.is_contiguous() and tuple(live.shape) == self._shapes[parameter]

    def _place(self, copy: Copy) -> Tensor:
        return self._live(copy.parameter)[tuple(map(slice, copy.target.lo, copy.target.hi))]

    def _is_view(self, copy: Copy) -> bool:
        """Whether what is sent can be looked at in the shape of its place, without making a copy of it."""
        if not copy.order and copy.source.shape == copy.target.shape:
            return True
        sent = torch.empty(self._boxes[copy.name].shape, device="meta")
        try:
            self._part(copy, {copy.name: sent})
        except RuntimeError:
            return False
        return True

    def _part(self, copy: Copy, weights: Mapping[str, Tensor]) -> Tensor:
        """A view of what is sent, in the shape of its place."""
        part = weights[copy.name][copy.source.slices_in(self._boxes[copy.name])]
        part = part.permute(copy.order) if copy.order else part
        return part.view(copy.target.shape)

    def _live(self, parameter: str) -> Tensor:
        live = self._live_or_none(parameter)
        assert live is not None, parameter
        return live

    def _live_or_none(self, parameter: str) -> Tensor | None:
        tensor = own_tensors(self._layer(parameter)).get(parameter.rpartition(".")[2])
        return None if tensor is None else tensor.detach()

    def _layer(self, parameter: str) -> nn.Module:
        return self._layers[parameter.rpartition(".")[0]]
