"""What a training loop holds of weight transfer: `publish(version)`, and the whole fleet has it or nobody does.

    senders               sync_send (main thread: cast, pack, hash) -> manifest     sync_push (worker thread)
    session   layouts ->                                            -> Apply / Abort
    receivers                                     sync_stage (worker thread: fetch, verify)   sync_commit (swap)

SE-1: a version is in service on every rollout rank when `publish` returns, and on none when it raises, except when a
      rank fails inside its own swap: then the error says so and names it (commit.py, CM-2).
SE-2: versions rise by one. The first publish of a session may carry any version: after a resume it re-broadcasts.
      Publishing the version in service again moves nothing and returns its Commit.
SE-3: layouts are asked for before every version; when one has changed, the plan is made anew and the ports are opened
      again (W1). After an abort they are opened again too.
SE-4: a publish that is cancelled before the decision aborts; one that is cancelled after it first brings it to its end.
SE-5: every phase (open, pack, transfer, apply) ends within `deadline_s` plus GRACE_S, with an error that names the
      rank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from runtime import ActorMesh, ProcessDied, Stopped, TaskGroup, TuttiError
from sync.commit import Abort, Applied, CommitMachine, Fact, Failed, Fence, Packed
from sync.commit import Staged as ShardStaged
from sync.digest import combine
from sync.layout import Layout
from sync.plan import ALIGN, Plan, make_plan, plan_key_of
from sync.ports import Applied as SinkApplied
from sync.ports import Manifest, Opened, OpenSpec, Side, Staged
from sync.transport import Link, SyncError, TransportError, TransportName, tensors_of

__all__ = ["GRACE_S", "Commit", "SyncConfig", "WeightSession"]

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than a transport's own deadline the session waits, so that the error which names the tensor wins."""


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from trainer ranks to rollout ranks."""

    transport: Literal["auto", "shm", "gloo"] = "auto"
    """`shm`: shared memory of one host. `gloo`: sockets, also between hosts. `auto`: shm where a trial through it
    succeeds on all ranks, else gloo; the choice and its reason are logged."""
    bucket_bytes: int = 16 << 20
    """Upper limit of one transferred piece, in bytes; a multiple of 64. Larger tensors are split."""
    deadline_s: float = 60.0
    """Upper limit of each phase of a transfer, in seconds: open, pack, transfer, apply."""
    interface: str = "lo"
    """Network interface for gloo. `lo` serves ranks of one host; between hosts name the one that joins them
    (`eth0`)."""

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGN:
            raise ValueError(f"[sync] bucket_bytes = {self.bucket_bytes}: expected a positive multiple of {ALIGN}")
        if not self.deadline_s > 0:
            raise ValueError(f"[sync] deadline_s = {self.deadline_s}: expected a positive number of seconds")


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the whole fleet serves, and what it took."""

    version: int
    bytes: int
    """Bytes of weights packed, in the dtypes of the rollout; each counted once however many ranks read it."""
    seconds: float
    """From the call of `publish` to the last rank that put it into service."""
    pack_seconds: float
    """Trainer: the slowest rank to cast, pack and hash. After it the trainer may go on."""
    stage_seconds: float
    """Rollout: the slowest rank to fetch and verify, while it decodes."""
    pause_seconds: float
    """Rollout: the slowest rank to put it into service: the wait for a step boundary and the swap."""
    transport: TransportName


