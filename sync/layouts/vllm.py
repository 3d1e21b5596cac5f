"""What a rank of vLLM wants, recorded from vLLM's own weight loaders: any of its models, at any degree of parallelism.

    recorded = record(vllm_config, checkpoint)       once, in the worker, at start
    layout = wanted(recorded)                        what trainers are asked for
    changed = reshaped(recorded, model)              parameters that kernels hold in another form
    recorded.apply(parameters_of(model), weights)    for each version: copies into live parameters

VL-1: the recording is of a model built like the live one and without memory; the live one, its registries and caches
      are not touched. Ranks, tensor and expert parallelism are those of the process.
VL-2: after loading, vLLM makes some parameters ready for kernels: packed, padded, transposed, quantised. Those whose
      name, shape, dtype or order in memory has changed are in `reshaped`; what keeps all of these and changes its
      content (experts shuffled for a kernel) is found by `differing`, with any checkpoint whose weights are in service.
      A parameter that is in neither may be written in place; the others must go through vLLM's own reload.
VL-3: parameters that are filled and never loaded (rows that pad the vocabulary) stay as they are, and so do the scales
      of attention that few checkpoints have.

Importing this file imports torch; vLLM is imported by the calls. vLLM 0.25 to 0.33.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sync.layout import Entry, Layout
from sync.layouts.loaders import Recorded
from sync.layouts.loaders import record as record_loaders

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["blank", "differing", "parameters_of", "record", "reshaped", "wanted"]


def record(vllm_config: Any, checkpoint: Iterable[Entry]) -> Recorded:
    """What loading a checkpoint into this rank's model does.

    Args:
        vllm_config: of the live engine.
        checkpoint: every tensor of the model, whole, with the dtype in which it will come.

    Raises:
        LayoutError: the loaders refuse a tensor or want to know its values.
    """
    return record_loaders(blank(vllm_config), checkpoint)


def blank(vllm_config: Any) -> nn.Module:
    """The model as vLLM builds it before it loads weights, on the meta device (VL-1)."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    for name in ("static_forward_context", "static_all_moe_layers"):
        if hasattr(config.compilation_config, name):
            setattr(config.compilation_config, name, type(getattr(config.compilation_config, name))())
    with _rotary_tables_kept(), torch.device("meta"):
        model: nn.Module = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        if getattr(loader, "__name__", "") == "online_process_loader":  # it would quantise what has no memory
            parameter.weight_loader = inspect.unwrap(loader)  # type: ignore[attr-defined]
    return model


def wanted(recorded: Recorded) -> Layout:
    """The layout of this rank, for trainers (VL-3).

    Raises:
        LayoutError: a parameter is computed by its loader, or has elements that nothing is loaded into.
    """
    return recorded.layout(constant=[p for p in recorded.untouched if p.rpartition(".")[2] in _OPTIONAL])


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters by name, as `Recorded.apply` takes them; tied ones under all of their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def reshaped(recorded: Recorded, model: nn.Module) -> dict[str, str]:
    """Parameters of a live model that are not held as they are loaded -> how (VL-2)."""
    live = parameters_of(model)
    found: dict[str, str] = {}
    for name, shape in recorded.shapes.items():
        if name not in live:
            found[name] = "is gone"
            continue
        tensor, dtype = live[name], recorded.dtypes[name]
        if tuple(tensor.shape) != shape:
            found[name] = f"has shape {list(tensor.shape)}, is loaded as {list(shape)}"
        elif str(tensor.dtype).removeprefix("torch.") != dtype:
            found[name] = f"is {tensor.dtype}, is loaded as {dtype}"
        elif not tensor.is_contiguous():
            found[name] = f"has strides {list(tensor.stride())}"
    return found


def differing(recorded: Recorded, model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters whose live content is not what these weights would leave there, though their shape is (VL-2).

    Args:
        weights: those in service, by name, each in the shape of its box in `recorded.wanted`; names may be missing.
    """
    live, changed = parameters_of(model), reshaped(recorded, model)
    boxes = {entry.name: entry.box for entry in recorded.wanted}
    found: dict[str, str] = {}
    for one in recorded.copies:
        if one.parameter in changed or one.parameter in found or one.name not in weights:
            continue
        part = weights[one.name][one.source.slices_in(boxes[one.name])]
        part = part.permute(one.order) if one.order else part
        place = live[one.parameter][tuple(map(slice, one.target.lo, one.target.hi))]
        if not torch.equal(place, part.reshape(place.shape).to(place)):
            found[one.parameter] = f"does not hold {one.name} as it is"
    return found


_OPTIONAL = ("q_scale", "k_scale", "v_scale", "prob_scale")


@contextlib.contextmanager
def _rotary_tables_kept() -> Iterator[None]:
    """vLLM shares rotary tables between models of a process; those of a model without memory must not be found."""
    try:
        from vllm.model_executor.layers import rotary_embedding
    except ImportError:
        yield
        return
    tables = getattr(rotary_embedding, "_ROPE_DICT", {})
    before = dict(tables)
    try:
        yield
    finally:
        tables.clear()
        tables.update(before)
