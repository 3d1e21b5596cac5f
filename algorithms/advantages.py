"""Rewards to advantages, per group and over the batch: pure functions on numpy arrays.

AV-1: an unscored completion is no evidence: it is left out of mean and deviation, gets advantage 0 and makes no sample.
      A reward that is not finite counts as unscored.
AV-2: no contrast, no signal: where a baseline comes from the group, fewer than two scored completions, or scored ones
      that are all exactly equal, give 0.
AV-3: a group of one completion is an error where the baseline comes from the group; never NaN.
AV-4: all arithmetic is float64; what leaves for the trainer is float32.

A group function takes the scored rewards of one group, [n] float64, and returns [n] advantages. AV-1 and AV-2 are
applied around it, so that one of your own need not. An `Advantage` says what happens around and after it.

Worked: r = [1, 0, 0, 1, 0, 0, 0, 0] has mean .25 and gives, for a 1 and for a 0,
grpo +1.62018 / -0.54006,   dr_grpo +.75 / -.25,   rloo +.857143 / -.285714,   maxrl +3 / -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roles.types import Reward, Scored

FloatArray = NDArray[np.float64]
GroupFunction = Callable[[FloatArray], FloatArray]
"""`f(rewards [n]) -> advantages [n]`; [n, k] rewards for one that reads the parts of a weighted sum."""

Whiten = Literal["none", "tokens", "sequences", "reward-std"]
"""What is done over the whole batch, all ranks, after the groups (`algorithms.samples.whiten`):

none         nothing
tokens       (A - mean) / std over all trained tokens: a long completion counts by its length
sequences    the same with one vote for each completion
reward-std   A / std of the rewards of the batch
"""


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How rewards become advantages: a function of one group, and what is done over the batch."""

    group: GroupFunction
    whiten: Whiten = "none"
    contrast: bool = True
    """Whether the baseline comes from the group: equal rewards teach nothing (AV-2), one is too few (AV-3)."""
    parts: bool = False
    """The function reads [n, k], the parts of each reward in the order of their names, instead of [n] totals."""


# --- one group --------------------------------------------------------------------------------------------------------


def grpo(rewards: FloatArray, *, ddof: int = 1, eps: float = 1e-6) -> FloatArray:
    """(r - mean) / (std + eps); sample deviation (ddof 1). GRPO, arXiv:2402.03300.

    >>> grpo(np.array([1.0, 0, 0, 1, 0, 0, 0, 0])).round(4)[:2].tolist()
    [1.6202, -0.5401]
    """
    return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps))


def dr_grpo(rewards: FloatArray) -> FloatArray:
    """r - mean; dividing by the deviation would favour the easiest and hardest prompts. Dr.GRPO, arXiv:2503.20783."""
    return np.asarray(rewards - rewards.mean())


def rloo(rewards: FloatArray) -> FloatArray:
    """r_i - mean of the others = n / (n - 1) * (r_i - mean): an unbiased baseline. RLOO, arXiv:2402.14740."""
    n = len(rewards)
    return np.asarray((rewards - rewards.mean()) * (n / (n - 1)))


def maxrl(rewards: FloatArray) -> FloatArray:
    """(r - mean) / mean: hard prompts weigh more, as maximum likelihood would have it. MaxRL, arXiv:2602.02710.

    Raises:
        ValueError: a reward is negative; the mean would be no rate of success.
    """
    if rewards.min() < 0:
        raise ValueError(
            f"maxrl: a reward is {rewards.min():g}, expected none below 0 (a rate of success); "
            "shift the rewards, or use dr_grpo"
        )
    return np.asarray((rewards - rewards.mean()) / rewards.mean())


def reward(rewards: FloatArray) -> FloatArray:
    """r itself, no baseline: REINFORCE, and REINFORCE++ once it is whitened over the batch (arXiv:2501.03262)."""
    return np.asarray(rewards, dtype=np.float64)


def gdpo(parts: FloatArray, *, weights: Sequence[float] = (), eps: float = 1e-6) -> FloatArray:
    """[n, k] parts -> [n]: each part normalised in the group by itself, then added up; a part without contrast adds 0.

    `weights` are those of the sum, one a part in the order of their names; a negative one makes its part a penalty.
    None given: 1 each. A job gives those of [reward.parts].

    Normalising their sum instead lets the part with the largest deviation decide. GDPO, arXiv:2601.05242; its
    normalisation over the batch is `whiten` = "sequences".

    >>> gdpo(np.array([[1.0, 0], [0, 10], [0, 0], [0, 0]])).round(3).tolist()
    [1.0, 1.0, -1.0, -1.0]
    """
    scale = np.asarray(weights) if len(weights) else np.ones(parts.shape[1])
    if len(scale) != parts.shape[1]:
        raise ValueError(f"gdpo: {len(scale)} weights for {parts.shape[1]} parts of the reward; give one for each")
    contrast = (parts != parts[0]).any(axis=0)
    normalised = (parts - parts.mean(axis=0)) / (parts.std(axis=0, ddof=1) + eps)
    return np.asarray((normalised * contrast * scale).sum(axis=1))


