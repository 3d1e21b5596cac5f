"""What an objective measures besides its loss: sums and maxima that add up over micro-batches and ranks.

MS-1: before clamping and before truncation, in float64, without gradient (A6).
MS-2: the names are exactly those of `algorithms.metrics.SUMS` and `MAXIMA`; `metrics.finish` makes ratios of them.
MS-3: the mismatch of sampler and trainer is that of mu and pi_old, whatever the objective takes its ratio to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms import corrections
from algorithms.aggregate import masked_sum
from roles.objective import LossInputs


@torch.no_grad()
def measure(
    inputs: LossInputs,
    mask: Tensor,
    *,
    loss: Tensor,
    log_rho: Tensor,
    weight: Tensor | None,
    changed: Tensor,
    masked: Tensor,
    clipped_low: Tensor,
    clipped_high: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima of one micro-batch (MS-2).

    Args:
        mask: [B, L] bool, trained and finite.
        log_rho: [B, L] what the objective clips, not clamped.
        weight: [B, L] the weights that the loss used; None: none.
        changed: [B, L] bool, tokens whose weight was truncated or set to 0.
        masked: [B, L] bool, tokens that a mask dropped.
        clipped_low, clipped_high: [B, L] bool.
    """
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    old = torch.where(mask, inputs.old_logprobs.double(), zero)
    mu = torch.where(mask, inputs.rollout_logprobs.double(), zero)
    log_w = old - mu
    w, gap = log_w.exp(), log_w.abs()
    used = w if weight is None else weight.double()
    rho = log_rho.double().exp()
    entropy = inputs.entropy.detach().double()
    total, squares = corrections.weight_sums(w, mask)
    used_total, used_squares = corrections.weight_sums(used, mask)
    # KL(mu || pi_old): the tokens were sampled from mu.
    mismatch_k1, mismatch_k3 = corrections.measure_kl(-log_w, mask)
    _, policy_k3 = corrections.measure_kl(-log_rho, mask)
    sums = {
        "tokens": mask.sum(),
        "sequences": mask.any(-1).sum(),
        "nonfinite_tokens": (inputs.mask & ~mask).sum(),
        "signal_tokens": (mask & (inputs.advantages != 0)).sum(),
        # Over several updates of a step this gives the mean weighted by their tokens.
        "loss_times_tokens": loss.detach() * inputs.num_tokens,
        "entropy": masked_sum(entropy, mask & entropy.isfinite()),
        "ratio": masked_sum(rho, mask),
        "clipped_low": clipped_low.sum(),
        "clipped_high": clipped_high.sum(),
        "policy_k3": policy_k3,
        "mismatch_k1": mismatch_k1,
        "mismatch_k3": mismatch_k3,
        "logprob_gap": masked_sum(gap, mask),
        "probability_gap": masked_sum((old.exp() - mu.exp()).abs(), mask),
        "weight": total,
        "weight_squared": squares,
        "truncated_weight": used_total,
        "truncated_weight_squared": used_squares,
        "truncated_tokens": (mask & changed).sum(),
        "masked_tokens": masked.sum(),
        **_fresh(inputs, mask, old, mu),
    }
    maxima = {
        "ratio": torch.where(mask, rho, zero).amax(),
        "weight": torch.where(mask, w, zero).amax(),
        "logprob_gap": torch.where(mask, gap, zero).amax(),
    }
    return {name: value.double() for name, value in sums.items()}, maxima


def _fresh(inputs: LossInputs, mask: Tensor, old: Tensor, mu: Tensor) -> dict[str, Tensor]:
    """Of tokens at most one version old: what a correlation of both sides needs."""
    fresh = mask if inputs.ages is None else mask & (inputs.ages <= 1)
    return {
        "fresh_tokens": fresh.sum(),
        "fresh_gap": masked_sum((old - mu).abs(), fresh),
        "fresh_trainer": masked_sum(old, fresh),
        "fresh_rollout": masked_sum(mu, fresh),
        "fresh_trainer_squared": masked_sum(old.square(), fresh),
        "fresh_rollout_squared": masked_sum(mu.square(), fresh),
        "fresh_product": masked_sum(old * mu, fresh),
    }
