"""Attention of cuDNN for the long sequences of a packed row, flash attention for the others.

    row      | 5000 | 4100 | 900 | 700 | 300 |
    calls    cuDNN   cuDNN   flash, packed         each over a run of neighbours

KC-1: a sequence of at least `LONG` positions is padded on the right to a multiple of `STEP`. Attention is causal, so no
      position sees the padding. cuDNN plans its work per shape: this bounds the shapes.
KC-2: sequences shorter than that run packed, as a whole, without padding.

On H200, forward and backward, 32 heads of 128 over 8 kv heads: 474 TFLOP/s at 8192 positions, flash 273.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from roles import kernels_flash
from roles.kernels_torch import Packed

LONG = 2048
STEP = 256
BACKEND = SDPBackend.CUDNN_ATTENTION


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
    """`kernels_torch.attention`, without sink and window."""
    assert sink is None  # `kernels` does not choose this form then
    assert window is None or window >= packed.longest
    if packed.longest < LONG:
        return kernels_flash.attention(q, k, v, packed, scale=scale)
    parts, start = [], 0
    for lengths in _runs(packed.lengths):
        stop = start + sum(lengths)
        queries, keys, values = q[start:stop], k[start:stop], v[start:stop]
        start = stop
        if lengths[0] >= LONG:
            parts.append(_padded(queries, keys, values, count=len(lengths), scale=scale))
        else:
            run = Packed(lengths, packed.device)
            parts.append(kernels_flash.attention(queries, keys, values, run, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Neighbours that one call takes: long ones of equal length, or short ones."""
    run: list[int] = []
    for length in lengths:
        if run and length != run[0] and max(length, run[0]) >= LONG:
            yield run
            run = []
        run.append(length)
    yield run


def _padded(q: Tensor, k: Tensor, v: Tensor, *, count: int, scale: float | None) -> Tensor:
    """[count x L, heads, D] of `count` sequences of L positions each (KC-1)."""
    length = len(q) // count
    padding = -length % STEP
    rows = [tensor.unflatten(0, (count, length)) for tensor in (q, k, v)]
    if padding:  # torch copies for a padding of nothing too
        rows = [F.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in rows]
    query, key, value = (tensor.transpose(1, 2) for tensor in rows)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(BACKEND):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)[:, :length].flatten(0, 1)
