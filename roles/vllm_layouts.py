"""What kernels of vLLM want laid out again after a reload, and vLLM does not do by itself.

VY-1: experts on CPU are packed after each reload: 0.32.0 does so at start only; shape and dtype are equal, so nothing
      fails, and every logprob is off.
VY-2: a layer without weights of its own, such as a tied head, makes its packed copy of the shared ones anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def tied_layers(layers: Mapping[str, nn.Module], copied: Collection[int] = ()) -> list[Any]:
    """Those without weights of their own, such as a tied head: what their kernel has made of the shared ones is old.

    Called after loading, before layers are finalised.

    Args:
        layers: by name.
        copied: addresses of tensors that get their weights in another way.

    Raises:
        ValueError: nothing was loaded into a layer that has weights of its own.
    """
    loaded = set(copied)
    empty: dict[str, tuple[Any, set[int]]] = {}
    for name, layer in layers.items():
        info = get_layerwise_info(layer)
        own = dict(layer.named_parameters(recurse=False))
        if info.can_load():  # its parameters are not back in their places yet
            own = info.kernel_tensors[0] if info.kernel_tensors else {}
        places = {p.data_ptr() for key, p in own.items() if not key.endswith("_scale") and p.numel()}
        if info.can_load() and (info.load_numel_total or 0) > 0 and info.load_numel == 0:
            empty[name] = (layer, places)
        else:
            loaded |= places
    missing = [name for name, (_, places) in empty.items() if places - loaded]
    if missing:
        raise ValueError(
            f"vllm: the new weights hold nothing for {', '.join(missing[:5])} ({len(missing)} layers): the trainer's "
            "names and the model's differ; trainer and rollout must load one model"
        )
    return [layer for layer, places in empty.values() if places and hasattr(layer, "quant_method")]


class Packing:
    """Whether vLLM packs the experts of CPU kernels by itself during a reload."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Packing:
        self._module = _cpu_moe()
        if self._module is not None:
            self._pack = self._module.cpu_prepack_moe_weight

            def seen(*args: Any) -> Any:
                self.seen = True
                return self._pack(*args)

            self._module.cpu_prepack_moe_weight = seen
        return self

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._module.cpu_prepack_moe_weight = self._pack


def _cpu_moe() -> Any:
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:  # 0.25 keeps CPU experts elsewhere, unpacked
        return None
    return cpu_moe if hasattr(cpu_moe, "cpu_prepack_moe_weight") else None


def repack_cpu_experts(layers: Iterable[Any]) -> int:
    """Lay experts out as the CPU kernel reads them; returns how many layers."""
    module = _cpu_moe()
    count = 0
    for layer in layers:
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(getattr(kernel, "impl", None), "fused_experts", None)
        known = module is not None and isinstance(experts, module.CPUUnquantizedExperts)
        if not known or getattr(experts, "_use_zentorch", False):
            continue
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(module.cpu_prepack_moe_weight(weight.data.clone(), experts.isa))
        count += 1
    return count
