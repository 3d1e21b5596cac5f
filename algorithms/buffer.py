"""Finished groups on their way to training: in order, and never too old.

BU-1: groups are taken in the order of their tickets: a later group waits for an earlier one that is still in flight.
      This is what makes the slots of `Admission` bound the age without dropping anything. With a window W a group in
      flight lets up to W - 1 younger ones pass, then everybody waits for it.
BU-2: no group older than `max_age` is returned. Its age is checked here again, when it is consumed, so that the bound
      holds whatever happened before (a replica that serves old weights, a resumed run, a straggler that was passed); a
      group that fails leaves as Dropped("stale") and its prompt is issued again. `expire` does the same for groups that
      are still in flight and can only become too old.
BU-3: age (A1) = version it is trained on - oldest version that produced any of its tokens; queueing is included because
      the first term is only known here. A group without tokens counts from the version at its admission.
BU-4: a cancelled `take` took nothing; a closed buffer ends all waiting; nothing polls.
BU-5: the buffer holds no more than `slots` groups, because `put` needs a ticket.

Ages are counted over consumed groups only: dropped ones would pollute the mean.

A run with S = 1 and P = 2: 4 slots. A letter for each held slot in the order of tickets: `f` in flight, `b` buffered,
`t` in training; on the left the version that the fleet serves.

    v0  f f f f            4 admitted under v0, no slot is left
    v0  f b b f            1 and 2 finished first, but the taker waits for 0 (BU-1)
    v0  t t b f            0 finished: 0 and 1 are trained on v0, age 0
    v1      b f f f        v1 is committed, 2 slots free, 4 and 5 are admitted under v1
    v1      t t f f        3 finished: 2 and 3 are trained on v1, age 1, the bound

    >>> import numpy as np
    >>> from algorithms.admission import Admission
    >>> from roles.types import Completion, Group, Prompt
    >>> class Count:
    ...     position = -1
    ...     def take(self):
    ...         self.position += 1
    ...         return Prompt(position=self.position, text="", token_ids=(), task="", entry={})
    >>> def generate(ticket, version):
    ...     one = np.ones(1, np.int32)
    ...     token = {"token_ids": one, "logprobs": np.zeros(1, np.float32), "versions": one * version}
    ...     return Group(prompt=ticket.prompt, completions=[Completion(**token, finish_reason="stop")])
    >>> admission = Admission(Count(), groups_per_step=2, staleness=1)
    >>> buffer = Buffer(admission)
    >>> def show():
    ...     buffer.check()
    ...     letters = {"in flight": "f", "buffered": "b", "training": "t"}
    ...     return admission.version, " ".join(letters[entry.stage] for entry in admission.book)
    >>> tickets = [admission.admit_nowait() for _ in range(4)]
    >>> show()
    (0, 'f f f f')
    >>> buffer.put(tickets[1], generate(tickets[1], 0)); buffer.put(tickets[2], generate(tickets[2], 0))
    >>> buffer.take_nowait(2, version=0) is None, show()
    (True, (0, 'f b b f'))
    >>> buffer.put(tickets[0], generate(tickets[0], 0))
    >>> taken = buffer.take_nowait(2, version=0)
    >>> [(t.ticket.number, t.age) for t in taken], show()
    ([(0, 0), (1, 0)], (0, 't t b f'))
    >>> admission.commit(1); admission.release(t.ticket for t in taken)
    >>> tickets += [admission.admit_nowait(), admission.admit_nowait()]
    >>> show()
    (1, 'b f f f')
    >>> buffer.put(tickets[3], generate(tickets[3], 0))
    >>> [(t.ticket.number, t.age) for t in buffer.take_nowait(2, version=1)], show()
    ([(2, 1), (3, 1)], (1, 't t f f'))
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from algorithms.admission import Admission
from algorithms.tickets import Closed, Entry, Issue, Ticket
from roles.types import Group

__all__ = ["Buffer", "BufferStatistics", "Taken", "age"]


class Taken(NamedTuple):
    """A group that goes into training; unpacks as (ticket, group, age)."""

    ticket: Ticket
    group: Group
    age: int
    """In versions, BU-3."""


class BufferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for display and records."""

    consumed: int
    """Groups taken so far."""
    age_mean: float
    """Over the consumed groups, in versions; 0 when there is none."""
    age_max: int
    takers_waiting: int
    """Coroutines that wait for groups."""
    takers_waited_seconds: float
    head: Issue | None
    """The prompt that everybody in the buffer waits for: the oldest one, when it is still in flight."""


def age(ticket: Ticket, group: Group, version: int) -> int:
    """The age of a group that is trained on `version`, in versions (BU-3)."""
    oldest = group.oldest_version
    return version - (ticket.version if oldest is None else oldest)


