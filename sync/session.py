"""What a training loop holds of weight transfer: `publish(version)`, and the whole fleet has it or nobody does.

    senders               sync_send (main thread: cast, pack, hash, hand over)
    session   open: layouts -> plan -> transport     both at once, then digests -> Apply / Abort
    receivers             sync_stage (worker thread: fetch, hash)                 sync_commit (swap)

SE-1: a version is in service on every rollout rank when `publish` returns, and on none when it raises, except when a
      rank fails inside its own swap: then the error says so and names it, and it is told not to serve (CM-2). With a
      `quorum`, "every" is every replica that took part; the others are named in the Commit.
SE-2: versions rise by one. The first publish of a session may carry any version: after a resume it re-broadcasts.
      Publishing the version in service again moves nothing and returns its Commit.
SE-3: no rank sends or stages with another layout than the plan was made for; when one has changed, the plan is made
      anew and the ports are opened again (W1). After an abort they are opened again too.
SE-4: a publish that is cancelled before the decision aborts; one that is cancelled after it first brings it to its end.
SE-5: every phase (open, transfer, apply) ends within `deadline_s` plus GRACE_S, with an error that names the rank.
SE-6: a replica that was left out is given the next version as soon as it answers; one that lags further than
      `max_behind` is told not to serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from runtime import ActorMesh, ProcessDied, Stopped, TuttiError
from sync.agree import agreed
from sync.commit import Abort, Applied, CommitMachine, Fact, Failed, Fence, Packed
from sync.commit import Staged as ShardStaged
from sync.config import Commit, SyncConfig
from sync.fleet import Fleet, Rank, first_line, together
from sync.layout import Layout
from sync.plan import Plan, make_plan
from sync.ports import Applied as SinkApplied
from sync.ports import Largest, LayoutMoved, Manifest, Opened, OpenSpec, Side, Staged
from sync.transport import TRANSPORTS, Link, SyncError, TransportError, TransportName

__all__ = ["GRACE_S", "Commit", "SyncConfig", "WeightSession"]

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than a transport's own deadline the session waits, so that the error which names the tensor wins."""

_ASK_AGAIN_S = 1.0
"""How long a rank that was left out gets to answer before a version goes on without it."""

_HOST_BUCKET, _DEVICE_BUCKET = 4 << 20, 128 << 20


class _NotStaged(SyncError):
    """An attempt that ended before its decision."""

    def __init__(self, text: str, lost: dict[int, str], replan: bool) -> None:
        super().__init__(text)
        self.lost = lost
        """Rollout ranks whose fault it is -> reason."""
        self.replan = replan

    def as_final(self) -> SyncError:
        """What the caller of `publish` gets, with what the aborting found out."""
        final = SyncError(str(self))
        for note in getattr(self, "__notes__", ()):
            final.add_note(note)
        return final


