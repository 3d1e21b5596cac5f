"""New weights into the live tensors of a vLLM model, so that a swap is copies and little else. Runs in vLLM's worker.

    record  once, before the first weights: two reloads of random numbers by vLLM's own loaders sort the layers
              direct     its tensors are boxes of those that are sent, bit for bit
              processed  a kernel wants them otherwise (FP8), and nothing changes beside them
              held       something changes beside them: packed copies, absorbed products, caches
    stage   new weights into mirrors of the live tensors, a share at a time between steps: boxes are copied, processed
            layers go through vLLM's loaders
    swap    mirrors -> live tensors, one copy of many; then vLLM's loaders for layers that are held

VR-1: live tensors keep their addresses, so that CUDA graphs stay valid.
VR-2: what is not held is proven: staged from the numbers of the second reload, each mirror is what vLLM made of them,
      bit for bit. A layer that fails this is held.
VR-3: no step sees a layer without its weights: each call puts live tensors back before it returns.
VR-4: shares do not depend on time: collectives of a quantisation come in one order on all ranks of a replica.
VR-5: a layer that nothing was loaded into is an error that names it (W2), never old weights under a new number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from roles.vllm_hidden import hidden_tensors, own_tensors
from roles.vllm_landing import Landing, Observer, Region, storage_of, watched
from roles.vllm_layouts import Packing, repack_cpu_experts, tied_layers

COPIES, LAYERS = 256, 4
"""Most copies, or processed layers, of one share: a few milliseconds of Python between two steps."""

Table = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Source = Callable[[str], Tensor]
Key = tuple[int, int, tuple[int, ...]]


class _Some:
    """Layers in place of a model, for vLLM's functions that go over one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._layers)