class Buffer:
    """Order and age over the book of an `Admission`; it keeps no groups of its own that could disagree with it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._consumed = 0
        self._age_sum = 0
        self._age_max = 0

    def put(self, ticket: Ticket, group: Group) -> None:
        """A finished, scored group arrives. Never waits: its place was reserved by the ticket (BU-5).

        Raises:
            RuntimeError: the ticket is not in flight (put or dropped before), or belongs to another prompt.
        """
        if group.prompt.position != ticket.prompt.position:
            raise RuntimeError(
                f"put: ticket {ticket.number} was issued for prompt {ticket.prompt.position}, "
                f"the group is of prompt {group.prompt.position}; put a group with the ticket it was generated for"
            )
        self._admission.arrive(ticket, group)

    async def take(self, num_groups: int, *, version: int) -> list[Taken]:
        """Wait for the next `num_groups` groups in order, for training on `version`; drop those that are too old.

        Their slots stay held until `Admission.release`.

        Raises:
            Closed: the pipeline is closed.
            ValueError: so many groups can never be there at once.
            RuntimeError: `version` is older than what the fleet serves, or than a token of a group.
        """

        def attempt() -> list[Taken] | None:
            if self._admission.closed:
                raise Closed("no further groups come: the pipeline is closed")
            return self.take_nowait(num_groups, version=version)

        return await self._admission.takers.wait(attempt)

    def take_nowait(self, num_groups: int, *, version: int) -> list[Taken] | None:
        """Like `take`, but None when the next `num_groups` are not all there; too old ones are dropped anyhow."""
        self._check_request(num_groups, version)
        self._drop_stale(version)
        chosen = self._choose(num_groups)
        if chosen is None:
            return None
        taken = [Taken(e.ticket, e.group, version - e.oldest) for e in chosen if e.group is not None]
        for one in taken:
            self._admission.begin_training(one.ticket, version)
        self._consumed += len(taken)
        self._age_sum += sum(one.age for one in taken)
        self._age_max = max(self._age_max, *(one.age for one in taken))
        return taken

    def expire(self, version: int) -> list[Ticket]:
        """Drop the groups in flight that will be too old when they are trained on `version` or later (BU-2).

        Returns:
            Their tickets: whoever generates them should stop. In strict order there are none.
        """
        expired = [
            entry.ticket
            for entry in self._admission.queue()
            if entry.group is None and version - entry.ticket.version > self._admission.max_age
        ]
        for ticket in expired:
            self._admission.drop(ticket, "stale")
        return expired

    def outstanding(self) -> list[Issue]:
        """What a checkpoint keeps of the pipeline, in the order in which a resumed run issues it (A5)."""
        return self._admission.outstanding()

    def check(self) -> None:
        """Assert conservation and the slot bound (`Admission.check`), and that no older group was ever let through.

        Raises:
            RuntimeError: with all the numbers.
        """
        self._admission.check()
        if self._age_max > self._admission.max_age:
            raise RuntimeError(
                f"trained a group of age {self._age_max}, the bound is {self._admission.max_age} versions"
            )

    def statistics(self) -> BufferStatistics:
        queue = self._admission.queue()
        blocked = queue[0].ticket if queue and queue[0].group is None else None
        takers = self._admission.takers
        return BufferStatistics(
            consumed=self._consumed,
            age_mean=self._age_sum / self._consumed if self._consumed else 0.0,
            age_max=self._age_max,
            takers_waiting=len(takers),
            takers_waited_seconds=takers.seconds,
            head=Issue(position=blocked.prompt.position, attempt=blocked.attempt) if blocked else None,
        )

    def who_waits(self) -> str:
        """One line for people: who waits for whom (A3).

        "training waits for prompt 17, in flight since version 3" (or "for a group to be admitted"), "generation waits
        for a slot: 8 of 8 held, 2 buffered", both, or "".
        """
        book = self._admission.statistics()
        parts = []
        if len(self._admission.takers):
            blocked = next((e.ticket for e in self._admission.queue() if e.group is None), None)
            if blocked is None:
                parts.append("training waits for a group to be admitted")
            else:
                parts.append(
                    f"training waits for prompt {blocked.prompt.position}, in flight since version {blocked.version}"
                )
        if book.producers_waiting and not self._admission.needs_no_more:
            held = book.in_flight + book.buffered + book.training
            parts.append(f"generation waits for a slot: {held} of {book.slots} held, {book.buffered} buffered")
        return "; ".join(parts)

    def close(self) -> None:
        """End all waiting with `Closed`, for producers and takers alike."""
        self._admission.close()

    def _check_request(self, num_groups: int, version: int) -> None:
        if not 1 <= num_groups <= self._admission.slots:
            raise ValueError(
                f"take: expected 1 to {self._admission.slots} groups (the slots), got {num_groups}; more can never "
                "be there at once, take groups_per_step"
            )
        if version < self._admission.version:
            raise RuntimeError(
                f"take: training on version {version}, but the fleet serves {self._admission.version} already; "
                "versions are made by training first"
            )

    def _choose(self, num_groups: int) -> list[Entry] | None:
        """The next groups in order, past stragglers as far as the window allows (BU-1); None: not all there."""
        passes = self._admission.bounds.reach - 1
        chosen: list[Entry] = []
        skipped: list[tuple[Entry, int]] = []
        """Those in flight, and how many were chosen before each."""
        for entry in self._admission.queue():
            if len(chosen) == num_groups:
                break
            if entry.group is None:
                skipped.append((entry, len(chosen)))
            elif skipped and skipped[0][0].passed + len(chosen) - skipped[0][1] >= passes:
                return None  # the oldest straggler lets nobody pass any more
            else:
                chosen.append(entry)
        if len(chosen) < num_groups:
            return None
        for entry, before in skipped:
            entry.passed += num_groups - before
        return chosen

    def _drop_stale(self, version: int) -> None:
        for entry in self._admission.queue():
            if entry.group is None:
                continue
            found = version - entry.oldest
            if found < 0:
                raise RuntimeError(
                    f"take: the group of prompt {entry.ticket.prompt.position} has tokens of version "
                    f"{version - found}, training is on {version}; an engine moved its version before its weights"
                )
            if found > self._admission.max_age:
                self._admission.drop(entry.ticket, "stale")
