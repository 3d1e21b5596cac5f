"""Tokens out of logits: temperature, top-k, top-p, one uniform number per token, and the logprob that goes with it.

SA-1: the reported logprob is under the distribution the token was drawn from: after temperature, then top-k, then
      top-p, renormalised, in float32. A greedy token (temperature 0) is drawn from a point mass: its logprob is 0.
SA-2: a row's token and logprob depend on that row's logits, parameters, seed and token index only. Which other rows
      stand in the batch, and which filters *they* ask for, changes no bit.
SA-3: a token of probability 0 is never drawn. Logits that give no distribution (NaN, +inf, all -inf) are an error.

Randomness is counter-based: the uniform of token t of a completion is a hash of (seed, t). No generator has a state, so
that continuous batching, preemption, restart and resume draw the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roles.sampling_check import check_sampling as check_sampling
from roles.seeds import completion_seed as completion_seed
from roles.types import Sampling

_UNIFORM_BITS = 48
"""Bits of a uniform number. The float64 product of a CDF's total and (1 - 2**-48) stays below the total (SA-3)."""


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """One number in [0, 1) per row, a function of (seed, index) alone.

    Args:
        seeds: [B] int64; the bits of a 64-bit seed (see `seed_tensor`).
        indices: [B] int64, index of the token in its completion.

    Returns:
        [B] float64, multiples of 2**-48.
    """
    # Splitmix64's finaliser, twice, so that neighbouring seeds and neighbouring indices give unrelated numbers.
    # Products of int64 wrap around in torch as they do in uint64.
    bits = _mix(_mix(seeds) + (indices + 1) * _GOLDEN)
    return _shift_right(bits, 64 - _UNIFORM_BITS).to(torch.float64) * 2.0**-_UNIFORM_BITS


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """[B] int64 with the bits of 64-bit seeds, signed or not; torch has little arithmetic for uint64."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: int64's own shift would copy the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


@dataclass(frozen=True, kw_only=True)
class RowParameters:
    """Sampling parameters of the rows of a batch, as tensors, so that a step costs no Python per row."""

    temperature: Tensor
    """[B] float32; 0 is greedy."""
    top_k: Tensor
    """[B] int64; 0 keeps all."""
    top_p: Tensor
    """[B] float32; 1 keeps all."""
    any_greedy: bool = True
    """False promises that no row is greedy: its arithmetic is left out, the results are the same."""
    any_filter: bool = True
    """False promises that no row asks for top-k or top-p."""
    any_tempered: bool = True
    """False promises that every temperature is 1 or 0."""

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device | str = "cpu") -> RowParameters:
        """Stack the parameters of one `Sampling` per row."""
        return cls(
            temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            any_greedy=any(row.temperature == 0 for row in rows),
            any_filter=any(row.top_k > 0 or row.top_p < 1 for row in rows),
            any_tempered=any(row.temperature not in (0, 1) for row in rows),
        )


def sampling_logits(logits: Tensor, rows: RowParameters) -> Tensor:
    """Logits of the sampling distribution: tempered, and -inf where top-k or top-p cut. Greedy rows are only cut.

    Args:
        logits: [B, V], any float type.

    Returns:
        [B, V] float32.
    """
    scaled = logits.float()
    if rows.any_tempered:
        temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0) if rows.any_greedy else rows.temperature
        scaled = scaled / temperature[:, None]
    elif rows.any_filter:
        scaled = scaled.clone()
    if not rows.any_filter:
        return scaled
    chosen = torch.nonzero((rows.top_k > 0) | (rows.top_p < 1)).squeeze(1)
    if chosen.numel():  # the sort is the price of a filter: only rows that ask for one pay it
        part = scaled[chosen]
        scaled[chosen] = part.masked_fill(~_kept(part, rows.top_k[chosen], rows.top_p[chosen]), -torch.inf)
    return scaled


def likeliest(logits: Tensor, rows: RowParameters, count: int) -> tuple[Tensor, Tensor]:
    """The tokens of the highest probability under the sampling distribution; of greedy rows at temperature 1.

    Returns:
        (ids [B, count] int64, logprobs [B, count] float32, natural log), likeliest first; -inf where a filter cut.
    """
    top = sampling_logits(logits, rows).log_softmax(-1).topk(count, dim=-1)
    return top.indices, top.values


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[R, V] bool: tokens within top-k, and of those within top-p of their renormalised mass. Ties: the lower id."""
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    within_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    mass = torch.softmax(ordered.masked_fill(~within_k, -torch.inf), dim=-1, dtype=torch.float64)
    before = mass.cumsum(-1) - mass
    # The likeliest token always stays. `top_p = 1` keeps all by decision: a sum of many terms may reach 1 too early.
    within_p = (before < top_p.double()[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    return torch.zeros_like(within_k).scatter(1, order, within_k & within_p)


def sample(logits: Tensor, rows: RowParameters, seeds: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, V], any float type, as the model gives them.
        rows: parameters of the B rows.
        seeds: [B] int64, bits of each completion's seed.
        indices: [B] int64, index of the token in its completion.

    Returns:
        (tokens [B] int64, logprobs [B] float32 under the sampling distribution).

    Raises:
        FloatingPointError: the logits of a row are no distribution (SA-3); the text names the rows.
    """
    return draw(logits, rows, uniforms(seeds, indices))


def draw(logits: Tensor, rows: RowParameters, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """As `sample`, with the uniform number of each row ([B] float64) given."""
    final = sampling_logits(logits, rows)
    log_probs = torch.log_softmax(final, dim=-1)
    cdf = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    if not math.isfinite(float(total.sum())):
        bad = torch.nonzero(~torch.isfinite(total).squeeze(1)).squeeze(1).tolist()
        raise FloatingPointError(
            f"sampling: expected finite logits, got NaN or infinity in {len(bad)} of {len(final)} rows (first: row "
            f"{bad[0]}); the weights have diverged or were loaded wrongly: check the last update's gradient norm"
        )
    tokens = torch.searchsorted(cdf, numbers[:, None] * total, right=True)
    tokens, logprobs = tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)
    if rows.any_greedy:
        greedy = rows.temperature == 0
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        logprobs = torch.where(greedy, 0.0, logprobs)
    return tokens, logprobs
