"""Torch's own flash attention over packed sequences, in the versions of torch that have it (2.10 on)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from roles.kernels_torch import Packed

_ACCEPTED = inspect.signature(varlen_attn).parameters
"""2.10 knows `is_causal`; later versions say it by the window and know scale and grouped heads."""


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
    """`kernels_torch.attention`, without sink."""
    assert sink is None  # `kernels` does not choose this form then
    width, value_width = q.shape[-1], v.shape[-1]
    if value_width < width:  # latent attention: the kernel has one width for all
        v = F.pad(v, (0, width - value_width))
    options: dict[str, Any] = {}
    if scale is not None and "scale" in _ACCEPTED:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * width**0.5)
    if "window_size" in _ACCEPTED:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None or window >= packed.longest:
        options["is_causal"] = True
    else:
        raise RuntimeError("kernels: flash attention of this torch has no window; use attention = 'torch'")
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _ACCEPTED:
            options["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    starts, longest = packed.starts, packed.longest
    out: Any = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), starts, starts, longest, longest, **options)
    attended: Tensor = out[..., :value_width]
    return attended
