"""Slots bound how far rollouts run ahead of training; tickets account for every group.

AD-1: at most `slots` = floor((S + 1) * P) groups are admitted and unreleased, with S the staleness in policy versions
      and P the groups per training step. Re-issued prompts count like any other.
AD-2: the slot of a trained group frees only after the fleet committed the version that its training made (`commit`,
      then `release`); the slot of a dropped group frees at once.
AD-3: tickets are numbered in the order of admission, and that is the order of training (strict FIFO, see `Buffer`).
AD-4: conservation (A2): issued = trained + dropped (by reason) + buffered + in training + in flight; see `check`.
AD-5: a dropped prompt comes back before new ones, so that it is not lost, unless the prompt itself is to blame
      ("unscored", "empty") or it was issued `max_attempts` times.

Why this bounds the age (A1). Let a ticket be admitted under version v. At most slots - 1 other groups are unreleased
then, those in training among them, and all are trained before it, P a step, the first of them on v. So it is trained
at most ceil(slots / P) - 1 versions later: `max_age`, which is S for a whole S and at most ceil(S) otherwise (then S
bounds the mean age of a batch). Drops only move a group forward.

Admission keeps old work from being made; `Buffer.take` is what guarantees the bound, also when a replica serves old
weights. Assumed: one event loop; a training step raises the version by one.

The life of a ticket, and of its slot:

        admit        put          take         commit, release
    ------> in flight ---> buffered ---> training ---------------> trained
                |             |
                +-- drop -----+--------------------------------> dropped
    slot:   held .......................................... held   free
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from algorithms.line import Line
from roles.types import Dropped, DropReason, Group, Prompt

__all__ = [
    "Admission",
    "AdmissionState",
    "AdmissionStatistics",
    "Closed",
    "Issue",
    "Prompts",
    "Ticket",
    "max_age",
    "num_slots",
]

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


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps (A5). Groups are not kept: their prompts are issued again, first and in this order."""

    version: int
    trained: int
    dropped: dict[str, int]
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


def num_slots(staleness: float, groups_per_step: int) -> int:
    """floor((S + 1) * P), AD-1.

    >>> num_slots(0, 4), num_slots(0.5, 4), num_slots(1, 4), num_slots(0.1, 4)
    (4, 6, 8, 4)
    """
    if not (math.isfinite(staleness) and staleness >= 0):
        raise ValueError(f"staleness: expected a number of policy versions >= 0, got {staleness}; 0 is synchronous")
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step: expected at least 1, got {groups_per_step}; set the prompts of one step")
    # The small term keeps 0.29 * 100 = 28.999999999999996 from losing a slot.
    return groups_per_step + math.floor(staleness * groups_per_step + 1e-9)


