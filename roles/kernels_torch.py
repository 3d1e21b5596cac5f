"""Torch forms of the operations in `roles.kernels`: what every other implementation is held against.

KT-1: plain torch, any device, any floating type, with gradients. The arithmetic is float32 where a sum is long.
KT-2: attention over packed sequences costs memory and work by the square of each sequence, not of the row: sequences
      are padded to the longest of their group, and a group holds none shorter than `ALIKE` of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

ALIKE = 0.75
"""Padding a sequence to one that is longer costs at most 1 / ALIKE of its positions."""

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Packed:
    """Sequences side by side in one row of T positions.

    Args:
        lengths: positions of each sequence, at least 1 each.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(int(length) for length in lengths)
        self.device = device
        self.longest = max(self.lengths)
        self.total = sum(self.lengths)

    @functools.cached_property
    def starts(self) -> Tensor:
        """[n + 1] int32: where each sequence begins, then T."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @functools.cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Per run of alike sequences: [b, L] position of each row and column (padding repeats the last one), and the
        [m] flat indices of those that are no padding, in the order of the row."""
        found, first, offset = [], 0, 0
        while first < len(self.lengths):
            longest = self.lengths[first]
            last = first
            while last < len(self.lengths) and ALIKE * longest <= self.lengths[last] <= longest:
                last += 1
            lengths = torch.tensor(self.lengths[first:last])
            begins = offset + lengths.cumsum(0) - lengths
            columns = torch.arange(longest)
            index = begins[:, None] + columns.clamp(max=longest - 1)
            index = torch.minimum(index, (begins + lengths - 1)[:, None])
            real = (columns < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
            found.append((index.to(self.device), real.to(self.device)))
            offset += int(lengths.sum())
            first = last
        return found


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
    """Causal attention within each sequence of a row.

    Args:
        q: [T, heads, D].
        k: [T, kv heads, D]; heads is a multiple of kv heads.
        v: [T, kv heads, D'].
        scale: of the scores; None: D ** -0.5.
        window: each position sees itself and the `window - 1` before it; None: all before it.
        sink: [heads] scores of a position that all see and that holds nothing (gpt-oss, arXiv:2309.17453).

    Returns:
        [T, heads, D'].
    """
    outputs = []
    for index, real in packed.groups:
        rows, longest = index.shape
        part = [tensor[index].transpose(1, 2) for tensor in (q, k, v)]
        out = _padded_attention(*part, scale=scale, window=window, sink=sink)
        flat = out.transpose(1, 2).reshape(rows * longest, out.shape[1], out.shape[3])
        outputs.append(flat if len(real) == len(flat) else flat[real])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None, sink: Tensor | None
) -> Tensor:
    """[b, heads, L, D'] of [b, heads, L, D]; right padding needs no mask, since attention is causal."""
    longest = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if sink is None and (window is None or window >= longest):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    steps = torch.arange(longest, device=q.device)
    distance = steps[:, None] - steps
    seen = (distance >= 0) & (distance < (longest if window is None else window))
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
    # The sink is one more key of zeros, with the score as its bias, and a value of zeros.
    bias = torch.where(seen, 0.0, -torch.inf).to(q.dtype).expand(q.shape[1], longest, longest)
    bias = torch.cat([bias, sink.to(q.dtype)[:, None, None].expand(-1, longest, 1)], dim=-1)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=scale, enable_gqa=grouped)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the type of x. arXiv:1910.07467."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rms_norm_slope(
    x: Tensor, weight: Tensor, eps: float, slope: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` by x, and by weight in float32.

    Args:
        slope: gradient by the result.
        beside: what else the gradient by x consists of: that of a residual stream which passes the norm by.
    """
    wide, gradient = x.float(), slope.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    by_unit = gradient * weight.float()
    by_x = scale * (by_unit - unit * (by_unit * unit).mean(-1, keepdim=True))
    if beside is not None:
        by_x = by_x + beside.float()
    return by_x.to(x.dtype), (gradient * unit).flatten(0, -2).sum(0)


def head_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm of each head, where there are weights, then its pairs (i, i + D/2) rotated, of queries and keys at once.

    Args:
        q, k: [T, heads, D] each.
        q_weight, k_weight: [D], of both or none.
        cos, sin: [T, D], both halves equal.
    """
    done = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        normal = x if weight is None else rms_norm(x, weight, eps)
        done.append(_turned(normal, cos, sin).to(x.dtype))
    return done[0], done[1]


def head_rope_slope(
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_slope: Tensor,
    k_slope: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `head_rope` by q, k and both weights, of these in float32.

    Args:
        q, k: not needed without weights: a rotation is turned back.
    """
    by_input, by_weight = [], list[Tensor | None]()
    for x, weight, slope in ((q, q_weight, q_slope), (k, k_weight, k_slope)):
        back = _turned(slope, cos, -sin).to(slope.dtype)
        of_weight: Tensor | None = None
        if x is not None and weight is not None:
            back, of_weight = rms_norm_slope(x, weight, eps, back)
        by_input.append(back)
        by_weight.append(of_weight)
    return by_input[0], by_input[1], by_weight[0], by_weight[1]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the type of both. arXiv:2002.05202."""
    return F.silu(gate) * up


def gated_slope(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated` by gate and up, and its result once more: whoever kept its inputs alone needs all three."""
    wide, raised, gradient = gate.float(), up.float(), slope.float()
    share = wide.sigmoid()
    silu = wide * share
    by_gate = gradient * raised * (share + silu * (1 - share))
    return by_gate.to(gate.dtype), (gradient * silu).to(up.dtype), (silu * raised).to(up.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of [T, heads, D] by [T, D/2] angles given as cos and sin. arXiv:2104.09864."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def route(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose k experts of each token.

    Args:
        logits: [T, E].
        bias: [E], added for the choice alone (arXiv:2408.15664); the weights never see it.
        normalise: the weights of a token add up to 1 before `scale`.

    Returns:
        weights [T, k] float32 and ids [T, k] int64.
    """
    scores = gate_scores(logits, score)
    ids = (scores if bias is None else scores + bias).topk(k, dim=-1).indices
    return gate_weights(scores, ids, normalise=normalise, scale=scale), ids


