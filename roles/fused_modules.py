"""What the modules of a Llama-shaped layer compute, as few calls of torch as it takes.

Projections that read the same input are one matrix here, and the modules' parameters become views of its rows: the
module tree stays the owner of the weights (DE-2). A module that is something else than it seems (quantised, adapted,
another norm) is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Apply = Callable[[Tensor], Tensor]
Adds = Callable[[Tensor, Tensor], Tensor]
"""(residual, x) -> residual + f(x)."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one decoder layer computes, taken from its modules."""

    input_norm: Apply
    qkv: Apply
    head_norm: Apply | None
    """[N, H + K, D] of queries and keys, before they are rotated."""
    out: Adds
    post_norm: Apply
    mlp: Adds


def block_of(layer: Any) -> Block:
    attention = layer.self_attn
    return Block(
        input_norm=norm(layer.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norm=_head_norm(attention),
        out=_adding(attention.o_proj),
        post_norm=norm(layer.post_attention_layernorm),
        mlp=_mlp(layer.mlp),
    )


def linear(module: Any) -> Apply:
    """The product without the cost of a module call, where the module is nothing more."""
    if type(module) is not nn.Linear:
        return module  # type: ignore[no-any-return]
    return _product(module.weight, module.bias)


def _bias(module: nn.Linear) -> Tensor | None:
    """torch's annotation forgets that it may be None."""
    return module.bias


def _product(weight: Tensor, bias: Tensor | None) -> Apply:
    if bias is not None:
        return lambda x: F.linear(x, weight, bias)
    transposed = weight.t()  # a view: it follows what is written into the weight
    return lambda x: torch.mm(x, transposed)


def _adding(module: Any) -> Adds:
    """A residual and the product in one, where the module is nothing more than a product."""
    if type(module) is not nn.Linear or _bias(module) is not None:
        apply = linear(module)
        return lambda residual, x: residual + apply(x)
    transposed = module.weight.t()
    return lambda residual, x: torch.addmm(residual, x, transposed)


def _joined(parts: list[nn.Linear]) -> Apply:
    """One matrix for linears with a common input; their parameters become views of its rows (DE-2)."""
    if any(type(part) is not nn.Linear for part in parts):  # quantised or adapted: keep what the module does
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    if 0 < len(biases) < len(parts):
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)
    bias = torch.cat(tuple(biases)) if biases else None
    start = 0
    for part in parts:
        rows = slice(start, start + part.out_features)
        part.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[rows], requires_grad=False)
        start += part.out_features
    return _product(weight, bias)


def norm(module: Any) -> Apply:
    """torch's RMS norm where it computes what the module does, else the module."""
    epsilon = epsilon_of(module)
    if epsilon is None:
        return module  # type: ignore[no-any-return]
    weight, shape = module.weight, module.weight.shape
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def epsilon_of(module: Any) -> float | None:
    """Of an RMS norm that torch computes as the module does; None for any other."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", None)
    # The type's own kernel rounds once where transformers rounds twice; in float32 the two agree to the last bits.
    if weight is None or epsilon is None or weight.dtype != torch.float32:
        return None
    probe = torch.linspace(-2, 3, weight.numel(), device=weight.device)
    with torch.no_grad():
        same = torch.allclose(module(probe), F.rms_norm(probe, weight.shape, weight, epsilon), rtol=1e-5, atol=1e-6)
    return float(epsilon) if same else None


def _head_norm(attention: Any) -> Apply | None:
    """The norms of queries and keys as one, where both are plain; their weights become rows of one table (DE-2)."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key, dim = attention.q_norm, attention.k_norm, int(attention.head_dim)
    heads = attention.q_proj.out_features // dim
    kv_heads = attention.k_proj.out_features // dim
    epsilon = epsilon_of(query)
    if epsilon is None or epsilon != epsilon_of(key) or query.weight.shape != (dim,):
        return lambda x: torch.cat((query(x[:, :heads]), key(x[:, heads:])), dim=1)
    weights = torch.stack((query.weight, key.weight))
    query.weight = nn.Parameter(weights[0], requires_grad=False)
    key.weight = nn.Parameter(weights[1], requires_grad=False)
    which = torch.tensor([0] * heads + [1] * kv_heads, device=weights.device)
    return lambda x: F.rms_norm(x, (dim,), None, epsilon).mul_(weights[which])


def _mlp(module: Any) -> Adds:
    """Gate and up as one product where the module has them, else the module on a batch of one sequence."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = getattr(module, "act_fn", None)
    if activation is None or any(type(part) is not nn.Linear for part in (gate, up, down)):

        def run(residual: Tensor, x: Tensor) -> Tensor:
            result = module(x[None])
            batch: Tensor = result[0] if isinstance(result, tuple) else result
            return residual + batch[0]

        return run
    joined, lowered, activate = _joined([gate, up]), _adding(down), activation_of(activation)  # type: ignore[list-item]

    def fused(residual: Tensor, x: Tensor) -> Tensor:
        gated, raised = joined(x).chunk(2, dim=-1)
        return lowered(residual, activate(gated).mul_(raised))

    return fused


def activation_of(module: Any) -> Apply:
    """torch's SiLU, in place, where the module computes the same."""
    return (lambda x: F.silu(x, inplace=True)) if is_silu(module) else module


def is_silu(module: Any) -> bool:
    probe = torch.linspace(-4, 4, 64)
    return torch.equal(module(probe), F.silu(probe))


def embedding(module: Any) -> Apply:
    """The lookup without the cost of a module call, where the module is nothing more."""
    if type(module) is not nn.Embedding:
        return module  # type: ignore[no-any-return]
    return lambda ids: F.embedding(ids, module.weight)
