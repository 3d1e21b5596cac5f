"""The pieces of objectives: what one token adds to the loss. One function a paper, nothing else.

SU-1: pure and elementwise over [B, L], except where a formula is about the sequence; losses, to be minimised.
SU-2: what is exponentiated is clamped first (CO-2); a clipped token has gradient 0 unless its paper says otherwise.

Notation: rho = pi / pi_prox, A = advantage. Worked for rho = (1.2, .5, 1, 3) in the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms import corrections
from algorithms.aggregate import per_sequence_mean


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


def reinforce_terms(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """[B, L] -A log pi. REINFORCE, Williams 1992."""
    return -advantages * logprobs


def sapo_terms(
    log_rho: Tensor, advantages: Tensor, *, temperature_good: float = 1.0, temperature_bad: float = 1.05
) -> Tensor:
    """[B, L] -(4 / tau) sigmoid(tau (rho - 1)) A: a gate that closes softly instead of a clip.

    tau is `temperature_good` for A > 0, else `temperature_bad`. At rho = 1 value -2 A / tau and the gradient of -rho A.
    SAPO, arXiv:2511.20347.
    """
    for name, value in (("temperature_good", temperature_good), ("temperature_bad", temperature_bad)):
        if value <= 0:
            raise ValueError(f"{name}: expected more than 0, got {value}; the paper uses 1.0 and 1.05")
    tau = torch.where(
        advantages > 0,
        torch.full_like(advantages, temperature_good),
        torch.full_like(advantages, temperature_bad),
    )
    return -4 / tau * torch.sigmoid(tau * (corrections.bounded_exp(log_rho) - 1)) * advantages


def sequence_log_ratio(log_rho: Tensor, mask: Tensor) -> Tensor:
    """[B, L] the log of s = exp(mean_t log rho_t), the same for all tokens of a sequence. GSPO, arXiv:2507.18071."""
    return per_sequence_mean(log_rho, mask).unsqueeze(-1).expand_as(log_rho)


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """[B, L] 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), the critic's loss of PPO.

    `clip` None leaves the second out. Schulman et al. 2017, the implementation of arXiv:1707.06347.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    bounded = old_values.detach() + (values - old_values.detach()).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (bounded - returns).square())
