"""All tokens of an episode in the order in which the policy reads them. Pure.

    prompt | sampled | observed | sampled | ...        one row of token ids, append-only
             trained   masked     trained

TS-1: a token that stands here is never changed or tokenised again: what the policy sampled is what it reads in its next
      turn and what is trained. Nothing is removed but what was observed and never read (`unheard`).
TS-2: `completion` is everything after the prompt, up to the last sampled token; what was observed is masked there
      (types.py, TY-4).
TS-3: each sampled token keeps logprob, version and experts of the turn that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roles.types import Completion, FinishReason


class Transcript:
    """Args: prompt_ids: what the policy reads before its first turn; at least one token."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_length = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._routes: list[np.ndarray] | None = []
        self._routed = 0  # lines of routes so far
        self._end = 0  # tokens after the prompt, up to the last sampled one
        self._parts = 0  # arrays up to there
        self._finish: FinishReason = "stop"
        self.num_turns = 0
        """Turns of the policy."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything, as the policy reads it."""
        return tuple(self._ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What stood there before the first turn."""
        return tuple(self._ids[: self._prompt_length])

    def __len__(self) -> int:
        return len(self._ids)

    def sample(self, turn: Completion) -> None:
        """The policy's turn, sampled from all that stands here."""
        count = len(turn.token_ids)
        if turn.routes is None:
            self._routes = None
        elif self._routes is not None and count:
            self._routes.append(turn.routes[self._routed :])
            self._routed = len(turn.routes)
        self._ids += turn.token_ids.tolist()
        self._add(turn.logprobs, turn.versions, np.ones(count, bool))
        self.num_turns += 1
        self._finish = turn.finish_reason
        self._end, self._parts = len(self._ids) - self._prompt_length, len(self._masks)

    def observe(self, ids: Sequence[int]) -> None:
        """What the environment said."""
        self._ids += ids
        latest = self._versions[-1][-1:] if self._versions else np.zeros(0, np.int32)
        versions = np.repeat(latest, len(ids)) if len(latest) else np.full(len(ids), -1)
        self._add(np.zeros(len(ids), np.float32), versions.astype(np.int32), np.zeros(len(ids), bool))

    def unheard(self) -> None:
        """Take back what was observed since the last turn: no turn has read it."""
        del self._ids[self._prompt_length + self._end :]
        for parts in (self._logprobs, self._versions, self._masks):
            del parts[self._parts :]

    def completion(self) -> Completion:
        """Everything after the prompt as one completion (TS-2)."""
        parts = self._parts
        empty = np.zeros(0, np.int32)
        mask = np.concatenate([np.zeros(0, bool), *self._masks[:parts]])
        versions = np.concatenate([empty, *self._versions[:parts]])
        if mask.any():  # what was said before the first turn has no version to repeat but that of the first turn
            versions[: int(mask.argmax())] = versions[int(mask.argmax())]
        return Completion(
            token_ids=np.array(self._ids[self._prompt_length : self._prompt_length + self._end], np.int32),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs[:parts]]),
            versions=versions,
            finish_reason=self._finish,
            mask=None if mask.all() else mask,
            routes=np.concatenate(self._routes) if self._routes else None,
        )

    def _add(self, logprobs: np.ndarray, versions: np.ndarray, mask: np.ndarray) -> None:
        if len(mask):
            self._logprobs.append(logprobs)
            self._versions.append(versions)
            self._masks.append(mask)
