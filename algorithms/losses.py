"""Objectives: what a trainer rank minimises, each composed of plain pieces of one paper each.

LO-1: an objective is `f(inputs: LossInputs, **options) -> LossOutput`; its loss is divided by global denominators, so
      that results add up over micro-batches and ranks to those of one process (A4, OB-2).
LO-2: nothing outside the mask reaches loss, gradient, sums or maxima, not even NaN (A6).
LO-3: a trained token whose logprob is not finite on one of the three sides (probability 0 in low precision) is left out
      and counted as `nonfinite_tokens`; the loss keeps it in its denominator, the measures do not.
LO-4: what is measured is measured before clamping and before truncation (A6).
LO-5: `sums` and `maxima` hold exactly the names in `algorithms.metrics.SUMS` and `MAXIMA`; sums are float64.

Notation: rho = pi / pi_old (current over start of step), w = pi_old / mu (start of step over sampler), A = advantage.
Shapes: B sequences, L columns; [B, L] values are losses, to be minimised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms import corrections
from algorithms.aggregate import Aggregate, masked_sum, per_sequence_mean
from algorithms.aggregate import aggregate as combine
from algorithms.corrections import KLEstimator
from roles.objective import LossInputs, LossOutput

# --- pieces -----------------------------------------------------------------------------------------------------------


def ppo_clip_terms(
    log_rho: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """[B, L] -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). PPO, arXiv:1707.06347; two bounds: DAPO.

    `dual_clip` c > 1 also bounds the loss of a bad token by -c A (arXiv:1912.09729). With (.2, .28) and
    rho = (1.2, .5, 1, 3) the objective is (1.2, .5, 1, 1.28) for A = 1 and (-1.2, -.8, -1, -3) for A = -1.
    """
    rho = corrections.bounded_exp(log_rho)
    terms = -torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return terms
    if dual_clip <= 1:
        raise ValueError(f"dual_clip: expected more than 1, got {dual_clip}; 3.0 is usual, leave it out to turn it off")
    return torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)


def cispo_terms(
    log_rho: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_low: float | None, clip_high: float
) -> Tensor:
    """[B, L] -stopgrad(clip(rho)) A log pi: clipped tokens keep a gradient. CISPO, arXiv:2506.13585.

    `clip_low` None is the paper's choice: no lower bound.
    """
    low = 0.0 if clip_low is None else 1 - clip_low
    weight = corrections.bounded_exp(log_rho.detach()).clamp(low, 1 + clip_high)
    return -weight * advantages * logprobs


def sequence_log_ratio(log_rho: Tensor, mask: Tensor) -> Tensor:
    """[B, L] the log of s = exp(mean_t log rho_t), the same for all tokens of a sequence. GSPO, arXiv:2507.18071."""
    return per_sequence_mean(log_rho, mask).unsqueeze(-1).expand_as(log_rho)


# --- what all objectives share ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The trained tokens of a micro-batch, ready for arithmetic: finite everywhere, 0 outside `mask`."""

    mask: Tensor
    """[B, L] bool: trained and finite on all three sides (LO-3)."""
    logprobs: Tensor
    """[B, L] log pi, with gradient."""
    log_rho: Tensor
    """[B, L] log(pi / pi_old), with gradient, not clamped."""
    log_w: Tensor
    """[B, L] log(pi_old / mu), no gradient, not clamped."""
    log_pi_over_mu: Tensor
    """[B, L] log(pi / mu), with gradient, not clamped."""
    advantages: Tensor
    """[B, L]."""


