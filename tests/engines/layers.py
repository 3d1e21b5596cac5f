"""A small model of vLLM's own layers, without an engine, and three ways in which kernels may keep weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from roles.vllm_reload import Reloader
from sync.layout import Entry

SHAPES = {"embed": (60, 32), "q": (32, 32), "k": (16, 32), "v": (16, 32), "norm": (32,)}


class Plain(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM has no types for us
    """As on a GPU: nothing is done after loading."""

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


class Transposed(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM has no types for us
    """A kernel that wants another layout and fewer bits, with a scale that is found out from the weights."""

    compiled = staticmethod(torch.compile(torch.abs, backend="eager"))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scale = Parameter(self.compiled(layer.weight.data).max()[None].clone(), requires_grad=False)
        weight = layer.weight.data.t().contiguous() / layer.scale.data
        layer.weight = Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)


class Cached(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM has no types for us
    """A kernel that keeps a copy of its own, in a closure."""

    def process_weights_after_loading(self, layer: Any) -> None:
        copy = 2 * layer.weight.data
        layer.kernel = lambda: copy


class Model(nn.Module):
    def __init__(self, method: UnquantizedLinearMethod) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(60, 32)  # padded to 64 rows
        self.qkv = QKVParallelLinear(32, 8, 4, 2, bias=False)
        self.norm = RMSNorm(32)
        self.head = ParallelLMHead(60, 32).tie_weights(self.embed)
        for layer in (self.embed, self.head):
            layer.quant_method.process_weights_after_loading = lambda _layer: None  # no packing, as on a GPU
        self.qkv.quant_method = method

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "norm":
                getattr(self.norm.weight, "weight_loader", lambda p, w: p.data.copy_(w))(self.norm.weight, weight)
            elif name == "embed":
                self.embed.weight.weight_loader(self.embed.weight, weight)
            else:
                self.qkv.weight.weight_loader(self.qkv.weight, weight, name)


METHODS: dict[str, Any] = {"plain": Plain, "transposed": Transposed, "cached": Cached}


def started(kind: str, names: Iterable[str] = SHAPES) -> tuple[Any, Reloader]:
    """A model after vLLM's start, and a reloader of it for tensors of those names."""
    method = METHODS[kind]()
    model = Model(method)
    record_metadata_for_reloading(model)
    with torch.no_grad():
        model.embed.weight.zero_()
    model.load_weights(numbers(0).items())
    method.process_weights_after_loading(model.qkv)
    checkpoint = [Entry.whole(name, SHAPES[name], "float32") for name in names]
    return model, Reloader(model, VllmConfig(), torch.device("cpu"), checkpoint)


def numbers(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def qkv(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name] for name in "qkv"])
