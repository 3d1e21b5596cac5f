"""One replica of the rollout as an actor: calls in, completions out, new weights in between.

    generate --check--> submit --------> engine ---ended---> complete, with text
                          ^                         |
                          '-- resubmit the rest <---'  interrupted by an update, not by its caller

RR-1: no step sees weights without their version: `swap` of the engine moves both between two steps (W5).
RR-2: a call of `generate` returns all the completions asked for or raises; an error of the engine reaches every caller
      that waits and every later one, and fails the actor.
RR-3: a cancelled call leaves the engine within one turn: its rows are free for others (R6).
RR-4: no sample is lost over an update, in any of the three modes; its tokens keep the versions that sampled them, and
      what was sampled before counts in its budget, and a stop string may begin before the update and end after it.
RR-5: a rank without requests costs nothing.
RR-6: updates are one at a time, and a call that arrives during one of the modes `drain` and `resume` waits for it.
RR-7: while a version is written over the weights in service calls wait for it, whatever the mode; when it fails they
      are refused, and so is every other until a version has come whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from roles.engine import Behind, EngineFailed, Finished, Request, RolloutEngine, Sampled, StepEngine
from roles.model_folder import stop_tokens_of
from roles.pieces import as_completion, joined_piece
from roles.rollout_call import Call
from roles.rollout_call import Limits as Limits
from roles.rollout_config import RolloutConfig
from roles.stepping import Stepper
from roles.text_stream import TextStream
from roles.types import Completion, Piece, Sampling
from runtime import Actor, context, endpoint
from sync.ports import ReceiverPort
from sync.transport import SyncError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sync.receiver import Part

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
        self._stop_token_ids = stop_tokens_of(model_path)
        self._engine = load_engine(config, model_path) if engine is None else as_rollout_engine(engine)
        self.weight_sink = self._engine  # type: ignore[assignment]  # `apply_weights` awaits its swap
        self._calls: dict[int, tuple[Call, tuple[int, ...]]] = {}  # request of the engine -> call, its samples
        self._next_id = 0
        self._opened = False
        self._failure: Exception | None = None
        self._updating = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._writing = False
        """A version is on its way over the weights in service."""
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
        self._may_run(request, at_least)
        call = Call(request, limits.enough or len(seeds), self._texts(sampling, len(seeds)))
        async with self._running(call):
            await self._let_in()
            self._submit(call, request, tuple(range(len(seeds))))
            await self._until_enough(call, limits.seconds or None)
            completions = await call.done
        return self._with_texts(completions)

    @endpoint(concurrency=MAX_CALLS)
    async def stream(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, had: Piece | None = None, at_least: int = 0
    ) -> AsyncIterator[Piece]:
        """Complete a prompt once, and tell its tokens as they come.

        Args:
            had: tokens that the completion has already, from a replica that died; they are not told again.

        Raises:
            As `generate`.
        """
        request = Request(id=self._new_id(), prompt_ids=prompt_ids, seeds=(seed,), sampling=sampling)
        self._may_run(request, at_least)
        news = _News()
        call = Call(request, 1, self._texts(sampling, 1), news.add)
        if had is not None:
            call.go_on(as_completion(had))
            if (reason := call.ended_with(self._stop_token_ids)) is not None:  # the replica died before it said so
                yield _last(*self._with_texts([as_completion(had, reason)]))
                return
        async with self._running(call):
            await self._let_in()
            self._submit(call, call.rest(0, request.id), (0,))
            call.done.add_done_callback(lambda _: news.wake())
            ended = False
            while not ended:
                await news.come()
                ended = call.done.done()  # asked first: what came while its reader was slow is told as well
                if pieces := news.take():
                    yield joined_piece(pieces)
            (completion,) = self._with_texts(call.done.result())
        yield _last(completion)

    @endpoint(concurrency=8)
    async def score(self, sequences: list[list[int]], at_least: int = 0) -> list[np.ndarray]:
        """Logprobs of the tokens of each sequence but its first under the weights in service, [T - 1] float32 each.
        Raises Behind when those are older than `at_least`."""
        self._open()
        if self._writing:
            await self._let_in()
        self._not_behind(at_least)
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

    async def weight_parts(self) -> Sequence[Part]:
        """Those of the engine, once it is open."""
        if not self._parts:
            self._open(fenced=True)
        return await super().weight_parts()

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """Put them into service in the way that the job chose (`[rollout] update`)."""
        self._open(fenced=True)
        async with self._updating:
            if self._config.update == "keep" or self._writing:
                try:
                    left = await self._engine.swap(weights, version)
                    if self._writing:
                        self.weights_fenced = ""
                    return left
                finally:  # also where it fails: who waits is refused, since the fence stands
                    if self._writing:
                        self._written()
            async with self._closed_gate():
                await self._emptied()
                return await self._engine.swap(weights, version)

    async def hold_weights(self) -> None:
        """Let calls wait (RR-7), and see to what runs as the job chose."""
        self._writing = True
        self._gate.clear()
        if self._config.update != "keep":
            await self._emptied()
        if not self._writing:
            raise SyncError("the port was closed while requests ended, before a version was written: stage it again")

    @endpoint(concurrency=4)
    async def sync_close(self) -> None:
        """As `ReceiverPort`; a version that was being written has failed."""
        if self._writing:
            self._written()
        await super().sync_close()

    async def __cleanup__(self, error: BaseException | None = None) -> None:
        await self._engine.close()

    def _open(self, *, fenced: bool = False) -> None:
        """Start the engine's tasks with the first call. Raises what ended the engine, or EngineFailed when this rank
        must not serve, unless `fenced` says that this is how it comes back."""
        if self._failure is not None:
            raise self._failure
        if self.weights_fenced and not fenced and not self._writing:
            raise EngineFailed(f"rollout: this replica must not serve: {self.weights_fenced}")
        if not self._opened:
            self._opened = True
            self._engine.open(self.tasks, self._fail)

    def _may_run(self, request: Request, at_least: int) -> None:
        """Raises what `generate` says."""
        self._engine.check(request)
        self._open()
        self._not_behind(at_least)

    def _not_behind(self, at_least: int) -> None:
        if self._engine.version < at_least:
            raise Behind(f"rollout: version {self._engine.version} is in service here, {at_least} was before")

    @contextlib.asynccontextmanager
    async def _running(self, call: Call) -> AsyncIterator[None]:
        """What its caller does while it runs; who leaves early ends its samples (RR-3)."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._stop(call)
            raise
        finally:
            for number in call.ids:
                self._calls.pop(number, None)

    def _texts(self, sampling: Sampling, count: int) -> list[TextStream] | None:
        """Of each sample, where there are stop strings to look for."""
        if not sampling.stop:
            return None
        special = set(self._tokenizer.all_special_tokens)
        ids = {self._tokenizer.convert_tokens_to_ids(text) for text in sampling.stop if text in special}
        return [TextStream(self._text, sampling.stop, ids) for _ in range(count)]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _with_texts(self, completions: list[Completion]) -> list[Completion]:
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text
        return completions

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _submit(self, call: Call, request: Request, samples: tuple[int, ...]) -> None:
        if self._failure is not None:
            raise self._failure
        self._calls[request.id] = (call, samples)
        call.ids.add(request.id)
        if call.told:
            self._engine.submit(request, self._ended, self._sampled)
        else:
            self._engine.submit(request, self._ended)

    def _sampled(self, news: Sampled) -> None:
        if news.request_id not in self._calls:
            return
        call, samples = self._calls[news.request_id]
        if call.took(samples[news.sample], news.piece):
            self._engine.abort(news.request_id, news.sample)

    def _ended(self, finished: Finished) -> None:
        self._something_ended.set()
        if finished.request_id not in self._calls:
            return  # its call was cancelled: a sample has nobody to go to
        call, samples = self._calls[finished.request_id]
        sample = samples[finished.sample]
        if not call.ended(sample, finished.completion):
            self.tasks.start(self._go_on(call, sample), name=f"go on with request {finished.request_id}")

    async def _go_on(self, call: Call, sample: int) -> None:
        """Submit what is left of a sample that an update has interrupted (RR-4)."""
        await self._gate.wait()
        if call.stopped:
            call.end(sample)
        else:
            self._submit(call, call.rest(sample, self._new_id()), (sample,))

    async def _until_enough(self, call: Call, seconds: float | None) -> None:
        """Wait for enough samples, then stop the others. Returns at once when the engine fails: `done` tells."""
        enough = asyncio.ensure_future(call.enough.wait())
        waited: list[asyncio.Future[Any]] = [enough, call.done]
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            enough.cancel()
        if not call.done.done():
            self._stop(call)

    def _stop(self, call: Call) -> None:
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

    async def _let_in(self) -> None:
        """Wait while an update keeps calls out; raises as `_open` when it has failed."""
        await self._gate.wait()
        self._open()

    def _written(self) -> None:
        self._writing = False
        self._gate.set()

    async def _emptied(self) -> None:
        """What runs ends, or is interrupted: as `[rollout] update` says."""
        if self._config.update == "resume":
            for number in tuple(self._calls):
                self._engine.abort(number)
        await self._idle()

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
                call.done.exception()  # its caller may have gone: then nobody asks

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


def _last(completion: Completion) -> Piece:
    nothing = completion.token_ids[:0]
    return Piece(token_ids=nothing, logprobs=completion.logprobs[:0], versions=nothing, completion=completion)


class _News:
    """Pieces that wait to be told; at most those of one completion."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._some = asyncio.Event()

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._some.set()

    def wake(self) -> None:
        """Nothing more comes."""
        self._some.set()

    async def come(self) -> None:
        await self._some.wait()
        self._some.clear()

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def as_rollout_engine(engine: RolloutEngine | StepEngine) -> RolloutEngine:
    """The engine itself, or driven by a `Stepper` when its steps are plain calls."""
    return Stepper(cast(StepEngine, engine)) if hasattr(engine, "step") else engine


def load_engine(config: RolloutConfig, model_path: str) -> RolloutEngine:
    """The engine that `config` names, with the model of that folder."""
    module, _, function = ENGINES[config.engine].partition(":")
    return as_rollout_engine(getattr(importlib.import_module(module), function)(model_path, config))
