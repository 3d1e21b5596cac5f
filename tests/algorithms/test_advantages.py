"""AV-1 to AV-4, with the worked values of the module docstring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import dr_grpo, gae, group_advantages, grpo, overlong_penalty, rloo, to_samples
from roles.types import Group, Reward, Scored, Unscored
from tests.algorithms.helpers import completion, prompt, scored

R = np.array([1.0, 0, 0, 1, 0, 0, 0, 0])
FUNCTIONS = [grpo, dr_grpo, rloo]


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (grpo, 1.62018, -0.54006),
        (lambda r: grpo(r, ddof=0), 1.73205, -0.57735),
        (dr_grpo, 0.75, -0.25),
        (rloo, 0.857143, -0.285714),
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


def test_samples_join_prompt_and_completion_and_leave_out_what_cannot_be_trained():
    group = Group(
        prompt=prompt(0, token_ids=(1, 2, 3)),
        completions=[completion([0, 0]), completion([0]), completion([]), completion([0])],
        rewards=[Scored(1), Unscored("timeout"), Scored(0), Scored(0)],
    )
    samples = to_samples([group], dr_grpo)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 10, 11], [1, 2, 3, 10]]
    assert [s.prompt_length for s in samples] == [3, 3]
    # The empty completion still counts in the baseline: mean 1/3.
    np.testing.assert_allclose(samples[0].advantages, [2 / 3, 2 / 3])
    np.testing.assert_allclose(samples[1].advantages, [-1 / 3])
    assert [s.completion_length for s in samples] == [2, 1]
    for sample in samples:
        arrays = (sample.token_ids, sample.advantages, sample.rollout_logprobs)
        assert [array.dtype.name for array in arrays] == ["int32", "float32", "float32"]
        assert len(sample.rollout_logprobs) == len(sample.advantages) == sample.completion_length


def test_groups_without_contrast_are_kept_or_dropped_as_told():
    equal = Group(prompt=prompt(0), completions=[completion([0])] * 2, rewards=scored([1, 1]))
    mixed = Group(prompt=prompt(1), completions=[completion([0])] * 2, rewards=scored([1, 0]))
    assert [float(s.advantages[0]) for s in to_samples([equal, mixed], dr_grpo)] == [0, 0, 0.5, -0.5]
    assert [float(s.advantages[0]) for s in to_samples([equal, mixed], dr_grpo, no_signal="drop")] == [0.5, -0.5]
    assert to_samples([equal], no_signal="drop") == []


def test_unscored_group_is_refused_by_its_prompt():
    with pytest.raises(ValueError, match="prompt 5 has 2 completions and 0 rewards; score the group first"):
        to_samples([Group(prompt=prompt(5), completions=[completion([0])] * 2)])


def test_overlong_penalty_worked_values():
    lengths = (100, 16384, 18432, 20480, 99999)
    values = [overlong_penalty(n, max_length=20480, buffer=4096) for n in lengths]
    assert values == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(99, max_length=10, buffer=0) == 0


def test_gae_worked_values():
    advantages, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.6, 0.8]), gamma=1, lam=0.95)
    np.testing.assert_allclose(advantages, [0.4705, 0.39, 0.2], atol=1e-9)
    np.testing.assert_allclose(returns, [0.9705, 0.99, 1.0], atol=1e-9)