class Reloader:
    """Of one worker.

    Args:
        table: dtype and shape of each tensor that is sent, layer by layer.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, table: Table) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._table = table
        self._layers = list(model.modules())
        self._names = {layer: name for name, layer in model.named_modules()}
        self._live: dict[Key, Tensor] = {}
        self._mirrors: dict[Key, Tensor] = {}
        self._from: list[Tensor] = []
        self._jobs: list[Callable[[Source], None]] = []
        self._held: list[nn.Module] = []
        self._held_weights: dict[str, Tensor] = {}
        self._num_processed = 0
        self._next = 0
        self.recorded = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A quantisation may talk to the other ranks, in the order of the steps.
        self._alone = vllm_config.parallel_config.world_size == 1
        self._staged: Any = None
        self._began: Any = None
        self._swapped: Any = None

    # --- staging and swapping -----------------------------------------------------------------------------------------

    def stage(self, source: Source) -> bool:
        """One share of new weights; True when it was the last. Without a record there is nothing to stage yet."""
        if not self.recorded:
            return True
        if self._next == 0 and self._stream is not None and self._swapped is not None:
            self._stream.wait_event(self._swapped)  # mirrors are read until then
        with torch.no_grad(), self._on(self._stream):
            self._jobs[self._next](source)
        self._next = (self._next + 1) % len(self._jobs)
        if self._next == 0 and self._stream is not None:
            self._staged = self._stream.record_event()
        return self._next == 0

    def is_staged(self) -> bool:
        """Whether the copies to the device have ended."""
        return self._staged is None or bool(self._staged.query())

    def swap(self) -> None:
        """What was staged into service."""
        if self._staged is not None:
            torch.cuda.current_stream().wait_event(self._staged)
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
        with torch.no_grad():
            if self._mirrors:
                torch._foreach_copy_([as_bytes(self._live[key]) for key in self._mirrors], self._from)
            if self._held:
                self._reload(self._held, self._held_weights.items())
                self._held_weights = {}
        if self._stream is not None:
            self._swapped = torch.cuda.Event(enable_timing=True)
            self._swapped.record()

    def facts(self) -> dict[str, Any]:
        """What the last swap did; waits for it."""
        seconds = 0.0
        if self._began is not None:
            self._swapped.synchronize()
            seconds = self._began.elapsed_time(self._swapped) / 1000
        return {
            "device_seconds": seconds,
            "copied_tensors": len(self._mirrors),
            "copied_bytes": sum(t.nbytes for t in self._mirrors.values()),
            "shares": len(self._jobs),
            "processed_layers": self._num_processed,
            "held_layers": len(self._held),
            "held": [self._names[layer] for layer in self._held[:8]],
        }

    def _on(self, stream: Any) -> Any:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    # --- vLLM's loaders -----------------------------------------------------------------------------------------------

    def _reload(
        self, layers: Sequence[nn.Module], weights: Iterable[tuple[str, Tensor]], observer: Observer | None = None
    ) -> None:
        some = _Some(layers)
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            initialize_layerwise_reload(some)
            if observer is not None:
                observer.look_at(layers)
                weights = observer.sending(weights)
            with Packing() as packing, nullcontext() if observer is None else watched(observer):
                self._model.load_weights(iter(weights))  # type: ignore[operator]
            copied = {live.data_ptr() for key, live in self._live.items() if key in self._mirrors}
            tied = tied_layers({self._names[layer]: layer for layer in layers}, copied)
            with packing:
                finalize_layerwise_reload(some, self._vllm_config.model_config)
            for layer in tied:
                layer.quant_method.process_weights_after_loading(layer)
            if not packing.seen:
                repack_cpu_experts(layers)

    def _process(self, layers: Sequence[nn.Module], weights: Iterable[tuple[str, Tensor]]) -> None:
        """vLLM's loaders, whose results go to mirrors (VR-3)."""
        some = _Some(layers)
        hidden = {layer: set(layer._non_persistent_buffers_set) for layer in layers}
        live: dict[nn.Module, Any] = {}
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            initialize_layerwise_reload(some)
            for layer in layers:
                info = get_layerwise_info(layer)
                live[layer] = info.kernel_tensors
                info.kernel_tensors = tuple(
                    {name: _dressed(self._mirrors[_key(t)], t) for name, t in kind.items()} for kind in live[layer]
                )
            with Packing() as packing:
                self._model.load_weights(iter(weights))  # type: ignore[operator]
                finalize_layerwise_reload(some, self._vllm_config.model_config)
            if not packing.seen:
                repack_cpu_experts(layers)
        for layer, (parameters, buffers) in live.items():
            _put_back(layer, parameters, buffers, hidden[layer])

    # --- the record ---------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Sort the layers. Live tensors hold random numbers afterwards: weights must follow before any step."""
        observer = Observer()
        self._reload(self._layers, self._numbers(0), observer)
        self._live = {_key(t): t.detach() for layer in self._layers for t in own_tensors(layer).values()}
        known = {storage_of(t) for t in self._live.values()}
        beside = {layer: _cloned(hidden_tensors(layer, known)) for layer in self._layers}
        covered: dict[Key, list[Landing]] = {}  # by tensor: a tied head has none of its own
        for layer, landings in observer.landings.items():
            for landing in landings:
                covered.setdefault(_key(own_tensors(layer)[landing.param]), []).append(landing)
        loose = {layer: self._uncovered(layer, covered) for layer in self._layers}
        self._reload(self._layers, self._numbers(1))
        changed = {layer for layer in self._layers if _differ(beside[layer], hidden_tensors(layer, known))}
        moved = {layer for layer in self._layers if _differ(loose[layer], self._uncovered(layer, covered))}
        held = {layer for layer in self._layers if layer in changed or self._is_opaque(layer, observer)}
        held |= moved - observer.fed.keys()
        processed = moved | self._elsewhere(observer)
        if unproven := self._unproven(*self._plan(observer, processed, held)):
            self._plan(observer, processed, held | unproven)
        self.recorded = True
        if self._stream is not None:
            torch.cuda.empty_cache()  # numbers of the record

    def _numbers(self, turn: int) -> Iterator[tuple[str, Tensor]]:
        for name in self._table:
            yield name, self._number(name, turn)

    def _number(self, name: str, turn: int) -> Tensor:
        """Random numbers for a tensor, the same at each call."""
        dtype, shape = self._table[name]
        # A CPU's generator looks at 32 bits of a seed.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{turn} {name}".encode()))
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(generator=generator)

    def _is_opaque(self, layer: nn.Module, observer: Observer) -> bool:
        """Whether copies may lie where Python can't look, or attention reads what was loaded in its own way."""
        own_way = layer in observer.fed and hasattr(layer, "process_weights_after_loading")
        return own_way or hasattr(layer, "cpu_linear")

    def _uncovered(self, layer: nn.Module, covered: Mapping[Key, Collection[Landing]]) -> dict[str, Tensor]:
        """A copy of the live elements of a layer that nothing comes down on; padding is among them."""
        found = {}
        for name, tensor in own_tensors(layer).items():
            live = as_bytes(tensor.detach())
            places = {one.place for one in covered.get(_key(live), ()) if _is(one.whole, live)}
            if sum(torch.Size(place.size).numel() for place in places) < live.numel():
                loose = torch.ones(live.shape, dtype=torch.bool, device=live.device)
                for place in places:
                    place.within(loose).fill_(False)
                found[name] = live[loose].clone()
        return found

    def _elsewhere(self, observer: Observer) -> set[nn.Module]:
        """Layers whose live tensors are not what was sent, box by box."""
        wrong = observer.fed.keys() - observer.landings.keys()
        by_name: dict[str, list[tuple[nn.Module, Landing]]] = {}
        for layer, landings in observer.landings.items():
            for landing in landings:
                by_name.setdefault(landing.name, []).append((layer, landing))
        for name, arrived in by_name.items():
            sent = self._number(name, 1)
            for layer, landing in arrived:
                live = own_tensors(layer)[landing.param].detach()
                narrower = live.element_size() < sent.element_size()  # quantised
                same = (_is(landing.whole, live) and not narrower) and torch.equal(
                    landing.place.within(live), landing.source.within(sent).to(live.dtype)
                )
                wrong = wrong if same else wrong | {layer}
        return set(wrong)

    def _plan(
        self, observer: Observer, processed: set[nn.Module], held: set[nn.Module]
    ) -> tuple[list[tuple[Key, Landing]], list[nn.Module]]:
        """Mirrors, and the shares that fill them; returns what is copied and what is processed."""
        held = _with_kin(observer.fed, held)
        processed = _with_kin(observer.fed, processed - held) - held
        direct = [
            (_key(own_tensors(layer)[landing.param]), landing)
            for layer, landings in observer.landings.items()
            if layer not in processed | held
            for landing in landings
        ]
        wanted = {key for key, _ in direct}
        wanted |= {_key(t) for layer in processed for t in own_tensors(layer).values()}
        self._mirrors = {}  # freed first
        self._mirrors = {key: live.clone() for key, live in self._live.items() if key in wanted}
        self._from = [as_bytes(mirror) for mirror in self._mirrors.values()]
        self._held = [layer for layer in self._layers if layer in held]
        through = [layer for layer in self._layers if layer in processed]
        self._jobs = [partial(self._copy, direct[i : i + COPIES]) for i in range(0, len(direct), COPIES)]
        for i in range(0, len(through), LAYERS):
            some = through[i : i + LAYERS]
            self._jobs.append(partial(self._process_share, some, self._feeding(some, observer)))
        self._jobs.append(partial(self._keep, self._feeding(self._held, observer)))
        self._num_processed = len(through)
        return direct, through

    def _feeding(self, layers: Sequence[nn.Module], observer: Observer) -> list[str]:
        names = {name for layer in layers for name in observer.fed.get(layer, ())}
        return [name for name in self._table if name in names]

    def _copy(self, landings: Sequence[tuple[Key, Landing]], source: Source) -> None:
        sent: dict[str, Tensor] = {}
        for key, landing in landings:
            place = landing.place.within(self._mirrors[key])
            part = landing.source.within(source(landing.name))
            if part.device != place.device and not part.is_contiguous():
                # A strided copy between devices waits for both: the whole goes over instead.
                if landing.name not in sent:
                    sent = {landing.name: source(landing.name).to(place.device, non_blocking=True)}
                part = landing.source.within(sent[landing.name])
            place.copy_(part, non_blocking=True)

    def _process_share(self, layers: Sequence[nn.Module], names: Sequence[str], source: Source) -> None:
        stream = None if self._alone or self._stream is None else torch.cuda.default_stream(self._device)
        with self._on(stream):
            self._process(layers, ((n, source(n).to(self._device, non_blocking=True)) for n in names))
        if stream is not None and self._stream is not None:
            self._stream.wait_stream(stream)

    def _keep(self, names: Sequence[str], source: Source) -> None:
        self._held_weights = {name: source(name).to(self._device, non_blocking=True) for name in names}

    def _unproven(self, direct: Sequence[tuple[Key, Landing]], processed: Iterable[nn.Module]) -> set[nn.Module]:
        """Layers whose mirrors, staged from the same numbers, differ from what vLLM made of them (VR-2)."""
        for key, landing in direct:
            landing.place.within(self._mirrors[key]).zero_()
        for layer in processed:
            for tensor in own_tensors(layer).values():
                as_bytes(self._mirrors[_key(tensor)]).zero_()
        self.recorded = True
        while not self.stage(lambda name: self._number(name, 1)):
            pass
        if self._stream is not None:
            self._stream.synchronize()
        wrong = {key for key, mirror in self._mirrors.items() if not _equal(self._live[key], mirror)}
        return {layer for layer in self._layers if any(_key(t) in wrong for t in own_tensors(layer).values())}


