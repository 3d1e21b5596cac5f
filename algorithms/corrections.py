"""Corrections for what the sampler and the trainer disagree on, and measures of how much that is.

Three policies meet: mu sampled the tokens (the rollout engine, its numerics, its version), pi_old is what the trainer
computes for the same tokens at the start of the step, pi is the policy under training. w = pi_old / mu corrects for the
first difference, rho = pi / pi_old is what PPO clips.

CO-1: `log_ratio` is the only place where two logprobs meet: 0 outside the mask, so that nothing there can leak, neither
      as a value nor as a gradient (A6).
CO-2: what is exponentiated for a loss is clamped to +-LOG_RATIO_LIMIT first (float32 overflows at 88.7); what is
      measured is not: measures take log-ratios before clamping and weights before truncation, in float64.
CO-3: corrections carry no gradient: the weight of a token is a fact about how it was sampled.
CO-4: a token that is masked out gets weight 0 or False here, and the denominators stay as they are (AG-2).

Shapes: [B, L] tensors are about tokens, mask is [B, L] bool.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from algorithms.aggregate import masked_sum, per_sequence_mean

LOG_RATIO_LIMIT = 20.0
"""Bound on a log-ratio before exp: e^20 = 4.9e8 is beyond any use, and its square still fits float32."""

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """[B, L] log(numerator / denominator) of two logprobs; 0 outside the mask. Not clamped."""
    zero = torch.zeros((), dtype=numerator.dtype, device=numerator.device)
    # Selecting before subtracting keeps NaN and inf outside the mask out of the gradient as well.
    return torch.where(mask, numerator, zero) - torch.where(mask, denominator, zero)


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-LOG_RATIO_LIMIT (CO-2)."""
    return log_value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


# --- weights and masks ------------------------------------------------------------------------------------------------


def token_tis(log_w: Tensor, cap: float, low: float = 0.0) -> Tensor:
    """[B, L] truncated importance weight of each token: min(w, cap), at least `low`.

    Ionides 2008, "Truncated importance sampling"; for rollout mismatch Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training". w = (1.2, .5, 1, 3) with cap 2 gives (1.2, .5, 1, 2).
    """
    return bounded_exp(log_w.detach()).clamp(min=low, max=cap)


def sequence_tis(log_w: Tensor, mask: Tensor, cap: float, low: float = 0.0) -> Tensor:
    """[B, L] one truncated weight for all tokens of a sequence: min(prod_t w_t, cap). Variance grows with length."""
    return bounded_exp(masked_row_sum(log_w.detach(), mask)).clamp(min=low, max=cap).unsqueeze(-1).expand_as(log_w)


