"""How many verdicts there are and are not, and the end of a run that has too few.

RW-5: a reward that fails too often stops the run: more than `max_unscored` of the last `window` completions. That holds
      for verifiers, reward models, environments and agents alike: `[reward] max_unscored`.
"""

from __future__ import annotations

from collections import Counter, deque

from roles.types import Group, Unscored
from runtime import TuttiError

NUM_EXAMPLES = 3
"""Completions that are shown when a run ends for want of verdicts."""


class RewardFailed(TuttiError):
    """Too many completions could not be scored."""


def kind_of(reason: str) -> str:
    """What `RewardStats.unscored` counts by: the part of a reason before the first colon."""
    return reason.partition(":")[0]


class Tally:
    """Counts verdicts, and stops a run whose reward fails too often (RW-5).

    Args:
        what: the reward as the job file names it.
        cure: what to do about one that fails.
        max_unscored, window: see `RewardConfig`.
    """

    def __init__(self, what: str, cure: str, *, max_unscored: float = 0.5, window: int = 256) -> None:
        self.scored = 0
        self.unscored: Counter[str] = Counter()
        """By kind."""
        self._what = what
        self._cure = cure
        self._max_unscored = max_unscored
        self._failed: deque[bool] = deque(maxlen=window)
        self._examples: deque[str] = deque(maxlen=NUM_EXAMPLES)

    def count(self, group: Group) -> None:
        """Take in a scored group.

        Raises:
            RewardFailed: too many of the last completions have no verdict.
        """
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            self._failed.append(isinstance(reward, Unscored))
            if isinstance(reward, Unscored):
                self.unscored[kind_of(reward.reason)] += 1
                self._examples.append(
                    f"task {group.prompt.task!r}, prompt {group.prompt.position}: {reward.reason}\n"
                    f"    question: {group.prompt.text!r:.200}\n"
                    f"    completion: {completion.text!r:.200}"
                )
            else:
                self.scored += 1
        failed, window = sum(self._failed), self._failed.maxlen or 0
        if len(self._failed) == window and failed > self._max_unscored * window:
            self._failed.clear()  # a run that comes after this one, over the same processes, is judged by its own
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.unscored.most_common())
            raise RewardFailed(
                f"{self._what}: {failed} of the last {window} completions could not be scored, expected at most "
                f"{self._max_unscored:.0%} ([reward] max_unscored). Since the start: {kinds}. {self._cure}. The last "
                "ones:\n  " + "\n  ".join(self._examples)
            )


def tally_of_episodes(what: str, *, max_unscored: float = 0.5, window: int = 256) -> Tally:
    """Of what an environment or an agent says."""
    cure = "Fix it, or raise [environment] seconds if it is only slow"
    return Tally(what, cure, max_unscored=max_unscored, window=window)