class WeightSession:
    """The transfer of weights between two meshes of actors.

    Args:
        senders: trainer ranks, actors with `SenderPort`.
        receivers: rollout ranks, actors with `ReceiverPort`; the ranks of one engine are neighbours.
        ranks_per_replica: rollout ranks of one engine.
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
        self._senders = Rank.all_of(senders, "trainer")
        self._fleet = Fleet(Rank.all_of(receivers, "rollout"), ranks_per_replica, self.config.quorum)
        self._layouts: dict[str, Layout] = {}
        self._plan: Plan | None = None
        self._open = False
        self._busy = False
        self._transport: TransportName = "gloo"
        self._reason = ""
        self._last: Commit | None = None

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
        return f"{self.plan.explain()}\n  by {self._transport}: {self._reason}"

    async def open(self) -> None:
        """Ask for layouts, make the plan, choose the transport and prove that it works; nothing if that is done.

        Raises:
            LayoutError: the two sides don't fit; all tensors at fault are named (W2).
            SyncError: no transport reaches all ranks.
        """
        if self._open:
            return
        ranks = self._everybody
        sides = await together(self._describe(rank) for rank in ranks)
        refusals: list[str] = []
        for name, reason in self._candidates(sides):
            self._plan = plan = self._planned(name, sides)
            refused = await self._join(name, plan, ranks, sides)
            if not refused:
                self._open, self._transport, self._reason = True, name, "; ".join([reason, *refusals])
                log.info("weights travel by %s: %s", name, self._reason)
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
        if self._last is not None and version == self.version:
            return self._last
        if self.version is not None and version != self.version + 1:
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
            try:
                await rank.call("sync_close", timeout=self.config.deadline_s + GRACE_S)
            except (ProcessDied, Stopped):
                return  # a process that is gone has nothing to close (TR-5)

        await together(close_one(rank) for rank in self._everybody)

    @property
    def _everybody(self) -> list[Rank]:
        return [*self._senders, *self._fleet.members]

    # --- opening ------------------------------------------------------------------------------------------------------

    async def _describe(self, rank: Rank, timeout: float = 0.0) -> Side:
        side: Side = await rank.call("sync_layout", rank.known, timeout=timeout or self.config.deadline_s)
        if side.layout is not None:
            self._layouts[side.digest] = side.layout
        rank.known = side.digest
        if side.incarnation != rank.incarnation:
            rank.incarnation, rank.version = side.incarnation, None
        return side

    def _planned(self, name: TransportName, sides: Sequence[Side]) -> Plan:
        senders = [self._layouts[side.digest] for side in sides[: len(self._senders)]]
        # A rank that was left out keeps its number and wants nothing.
        wanted = [Layout(()) for _ in self._fleet.ranks]
        for rank, side in zip(self._fleet.members, sides[len(self._senders) :], strict=True):
            wanted[rank.index] = self._layouts[side.digest]
        reach = TRANSPORTS[name]
        bucket_bytes = self.config.bucket_bytes or (_HOST_BUCKET if reach.device == "cpu" else _DEVICE_BUCKET)
        plan = make_plan(senders, wanted, bucket_bytes=bucket_bytes, spread=reach.spread)
        if not plan.buckets:
            raise SyncError("the rollout needs nothing from the trainer: every tensor of it is declared constant")
        return plan

    def _candidates(self, sides: Sequence[Side]) -> list[tuple[TransportName, str]]:
        num_hosts = len({side.host for side in sides})
        if self.config.transport != "auto":
            asked = self.config.transport
            self._check_interface(asked, num_hosts)
            return [(asked, "asked for")]
        on_gpu = all(side.device == "cuda" for side in sides)
        where = "all ranks share a host" if num_hosts == 1 else f"ranks run on {num_hosts} hosts"
        lie = "weights lie on GPUs" if on_gpu else "weights lie in host memory"
        found: list[tuple[TransportName, str]] = []
        for name, reach in TRANSPORTS.items():
            if (reach.one_host and num_hosts > 1) or (reach.device == "cuda" and not on_gpu) or name == "nixl":
                continue
            found.append((name, f"{where}, {lie}, proved by a trial"))
        self._check_interface(found[-1][0], num_hosts)
        return found

    def _check_interface(self, name: TransportName, num_hosts: int) -> None:
        if num_hosts > 1 and self.config.interface == "lo" and name in ("gloo", "nixl"):
            raise SyncError(
                f"ranks run on {num_hosts} hosts and {name} would use the loopback interface only; set [sync] "
                f"interface to the one that joins the hosts, such as 'eth0'"
            )

    async def _join(self, name: TransportName, plan: Plan, ranks: Sequence[Rank], sides: Sequence[Side]) -> str:
        """Open all ports; returns why it is not possible, or nothing. Ports are closed again in that case."""
        timeout = self.config.deadline_s + GRACE_S
        specs = [
            OpenSpec(
                transport=name,
                plan_key=plan.key,
                layout_digest=side.digest,
                link=Link(
                    rank=rank.index,
                    num_senders=plan.num_senders,
                    num_sinks=plan.num_sinks,
                    buckets=plan.sent_by(rank.index) if rank.side == "trainer" else plan.received_by(rank.index),
                    slots=min(self.config.slots, len(plan.buckets)),
                    slot_bytes=plan.largest_bucket,
                    deadline_s=self.config.deadline_s,
                    interface=self.config.interface,
                ),
            )
            for rank, side in zip(ranks, sides, strict=True)
        ]
        refused = "the opening did not come to its end"
        try:
            try:
                address: str = await ranks[0].call("sync_host", specs[0], timeout=timeout)
            except TransportError as error:
                refused = first_line(error)
                return refused
            opened: list[Opened] = await together(
                rank.call("sync_open", msgspec.structs.replace(spec, address=address), timeout=timeout)
                for rank, spec in zip(ranks, specs, strict=True)
            )
            refused = next((f"{r}: {o.refused}" for r, o in zip(ranks, opened, strict=True) if o.refused), "")
            if not refused and len({o.proof for o in opened}) > 1:
                refused = "the ranks don't see the same memory"
            return refused
        finally:
            if refused:
                await self.close()

    # --- one version --------------------------------------------------------------------------------------------------

    async def _publish(self, version: int) -> Commit:
        began = time.perf_counter()
        await self._take_back()
        replanned = False
        while True:
            try:
                machine, times = await self._attempt(version)
                break
            except _NotStaged as error:
                if error.replan and not replanned:
                    replanned = True
                elif not error.lost or not self._fleet.leave_out(error.lost):
                    raise error.as_final() from error.__cause__
                else:
                    log.warning("version %d goes on without rollout ranks %s", version, sorted(error.lost))
        applying = asyncio.ensure_future(self._apply(machine))
        try:
            pause_seconds = await asyncio.shield(applying)
        except asyncio.CancelledError:
            await applying  # SE-4
            raise
        await self._fence_stragglers(version)
        pack_seconds, stage_seconds = times
        self._last = Commit(
            version=version,
            bytes=self.plan.payload_bytes,
            seconds=time.perf_counter() - began,
            pack_seconds=pack_seconds,
            stage_seconds=stage_seconds,
            pause_seconds=pause_seconds,
            transport=self._transport,
            left_out=tuple(sorted(self._fleet.left_out)),
        )
        return self._last

    async def _attempt(self, version: int) -> tuple[CommitMachine, tuple[float, float]]:
        """Open if need be, then pack, transfer and verify. Raises _NotStaged, with everything aborted."""
        try:
            await self.open()
        except (ProcessDied, Stopped) as error:
            lost = await self._who_is_gone()
            raise _NotStaged(f"version {version} was not published: {first_line(error)}", lost, False) from error
        machine = CommitMachine(
            version,
            {r.index: frozenset(b.index for b in self.plan.received_by(r.index)) for r in self._fleet.members},
            {bucket.index: bucket for bucket in self.plan.buckets},
        )
        try:
            return machine, await self._stage(machine)
        except BaseException as error:
            self._open = False
            for note in await self._abort(version):
                error.add_note(note)
            raise

    async def _stage(self, machine: CommitMachine) -> tuple[float, float]:
        """Both sides at once, until the machine decides; returns seconds of the slowest trainer and rollout rank."""
        version, timeout = machine.version, self.config.deadline_s + GRACE_S
        common = await self._agree(version) if self.plan.has_shared_scales else {}
        sent: list[float] = []
        staged: list[float] = []

        async def send(rank: Rank) -> None:
            mine = [common[name] for name in self._shared_names(rank) if name in common]
            manifest: Manifest = await rank.call("sync_send", version, mine, timeout=timeout)
            sent.append(manifest.seconds)
            self._decide(machine, [Packed(version, s, d) for s, d in manifest.digests.items()])
            if TRANSPORTS[self._transport].drains:
                await rank.call("sync_drain", version, timeout=timeout)

        async def stage(rank: Rank) -> None:
            answer: Staged = await rank.call("sync_stage", version, self.plan.key, timeout=timeout)
            staged.append(answer.seconds)
            self._decide(machine, [ShardStaged(version, rank.index, s, d) for s, d in answer.digests.items()])

        async def guarded(rank: Rank) -> None:
            try:
                await (send(rank) if rank.side == "trainer" else stage(rank))
            except _NotStaged:
                raise
            except (TuttiError, SyncError) as error:
                lost = dict.fromkeys(self._at_fault(rank, error), first_line(error))
                fact = Failed(version, rank.side, rank.index, first_line(error))
                self._decide(machine, [fact], lost, replan=isinstance(error, LayoutMoved), cause=error)

        await together(guarded(rank) for rank in self._everybody)
        if machine.phase != "committing":
            raise self._not_staged(version, machine.waiting_for())
        return max(sent), max(staged)

    @staticmethod
    def _at_fault(rank: Rank, error: Exception) -> tuple[int, ...]:
        """Rollout ranks that an attempt can do without, if the fleet may be smaller."""
        if isinstance(error, TransportError):
            return error.late
        return (rank.index,) if rank.side == "rollout" and not isinstance(error, LayoutMoved) else ()

    def _decide(
        self,
        machine: CommitMachine,
        facts: Iterable[Fact],
        lost: dict[int, str] | None = None,
        *,
        replan: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        for fact in facts:
            for action in machine.on(fact):
                if isinstance(action, Abort):
                    raise self._not_staged(machine.version, action.reason, lost, replan=replan) from cause

    async def _agree(self, version: int) -> dict[str, Largest]:
        """Largest values of the blocks that several trainer ranks hold parts of."""
        measured: list[list[Largest]] = await together(
            rank.call("sync_measure", version, timeout=self.config.deadline_s) for rank in self._senders
        )
        return agreed(item for items in measured for item in items)

    def _shared_names(self, rank: Rank) -> list[str]:
        return list({s.name: None for b in self.plan.sent_by(rank.index) for s in b.segments if s.shared})

    async def _apply(self, machine: CommitMachine) -> float:
        """Carry out the decision on every rollout rank; returns the longest pause in seconds."""
        version = machine.version
        fenced: list[Fence] = []
        pauses: list[float] = []
        causes: list[Exception] = []

        async def apply(rank: Rank) -> None:
            fact: Fact
            try:
                answer: SinkApplied = await rank.call("sync_commit", version, timeout=self.config.deadline_s)
                pauses.append(answer.pause_seconds)
                rank.version = version
                fact = Applied(version, rank.index)
            except (TuttiError, SyncError) as error:
                causes.append(error)
                fact = Failed(version, "rollout", rank.index, first_line(error))
            fenced.extend(action for action in machine.on(fact) if isinstance(action, Fence))

        await together(apply(rank) for rank in self._fleet.members)
        self.version = version
        if fenced:
            self._open = False
            await together(self._fence(self._fleet.ranks[fence.sink], version, fence.reason) for fence in fenced)
            if not self._fleet.leave_out({fence.sink: fence.reason for fence in fenced}):
                who = "; ".join(f"rollout rank {fence.sink}: {fence.reason}" for fence in fenced)
                raise SyncError(
                    f"version {version} was decided and is in service on rollout ranks {sorted(machine.serving)}, but "
                    f"not on: {who}. A rank that failed in its swap may hold parts of two versions: restart it before "
                    f"it serves"
                ) from causes[0]
        return max(pauses)

    # --- ranks that come and go ---------------------------------------------------------------------------------------

    async def _take_back(self) -> None:
        """Ranks that were left out and answer again take part in this version (SE-6)."""
        if not self._fleet.left_out:
            return
        out = [self._fleet.ranks[index] for index in self._fleet.left_out]
        answers = await together(self._answers(rank) for rank in out)
        back = [rank.index for rank, there in zip(out, answers, strict=True) if there]
        if back:
            self._fleet.take_back(back)
            self._open = False

    async def _who_is_gone(self) -> dict[int, str]:
        members = self._fleet.members
        answers = await together(self._answers(rank) for rank in members)
        return {rank.index: "it does not answer" for rank, there in zip(members, answers, strict=True) if not there}

    async def _answers(self, rank: Rank) -> bool:
        try:
            await self._describe(rank, _ASK_AGAIN_S)
        except (TuttiError, SyncError) as error:
            log.debug("%s is still left out: %s", rank, first_line(error))
            return False
        return True

    async def _fence_stragglers(self, version: int) -> None:
        late = [self._fleet.ranks[index] for index in self._fleet.left_out]
        far = [r for r in late if r.version is not None and version - r.version > self.config.max_behind]
        await together(
            self._fence(rank, version, f"it still serves version {rank.version}, more than max_behind ago")
            for rank in far
        )

    async def _fence(self, rank: Rank, version: int, reason: str) -> None:
        try:
            await rank.call("sync_fence", version, reason, timeout=_ASK_AGAIN_S)
        except (TuttiError, SyncError) as error:
            log.warning("%s could not be told to stop serving: %s", rank, first_line(error))
        rank.version = None

    async def _abort(self, version: int) -> list[str]:
        """Tell everybody to forget the version; returns what went wrong with that, one line a rank."""

        async def abort_one(rank: Rank) -> str:
            try:
                await rank.call("sync_abort", version, timeout=self.config.deadline_s + GRACE_S)
            except (TuttiError, SyncError) as error:
                return f"{rank} could not be told to forget version {version}: {first_line(error)}"
            return ""

        return [note for note in await together(abort_one(rank) for rank in self._everybody) if note]

    def _not_staged(
        self, version: int, reason: str, lost: dict[int, str] | None = None, *, replan: bool = False
    ) -> _NotStaged:
        kept = "what they had" if self.version is None else f"version {self.version}"
        text = f"version {version} was not published: {reason}. All rollout ranks keep {kept}"
        return _NotStaged(text, lost or {}, replan)
