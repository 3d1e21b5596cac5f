"""Whether every replica serves the weights that it was sent: asked, not believed.

FO-1: for a few sequences of the step, the trainer's logprobs before and after it are compared with what each replica
      says after the publication. A replica that is nearer to the old ones than to the new ones has not moved:
      `NotServed`, with its rank.
FO-2: judged only where both can be told apart: the step must have moved the logprobs by more than replica and trainer
      differ anyway.
FO-3: done after the first two publications, where set-ups are wrong, and then every `every` steps; it costs the trainer
      two forward passes over `SEQUENCES` sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from algorithms.watchdog import NotServed
from roles.types import TrainSample

SEQUENCES = 4

CLEARLY = 3.0
"""How many times nearer a replica must be to one side than to the other to be judged."""

FIRST = 2
"""Publications that are always looked at."""


class Scores(Protocol):
    """What is needed of `roles.rollout.Rollout`."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[np.ndarray]]: ...


class Recomputes(Protocol):
    """What is needed of `roles.trainer.Trainer`."""

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]: ...


class Follow:
    """Asks both sides about the same tokens.

    Args:
        every: in steps, after the first two; 0: only these.
    """

    def __init__(self, rollout: Scores, trainer: Recomputes, *, every: int) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._every = every
        self._samples: list[TrainSample] = []
        self._before: list[np.ndarray] = []

    def due(self, version: int) -> bool:
        """Whether the publication of `version` is to be looked at."""
        return 0 < version and (version <= FIRST or (self._every > 0 and version % self._every == 0))

    async def before(self, samples: Sequence[TrainSample]) -> None:
        """Just before a training step on these samples: keep what the trainer says of a few of them."""
        by_length = sorted((s for s in samples if s.num_trained), key=lambda s: len(s.token_ids))
        self._samples = by_length[:SEQUENCES]
        self._before = await self._trainer.logprobs(self._samples) if self._samples else []

    async def after(self, version: int) -> None:
        """After the publication.

        Raises:
            NotServed: a replica answers with the weights from before (FO-1).
        """
        if not self._samples:
            return
        now = _joined(self._samples, await self._trainer.logprobs(self._samples))
        before = _joined(self._samples, self._before)
        moved = float(np.abs(now - before).mean())
        for rank, answers in enumerate(await self._rollout.score([s.token_ids.tolist() for s in self._samples])):
            said = _joined(
                self._samples, [a[s.prompt_length - 1 :] for a, s in zip(answers, self._samples, strict=True)]
            )
            to_new, to_old = float(np.abs(said - now).mean()), float(np.abs(said - before).mean())
            if to_new > CLEARLY * to_old and moved > to_old:
                raise NotServed(
                    f"the weights of version {version} moved the logprobs of {len(now)} tokens by {moved:.2g} nat on "
                    f"average, but rollout rank {rank} still answers with those of version {version - 1} (it differs "
                    f"from them by {to_old:.2g}, from the new ones by {to_new:.2g}): its engine does not use what it "
                    "receives. Look at how it takes new weights, such as caches, adapters or quantised copies"
                )


def _joined(samples: Sequence[TrainSample], values: Sequence[np.ndarray]) -> np.ndarray:
    """The trained tokens of all samples in one array of float64."""
    kept = [v if s.mask is None else v[s.mask] for v, s in zip(values, samples, strict=True)]
    return np.concatenate(kept).astype(np.float64)
