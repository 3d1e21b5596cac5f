"""Rollout: a prompt and n in, a Group out. The controller's handle, and the actor that drives an engine on each rank.

    Rollout.generate --least loaded--> RolloutRank.generate   event loop: check, queue, wait, decode the text
                                             |  ^
                                      commands  ended samples
                                             v  |
                                       driver: one turn after another through on_main_thread
                                               (submit, abort, then engine steps for some milliseconds)
    publish --> sync_commit --> engine.swap through on_main_thread: between two turns, so between two steps

RR-1: the engine is touched on the main thread only, by one function at a time: a turn of the driver or a swap. Weights
      and version move inside one such function, so no step sees the one without the other (W5).
RR-2: a call of `generate` returns all its completions or raises; an error of the engine reaches every caller that waits
      and every later one, and fails the actor.
RR-3: a cancelled call leaves the engine within one turn: its rows are free for others (R6).
RR-4: no sample is lost over a swap: requests that run or wait go on (engine.py, RE-4).
RR-5: a rank without requests costs nothing: its driver sleeps.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from roles.engine import Finished, Request, RolloutEngine
from roles.routing import LeastTokens, request_tokens
from roles.seeds import completion_seed
from roles.types import Completion, Group, Prompt, Sampling
from runtime import Actor, context, endpoint, on_main_thread
from sync.ports import ReceiverPort

if TYPE_CHECKING:
    from runtime import ActorMesh, HostMesh, ProcMesh

_TURN_SECONDS = 0.01
"""How long a turn goes on before the main thread is free for a swap and ended samples are told: a few steps of a small
model, one step of a large one. A hop between threads costs about 0.1 ms."""

_MAX_CALLS = 4096
"""Calls of `generate` that a rank holds, running and waiting; more wait in the mailbox (R7)."""

_ENGINES = {"torch": "roles.engine_torch:load_engine"}
"""Name in a job file -> `module:function`, called as `function(model_path, config)` on the rank."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[rollout]` table of a job."""

    ranks: int = 1
    """Processes; each is a replica of the whole policy with its own engine."""
    engine: Literal["torch"] = "torch"
    """`torch`: our small engine, for Llama-shaped transformers models."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where torch sees a GPU (ROCm too), else cpu."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights, activations and cache. Logits are sampled from in float32 always."""
    max_running: int = 256
    """Completions that a replica generates at once; requests beyond wait. Memory of the cache grows with it."""
    max_len: int = 0
    """Longest prompt and completion together, in tokens. 0: derived from the longest prompt and answer of the job."""
    threads: int = 0
    """Of torch in each process. 0: derived from the cores of the host and whether training runs at the same time."""

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("max_running", 1), ("max_len", 0), ("threads", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"[rollout] {name}: expected at least {least}, got {value}; set it to {least} or more")


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says about itself; counters run since its start."""

    rank: int
    version: int
    """Policy version of the weights in service."""
    running: int
    """Completions that get a token in each step."""
    waiting: int
    """Completions that wait for room in the engine."""
    tokens: int
    """Tokens sampled."""
    busy_seconds: float
    """Wall time spent in engine steps."""


class _Call:
    """One call of `generate` that waits for its samples."""

    def __init__(self, num_samples: int) -> None:
        self.samples: dict[int, Completion] = {}
        self.num_samples = num_samples
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()

    def add(self, finished: Finished) -> bool:
        """Whether that was the last one."""
        self.samples[finished.sample] = finished.completion
        if len(self.samples) < self.num_samples:
            return False
        if not self.done.done():
            self.done.set_result([self.samples[index] for index in range(self.num_samples)])
        return True


class RolloutRank(ReceiverPort, Actor):
    """One replica: an engine, the tokenizer that belongs to its model, and the driver of both.

    Args:
        config: `[rollout]` of the job.
        model_path: folder in Hugging Face format with config, weights and tokenizer.
        engine: use this engine instead of loading the one that `config` names.
    """

    def __init__(self, config: RolloutConfig, model_path: str, engine: RolloutEngine | None = None) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        self._engine: RolloutEngine = load_engine(config, model_path) if engine is None else engine
        self.weight_sink = self._engine
        self._calls: dict[int, _Call] = {}
        self._next_id = 0
        # From the event loop to the main thread: a Request to submit, or the id of one to abort.
        self._commands: deque[Request | int] = deque()
        self._work = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._busy_seconds = 0.0

    @endpoint(concurrency=_MAX_CALLS)
    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seeds: tuple[int, ...]
    ) -> list[Completion]:
        """Complete a prompt once per seed.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: for all its samples.
            seeds: 64-bit seed of each completion.

        Returns:
            One completion per seed, in their order, with text.

        Raises:
            ValueError: the engine can never run such a request; the text says which limit and what to change.
        """
        if self._failure is not None:
            raise self._failure
        self._next_id += 1
        request = Request(id=self._next_id, prompt_ids=prompt_ids, seeds=seeds, sampling=sampling)
        self._engine.check(request)
        if self._driver is None:
            self._driver = self.tasks.forever(self._drive(), name="engine")
        call = self._calls[request.id] = _Call(len(seeds))
        self._tell(request)
        try:
            completions = await call.done
        except asyncio.CancelledError:
            if self._calls.pop(request.id, None) is not None:
                self._tell(request.id)
            raise
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text
        return completions

    @endpoint(concurrency=8)
    async def stats(self) -> RolloutStats:
        """Counters as they stand; never waits for a step."""
        engine = self._engine
        return RolloutStats(
            rank=context().rank,
            version=engine.version,
            running=engine.num_running,
            waiting=engine.num_waiting + sum(len(c.seeds) for c in tuple(self._commands) if isinstance(c, Request)),
            tokens=engine.num_tokens,
            busy_seconds=self._busy_seconds,
        )

    def _tell(self, command: Request | int) -> None:
        self._commands.append(command)
        self._work.set()

    async def _drive(self) -> None:
        """Turns while there is work, for ever. The only caller of the engine besides a swap (RR-1)."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._commands or self._engine.num_running or self._engine.num_waiting:
                    for finished in await on_main_thread(self._turn):
                        # A sample of a cancelled call has nobody to go to.
                        call = self._calls.get(finished.request_id)
                        if call is not None and call.add(finished):
                            del self._calls[finished.request_id]
        except Exception as error:
            self._failure = error
            for call in self._calls.values():
                if not call.done.done():
                    call.done.set_exception(error)
            self._calls.clear()
            raise

    def _turn(self) -> list[Finished]:
        """Commands and steps for some milliseconds, on the main thread. Returns the samples that ended."""
        began = time.perf_counter()
        engine, ended = self._engine, list[Finished]()
        while True:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, Request):
                    engine.submit(command)
                else:
                    ended += engine.abort(command)
            ended += engine.step()
            seconds = time.perf_counter() - began
            if seconds > _TURN_SECONDS or not (engine.num_running or engine.num_waiting):
                self._busy_seconds += seconds
                return ended


