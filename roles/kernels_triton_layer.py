"""Triton forms of what a decoder layer computes between its matrix products, forward and backward.

KL-1: sums and products are float32, rounded once to the type of the result.
KL-2: gradients of weights are summed in a fixed order: rows of a program, then the programs.
KL-3: nothing is kept from the forward pass: scales of rows are computed again where the rows are read anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements that a program has in hand at once."""

STEPS = 4
"""Tiles that a program of a backward pass takes in turn, of norms."""

TOKENS = 8
"""Tokens that a program of a backward pass takes in turn, of heads."""

BLOCK = 2048
"""Elements of a program that goes element by element."""


@triton.jit  # type: ignore[untyped-decorator]
def _norm(x_ptr, w_ptr, y_ptr, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < width)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    w = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * w
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_slope(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    g_ptr,
    beside_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    width,
    eps,
    BESIDE: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(STEPS):
        row = (program * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (columns < width)
        at = row * width + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
        unit = x * rstd
        dw += tl.sum(g * unit, axis=0)
        slope = g * w
        dx = rstd * (slope - unit * (tl.sum(slope * unit, axis=1) / width)[:, None])
        if BESIDE:
            dx += tl.load(beside_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    all_columns = tl.arange(0, BLOCK)
    tl.store(dw_ptr + program * width + all_columns, dw, mask=all_columns < width)


@triton.jit  # type: ignore[untyped-decorator]
def _heads(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, cos, sin, token, heads, eps, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The heads of one token."""
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (column < HALF)
    at = token * heads * 2 * HALF + head * 2 * HALF + column
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first = first * rstd * tl.load(w_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        second = second * rstd * tl.load(w_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    kind = y_ptr.dtype.element_ty
    tl.store(y_ptr + at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(y_ptr + at + HALF, (second * cos + first * sin).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _head_rope(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, qw_ptr, kw_ptr, qy_ptr, ky_ptr, cos_ptr, sin_ptr, angles, q_heads, k_heads, eps,
    HALF: tl.constexpr, NORM: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    cos = tl.load(cos_ptr + token * angles + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angles + column, mask=column < HALF, other=0.0).to(tl.float32)
    _heads(q_ptr, qw_ptr, qy_ptr, cos, sin, token, q_heads, eps, HALF, NORM, Q_HEADS, WIDTH)
    _heads(k_ptr, kw_ptr, ky_ptr, cos, sin, token, k_heads, eps, HALF, NORM, K_HEADS, WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _heads_slope(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, g_ptr, dx_ptr, cos, sin, token, heads, g_token, g_head, eps, known, HALF: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of one token; returns what it adds to the gradients of both halves of the weight."""
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (column < HALF) & known
    at = token * heads * 2 * HALF + head * 2 * HALF + column
    from_ = token * g_token + head * g_head + column
    g_first = tl.load(g_ptr + from_, mask=inside, other=0.0).to(tl.float32)
    g_second = tl.load(g_ptr + from_ + HALF, mask=inside, other=0.0).to(tl.float32)
    by_first = g_first * cos + g_second * sin
    by_second = g_second * cos - g_first * sin
    dw_first = tl.zeros([WIDTH], dtype=tl.float32)
    dw_second = tl.zeros([WIDTH], dtype=tl.float32)
    if NORM:
        first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first *= rstd
        second *= rstd
        dw_first = tl.sum(by_first * first, axis=0)
        dw_second = tl.sum(by_second * second, axis=0)
        by_first *= tl.load(w_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        by_second *= tl.load(w_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        along = (tl.sum(by_first * first + by_second * second, axis=1) / (2 * HALF))[:, None]
        by_first = rstd * (by_first - first * along)
        by_second = rstd * (by_second - second * along)
    kind = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + at, by_first.to(kind), mask=inside)
    tl.store(dx_ptr + at + HALF, by_second.to(kind), mask=inside)
    return dw_first, dw_second


@triton.jit  # type: ignore[untyped-decorator]
def _head_rope_slope(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, qw_ptr, kw_ptr, qg_ptr, kg_ptr, dq_ptr, dk_ptr, dw_ptr, cos_ptr, sin_ptr, angles, tokens, q_heads,
    k_heads, qg_token, qg_head, kg_token, kg_head, eps, HALF: tl.constexpr, NORM: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    q_first = tl.zeros([WIDTH], dtype=tl.float32)
    q_second = tl.zeros([WIDTH], dtype=tl.float32)
    k_first = tl.zeros([WIDTH], dtype=tl.float32)
    k_second = tl.zeros([WIDTH], dtype=tl.float32)
    for step in range(TOKENS):
        token = program * TOKENS + step
        known = token < tokens
        real = (column < HALF) & known
        cos = tl.load(cos_ptr + token * angles + column, mask=real, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * angles + column, mask=real, other=0.0).to(tl.float32)[None, :]
        a, b = _heads_slope(
            q_ptr, qw_ptr, qg_ptr, dq_ptr, cos, sin, token, q_heads, qg_token, qg_head, eps, known, HALF, NORM,
            Q_HEADS, WIDTH,
        )  # fmt: skip
        c, d = _heads_slope(
            k_ptr, kw_ptr, kg_ptr, dk_ptr, cos, sin, token, k_heads, kg_token, kg_head, eps, known, HALF, NORM,
            K_HEADS, WIDTH,
        )  # fmt: skip
        q_first += a
        q_second += b
        k_first += c
        k_second += d
    if NORM:
        at = dw_ptr + program * 4 * HALF + column
        tl.store(at, q_first, mask=column < HALF)
        tl.store(at + HALF, q_second, mask=column < HALF)
        tl.store(at + 2 * HALF, k_first, mask=column < HALF)
        tl.store(at + 3 * HALF, k_second, mask=column < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_slope(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, g_ptr, dgate_ptr, dup_ptr, y_ptr, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    kind = y_ptr.dtype.element_ty
    tl.store(dgate_ptr + at, (g * up * (share + silu * (1 - share))).to(kind), mask=inside)
    tl.store(dup_ptr + at, (g * silu).to(kind), mask=inside)
    tl.store(y_ptr + at, (silu * up).to(kind), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    run: Any = _Norm.apply if torch.is_grad_enabled() else _normed
    out: Tensor = run(x, weight, eps)
    return out


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    width, y = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    tall = max(1, TILE // block)
    if rows:
        _norm[(-(-rows // tall),)](x, weight, y, rows, width, eps, ROWS=tall, BLOCK=block, num_warps=_warps(block))
    return y


def rms_norm_slope(
    x: Tensor, weight: Tensor, eps: float, slope: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x, slope = x.contiguous(), slope.contiguous()
    other = x if beside is None else beside.contiguous()
    width, dx = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    tall = max(1, TILE // block)
    programs = -(-rows // (tall * STEPS))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        _norm_slope[(programs,)](
            x, weight, slope, other, dx, parts, rows, width, eps, BESIDE=beside is not None, STEPS=STEPS, ROWS=tall,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return dx, parts.sum(0)


def head_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    run: Any = _HeadRope.apply if torch.is_grad_enabled() else _head_roped
    turned: tuple[Tensor, Tensor] = run(q, k, q_weight, k_weight, eps, cos, sin)
    return turned


def _head_roped(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    turned = torch.empty_like(q), torch.empty_like(k)
    if len(q):
        _head_rope[(len(q),)](
            q, k, q if q_weight is None else q_weight, k if k_weight is None else k_weight, *turned, cos, sin,
            cos.shape[-1], q.shape[1], k.shape[1], eps, num_warps=4, **_shape(q, k, q_weight),
        )  # fmt: skip
    return turned


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
    q_slope, k_slope = _rows(q_slope), _rows(k_slope)
    cos, sin = cos.contiguous(), sin.contiguous()
    dq, dk = (torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in (q_slope, k_slope))
    width, programs = q_slope.shape[-1], -(-len(q_slope) // TOKENS)
    parts = torch.empty(programs, 2, width, dtype=torch.float32, device=dq.device)
    if len(q_slope):
        _head_rope_slope[(programs,)](
            dq if q is None else q.contiguous(), dk if k is None else k.contiguous(),
            dq if q_weight is None else q_weight, dk if k_weight is None else k_weight, q_slope, k_slope, dq, dk, parts,
            cos, sin, cos.shape[-1], len(q_slope), q_slope.shape[1], k_slope.shape[1], q_slope.stride(0),
            q_slope.stride(1), k_slope.stride(0), k_slope.stride(1), eps, TOKENS=TOKENS, num_warps=4,
            **_shape(q_slope, k_slope, q_weight),
        )  # fmt: skip
    if q_weight is None or k_weight is None:
        return dq, dk, None, None
    by_q, by_k = parts.sum(0)
    return dq, dk, by_q, by_k


def gated(gate: Tensor, up: Tensor) -> Tensor:
    run: Any = _Gated.apply if torch.is_grad_enabled() else _gated_product
    out: Tensor = run(gate, up)
    return out


def _gated_product(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if y.numel():
        _gated[(-(-y.numel() // BLOCK),)](gate, up, y, y.numel(), BLOCK=BLOCK, num_warps=8)
    return y


def gated_slope(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, slope = gate.contiguous(), up.contiguous(), slope.contiguous()
    by_gate, by_up, y = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    if y.numel():
        _gated_slope[(-(-y.numel() // BLOCK),)](gate, up, slope, by_gate, by_up, y, y.numel(), BLOCK=BLOCK, num_warps=8)
    return by_gate, by_up, y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_x, by_weight = rms_norm_slope(x, weight, ctx.eps, grads[0])
        return by_x, by_weight.to(weight.dtype), None


class _HeadRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kept = (None, None) if q_weight is None else (q, k)
        ctx.save_for_backward(*kept, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        return _head_roped(q, k, q_weight, k_weight, eps, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        by_q, by_k, *by_weights = head_rope_slope(q, k, q_weight, k_weight, ctx.eps, cos, sin, grads[0], grads[1])
        return by_q, by_k, *(None if one is None else one.to(q_weight.dtype) for one in by_weights), None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        by_gate, by_up, _ = gated_slope(gate, up, grads[0])
        return by_gate, by_up


def _shape(q: Tensor, k: Tensor, weight: Tensor | None) -> dict[str, int | bool]:
    half = q.shape[-1] // 2
    return {
        "HALF": half,
        "NORM": weight is not None,
        "Q_HEADS": triton.next_power_of_2(q.shape[1]),
        "K_HEADS": triton.next_power_of_2(k.shape[1]),
        "WIDTH": triton.next_power_of_2(half),
    }


def _rows(slope: Tensor) -> Tensor:
    """Any order of tokens and heads will do, as long as a head is one run."""
    return slope if slope.stride(-1) == 1 else slope.contiguous()


def _warps(block: int) -> int:
    return 8 if block >= 1024 else 4