def group_advantages(rewards: Sequence[Reward], advantage: Advantage | GroupFunction = grpo) -> FloatArray:
    """[G] advantages of one group before anything is done over the batch, AV-1 and AV-2 applied.

    Raises:
        ValueError: fewer than two completions (AV-3), parts that differ, or the function returned another shape or a
            value not finite.
    """
    how = advantage if isinstance(advantage, Advantage) else Advantage(group=advantage)
    if how.contrast and len(rewards) < 2:
        raise ValueError(
            f"advantages: a group has {len(rewards)} completion(s), a baseline within the group needs at least 2; "
            "raise the number of samples per prompt"
        )
    scored = scored_mask(rewards)
    result = np.zeros(len(rewards))
    values = _values([r for r in rewards if isinstance(r, Scored) and np.isfinite(r.value)], how.parts)
    if len(values) == 0 or (how.contrast and (len(values) < 2 or (values == values[0]).all())):
        return result
    advantages = np.asarray(how.group(values), dtype=np.float64)
    if advantages.shape != (len(values),) or not np.isfinite(advantages).all():
        name = getattr(how.group, "__name__", repr(how.group))
        raise ValueError(
            f"advantages: {name} returned {advantages.tolist()} for rewards {values.tolist()}; "
            f"expected {len(values)} finite numbers"
        )
    result[scored] = advantages
    return result


def _values(rewards: Sequence[Scored], parts: bool) -> FloatArray:
    if not parts:
        return np.array([r.value for r in rewards])
    names = [sorted(r.parts) for r in rewards]
    if any(not found or found != names[0] for found in names):
        raise ValueError(
            f"advantages: this advantage reads the parts of a reward, the completions have {names}; "
            "give the reward at least one named part, the same for all ([reward.parts])"
        )
    return np.array([[r.parts[name] for name in names[0]] for r in rewards])


def scored_mask(rewards: Sequence[Reward]) -> NDArray[np.bool_]:
    """[G] bool: the rewards that are a finite verdict (AV-1)."""
    return np.array([isinstance(r, Scored) and bool(np.isfinite(r.value)) for r in rewards], dtype=bool)


def has_contrast(rewards: Sequence[Reward]) -> bool:
    """Whether at least two scored rewards differ, compared exactly: a group without teaches nothing (AV-2)."""
    return len({r.value for r in rewards if isinstance(r, Scored) and np.isfinite(r.value)}) > 1


# --- tokens and turns -------------------------------------------------------------------------------------------------


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """What is added to the reward of a long completion: 0 up to max_length - buffer tokens, then falling to -factor.

    DAPO, arXiv:2503.14476. It stays at -factor from `max_length` on. `buffer` 0 means no penalty.

    >>> [overlong_penalty(n, max_length=20480, buffer=4096) for n in (10000, 18432, 20480, 30000)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if buffer == 0:
        return 0.0
    return min(max((max_length - buffer - length) / buffer, -1.0), 0.0) * factor


def returns_to_go(rewards: FloatArray, gamma: float = 1.0) -> FloatArray:
    """[T] sum_{u >= t} gamma^(u - t) r_u.

    >>> returns_to_go(np.array([0.0, 1, 2]), gamma=0.5).tolist()
    [1.0, 2.0, 2.0]
    """
    result = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = result[t] = float(rewards[t]) + gamma * following
    return result


def gae(
    rewards: FloatArray, values: FloatArray, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns, [T] each, of one finished trajectory: V after its end is 0. GAE, arXiv:1506.02438.

    >>> a, r = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.6, 0.8]))
    >>> a.round(4).tolist(), r.round(4).tolist()
    ([0.4705, 0.39, 0.2], [0.9705, 0.99, 1.0])
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = returns_to_go(deltas, gamma * lam)
    return advantages, advantages + values


def per_turn(
    turn_rewards: Sequence[Sequence[float]], *, gamma: float = 1.0, normalise: bool = True, eps: float = 1e-6
) -> list[FloatArray]:
    """Advantages of the turns of each episode of one group: later rewards credit earlier turns, never the reverse.

    A_ik = G_ik - mean over the episodes that reached turn k of G_jk, G the returns to go; divided by their deviation
    (ddof 1) + eps if `normalise`. A turn that fewer than two episodes reached, or without contrast, gets 0. After
    MT-GRPO, arXiv:2505.11821, with returns to go in place of two levels.

    Args:
        turn_rewards: one sequence of turn rewards for each episode; lengths may differ.

    >>> [a.tolist() for a in per_turn([[1, 2], [0, 1]], normalise=False)]
    [[1.0, 0.5], [-1.0, -0.5]]
    """
    returns = [returns_to_go(np.asarray(rewards, dtype=np.float64), gamma) for rewards in turn_rewards]
    result = [np.zeros(len(g)) for g in returns]
    for turn in range(max((len(g) for g in returns), default=0)):
        reached = [i for i, g in enumerate(returns) if len(g) > turn]
        column = np.array([returns[i][turn] for i in reached])
        if len(column) < 2 or (column == column[0]).all():
            continue
        centred = column - column.mean()
        if normalise:
            centred = centred / (column.std(ddof=1) + eps)
        for i, value in zip(reached, centred, strict=True):
            result[i][turn] = value
    return result


def spread(turn_advantages: FloatArray, turn_lengths: Sequence[int]) -> FloatArray:
    """[C]: the advantage of each turn for all its tokens.

    >>> spread(np.array([1.0, -2]), [2, 1]).tolist()
    [1.0, 1.0, -2.0]
    """
    return np.repeat(turn_advantages, turn_lengths)
