"""New weights into the live tensors of a vLLM model, so that a swap is copies and little else. Runs in vLLM's worker.

    record  at start: what vLLM's loaders copy from where to where (sync/layouts/vllm.py). Trainers are asked for that
    prove   once, before the first weights: two reloads of random numbers by vLLM's own loaders sort the layers
              direct     its tensors are boxes of those that are sent, bit for bit
              processed  a kernel wants them otherwise (FP8), and nothing changes beside them
              held       something changes beside them: packed copies, absorbed products, caches
    process processed layers, some at a time between steps, from what was staged into mirrors: by their own method of
            vLLM (vllm_stand_ins.py), or by vLLM's loaders where that does not come to the same
    swap    staged -> live tensors of direct layers, mirrors -> those of processed ones, one copy of many; then vLLM's
            loaders for layers that are held

What is staged lies on the device of the model, in the boxes of `weight_layout`: it is read where it lies.

VR-1: live tensors keep their addresses, so that CUDA graphs stay valid.
VR-2: what is not held is proven: from the numbers of the second reload, each live tensor becomes what vLLM made of
      them, bit for bit. A layer that fails this is held.
VR-3: no step sees a layer without its weights: each call puts live tensors back before it returns.
VR-4: shares do not depend on time: collectives of a quantisation come in one order on all ranks of a replica.
VR-5: a layer that nothing was loaded into is an error that names it (W2), never old weights under a new number.
VR-6: loaders that look at values can't be recorded: then all tensors are asked for whole, and all layers are held.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from roles.vllm_copies import Copies, Key, as_bytes, key_of, storage_of
from roles.vllm_hidden import hidden_tensors, own_floats, own_tensors
from roles.vllm_layouts import Packing, repack_cpu_experts, tied_layers
from roles.vllm_stand_ins import can_stand_in, made_of
from roles.whole_weights import by_layer
from sync.layout import Entry, Layout, LayoutError
from sync.layouts.loaders import Copy, Recorded
from sync.layouts.vllm import Layers, put_back, record, wanted

log = logging.getLogger(__name__)

LAYERS, LOADED_LAYERS = 32, 4
"""Most processed layers of one share, and of one that takes vLLM's loaders: a few milliseconds between two steps."""

Weights = Mapping[str, Tensor]