def gate_scores(logits: Tensor, score: Score) -> Tensor:
    """[T, E] float32."""
    wide = logits.float()
    if score == "softmax":
        return wide.softmax(-1)
    return wide.sigmoid() if score == "sigmoid" else F.softplus(wide).sqrt()


def gate_weights(scores: Tensor, ids: Tensor, *, normalise: bool, scale: float) -> Tensor:
    """[T, k] float32 weights of given experts, with gradient to the scores: what replayed routes are weighted by."""
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def moe(hidden: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Experts with gated SiLU, summed by weight: [T, H] from w1 [E, 2 I, H] (gate, then up) and w2 [E, H, I]."""
    out = torch.zeros_like(hidden)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ w1[expert].T).chunk(2, dim=-1)
        part = (F.silu(gate) * up) @ w2[expert].T
        out.index_add_(0, token, (part * weights[token, slot, None]).to(out.dtype))
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    """FP8 with one float32 scale per `group` neighbours of a row: [M, K] and [M, K / group]. Overflow is clipped.

    Raises:
        ValueError: K is no multiple of the group.
    """
    if x.shape[-1] % group:
        raise ValueError(f"quantize_rows: rows of {x.shape[-1]} are no multiple of the group of {group}")
    largest = torch.finfo(dtype).max
    parts = x.float().unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1).clamp_min(1e-12) / largest
    values = (parts / scale[..., None]).clamp(-largest, largest)
    return values.flatten(-2).to(dtype), scale


def gemm_blocks(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] = x [M, K] @ w [N, K].T of FP8 values with scales per 1 x 128 of x and per 128 x 128 of w."""
    wide_x = x.float() * x_scale.repeat_interleave(128, -1)[:, : x.shape[1]]
    wide_w = w.float() * w_scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
    return (wide_x @ wide_w.T).to(dtype)


UNDERFLOW = -200.0
"""exp of this is 0 in float32: a bound for logits of probability 0, so that 0 * -inf can't arise."""


def empty_fold(like: Tensor) -> Tensor:
    """[3, n] float32, the state of `softmax_fold` before the first block: maximum, sum e^z, sum z e^z."""
    state = torch.zeros(3, len(like), dtype=torch.float32, device=like.device)
    state[0] = -torch.inf
    return state


def softmax_fold(state: Tensor, logits: Tensor, temperature: float) -> None:
    """Take one more block of columns into the running softmax of each row, in place (online softmax, arXiv:1805.02867).

    With z = logit / temperature - maximum, a new maximum m' turns sum z e^z into e^(m-m') (sum z e^z + (m-m') sum e^z).

    Args:
        state: [3, n] float32, see `empty_fold`.
        logits: [n, v].
    """
    top, total, weighted = state
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    highest = torch.maximum(top, z.max(-1).values)
    z = (z - highest[:, None]).clamp_min_(UNDERFLOW)
    e = z.exp()
    shift = torch.where(total > 0, top - highest, 0.0)
    scale = torch.where(total > 0, shift.exp(), 0.0)
    state[2] = scale * (weighted + shift * total) + torch.linalg.vecdot(e, z)
    state[1] = scale * total + e.sum(-1)
    state[0] = highest


def softmax_slope(
    logits: Tensor,
    temperature: float,
    logsum: Tensor,
    target: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Gradient by the logits [n, v] of logprob and entropy, in the type of the logits, perhaps in their memory.

    Args:
        logsum: [n] ln sum e^(logit / temperature) over the whole vocabulary.
        target: [n] column of the chosen token in this block, -1 where it is elsewhere.
        of_logprob, of_entropy: [n] gradient by logprob and entropy; None: the entropy has none.
        entropy: [n].
    """
    log_p = logits.float()
    log_p = (log_p if temperature == 1.0 else log_p / temperature) - logsum[:, None]
    weights = of_logprob[:, None]
    if of_entropy is not None:
        weights = weights + of_entropy[:, None] * (log_p.clamp_min(UNDERFLOW) + entropy[:, None])
    slope = log_p.exp_().mul_(-weights)
    slope.scatter_add_(1, target.clamp_min(0)[:, None], torch.where(target >= 0, of_logprob, 0.0)[:, None])
    return (slope if temperature == 1.0 else slope.div_(temperature)).to(logits.dtype)