def _key(tensor: Tensor) -> Key:
    return storage_of(tensor), int(tensor.storage_offset()), tuple(tensor.shape)


def _is(whole: Region, live: Tensor) -> bool:
    """Whether a live tensor is laid out as loaders see it."""
    return live.is_contiguous() and (tuple(live.shape), tuple(live.stride())) == (whole.size, whole.stride)


def _dressed(mirror: Tensor, live: Tensor) -> Tensor:
    """The mirror as a parameter of the kind that vLLM registered."""
    made = mirror.detach()
    made.__class__ = live.__class__
    made.__dict__ = live.__dict__.copy()
    return made


def _put_back(
    layer: nn.Module, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor], not_saved: set[str]
) -> None:
    for name in own_tensors(layer):
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in not_saved)


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of 8-bit floats that every operation of torch knows; others as they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _differ(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return before.keys() != after.keys() or any(
        before[name].shape != tensor.shape or not _equal(before[name], tensor) for name, tensor in after.items()
    )


def _with_kin(fed: Mapping[nn.Module, Iterable[str]], chosen: set[nn.Module]) -> set[nn.Module]:
    """With the layers that are loaded from the same tensors."""
    chosen = set(chosen)
    names = {name for layer in chosen for name in fed.get(layer, ())}
    while more := {layer for layer, of in fed.items() if layer not in chosen and names & set(of)}:
        chosen |= more
        names |= {name for layer in more for name in fed[layer]}
    return chosen
