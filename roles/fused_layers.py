"""Decoder layers of a model that is trained, computed in a third of the kernels and less than half of the memory.

    x --norm--> q k v --head norms, rotation--> attention --out--> + x = h --norm--> gate up --product--> down --> + h
    ^ kept                                      ^ q k v, result kept     ^ kept      ^ kept

FU-1: a layer is replaced where the replacement computes what it computes: both are run on a few positions when the
      model is loaded. Any other layer stays as it is; what of it is not plain (adapted, a mixture of experts, a bias)
      is called as a module.
FU-2: of a layer stays for the backward pass what the picture says. Norms, rotated heads before their rotation and the
      product of gate and up are computed again there, which costs two small matrix products.
FU-3: weights are asked of their modules at each call: FSDP2 puts others in their place.
FU-4: the arithmetic between matrix products is float32, rounded once; gradients that meet are added before rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roles import kernels
from roles.fused_modules import epsilon_of, is_silu
from roles.policy_torch import narrow_windows
from roles.sums import GradientSum, sum_of
from roles.trainer_config import TrainerConfig

PROBE = (5, 3)
"""Positions of the sequences on which a layer and its replacement are compared."""


def fuses_layers(config: TrainerConfig, device: torch.device) -> bool:
    """A compiler fuses by itself; a CPU computes small operations as fast one by one."""
    return device.type == "cuda" and not config.compile


def fuse_layers(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Replace the forward function of these decoder layers where that changes no result (FU-1); returns of how many.

    Args:
        model: of these layers, with our attention (PT-1 of `roles.policy_torch`).
    """
    with narrow_windows(model):
        return sum(_fuse(layer) for layer in layers)


def _fuse(layer: Any) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if mlp is None or not all(isinstance(projection, nn.Linear) for projection in projections):
        return False
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    epsilons = [epsilon for norm in norms if (epsilon := epsilon_of(norm)) is not None]
    head_epsilons = [epsilon_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    if len(epsilons) < 2 or head_epsilons[0] != head_epsilons[1] or not hasattr(attention, "head_dim"):
        return False
    before = layer.forward
    fused = functools.partial(_forward, layer, before, epsilons, head_epsilons[0], _is_gated(mlp))
    if not _same(layer, before, fused, attention.head_dim):
        return False
    layer.forward = fused
    return True


def _same(layer: Any, before: Callable[..., Any], fused: Callable[..., Any], head_dim: int) -> bool:
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(PROBE), len(weight), generator=generator).to(weight)
    angles = torch.randn(1, sum(PROBE), head_dim // 2, generator=generator).to(weight).repeat(1, 1, 2)
    packed = kernels.Packed(PROBE, weight.device)
    places = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None, "packed": packed}
    try:
        with torch.no_grad():
            expected, got = before(x, **places), fused(x, **places)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of a layer with other arguments or shapes
        return False
    if not isinstance(expected, Tensor):
        return False
    bound = 1e-5 * float(expected.abs().max())
    return expected.shape == got.shape and torch.allclose(expected, got, rtol=1e-4, atol=bound)


def _is_gated(mlp: nn.Module) -> bool:
    """Whether it is down(silu(gate(x)) * up(x)) of three linear layers, as far as its parts say."""
    parts = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation: Any = getattr(mlp, "act_fn", None)
    return all(isinstance(part, nn.Linear) for part in parts) and activation is not None and is_silu(activation)


def _plain(*modules: nn.Module) -> bool:
    """Linear layers and nothing more: what is adapted or split is another type or has a forward function of its own."""
    return all(type(module) is nn.Linear and "forward" not in vars(module) for module in modules)


