"""Noise of requests with a seed of their own, for all rows of a batch at once. Runs in vLLM's worker, on a GPU.

vLLM samples a token as the argmax of p / q with q ~ Exp(1), and draws q row by row where requests have seeds: a kernel
launch a request and step, a third of the speed of 256 requests. Here q is a function of (seed, draw, token): one kernel
fills every row. How many draws a request has made is how many tokens it has, which vLLM's batch keeps in an array: no
generator is asked, but for its seed.

VD-1: a row depends on the seed of its request and on how many tokens it has sampled, on nothing else of the batch.
VD-2: q is Philox-4x32-10 (Salmon et al., SC'11) of the counter (token, draw, 0, 0) under the key seed, as a uniform
      number w in (0, 1), then -ln(1 - w): fine where it is small, which is what decides, never 0 and never infinite.
VD-3: a draw that vLLM throws away (a prompt that came in pieces, a step that was preempted) is made again alike.
VD-4: requests without a seed and generators of the CPU are sampled by vLLM as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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


def exponential(q: Tensor, rows: np.ndarray, keys: np.ndarray) -> None:
    """Fill rows of q with Exp(1) numbers (VD-2).

    Args:
        q: [B, V] float32.
        rows: [n] int64, which of the B.
        keys: [n, 2] int64, (seed, draws made so far) of each.
    """
    places, table = (torch.from_numpy(array) for array in (rows, keys))
    if q.is_cuda:
        places, table = (array.pin_memory().to(q.device, non_blocking=True) for array in (places, table))
    fill(q, places, table)


def fill(q: Tensor, rows: Tensor, keys: Tensor) -> None:
    """As `exponential`, with both on the device: [n] rows and [n, 2] keys, 64-bit numbers."""
    grid = (len(rows), triton.cdiv(q.shape[1], _BLOCK))
    _exponential[grid](q, keys, rows, q.stride(0), q.shape[1], BLOCK=_BLOCK)


def install(sampler: Any, runner: Any) -> None:
    """Replace `random_sample` of vLLM's module `v1.sample.ops.topk_topp_sampler`; once.

    Args:
        runner: whose batch is sampled.
    """
    before = sampler.random_sample
    if getattr(before, "is_tutti", False):
        return
    sampler.random_sample = _instead_of(before, sampler.sample_with_exponential_noise, runner)


def _instead_of(
    before: Callable[..., Tensor], choose: Callable[[Tensor, Tensor], Tensor], runner: Any
) -> Callable[..., Tensor]:
    def random_sample(probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False) -> Tensor:
        if use_fp64_gumbel or not generators or not probs.is_cuda:
            return before(probs, generators, use_fp64_gumbel)
        q = torch.empty_like(probs)
        if len(generators) != len(probs):
            q.exponential_()
        rows, keys = _keys(generators, runner.input_batch)
        exponential(q, rows, keys)
        _keep_offsets(generators, runner.discard_request_mask.np[: len(probs)])
        return choose(probs, q)

    random_sample.is_tutti = True  # type: ignore[attr-defined]
    return random_sample


def _keys(generators: dict[int, torch.Generator], batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows that have a seed, and (seed, draws before this one) of each."""
    rows = np.fromiter(generators, np.int64, len(generators))
    keys = np.empty((len(rows), 2), np.int64)
    keys[:, 0] = np.array([one.initial_seed() for one in generators.values()], np.uint64).view(np.int64)
    keys[:, 1] = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
    return rows, keys


def _keep_offsets(generators: dict[int, torch.Generator], discarded: np.ndarray) -> None:
    """vLLM takes a draw back from each prompt that came in part, and an offset may not be negative."""
    for row in np.flatnonzero(discarded):
        if (generator := generators.get(int(row))) is not None:
            generator.set_offset(generator.get_offset() + _DRAW)
