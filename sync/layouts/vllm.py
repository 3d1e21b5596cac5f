"""What a rank of vLLM wants, recorded from vLLM's own weight loaders: any of its models, at any degree of parallelism.

    recorded = record(model, checkpoint)             once, in the worker, between two steps
    layout = wanted(recorded)                        what trainers are asked for: boxes, each with its rank's share

VL-1: nothing is loaded, and no live tensor is read or written: vLLM's own reload shows the model as loaders see it,
      with tensors that have no memory, and the live ones are back in place when the call returns, whatever happens.
VL-2: where a loader computes with a tensor instead of copying it, the rank is sent all of that tensor.
VL-3: a parameter that nothing is loaded into is an error that names it, but for scales, which few checkpoints have, and
      those that share the memory of one that is loaded (tied heads).

Importing this file imports torch; vLLM is imported by the calls. vLLM 0.25 to 0.33.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from sync.layout import Entry, Layout, LayoutError
from sync.layouts.loaders import Recorded
from sync.layouts.loaders import record as record_loaders

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Layers", "put_back", "record", "wanted"]


class Layers:
    """Layers in place of a model, for vLLM's functions that go over one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._layers)


def record(model: nn.Module, checkpoint: Iterable[Entry]) -> Recorded:
    """What loading a checkpoint into this rank's model does.

    Args:
        model: a live one, after `record_metadata_for_reloading` of vLLM. No step may run meanwhile.
        checkpoint: every tensor of the model, whole, with the dtype in which it will come.

    Raises:
        LayoutError: the loaders refuse a tensor or want to know its values, or a parameter is not loaded (VL-3).
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_layerwise_reload

    layers = list(model.modules())
    not_saved = {layer: set(layer._non_persistent_buffers_set) for layer in layers}
    memory = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    initialize_layerwise_reload(Layers(layers))
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            loader: Any = getattr(tensor, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":  # it would wait for all, and then process
                loader = tensor.weight_loader = loader.__wrapped__  # type: ignore[attr-defined]
        recorded = record_loaders(model, checkpoint)
    finally:
        for layer in layers:
            info = get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                parameters, buffers = info.kernel_tensors
                put_back(layer, parameters, buffers, not_saved[layer])
            info.reset()
    _check_loaded(recorded, memory)
    return recorded


def wanted(recorded: Recorded) -> Layout:
    """The layout of this rank, for trainers."""
    return Layout(recorded.wanted)


def put_back(
    layer: nn.Module, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor], not_saved: set[str]
) -> None:
    """These tensors in the place of those that a layer has.

    Args:
        not_saved: buffers that a checkpoint does not have.
    """
    for name in [n for kind in (layer._parameters, layer._buffers) for n, t in kind.items() if t is not None]:
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in not_saved)


def _check_loaded(recorded: Recorded, memory: Mapping[str, int]) -> None:
    """VL-3. `memory` is where live parameters begin."""
    loaded = {copy.parameter for copy in recorded.copies} | recorded.computed.keys()
    reached = {memory[name] for name in loaded if name in memory}
    missing = [
        name
        for name in recorded.untouched
        if name not in loaded and not name.endswith("scale") and memory.get(name) not in reached
    ]
    if missing:
        raise LayoutError(
            f"vllm: the new weights hold nothing for {', '.join(missing[:5])} ({len(missing)} parameters): the "
            "trainer's names and the model's differ; trainer and rollout must load one model"
        )
