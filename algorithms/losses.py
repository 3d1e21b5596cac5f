"""Objectives: what a trainer rank minimises, each composed of plain pieces of one paper each.

LO-1: an objective is `f(inputs: LossInputs, **options) -> LossOutput`; its loss is divided by global denominators, so
      that results add up over micro-batches and ranks to those of one process (A4, OB-2).
LO-2: nothing outside the mask reaches loss, gradient, sums or maxima, not even NaN (A6).
LO-3: a trained token whose logprob is not finite on one of the sides (probability 0 in low precision) is left out and
      counted as `nonfinite_tokens`; the loss keeps it in its denominator, the measures do not.
LO-4: what is measured is measured before clamping and before truncation (A6).
LO-5: `sums` and `maxima` hold exactly the names in `algorithms.metrics.SUMS` and `MAXIMA`; sums are float64.
      `value` is about a critic and has its own.
LO-6: every objective takes the options of `Shared` besides its own: which policy the ratio is taken to, how the sampler
      is corrected for, how tokens become one number, which penalties are added.

Notation: mu sampled, pi_old is the start of the step, pi_prox what the ratio is taken to, pi is current;
rho = pi / pi_prox, w = pi_prox / mu, A = advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from algorithms import corrections, surrogates
from algorithms.aggregate import Aggregate, masked_sum
from algorithms.aggregate import aggregate as combine
from algorithms.corrections import KLEstimator
from algorithms.measures import measure
from roles.objective import LossInputs, LossOutput


class Shared(TypedDict, total=False):
    """Options of every objective."""

    proximal: Literal["recompute", "rollout", "interpolate"]
    """pi_prox. "recompute": pi_old, what the trainer computes at the start of the step (decoupled PPO,
    arXiv:2110.00641, 2505.24298). "interpolate": between mu and pi by the token's age (A-3PO,
    `corrections.interpolated_proximal`). "rollout": mu itself, so that w = 1 and nothing is corrected: plain PPO, or
    one that clips against the sampler."""
    tis_cap: float | None
    """Weights w are truncated to this; None leaves them out."""
    tis: Literal["token", "sequence"]
    """Whether w is that of the token, or the product over its sequence."""
    tis_low: float
    """Lower bound of the weights."""
    icepop: tuple[float, float] | None
    """Weights w inside of [low, high], 0 outside; takes the place of truncation."""
    mis: tuple[float, float] | None
    """Drop tokens with w outside of [low, high]."""
    geometric: tuple[float, float] | None
    """Drop sequences whose geometric mean of w is outside of [low, high]."""
    veto: float | None
    """Drop sequences with any w below this."""
    opsm: float | None
    """Drop sequences with A < 0 whose mean log(mu / pi) is above this."""
    aggregate: Aggregate
    max_length: int | None
    """For aggregate = "constant": the limit of sampled tokens of the run."""
    kl_weight: float
    """Of the penalty for leaving `kl_to`."""
    kl_estimator: KLEstimator
    kl_to: Literal["rollout", "old", "reference"]
    kl_unbiased: bool
    """Weigh the penalty by pi / mu, so that its gradient is that of KL(pi || kl_to) although mu sampled the tokens
    (`corrections.off_policy_kl`)."""
    entropy_weight: float
    """Bonus for entropy, per nat."""


DEFAULTS: Shared = {
    "proximal": "recompute",
    "tis_cap": 2.0,
    "tis": "token",
    "tis_low": 0.0,
    "icepop": None,
    "mis": None,
    "geometric": None,
    "veto": None,
    "opsm": None,
    "aggregate": "token-mean",
    "max_length": None,
    "kl_weight": 0.0,
    "kl_estimator": "k2",
    "kl_to": "rollout",
    "kl_unbiased": False,
    "entropy_weight": 0.0,
}


# --- what all objectives share ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The trained tokens of a micro-batch, ready for arithmetic: finite everywhere, 0 outside `mask`."""

    mask: Tensor
    """[B, L] bool: trained and finite on all sides (LO-3)."""
    logprobs: Tensor
    """[B, L] log pi, with gradient."""
    log_rho: Tensor
    """[B, L] log(pi / pi_prox), with gradient, not clamped."""
    log_w: Tensor
    """[B, L] log(pi_prox / mu), no gradient, not clamped."""
    log_pi_over_mu: Tensor
    """[B, L] log(pi / mu), with gradient, not clamped."""
    log_pi_over_old: Tensor
    """[B, L] log(pi / pi_old), with gradient, not clamped."""
    advantages: Tensor
    """[B, L]."""


