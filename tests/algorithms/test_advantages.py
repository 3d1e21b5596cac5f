"""AV-1 to AV-4, with the worked values of the module docstring."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import (
    Advantage,
    dr_grpo,
    gae,
    gdpo,
    group_advantages,
    grpo,
    has_contrast,
    maxrl,
    overlong_penalty,
    per_turn,
    returns_to_go,
    reward,
    rloo,
    spread,
)
from roles.types import Reward, Scored, Unscored
from tests.algorithms.helpers import scored

R = np.array([1.0, 0, 0, 1, 0, 0, 0, 0])
FUNCTIONS = [grpo, dr_grpo, rloo]


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (grpo, 1.62018, -0.54006),
        (lambda r: grpo(r, ddof=0), 1.73205, -0.57735),
        (dr_grpo, 0.75, -0.25),
        (rloo, 0.857143, -0.285714),
        (maxrl, 3.0, -1.0),
        (reward, 1.0, 0.0),
    ],
)
def test_worked_values(function, right, wrong):
    np.testing.assert_allclose(function(R), np.where(R == 1, right, wrong), atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unscored_completion_is_no_evidence(function):
    """r = [1, unscored, 0, 1] gives what [1, 0, 1] gives, and 0 for the unscored one (AV-1)."""
    rewards: list[Reward] = [Scored(1), Unscored("timeout"), Scored(0), Scored(1)]
    result = group_advantages(rewards, function)
    np.testing.assert_array_equal(result[[0, 2, 3]], function(np.array([1.0, 0, 1])))
    assert result[1] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_counts_as_unscored(value):
    rewards = [Scored(1), Scored(value), Scored(0), Scored(1)]
    np.testing.assert_array_equal(
        group_advantages(rewards), group_advantages([Scored(1), Unscored("x"), Scored(0), Scored(1)])
    )


@pytest.mark.parametrize(
    "rewards",
    [
        scored([0.1] * 3),  # the mean of three 0.1 is not 0.1: only exact equality is safe
        [Scored(1), Unscored("x"), Unscored("x")],
        [Unscored("x"), Unscored("x")],
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_contrast_gives_exactly_zero(function, rewards):
    assert group_advantages(rewards, function).tolist() == [0.0] * len(rewards)


def test_group_of_one_is_an_error_that_says_what_to_change():
    with pytest.raises(ValueError, match=r"1 completion\(s\).*raise the number of samples per prompt"):
        group_advantages([Scored(1)])


def test_maxrl_refuses_rewards_that_are_no_rates():
    with pytest.raises(ValueError, match="maxrl: a reward is -1, expected none below 0"):
        maxrl(np.array([-1.0, 1]))


def test_without_a_baseline_of_the_group_equal_rewards_and_groups_of_one_still_teach():
    how = Advantage(group=reward, contrast=False)
    assert group_advantages(scored([1, 1]), how).tolist() == [1, 1]
    assert group_advantages(scored([1]), how).tolist() == [1]
    assert group_advantages([Unscored("x")], how).tolist() == [0]


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        (scored([0.1] * 3), False),
        (scored([0, 1e-12]), True),
        ([Scored(1), Unscored("x")], False),
        ([Scored(1), Scored(float("nan"))], False),
        ([], False),
    ],
)
def test_contrast_is_compared_exactly(rewards, wanted):
    assert has_contrast(rewards) is wanted


def test_gdpo_normalises_each_part_by_itself():
    """Two parts on scales 1 and 10: each has deviation .5 and 5, so both count alike; the third never differs."""
    parts = [(1, 0, 7), (0, 10, 7), (0, 0, 7), (0, 0, 7)]
    rewards: list[Reward] = [Scored(sum(p), {"a": p[0], "b": p[1], "c": p[2]}) for p in parts]
    how = Advantage(group=gdpo, parts=True)
    np.testing.assert_allclose(group_advantages(rewards, how), [1, 1, -1, -1], atol=1e-5)
    weighed = Advantage(group=functools.partial(gdpo, weights=[2.0, -1.0, 5.0]), parts=True)
    np.testing.assert_allclose(group_advantages(rewards, weighed), [2 * 1.5 + 0.5, -1 - 1.5, -0.5, -0.5], atol=1e-5)
    with pytest.raises(ValueError, match="2 weights for 3 parts"):
        gdpo(np.array(parts, dtype=float), weights=[1, 1])
    assert group_advantages([Scored(1, {"a": 1.0})] * 3, how).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="reads the parts of a reward, the completions have"):
        group_advantages(scored([0, 1]), how)
    with pytest.raises(ValueError, match="the same for all"):
        group_advantages([Scored(1, {"a": 1.0}), Scored(1, {"b": 1.0})], how)


def test_returns_to_go_worked_values():
    assert returns_to_go(np.array([1.0, 2, 3])).tolist() == [6, 5, 3]
    assert returns_to_go(np.array([1.0, 2, 4]), gamma=0.5).tolist() == [3, 4, 4]


def test_credit_of_turns_flows_backwards_and_compares_like_with_like():
    """Returns to go: (3, 2), (1, 1), (5). Turn 0: mean 3, deviation 2. Turn 1: mean 1.5, deviation .7071."""
    result = per_turn([[1, 2], [0, 1], [5]])
    np.testing.assert_allclose(result[0], [0, 0.7071067], atol=1e-5)
    np.testing.assert_allclose(result[1], [-1, -0.7071067], atol=1e-5)
    np.testing.assert_allclose(result[2], [1], atol=1e-5)
    assert per_turn([[1], [1], [1, 9]], normalise=False)[2][1] == 0  # nobody else got there
    assert spread(result[1], [2, 1]).round(3).tolist() == [-1, -1, -0.707]
    assert per_turn([]) == []


def test_function_of_the_user_is_checked():
    def wrong(rewards):
        return rewards / 0 if len(rewards) == 2 else rewards[:-1]

    with np.errstate(divide="ignore", invalid="ignore"):
        for rewards in ([0, 1], [0, 1, 2]):
            with pytest.raises(ValueError, match=r"wrong returned .* expected . finite numbers"):
                group_advantages(scored(rewards), wrong)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_are_finite(rewards):
    for function in FUNCTIONS:
        result = group_advantages(scored(rewards), function)
        assert np.isfinite(result).all()
        assert abs(result.sum()) < 1e-6


@given(st.lists(st.integers(0, 1), min_size=2, max_size=12), st.floats(-3, 3))
def test_adding_a_constant_to_all_rewards_changes_nothing(rewards, shift):
    for function in FUNCTIONS:
        moved = group_advantages(scored([r + shift for r in rewards]), function)
        np.testing.assert_allclose(moved, group_advantages(scored(rewards), function), atol=1e-6)


def test_overlong_penalty_worked_values():
    lengths = (100, 16384, 18432, 20480, 99999)
    values = [overlong_penalty(n, max_length=20480, buffer=4096) for n in lengths]
    assert values == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(99, max_length=10, buffer=0) == 0


def test_gae_worked_values():
    advantages, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.6, 0.8]), gamma=1, lam=0.95)
    np.testing.assert_allclose(advantages, [0.4705, 0.39, 0.2], atol=1e-9)
    np.testing.assert_allclose(returns, [0.9705, 0.99, 1.0], atol=1e-9)
