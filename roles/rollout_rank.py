"""One replica of the rollout as an actor: calls in, completions out, new weights in between.

    generate --check--> submit --------> engine ---ended---> complete, with text
                          ^                         |
                          '-- resubmit the rest <---'  interrupted by an update, not by its caller

RR-1: no step sees weights without their version: `swap` of the engine moves both between two steps (W5).
RR-2: a call of `generate` returns all the completions asked for or raises; an error of the engine reaches every caller
      that waits and every later one, and fails the actor.
RR-3: a cancelled call leaves the engine within one turn: its rows are free for others (R6).
RR-4: no sample is lost over an update, in any of the three modes; its tokens keep the versions that sampled them, and
      what was sampled before counts in its budget.
RR-5: a rank without requests costs nothing.
RR-6: updates are one at a time, and a call that arrives during one of the modes `drain` and `resume` waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from roles.engine import Behind, EngineFailed, Finished, Request, RolloutEngine, StepEngine
from roles.rollout_config import RolloutConfig
from roles.stepping import Stepper
from roles.types import Completion, Sampling
from runtime import Actor, context, endpoint
from sync.ports import ReceiverPort

if TYPE_CHECKING:
    from torch import Tensor

MAX_CALLS = 4096
"""Calls of `generate` that a rank holds, running and waiting; more wait in the mailbox (R7)."""

ENGINES = {"torch": "roles.engine_torch:load_engine", "vllm": "roles.engine_vllm:load_engine"}
"""Name in a job file -> `module:function`, called as `function(model_path, config)` on the rank; it returns a
StepEngine or a RolloutEngine."""


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
    """Wall time in which the engine had something to do."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a call of `generate` is content with less."""

    enough: int = 0
    """Return when so many samples have ended; the others are stopped and come back with finish_reason `abort`. 0: wait
    for all."""
    seconds: float = 0.0
    """Stop what has not ended by then. 0: no limit."""


class _Call:
    """One call of `generate` that waits for its samples."""

    def __init__(self, request: Request, enough: int) -> None:
        self.request = request
        self.pieces: list[list[Completion]] = [[] for _ in request.seeds]
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.stopped = False
        """Its samples are to end: an abort is no longer answered by going on."""
        self.ids = {request.id}
        """Requests of the engine that may still run for it."""
        self._missing = enough
        self._ended = 0

    def end(self, sample: int) -> None:
        self._ended += 1
        if self._ended >= self._missing:
            self.enough.set()
        if self._ended == len(self.pieces) and not self.done.done():
            self.done.set_result([joined(pieces, len(self.request.prompt_ids)) for pieces in self.pieces])


