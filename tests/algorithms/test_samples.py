"""SA-1 to SA-3: from groups to samples, and what is done over the batch."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms.advantages import Advantage, dr_grpo, reward
from algorithms.samples import kl_in_reward, scored_values, shape_overlong, to_samples, whiten, with_critic
from roles.types import Group, Reward, Scored, TrainSample, Unscored
from tests.algorithms.helpers import completion, prompt, scored


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


def test_an_episode_is_trained_with_its_mask_and_left_out_when_no_token_is_of_the_policy():  # SA-2
    mixed, foreign = completion([0, 0, 0]), completion([0, 0])
    mixed.mask, foreign.mask = np.array([True, False, True]), np.zeros(2, bool)
    group = Group(prompt=prompt(0), completions=[mixed, foreign], rewards=scored([1, 0]))
    (sample,) = to_samples([group], dr_grpo)
    assert sample.mask is not None
    assert (sample.completion_length, sample.mask.tolist(), sample.num_trained) == (3, [True, False, True], 2)


def test_groups_without_contrast_are_kept_or_dropped_as_told():
    equal = Group(prompt=prompt(0), completions=[completion([0])] * 2, rewards=scored([1, 1]))
    mixed = Group(prompt=prompt(1), completions=[completion([0])] * 2, rewards=scored([1, 0]))
    assert [float(s.advantages[0]) for s in to_samples([equal, mixed], dr_grpo)] == [0, 0, 0.5, -0.5]
    assert [float(s.advantages[0]) for s in to_samples([equal, mixed], dr_grpo, no_signal="drop")] == [0.5, -0.5]
    assert to_samples([equal], no_signal="drop") == []


def test_unscored_group_is_refused_by_its_prompt():
    with pytest.raises(ValueError, match="prompt 5 has 2 completions and 0 rewards; score the group first"):
        to_samples([Group(prompt=prompt(5), completions=[completion([0])] * 2)])


def test_ages_are_versions_between_sampling_and_training():
    group = Group(prompt=prompt(0), completions=[completion([3, 4]), completion([5])], rewards=scored([0, 1]))
    samples = to_samples([group], version=5)
    assert [s.ages.tolist() for s in samples if s.ages is not None] == [[2, 1], [0]]
    assert to_samples([group])[0].ages is None


def test_sequences_of_one_episode_share_its_vote_and_its_advantage():
    """Episodes 0 (two sequences) and 1: rewards 1 and 0, so +.5 shared by two and -.5 for one."""
    group = Group(prompt=prompt(0), completions=[completion([0])] * 3, rewards=scored([1, 1, 0]))
    samples = to_samples([group], dr_grpo, fan_out=[[0, 0, 1]])
    assert [float(s.advantages[0]) for s in samples] == [0.25, 0.25, -0.5]
    with pytest.raises(ValueError, match="has 3 sequences and 2 episodes"):
        to_samples([group], dr_grpo, fan_out=[[0, 1]])


def test_group_with_survivors_only_is_compared_over_these():
    group = Group(
        prompt=prompt(0),
        completions=[completion([0])] * 4,
        rewards=[Scored(1), Unscored("time limit"), Scored(0), Unscored("time limit")],
    )
    assert [float(s.advantages[0]) for s in to_samples([group], dr_grpo)] == [0.5, -0.5]


def sample(values: list[float]) -> TrainSample:
    n = len(values)
    return TrainSample(
        token_ids=np.arange(n + 1, dtype=np.int32),
        prompt_length=1,
        rollout_logprobs=np.full(n, -1.0, np.float32),
        advantages=np.array(values, np.float32),
    )


def test_whitening_over_tokens_counts_a_long_completion_by_its_length():
    """Values 1 and three times -1 (one for each token): mean -.5, deviation sqrt(.75)."""
    samples = [sample([1.0]), sample([-1.0] * 3)]
    whiten(samples, "tokens")
    np.testing.assert_allclose(samples[0].advantages, [1.7320508], atol=1e-6)
    np.testing.assert_allclose(samples[1].advantages, [-0.57735027] * 3, atol=1e-6)


def test_whitening_over_sequences_gives_each_one_vote():
    samples = [sample([1.0]), sample([-1.0] * 3)]
    whiten(samples, "sequences")
    assert [round(float(s.advantages[0]), 6) for s in samples] == [1, -1]


def test_lite_ppo_divides_by_the_deviation_of_the_rewards_of_the_batch():
    """Rewards (1, 0, 0, 0): deviation .5 over both groups; group means .5 and 0."""
    groups = [
        Group(prompt=prompt(i), completions=[completion([0])] * 2, rewards=scored(r))
        for i, r in enumerate(([1, 0], [0, 0]))
    ]
    samples = to_samples(groups, Advantage(group=dr_grpo, whiten="reward-std"))
    whiten(samples, "reward-std", rewards=scored_values(groups))
    assert [round(float(s.advantages[0]), 6) for s in samples] == [1, -1, 0, 0]
    verdicts: list[Reward] = [Scored(1), Unscored("x"), Scored(float("nan"))]
    assert scored_values([Group(prompt=prompt(0), completions=[completion([0])] * 3, rewards=verdicts)]) == [1]


def test_batch_without_deviation_is_centred_and_finite():
    for how in ("tokens", "sequences"):
        samples = [sample([2.0]), sample([2.0, 2.0])]
        whiten(samples, how)
        assert [s.advantages.tolist() for s in samples] == [[0], [0, 0]]
    whiten([], "tokens")
    one = [sample([2.0])]
    whiten(one, "reward-std", rewards=[1.0])
    assert one[0].advantages.tolist() == [2]


def test_kl_in_the_reward_charges_each_token_for_what_follows():
    """k1 = (-1) - (-2) = 1 a token, weight .1: .3, .2, .1 less."""
    one = sample([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="has no reference_logprobs"):
        kl_in_reward([one], 0.1)
    one.reference_logprobs = np.full(3, -2.0, np.float32)
    kl_in_reward([one], 0.1)
    np.testing.assert_allclose(one.advantages, [0.7, 0.8, 0.9], atol=1e-6)


def test_reinforce_plus_plus_end_to_end_has_mean_zero_and_deviation_one_over_tokens():
    groups = [
        Group(prompt=prompt(i), completions=[completion([0] * n) for n in (1, 4)], rewards=scored([i, 1]))
        for i in range(3)
    ]
    samples = to_samples(groups, Advantage(group=reward, contrast=False))
    whiten(samples, "tokens")
    tokens = np.concatenate([s.advantages for s in samples]).astype(np.float64)
    assert abs(tokens.mean()) < 1e-6
    assert abs(tokens.std() - 1) < 1e-6


def test_overlong_penalty_shapes_verdicts_and_leaves_the_unscored_alone():
    group = Group(
        prompt=prompt(0),
        completions=[completion([0] * n) for n in (6, 9, 10)],
        rewards=[Scored(1), Scored(1), Unscored("x")],
    )
    shaped = shape_overlong(group, max_length=10, buffer=4, factor=0.5)
    assert shaped.rewards == [Scored(1), Scored(1 - 0.5 * 0.75), Unscored("x")]
    assert group.rewards[1] == Scored(1)
    assert shape_overlong(group, max_length=10, buffer=0) is group
    with pytest.raises(ValueError, match=r"expected 0 to 10 tokens \(the limit\), got 11"):
        shape_overlong(group, max_length=10, buffer=11)


def test_tokens_of_the_environment_count_in_no_mean_and_carry_no_penalty():
    one, other = sample([1.0, 9.0]), sample([-1.0])
    one.mask = np.array([True, False])
    whiten([one, other], "tokens")
    assert (round(float(one.advantages[0]), 5), round(float(other.advantages[0]), 5)) == (1, -1)
    one.advantages = np.zeros(2, np.float32)
    one.reference_logprobs = np.full(2, -2.0, np.float32)
    kl_in_reward([one], 0.1)
    np.testing.assert_allclose(one.advantages, [-0.1, 0], atol=1e-6)


def test_a_critic_gives_advantages_and_returns_of_gae_over_the_tokens_of_the_policy():
    """The worked values of GAE, with a token of the environment in between that counts nowhere."""
    one = sample([1.0] * 4)
    one.mask = np.array([True, True, False, True])
    with_critic([one], [np.array([0.5, 0.6, 9.0, 0.8], np.float32)], lam=0.95)
    assert one.returns is not None
    np.testing.assert_allclose(one.advantages, [0.4705, 0.39, 0, 0.2], atol=1e-6)
    np.testing.assert_allclose(one.returns, [0.9705, 0.99, 0, 1.0], atol=1e-6)


def test_a_penalty_in_the_reward_is_part_of_what_the_critic_predicts():
    one = sample([1.0, 1.0])
    with pytest.raises(ValueError, match="has no reference_logprobs"):
        with_critic([one], [np.zeros(2, np.float32)], kl_weight=0.1)
    one.reference_logprobs = np.full(2, -3.0, np.float32)  # k1 = 2 a token
    with_critic([one], [np.zeros(2, np.float32)], lam=1.0, kl_weight=0.1)
    assert one.returns is not None
    np.testing.assert_allclose(one.returns, [0.6, 0.8], atol=1e-6)
