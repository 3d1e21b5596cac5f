"""One attempt to bring a version to the fleet, up to the decision: pack, move, verify (W4).

AT-1: both sides work at once; what they say is taken in as it comes, and the first word that decides ends the attempt.
      The machine may decide before a rank that is sent nothing has said that it is ready: if it can't be, the attempt
      fails all the same, since nobody has been told to apply.
AT-2: an attempt that fails says whose fault it is, as far as that is known, and whether another one may do better:
      without those ranks, with a new plan, or with whole buckets instead of differences.
AT-3: differences are sent only to ranks that all have put the same version into service, bucket by bucket where that
      saves more time on the wire than it costs to rebuild (`worth`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from runtime import DeadlineExceeded, TuttiError
from sync.agree import agreed
from sync.commit import Abort, CommitMachine, Fact, Failed, Fence, Packed
from sync.commit import Staged as ShardStaged
from sync.delta import worth
from sync.fleet import Seat, first_line, together
from sync.messages import BaseMissing, Largest, LayoutMoved, Manifest, PortClosed, Staged
from sync.opening import GRACE_S
from sync.plan import Plan
from sync.transport import TRANSPORTS, SyncError, TransportError, TransportName

__all__ = ["Attempt", "NotStaged", "Times"]

_BEGIN_ANEW = (LayoutMoved, BaseMissing, PortClosed)
"""What a rank refuses because the session's picture of it is old: nobody is at fault, the session looks again."""


