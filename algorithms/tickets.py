"""The records of the pipeline: what is known of a group from its admission to its end.

A ticket is the right to generate one group and its place in the order of training; an entry is the one record of a
ticket that is not over; an issue is what a checkpoint keeps of it. `Admission` and `Buffer` work on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from roles.types import DropReason, Group, Prompt

REISSUED: frozenset[DropReason] = frozenset({"stale", "timeout", "aborted"})
"""Reasons that say nothing against the prompt (AD-5)."""


class Closed(RuntimeError):
    """The pipeline was closed while, or before, somebody waited for it. Raised by `admit` and `take`."""


class Prompts(Protocol):
    """What admission needs of a prompt source: an endless stream, deterministic in its seed and position."""

    def take(self) -> Prompt: ...


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to generate one group, and its place in the order of training."""

    number: int
    """Order of admission (AD-3); unique in a run."""
    prompt: Prompt
    version: int
    """The version that the fleet had committed at admission: the age of a group without tokens counts from here."""
    attempt: int
    """How often this prompt was issued before, 0 at first: part of the seed, so that a retry samples anew."""


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was issued and not trained, as a checkpoint keeps it."""

    position: int
    attempt: int
    version: int | None = None
    """Of the ticket; None for a prompt that waits to be issued again."""
    buffered: bool = False
    """Whether its group was finished: the groups of these are saved beside the book, in the same order."""


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the book (A5, AD-6)."""

    version: int
    trained: int
    dropped: dict[str, int]
    dropped_tokens: int = 0
    outstanding: list[Issue]


class AdmissionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for display and records. All numbers count groups unless they say otherwise."""

    version: int
    """The version that the whole fleet serves."""
    slots: int
    max_age: int
    """The bound, in versions."""
    issued: int
    in_flight: int
    buffered: int
    training: int
    trained: int
    dropped: dict[str, int]
    """By reason; only reasons that occurred."""
    dropped_tokens: int
    """Sampled tokens that were thrown away."""
    to_reissue: int
    """Prompts of dropped groups that wait for a slot."""
    producers_waiting: int
    """Coroutines that wait for a slot."""
    producers_waited_seconds: float


@dataclass(slots=True)
class Entry:
    """The one record of a ticket between admission and its end."""

    ticket: Ticket
    group: Group | None = None
    """Set while buffered and in training."""
    oldest: int = 0
    """The version that the age counts from, once there is a group."""
    passed: int = 0
    """Younger groups that were trained while this one was in flight."""
    trained_on: int | None = None
    """The version it is trained on, set by `take`."""

    @property
    def stage(self) -> Literal["in flight", "buffered", "training"]:
        if self.trained_on is not None:
            return "training"
        return "in flight" if self.group is None else "buffered"
