"""Triton forms for NVIDIA and AMD GPUs, with the signatures of `roles.kernels_torch`.

KN-1: one program a row; sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(x_ptr, y_ptr, scale_ptr, largest, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    at = program * GROUP + tl.arange(0, GROUP)
    x = tl.load(x_ptr + at).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / largest
    y = tl.minimum(tl.maximum(x / scale, -largest), largest)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))
    tl.store(scale_ptr + program, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    state_ptr, logits_ptr, rows, stride, inverse, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(state_ptr + row)
    total = tl.load(state_ptr + rows + row)
    weighted = tl.load(state_ptr + 2 * rows + row)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        x = x * inverse
        highest = tl.maximum(top, tl.max(x, axis=0))
        z = tl.maximum(x - highest, -200.0)
        e = tl.where(columns < WIDTH, tl.exp(z), 0.0)
        shift = tl.where(total > 0, top - highest, 0.0)
        scale = tl.where(total > 0, tl.exp(shift), 0.0)
        weighted = scale * (weighted + shift * total) + tl.sum(e * z, axis=0)
        total = scale * total + tl.sum(e, axis=0)
        top = highest
    tl.store(state_ptr + row, top)
    tl.store(state_ptr + rows + row, total)
    tl.store(state_ptr + 2 * rows + row, weighted)


@triton.jit  # type: ignore[untyped-decorator]
def _slope(  # type: ignore[no-untyped-def]
    logits_ptr,
    logsum_ptr,
    target_ptr,
    of_logprob_ptr,
    of_entropy_ptr,
    entropy_ptr,
    width,
    stride,
    inverse,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = logits_ptr + row * stride + columns
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse
    log_p = x - tl.load(logsum_ptr + row)
    of_logprob = tl.load(of_logprob_ptr + row)
    weight = tl.zeros([BLOCK], dtype=tl.float32) + of_logprob
    if ENTROPY:
        gap = tl.maximum(log_p, -200.0) + tl.load(entropy_ptr + row)
        weight += tl.load(of_entropy_ptr + row) * gap
    slope = -tl.exp(log_p) * weight
    slope += tl.where(columns == tl.load(target_ptr + row), of_logprob, 0.0)
    tl.store(at, (slope * inverse).to(logits_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    """The group is a power of two here."""
    if x.shape[-1] % group:
        raise ValueError(f"quantize_rows: rows of {x.shape[-1]} are no multiple of the group of {group}")
    x = x.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // group), dtype=torch.float32, device=x.device)
    if scale.numel():
        _quantize[(scale.numel(),)](x, values, scale, float(torch.finfo(dtype).max), GROUP=group)
    return values, scale


def softmax_fold(state: Tensor, logits: Tensor, temperature: float) -> None:
    rows, width = logits.shape
    if rows and width:
        _fold[(rows,)](state, logits, rows, logits.stride(0), 1 / temperature, WIDTH=width, BLOCK=4096, num_warps=8)


def softmax_slope(
    logits: Tensor,
    temperature: float,
    logsum: Tensor,
    target: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """In the memory of the logits."""
    rows, width = logits.shape
    if rows and width:
        block = 4096
        _slope[(rows, -(-width // block))](
            logits,
            logsum,
            target,
            of_logprob.contiguous(),
            entropy if of_entropy is None else of_entropy.contiguous(),
            entropy,
            width,
            logits.stride(0),
            1 / temperature,
            ENTROPY=of_entropy is not None,
            BLOCK=block,
            num_warps=8,
        )
    return logits
