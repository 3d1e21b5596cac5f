"""Rollout: a prompt and n in, a Group out. The controller's handle over the replicas.

    generate, group --router--> RolloutRank.generate on one replica --> Group
                       ^                       |
                       '--- a replica died: ---'  the request is issued again, with its seeds

RH-1: a call ends with its completions, or raises; a replica that dies is no error as long as another one serves.
RH-2: completions depend on (seed, position of the prompt, sample, attempt) and the weights, not on the replica, its
      load, or whether it was started anew in between.
RH-3: cancelling a call stops its work on the replica as well (R6).
RH-4: a group that is late is a value, `Dropped("timeout")`, never a call that hangs (A3).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from roles.rollout_config import RolloutConfig as RolloutConfig
from roles.rollout_config import VllmConfig as VllmConfig
from roles.rollout_rank import Limits, RolloutRank, RolloutStats
from roles.routing import Router, request_tokens
from roles.seeds import completion_seed
from roles.types import Completion, Dropped, Group, Prompt, Sampling
from runtime import ProcessDied, Stopped

if TYPE_CHECKING:
    import numpy as np

    from runtime import ActorMesh, HostMesh, ProcMesh

__all__ = ["Rollout", "RolloutConfig", "RolloutRank", "RolloutStats", "VllmConfig"]


class Rollout:
    """The controller's handle over the replicas.

    Args:
        mesh: actors of class `RolloutRank`, one dimension.
        procs: their processes, for an owner that restarts or stops them.
        config: `[rollout]` of the job.
    """

    def __init__(self, mesh: ActorMesh, procs: ProcMesh | None = None, config: RolloutConfig | None = None) -> None:
        self.mesh = mesh
        self.procs = procs
        self.config = config or RolloutConfig(ranks=len(mesh))
        self._ranks = [mesh.slice(rank=rank) for rank in range(len(mesh))]
        self._router = Router(len(self._ranks))

    @classmethod
    async def start(
        cls, host: HostMesh, config: RolloutConfig, model_path: str, *, gpus: Sequence[Sequence[int]] = ()
    ) -> Rollout:
        """Processes, their own torch.distributed group, and an engine on each; ready when it returns.

        Args:
            gpus: of each replica, as indices of this host's GPUs. Left out: replicas see all of them.
        """
        environment: dict[str, str] = {}
        if config.engine == "vllm":
            from roles.vllm_compat import environment_of

            environment = environment_of(config)
        procs = await host.spawn_procs(
            {"rank": config.ranks},
            name="rollout",
            threads=config.threads or None,
            env=environment,
            start="fresh" if environment else "auto",
            gpus=gpus or 0,
        )
        await procs.init_process_group("gloo")
        return cls(await procs.spawn("rollout", RolloutRank, config, model_path), procs, config)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Most tokens that each replica may still have to compute for calls under way."""
        return self._router.outstanding

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

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Of each replica: logprobs of the tokens of each sequence but its first, under the weights in service."""
        values: list[list[np.ndarray]] = (await self.mesh.score.call([list(ids) for ids in sequences])).values()
        return values

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
        """The completions and the rank that made them. A request of a replica that died is issued again (RH-1)."""
        tokens = request_tokens(len(prompt_ids), len(seeds), sampling.max_tokens)
        while True:
            rank = self._router.place(tokens, session)
            try:
                call: Any = self._ranks[rank].generate.call_one(prompt_ids, sampling, seeds, limits)
                return await call, rank
            except (ProcessDied, Stopped):
                self._router.serve(rank, False)
                if not self._router.serving:
                    raise
            finally:
                self._router.release(rank, tokens)