def select(inputs: LossInputs, proximal: Literal["recompute", "rollout", "interpolate"] = "recompute") -> Tokens:
    """Everything of `inputs` that may be computed with (LO-2, LO-3).

    Raises:
        ValueError: unknown `proximal`, or the interpolated one without ages.
    """
    finite = inputs.logprobs.isfinite() & inputs.old_logprobs.isfinite() & inputs.rollout_logprobs.isfinite()
    mask = inputs.mask & finite
    zero = torch.zeros((), dtype=inputs.logprobs.dtype, device=inputs.logprobs.device)
    logprobs = torch.where(mask, inputs.logprobs, zero)
    old = torch.where(mask, inputs.old_logprobs.detach(), zero)
    mu = torch.where(mask, inputs.rollout_logprobs.detach(), zero)
    if proximal == "recompute":
        prox = old
    elif proximal == "rollout":
        prox = mu
    elif proximal == "interpolate":
        if inputs.ages is None:
            raise ValueError("objective: proximal = 'interpolate' needs the age of each token, the samples have none")
        prox = corrections.interpolated_proximal(logprobs, mu, torch.where(mask, inputs.ages, 0))
    else:
        raise ValueError(f"objective: proximal: expected recompute, rollout or interpolate, got {proximal!r}")
    return Tokens(
        mask=mask,
        logprobs=logprobs,
        log_rho=logprobs - prox,
        log_w=prox - mu,
        log_pi_over_mu=logprobs - mu,
        log_pi_over_old=logprobs - old,
        advantages=torch.where(mask, inputs.advantages, zero.to(inputs.advantages.dtype)),
    )


def correction(tokens: Tokens, options: Shared) -> tuple[Tensor | None, Tensor, Tensor]:
    """What the options say of the sampler: (weight, changed, kept).

    Returns:
        [B, L] weights, None for 1 everywhere; [B, L] bool, tokens whose weight was truncated or zeroed; [B, L] bool,
        the tokens that no mask drops.
    """
    w = tokens.log_w.double().exp()
    weight: Tensor | None = None
    changed = torch.zeros_like(tokens.mask)
    cap, band = options["tis_cap"], options["icepop"]
    if band is not None:
        weight = corrections.icepop(tokens.log_w, *band)
        changed = (w < band[0]) | (w > band[1])
    elif cap is not None:
        low = options["tis_low"]
        if options["tis"] == "sequence":
            weight = corrections.sequence_tis(tokens.log_w, tokens.mask, cap, low)
            w = corrections.masked_row_sum(tokens.log_w.double(), tokens.mask).exp().unsqueeze(-1).expand_as(w)
        else:
            weight = corrections.token_tis(tokens.log_w, cap, low)
        changed = (w > cap) | (w < low)
    kept = tokens.mask
    if (bounds := options["mis"]) is not None:
        kept = kept & corrections.mis(tokens.log_w, *bounds)
    if (bounds := options["geometric"]) is not None:
        kept = kept & corrections.geometric_mask(tokens.log_w, tokens.mask, *bounds)
    if (threshold := options["veto"]) is not None:
        kept = kept & corrections.veto(tokens.log_w, tokens.mask, threshold)
    if (delta := options["opsm"]) is not None:
        kept = kept & corrections.opsm(tokens.log_pi_over_mu, tokens.advantages, tokens.mask, delta)
    return weight, changed, kept


def penalties(inputs: LossInputs, tokens: Tokens, options: Shared) -> Tensor | None:
    """[B, L] kl_weight * KL - entropy_weight * entropy, or None when both are off.

    Raises:
        ValueError: the entropy carries no gradient, or there are no logprobs of a reference.
    """
    terms: Tensor | None = None
    if options["kl_weight"] != 0:
        estimator, log_to = options["kl_estimator"], _log_to(inputs, tokens, options)
        if options["kl_unbiased"]:
            divergence = corrections.off_policy_kl(log_to, tokens.log_pi_over_mu, estimator)
        else:
            divergence = corrections.kl(log_to, estimator)
        terms = options["kl_weight"] * divergence
    if options["entropy_weight"] != 0:
        if inputs.logprobs.requires_grad and not inputs.entropy.requires_grad:
            raise ValueError(
                f"objective: entropy_weight is {options['entropy_weight']}, but the entropy has no gradient; "
                "set entropy_weight to 0 or use a trainer that computes the entropy with gradient"
            )
        kept = tokens.mask & inputs.entropy.isfinite()
        bonus = -options["entropy_weight"] * torch.where(kept, inputs.entropy, torch.zeros_like(inputs.entropy))
        terms = bonus if terms is None else terms + bonus
    return terms


