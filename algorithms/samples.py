"""Groups to what a trainer gets: one sequence for each completion, and what is done over the batch of them.

SA-1: everything here sees the whole batch of a step, before it is cut for ranks, so that means and deviations are
      global (A4).
SA-2: left out are unscored completions (AV-1) and those without a sampled token; nothing else is.
SA-3: the order of steps is that of this file: filter on the verdict, shape rewards, advantages of groups, penalties per
      token, whitening over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from algorithms.advantages import (
    Advantage,
    FloatArray,
    GroupFunction,
    Whiten,
    gae,
    group_advantages,
    grpo,
    overlong_penalty,
    returns_to_go,
    scored_mask,
)
from roles.types import Group, Scored, TrainSample


def shape_overlong(group: Group, *, max_length: int, buffer: int, factor: float = 1.0) -> Group:
    """The group with `overlong_penalty` added to each verdict; unscored completions stay unscored.

    Raises:
        ValueError: the buffer is longer than the limit.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"overlong buffer: expected 0 to {max_length} tokens (the limit), got {buffer}")
    if buffer == 0:
        return group
    rewards = [
        msgspec.structs.replace(
            reward,
            value=reward.value
            + overlong_penalty(len(completion.token_ids), max_length=max_length, buffer=buffer, factor=factor),
        )
        if isinstance(reward, Scored)
        else reward
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    return msgspec.structs.replace(group, rewards=rewards)


def to_samples(
    groups: Sequence[Group],
    advantage: Advantage | GroupFunction = grpo,
    *,
    version: int | None = None,
    no_signal: Literal["keep", "drop"] = "keep",
    fan_out: Sequence[Sequence[int]] | None = None,
) -> list[TrainSample]:
    """The sequences to train on, in the order of groups and completions, before `whiten`.

    `no_signal` says what becomes of completions whose advantage is 0 because their group has no contrast (AV-2): "keep"
    leaves their tokens in the denominators and in the measures, and penalties such as KL act on them; "drop" saves
    their compute, and means are then over the others. The result may be empty with "drop": there is nothing to learn.

    Args:
        version: what they are trained on, for the age of each token; None leaves ages out.
        fan_out: the episode of each completion of each group, where one episode makes several sequences (a history that
            was rewritten on the way). Its sequences share one vote in the baseline, and each gets 1/k of its advantage.

    Raises:
        ValueError: a group is not scored, or has one completion.
    """
    samples: list[TrainSample] = []
    for index, group in enumerate(groups):
        if len(group.rewards) != len(group.completions):
            raise ValueError(
                f"advantages: the group of prompt {group.prompt.position} has {len(group.completions)} completions and "
                f"{len(group.rewards)} rewards; score the group first"
            )
        scored = scored_mask(group.rewards)
        advantages = _of_group(group, advantage, None if fan_out is None else fan_out[index])
        if no_signal == "drop" and not advantages.any():
            continue
        prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for completion, value, valid in zip(group.completions, advantages, scored, strict=True):
            length = len(completion.token_ids)
            if not valid or length == 0 or (completion.mask is not None and not completion.mask.any()):
                continue
            samples.append(
                TrainSample(
                    token_ids=np.concatenate([prompt, completion.token_ids.astype(np.int32, copy=False)]),
                    prompt_length=len(prompt),
                    rollout_logprobs=completion.logprobs.astype(np.float32, copy=False),
                    advantages=np.full(length, value, dtype=np.float32),
                    ages=None if version is None else (version - completion.versions).astype(np.int32),
                    mask=completion.mask,
                    routes=completion.routes,
                )
            )
    return samples


def _of_group(group: Group, advantage: Advantage | GroupFunction, episodes: Sequence[int] | None) -> FloatArray:
    if episodes is None:
        return group_advantages(group.rewards, advantage)
    if len(episodes) != len(group.completions):
        raise ValueError(
            f"advantages: the group of prompt {group.prompt.position} has {len(group.completions)} sequences and "
            f"{len(episodes)} episodes; give the episode of each sequence"
        )
    first = {episode: index for index, episode in reversed(list(enumerate(episodes)))}
    order = sorted(first, key=lambda episode: first[episode])
    of_episode = dict(zip(order, group_advantages([group.rewards[first[e]] for e in order], advantage), strict=True))
    return np.array([of_episode[e] / episodes.count(e) for e in episodes])


def kl_in_reward(samples: Sequence[TrainSample], weight: float, *, gamma: float = 1.0) -> None:
    """Subtract what a KL penalty on each token takes from its return, in place: A_t -= weight * sum_{u >= t} k1_u.

    k1 = log mu - log reference: the estimator whose expectation is the KL. As part of the reward it needs no gradient
    of its own, so that the choice of estimator biases nothing. PPO for language models (arXiv:2203.02155), REINFORCE++
    (arXiv:2501.03262).

    Raises:
        ValueError: a sample has no reference logprobs.
    """
    for sample in samples:
        if sample.reference_logprobs is None:
            raise ValueError("kl in the reward: a sample has no reference_logprobs; ask the reference policy first")
        k1 = np.where(_trained(sample), sample.rollout_logprobs.astype(np.float64) - sample.reference_logprobs, 0.0)
        sample.advantages = (sample.advantages - weight * returns_to_go(k1, gamma)).astype(np.float32)


def with_critic(
    samples: Sequence[TrainSample],
    values: Sequence[np.ndarray],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_weight: float = 0.0,
) -> None:
    """Advantages and returns by GAE, in place; the reward of a sample comes with its last trained token.

    Args:
        samples: with their reward as advantage on every token (`advantages.reward`).
        values: [C] of each, the critic's value of the state before each token.
        kl_weight: of a KL penalty on each token, see `kl_in_reward`.

    Raises:
        ValueError: a penalty is asked for, and a sample has no reference logprobs.
    """
    for sample, value in zip(samples, values, strict=True):
        trained = _trained(sample)
        rewards = np.zeros(int(trained.sum()))
        if kl_weight:
            if sample.reference_logprobs is None:
                raise ValueError("kl in the reward: a sample has no reference_logprobs; ask the reference policy first")
            k1 = sample.rollout_logprobs.astype(np.float64) - sample.reference_logprobs
            rewards -= kl_weight * k1[trained]
        rewards[-1] += float(sample.advantages[trained][-1])
        known = value[trained].astype(np.float64)
        advantages, returns = gae(rewards, known, gamma=gamma, lam=lam)
        sample.values = value.astype(np.float32, copy=False)
        sample.advantages, sample.returns = np.zeros((2, sample.completion_length), np.float32)
        sample.advantages[trained], sample.returns[trained] = advantages, returns


def whiten(samples: Sequence[TrainSample], how: Whiten, *, rewards: Sequence[float] = (), eps: float = 1e-8) -> None:
    """Scale the advantages over the whole batch, in place; see `Whiten`. Without deviation it only centres them.

    "tokens" and "sequences" use the population deviation (ddof 0), "reward-std" that of a sample (ddof 1), as LitePPO
    (arXiv:2508.08221) does with the group's mean taken off before.

    Args:
        rewards: of all scored completions of the batch, for "reward-std".
    """
    if how == "none" or not samples:
        return
    if how == "reward-std":
        mean, deviation = 0.0, float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    else:
        weights = np.array([s.num_trained if how == "tokens" else 1.0 for s in samples], dtype=np.float64)
        values = [s.advantages[_trained(s)].astype(np.float64) for s in samples]
        means = np.array([v.mean() for v in values])
        mean = float(np.average(means, weights=weights))
        squares = np.array([((v - mean) ** 2).mean() for v in values])
        deviation = float(np.sqrt(np.average(squares, weights=weights)))
    for sample in samples:
        centred = sample.advantages.astype(np.float64) - mean
        sample.advantages = (centred / (deviation + eps) if deviation > 0 else centred).astype(np.float32)


def _trained(sample: TrainSample) -> NDArray[np.bool_]:
    """[C] bool: the tokens that the policy sampled."""
    return np.ones(sample.completion_length, bool) if sample.mask is None else sample.mask


def scored_values(groups: Sequence[Group]) -> list[float]:
    """The verdicts of all scored completions, in order."""
    return [r.value for g in groups for r in g.rewards if isinstance(r, Scored) and np.isfinite(r.value)]
