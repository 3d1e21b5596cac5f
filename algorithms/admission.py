"""Slots bound how far rollouts run ahead of training; tickets account for every group.

AD-1: at most `bounds.slots` groups are admitted and unreleased. Re-issued prompts count like any other.
AD-2: the slot of a trained group frees only after the fleet committed the version that its training made (`commit`,
      then `release`); the slot of a dropped group frees at once.
AD-3: tickets are numbered in the order of admission; `Buffer` trains in that order (`bounds` says how strictly).
AD-4: conservation (A2): issued = trained + dropped (by reason) + buffered + in training + in flight; see `check`.
AD-5: a dropped prompt comes back before new ones, so that it is not lost, unless the prompt itself is to blame
      ("unscored", "empty", "no_contrast") or it was issued `max_attempts` times.
AD-6: a restored pipeline holds the same tickets in the same order: groups that were saved are buffered again, the
      others are handed out again, first and in order, under the version of now.

Admission keeps old work from being made; `Buffer.take` is what guarantees the bound on age (A1), also when a replica
serves old weights. Why slots bound it: `algorithms.bounds`. Assumed: one event loop; a training step raises the version
by one.

The life of a ticket, and of its slot:

        admit        put          take         commit, release
    ------> in flight ---> buffered ---> training ---------------> trained
                |             |
                +-- drop -----+--------------------------------> dropped
    slot:   held .......................................... held   free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from algorithms.bounds import Bounds, TooOld
from algorithms.line import Line
from algorithms.tickets import REISSUED, AdmissionState, AdmissionStatistics, Closed, Entry, Issue, Prompts, Ticket
from roles.types import Dropped, DropReason, Group, Prompt

__all__ = [
    "Admission",
    "AdmissionState",
    "AdmissionStatistics",
    "Closed",
    "Issue",
    "Prompts",
    "Ticket",
]


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
        window: int = 1,
        over_sampling: float = 1.0,
        too_old: TooOld = "drop",
        version: int = 0,
        num_groups: int | None = None,
        max_attempts: int = 3,
    ) -> None:
        """
        Args:
            prompts: where new prompts come from.
            groups_per_step, staleness, window, over_sampling, too_old: see `Bounds`.
            version: what the fleet serves now.
            num_groups: groups that the whole run trains, resumed parts included (steps * P). Nothing beyond is
                admitted, so that the last step does not leave work in flight. None: no limit.
            max_attempts: how often one prompt is issued at most (AD-5).

        Raises:
            ValueError: a number out of its range.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts: expected at least 1, got {max_attempts}; 1 never issues a prompt again")
        self.bounds = Bounds(
            groups_per_step=groups_per_step,
            staleness=staleness,
            window=window,
            over_sampling=over_sampling,
            too_old=too_old,
        )
        self.slots = self.bounds.slots
        self.max_age = self.bounds.max_age
        self.num_groups = num_groups
        self.max_attempts = max_attempts
        self.closed = False
        self.takers = Line()
        """Those who wait for groups (`Buffer.take`)."""
        self._producers = Line()
        self._quiet = Line()
        self._held = False
        self._prompts = prompts
        self._version = version
        self._book: dict[int, Entry] = {}  # by ticket number, in that order; its length is the number of slots held
        self._restored: deque[Ticket] = deque()
        """Tickets of the book that nobody works on yet (AD-6)."""
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

    @property
    def needs_no_more(self) -> bool:
        """Whether the run has all the groups that it trains, unless one of them is dropped."""
        return self.num_groups is not None and self._trained + len(self._book) >= self.num_groups

    async def admit(self) -> Ticket:
        """Wait for a free slot, then issue the next prompt: returned ones first, else a new one of the source.

        Raises:
            Closed: the pipeline is closed.
        """
        return await self._producers.wait(self._admit_or_closed)

    def admit_nowait(self) -> Ticket | None:
        """A ticket, or None if no slot is free (AD-1), the run needs no further group, or admission is on hold."""
        if self._held:
            return None
        if self._restored:
            ticket = self._restored.popleft()
            self._changed()
            return ticket
        if len(self._book) >= self.slots or self.needs_no_more:
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

    async def quiet(self) -> None:
        """Hold admission, and wait until no group is in flight; `go_on` ends the hold.

        Raises:
            Closed: the pipeline is closed.
        """
        self._held = True
        await self._quiet.wait(self._quiet_or_closed)

    def go_on(self) -> None:
        """Admit again after `quiet`."""
        self._held = False
        self._changed()

    def close(self) -> None:
        """End all waiting with `Closed`. The book stays open, so that what is in flight can still be accounted for."""
        self.closed = True
        self._producers.wake_all()
        self.takers.wake_all()
        self._quiet.wake_all()

    # --- the book, as the buffer uses it ------------------------------------------------------------------------------

    def arrive(self, ticket: Ticket, group: Group) -> None:
        """In flight -> buffered. Raises RuntimeError unless the ticket is in flight."""
        entry = self._entry(ticket, "put", "in flight")
        oldest = group.oldest_version
        entry.group, entry.oldest = group, ticket.version if oldest is None else oldest
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
        """Issued and not trained, in the order of training: admitted, then prompts that wait to be issued again."""
        admitted = [
            Issue(
                position=entry.ticket.prompt.position,
                attempt=entry.ticket.attempt,
                version=entry.ticket.version,
                buffered=entry.stage == "buffered",
            )
            for entry in self._book.values()
        ]
        return [*admitted, *(Issue(position=p.position, attempt=attempt) for p, attempt in self._again)]

    def buffered(self) -> list[Group]:
        """The groups of the issues that are marked so, in their order."""
        return [entry.group for entry in self._book.values() if entry.group is not None and entry.trained_on is None]

    def state(self) -> AdmissionState:
        """For a checkpoint. Take it after the trained groups of the step were released, or they are trained twice."""
        return AdmissionState(
            version=self._version,
            trained=self._trained,
            dropped=dict(self._dropped),
            dropped_tokens=self._dropped_tokens,
            outstanding=self.outstanding(),
        )

    def restore(
        self,
        state: AdmissionState,
        prompt_at: Callable[[int], Prompt],
        groups: Iterable[Group] | None = None,
        *,
        steps: int | None = None,
    ) -> None:
        """Continue from a checkpoint (AD-6).

        Args:
            prompt_at: the prompt of a position.
            groups: those of the issues marked `buffered`, in order; None: they are generated again.
            steps: that were done. The job may have had another number of groups a step then; None: it had not.

        Raises:
            RuntimeError: something was admitted already.
        """
        if self._issued:
            raise RuntimeError(f"restore: {self._issued} groups were admitted already; restore before that")
        if self.num_groups is not None and steps is not None:
            self.num_groups += state.trained - steps * self.bounds.groups_per_step
        self._version = state.version
        self._trained = state.trained
        self._dropped = dict(state.dropped)
        self._dropped_tokens = state.dropped_tokens
        self._issued = state.trained + sum(state.dropped.values())
        saved = None if groups is None else iter(groups)
        for issue in state.outstanding:
            prompt, group = prompt_at(issue.position), next(saved) if saved and issue.buffered else None
            if issue.version is None or len(self._book) >= self.slots:  # a resumed job may have fewer slots
                self._again.append((prompt, issue.attempt))
                continue
            version = self._version if group is None else issue.version
            ticket = Ticket(number=self._issued, prompt=prompt, version=version, attempt=issue.attempt)
            self._issued += 1
            self._book[ticket.number] = Entry(ticket)
            if group is None:
                self._restored.append(ticket)
            else:
                self.arrive(ticket, group)
        self._changed()

    # --- inner --------------------------------------------------------------------------------------------------------

    def _admit_or_closed(self) -> Ticket | None:
        if self.closed:
            raise Closed("no further group is admitted: the pipeline is closed")
        return self.admit_nowait()

    def _quiet_or_closed(self) -> bool | None:
        if self.closed:
            raise Closed("the pipeline is closed")
        return True if all(entry.group is not None for entry in self._book.values()) else None

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
        self._quiet.wake()
