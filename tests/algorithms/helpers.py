"""Small real records for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from algorithms.admission import Ticket
from roles.types import Completion, FinishReason, Group, Prompt, Reward, Scored


class CountingPrompts:
    """An endless stream of prompts without content: what is tested is their order."""

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> Prompt:
        self.next += 1
        return prompt(self.next - 1)


def prompt(position: int, token_ids: Sequence[int] = (1, 2)) -> Prompt:
    return Prompt(position=position, text="", token_ids=tuple(token_ids), task="none", entry={})


def completion(versions: Sequence[int], finish_reason: FinishReason = "stop") -> Completion:
    """One token for each version."""
    n = len(versions)
    return Completion(
        token_ids=np.arange(10, 10 + n, dtype=np.int32),
        logprobs=np.full(n, -0.5, np.float32),
        versions=np.array(versions, np.int32),
        finish_reason=finish_reason,
    )


def group(ticket: Ticket, *versions: Sequence[int]) -> Group:
    """A group of the ticket's prompt, one completion for each sequence of token versions."""
    return Group(prompt=ticket.prompt, completions=[completion(v) for v in versions])


def scored(values: Sequence[float]) -> list[Reward]:
    return [Scored(value) for value in values]
