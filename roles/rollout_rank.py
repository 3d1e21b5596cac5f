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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from roles.engine import Behind, EngineFailed, Request, RolloutEngine, StepEngine, TooOld
from roles.model_folder import stop_tokens_of
from roles.pieces import News, as_completion, joined_piece, last_piece
from roles.rollout_call import Call
from roles.rollout_call import Limits as Limits
from roles.rollout_calls import Calls
from roles.rollout_config import RolloutConfig
from roles.stepping import Stepper
from roles.text_stream import TextStream
from roles.types import Completion, Piece, Sampling
from roles.vllm_transfer_ports import TransferReceiver
from runtime import Actor, context, endpoint
from sync.ports import ReceiverPort
from sync.transport import SyncError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sync.receiver import Part

T = TypeVar("T")

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
    drafted: int = 0
    """Tokens that a draft proposed (`[rollout.vllm] draft`), as of the last sign of life of the steps."""
    kept: int = 0
    """Those of them that were what the policy drew: steps that were saved."""


class RolloutRank(TransferReceiver, ReceiverPort, Actor):
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
        self._updating = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._calls = Calls(self._engine, self._gate)
        self._writing = False
        """A version is on its way over the weights in service."""

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
            TooOld: so does the session that publishes them.
            EngineFailed: the engine has ended, or may hold parts of two versions.
        """
        limits = limits or Limits()
        request = Request(id=self._calls.new_id(), prompt_ids=prompt_ids, seeds=seeds, sampling=sampling)
        self._may_run(request, at_least)
        call = Call(request, limits.enough or len(seeds), self._texts(sampling, len(seeds)))
        async with self._calls.running(call):
            await self._let_in()
            self._calls.submit(call, request, tuple(range(len(seeds))))
            await self._calls.until_enough(call, limits.seconds or None)
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
        request = Request(id=self._calls.new_id(), prompt_ids=prompt_ids, seeds=(seed,), sampling=sampling)
        self._may_run(request, at_least)
        news = News()
        call = Call(request, 1, self._texts(sampling, 1), news.add)
        if had is not None:
            call.go_on(as_completion(had))
            if (reason := call.ended_with(self._stop_token_ids)) is not None:  # the replica died before it said so
                yield last_piece(*self._with_texts([as_completion(had, reason)]))
                return
        async with self._calls.running(call):
            await self._let_in()
            self._calls.submit(call, call.rest(0, request.id), (0,))
            call.done.add_done_callback(lambda _: news.wake())
            ended = False
            while not ended:
                await news.come()
                ended = call.done.done()  # asked first: what came while its reader was slow is told as well
                if pieces := news.take():
                    yield joined_piece(pieces)
            (completion,) = self._with_texts(call.done.result())
        yield last_piece(completion)

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

    @property
    def transfer_engine(self) -> Any:
        """As `TransferReceiver`."""
        self._open(fenced=True)
        if not hasattr(self._engine, "receive"):
            raise SyncError("weights come to this engine through a WeightSession; publish them through one")
        return self._engine

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """As `put_weights`, those that were staged."""
        return await self.put_weights(lambda: self._engine.swap(weights, version))

    async def put_weights(self, put: Callable[[], Awaitable[T]]) -> T:
        """Put them into service by this call, in the way that the job chose (`[rollout] update`)."""
        self._open(fenced=True)
        async with self._updating:
            if self._config.update == "keep" or self._writing:
                try:
                    left = await put()
                    if self._writing:
                        self.weights_fenced = ""
                    return left
                finally:  # also where it fails: who waits is refused, since the fence stands
                    if self._writing:
                        self._written()
            async with self._closed_gate():
                await self._emptied()
                return await put()

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
        """Start the engine's tasks with the first call. Raises what ended the engine; EngineFailed or TooOld when this
        rank must not serve, unless `fenced` says that this is how it comes back."""
        self._calls.check()
        if self.weights_fenced and not fenced and not self._writing:
            failure = EngineFailed if self.weights_torn else TooOld
            raise failure(f"rollout: this replica must not serve: {self.weights_fenced}")
        self._calls.open(self.tasks)

    def _may_run(self, request: Request, at_least: int) -> None:
        """Raises what `generate` says."""
        self._engine.check(request)
        self._open()
        self._not_behind(at_least)

    def _not_behind(self, at_least: int) -> None:
        if self._engine.version < at_least:
            raise Behind(f"rollout: version {self._engine.version} is in service here, {at_least} was before")

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
            self._calls.interrupt()
        await self._calls.idle()

    def _stats(self) -> RolloutStats:
        engine = self._engine
        drafted, kept = getattr(engine, "drafts", (0, 0))  # of engines that know drafts
        return RolloutStats(
            rank=context().rank,
            version=engine.version,
            running=engine.num_running,
            waiting=engine.num_waiting,
            tokens=engine.num_tokens,
            busy_seconds=engine.busy_seconds,
            drafted=drafted,
            kept=kept,
        )


def as_rollout_engine(engine: RolloutEngine | StepEngine) -> RolloutEngine:
    """The engine itself, or driven by a `Stepper` when its steps are plain calls."""
    return Stepper(cast(StepEngine, engine)) if hasattr(engine, "step") else engine


def load_engine(config: RolloutConfig, model_path: str) -> RolloutEngine:
    """The engine that `config` names, with the model of that folder."""
    module, _, function = ENGINES[config.engine].partition(":")
    return as_rollout_engine(getattr(importlib.import_module(module), function)(model_path, config))
