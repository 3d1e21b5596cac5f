"""What a kernel wants made of new weights, by the layer's own method of vLLM but without vLLM's loaders.

    boxes of sent tensors -> parameters as loaders fill them -> process_weights_after_loading -> results
                             '------------- of a stand-in for the layer -------------'

A call of the loaders goes over all names of a model, whatever it loads: with 30 layers that was four fifths of what it
took to quantise some, and steps wait for it. What they do for a layer is known (roles/vllm_copies.py), so it is done
here for that layer alone.

VI-1: the layer is not touched: its method is given a stand-in that has the layer's attributes, and tensors of its own.
VI-2: only for linear layers, and where copies fill all that is loaded. Whether it comes to the same is proven (VR-2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from roles.vllm_copies import Copies
from roles.vllm_hidden import own_tensors

_DONE = "_already_called_process_weights_after_loading"


def can_stand_in(layer: nn.Module, copies: Copies) -> bool:
    """Whether VI-2 holds of it."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(layer, LinearBase) or not isinstance(method, QuantizeMethodBase):
        return False
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    filled = copies.filled(layer)
    return not buffers and all(filled.get(name, 0) == p.numel() for name, p in parameters.items())


def made_of(layer: Any, copies: Copies, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """By name, what the layer's tensors are with these weights; on the current stream, in vLLM's config."""
    loaded = {name: _with_memory(p, device) for name, p in get_layerwise_info(layer).restore_metadata[0].items()}
    copies.fill(layer, loaded, weights)
    stand_in = _stand_in(layer, loaded)
    layer.quant_method.process_weights_after_loading(stand_in)
    return own_tensors(stand_in)


def _stand_in(layer: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    made: nn.Module = object.__new__(type(layer))  # vLLM's classes choose one another in their own `__new__`
    made.__dict__.update(layer.__dict__)
    made.__dict__.pop(_DONE, None)
    own = {"_parameters": parameters, "_buffers": {}, "_non_persistent_buffers_set": set()}
    made.__dict__.update(own, _modules=dict(layer._modules))
    return made


def _with_memory(meta: Tensor, device: torch.device) -> Tensor:
    """As vLLM makes a parameter before loaders fill it, and zero, so that what copies leave out shows in the proof."""
    made = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device).zero_()
    made.__class__ = meta.__class__
    made.__dict__ = meta.__dict__.copy()
    return made
