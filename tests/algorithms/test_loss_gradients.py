"""Gradients of the terms against differences, of critics, and of the penalties of LO-6."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algorithms import corrections, losses, surrogates
from tests.algorithms.loss_help import RATIOS, close, inputs

POINTS = torch.tensor([[0.6, 0.9, 1.1, 1.25, 1.5]], dtype=torch.float64).log()  # none on a kink
SIGNS = torch.tensor([[1.0, -1.0, 1.0, -1.0, -0.5]], dtype=torch.float64)
ALL5 = torch.ones(1, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    "terms",
    [
        lambda x: surrogates.ppo_clip_terms(x, SIGNS, clip_low=0.2, clip_high=0.28),
        lambda x: surrogates.ppo_clip_terms(x, SIGNS, clip_low=0.2, clip_high=0.28, dual_clip=1.4),
        lambda x: surrogates.ppo_clip_terms(
            surrogates.sequence_log_ratio(x, ALL5), SIGNS, clip_low=0.2, clip_high=0.28
        ),
        lambda x: surrogates.sapo_terms(x, SIGNS),
        lambda x: surrogates.reinforce_terms(x, SIGNS),
        lambda x: surrogates.value_terms(x, POINTS - 0.3, SIGNS, clip=0.2),
        lambda x: surrogates.value_terms(x, POINTS, SIGNS, clip=None),
        lambda x: corrections.kl(x, "k1"),
        lambda x: corrections.kl(x, "k2"),
        lambda x: corrections.kl(x, "k3"),
    ],
)
def test_gradient_is_that_of_the_value(terms):
    assert torch.autograd.gradcheck(terms, POINTS.clone().requires_grad_())


def test_sapo_worked_values():
    """4 sigmoid(rho - 1) at rho = (1.2, .5, 1, 3) is (2.199336, 1.510163, 2, 3.523188); at rho = 1 the slope is 1."""
    close(-surrogates.sapo_terms(RATIOS.log(), torch.ones(1, 4)), [[2.199336, 1.510163, 2.0, 3.523188]])
    with pytest.raises(ValueError, match="temperature_bad: expected more than 0, got 0"):
        surrogates.sapo_terms(RATIOS.log(), torch.ones(1, 4), temperature_bad=0)


def test_value_loss_worked_values():
    """V = 1, R = 0, V_old = 0 or .9: clipped to .2 or kept at 1; the larger of both squares, halved."""
    v, old, r = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 0.9]]), torch.zeros(1, 2)
    close(surrogates.value_terms(v, old, r), [[0.5, 0.5]])
    close(surrogates.value_terms(v, old, torch.full((1, 2), 2.0)), [[0.5 * 1.8**2, 0.5]])
    close(surrogates.value_terms(v, old, torch.full((1, 2), 3.0), clip=None), [[2.0, 2.0]])


def test_the_value_of_before_is_a_constant_of_the_value_loss():
    v, old = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[0.5]], requires_grad=True)
    for target in (2.0, -2.0):  # the clipped and the plain square are the larger one
        surrogates.value_terms(v, old, torch.tensor([[target]]), clip=0.2).sum().backward()
    assert old.grad is None


@pytest.mark.parametrize(("name", "value"), [("k1+", "k1"), ("k3+", "k3")])
def test_straight_through_kl_has_the_value_of_one_and_the_gradient_of_k2(name, value):
    x = POINTS.clone().requires_grad_()
    close(corrections.kl(x, name), corrections.kl(x.detach(), value))
    (grad,) = torch.autograd.grad(corrections.kl(x, name).sum(), x)
    close(grad, POINTS)


def test_gradient_of_k2_is_that_of_the_divergence_and_k1_has_none():
    """Exactly, over the whole vocabulary: sum_a pi(a) d/dtheta of the estimator at a, against d/dtheta KL(pi || q)."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits, retain_graph=True)
    for name, wanted in (("k1", torch.zeros(3)), ("k2", exact), ("k1+", exact), ("k3+", exact)):
        estimate = corrections.kl(logp - q, name)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad((logp.detach().exp() * estimate).sum(), logits, retain_graph=True)
        close(grad, wanted, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_a_weighed_penalty_has_the_gradient_of_the_divergence_whoever_sampled(name):
    """Exactly, over the whole vocabulary: sum_a mu(a) d/dtheta of the estimator at a; unweighed it is another one."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    mu = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits, retain_graph=True)

    def expected(estimate: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((mu * estimate).sum(), logits, retain_graph=True)
        return grad

    close(expected(corrections.off_policy_kl(logp - q, logp - mu.log(), name)), exact, atol=1e-12)
    assert (expected(corrections.kl(logp - q, name)) - exact).abs().max() > 0.01
    if name != "k2":  # which is biased as a value
        value = (mu * corrections.off_policy_kl(logp - q, logp - mu.log(), name)).sum()
        close(value, (logp.exp() * (logp - q)).sum().detach(), atol=1e-12)


def test_the_penalty_of_an_objective_is_weighed_by_the_ratio_to_the_sampler_when_asked():
    """pi / mu = 2 and KL to the sampler by k2 = log(2)^2 / 2."""
    x = inputs(torch.full((1, 4), 2.0), advantages=0.0)
    plain = losses.ppo(x, kl_weight=0.1).loss
    close(losses.ppo(x, kl_weight=0.1, kl_unbiased=True).loss, 2 * plain.detach())
