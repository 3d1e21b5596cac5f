"""Rewards of a group to advantages of its completions.

AV-1: an unscored completion is no evidence: it is left out of mean and deviation, gets advantage 0 and makes no sample.
      A reward that is not finite counts as unscored.
AV-2: no contrast, no signal: fewer than two scored completions, or scored ones that are all exactly equal, give 0.
AV-3: a group of one completion is an error, because every baseline here needs a second opinion; never NaN.
AV-4: all arithmetic is float64; what leaves for the trainer is float32.

An advantage function takes the scored rewards of one group, [n] float64 with n >= 2 and not all equal, and returns [n]
advantages. AV-1 and AV-2 are applied around it, so that a function of your own need not.

Worked: r = [1, 0, 0, 1, 0, 0, 0, 0] has mean .25 and gives, for a 1 and for a 0,
grpo +1.62018 / -0.54006,   dr_grpo +.75 / -.25,   rloo +.857143 / -.285714.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roles.types import Group, Reward, Scored, TrainSample

FloatArray = NDArray[np.float64]
AdvantageFunction = Callable[[FloatArray], FloatArray]

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


def group_advantages(rewards: Sequence[Reward], function: AdvantageFunction = grpo) -> FloatArray:
    """[G] advantages of one group, AV-1 and AV-2 applied.

    Raises:
        ValueError: fewer than two completions (AV-3), or the function returned another shape or a value not finite.
    """
    if len(rewards) < 2:
        raise ValueError(
            f"advantages: a group has {len(rewards)} completion(s), a baseline within the group needs at least 2; "
            "raise the number of samples per prompt"
        )
    scored = scored_mask(rewards)
    result = np.zeros(len(rewards))
    values = np.array([r.value for r, valid in zip(rewards, scored, strict=True) if valid and isinstance(r, Scored)])
    if len(values) < 2 or (values == values[0]).all():
        return result
    advantages = np.asarray(function(values), dtype=np.float64)
    if advantages.shape != values.shape or not np.isfinite(advantages).all():
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"advantages: {name} returned {advantages.tolist()} for rewards {values.tolist()}; "
            f"expected {len(values)} finite numbers"
        )
    result[scored] = advantages
    return result


def scored_mask(rewards: Sequence[Reward]) -> NDArray[np.bool_]:
    """[G] bool: the rewards that are a finite verdict (AV-1)."""
    return np.array([isinstance(r, Scored) and bool(np.isfinite(r.value)) for r in rewards], dtype=bool)


# --- groups to samples ------------------------------------------------------------------------------------------------


def to_samples(
    groups: Sequence[Group],
    function: AdvantageFunction = grpo,
    *,
    no_signal: Literal["keep", "drop"] = "keep",
) -> list[TrainSample]:
    """The sequences to train on, in the order of groups and completions.

    Left out: unscored completions (AV-1) and those without a token. `no_signal` says what becomes of completions whose
    advantage is 0 because their group has no contrast (AV-2): "keep" leaves their tokens in the denominators and in the
    measures, and penalties such as KL act on them; "drop" saves their compute, and means are then over the others (DAPO
    drops and refills). The result may be empty with "drop": there is nothing to learn from these groups.

    Raises:
        ValueError: a group is not scored, or has one completion.
    """
    samples: list[TrainSample] = []
    for group in groups:
        if len(group.rewards) != len(group.completions):
            raise ValueError(
                f"advantages: the group of prompt {group.prompt.position} has {len(group.completions)} completions and "
                f"{len(group.rewards)} rewards; score the group first"
            )
        scored = scored_mask(group.rewards)
        advantages = group_advantages(group.rewards, function)
        if no_signal == "drop" and not advantages.any():
            continue
        prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for completion, advantage, valid in zip(group.completions, advantages, scored, strict=True):
            length = len(completion.token_ids)
            if not valid or length == 0 or (completion.mask is not None and not completion.mask.any()):
                continue
            samples.append(
                TrainSample(
                    token_ids=np.concatenate([prompt, completion.token_ids.astype(np.int32, copy=False)]),
                    prompt_length=len(prompt),
                    rollout_logprobs=completion.logprobs.astype(np.float32, copy=False),
                    advantages=np.full(length, advantage, dtype=np.float32),
                    mask=completion.mask,
                    routes=completion.routes,
                )
            )
    return samples


# --- shaping and values -----------------------------------------------------------------------------------------------


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """What is added to the reward of a long completion: 0 up to max_length - buffer tokens, then falling to -1.

    DAPO, arXiv:2503.14476. It stays at -1 from `max_length` on. `buffer` 0 means no penalty.

    >>> [overlong_penalty(n, max_length=20480, buffer=4096) for n in (10000, 18432, 20480, 30000)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if buffer == 0:
        return 0.0
    return min(max((max_length - buffer - length) / buffer, -1.0), 0.0)


def gae(
    rewards: FloatArray, values: FloatArray, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns, [T] each, of one finished trajectory: V after its end is 0. GAE, arXiv:1506.02438.

    >>> a, r = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.6, 0.8]))
    >>> a.round(4).tolist(), r.round(4).tolist()
    ([0.4705, 0.39, 0.2], [0.9705, 0.99, 1.0])
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = np.zeros_like(values, dtype=np.float64)
    following = 0.0
    for t in reversed(range(len(values))):
        following = float(deltas[t]) + gamma * lam * following
        advantages[t] = following
    return advantages, advantages + values
