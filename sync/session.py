"""What a training loop holds of weight transfer: `publish(version)`, and the whole fleet has it or nobody does.

    senders               sync_send (main thread: cast, pack, hash, hand over)
    session   open: layouts -> plan -> transport     both at once, then digests -> Apply / Abort
    receivers             sync_stage (worker thread: fetch, hash)                 sync_commit (swap)

SE-1: a version is in service on every rollout rank when `publish` returns, and on none when it raises, except when a
      rank fails inside its own swap: then the error says so and names it, and it is told not to serve (CM-2). With a
      `quorum`, "every" is every replica that took part; the others are named in the Commit.
      Where versions are written over those in service (`shadow`), a publish that raises leaves ranks that don't serve
      (RO-2), and the next one may carry any version.
SE-2: versions rise by one. The first publish of a session may carry any version: after a resume it re-broadcasts.
      Publishing the version in service again moves nothing and returns its Commit; one that was decided and did not
      come into service everywhere is moved once more.
SE-3: no rank sends or stages with another layout than the plan was made for; when one has changed, the plan is made
      anew and the ports are opened again (W1). After an abort they are opened again too, and when a process was
      started anew between two versions and has lost its port.
SE-4: a publish that is cancelled before the decision aborts; one that is cancelled after it first brings it to its end.
      Neither is cut short by another cancellation.
SE-5: every phase (open, transfer, apply) ends within `deadline_s` plus GRACE_S, with an error that names the rank.
SE-6: a replica that was left out is given the next version as soon as it answers; one that lags further than
      `max_behind`, or that has taken no version yet, is told not to serve. Who could not be told is told before the
      next version, first of all.
SE-7: where the weights of a rollout rank lie in several processes (workers of one engine), each of them is sent what it
      wants, and stages and proves it by itself; they apply it in one call of their rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from runtime import ActorMesh, DeadlineExceeded, ProcessDied, Stopped, TuttiError
from sync.attempt import Attempt, NotStaged, Times
from sync.commit import Applied, CommitMachine, Fact, Failed, Fence
from sync.config import Commit, SyncConfig
from sync.fleet import Fleet, Rank, Seat, first_line, seated, together
from sync.layout import Layout
from sync.messages import Applied as SinkApplied
from sync.messages import Side
from sync.opening import GRACE_S, NotOpened, candidates, join
from sync.plan import Plan, make_plan
from sync.room import host_piece_bytes, in_place, piece_bytes
from sync.transport import TRANSPORTS, SyncError, TransportName

__all__ = ["GRACE_S", "Commit", "SyncConfig", "WeightSession"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_NOTHING = (
    "It was written over the weights in service: rollout ranks may hold parts of two versions, and don't serve until a "
    "version has been published"
)

_ASK_AGAIN_S = 1.0
"""How long a rank that was left out gets to answer before a version goes on without it."""

_DEVICE_BUCKET = 128 << 20


class WeightSession:
    """The transfer of weights between two meshes of actors.

    Args:
        senders: trainer ranks, actors with `SenderPort`.
        receivers: rollout ranks, actors with `ReceiverPort`; the ranks of one engine are neighbours.
        ranks_per_replica: rollout actors of one engine. Processes behind one actor are found by themselves (SE-7).
    """

    def __init__(
        self,
        senders: ActorMesh,
        receivers: ActorMesh,
        config: SyncConfig | None = None,
        *,
        ranks_per_replica: int = 1,
    ) -> None:
        self.config = config or SyncConfig()
        self.version: int | None = None
        """The version in service; None before the first publish of this session."""
        self._mesh = senders
        self._senders = Rank.all_of(senders, "trainer")
        self._fleet = Fleet(Rank.all_of(receivers, "rollout"), ranks_per_replica, self.config.quorum)
        self._layouts: dict[str, Layout] = {}
        self._plan: Plan | None = None
        self._open = False
        self._busy = False
        self._transport: TransportName = "gloo"
        self._reason = ""
        self._in_place = ""
        """Why versions are written over those in service; empty where they are not (RO-2)."""
        self._last: Commit | None = None
        self._rate = 0.0
        """Bytes per second of the last transfer of whole buckets."""

    def over(self, receivers: ActorMesh) -> WeightSession:
        """A session with the same settings to other rollout ranks, all of which must take a version. It closes the
        ports of trainer ranks, as this one does those of others: close this one before."""
        return WeightSession(self._mesh, receivers, msgspec.structs.replace(self.config, quorum=0))

    async def __aenter__(self) -> WeightSession:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def plan(self) -> Plan:
        """The plan in force. Raises SyncError before `open`."""
        if self._plan is None:
            raise SyncError("the weight session has no plan yet; await open() first")
        return self._plan

    @property
    def left_out(self) -> dict[int, str]:
        """Rollout ranks that don't take part -> why."""
        return dict(self._fleet.left_out)

    def explain(self) -> str:
        """The plan and the way it travels, for people."""
        where = f"\n  over the weights in service: {self._in_place}" if self._in_place else ""
        return f"{self.plan.explain()}\n  by {self._transport}: {self._reason}{where}"

    async def open(self) -> None:
        """Ask for layouts, make the plan, choose the transport and prove that it works; nothing if that is done.

        Raises:
            LayoutError: the two sides don't fit; all tensors at fault are named (W2).
            SyncError: no transport reaches all ranks.
        """
        if self._open:
            return
        described = dict(await together(self._described(rank) for rank in self._everybody))
        seated(self._fleet.ranks)
        seats = [seat for rank in self._everybody for seat in rank.seats]
        sides = [side for rank in self._everybody for side in described[rank]]
        receivers = sides[len(self._senders) :]
        layouts = [self._layouts[side.digest] for side in receivers]
        names = [str(seat) for seat in seats[len(self._senders) :]]
        self._in_place = in_place(self.config, names, receivers, layouts)
        refusals: list[str] = []
        for name, reason in candidates(self.config, sides):
            self._plan = plan = self._planned(name, sides)
            refused = await self._joined(name, plan, seats, sides)
            if not refused:
                self._open, self._transport, self._reason = True, name, "; ".join([reason, *refusals])
                log.info("weights travel by %s: %s", name, self._reason)
                if self._in_place:
                    log.info("they are written over those in service: %s", self._in_place)
                return
            refusals.append(f"{name} is not possible: {refused}")
        raise SyncError(f"no transport reaches all ranks: {'; '.join(refusals)}")

    async def publish(self, version: int) -> Commit:
        """Bring the trainer's weights, as they are now, into service on every rollout rank.

        Raises:
            SyncError: the version doesn't follow the one in service, or it could not be brought to all ranks: then all
                keep what they had (SE-1). The error that caused it is its `__cause__`.
            LayoutError: a layout has changed and the sides no longer fit.
        """
        if self._last is not None and version == self.version == self._last.version:
            return self._last
        if self.version is not None and version not in (self.version, self.version + 1):
            raise SyncError(
                f"publish({version}): version {self.version} is in service, so the next is {self.version + 1}"
            )
        if self._busy:
            raise SyncError(f"publish({version}): another publish is under way; await it first")
        self._busy = True
        try:
            return await self._publish(version)
        finally:
            self._busy = False

    async def close(self) -> None:
        """Close the ports of all ranks that are still there. What is in service stays."""
        self._open = False

        async def close_one(rank: Rank) -> None:
            left_out = rank.side == "rollout" and rank.index in self._fleet.left_out
            timeout = _ASK_AGAIN_S if left_out else self.config.deadline_s + GRACE_S
            try:
                await rank.call("sync_close", timeout=timeout)
            except (ProcessDied, Stopped):
                return  # a process that is gone has nothing to close (TR-5)
            except (TuttiError, SyncError) as error:
                if not left_out:
                    raise
                log.warning("%s, which was left out, could not be told to close: %s", rank, first_line(error))

        await together(close_one(rank) for rank in (*self._senders, *self._fleet.ranks))

    @property
    def _everybody(self) -> list[Rank]:
        return [*self._senders, *self._fleet.members]

    @property
    def _sinks(self) -> list[Seat]:
        """The parts of the rollout ranks that take part."""
        return [seat for rank in self._fleet.members for seat in rank.seats]

    # --- opening ------------------------------------------------------------------------------------------------------

    async def _described(self, rank: Rank, timeout: float = 0.0) -> tuple[Rank, list[Side]]:
        """What a rank says of each of its parts. The first one knows how many there are."""
        sides = [await self._describe(rank.seats[0], timeout)]
        rank.have_parts(sides[0].parts)
        sides += await together(self._describe(seat, timeout) for seat in rank.seats[1:])
        for seat, side in zip(rank.seats, sides, strict=True):
            if side.incarnation != seat.incarnation:
                seat.incarnation = side.incarnation
                rank.version, rank.untold = None, None
                rank.was_on_time()
        return rank, sides

    async def _describe(self, seat: Seat, timeout: float) -> Side:
        side: Side = await seat.call("sync_layout", seat.known, timeout=timeout or self.config.deadline_s)
        if side.layout is not None:
            self._layouts[side.digest] = side.layout
        seat.known = side.digest
        return side

    def _planned(self, name: TransportName, sides: Sequence[Side]) -> Plan:
        senders = [self._layouts[side.digest] for side in sides[: len(self._senders)]]
        # A rank that was left out keeps its numbers and wants nothing.
        wanted = [Layout(()) for rank in self._fleet.ranks for _ in rank.seats]
        for seat, side in zip(self._sinks, sides[len(self._senders) :], strict=True):
            wanted[seat.number] = self._layouts[side.digest]
        reach = TRANSPORTS[name]
        bucket_bytes = self.config.bucket_bytes or (
            host_piece_bytes(wanted) if reach.device == "cpu" else _DEVICE_BUCKET
        )
        if self._in_place:
            bucket_bytes = piece_bytes(bucket_bytes, self.config.slots, wanted)
        plan = make_plan(senders, wanted, bucket_bytes=bucket_bytes, spread=reach.spread)
        if not plan.buckets:
            raise SyncError("the rollout needs nothing from the trainer: every tensor of it is declared constant")
        return plan

    async def _joined(self, name: TransportName, plan: Plan, seats: Sequence[Seat], sides: Sequence[Side]) -> str:
        try:
            refused = await join(name, plan, seats, sides, self.config, in_place=bool(self._in_place))
        except BaseException as error:
            try:
                await self.close()
            except TuttiError as also:
                error.add_note(f"not all ports could be closed again: {first_line(also)}")
            raise
        if refused:
            await self.close()
        return refused

    # --- one version --------------------------------------------------------------------------------------------------

    async def _publish(self, version: int) -> Commit:
        began = time.perf_counter()
        await self._take_back()
        machine, times = await self._staged(version)
        pause_seconds = await _to_its_end(self._apply(machine))
        await self._fence_stragglers(version)
        self._last = Commit(
            version=version,
            bytes=self.plan.payload_bytes,
            wire_bytes=times.wire_bytes,
            seconds=time.perf_counter() - began,
            pack_seconds=times.pack_seconds,
            stage_seconds=times.stage_seconds,
            pause_seconds=pause_seconds,
            transport=self._transport,
            left_out=tuple(sorted(self._fleet.left_out)),
        )
        return self._last

    async def _staged(self, version: int) -> tuple[CommitMachine, Times]:
        """Attempts, until one is decided: planned anew once, with whole buckets after differences, without the lost."""
        again = True
        whole = False
        while True:
            try:
                return await self._attempt(version, whole=whole)
            except NotStaged as error:
                if error.again and again:
                    again, whole = False, True
                elif not error.lost or not self._fleet.leave_out(error.lost):
                    raise error.as_final() from error.__cause__
                else:
                    log.warning("version %d goes on without rollout ranks %s", version, sorted(error.lost))
                    for index in error.lost if error.late else ():
                        self._fleet.ranks[index].was_late()

    async def _attempt(self, version: int, *, whole: bool) -> tuple[CommitMachine, Times]:
        """Open if need be, then pack, move and verify. Raises NotStaged, with everything aborted."""
        kept = "what they had" if self.version is None else f"version {self.version}"
        try:
            await self.open()
        except (ProcessDied, Stopped, DeadlineExceeded, SyncError) as error:
            late = error.lost if isinstance(error, NotOpened) else {}
            lost = late or await self._who_is_gone()
            if not lost and not isinstance(error, ProcessDied | Stopped):
                raise
            text = f"version {version} was not published: {first_line(error)}. All rollout ranks keep {kept}"
            raise NotStaged(text, lost, False, late=bool(late)) from error
        members = self._fleet.members
        one_base = not whole and all(rank.version == self.version for rank in members)
        attempt = Attempt(
            version,
            self.plan,
            self._transport,
            [seat for rank in self._senders for seat in rank.seats],
            self._sinks,
            deadline_s=self.config.deadline_s,
            kept=_NOTHING if self._in_place else f"All rollout ranks keep {kept}",
            differ=self.config.differences and TRANSPORTS[self._transport].device == "cpu",
            base=self.version if one_base else None,
            rate=self._rate,
        )
        try:
            times = await attempt.run()
        except BaseException as error:
            self._open = False
            if self._in_place:
                self.version = self._last = None  # whatever is published next must come whole
                for rank in members:
                    rank.version = None
            for note in await _to_its_end(self._abort(version)):
                error.add_note(note)
            raise
        self._open = not attempt.ports_troubled
        if times.wire_bytes >= self.plan.payload_bytes:
            self._rate = times.wire_bytes / max(times.stage_seconds, 1e-9)
        return attempt.machine, times

    async def _apply(self, machine: CommitMachine) -> float:
        """Carry out the decision on every rollout rank; returns the longest pause in seconds."""
        version = machine.version
        fenced: dict[Rank, str] = {}
        pauses: list[float] = []
        causes: list[Exception] = []

        async def apply(rank: Rank) -> None:
            facts: list[Fact]
            try:
                answer: SinkApplied = await rank.call("sync_commit", version, timeout=self.config.deadline_s)
                pauses.append(answer.pause_seconds)
                rank.version, rank.untold = version, None
                rank.was_on_time()
                facts = [Applied(version, seat.number) for seat in rank.seats]
            except (TuttiError, SyncError) as error:
                causes.append(error)
                facts = [Failed(version, "rollout", seat.number, first_line(error)) for seat in rank.seats]
            for action in (action for fact in facts for action in machine.on(fact)):
                if isinstance(action, Fence):
                    fenced[rank] = action.reason

        await together(apply(rank) for rank in self._fleet.members)
        self.version = version
        if fenced:
            self._open = False
            serving = sorted({seat.rank.index for seat in self._sinks if seat.number in machine.serving})
            torn = {rank: (version, reason, rank.seats[0].incarnation) for rank, reason in fenced.items()}
            await together(self._fence(rank, *told) for rank, told in torn.items())
            if not self._fleet.leave_out({rank.index: reason for rank, reason in fenced.items()}):
                who = "; ".join(f"{rank}: {reason}" for rank, reason in fenced.items())
                raise SyncError(
                    f"version {version} was decided and is in service on rollout ranks {serving}, but not on: {who}. A "
                    f"rank that failed in its swap may hold parts of two versions: restart it before it serves"
                ) from causes[0]
        return max(pauses)

    # --- ranks that come and go ---------------------------------------------------------------------------------------

    async def _take_back(self) -> None:
        """Ranks that were left out and answer again take part in this version (SE-6)."""
        out = [rank for rank in self._fleet.ranks if rank.index in self._fleet.left_out or rank.untold]
        answers = await together(self._answers(rank) for rank in out)
        back = [rank.index for rank, there in zip(out, answers, strict=True) if rank.has_rested() and there]
        if back:
            self._fleet.take_back(back)
            self._open = False

    async def _who_is_gone(self) -> dict[int, str]:
        members = self._fleet.members
        answers = await together(self._answers(rank) for rank in members)
        return {rank.index: "it does not answer" for rank, there in zip(members, answers, strict=True) if not there}

    async def _answers(self, rank: Rank) -> bool:
        if rank.untold:
            await self._fence(rank, *rank.untold)
        if rank.untold:
            return False
        try:
            await self._described(rank, _ASK_AGAIN_S)
        except (TuttiError, SyncError) as error:
            log.debug("%s is still left out: %s", rank, first_line(error))
            return False
        return True

    async def _fence_stragglers(self, version: int) -> None:
        late = [self._fleet.ranks[index] for index in self._fleet.left_out]
        least = version - self.config.max_behind
        # Told each time: weights that came another way, as by a session of its own, have let it serve again.
        far = [rank for rank in late if not rank.untold and (rank.version is None or rank.version < least)]

        def reason(rank: Rank) -> str:
            if rank.version is None:
                return "it has taken no version yet"
            return f"it still serves version {rank.version}, more than max_behind ago"

        await together(self._fence(rank, version, reason(rank)) for rank in far)

    async def _fence(self, rank: Rank, version: int, reason: str, torn: str = "") -> None:
        rank.version, rank.untold = None, (version, reason, torn)
        try:
            await rank.call("sync_fence", version, reason, torn, timeout=_ASK_AGAIN_S)
        except (TuttiError, SyncError) as error:
            log.warning("%s could not be told to stop serving: %s", rank, first_line(error))
        else:
            rank.untold = None

    async def _abort(self, version: int) -> list[str]:
        """Tell everybody to forget the version; returns what went wrong with that, one line a rank."""

        async def abort_one(rank: Rank) -> str:
            try:
                await rank.call("sync_abort", version, timeout=self.config.deadline_s + GRACE_S)
            except (TuttiError, SyncError) as error:
                return f"{rank} could not be told to forget version {version}: {first_line(error)}"
            return ""

        return [note for note in await together(abort_one(rank) for rank in self._everybody) if note]


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await it, however often the caller is cancelled meanwhile: that is raised afterwards (SE-4). Its calls have
    deadlines."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        await task
        raise
