"""LO-1 to LO-5. Worked values: rho or w = (1.2, .5, 1, 3)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms import corrections, losses, surrogates
from algorithms.metrics import MAXIMA, SUMS, finish
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


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "objective"), [(1.0, [1.2, 0.5, 1, 1.28]), (-1.0, [-1.2, -0.8, -1, -3])])
def test_ppo_worked_values(sign, objective):
    terms = surrogates.ppo_clip_terms(RATIOS.log(), torch.full((1, 4), sign), clip_low=0.2, clip_high=0.28)
    close(-terms, [objective])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    rho = torch.tensor([[10.0, 10.0]]).log()
    terms = surrogates.ppo_clip_terms(rho, torch.tensor([[-1.0, 1.0]]), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    close(terms, [[3.0, -1.28]])
    for wrong in (0.5, 1.0):
        with pytest.raises(ValueError, match=rf"dual_clip: expected more than 1, got {wrong}"):
            surrogates.ppo_clip_terms(rho, rho, clip_low=0.2, clip_high=0.28, dual_clip=wrong)


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        # A = (2, -2, .5, -.5): min(rho A, clip(rho) A) is (2.4, -1.6, .5, -1.5)
        (lambda r, a: surrogates.ppo_clip_terms(r, a, clip_low=0.2, clip_high=0.28), [-2.4, 1.6, -0.5, 1.5]),
        (
            lambda r, a: surrogates.ppo_clip_terms(r, a, clip_low=0.2, clip_high=0.28, dual_clip=1.5),
            [-2.4, 1.6, -0.5, 0.75],
        ),
        # log pi = -1 everywhere: stopgrad(clip(rho)) A, with and without the lower bound
        (
            lambda r, a: surrogates.cispo_terms(r, -torch.ones_like(r), a, clip_low=None, clip_high=0.5),
            [2.4, -1, 0.5, -0.75],
        ),
        (
            lambda r, a: surrogates.cispo_terms(r, -torch.ones_like(r), a, clip_low=0.1, clip_high=0.5),
            [2.4, -1.8, 0.5, -0.75],
        ),
        (lambda r, a: surrogates.reinforce_terms(-torch.full_like(r, 0.7), a), [1.4, -1.4, 0.35, -0.35]),
        # 4 sigmoid(.2) 2, 4 / 1.05 sigmoid(1.05 (-.5)) (-2), ...: the paper's temperatures
        (lambda r, a: surrogates.sapo_terms(r, a), [-4.398672, 2.831879, -1, 1.696958]),
    ],
)
def test_terms_for_advantages_of_any_size_and_sign(terms, wanted):
    advantages = torch.tensor([[2.0, -2.0, 0.5, -0.5]])
    close(terms(RATIOS.log(), advantages), [wanted])


def test_a_clipped_token_has_no_gradient_where_the_clip_binds_and_its_own_where_it_does_not():
    """d/dlog rho: rho A inside and on the harmless side; 0 for good tokens above and bad ones below the bounds."""
    x = torch.tensor([[1.5, 0.5, 1.5, 0.5, 6.0]]).log().requires_grad_()
    a = torch.tensor([[2.0, 2.0, -2.0, -2.0, -2.0]])
    for dual, last in ((None, 12.0), (3.0, 0.0)):
        terms = surrogates.ppo_clip_terms(x, a, clip_low=0.2, clip_high=0.28, dual_clip=dual)
        (grad,) = torch.autograd.grad(terms.sum(), x)
        close(grad, [[0.0, -1.0, 3.0, 0.0, last]])


def test_gspo_sequence_ratio_worked_value():
    mask = torch.ones(1, 4, dtype=torch.bool)
    close(surrogates.sequence_log_ratio(RATIOS.log(), mask).exp(), [[1.158292] * 4])


def test_gspo_gradient_reaches_all_tokens_of_the_sequence_equally():
    x = inputs(torch.tensor([[1.0002, 0.9999, 1.0001, 0.9998]]))
    _, grad = gradient(losses.gspo, x)
    assert (grad < 0).all()
    close(grad, grad.mean().expand_as(grad), atol=1e-8)


def test_cispo_keeps_the_gradient_of_clipped_tokens_that_ppo_loses():
    _, ppo = gradient(losses.ppo, inputs())
    _, cispo = gradient(losses.cispo, inputs())
    close(ppo, [[-1.2 / 4, -0.5 / 4, -1 / 4, 0]])
    close(cispo, [[-1.2 / 4, -0.5 / 4, -1 / 4, -1.28 / 4]])


# --- the default objective --------------------------------------------------------------------------------------------


def test_grpo_on_policy_has_the_policy_gradient():
    """rho = w = 1: the gradient of the loss is -A / n, whatever the clip."""
    _, grad = gradient(losses.ppo, inputs(torch.ones(1, 4), advantages=0.5))
    close(grad, [[-0.125] * 4])


def test_grpo_multiplies_truncated_weights_and_leaves_them_out_of_the_gradient():
    x = inputs(torch.ones(1, 4), w=RATIOS)
    out, grad = gradient(losses.ppo, x, tis_cap=2.0)
    close(out.loss, -(1.2 + 0.5 + 1 + 2) / 4)
    close(grad, [[-1.2 / 4, -0.5 / 4, -1 / 4, -2 / 4]])
    close(losses.ppo(x, tis_cap=None).loss, -1.0)


def test_metrics_are_measured_before_truncation():
    out = losses.ppo(inputs(torch.ones(1, 4), w=RATIOS, advantages=-1.0), tis_cap=2.0)
    m = finish({k: v.item() for k, v in out.sums.items()}, {k: v.item() for k, v in out.maxima.items()})
    wanted = {
        "mismatch/kl_k1": -0.146947,
        "mismatch/kl_k3": 0.278053,
        "mismatch/ess_raw": 0.694825,
        "mismatch/ess_truncated": 0.825486,
        "mismatch/chi2": 1.9225,
        "mismatch/truncated_fraction": 0.25,
        "mismatch/weight_mean": 1.425,
        "mismatch/weight_max": 3.0,
        "mismatch/logprob_gap_max": math.log(3),
        "mismatch/probability_gap_mean": 0.3 * (0.2 + 0.5 + 0 + 2) / 4,
        "mismatch/nonfinite_tokens": 0,
        "policy/loss": (1.2 + 0.5 + 1 + 2) / 4,
        "policy/entropy": 0.7,
        "policy/ratio_mean": 1.0,
        "policy/ratio_max": 1.0,
        "policy/kl_k3": 0.0,
        "policy/signal_fraction": 1.0,
        "train/tokens": 4,
        "train/sequences": 1,
    }
    assert {name: m[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)


def test_clip_fractions_count_only_the_side_that_the_advantage_makes_binding():
    rho = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 1.27, 0.81]])  # the last three are inside of [.8, 1.28]
    out = losses.ppo(inputs(rho, advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0]])))
    assert (out.sums["clipped_high"].item(), out.sums["clipped_low"].item()) == (1, 1)
    close(out.maxima["ratio"], 1.5)


def test_penalties_add_kl_and_entropy():
    x = inputs(torch.ones(1, 4), w=torch.full((1, 4), math.e), advantages=0.0)  # log pi - log mu = 1 everywhere
    close(losses.ppo(x, kl_weight=0.1, kl_estimator="k2").loss, 0.05)
    close(losses.ppo(x, kl_weight=0.1, kl_estimator="k1").loss, 0.1)
    close(losses.ppo(x, kl_weight=0.1, kl_to="old").loss, 0.0)
    entropy = torch.full((1, 4), 0.7, requires_grad=True)
    close(losses.ppo(inputs(torch.ones(1, 4), advantages=0.0, entropy=entropy), entropy_weight=0.1).loss, -0.07)
    holes = torch.tensor([[0.7, math.nan, 0.7, 0.7]], requires_grad=True)
    close(losses.ppo(inputs(torch.ones(1, 4), advantages=0.0, entropy=holes), entropy_weight=0.1).loss, -0.0525)
    with pytest.raises(ValueError, match=r"entropy_weight is 0.1, but the entropy has no gradient"):
        losses.ppo(x, entropy_weight=0.1)


# --- what every objective shares (LO-6) -------------------------------------------------------------------------------


def test_ratio_to_the_sampler_needs_no_weights():
    """pi / mu = rho w: clipped against the sampler, uncorrected."""
    x = inputs(torch.tensor([[1.2, 0.5]]), w=torch.tensor([[1.0, 3.0]]))
    out = losses.ppo(x, proximal="rollout")
    close(out.loss, -(1.2 + 1.28) / 2)
    close(out.sums["mismatch_k1"], -math.log(3))  # what sampler and trainer differ by is told all the same (MS-3)
    close(out.sums["ratio"], 2.7)


def test_interpolated_proximal_policy_lies_between_sampler_and_current_by_age():
    """log pi - log mu = 2 for each token. alpha = age / (age + 1): log rho = 2 (1 - alpha), log w = 2 alpha."""
    ages = torch.tensor([[0, 1, 3]], dtype=torch.int32)
    x = inputs(torch.full((1, 3), math.e**2), ages=ages)
    alpha = torch.tensor([[0.0, 0.5, 0.75]])
    tokens = losses.select(x, "interpolate")
    close(tokens.log_w, 2 * alpha)
    close(tokens.log_rho, 2 * (1 - alpha))
    _, grad = gradient(losses.ppo, x, proximal="interpolate", clip_high=9.0, tis_cap=None)
    close(grad, -(2 * (1 - alpha)).exp() / 3)  # the gradient is that of pi alone
    with pytest.raises(ValueError, match="needs the age of each token, the samples have none"):
        losses.ppo(inputs(), proximal="interpolate")
    with pytest.raises(ValueError, match="expected recompute, rollout or interpolate, got 'x'"):
        losses.ppo(inputs(), proximal="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"tis_cap": None}, [1, 1, 1, 1]),
        ({"tis_cap": 2.0}, [1.2, 0.5, 1, 2]),
        ({"tis_cap": 2.0, "tis_low": 0.8}, [1.2, 0.8, 1, 2]),
        ({"tis": "sequence", "tis_cap": 5.0}, [1.8] * 4),
        ({"icepop": (0.4, 2.0)}, [1.2, 0.5, 1, 0]),
        ({"icepop": (0.6, 2.0)}, [1.2, 0, 1, 0]),
        ({"tis_cap": None, "mis": (0.4, 2.0)}, [1, 1, 1, 0]),
        ({"tis_cap": None, "mis": (0.6, 4.0)}, [1, 0, 1, 1]),
        ({"tis_cap": None, "geometric": (0.9, 1.1)}, [0] * 4),
        ({"tis_cap": None, "geometric": (0.9, 1.2)}, [1] * 4),
        ({"tis_cap": None, "veto": 0.6}, [0] * 4),
        ({"tis_cap": None, "veto": 0.4}, [1] * 4),
    ],
)
def test_corrections_worked_values_and_denominators_that_stay(options, wanted):
    """rho = 1, A = 1: the gradient of a token is -weight / 4, whatever was masked (CO-4)."""
    x = inputs(torch.ones(1, 4), w=torch.tensor([[1.2, 0.5, 1.0, 3.0]]))
    out, grad = gradient(losses.ppo, x, **options)
    close(grad, -torch.tensor([wanted]) / 4)
    masks = any(name in options for name in ("mis", "geometric", "veto"))
    assert out.sums["masked_tokens"] == (wanted.count(0) if masks else 0)
    if not masks and options.get("tis") != "sequence" and options.get("tis_cap", 2.0) is not None:
        changed = sum(weight != w for weight, w in zip(wanted, (1.2, 0.5, 1.0, 3.0), strict=True))
        assert out.sums["truncated_tokens"] == changed


def test_sequences_that_the_policy_has_left_are_masked_when_they_are_bad():
    rho = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.1, 0.9]])
    x = inputs(rho, advantages=torch.tensor([[-1.0] * 2, [1.0] * 2, [-1.0] * 2]))
    out = losses.ppo(x, opsm=0.1)
    assert out.sums["masked_tokens"] == 2


def test_two_ways_of_weighting_are_refused():
    with pytest.raises(ValueError, match="icepop and tis_cap are both given"):
        losses.ppo(inputs(), icepop=(0.5, 2.0), tis_cap=2.0)


def test_penalty_to_a_reference_policy_needs_its_logprobs():
    x = inputs(torch.ones(1, 4), advantages=0.0)
    reference = x.logprobs.detach() - 1.0
    close(
        losses.ppo(
            inputs(torch.ones(1, 4), advantages=0.0, reference_logprobs=reference), kl_weight=0.1, kl_to="reference"
        ).loss,
        0.05,
    )
    with pytest.raises(ValueError, match="the samples have no logprobs of a reference policy"):
        losses.ppo(x, kl_weight=0.1, kl_to="reference")


def test_fresh_tokens_are_measured_apart():
    ages = torch.tensor([[0, 0, 2, 0]], dtype=torch.int32)
    x = inputs(torch.ones(1, 4), w=torch.tensor([[1.0, 2.0, 9.0, 1.0]]), ages=ages)
    out = losses.ppo(x)
    assert out.sums["fresh_tokens"] == 3
    close(out.sums["fresh_gap"], math.log(2))


def test_dppo_has_the_gradient_of_the_ratio_where_its_mask_allows_and_no_token_weighs_more_than_the_cap():
    """mu = .3: pi = .36, .15, .3, .9 moves by .06, -.15, 0, .6, of which the last is too far for a good token."""
    for sign, wanted in ((1.0, [1.2, 0.5, 1, 0]), (-1.0, [1.2, 0.5, 1, 3])):
        _, grad = gradient(losses.dppo, inputs(advantages=sign))
        close(grad, [[-sign * w / 4 for w in wanted]])
    _, grad = gradient(losses.dppo, inputs(advantages=-1.0), ratio_cap=2.0)
    close(grad, [[0.3, 0.125, 0.25, 0.5]])
    _, grad = gradient(losses.dppo, inputs(), delta=0.1)
    close(grad, [[-0.3, -0.125, -0.25, 0]])
    _, grad = gradient(losses.dppo, inputs(advantages=-1.0), ratio_cap=1.0)
    close(grad, [[0.25, 0.125, 0.25, 0.25]])
    with pytest.raises(ValueError, match="ratio_cap: expected at least 1, got 0"):
        losses.dppo(inputs(), ratio_cap=0)


@pytest.mark.parametrize("objective", [losses.ppo, losses.gspo, losses.cispo, losses.dppo, losses.sapo])
def test_on_policy_all_objectives_have_the_policy_gradient(objective):
    _, grad = gradient(objective, inputs(torch.ones(1, 4), advantages=0.5), aggregate="token-mean")
    close(grad, [[-0.125] * 4])


# --- gradients against differences ------------------------------------------------------------------------------------

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


# --- invariants of all objectives -------------------------------------------------------------------------------------


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