def load_engine(config: RolloutConfig, model_path: str) -> RolloutEngine:
    """The engine that `config` names, with the model of that folder."""
    module, _, function = _ENGINES[config.engine].partition(":")
    engine: RolloutEngine = getattr(importlib.import_module(module), function)(model_path, config)
    return engine


class Rollout:
    """The controller's handle over the replicas.

    Args:
        mesh: actors of class `RolloutRank`, one dimension.
        procs: their processes, for an owner that restarts or stops them.
    """

    def __init__(self, mesh: ActorMesh, procs: ProcMesh | None = None) -> None:
        self.mesh = mesh
        self.procs = procs
        self._ranks = [mesh.slice(rank=rank) for rank in range(len(mesh))]
        self._router = LeastTokens(len(self._ranks))

    @classmethod
    async def start(cls, host: HostMesh, config: RolloutConfig, model_path: str) -> Rollout:
        """Processes, their own torch.distributed group, and an engine on each; ready when it returns."""
        procs = await host.spawn_procs({"rank": config.ranks}, name="rollout", threads=config.threads or None)
        await procs.init_process_group("gloo")
        return cls(await procs.spawn("rollout", RolloutRank, config, model_path), procs)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Most tokens that each replica may still have to compute for calls under way."""
        return self._router.outstanding

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0) -> Group:
        """Complete a prompt n times on the least loaded replica.

        The completions depend on (seed, `prompt.position`, index of the sample, attempt) and the weights, not on the
        replica or its load. Cancelling stops the work on the replica as well.

        Args:
            prompt: what to complete.
            n: number of completions.
            sampling: how.
            seed: seed of the run.
            attempt: how often this prompt was issued before.

        Raises:
            ValueError: the engine can never run such a request.
            runtime.ActorError: the replica failed or died.
        """
        tokens = request_tokens(len(prompt.token_ids), n, sampling.max_tokens)
        rank = self._router.place(tokens)
        try:
            seeds = tuple(completion_seed(seed, prompt.position, sample, attempt) for sample in range(n))
            completions = await self._ranks[rank].generate.call_one(prompt.token_ids, sampling, seeds)
        finally:
            self._router.release(rank, tokens)
        return Group(prompt=prompt, completions=completions, replica=rank)

    async def stats(self) -> list[RolloutStats]:
        """Counters of all ranks, in their order."""
        stats: list[RolloutStats] = (await self.mesh.stats.call()).values()
        return stats