def _forward(
    layer: Any,
    before: Callable[..., Any],
    epsilons: Sequence[float],
    head_epsilon: float | None,
    is_gated: bool,
    hidden_states: Tensor,
    **named: Any,
) -> Any:
    """A decoder layer, with the arguments of transformers."""
    packed, attention = named.get("packed"), layer.self_attn
    cos, sin = (angles.squeeze(0) for angles in named["position_embeddings"])
    if (
        packed is None
        or named.get("attention_mask") is not None
        or cos.shape[-1] != attention.head_dim  # a part of each head is rotated
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return before(hidden_states, **named)
    x = hidden_states.squeeze(0)
    q, k, v, x = _heads(x, layer.input_layernorm, attention, epsilons[0], head_epsilon, cos, sin)
    out = kernels.attention(q, k, v, packed, scale=attention.scaling, window=_window(attention))
    h = x + attention.o_proj(out.flatten(1))
    return _mlp(h, layer.post_attention_layernorm, layer.mlp, epsilons[1], is_gated).unsqueeze(0)


def _window(attention: Any) -> int | None:
    """Where families keep it."""
    owner = attention if hasattr(attention, "sliding_window") else getattr(attention, "config", None)
    window: int | None = getattr(owner, "sliding_window", None)
    return window


def _heads(
    x: Tensor, norm: Any, attention: Any, epsilon: float, head_epsilon: float | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, [T, heads, D] each, and x for the residual stream."""
    q_norm, k_norm = (None, None) if head_epsilon is None else (attention.q_norm.weight, attention.k_norm.weight)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    width = attention.head_dim
    if _plain(*projections):
        run: Any = _NormedHeads.apply
        linear = [part for projection in projections for part in (projection.weight, projection.bias)]
        found: tuple[Tensor, Tensor, Tensor, Tensor] = run(
            x, norm.weight, epsilon, *linear, q_norm, k_norm, head_epsilon or 0.0, width, cos, sin
        )
        return found
    normal = kernels.rms_norm(x, norm.weight, epsilon)
    q, k, v = (projection(normal).unflatten(-1, (-1, width)) for projection in projections)
    q, k = kernels.head_rope(q, k, q_norm, k_norm, head_epsilon or 0.0, cos, sin)
    return q, k, v, x


def _mlp(h: Tensor, norm: Any, mlp: Any, epsilon: float, is_gated: bool) -> Tensor:
    """h + mlp(norm(h))."""
    if not is_gated:
        result = mlp(kernels.rms_norm(h, norm.weight, epsilon).unsqueeze(0))
        batch: Tensor = result[0] if isinstance(result, tuple) else result
        return h + batch.squeeze(0)
    parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if _plain(*parts) and all(part.bias is None for part in parts):
        run: Any = _NormedMlp.apply
        out: Tensor = run(h, norm.weight, epsilon, *(part.weight for part in parts))
        return out
    normal = kernels.rms_norm(h, norm.weight, epsilon)
    lowered: Tensor = mlp.down_proj(kernels.gated(mlp.gate_proj(normal), mlp.up_proj(normal)))
    return h + lowered


class _NormedHeads(torch.autograd.Function):
    """Norm, projections, head norms and rotation; of all that x stays. It is also a result, so that the gradient of the
    residual stream comes in here and is added before rounding (FU-4)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        epsilon: float,
        wq: Tensor,
        bq: Tensor | None,
        wk: Tensor,
        bk: Tensor | None,
        wv: Tensor,
        bv: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        head_epsilon: float,
        width: int,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normal = kernels.rms_norm(x, norm, epsilon)
        parts = ((wq, bq), (wk, bk), (wv, bv))
        q, k, v = (F.linear(normal, w, b).unflatten(-1, (-1, width)) for w, b in parts)
        q, k = kernels.head_rope(q, k, q_norm, k_norm, head_epsilon, cos, sin)
        ctx.save_for_backward(x, norm, wq, bq, wk, bk, wv, q_norm, k_norm, cos, sin)
        ctx.epsilon, ctx.head_epsilon, ctx.width = epsilon, head_epsilon, width
        ctx.sums = [sum_of(weight) for weight in (wq, wk, wv)]  # checkpointing hands others to the backward pass
        ctx.small_sums = [sum_of(weight) for weight in (norm, q_norm, k_norm)]
        return q, k, v, x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, norm, wq, bq, wk, bk, wv, q_norm, k_norm, cos, sin = ctx.saved_tensors
        normal = kernels.rms_norm(x, norm, ctx.epsilon)
        q = k = None
        if q_norm is not None:
            q, k = (F.linear(normal, w, b).unflatten(-1, (-1, ctx.width)) for w, b in ((wq, bq), (wk, bk)))
        by_q, by_k, by_q_norm, by_k_norm = kernels.head_rope_slope(
            q, k, q_norm, k_norm, ctx.head_epsilon, cos, sin, grads[0], grads[1]
        )
        slopes = [slope.flatten(1) for slope in (by_q, by_k, grads[2])]
        needed = ctx.needs_input_grad
        needs = (needed[3], needed[5], needed[7])
        by_normal, by_weights = _linear_slopes(normal, slopes, (wq, wk, wv), needs, ctx.sums)
        by_biases = [
            slope.sum(0) if need else None
            for slope, need in zip(slopes, (needed[4], needed[6], needed[8]), strict=True)
        ]
        by_x, by_norm = kernels.rms_norm_slope(x, norm, ctx.epsilon, by_normal, grads[3])
        by_linear = [part for pair in zip(by_weights, by_biases, strict=True) for part in pair]
        by_norms = [
            _small_slope(slope, weight, into)
            for slope, weight, into in zip(
                (by_norm, by_q_norm, by_k_norm), (norm, q_norm, k_norm), ctx.small_sums, strict=True
            )
        ]
        return by_x, by_norms[0], None, *by_linear, *by_norms[1:], *[None] * 4


class _NormedMlp(torch.autograd.Function):
    """h + down(silu(gate(norm(h))) * up(norm(h))); h and the results of gate and up stay."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, norm: Tensor, epsilon: float, wgate: Tensor, wup: Tensor, wdown: Tensor) -> Tensor:
        normal = kernels.rms_norm(h, norm, epsilon)
        gate, up = normal @ wgate.T, normal @ wup.T
        ctx.save_for_backward(h, norm, wgate, wup, wdown, gate, up)
        ctx.epsilon = epsilon
        ctx.sums = [sum_of(weight) for weight in (wgate, wup, wdown)]
        ctx.small_sum = sum_of(norm)
        return (kernels.gated(gate, up) @ wdown.T).add_(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        h, norm, wgate, wup, wdown, gate, up = ctx.saved_tensors
        (slope,) = grads
        by_gate, by_up, product = kernels.gated_slope(gate, up, slope @ wdown)
        del gate, up
        by_down = _weight_slope(slope, product, ctx.needs_input_grad[5], ctx.sums[2])
        del product
        normal = kernels.rms_norm(h, norm, ctx.epsilon)
        by_normal, by_weights = _linear_slopes(
            normal, (by_gate, by_up), (wgate, wup), ctx.needs_input_grad[3:5], ctx.sums[:2]
        )
        by_h, by_norm = kernels.rms_norm_slope(h, norm, ctx.epsilon, by_normal, slope)
        return by_h, _small_slope(by_norm, norm, ctx.small_sum), None, *by_weights, by_down


def _linear_slopes(
    x: Tensor,
    slopes: Sequence[Tensor],
    weights: Sequence[Tensor],
    needed: Sequence[bool],
    sums: Sequence[GradientSum | None],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of linear layers with one input: by it, and by each weight that needs one."""
    by_weights = [_weight_slope(slope, x, need, into) for slope, need, into in zip(slopes, needed, sums, strict=True)]
    by_x = slopes[0] @ weights[0]
    for slope, weight in zip(slopes[1:], weights[1:], strict=True):
        by_x.addmm_(slope, weight)
    return by_x, by_weights


def _weight_slope(slope: Tensor, x: Tensor, needed: bool, into: GradientSum | None) -> Tensor | None:
    """For autograd, unless it goes into a sum (SU-2)."""
    if not needed:
        return None
    if into is None:
        return slope.T @ x
    into.add_product(slope.T, x)
    return None


def _small_slope(slope: Tensor | None, weight: Tensor | None, into: GradientSum | None) -> Tensor | None:
    """The same for a weight whose gradient is there, in float32."""
    if slope is None or weight is None:
        return None
    if into is None:
        return slope.to(weight.dtype)
    into.add(slope)
    return None