class WeightSession:
    """The transfer of weights between two meshes of actors.

    Args:
        senders: trainer ranks, actors with `SenderPort`.
        receivers: rollout ranks, actors with `ReceiverPort`.
    """

    def __init__(self, senders: ActorMesh, receivers: ActorMesh, config: SyncConfig | None = None) -> None:
        self.config = config or SyncConfig()
        self.version: int | None = None
        """The version in service; None before the first publish of this session."""
        self._senders = _ranks(senders, "trainer")
        self._receivers = _ranks(receivers, "rollout")
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

    def explain(self) -> str:
        """The plan and the way it travels, for people."""
        return f"{self.plan.explain()}\n  by {self._transport}: {self._reason}"

    async def open(self) -> None:
        """Ask for layouts, make the plan, choose the transport and prove that it works. Repeating it is cheap.

        Raises:
            LayoutError: the two sides don't fit; all tensors at fault are named (W2).
            SyncError: no transport reaches all ranks.
        """
        sides = await self._describe()
        senders, receivers = sides[: len(self._senders)], sides[len(self._senders) :]
        key = plan_key_of(
            [s.digest for s in senders], [s.digest for s in receivers], bucket_bytes=self.config.bucket_bytes
        )
        if self._open and self.plan.key == key:
            return
        self._open = False
        self._plan = plan = make_plan(
            [self._layouts[s.digest] for s in senders],
            [self._layouts[s.digest] for s in receivers],
            bucket_bytes=self.config.bucket_bytes,
        )
        if not plan.buckets:
            raise SyncError("the rollout needs nothing from the trainer: every tensor of it is declared constant")
        refusals: list[str] = []
        for name, reason in self._candidates(sides):
            refused = await self._join(name, plan, sides)
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

        async def close_one(rank: _Rank) -> None:
            try:
                await rank.call("sync_close", timeout=self.config.deadline_s + GRACE_S)
            except (ProcessDied, Stopped):
                return  # a process that is gone has nothing to close (TR-5)

        await _together(close_one(rank) for rank in self._everybody)

    @property
    def _everybody(self) -> list[_Rank]:
        return [*self._senders, *self._receivers]

    async def _describe(self) -> list[Side]:
        async def ask(rank: _Rank) -> Side:
            side: Side = await rank.call("sync_layout", rank.known, timeout=self.config.deadline_s)
            if side.layout is not None:
                self._layouts[side.digest] = side.layout
            rank.known = side.digest
            return side

        return await _together(ask(rank) for rank in self._everybody)

    def _candidates(self, sides: Sequence[Side]) -> list[tuple[TransportName, str]]:
        num_hosts = len({side.host for side in sides})
        if num_hosts > 1 and self.config.interface == "lo" and self.config.transport != "shm":
            raise SyncError(
                f"ranks run on {num_hosts} hosts and gloo would use the loopback interface only; set [sync] interface "
                f"to the one that joins the hosts, such as 'eth0'"
            )
        if self.config.transport != "auto":
            return [(self.config.transport, "asked for")]
        if num_hosts == 1:
            return [("shm", "all ranks share a host, proved by a trial"), ("gloo", "all ranks share a host")]
        return [("gloo", f"ranks run on {num_hosts} hosts")]

    async def _join(self, name: TransportName, plan: Plan, sides: Sequence[Side]) -> str:
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
                    arena_bytes=plan.arena_bytes,
                    deadline_s=self.config.deadline_s,
                    interface=self.config.interface,
                ),
            )
            for rank, side in zip(self._everybody, sides, strict=True)
        ]
        refused = "the opening did not come to its end"
        try:
            try:
                address: str = await self._senders[0].call("sync_host", specs[0], timeout=timeout)
            except TransportError as error:
                refused = _line(error)
                return refused
            opened: list[Opened] = await _together(
                rank.call("sync_open", msgspec.structs.replace(spec, address=address), timeout=timeout)
                for rank, spec in zip(self._everybody, specs, strict=True)
            )
            refused = next((f"{r}: {o.refused}" for r, o in zip(self._everybody, opened, strict=True) if o.refused), "")
            if not refused and len({o.proof for o in opened}) > 1:
                refused = "the ranks don't see the same memory"
            return refused
        finally:
            if refused:
                await self.close()

    async def _publish(self, version: int) -> Commit:
        began = time.perf_counter()
        await self.open()
        plan = self.plan
        machine = CommitMachine(
            version,
            [frozenset(b.index for b in plan.received_by(rank.index)) for rank in self._receivers],
            {bucket.index: f"bucket {bucket.index} ({tensors_of(bucket)})" for bucket in plan.buckets},
        )
        try:
            pack_seconds, stage_seconds = await self._stage(machine, plan)
        except BaseException as error:
            self._open = False
            for note in await self._abort(version):
                error.add_note(note)
            raise
        applying = asyncio.ensure_future(self._apply(machine))
        try:
            pause_seconds = await asyncio.shield(applying)
        except asyncio.CancelledError:
            await applying  # SE-4
            raise
        self._last = Commit(
            version=version,
            bytes=plan.payload_bytes,
            seconds=time.perf_counter() - began,
            pack_seconds=pack_seconds,
            stage_seconds=stage_seconds,
            pause_seconds=pause_seconds,
            transport=self._transport,
        )
        return self._last

    async def _stage(self, machine: CommitMachine, plan: Plan) -> tuple[float, float]:
        """Pack, transfer and verify until the machine decides; returns seconds of the slowest trainer and rollout
        rank."""
        version, deadline = machine.version, self.config.deadline_s
        manifests: list[Manifest] = []
        staged: list[Staged] = []

        async def pack(rank: _Rank) -> Iterable[Fact]:
            manifest: Manifest = await rank.call("sync_send", version, timeout=deadline)
            manifests.append(manifest)
            return [Packed(version, shard, combine(digests)) for shard, digests in manifest.digests.items()]

        async def push(rank: _Rank) -> Iterable[Fact]:
            await rank.call("sync_push", version, timeout=deadline + GRACE_S)
            return []

        async def stage(rank: _Rank) -> Iterable[Fact]:
            wanted = [b.index for b in plan.received_by(rank.index)]
            manifest = Manifest(plan_key=plan.key, version=version, digests={i: digests[i] for i in wanted})
            answer: Staged = await rank.call("sync_stage", version, manifest, timeout=deadline + GRACE_S)
            staged.append(answer)
            return [ShardStaged(version, rank.index, shard, digest) for shard, digest in answer.digests.items()]

        async def drive(step: Callable[[_Rank], Awaitable[Iterable[Fact]]], rank: _Rank) -> None:
            cause: Exception | None = None
            try:
                facts = await step(rank)
            except (TuttiError, SyncError) as error:
                facts, cause = [Failed(version, rank.side, rank.index, _line(error))], error
            for fact in facts:
                for action in machine.on(fact):
                    if isinstance(action, Abort):
                        raise self._not_published(version, action.reason) from cause

        await _together(drive(pack, rank) for rank in self._senders)
        digests = {index: found for manifest in manifests for index, found in manifest.digests.items()}
        # Senders are done with the weights here: what follows reads their snapshot.
        await _together(
            [*(drive(push, rank) for rank in self._senders), *(drive(stage, rank) for rank in self._receivers)]
        )
        if machine.phase != "committing":
            raise self._not_published(version, machine.waiting_for())
        return max(m.seconds for m in manifests), max(s.seconds for s in staged)

    async def _apply(self, machine: CommitMachine) -> float:
        """Carry out the decision on every rollout rank; returns the longest pause in seconds."""
        version = machine.version
        fenced: list[Fence] = []
        pauses: list[float] = []
        causes: list[Exception] = []

        async def apply(rank: _Rank) -> None:
            fact: Fact
            try:
                answer: SinkApplied = await rank.call("sync_commit", version, timeout=self.config.deadline_s)
                pauses.append(answer.pause_seconds)
                fact = Applied(version, rank.index)
            except (TuttiError, SyncError) as error:
                causes.append(error)
                fact = Failed(version, "rollout", rank.index, _line(error))
            fenced.extend(action for action in machine.on(fact) if isinstance(action, Fence))

        await _together(apply(rank) for rank in self._receivers)
        self.version = version
        if fenced:
            self._open = False
            who = "; ".join(f"rollout rank {fence.sink}: {fence.reason}" for fence in fenced)
            raise SyncError(
                f"version {version} was decided and is in service on rollout ranks {sorted(machine.serving)}, but not "
                f"on: {who}. A rank that failed in its swap may hold parts of two versions: restart it before it serves"
            ) from causes[0]
        return max(pauses)

    async def _abort(self, version: int) -> list[str]:
        """Tell everybody to forget the version; returns what went wrong with that, one line a rank."""

        async def abort_one(rank: _Rank) -> str:
            try:
                await rank.call("sync_abort", version, timeout=self.config.deadline_s + GRACE_S)
            except (TuttiError, SyncError) as error:
                return f"{rank} could not be told to forget version {version}: {_line(error)}"
            return ""

        return [note for note in await _together(abort_one(rank) for rank in self._everybody) if note]

    def _not_published(self, version: int, reason: str) -> SyncError:
        kept = "what they had" if self.version is None else f"version {self.version}"
        return SyncError(f"version {version} was not published: {reason}. All rollout ranks keep {kept}")


