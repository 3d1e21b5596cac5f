"""Noise of requests with a seed of their own, for all rows of a batch at once. Runs in vLLM's worker, on a GPU.

vLLM samples a token as the argmax of p / q with q ~ Exp(1), and draws q row by row where requests have seeds: a kernel
launch a request and step, a third of the speed of 256 requests. Here q is a function of (seed, draw, token): one kernel
fills every row. How many draws a request has made is kept where vLLM keeps it, in the offset of its generator.

VD-1: a row depends on the seed of its request and on how many tokens it has drawn, on nothing else of the batch.
VD-2: q is Philox-4x32-10 (Salmon et al., SC'11) of the counter (token, draw, 0, 0) under the key seed, as a uniform
      number w in (0, 1), then -ln(1 - w): fine where it is small, which is what decides, never 0 and never infinite.
VD-3: a draw that vLLM takes back (`set_offset(get_offset() - 4)`: a prompt that came in pieces) is made again alike.
VD-4: requests without a seed and generators of the CPU are sampled by vLLM as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["exponential", "fill", "install"]

_DRAW = 4
"""How far vLLM takes a CUDA generator back for one draw."""

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _exponential(q_ptr, keys_ptr, rows_ptr, stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill the rows named by `rows_ptr`; `keys_ptr` holds (seed, draw) of each."""
    at = tl.program_id(0)
    seed, draw, row = tl.load(keys_ptr + 2 * at), tl.load(keys_ptr + 2 * at + 1), tl.load(rows_ptr + at)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], dtype=tl.uint32)
    bits, _b, _c, _d = tl.philox(seed, tokens.to(tl.uint32), nothing + draw.to(tl.uint32), nothing, nothing)
    # the upper half as its complement: a float can say 1e-9, not 1 - 1e-9
    w = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    q = tl.where(w < 0.01, w * (1.0 + w * (0.5 + w * (1.0 / 3.0))), -tl.log(1.0 - w))
    tl.store(q_ptr + row * stride + tokens, q, mask=tokens < width)


def exponential(q: Tensor, rows: list[int], keys: list[tuple[int, int]]) -> None:
    """Fill rows of q with Exp(1) numbers (VD-2).

    Args:
        q: [B, V] float32.
        rows: which of the B.
        keys: (seed, draws made so far) of each.
    """
    table = torch.tensor([[seed, draw] for seed, draw in keys], dtype=torch.int64, pin_memory=q.is_cuda)
    places = torch.tensor(rows, dtype=torch.int64, pin_memory=q.is_cuda)
    fill(q, places.to(q.device, non_blocking=True), table.to(q.device, non_blocking=True))


def fill(q: Tensor, rows: Tensor, keys: Tensor) -> None:
    """As `exponential`, with both on the device: [n] rows and [n, 2] keys, 64-bit numbers."""
    grid = (len(rows), triton.cdiv(q.shape[1], _BLOCK))
    _exponential[grid](q, keys, rows, q.stride(0), q.shape[1], BLOCK=_BLOCK)


def install(sampler: Any) -> None:
    """Replace `random_sample` of vLLM's module `v1.sample.ops.topk_topp_sampler`; once."""
    before = sampler.random_sample
    if getattr(before, "is_tutti", False):
        return
    sampler.random_sample = _instead_of(before, sampler.sample_with_exponential_noise)


def _instead_of(before: Callable[..., Tensor], choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def random_sample(probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False) -> Tensor:
        if use_fp64_gumbel or not generators or not probs.is_cuda:
            return before(probs, generators, use_fp64_gumbel)
        q = torch.empty_like(probs)
        if len(generators) != len(probs):
            q.exponential_()
        exponential(q, list(generators), [_drawn(generator) for generator in generators.values()])
        return choose(probs, q)

    random_sample.is_tutti = True  # type: ignore[attr-defined]
    return random_sample


def _drawn(generator: torch.Generator) -> tuple[int, int]:
    """(seed, draws before this one) of a generator, which then has made one more (VD-3)."""
    offset = generator.get_offset()
    generator.set_offset(offset + _DRAW)
    seed = generator.initial_seed()
    return seed - 2**64 if seed >= 2**63 else seed, offset // _DRAW