def select(inputs: LossInputs) -> Tokens:
    """Everything of `inputs` that may be computed with (LO-2, LO-3)."""
    finite = inputs.logprobs.isfinite() & inputs.old_logprobs.isfinite() & inputs.rollout_logprobs.isfinite()
    mask = inputs.mask & finite
    old = inputs.old_logprobs.detach()
    mu = inputs.rollout_logprobs.detach()
    zero = torch.zeros((), dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
    return Tokens(
        mask=mask,
        logprobs=torch.where(mask, inputs.logprobs, zero),
        log_rho=corrections.log_ratio(inputs.logprobs, old, mask),
        log_w=corrections.log_ratio(old, mu, mask),
        log_pi_over_mu=corrections.log_ratio(inputs.logprobs, mu, mask),
        advantages=torch.where(mask, inputs.advantages, zero.to(inputs.advantages.dtype)),
    )


def measure(
    inputs: LossInputs, tokens: Tokens, *, loss: Tensor, cap: float | None, clip_low: float | None, clip_high: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`sums` and `maxima` of LO-5. `cap` None: weights are reported as if nothing was truncated."""
    with torch.no_grad():
        mask = tokens.mask
        w = tokens.log_w.double().exp()
        truncated = w if cap is None else w.clamp(max=cap)
        rho = tokens.log_rho.double().exp()
        gap = tokens.log_w.double().abs()
        old = torch.where(mask, inputs.old_logprobs, 0.0).double()
        mu = torch.where(mask, inputs.rollout_logprobs, 0.0).double()
        entropy = inputs.entropy.detach().double()
        low = torch.zeros_like(mask) if clip_low is None else (tokens.advantages < 0) & (rho < 1 - clip_low)
        high = (tokens.advantages > 0) & (rho > 1 + clip_high)
        weight, weight_squared = corrections.weight_sums(w, mask)
        truncated_weight, truncated_weight_squared = corrections.weight_sums(truncated, mask)
        # KL(mu || pi_old): the tokens were sampled from mu.
        mismatch_k1, mismatch_k3 = corrections.measure_kl(-tokens.log_w, mask)
        _, policy_k3 = corrections.measure_kl(-tokens.log_rho, mask)
        sums = {
            "tokens": mask.sum(),
            "sequences": mask.any(-1).sum(),
            "nonfinite_tokens": (inputs.mask & ~mask).sum(),
            "signal_tokens": (mask & (tokens.advantages != 0)).sum(),
            # Over several updates of a step this gives the mean weighted by their tokens.
            "loss_times_tokens": loss.detach() * inputs.num_tokens,
            "entropy": masked_sum(entropy, mask & entropy.isfinite()),
            "ratio": masked_sum(rho, mask),
            "clipped_low": (mask & low).sum(),
            "clipped_high": (mask & high).sum(),
            "policy_k3": policy_k3,
            "mismatch_k1": mismatch_k1,
            "mismatch_k3": mismatch_k3,
            "logprob_gap": masked_sum(gap, mask),
            "probability_gap": masked_sum((old.exp() - mu.exp()).abs(), mask),
            "weight": weight,
            "weight_squared": weight_squared,
            "truncated_weight": truncated_weight,
            "truncated_weight_squared": truncated_weight_squared,
            "truncated_tokens": torch.zeros_like(mask).sum() if cap is None else (mask & (w > cap)).sum(),
        }
        zero = torch.zeros((), dtype=torch.float64, device=w.device)
        maxima = {
            "ratio": torch.where(mask, rho, zero).amax(),
            "weight": torch.where(mask, w, zero).amax(),
            "logprob_gap": torch.where(mask, gap, zero).amax(),
        }
        return {name: value.double() for name, value in sums.items()}, maxima


def penalties(
    inputs: LossInputs,
    tokens: Tokens,
    *,
    kl_weight: float,
    kl_estimator: KLEstimator,
    kl_to: Literal["rollout", "old"],
    entropy_weight: float,
) -> Tensor | None:
    """[B, L] kl_weight * KL - entropy_weight * entropy, or None when both are off.

    Raises:
        ValueError: an entropy bonus is asked for, but the entropy carries no gradient.
    """
    terms: Tensor | None = None
    if kl_weight != 0:
        terms = kl_weight * corrections.kl(
            tokens.log_pi_over_mu if kl_to == "rollout" else tokens.log_rho, kl_estimator
        )
    if entropy_weight != 0:
        if inputs.logprobs.requires_grad and not inputs.entropy.requires_grad:
            raise ValueError(
                f"objective: entropy_weight is {entropy_weight}, but the entropy has no gradient; "
                "set entropy_weight to 0 or use a trainer that computes the entropy with gradient"
            )
        kept = tokens.mask & inputs.entropy.isfinite()
        bonus = -entropy_weight * torch.where(kept, inputs.entropy, torch.zeros_like(inputs.entropy))
        terms = bonus if terms is None else terms + bonus
    return terms


# --- objectives -------------------------------------------------------------------------------------------------------


def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    tis_cap: float | None = 2.0,
    aggregate: Aggregate = "token-mean",
    max_length: int | None = None,
    kl_weight: float = 0.0,
    kl_estimator: KLEstimator = "k2",
    kl_to: Literal["rollout", "old"] = "rollout",
    entropy_weight: float = 0.0,
) -> LossOutput:
    """PPO-clip on rho times truncated importance weights min(w, tis_cap) per token: decoupled PPO (arXiv:2110.00641,
    2505.24298) with truncation; advantages by groups make it GRPO (arXiv:2402.03300).

    Args:
        inputs: one micro-batch.
        clip_low, clip_high: rho is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c of dual clipping, > 1; None is off.
        tis_cap: cap C of the weights; None leaves them out (w = 1).
        aggregate, max_length: see `algorithms.aggregate`.
        kl_weight, kl_estimator, kl_to: penalty for leaving the sampling ("rollout") or the step's first policy ("old").
        entropy_weight: bonus for entropy, per nat.
    """
    tokens = select(inputs)
    terms = ppo_clip_terms(
        tokens.log_rho, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    if tis_cap is not None:
        terms = corrections.token_tis(tokens.log_w, tis_cap) * terms
    extra = penalties(
        inputs, tokens, kl_weight=kl_weight, kl_estimator=kl_estimator, kl_to=kl_to, entropy_weight=entropy_weight
    )
    loss = _total(inputs, tokens, terms if extra is None else terms + extra, aggregate, max_length)
    sums, maxima = measure(inputs, tokens, loss=loss, cap=tis_cap, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    tis_cap: float | None = 2.0,
    aggregate: Aggregate = "sequence-mean",
    max_length: int | None = None,
) -> LossOutput:
    """PPO-clip on the sequence ratio s. GSPO, arXiv:2507.18071; token weights min(w, tis_cap) as in `grpo`.

    The clip fractions of its metrics count tokens of clipped sequences; the ratio metrics are those of s.
    """
    tokens = select(inputs)
    log_s = torch.where(tokens.mask, sequence_log_ratio(tokens.log_rho, tokens.mask), torch.zeros_like(tokens.log_rho))
    terms = ppo_clip_terms(log_s, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    if tis_cap is not None:
        terms = corrections.token_tis(tokens.log_w, tis_cap) * terms
    loss = _total(inputs, tokens, terms, aggregate, max_length)
    by_sequence = Tokens(**{**tokens.__dict__, "log_rho": log_s})
    sums, maxima = measure(inputs, by_sequence, loss=loss, cap=tis_cap, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def cispo(
    inputs: LossInputs,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.28,
    tis_cap: float | None = 2.0,
    aggregate: Aggregate = "token-mean",
    max_length: int | None = None,
) -> LossOutput:
    """REINFORCE with a clipped, constant ratio. CISPO, arXiv:2506.13585; token weights min(w, tis_cap) as in `grpo`."""
    tokens = select(inputs)
    terms = cispo_terms(tokens.log_rho, tokens.logprobs, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    if tis_cap is not None:
        terms = corrections.token_tis(tokens.log_w, tis_cap) * terms
    loss = _total(inputs, tokens, terms, aggregate, max_length)
    sums, maxima = measure(inputs, tokens, loss=loss, cap=tis_cap, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def _total(inputs: LossInputs, tokens: Tokens, terms: Tensor, how: Aggregate, max_length: int | None) -> Tensor:
    return combine(
        terms,
        tokens.mask,
        how,
        num_tokens=inputs.num_tokens,
        num_sequences=inputs.num_sequences,
        max_length=max_length,
    )