def _log_to(inputs: LossInputs, tokens: Tokens, options: Shared) -> Tensor:
    if options["kl_to"] == "rollout":
        return tokens.log_pi_over_mu
    if options["kl_to"] == "old":
        return tokens.log_pi_over_old
    if inputs.reference_logprobs is None:
        raise ValueError(
            "objective: kl_to = 'reference', but the samples have no logprobs of a reference policy; give the job one, "
            "or use kl_to = 'rollout'"
        )
    return corrections.log_ratio(tokens.logprobs, inputs.reference_logprobs.detach(), tokens.mask)


def finish(
    inputs: LossInputs,
    tokens: Tokens,
    terms: Tensor,
    options: Shared,
    *,
    clip_low: float | None,
    clip_high: float | None,
    kept: Tensor | None = None,
) -> LossOutput:
    """From terms per token to loss and measures: correct, mask, add penalties, aggregate. For objectives of your own.

    Args:
        terms: [B, L] of one of the `surrogates`.
        clip_low, clip_high: what counts as clipped in the measures; None: nothing on that side.
        kept: [B, L] bool, a further mask of the objective's own.
    """
    weight, changed, unmasked = correction(tokens, options)
    if kept is not None:
        unmasked = unmasked & kept
    if weight is not None:
        terms = weight * terms
    terms = torch.where(unmasked, terms, torch.zeros_like(terms))
    extra = penalties(inputs, tokens, options)
    loss = combine(
        terms if extra is None else terms + extra,
        tokens.mask,
        options["aggregate"],
        num_tokens=inputs.num_tokens,
        num_sequences=inputs.num_sequences,
        max_length=options["max_length"],
    )
    clipped_low = tokens.mask & (tokens.advantages < 0)
    clipped_high = tokens.mask & (tokens.advantages > 0)
    rho = tokens.log_rho.detach().double().exp()
    sums, maxima = measure(
        inputs,
        tokens.mask,
        loss=loss,
        log_rho=tokens.log_rho,
        weight=weight,
        changed=changed,
        masked=tokens.mask & ~unmasked,
        clipped_low=clipped_low & (rho < 1 - clip_low) if clip_low is not None else torch.zeros_like(clipped_low),
        clipped_high=clipped_high & (rho > 1 + clip_high) if clip_high is not None else torch.zeros_like(clipped_high),
    )
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def _options(shared: Shared, **own: object) -> Shared:
    """The defaults of this objective below what the caller said."""
    if shared.get("icepop") is not None and shared.get("tis_cap") is not None:
        raise ValueError("objective: icepop and tis_cap are both given, expected one way of weighting; leave one out")
    options: Shared = {**DEFAULTS, **own, **shared}  # type: ignore[typeddict-item]
    return options


