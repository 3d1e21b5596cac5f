"""What holds for every objective (LO-1 to LO-5): sums over micro-batches, masks, extreme ratios, names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from algorithms import losses
from algorithms.metrics import MAXIMA, SUMS, finish
from roles.objective import LossInputs
from tests.algorithms.loss_help import OBJECTIVES, close, gradient, inputs, part, random_inputs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_add_up_to_the_whole_batch(objective):
    """LO-1, A4: loss, gradient, sums and maxima of five rows equal those of 1 + 3 + 1 rows."""
    whole = random_inputs()
    out, grad = gradient(objective, whole)
    outs = [objective(part(whole, rows)) for rows in (slice(0, 1), slice(1, 4), slice(4, 5))]
    total = outs[0].loss + outs[1].loss + outs[2].loss
    close(total, out.loss.item(), atol=1e-6)
    (parts_grad,) = torch.autograd.grad(total, whole.logprobs)
    torch.testing.assert_close(parts_grad, grad)
    for name, value in out.sums.items():
        torch.testing.assert_close(sum(o.sums[name] for o in outs), value, atol=1e-5, rtol=1e-6)
    for name, value in out.maxima.items():
        torch.testing.assert_close(torch.stack([o.maxima[name] for o in outs]).amax(), value)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_leaks(objective, poison):
    clean = random_inputs()
    tensors = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "entropy")
    poisoned = {name: torch.where(clean.mask, getattr(clean, name).detach(), poison) for name in tensors}
    poisoned["logprobs"].requires_grad_()
    dirty = LossInputs(**poisoned, mask=clean.mask, num_tokens=clean.num_tokens, num_sequences=clean.num_sequences)
    out, grad = gradient(objective, clean)
    dirty_out, dirty_grad = gradient(objective, dirty)
    assert out.loss.item() == dirty_out.loss.item()
    assert torch.equal(grad, dirty_grad)
    assert (grad[~clean.mask] == 0).all()
    assert {k: v.item() for k, v in out.sums.items()} == {k: v.item() for k, v in dirty_out.sums.items()}
    assert {k: v.item() for k, v in out.maxima.items()} == {k: v.item() for k, v in dirty_out.maxima.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("side", ["logprobs", "old_logprobs", "rollout_logprobs"])
def test_trained_token_of_probability_zero_is_left_out_and_counted(objective, side):
    x = inputs(torch.ones(1, 4))
    values = getattr(x, side).detach().clone()
    values[0, 1] = -math.inf
    changed = inputs(torch.ones(1, 4), **{side: values.requires_grad_() if side == "logprobs" else values})
    out, grad = gradient(objective, changed, aggregate="token-mean")
    assert out.loss.isfinite()
    assert grad[0, 1] == 0
    assert grad.isfinite().all()
    assert (out.sums["tokens"].item(), out.sums["nonfinite_tokens"].item()) == (3, 1)
    # LO-3: the denominator of the loss keeps it, the metric divides by the same count.
    m = finish({k: v.item() for k, v in out.sums.items()}, {})
    assert m["policy/loss"] == pytest.approx(out.loss.item(), abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_fully_masked_batch_gives_zero_loss_with_a_gradient_and_no_nan(objective):
    """Every rank enters the backward pass, also one that has only padding."""
    out, grad = gradient(objective, inputs(mask=torch.zeros(1, 4, dtype=torch.bool), num_tokens=0, num_sequences=0))
    assert out.loss.item() == 0
    assert (grad == 0).all()
    assert finish({k: v.item() for k, v in out.sums.items()}, {})["train/tokens"] == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_log_ratio_of_a_hundred_overflows_nothing(objective):
    far = torch.tensor([[100.0, -100.0]])
    base = torch.full((1, 2), -120.0)
    for advantage in (1.0, -1.0):
        x = inputs(
            torch.ones(1, 2),
            advantages=advantage,
            logprobs=(base + far).requires_grad_(),
            old_logprobs=base,
            rollout_logprobs=base - far,
        )
        out, grad = gradient(objective, x)
        assert out.loss.isfinite()
        assert grad.isfinite().all()
        assert all(value.isfinite() for value in (*out.sums.values(), *out.maxima.values()))
        assert out.sums["truncated_tokens"] == (0 if objective is losses.dppo else 1)  # which corrects nothing


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_reported_names_are_exactly_those_that_metrics_know(objective):
    out = objective(random_inputs())
    assert tuple(out.sums) == SUMS
    assert tuple(out.maxima) == MAXIMA
    assert {value.dtype for value in (*out.sums.values(), *out.maxima.values())} == {torch.float64}
    assert not any(value.requires_grad for value in (*out.sums.values(), *out.maxima.values()))


def test_one_gradient_step_raises_the_probability_of_good_tokens_and_lowers_that_of_bad_ones():
    logits = torch.zeros(1, 2, 5, requires_grad=True)
    chosen = torch.tensor([[1, 3]])
    start = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1).detach()

    def now() -> Tensor:
        return logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    x = inputs(
        torch.ones(1, 2),
        advantages=torch.tensor([[1.0, -1.0]]),
        logprobs=now(),
        old_logprobs=start,
        rollout_logprobs=start,
    )
    losses.ppo(x).loss.backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    assert now()[0, 0] > start[0, 0]
    assert now()[0, 1] < start[0, 1]


def test_the_loss_of_a_critic_is_over_trained_tokens_and_tells_what_it_explains():
    values = torch.tensor([[1.0, 5.0, 2.0]], requires_grad=True)
    x = inputs(
        torch.ones(1, 3),
        mask=torch.tensor([[True, False, True]]),
        num_tokens=2,
        values=values,
        old_values=torch.tensor([[0.9, math.nan, 2.0]]),
        returns=torch.tensor([[0.0, math.nan, 3.0]]),
    )
    out = losses.value(x)
    close(out.loss, (0.5 * 1.0 + 0.5 * 1.0) / 2)
    out.loss.backward()
    assert values.grad is not None
    close(values.grad, [[0.5, 0.0, -0.5]])
    wanted = {"tokens": 2, "loss_times_tokens": 1.0, "value_error": 0.81 + 1, "return": 3, "return_squared": 9}
    assert {name: number.item() for name, number in out.sums.items()} == pytest.approx(wanted, abs=1e-6)
    given = {name: getattr(x, name) for name in ("values", "old_values", "returns")}
    for missing in given:
        with pytest.raises(ValueError, match="the samples have no values and returns; ask the critic first"):
            losses.value(inputs(torch.ones(1, 3), **{**given, missing: None}))
