"""CO-1 to CO-4 and AG-1 to AG-3.

Worked values: mu = (.5, .2, .9, .01), pi = (.6, .1, .9, .03), w = pi / mu = (1.2, .5, 1, 3).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from algorithms import corrections as c
from algorithms.aggregate import aggregate, masked_sum

MU = torch.tensor([[0.5, 0.2, 0.9, 0.01]]).double()
PI = torch.tensor([[0.6, 0.1, 0.9, 0.03]]).double()
ALL = torch.ones(1, 4, dtype=torch.bool)
LOG_W = c.log_ratio(PI.log(), MU.log(), ALL)


def close(actual: Tensor, expected: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def test_weights_worked_values():
    close(c.bounded_exp(LOG_W), [[1.2, 0.5, 1, 3]])
    close(c.token_tis(LOG_W, 2.0), [[1.2, 0.5, 1, 2]])
    close(c.icepop(LOG_W, 0.5 - 1e-9, 2.0), [[1.2, 0.5, 1, 0]])
    close(c.sequence_tis(LOG_W, ALL, 5.0), [[1.8] * 4])
    close(c.sequence_tis(LOG_W, ALL, 1.5), [[1.5] * 4])
    assert c.mis(LOG_W, 0.5 - 1e-9, 2.0).tolist() == [[True, True, True, False]]


def test_defaults_are_those_of_the_papers_and_bounds_belong_to_what_is_kept():
    one = torch.zeros(1, 2).double()  # w = 1
    both = torch.ones(1, 2, dtype=torch.bool)
    assert c.icepop(one, 1.0, 1.0).tolist() == [[1, 1]]
    assert c.mis(one, 1.0, 1.0).all()
    assert c.geometric_mask(one, both, 1.0, 1.0).all()
    w = torch.tensor([[0.49, 0.51, 1.99, 2.01, 4.99, 5.01]]).double()
    assert (c.icepop(w.log()) > 0).tolist() == [[False, True, True, True, True, False]]
    assert c.mis(w.log()).tolist() == [[False, True, True, False, False, False]]
    edge = torch.tensor([[0.989], [0.991], [1.009], [1.011]]).double().log()
    assert c.geometric_mask(edge, torch.ones(4, 1, dtype=torch.bool)).flatten().tolist() == [False, True, True, False]
    rare = torch.tensor([[1.1e-4], [0.9e-4]]).double().log()
    assert c.veto(rare, torch.ones(2, 1, dtype=torch.bool)).flatten().tolist() == [True, False]
    assert c.sequence_tis(torch.full((1, 2), -9.0), both, 2.0).tolist() == [[pytest.approx(math.exp(-18))] * 2]


def test_masks_of_sequences_are_of_each_sequence():
    """Three rows, of which the middle one alone is to be dropped or weighted, with a token outside the mask."""
    mask = torch.tensor([[True, True, False]] * 3)
    log_w = torch.tensor([[0.0, 0.0, 9.0], [0.7, 0.3, 9.0], [0.0, 0.0, -9.0]]).double()
    middle = [[True] * 3, [False] * 3, [True] * 3]
    assert c.geometric_mask(log_w, mask, 0.9, 1.1).tolist() == middle
    assert c.veto(-log_w, mask, math.exp(-0.5)).tolist() == middle
    assert c.opsm(-log_w, -torch.ones(3, 3), mask, 0.4).tolist() == middle
    assert c.opsm(-log_w, torch.zeros(3, 3), mask, 0.4).all()  # an advantage of 0 is not bad
    close(c.sequence_tis(log_w, mask, 9.0), torch.tensor([[1.0] * 3, [math.e] * 3, [1.0] * 3]).double())


def test_geometric_mask_keeps_or_drops_whole_sequences():
    # exp(mean log w) = 1.8 ** (1/4) = 1.158292
    assert c.geometric_mask(LOG_W, ALL, 0.99, 1.158).tolist() == [[False] * 4]
    assert c.geometric_mask(LOG_W, ALL, 0.99, 1.159).tolist() == [[True] * 4]


def test_veto_drops_a_sequence_for_one_impossible_token():
    assert c.veto(LOG_W, ALL, 0.49).all()
    assert not c.veto(LOG_W, ALL, 0.51).any()
    assert c.veto(LOG_W, ALL & (LOG_W > -0.5), 0.51).all()  # that token is not among the trained ones


def test_opsm_drops_bad_sequences_whose_mean_log_ratio_fell():
    """mean log(mu / pi) = -.146947 here, .146947 the other way round."""
    bad, good = -torch.ones(1, 4), torch.ones(1, 4)
    assert not c.opsm(-LOG_W, bad, ALL, 0.14).any()
    assert c.opsm(-LOG_W, bad, ALL, 0.15).all()
    assert c.opsm(-LOG_W, good, ALL, 0.14).all()
    assert c.opsm(LOG_W, bad, ALL, 0.14).all()


def test_dppo_keeps_rare_tokens_whose_ratio_is_large():
    """Probability differences .1, -.1, 0, .02 are all within .2, though w = 3 for the last."""
    for sign in (1.0, -1.0):
        advantages = torch.full((1, 4), sign).double()
        assert c.dppo_tv(PI.log(), MU.log(), advantages, ALL, delta=0.2).all()
    exact = torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.25, 0.75]]).double()  # differences .25 and -.25
    for sign in (1.0, -1.0):
        advantages = torch.full((1, 2), sign)
        pair = torch.ones(1, 2, dtype=torch.bool)
        assert c.dppo_tv(exact[0].log(), exact[1].log(), advantages, pair, delta=0.26).all()
        assert c.dppo_tv(exact[0].log(), exact[1].log(), advantages, pair).sum() == 1  # delta is .2
    assert c.dppo_tv(PI.log(), MU.log(), torch.ones(1, 4), ALL, delta=0.05).tolist() == [[False, True, True, True]]
    assert c.dppo_tv(PI.log(), MU.log(), -torch.ones(1, 4), ALL, delta=0.05).tolist() == [[True, False, True, True]]


def test_kl_worked_values():
    x = -LOG_W  # log mu - log pi: KL(mu || pi)
    close(c.kl(x, "k1").mean(), -0.146947)  # negative is legal
    close(c.kl(x, "k2").mean(), 0.215080)
    close(c.kl(x, "k3").mean(), 0.278053)
    k1, k3 = c.measure_kl(x, ALL)
    close(k1 / 4, -0.146947)
    close(k3 / 4, 0.278053)
    with pytest.raises(ValueError, match=r"expected one of k1, k2, k3, k1.*, got 'k4'"):
        c.kl(x, "k4")  # type: ignore[arg-type]


def test_kl_estimators_agree_with_the_exact_divergence_in_expectation():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        close((p * c.kl((p / q).log(), name)).sum(), exact, atol=1e-12)


def test_ess_and_chi2_worked_values():
    w = c.bounded_exp(LOG_W)
    close(c.ess(w, ALL), 0.694825)
    close(c.ess(c.token_tis(LOG_W, 2.0), ALL), 0.825486)
    close(c.chi2(w, ALL), 1.9225)


def test_ess_is_one_for_equal_weights_and_zero_for_none():
    close(c.ess(torch.full((2, 3), 0.3), torch.ones(2, 3, dtype=torch.bool)), 1.0)
    close(c.ess(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)), 0.0)
    close(c.chi2(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)), -1.0)


def test_log_ratio_lets_nothing_outside_the_mask_through_neither_value_nor_gradient():
    new = torch.tensor([[-1.0, math.nan, -math.inf]], requires_grad=True)
    old = torch.tensor([[-2.0, math.inf, math.nan]])
    mask = torch.tensor([[True, False, False]])
    x = c.log_ratio(new, old, mask)
    assert x.tolist() == [[1.0, 0.0, 0.0]]
    x.exp().sum().backward()
    assert new.grad is not None
    close(new.grad, [[math.e, 0, 0]])


def test_exponent_is_clamped_for_the_loss_but_not_for_the_measure():
    x = torch.tensor([[100.0, -100.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    close(c.bounded_exp(x).log(), [[20.0, -20.0]], atol=1e-5)
    close(c.measure_kl(x, mask)[1], math.expm1(100) - 100 + math.expm1(-100) + 100, atol=1e30)
    w, w2 = c.weight_sums(x.double().exp(), mask)
    assert w2.isfinite()
    close(w.log(), 100.0)


def test_corrections_carry_no_gradient():
    x = torch.tensor([[0.1, 0.2]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for weight in (c.token_tis(x, 2), c.sequence_tis(x, mask, 2), c.icepop(x)):
        assert not weight.requires_grad


# --- aggregate --------------------------------------------------------------------------------------------------------

LOSSES = torch.tensor([[1.0, 1.0, 9, 9, 9, 9], [2.0] * 6])
MASK = torch.tensor([[True, True, False, False, False, False], [True] * 6])


@pytest.mark.parametrize(
    ("how", "value"), [("token-mean", 1.75), ("sequence-mean", 1.5), ("sequence-sum", 7.0), ("constant", 0.7)]
)
def test_aggregates_worked_values(how, value):
    close(aggregate(LOSSES, MASK, how, num_tokens=8, num_sequences=2, max_length=10), value)


@pytest.mark.parametrize("how", ["token-mean", "sequence-mean", "sequence-sum", "constant"])
def test_parts_add_up_to_the_whole(how):
    """AG-1: two ranks with 2 and 6 tokens give what one process gives."""
    whole = aggregate(LOSSES, MASK, how, num_tokens=8, num_sequences=2, max_length=10)
    parts = [
        aggregate(LOSSES[i : i + 1], MASK[i : i + 1], how, num_tokens=8, num_sequences=2, max_length=10) for i in (0, 1)
    ]
    close(parts[0] + parts[1], whole)


def test_nan_outside_the_mask_and_empty_batches_give_numbers():
    values = torch.where(MASK, LOSSES, math.nan)
    close(masked_sum(values, MASK), 14.0)
    none = torch.zeros_like(MASK)
    for how in ("token-mean", "sequence-mean", "sequence-sum", "constant"):
        close(aggregate(values, none, how, num_tokens=0, num_sequences=0, max_length=1), 0.0)


def test_aggregate_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="expected max_length >= 1, got None; set it to the limit"):
        aggregate(LOSSES, MASK, "constant", num_tokens=8, num_sequences=2)
    with pytest.raises(ValueError, match=r"expected one of token-mean, .* got 'mean'"):
        aggregate(LOSSES, MASK, "mean", num_tokens=8, num_sequences=2)  # type: ignore[arg-type]