# --- objectives -------------------------------------------------------------------------------------------------------


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    **shared: Unpack[Shared],
) -> LossOutput:
    """PPO-clip (arXiv:1707.06347) times truncated importance weights. With advantages by groups it is GRPO
    (arXiv:2402.03300), with the default bounds and token mean DAPO (arXiv:2503.14476), with `proximal` = "recompute" or
    "interpolate" decoupled PPO.

    Args:
        inputs: one micro-batch.
        clip_low, clip_high: rho is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c of dual clipping, > 1; None is off.
    """
    options = _options(shared)
    tokens = select(inputs, options["proximal"])
    terms = surrogates.ppo_clip_terms(
        tokens.log_rho, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return finish(inputs, tokens, terms, options, clip_low=clip_low, clip_high=clip_high)


def gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4, **shared: Unpack[Shared]
) -> LossOutput:
    """PPO-clip on the sequence ratio s, mean over sequences. GSPO, arXiv:2507.18071.

    The clip fractions of its metrics count tokens of clipped sequences; the ratio metrics are those of s.
    """
    options = _options(shared, aggregate="sequence-mean")
    tokens = select(inputs, options["proximal"])
    log_s = surrogates.sequence_log_ratio(tokens.log_rho, tokens.mask)
    tokens = Tokens(**{**tokens.__dict__, "log_rho": torch.where(tokens.mask, log_s, torch.zeros_like(log_s))})
    terms = surrogates.ppo_clip_terms(tokens.log_rho, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return finish(inputs, tokens, terms, options, clip_low=clip_low, clip_high=clip_high)


def cispo(
    inputs: LossInputs, *, clip_low: float | None = None, clip_high: float = 0.28, **shared: Unpack[Shared]
) -> LossOutput:
    """REINFORCE with a clipped, constant ratio. CISPO, arXiv:2506.13585."""
    options = _options(shared)
    tokens = select(inputs, options["proximal"])
    terms = surrogates.cispo_terms(
        tokens.log_rho, tokens.logprobs, tokens.advantages, clip_low=clip_low, clip_high=clip_high
    )
    return finish(inputs, tokens, terms, options, clip_low=clip_low, clip_high=clip_high)


def dppo(inputs: LossInputs, *, delta: float = 0.2, ratio_cap: float = 20.0, **shared: Unpack[Shared]) -> LossOutput:
    """The gradient of -(pi / mu) A on tokens whose probability moved by at most `delta` the wanted way
    (`corrections.dppo_tv`); no token weighs more than `ratio_cap`.

    DPPO with the binary total variation, arXiv:2602.04879; the cap is that of its authors' code: a rare token may
    change its ratio a lot without leaving the trust region. The ratio is taken to the sampler, so that there is nothing
    left to correct.
    """
    if ratio_cap < 1:
        raise ValueError(f"objective dppo: ratio_cap: expected at least 1, got {ratio_cap}")
    options = _options(shared, proximal="rollout", tis_cap=None)
    tokens = select(inputs, options["proximal"])
    mu = torch.where(tokens.mask, inputs.rollout_logprobs, 0.0)
    kept = corrections.dppo_tv(tokens.logprobs, mu, tokens.advantages, tokens.mask, delta)
    terms = surrogates.cispo_terms(
        tokens.log_rho, tokens.logprobs, tokens.advantages, clip_low=None, clip_high=ratio_cap - 1
    )
    return finish(inputs, tokens, terms, options, clip_low=None, clip_high=None, kept=kept)


def sapo(
    inputs: LossInputs,
    *,
    temperature_good: float = 1.0,
    temperature_bad: float = 1.05,
    **shared: Unpack[Shared],
) -> LossOutput:
    """A soft gate in place of the clip, mean over sequences. SAPO, arXiv:2511.20347."""
    options = _options(shared, aggregate="sequence-mean")
    tokens = select(inputs, options["proximal"])
    terms = surrogates.sapo_terms(
        tokens.log_rho, tokens.advantages, temperature_good=temperature_good, temperature_bad=temperature_bad
    )
    return finish(inputs, tokens, terms, options, clip_low=None, clip_high=None)


def value(inputs: LossInputs, *, clip: float | None = 0.2, aggregate: Aggregate = "token-mean") -> LossOutput:
    """The critic's loss of PPO (`surrogates.value_terms`), for a model with a value head.

    Its sums are tokens, loss_times_tokens, and over tokens: value_error (V_old - R)^2, return, return_squared. The
    share of the returns that the critic explains is 1 - value_error / (return_squared - return^2), all as means.

    Raises:
        ValueError: the samples have no values and returns of the critic.
    """
    if inputs.values is None or inputs.old_values is None or inputs.returns is None:
        raise ValueError("objective value: the samples have no values and returns; ask the critic first (with_critic)")
    zero = torch.zeros((), dtype=inputs.values.dtype, device=inputs.values.device)
    mask = inputs.mask & inputs.values.isfinite()
    values, old, returns = (torch.where(mask, v, zero) for v in (inputs.values, inputs.old_values, inputs.returns))
    loss = combine(
        surrogates.value_terms(values, old, returns, clip=clip),
        mask,
        aggregate,
        num_tokens=inputs.num_tokens,
        num_sequences=inputs.num_sequences,
    )
    sums = {
        "tokens": mask.sum(),
        "loss_times_tokens": loss.detach() * inputs.num_tokens,
        "value_error": masked_sum((old - returns).square(), mask),
        "return": masked_sum(returns, mask),
        "return_squared": masked_sum(returns.square(), mask),
    }
    return LossOutput(loss=loss, sums={name: number.detach().double() for name, number in sums.items()})


def reinforce(inputs: LossInputs, **shared: Unpack[Shared]) -> LossOutput:
    """-A log pi times the weights of `Shared`. REINFORCE, Williams 1992; for one update a step."""
    options = _options(shared)
    tokens = select(inputs, options["proximal"])
    terms = surrogates.reinforce_terms(tokens.logprobs, tokens.advantages)
    return finish(inputs, tokens, terms, options, clip_low=None, clip_high=None)