class NotStaged(SyncError):
    """An attempt that ended before its decision."""

    def __init__(self, text: str, lost: dict[int, str], again: bool, *, late: bool = False) -> None:
        super().__init__(text)
        self.lost = lost
        """Rollout ranks whose fault it is -> reason."""
        self.again = again
        """Whether another attempt, planned anew and with whole buckets, may do better."""
        self.late = late
        """Whether all have waited for the lost until a deadline."""

    def as_final(self) -> SyncError:
        """What the caller of `publish` gets, with what the aborting found out."""
        final = SyncError(str(self))
        for note in getattr(self, "__notes__", ()):
            final.add_note(note)
        return final


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What a good attempt took."""

    pack_seconds: float
    stage_seconds: float
    wire_bytes: int
    """Bytes that were handed over, each once however many ranks read them."""


class Attempt:
    """From the call of both sides to the decision of the machine.

    Args:
        members: the parts of all rollout ranks that take part.
        kept: what the fleet is left with if this fails, in a sentence.
        differ: pack on the host first, and find what differs from `base`.
        base: the version in service on all members; None where there is none, or whole buckets are wanted.
        rate: bytes per second of the last whole transfer, for what differences are worth.
    """

    def __init__(
        self,
        version: int,
        plan: Plan,
        transport: TransportName,
        senders: Sequence[Seat],
        members: Sequence[Seat],
        *,
        deadline_s: float,
        kept: str,
        differ: bool = False,
        base: int | None = None,
        rate: float = 0.0,
    ) -> None:
        self.machine = CommitMachine(
            version,
            {seat.number: frozenset(b.index for b in plan.received_by(seat.number)) for seat in members},
            {bucket.index: bucket for bucket in plan.buckets},
            {seat.number: str(seat) for seat in members},
        )
        self._version = version
        self._plan = plan
        self._transport = transport
        self._senders = senders
        self._members = members
        self._timeout = deadline_s + GRACE_S
        self._kept = kept
        self._differ = differ
        self._base = base
        self._rate = rate
        self.ports_troubled = False
        """A trainer rank has failed behind the decision, which stands: what its port is good for is not known."""
        self._sizes: dict[int, int] = {}
        self._common: dict[str, Largest] = {}
        self._sent: list[float] = []
        self._staged: list[float] = []

    async def run(self) -> Times:
        """Until the machine has decided to apply. Raises NotStaged; aborting is the caller's."""
        if self._plan.has_shared_scales:
            self._common = await self._agree()
        if self._differ:
            self._sizes = await self._differences()
        sending = (self._guarded(seat, self._send) for seat in self._senders)
        staging = (self._guarded(seat, self._stage) for seat in self._members)
        await together((*sending, *staging))
        if self.machine.phase != "committing":
            raise self._not_staged(self.machine.waiting_for())
        sizes = (self._sizes.get(index) or size for index, size in self._plan.payloads.items())
        return Times(pack_seconds=max(self._sent), stage_seconds=max(self._staged), wire_bytes=sum(sizes))

    async def _guarded(self, seat: Seat, step: Callable[[Seat], Awaitable[None]]) -> None:
        """A step of the attempt, whose errors end it as AT-2 says."""
        try:
            await step(seat)
        except NotStaged:
            raise
        except (TuttiError, SyncError) as error:
            reason = first_line(error) + self._late_by_name(error)
            lost = dict.fromkeys(self._at_fault(seat, error), reason)
            fact = Failed(self._version, seat.side, seat.number, reason)
            try:
                self._take_in([fact], lost, again=isinstance(error, _BEGIN_ANEW), cause=error)
            except NotStaged as ended:
                ended.late = isinstance(error, DeadlineExceeded | TransportError)
                raise
            self.ports_troubled = True

    async def _send(self, seat: Seat) -> None:
        sizes = {b.index: self._sizes[b.index] for b in self._plan.sent_by(seat.number) if b.index in self._sizes}
        manifest: Manifest = await seat.call(
            "sync_send", self._version, self._shared_by(seat), sizes, timeout=self._timeout
        )
        self._sent.append(manifest.seconds)
        self._take_in([Packed(self._version, shard, digests) for shard, digests in manifest.digests.items()])
        if TRANSPORTS[self._transport].drains:
            await seat.call("sync_drain", self._version, timeout=self._timeout)

    async def _stage(self, seat: Seat) -> None:
        sizes = {b.index: self._sizes[b.index] for b in self._plan.received_by(seat.number) if b.index in self._sizes}
        answer: Staged = await seat.call(
            "sync_stage", self._version, self._plan.key, sizes, self._base, timeout=self._timeout
        )
        self._staged.append(answer.seconds)
        facts = [ShardStaged(self._version, seat.number, shard, digests) for shard, digests in answer.digests.items()]
        self._take_in(facts)

    def _take_in(
        self,
        facts: Iterable[Fact],
        lost: dict[int, str] | None = None,
        *,
        again: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        for fact in facts:
            for action in self.machine.on(fact):
                if isinstance(action, Abort | Fence):
                    # Digests that differ may come from a base that an engine has changed (BA-2).
                    again = again or (bool(self._sizes) and cause is None)
                    raise self._not_staged(action.reason, lost, again=again) from cause

    async def _agree(self) -> dict[str, Largest]:
        """Largest values of the blocks that several trainer ranks hold parts of."""
        found: list[Largest] = []

        async def measure(seat: Seat) -> None:
            found.extend(await seat.call("sync_measure", self._version, timeout=self._timeout))

        await together(self._guarded(seat, measure) for seat in self._senders)
        return agreed(found)

    def _shared_by(self, seat: Seat) -> list[Largest]:
        names = {s.name: None for b in self._plan.sent_by(seat.number) for s in b.segments if s.shared}
        return [self._common[name] for name in names if name in self._common]

    async def _differences(self) -> dict[int, int]:
        """Buckets to send as differences, with their bytes (AT-3)."""
        sizes: dict[int, int] = {}

        async def differ(seat: Seat) -> None:
            common = self._shared_by(seat)
            sizes.update(await seat.call("sync_differ", self._version, self._base, common, timeout=self._timeout))

        await together(self._guarded(seat, differ) for seat in self._senders)
        return {
            bucket.index: sizes[bucket.index]
            for bucket in self._plan.buckets
            if bucket.index in sizes and worth(sizes[bucket.index], bucket.num_bytes, self._rate)
        }

    def _not_staged(self, reason: str, lost: dict[int, str] | None = None, *, again: bool = False) -> NotStaged:
        text = f"version {self._version} was not published: {reason}. {self._kept}"
        return NotStaged(text, lost or {}, again)

    def _late_by_name(self, error: Exception) -> str:
        """Transports say numbers of the plan, which are others than those of ranks where these have several parts."""
        late = error.late if isinstance(error, TransportError) else ()
        return "".join(
            f" ({member.number} is {member})"
            for member in self._members
            if member.number in late and str(member) != f"rollout rank {member.number}"
        )

    def _at_fault(self, seat: Seat, error: Exception) -> set[int]:
        """Rollout ranks that an attempt can do without, if the fleet may be smaller (AT-2)."""
        if isinstance(error, TransportError):
            return {member.rank.index for member in self._members if member.number in error.late}
        return {seat.rank.index} if seat.side == "rollout" and not isinstance(error, _BEGIN_ANEW) else set()