class RolloutRank(ReceiverPort, Actor):
    """One replica: an engine, the tokenizer that belongs to its model, and the calls that wait.

    Args:
        config: `[rollout]` of the job.
        model_path: folder in Hugging Face format with config, weights and tokenizer.
        engine: use this engine instead of loading the one that `config` names.
    """

    def __init__(
        self, config: RolloutConfig, model_path: str, engine: RolloutEngine | StepEngine | None = None
    ) -> None:
        from transformers import AutoTokenizer

        self._config = config
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        self._engine = load_engine(config, model_path) if engine is None else as_rollout_engine(engine)
        self.weight_sink = self._engine  # type: ignore[assignment]  # `apply_weights` awaits its swap
        self._calls: dict[int, tuple[_Call, tuple[int, ...]]] = {}  # request of the engine -> call, its samples
        self._next_id = 0
        self._opened = False
        self._failure: Exception | None = None
        self._updating = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._something_ended = asyncio.Event()

    @endpoint(concurrency=MAX_CALLS)
    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seeds: tuple[int, ...],
        limits: Limits | None = None,
        at_least: int = 0,
    ) -> list[Completion]:
        """Complete a prompt once per seed.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: for all its samples.
            seeds: 64-bit seed of each completion.
            limits: when to be content with less.
            at_least: version that the caller has seen from this replica: a process started anew has older weights.

        Returns:
            One completion per seed, in their order, with text.

        Raises:
            ValueError: the engine can never run such a request; the text says which limit and what to change.
            Behind: the weights in service are older than `at_least`.
            EngineFailed: the engine has ended, or this replica must not serve.
        """
        limits = limits or Limits()
        request = Request(id=self._new_id(), prompt_ids=prompt_ids, seeds=seeds, sampling=sampling)
        self._engine.check(request)
        self._open()
        if self._engine.version < at_least:
            raise Behind(f"rollout: version {self._engine.version} is in service here, {at_least} was before")
        call = _Call(request, limits.enough or len(seeds))
        await self._gate.wait()
        self._submit(call, request, tuple(range(len(seeds))))
        try:
            await self._until_enough(call, limits.seconds or None)
            completions = await call.done
        except asyncio.CancelledError:
            self._stop(call)
            raise
        finally:
            for number in call.ids:
                self._calls.pop(number, None)
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text
        return completions

    @endpoint(concurrency=8)
    async def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Logprobs of the tokens of each sequence but its first under the weights in service, [T - 1] float32 each."""
        self._open()
        return await self._engine.score(sequences)

    @endpoint(concurrency=8)
    async def probe(self) -> RolloutStats:
        """`stats`, once the place where steps run has answered."""
        self._open()
        await self._engine.probe()
        return self._stats()

    @endpoint(concurrency=8)
    async def stats(self) -> RolloutStats:
        """Counters as they stand; never waits for a step."""
        return self._stats()

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """Put them into service in the way that the job chose (`[rollout] update`)."""
        self._open(fenced=True)
        async with self._updating:
            if self._config.update == "keep":
                return await self._engine.swap(weights, version)
            async with self._closed_gate():
                if self._config.update == "resume":
                    for number in tuple(self._calls):
                        self._engine.abort(number)
                await self._idle()
                return await self._engine.swap(weights, version)

    async def __cleanup__(self, error: BaseException | None = None) -> None:
        await self._engine.close()

    def _open(self, *, fenced: bool = False) -> None:
        """Start the engine's tasks with the first call. Raises what ended the engine, or EngineFailed when this rank
        must not serve, unless `fenced` says that this is how it comes back."""
        if self._failure is not None:
            raise self._failure
        if self.weights_fenced and not fenced:
            raise EngineFailed(f"rollout: this replica must not serve: {self.weights_fenced}")
        if not self._opened:
            self._opened = True
            self._engine.open(self.tasks, self._fail)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _submit(self, call: _Call, request: Request, samples: tuple[int, ...]) -> None:
        if self._failure is not None:
            raise self._failure
        self._calls[request.id] = (call, samples)
        call.ids.add(request.id)
        self._engine.submit(request, self._ended)

    def _ended(self, finished: Finished) -> None:
        self._something_ended.set()
        if finished.request_id not in self._calls:
            return  # its call was cancelled: a sample has nobody to go to
        call, samples = self._calls[finished.request_id]
        sample = samples[finished.sample]
        call.pieces[sample].append(finished.completion)
        if finished.completion.finish_reason != "abort" or call.stopped:
            call.end(sample)
        else:
            self.tasks.start(self._go_on(call, sample), name=f"go on with request {finished.request_id}")

    async def _go_on(self, call: _Call, sample: int) -> None:
        """Submit what is left of a sample that an update has interrupted (RR-4)."""
        await self._gate.wait()
        if call.stopped:
            call.end(sample)
            return
        whole, pieces = call.request, call.pieces[sample]
        had = [int(token) for piece in pieces for token in piece.token_ids]
        sampling = msgspec.structs.replace(whole.sampling, max_tokens=whole.sampling.max_tokens - len(had))
        rest = Request(
            id=self._new_id(),
            prompt_ids=(*whole.prompt_ids, *had),
            seeds=(whole.seeds[sample],),
            sampling=sampling,
            first=len(had),
        )
        self._submit(call, rest, (sample,))

    async def _until_enough(self, call: _Call, seconds: float | None) -> None:
        """Wait for enough samples, then stop the others. Returns at once when the engine fails: `done` tells."""
        enough = asyncio.ensure_future(call.enough.wait())
        waited: list[asyncio.Future[Any]] = [enough, call.done]
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            enough.cancel()
        if not call.done.done():
            self._stop(call)

    def _stop(self, call: _Call) -> None:
        call.stopped = True
        for number in call.ids:
            self._engine.abort(number)

    @contextlib.asynccontextmanager
    async def _closed_gate(self) -> AsyncIterator[None]:
        self._gate.clear()
        try:
            yield
        finally:
            self._gate.set()

    async def _idle(self) -> None:
        """Wait until the engine holds no request."""
        while self._engine.num_running or self._engine.num_waiting:
            if self._failure is not None:
                raise self._failure
            self._something_ended.clear()
            await self._something_ended.wait()

    def _fail(self, error: Exception) -> None:
        """Tell everybody who waits (RR-2)."""
        self._failure = error
        self._something_ended.set()
        for call, _ in self._calls.values():
            if not call.done.done():
                call.done.set_exception(error)

    def _stats(self) -> RolloutStats:
        engine = self._engine
        return RolloutStats(
            rank=context().rank,
            version=engine.version,
            running=engine.num_running,
            waiting=engine.num_waiting,
            tokens=engine.num_tokens,
            busy_seconds=engine.busy_seconds,
        )


def joined(pieces: Sequence[Completion], prompt_length: int) -> Completion:
    """One completion of the pieces that updates have cut it into. Each token keeps logprob, version and experts of the
    piece that sampled it."""
    finish_reason = pieces[-1].finish_reason
    pieces = [piece for piece in pieces if len(piece.token_ids)] or pieces[-1:]
    if len(pieces) == 1:
        return msgspec.structs.replace(pieces[0], finish_reason=finish_reason)
    routes = None
    if all(piece.routes is not None for piece in pieces):
        parts, start, end = [], 0, prompt_length
        for piece in pieces:
            end += len(piece.token_ids)
            assert piece.routes is not None
            parts.append(piece.routes[start : end - 1])
            start = end - 1
        routes = np.concatenate(parts)
    return Completion(
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=np.concatenate([piece.versions for piece in pieces]),
        finish_reason=finish_reason,
        routes=routes,
    )


def as_rollout_engine(engine: RolloutEngine | StepEngine) -> RolloutEngine:
    """The engine itself, or driven by a `Stepper` when its steps are plain calls."""
    return Stepper(cast(StepEngine, engine)) if hasattr(engine, "step") else engine


def load_engine(config: RolloutConfig, model_path: str) -> RolloutEngine:
    """The engine that `config` names, with the model of that folder."""
    module, _, function = ENGINES[config.engine].partition(":")
    return as_rollout_engine(getattr(importlib.import_module(module), function)(model_path, config))
