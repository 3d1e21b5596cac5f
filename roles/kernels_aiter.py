"""AITER's kernels (ROCm, CDNA3 and newer) behind the signatures of `roles.kernels_torch`.

Written against the published signatures of amd-aiter 0.1.7.post2 (PyPI) and of its repository in 2026; the calls are
the same in both. They were never run on an AMD GPU by us: only tests with a stand-in for the package hold them.

KA-1: aiter is imported by the call, never by this file.
KA-2: fp8 is e4m3fnuz on gfx942 and e4m3fn from gfx950 on; the type that is asked for is passed on, and a type that the
      GPU doesn't have is AITER's own error.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roles.kernels_torch import Packed, Score

NEOX, FRONT_HALF = 0, True
"""Rotate halves, with cos and sin of half the width."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True, "deterministic": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if sink is not None:  # only later versions know it; an older one says that it does not
        options["sink_ptr"] = sink.float()
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    starts, longest = packed.starts, packed.longest
    out: Tensor = _aiter("aiter").flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)
    return out[..., :width]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Forward only."""
    out: Tensor = _aiter("aiter").rms_norm(x, weight, eps)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = (part[:, None, None].to(x.dtype) for part in (cos, sin))  # [s, 1, 1, D/2] beside [s, b = 1, h, D]
    out: Tensor = _aiter("aiter.ops.rope").RoPECached.apply(x[:, None], *angles, NEOX, FRONT_HALF, False, False)
    return out[:, 0]


def route(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    weights = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    _aiter("aiter").topk_gating(
        weights,
        ids,
        logits,
        correction_bias=bias,
        need_renorm=normalise,
        routed_scaling_factor=scale,
        score_func=score,
    )
    return weights, ids.long()


def moe(hidden: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out: Tensor = _aiter("aiter.fused_moe").fused_moe(hidden, w1, w2, weights.float(), ids.int())
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    values, scale = _aiter("aiter").per_group_quant_hip(x, quant_dtype=dtype, group_size=group)
    return values, scale


def gemm_blocks(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = _aiter("aiter").gemm_a8w8_blockscale(x, w, x_scale, w_scale, dtype=dtype)
    return out


def _aiter(module: str) -> Any:
    return importlib.import_module(module)
