"""LO-1 to LO-5. Worked values: rho or w = (1.2, .5, 1, 3)."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms import losses, surrogates
from algorithms.metrics import finish
from tests.algorithms.loss_help import RATIOS, close, gradient, inputs

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
