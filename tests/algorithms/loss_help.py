"""Inputs of objectives and their gradients: what the tests of losses share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from algorithms import losses
from roles.objective import LossInputs, LossOutput

RATIOS = torch.tensor([[1.2, 0.5, 1.0, 3.0]])
OBJECTIVES = [losses.ppo, losses.gspo, losses.cispo, losses.dppo, losses.sapo, losses.reinforce]


def close(actual: Tensor, expected: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def inputs(
    rho: Tensor = RATIOS, w: Tensor | None = None, advantages: float | Tensor = 1.0, **changes: Any
) -> LossInputs:
    """mu = .3 for each token, pi_old = .3 w, pi = .3 w rho."""
    w = torch.ones_like(rho) if w is None else w
    mu = torch.full_like(rho, 0.3).log()
    old = mu + w.log()
    a = torch.full_like(rho, advantages) if isinstance(advantages, float) else advantages
    values: dict[str, Any] = {
        "logprobs": (old + rho.log()).requires_grad_(),
        "old_logprobs": old,
        "rollout_logprobs": mu,
        "advantages": a,
        "mask": torch.ones_like(rho, dtype=torch.bool),
        "entropy": torch.full_like(rho, 0.7),
        "num_tokens": rho.numel(),
        "num_sequences": len(rho),
    }
    return LossInputs(**{**values, **changes})


def random_inputs(rows: int = 5, columns: int = 7) -> LossInputs:
    g = torch.Generator().manual_seed(0)
    shape = (rows, columns)
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=g)

    def logprobs(scale: float) -> Tensor:
        return base + scale * torch.randn(shape, generator=g)

    base = -torch.rand(shape, generator=g) - 0.2
    return LossInputs(
        logprobs=logprobs(0.3).requires_grad_(),
        old_logprobs=logprobs(0.3),
        rollout_logprobs=logprobs(0.6),
        advantages=torch.randn((rows, 1), generator=g).expand(shape),
        mask=mask,
        entropy=torch.rand(shape, generator=g),
        num_tokens=int(mask.sum()),
        num_sequences=rows,
    )


def part(whole: LossInputs, rows: slice) -> LossInputs:
    tensors = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask", "entropy")
    return LossInputs(
        **{name: getattr(whole, name)[rows] for name in tensors},
        num_tokens=whole.num_tokens,
        num_sequences=whole.num_sequences,
    )


def gradient(objective: Any, x: LossInputs, **options: Any) -> tuple[LossOutput, Tensor]:
    out = objective(x, **options)
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    return out, grad