class Reloader:
    """Of one worker. To a `sync.receiver.Receiver` it is what wants weights.

    Args:
        checkpoint: each tensor that trainers have, whole, in the dtype in which it is sent.
        constants: tensors beside the model that nobody sends.

    Raises:
        LayoutError: the loaders refuse the checkpoint, or it lacks something (VR-5).
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        device: torch.device,
        checkpoint: Sequence[Entry],
        constants: Sequence[Entry] = (),
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._layers = list(model.modules())
        self._names = {layer: name for name, layer in model.named_modules()}
        recorded = self._record(sorted(checkpoint, key=lambda entry: by_layer(entry.name)))
        self._layout = wanted(recorded)
        self._declared = Layout((*self._layout.entries, *constants), constant=tuple(e.name for e in constants))
        self._copies = Copies(model, recorded)
        self._fed: Mapping[nn.Module, Collection[str]] = self._copies.fed
        self._unknown = not self._fed
        if self._unknown:
            self._fed = {layer: list(self._layout.by_name) for layer in self._layers if own_tensors(layer)}
        self._direct: list[Copy] = []
        self._mirrors: dict[Key, Tensor] = {}
        self._live: dict[Key, Tensor] = {}
        self._jobs: list[Callable[[Weights], None]] = []
        self._held: list[nn.Module] = []
        self._num_processed = self._num_loaded = 0
        self._next = 0
        self.proven = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A quantisation may talk to the other ranks, in the order of the steps.
        self._alone = vllm_config.parallel_config.world_size == 1
        self._processed: Any = None
        self._began: Any = None
        self.swapped: Any = None
        """Event of the device: what was staged has been read."""

    @property
    def weight_device(self) -> str:
        return str(self._device)

    def weight_layout(self) -> Layout:
        return self._declared

    def _record(self, checkpoint: Sequence[Entry]) -> Recorded:
        try:
            with set_current_vllm_config(self._vllm_config):
                return record(self._model, checkpoint)
        except LayoutError as error:
            if "meta tensor" not in str(error.__cause__):  # torch's words of tensors without memory
                raise
            log.warning("new weights will be sent whole and loaded in the pause, since %s", error)
        return Recorded(wanted=tuple(checkpoint), copies=(), shapes={}, dtypes={})

    # --- processing and swapping --------------------------------------------------------------------------------------

    @property
    def num_shares(self) -> int:
        """Calls of `process` that a version needs."""
        return len(self._jobs)

    def begin(self) -> None:
        """The next share is the first: of other weights."""
        self._next = 0

    def process(self, weights: Weights) -> bool:
        """One share of what was staged; True when it was the last. Without a proof there is nothing to process yet."""
        if self._next == 0 and self._stream is not None and self.swapped is not None:
            self._stream.wait_event(self.swapped)  # mirrors are read until then
        if self._jobs:
            self._run(self._jobs[self._next], weights)
            self._next = (self._next + 1) % len(self._jobs)
        if self._next == 0 and self._stream is not None:
            self._processed = self._stream.record_event()
        return self._next == 0

    def is_processed(self) -> bool:
        """Whether the device has done so too."""
        return self._processed is None or bool(self._processed.query())

    def swap(self, weights: Weights) -> None:
        """What was staged, and processed, into service."""
        if self._stream is not None:
            if self._processed is not None:
                torch.cuda.current_stream().wait_event(self._processed)
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
        with torch.no_grad():
            self._copies.run(self._direct, weights)
            if self._mirrors:
                pairs = [(as_bytes(self._live[key]), as_bytes(mirror)) for key, mirror in self._mirrors.items()]
                torch._foreach_copy_([live for live, _ in pairs], [mirror for _, mirror in pairs])
            if self._held:
                self._reload(self._held, self._whole(self._feeding(self._held), weights))
        if self._stream is not None:
            self.swapped = torch.cuda.Event(enable_timing=True)
            self.swapped.record()

    def facts(self) -> dict[str, Any]:
        """What the last swap did; waits for it."""
        seconds = 0.0
        if self._began is not None:
            self.swapped.synchronize()
            seconds = self._began.elapsed_time(self.swapped) / 1000
        mirrored = sum(t.nbytes for t in self._mirrors.values())
        return {
            "device_seconds": seconds,
            "copied_tensors": len(self._direct) + len(self._mirrors),
            "copied_bytes": self._copies.bytes_of(self._direct) + mirrored,
            "mirrored_bytes": mirrored,
            "shares": len(self._jobs),
            "processed_layers": self._num_processed,
            "processed_by_loaders": self._num_loaded,
            "held_layers": len(self._held),
            "held": [self._names[layer] for layer in self._held[:8]],
        }

    def _run(self, job: Callable[[Weights], None], weights: Weights) -> None:
        """Beside the steps; what may talk to the other ranks in their stream (vLLM has one of its own)."""
        if self._stream is None:
            job(weights)
        elif self._alone:
            with torch.cuda.stream(self._stream):
                job(weights)
        else:
            job(weights)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _whole(self, names: Iterable[str], weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """As vLLM's loaders want them, which take their part of a whole tensor: what is not theirs stays undefined."""
        entries = self._layout.by_name
        for name in names:
            entry, part = entries[name], weights[name]
            if entry.box.shape != entry.shape:
                whole = torch.empty(entry.shape, dtype=part.dtype, device=self._device)
                whole[tuple(map(slice, entry.box.lo, entry.box.hi))] = part
                part = whole
            yield name, part.to(self._device)

    # --- vLLM's loaders -----------------------------------------------------------------------------------------------

    def _reload(self, layers: Sequence[nn.Module], weights: Iterable[tuple[str, Tensor]]) -> None:
        some = Layers(layers)
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            initialize_layerwise_reload(some)
            with Packing() as packing:
                self._model.load_weights(iter(weights))  # type: ignore[operator]
            copied = {self._live[key].data_ptr() for key in self._mirrors}
            copied |= {tensor.data_ptr() for tensor in self._copies.places_of(self._direct)}
            tied = tied_layers({self._names[layer]: layer for layer in layers}, copied)
            with packing:
                finalize_layerwise_reload(some, self._vllm_config.model_config)
            for layer in tied:
                layer.quant_method.process_weights_after_loading(layer)
            if not packing.seen:
                repack_cpu_experts(layers)

    def _process(self, layers: Sequence[nn.Module], weights: Iterable[tuple[str, Tensor]]) -> None:
        """vLLM's loaders, whose results go to mirrors (VR-3)."""
        some = Layers(layers)
        hidden = {layer: set(layer._non_persistent_buffers_set) for layer in layers}
        live: dict[nn.Module, Any] = {}
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            initialize_layerwise_reload(some)
            for layer in layers:
                info = get_layerwise_info(layer)
                live[layer] = info.kernel_tensors
                info.kernel_tensors = tuple(
                    {name: _dressed(self._mirrors[key_of(t)], t) for name, t in kind.items()} for kind in live[layer]
                )
            with Packing() as packing:
                self._model.load_weights(iter(weights))  # type: ignore[operator]
                finalize_layerwise_reload(some, self._vllm_config.model_config)
            if not packing.seen:
                repack_cpu_experts(layers)
        for layer, (parameters, buffers) in live.items():
            put_back(layer, parameters, buffers, hidden[layer])

    def _process_share(self, layers: Sequence[nn.Module], names: Sequence[str], weights: Weights) -> None:
        self._process(layers, self._whole(names, weights))

    def _make_share(self, layers: Sequence[nn.Module], weights: Weights) -> None:
        """As `_process_share`, without loaders. What a method leaves out stays out of mirrors: the proof sees it."""
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            for layer in layers:
                made = made_of(layer, self._copies, weights, self._device)
                for name, live in own_tensors(layer).items():
                    mirror, tensor = self._mirrors[key_of(live)], made.get(name)
                    if tensor is not None and (tensor.shape, tensor.dtype) == (mirror.shape, mirror.dtype):
                        as_bytes(mirror).copy_(as_bytes(tensor))

    # --- the proof ----------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Sort the layers. Live tensors hold random numbers afterwards: weights must follow before any step."""
        names = list(self._layout.by_name)
        first, second = (_Numbers(self._layout, turn, self._device) for turn in (0, 1))
        self._reload(self._layers, self._whole(names, first))
        self._live = {key_of(t): t.detach() for layer in self._layers for t in own_tensors(layer).values()}
        known = {storage_of(t) for t in self._live.values()}
        beside = {layer: _cloned(hidden_tensors(layer, known)) for layer in self._layers}
        floats = {layer: own_floats(layer) for layer in self._layers}
        covered = self._copies.targets()
        loose = {layer: self._copies.uncovered(layer, covered) for layer in self._layers}
        self._reload(self._layers, self._whole(names, second))
        changed = {layer for layer in self._layers if _differ(beside[layer], hidden_tensors(layer, known))}
        changed |= {layer for layer in self._layers if floats[layer] != own_floats(layer)}
        moved = {layer for layer in self._layers if _differ(loose[layer], self._copies.uncovered(layer, covered))}
        held = {layer for layer in self._layers if layer in changed or self._is_opaque(layer)}
        held |= moved - self._fed.keys()
        held |= set(self._fed) if self._unknown else set()
        processed = moved | self._copies.elsewhere(second)
        loaded = {layer for layer in processed if not can_stand_in(layer, self._copies)}
        self._plan(processed, held, loaded)
        unproven = self._unproven(second)
        if unproven and self._alone:  # else it would be one rank of several that asks its methods again (VR-4)
            self._plan(processed, held, loaded := loaded | unproven)
            unproven = self._unproven(second)
        if unproven:
            self._plan(processed, held | unproven, loaded)
        self.proven = True
        if self._stream is not None:
            torch.cuda.empty_cache()  # numbers of the proof

    def _is_opaque(self, layer: nn.Module) -> bool:
        """Whether copies may lie where Python can't look, or attention reads what was loaded in its own way."""
        own_way = layer in self._fed and hasattr(layer, "process_weights_after_loading")
        return own_way or hasattr(layer, "cpu_linear")

    def _plan(self, processed: set[nn.Module], held: set[nn.Module], loaded: set[nn.Module]) -> None:
        """What is copied, mirrors, and the shares that fill them.

        Args:
            loaded: layers that are processed by vLLM's loaders, if they are.
        """
        held = _with_kin(self._fed, held)
        processed = _with_kin(self._fed, processed - held) - held
        self._direct = self._copies.of([layer for layer in self._fed if layer not in processed | held])
        wanted = {key_of(t) for layer in processed for t in own_tensors(layer).values()}
        self._mirrors = {}  # freed first
        self._mirrors = {key: live.clone() for key, live in self._live.items() if key in wanted}
        self._held = [layer for layer in self._layers if layer in held]
        through = [layer for layer in self._layers if layer in processed]
        loaded = _with_kin(self._fed, loaded)
        made = [layer for layer in through if layer not in loaded]
        by_loaders = [layer for layer in through if layer in loaded]
        self._jobs = [partial(self._make_share, some) for some in _shares(made, LAYERS)]
        self._jobs += [
            partial(self._process_share, some, self._feeding(some)) for some in _shares(by_loaders, LOADED_LAYERS)
        ]
        self._num_processed, self._num_loaded = len(through), len(by_loaders)

    def _feeding(self, layers: Sequence[nn.Module]) -> list[str]:
        names = {name for layer in layers for name in self._fed.get(layer, ())}
        return [name for name in self._layout.by_name if name in names]

    def _unproven(self, numbers: Weights) -> set[nn.Module]:
        """Layers of which the same numbers make something else than vLLM has made of them (VR-2)."""
        wrong = self._copies.unlike(self._direct, numbers)
        for mirror in self._mirrors.values():
            as_bytes(mirror).zero_()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for job in self._jobs:
            self._run(job, numbers)
        if self._stream is not None:
            self._stream.synchronize()
        wrong |= {key for key, mirror in self._mirrors.items() if not _equal(self._live[key], mirror)}
        return {layer for layer in self._layers if any(key_of(t) in wrong for t in own_tensors(layer).values())}