def icepop(log_w: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """[B, L] w where low <= w <= high, else 0: tokens beyond either side are dropped. Ring-1T, arXiv:2510.18855."""
    w = bounded_exp(log_w.detach())
    return torch.where((w >= low) & (w <= high), w, torch.zeros_like(w))


def opsm(log_rho: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """[B, L] bool: drops the sequences with A < 0 that the policy has left: mean_t log(pi_old / pi) > delta.

    Off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556. `log_rho` may be taken to mu instead of pi_old.
    """
    gone = per_sequence_mean(-log_rho.detach(), mask) > delta
    bad = per_sequence_mean(advantages, mask) < 0
    return ~(gone & bad).unsqueeze(-1).expand_as(log_rho)


def veto(log_w: Tensor, mask: Tensor, threshold: float = 1e-4) -> Tensor:
    """[B, L] bool: drops the sequences of which any token has w < threshold: the trainer holds that token impossible.

    Same source as `mis`.
    """
    impossible = (mask & (log_w.detach() < math.log(threshold))).any(-1)
    return ~impossible.unsqueeze(-1).expand_as(log_w)


def mis(log_w: Tensor, low: float = 0.5, high: float = 2.0) -> Tensor:
    """[B, L] bool, the tokens that are kept: low <= w <= high; a mask, so that kept tokens are not reweighted.

    Masked importance sampling, Liu et al. 2025, "When speed kills stability".
    """
    w = bounded_exp(log_w.detach())
    return (w >= low) & (w <= high)


def geometric_mask(log_w: Tensor, mask: Tensor, low: float = 0.99, high: float = 1.01) -> Tensor:
    """[B, L] bool: keeps the sequences whose geometric mean weight exp(mean_t log w_t) is in [low, high].

    The sequence form of masked importance sampling, free of the length in the product; same source as `mis`.
    """
    w = bounded_exp(per_sequence_mean(log_w.detach(), mask)).unsqueeze(-1)
    return ((w >= low) & (w <= high)).expand_as(log_w)


def interpolated_proximal(logprobs: Tensor, rollout_logprobs: Tensor, ages: Tensor) -> Tensor:
    """[B, L] log pi_prox = log mu + alpha (log pi - log mu), alpha = age / (age + 1); no gradient.

    The proximal policy of decoupled PPO without a forward pass of its own: the policy of the step's start is guessed to
    lie between the one that sampled the token and the current one, by the versions between them. A token of age 0 has
    pi_prox = mu. A-3PO, arXiv:2512.06547.
    """
    age = ages.to(logprobs.dtype)
    gap = logprobs.detach() - rollout_logprobs.detach()
    return rollout_logprobs.detach() + age / (age + 1) * gap


def dppo_tv(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float = 0.2) -> Tensor:
    """[B, L] bool, the tokens that are trained: those not yet moved by more than delta in the wanted direction.

    Binary total variation of DPPO, arXiv:2602.04879: a difference of probabilities, so that a rare token may change its
    ratio a lot. Drops A > 0 with pi - mu > delta, and A < 0 with pi - mu < -delta.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    moved = torch.where(mask, logprobs.detach(), zero).exp() - torch.where(mask, rollout_logprobs, zero).exp()
    too_far = ((advantages > 0) & (moved > delta)) | ((advantages < 0) & (moved < -delta))
    return mask & ~too_far


# --- divergences ------------------------------------------------------------------------------------------------------


def kl(log_p_over_q: Tensor, estimator: KLEstimator) -> Tensor:
    """[B, L] one-sample estimates of KL(p || q) for tokens sampled from p, in nats; x = log p - log q.

    As a value      k1 = x            unbiased, may be negative
                    k2 = x^2 / 2      biased, never negative
                    k3 = e^-x - 1 + x unbiased and never negative
    As a loss       k1 has the expected gradient 0, k2 that of KL(p || q), k3 that of the *other* direction.
    "k1+" and "k3+" have the value of k1 and k3 with the gradient of k2: right on both counts.

    Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477. x is clamped to +-LOG_RATIO_LIMIT where
    it is exponentiated; for measures in float64 see `measure_kl`.
    """
    if estimator == "k1":
        return log_p_over_q
    if estimator == "k2":
        return 0.5 * log_p_over_q.square()
    if estimator == "k3":
        return bounded_exp(-log_p_over_q) - 1 + log_p_over_q
    if estimator in ("k1+", "k3+"):
        value = kl(log_p_over_q.detach(), "k1" if estimator == "k1+" else "k3")
        carrier = kl(log_p_over_q, "k2")
        return value + carrier - carrier.detach()
    raise ValueError(f"kl: expected one of {', '.join(get_args(KLEstimator))}, got {estimator!r}")


def off_policy_kl(log_p_over_q: Tensor, log_p_over_mu: Tensor, estimator: KLEstimator) -> Tensor:
    """[B, L] estimates of KL(p || q) for tokens sampled from mu: `kl` times p / mu, and with the right gradient.

    For k1 and k3 the gradient goes through the ratio as well: then E_mu[(p / mu) k] = E_p[k] holds for all parameters,
    and with it its derivative. For k2 and the "+" estimators, whose own gradient is right where p samples, the ratio is
    a constant. DeepSeek-V3.2, arXiv:2512.02556, has the first with k3.
    """
    ratio = bounded_exp(log_p_over_mu)
    return (ratio if estimator in ("k1", "k3") else ratio.detach()) * kl(log_p_over_q, estimator)


def measure_kl(log_p_over_q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of k1 and k3 over the mask, float64, unclamped (CO-2). Divide by the number of tokens."""
    x = log_p_over_q.detach().double()
    return masked_sum(x, mask), masked_sum(torch.expm1(-x) + x, mask)


def ess(w: Tensor, mask: Tensor) -> Tensor:
    """Effective sample size as a fraction, (sum w)^2 / (n sum w^2), in (0, 1]; n = selected tokens; 0 when none.

    Kish 1965. To add it up over micro-batches use the two sums (`weight_sums`), never the mean of fractions.
    """
    total, squares = weight_sums(w, mask)
    n = mask.sum()
    return torch.where(n > 0, total.square() / (n * squares).clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def chi2(w: Tensor, mask: Tensor) -> Tensor:
    """chi-squared divergence of pi_old from mu, E_mu[w^2] - 1; for weights of mean 1, ESS = 1 / (1 + chi2)."""
    _, squares = weight_sums(w, mask)
    return squares / mask.sum().clamp(min=1) - 1


def weight_sums(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum w, sum w^2) over the mask, float64: all that ESS and chi2 need."""
    w = w.detach().double()
    return masked_sum(w, mask), masked_sum(w.square(), mask)


def masked_row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[B] sum over the selected tokens of each row."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(-1)