def max_age(staleness: float, groups_per_step: int) -> int:
    """ceil(slots / P) - 1, in versions: no group older than this is trained (proof in the module docstring).

    >>> max_age(0, 4), max_age(0.5, 4), max_age(1, 4), max_age(0.1, 4)
    (0, 1, 1, 0)
    """
    return -(-num_slots(staleness, groups_per_step) // groups_per_step) - 1


@dataclass(slots=True)
class Entry:
    """The one record of a ticket between admission and its end."""

    ticket: Ticket
    group: Group | None = None
    """Set while buffered and in training."""
    trained_on: int | None = None
    """The version it is trained on, set by `take`."""

    @property
    def stage(self) -> Literal["in flight", "buffered", "training"]:
        if self.trained_on is not None:
            return "training"
        return "in flight" if self.group is None else "buffered"


class Admission:
    """Hands out tickets for slots and keeps the book of all tickets. `Buffer` works on the same book.

    Example, with S = 0 and P = 2 (synchronous):

        >>> from roles.types import Prompt
        >>> class Count:
        ...     position = -1
        ...     def take(self):
        ...         self.position += 1
        ...         return Prompt(position=self.position, text="", token_ids=(), task="", entry={})
        >>> admission = Admission(Count(), groups_per_step=2, staleness=0)
        >>> first, second = admission.admit_nowait(), admission.admit_nowait()
        >>> admission.admit_nowait() is None                      # both slots are held
        True
        >>> admission.drop(second, "timeout").position            # frees a slot ...
        1
        >>> third = admission.admit_nowait()                      # ... and its prompt comes back (AD-5)
        >>> third.number, third.prompt.position, third.attempt
        (2, 1, 1)
        >>> admission.check()                                     # 3 issued = 1 dropped + 2 in flight
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        groups_per_step: int,
        staleness: float,
        version: int = 0,
        num_groups: int | None = None,
        max_attempts: int = 3,
    ) -> None:
        """
        Args:
            prompts: where new prompts come from.
            groups_per_step: P.
            staleness: S, in policy versions; 0 is synchronous; may be fractional.
            version: what the fleet serves now.
            num_groups: groups that the whole run trains, resumed parts included (steps * P). Nothing beyond is
                admitted, so that the last step does not leave work in flight. None: no limit.
            max_attempts: how often one prompt is issued at most (AD-5).

        Raises:
            ValueError: a number out of its range.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts: expected at least 1, got {max_attempts}; 1 never issues a prompt again")
        self.slots = num_slots(staleness, groups_per_step)
        self.max_age = max_age(staleness, groups_per_step)
        self.num_groups = num_groups
        self.max_attempts = max_attempts
        self.closed = False
        self.takers = Line()
        """Those who wait for groups (`Buffer.take`)."""
        self._producers = Line()
        self._prompts = prompts
        self._version = version
        self._book: dict[int, Entry] = {}  # by ticket number, in that order; its length is the number of slots held
        # Prompts to issue again, with their attempt. New prompts are taken only while it is empty, so that it and the
        # book together never hold more than `slots`.
        self._again: deque[tuple[Prompt, int]] = deque()
        self._issued = 0
        self._trained = 0
        self._dropped: dict[str, int] = {}
        self._dropped_tokens = 0

    # --- slots --------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that the whole fleet has committed; only `commit` moves it."""
        return self._version

    async def admit(self) -> Ticket:
        """Wait for a free slot, then issue the next prompt: returned ones first, else a new one of the source.

        Raises:
            Closed: the pipeline is closed.
        """
        return await self._producers.wait(self._admit_or_closed)

    def admit_nowait(self) -> Ticket | None:
        """A ticket, or None if no slot is free (AD-1) or the run needs no further group."""
        if len(self._book) >= self.slots:
            return None
        if self.num_groups is not None and self._trained + len(self._book) >= self.num_groups:
            return None
        prompt, attempt = self._again.popleft() if self._again else (self._prompts.take(), 0)
        ticket = Ticket(number=self._issued, prompt=prompt, version=self._version, attempt=attempt)
        self._issued += 1
        self._book[ticket.number] = Entry(ticket)
        self._changed()
        return ticket

    def commit(self, version: int) -> None:
        """The whole fleet now serves `version`. The same version again is no error: a resumed run publishes it anew.

        Raises:
            RuntimeError: the version is older than the committed one.
        """
        if version < self._version:
            raise RuntimeError(
                f"commit({version}): the fleet is at version {self._version} already and never goes back"
            )
        self._version = version

    def release(self, tickets: Iterable[Ticket]) -> None:
        """Trained: free the slots (AD-2).

        Raises:
            RuntimeError: a ticket is not in training or comes twice, or the fleet has not committed a version newer
                than the one it was trained on. Nothing is released then.
        """
        tickets = list(tickets)
        entries = [self._entry(ticket, "release", "training") for ticket in tickets]
        if len({ticket.number for ticket in tickets}) < len(tickets):
            raise RuntimeError(f"release: a ticket comes twice among {[ticket.number for ticket in tickets]}")
        for entry in entries:
            if entry.trained_on is None or self._version <= entry.trained_on:
                raise RuntimeError(
                    f"release: ticket {entry.ticket.number} was trained on version {entry.trained_on}, but the fleet "
                    f"is at version {self._version}; publish and commit the new version first, or a group admitted "
                    "into the slot would be too old"
                )
        for entry in entries:
            del self._book[entry.ticket.number]
            self._trained += 1
        self._changed()

    def drop(self, ticket: Ticket, reason: DropReason, *, num_tokens: int = 0) -> Dropped:
        """The group leaves untrained: its slot frees at once, its prompt comes back unless AD-5 says otherwise.

        `num_tokens` were sampled for nothing; for a buffered group they are known and the argument is ignored.

        Raises:
            RuntimeError: the ticket ended before, or its group is in training.
        """
        entry = self._entry(ticket, "drop", "in flight", "buffered")
        tokens = num_tokens if entry.group is None else entry.group.num_tokens
        del self._book[ticket.number]
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._dropped_tokens += tokens
        if reason in REISSUED and ticket.attempt + 1 < self.max_attempts:
            self._again.append((ticket.prompt, ticket.attempt + 1))
        self._changed()
        return Dropped(position=ticket.prompt.position, reason=reason, num_tokens=tokens)

    def close(self) -> None:
        """End all waiting with `Closed`. The book stays open, so that what is in flight can still be accounted for."""
        self.closed = True
        self._producers.wake_all()
        self.takers.wake_all()

    # --- the book, as the buffer uses it ------------------------------------------------------------------------------

    def arrive(self, ticket: Ticket, group: Group) -> None:
        """In flight -> buffered. Raises RuntimeError unless the ticket is in flight."""
        self._entry(ticket, "put", "in flight").group = group
        self._changed()

    def begin_training(self, ticket: Ticket, version: int) -> None:
        """Buffered -> training on `version`. Raises RuntimeError unless the ticket is buffered."""
        self._entry(ticket, "take", "buffered").trained_on = version

    @property
    def book(self) -> list[Entry]:
        """The records of all held slots, in the order of admission (AD-3)."""
        return list(self._book.values())

    def queue(self) -> list[Entry]:
        """Those of them that are in flight or buffered: what will be trained, in that order."""
        return [entry for entry in self._book.values() if entry.trained_on is None]

    # --- accounts -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert AD-1 and AD-4.

        Raises:
            RuntimeError: with all the numbers.
        """
        s = self.statistics()
        dropped = sum(s.dropped.values())
        if s.issued != s.trained + dropped + s.buffered + s.training + s.in_flight:
            raise RuntimeError(
                f"conservation of groups is broken: issued {s.issued} != trained {s.trained} + dropped {dropped} "
                f"{s.dropped} + buffered {s.buffered} + in training {s.training} + in flight {s.in_flight}"
            )
        if (held := s.buffered + s.training + s.in_flight) > s.slots:
            raise RuntimeError(
                f"{held} groups are admitted and unreleased, the bound is {s.slots}: "
                f"buffered {s.buffered} + in training {s.training} + in flight {s.in_flight}"
            )

    def statistics(self) -> AdmissionStatistics:
        stages = [entry.stage for entry in self._book.values()]
        return AdmissionStatistics(
            version=self._version,
            slots=self.slots,
            max_age=self.max_age,
            issued=self._issued,
            in_flight=stages.count("in flight"),
            buffered=stages.count("buffered"),
            training=stages.count("training"),
            trained=self._trained,
            dropped=dict(self._dropped),
            dropped_tokens=self._dropped_tokens,
            to_reissue=len(self._again),
            producers_waiting=len(self._producers),
            producers_waited_seconds=self._producers.seconds,
        )

    def outstanding(self) -> list[Issue]:
        """Issued and not trained, in the order in which a resumed run issues them: admitted, then returned ones."""
        admitted = [(entry.ticket.prompt, entry.ticket.attempt) for entry in self._book.values()]
        return [Issue(position=p.position, attempt=attempt) for p, attempt in [*admitted, *self._again]]

    def state(self) -> AdmissionState:
        """For a checkpoint. Take it after the trained groups of the step were released, or they are trained twice."""
        return AdmissionState(
            version=self._version, trained=self._trained, dropped=dict(self._dropped), outstanding=self.outstanding()
        )

    def restore(self, state: AdmissionState, prompt_at: Callable[[int], Prompt]) -> None:
        """Continue from a checkpoint: its outstanding prompts are issued first, in order, with their attempts (A5).

        They count as issued when they are issued again, so that AD-4 holds from the start.

        Raises:
            RuntimeError: something was admitted already.
        """
        if self._issued:
            raise RuntimeError(f"restore: {self._issued} groups were admitted already; restore before that")
        self._version = state.version
        self._trained = state.trained
        self._dropped = dict(state.dropped)
        self._issued = state.trained + sum(state.dropped.values())
        self._again = deque((prompt_at(issue.position), issue.attempt) for issue in state.outstanding)
        self._changed()

    # --- inner --------------------------------------------------------------------------------------------------------

    def _admit_or_closed(self) -> Ticket | None:
        if self.closed:
            raise Closed("no further group is admitted: the pipeline is closed")
        return self.admit_nowait()

    def _entry(self, ticket: Ticket, verb: str, *stages: str) -> Entry:
        entry = self._book.get(ticket.number)
        if entry is None or entry.stage not in stages:
            where = "ended before (trained or dropped)" if entry is None else f"is {entry.stage}"
            raise RuntimeError(
                f"{verb}: ticket {ticket.number} of prompt {ticket.prompt.position} {where}, "
                f"expected it to be {' or '.join(stages)}; each ticket is put or dropped once"
            )
        return entry

    def _changed(self) -> None:
        self._producers.wake()
        self.takers.wake()