class _Numbers(Mapping[str, Tensor]):
    """Random numbers for what is sent, the same at each look."""

    def __init__(self, layout: Layout, turn: int, device: torch.device) -> None:
        self._layout = layout
        self._turn = turn
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        entry = self._layout.by_name[name]
        # A CPU's generator looks at 32 bits of a seed.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._turn} {name}".encode()))
        made = torch.empty(entry.box.shape, dtype=getattr(torch, entry.dtype), device=self._device)
        return made.normal_(generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.by_name)

    def __len__(self) -> int:
        return len(self._layout.by_name)


def _shares(layers: list[nn.Module], size: int) -> list[list[nn.Module]]:
    return [layers[i : i + size] for i in range(0, len(layers), size)]


def _dressed(mirror: Tensor, live: Tensor) -> Tensor:
    """The mirror as a parameter of the kind that vLLM registered."""
    made = mirror.detach()
    made.__class__ = live.__class__
    made.__dict__ = live.__dict__.copy()
    return made


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _differ(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return before.keys() != after.keys() or any(
        before[name].shape != tensor.shape or not _equal(before[name], tensor) for name, tensor in after.items()
    )


def _with_kin(fed: Mapping[nn.Module, Collection[str]], chosen: set[nn.Module]) -> set[nn.Module]:
    """With the layers that are loaded from the same tensors."""
    chosen = set(chosen)
    names = {name for layer in chosen for name in fed.get(layer, ())}
    while more := {layer for layer, of in fed.items() if layer not in chosen and names & set(of)}:
        chosen |= more
        names |= {name for layer in more for name in fed[layer]}
    return chosen
