"""Rollout: a prompt and n in, a Group out. The controller's handle over the replicas.

    generate, group --router--> RolloutRank.generate on one replica --> Group
                       ^                       |
                       '--- a replica died: ---'  the request is issued again, with its seeds

    watch   asks each replica for a sign of life; one that is dead, stuck or behind leaves service, is started anew by
            the policy of its processes, is sent the weights, and serves again

RH-1: a call ends with its completions, or raises; a replica that dies is no error as long as another one serves, or
      `watch` can bring one back.
RH-2: completions depend on (seed, position of the prompt, sample, attempt) and the weights, not on the replica, its
      load, or whether it was started anew in between.
RH-3: cancelling a call stops its work on the replica as well (R6).
RH-4: a group that is late is a value, `Dropped("timeout")`, never a call that hangs (A3).
RH-5: a replica that was started anew serves nothing before it has the version that it had before.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from roles.engine import Behind, EngineFailed, TooOld
from roles.pieces import joined_piece
from roles.rollout_call import Limits
from roles.rollout_config import RolloutConfig as RolloutConfig
from roles.rollout_config import VllmConfig as VllmConfig
from roles.rollout_rank import RolloutRank, RolloutStats
from roles.routing import NoReplica, Router, request_tokens
from roles.seeds import completion_seed
from roles.types import Completion, Dropped, Group, Piece, Prompt, Sampling
from runtime import DeadlineExceeded, ProcessDied, Restart, Stopped, TaskGroup, in_torchrun
from sync.transport import SyncError

if TYPE_CHECKING:
    import numpy as np

    from runtime import ActorMesh, Failure, HostMesh, ProcMesh

__all__ = ["Resend", "Rollout", "RolloutConfig", "RolloutRank", "RolloutStats", "VllmConfig"]

T = TypeVar("T")

log = logging.getLogger(__name__)

Resend = Callable[[int], Awaitable[None]]
"""Bring the weights in service to one rank that was started anew."""

START_SECONDS = 600.0
"""How long a replica may take to come back; engines of large models take minutes."""

_GONE = (ProcessDied, Stopped, EngineFailed, Behind)
"""Errors of a replica, not of a request."""


class Rollout:
    """The controller's handle over the replicas.

    Args:
        mesh: actors of class `RolloutRank`, one dimension.
        procs: their processes, for `watch`.
        config: `[rollout]` of the job.
    """

    def __init__(self, mesh: ActorMesh, procs: ProcMesh | None = None, config: RolloutConfig | None = None) -> None:
        self.mesh = mesh
        self.procs = procs
        self.config = config or RolloutConfig(ranks=len(mesh))
        self._ranks = [mesh.slice(rank=rank) for rank in range(len(mesh))]
        self._router = Router(len(self._ranks))
        self._served = [0] * len(self._ranks)  # newest version seen of each
        self._errors: dict[int, Exception] = {}  # of those out of service: why
        self._returns = [0] * len(self._ranks)  # how often each came back into service
        self._noticed = [asyncio.Event() for _ in self._ranks]
        self._changed = asyncio.Event()
        self._watched = False

    @classmethod
    async def start(
        cls,
        host: HostMesh,
        config: RolloutConfig,
        model_path: str,
        *,
        gpus: Sequence[Sequence[int]] = (),
        name: str = "rollout",
    ) -> Rollout:
        """Processes and an engine on each; ready when it returns.

        Args:
            gpus: of each replica, as indices of this host's GPUs. Left out: replicas see all of them.
            name: of the processes. Those of another name than "rollout" are no ranks of torchrun, but beside them.
        """
        environment: dict[str, str] = {}
        if config.engine == "vllm":
            from roles.vllm_compat import environment_of

            environment = environment_of(config)
        ours = bool(environment) or not in_torchrun()
        procs = await host.spawn_procs(
            {"rank": config.ranks},
            name=name,
            threads=config.threads or None,
            env=environment,
            start="fresh" if environment or (name != "rollout" and in_torchrun()) else "auto",
            gpus=gpus or 0,
            owner=_Owner(),
            # Ranks of torchrun are started by nobody but torchrun; engines beside them are ours.
            restart=Restart(max_restarts=config.max_restarts) if config.max_restarts and ours else None,
        )
        return cls(await procs.spawn(name, RolloutRank, config, model_path), procs, config)

    @property
    def version(self) -> int:
        """Newest version that a replica has served; 0 before the first publication."""
        return max(self._served)

    @property
    def restarted(self) -> int:
        """How often a replica came back."""
        return sum(self._returns)

    @property
    def losses(self) -> int:
        """How often a replica went out of service."""
        return self.restarted + len(self._errors)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Most tokens that each replica may still have to compute for calls under way."""
        return self._router.outstanding

    @property
    def serving(self) -> tuple[int, ...]:
        """Ranks in service."""
        return self._router.serving

    async def generate(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        attempt: int = 0,
        session: Hashable | None = None,
    ) -> Group:
        """Complete a prompt n times on one replica; all of them, however long it takes.

        Args:
            prompt: what to complete.
            n: number of completions.
            sampling: how.
            seed: seed of the run.
            attempt: how often this prompt was issued before.
            session: calls of one session go to one replica, where their common prefix is cached.

        Raises:
            ValueError: the engine can never run such a request.
            runtime.ActorError: the replica failed or died, and none is left.
        """
        seeds = tuple(completion_seed(seed, prompt.position, sample, attempt) for sample in range(n))
        completions, rank = await self._call(prompt.token_ids, sampling, seeds, Limits(), session)
        return Group(prompt=prompt, completions=completions, replica=rank)

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        """As `generate`, for training: with the over-sampling and the time limit of the job.

        Returns:
            The first n completions that ended, in the order of their samples; or, when fewer have within the time
            limit, `Dropped("timeout")` with the tokens that were sampled for nothing.
        """
        config = self.config
        seeds = tuple(completion_seed(seed, prompt.position, s, attempt) for s in range(n + config.oversample))
        limits = Limits(enough=n, seconds=config.sample_seconds)
        completions, rank = await self._call(prompt.token_ids, sampling, seeds, limits, None)
        ended = [one for one in completions if one.finish_reason != "abort"][:n]
        if len(ended) < n:
            tokens = sum(len(one.token_ids) for one in completions)
            return Dropped(position=prompt.position, reason="timeout", num_tokens=tokens)
        return Group(prompt=prompt, completions=ended, replica=rank)

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Hashable | None = None
    ) -> Completion:
        """One completion of these tokens: what environments and the HTTP endpoint call. `seed` has 64 bits."""
        completions, _ = await self._call(tuple(token_ids), sampling, (seed,), Limits(), session)
        return completions[0]

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Hashable | None = None
    ) -> AsyncGenerator[Piece, None]:
        """As `complete`, token by token; the last piece has the whole completion. When its replica dies, another one
        goes on from the tokens that were told. Leaving the loop stops the work on the replica (RH-3)."""
        prompt_ids, told = tuple(token_ids), list[Piece]()
        tokens = request_tokens(len(prompt_ids), 1, sampling.max_tokens)
        while True:
            rank = await self._place(tokens, session)
            returns = self._returns[rank]
            had = joined_piece(told) if told else None
            stream = self._ranks[rank].stream.stream_one(prompt_ids, sampling, seed, had, self._served[rank])
            try:
                async with stream:
                    async for piece in stream:
                        if piece.completion is not None:
                            self._has_served(rank, [piece.completion])
                            yield piece
                            return
                        told.append(piece)
                        yield piece
            except _GONE as error:
                self._lost(rank, returns, error)
            finally:
                self._router.release(rank, tokens)

    async def logprobs(self, token_ids: Sequence[int], *, session: Hashable | None = None) -> np.ndarray:
        """Of these tokens but the first, [T - 1] float32, natural log, untempered, under the weights in service.

        Raises:
            ValueError: fewer than two tokens, or more than fit.
        """
        ids = [list(token_ids)]

        async def ask(rank: int) -> np.ndarray:
            values: list[np.ndarray] = await self._ranks[rank].score.call_one(ids, self._served[rank])
            return values[0]

        return (await self._answered(len(ids[0]), session, ask))[0]

    async def score(
        self, sequences: Sequence[Sequence[int]], left_out: Collection[int] = ()
    ) -> dict[int, list[np.ndarray]]:
        """Of each replica but those left out: logprobs of the tokens of each sequence but its first, under the weights
        in service. Raises Behind for one that was started anew and has them not yet (RH-5)."""
        ids = [list(one) for one in sequences]
        asked = [rank for rank in range(len(self._ranks)) if rank not in left_out]
        answers = [self._ranks[rank].score.call_one(ids, self._served[rank]) for rank in asked]
        return dict(zip(asked, await asyncio.gather(*answers), strict=True))

    def published(self, version: int, left_out: Sequence[int] = ()) -> None:
        """These weights are in service, but for ranks that were left out: whoever is started anew needs them (RH-5)."""
        for rank in range(len(self._ranks)):
            if rank not in left_out:
                self._served[rank] = max(self._served[rank], version)

    def forget(self, session: Hashable) -> None:
        """The session has ended."""
        self._router.forget(session)

    async def stats(self) -> list[RolloutStats]:
        """Counters of all ranks, in their order."""
        stats: list[RolloutStats] = (await self.mesh.stats.call()).values()
        return stats

    async def _call(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seeds: tuple[int, ...],
        limits: Limits,
        session: Hashable | None,
    ) -> tuple[list[Completion], int]:
        """The completions and the rank that made them."""

        async def ask(rank: int) -> list[Completion]:
            completions: list[Completion] = await self._ranks[rank].generate.call_one(
                prompt_ids, sampling, seeds, limits, self._served[rank]
            )
            self._has_served(rank, completions)
            return completions

        return await self._answered(request_tokens(len(prompt_ids), len(seeds), sampling.max_tokens), session, ask)

    async def _answered(
        self, tokens: int, session: Hashable | None, ask: Callable[[int], Awaitable[T]]
    ) -> tuple[T, int]:
        """What a replica answers, and its rank. One that is lost is replaced by another (RH-1)."""
        while True:
            rank = await self._place(tokens, session)
            returns = self._returns[rank]
            try:
                return await ask(rank), rank
            except _GONE as error:
                self._lost(rank, returns, error)
            finally:
                self._router.release(rank, tokens)

    def _has_served(self, rank: int, completions: Sequence[Completion]) -> None:
        newest = max((int(c.versions[-1]) for c in completions if len(c.versions)), default=0)
        self._served[rank] = max(self._served[rank], newest)

    async def _place(self, tokens: int, session: Hashable | None) -> int:
        """A replica in service; while there is none, wait for `watch` to bring one back."""
        while True:
            try:
                return self._router.place(tokens, session)
            except NoReplica:
                if not self._watched:
                    raise next(iter(self._errors.values())) from None
            self._changed.clear()
            await self._changed.wait()

    # --- health -------------------------------------------------------------------------------------------------------

    async def watch(self, resend: Resend | None = None) -> None:
        """Keep the replicas in service; never returns. Put it into a task group.

        Args:
            resend: called with a rank that was started anew and lacks the weights. None: it serves again once a later
                publication has reached it.

        Raises:
            runtime.ActorError: a replica is gone for good: it may not be started anew once more.
        """
        self._watched = True
        try:
            async with TaskGroup("replicas") as tasks:
                for rank in range(len(self._ranks)):
                    tasks.start(self._keep(rank, resend), name=f"replica {rank}")
        finally:
            self._watched = False
            self._changed.set()

    @property
    def starts(self) -> tuple[int, ...]:
        """How often the process of each replica was started; empty for processes that somebody else starts."""
        return () if self.procs is None else tuple(rank.num_starts for rank in self.procs.ranks)

    async def troubled(self) -> bool:
        """Whether a replica is out of service, after asking those that are in it."""
        for rank in self.serving:
            if (error := await self._trouble(rank)) is not None:
                self._take_out(rank, error)
        return bool(self._errors)

    async def all_serve(self) -> None:
        """Wait until every replica is in service. Needs `watch`."""
        while self._errors:
            if not self._watched:
                raise next(iter(self._errors.values()))
            self._changed.clear()
            await self._changed.wait()

    def _lost(self, rank: int, returns: int, error: Exception) -> None:
        """A call has lost its replica, which had come back so often when it got the call. Who reads a stream slowly
        learns of it when another process may serve already: that one has done nothing."""
        if returns == self._returns[rank]:
            self._take_out(rank, error)

    def _take_out(self, rank: int, error: Exception) -> None:
        self._router.serve(rank, False)
        self._errors.setdefault(rank, error)
        self._noticed[rank].set()

    async def _keep(self, rank: int, resend: Resend | None) -> None:
        """One replica, for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.probe_seconds or None):
                    await self._noticed[rank].wait()
            self._noticed[rank].clear()
            error = self._errors.get(rank) or await self._trouble(rank)
            if error is None:
                continue
            self._take_out(rank, error)
            log.warning("rollout rank %d is out of service: %s", rank, str(error).partition("\n")[0])
            await self._bring_back(rank, error, resend)
            self._returns[rank] += 1
            del self._errors[rank]
            self._noticed[rank].clear()
            self._router.serve(rank, True)
            self._changed.set()

    async def _trouble(self, rank: int) -> Exception | None:
        """What is wrong with a replica, asked where its steps run."""
        try:
            stats = await self._probe(rank, self.config.stuck_seconds)
        except (*_GONE, DeadlineExceeded) as error:
            return error
        if stats.version < self._served[rank]:
            return Behind(f"rollout rank {rank} was started anew: it has version {stats.version}")
        return None

    async def _bring_back(self, rank: int, error: Exception, resend: Resend | None) -> None:
        """Its process anew, with its weights (RH-5); once more where it is lost again before it serves. Raises what
        went wrong where it is gone for good, or where the fault is not its own."""
        trouble: Exception | None = error
        while trouble is not None:
            await self._end_failed(rank, trouble)
            starts = self.starts
            try:
                return await self._renewed(rank, resend)
            except (*_GONE, SyncError) as failed:
                trouble = await self._trouble(rank)
                if self.starts == starts and isinstance(trouble, TooOld):  # it may be its fault that it stays behind
                    trouble = EngineFailed(f"{trouble}; sending the weights to it alone failed")
                if self.procs is None or (self.starts == starts and isinstance(trouble, Behind | None)):
                    raise
                if isinstance(trouble, ProcessDied | Stopped) and not self.procs.ranks[rank].reviving:
                    raise
                log.warning("rollout rank %d was lost again: %s", rank, str(failed).partition("\n")[0])

    async def _end_failed(self, rank: int, error: Exception) -> None:
        """End the process of a replica that has failed or is stuck: only a new one helps, for all that it started."""
        if isinstance(error, ProcessDied | Stopped | Behind) or self.procs is None:
            return
        place = self.procs.ranks[rank]
        if place.process is not None and not place.reviving:  # a new one may take long to start: it isn't stuck
            place.process.kill(signal.SIGKILL)
            await place.ended.wait()

    async def _renewed(self, rank: int, resend: Resend | None) -> None:
        """Wait for its process to be started anew, then for its weights."""
        if await self._has_weights(rank):
            return
        if resend is not None:
            await resend(rank)
            return
        while not await self._has_weights(rank):  # noqa: ASYNC110  # a publication elsewhere brings them
            await asyncio.sleep(self.config.probe_seconds or 1.0)

    async def _has_weights(self, rank: int) -> bool:
        """Asked of the process that there is, once it has started; raises when there will be none."""
        try:
            stats = await self._probe(rank, START_SECONDS)
        except Behind:
            return False
        return stats.version >= self._served[rank]

    async def _probe(self, rank: int, seconds: float) -> RolloutStats:
        stats: RolloutStats = await self._ranks[rank].probe.options(timeout=seconds).call_one()
        return stats


class _Owner:
    """Of the processes: an engine that has failed is the business of `watch`, a dead process that of the policy."""

    def __supervise__(self, failure: Failure) -> bool:
        return isinstance(failure.error, EngineFailed)