class _Rank:
    """One actor of a mesh, with the name that errors use."""

    def __init__(self, mesh: ActorMesh, side: Literal["trainer", "rollout"], index: int) -> None:
        self.side = side
        self.index = index
        self.known = ""
        """Digest of the layout that the session has from it."""
        self._mesh = mesh

    def __str__(self) -> str:
        return f"{self.side} rank {self.index}"

    async def call(self, endpoint: str, *args: object, timeout: float) -> Any:
        return await getattr(self._mesh, endpoint).options(timeout=timeout).call_one(*args)


def _ranks(mesh: ActorMesh, side: Literal["trainer", "rollout"]) -> list[_Rank]:
    return [_Rank(mesh.slice(**mesh.shape.coordinates(i)), side, i) for i in range(len(mesh))]


async def _together(coros: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once; the first error cancels the others and is raised as itself."""

    async def one(coro: Awaitable[T]) -> T:
        return await coro

    async with TaskGroup("sync") as tasks:
        running = [tasks.start(one(coro), name=f"rank {i}") for i, coro in enumerate(coros)]
    return [task.result() for task in running]


def _line(error: BaseException) -> str:
    """The first line: a remote error's names mesh, rank, endpoint and text; its traceback stays with the cause."""
    return str(error).partition("\n")[0] or type(error).__name__
