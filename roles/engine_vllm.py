"""vLLM as a rollout engine: AsyncLLM in the rank's process, its engine and workers in processes of its own. No Ray.

    submit -> one request of vLLM per sample -> ended           event loop
    swap   -> one call of the workers, so between two steps: what their receivers have staged goes into service

Weights never pass through here: each worker is a rank of the sync (vllm_worker.py), and this process relays.

vLLM is never paused: a call of its workers runs between two steps anyway. What that call returns, the tokens sampled so
far of each request, says where one version ends and the next begins in every completion.

VE-1: token in, token out: no tokenizer; each logprob belongs to the token beside it, under the distribution it was
      sampled from.
VE-2: entries of the prefix cache carry the version as a salt, so that no request reads what older weights computed. A
      request that had not been scheduled when the weights changed starts again under the new ones (RE-4).
VE-3: versions are exact to the token: borders come from the critical section that changed the weights (W5).
VE-4: a request that vLLM would alter silently is refused: temperatures below 0.01.
VE-5: the end of an engine process is known at once, by the end of its relay, and is final (RE-5).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roles import vllm_compat
from roles.engine import Ended, EngineFailed, Finished, Request, Sampled, Told, check_tokens
from roles.model_folder import layout_of, stop_tokens_of
from roles.pieces import as_completion
from roles.sampling import check_sampling
from roles.types import Completion, Piece
from roles.vllm_leftovers import Tracker, children_of, shared_memory_of
from roles.vllm_sample import Sample, parameters_of, piece_of
from sync.relay import RemoteReceiver
from sync.transport import SyncError

if TYPE_CHECKING:
    from torch import Tensor

    from roles.rollout_config import RolloutConfig
    from runtime import TaskGroup
    from sync.layout import Layout
    from sync.receiver import Part

log = logging.getLogger(__name__)

_LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""

_SHUTDOWN_SECONDS = 1.0
"""How long its processes get to end by themselves; nothing of them is worth waiting for."""


class VllmEngine:
    """A `roles.engine.RolloutEngine`.

    Args:
        path: folder in Hugging Face format. Weights are loaded from it unless `vllm.arguments` say otherwise.
        config: `[rollout]` of the job.

    Raises:
        ValueError: what `vllm_compat.check_vllm` refuses, or vLLM itself refuses of the arguments.
    """

    def __init__(self, path: str, config: RolloutConfig) -> None:
        vllm_compat.check_vllm(config, path)
        os.environ.update(vllm_compat.environment_of(config))  # complete already where a mesh started the rank
        self._tracker = Tracker()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._config = config
        self._hooked = config.record_routes and not vllm_compat.installed().returns_routes
        self._seeded = config.vllm.seeded
        self._layout = layout_of(path, config.dtype)
        self._stop_token_ids = stop_tokens_of(path)
        size = sum(entry.num_bytes for entry in self._layout.entries)
        arguments = vllm_compat.engine_arguments(config, path, size)
        # The context says how many tokens a step may have: 8192 for a server on a large GPU, 2048 where nobody says.
        server = UsageContext.OPENAI_API_SERVER
        self._llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=server)
        self._max_len = int(self._llm.model_config.max_model_len)
        self._vocab_size = int(self._llm.model_config.get_vocab_size())
        self._samples: dict[tuple[int, int], Sample] = {}
        self._version = self._num_tokens = self._num_scores = 0
        self._busy_since: float | None = None
        self._busy_seconds = 0.0
        self.drafts: tuple[int, ...] = (0, 0)
        """Tokens that were drafted, and those that were kept, as of the last probe."""
        self._tasks: TaskGroup
        self._failed: Callable[[Exception], None]
        self._opening: asyncio.Task[Any] | None = None
        self._parts: list[RemoteReceiver] = []
        self._shares: int | None = None
        """Calls in which workers make layers ready for a swap; known after the first."""
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_running(self) -> int:
        return min(len(self._samples), self._config.max_running)

    @property
    def num_waiting(self) -> int:
        return len(self._samples) - self.num_running

    @property
    def num_tokens(self) -> int:
        """Of samples that have ended."""
        return self._num_tokens

    @property
    def busy_seconds(self) -> float:
        running = 0.0 if self._busy_since is None else time.perf_counter() - self._busy_since
        return self._busy_seconds + running

    def check(self, request: Request) -> None:
        """Raise ValueError for what could never run, or would run otherwise than asked (VE-4)."""
        sampling = request.sampling
        check_sampling(sampling)
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: vLLM samples at {_LEAST_TEMPERATURE} or more, got {sampling.temperature}; use "
                "0 for greedy decoding"
            )
        if not request.seeds:
            raise ValueError("rollout: expected at least 1 sample of a prompt, got 0; ask for one or more")
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError("rollout: expected a prompt of at least one token, got none; begin it with a start token")
        if length + sampling.max_tokens > self._max_len:
            raise ValueError(
                f"rollout: expected prompt and completion within max_len = {self._max_len} tokens, got {length} + "
                f"{sampling.max_tokens} (max_tokens); raise max_len, lower max_tokens or shorten the prompts"
            )
        check_tokens("prompt", request.prompt_ids, self._vocab_size)
        check_tokens("stop", sampling.stop_token_ids, self._vocab_size)
        if sampling.top_logprobs > self._vocab_size:
            raise ValueError(
                f"sampling.top_logprobs: expected at most the {self._vocab_size} tokens of the model, got "
                f"{sampling.top_logprobs}"
            )

    def open(self, tasks: TaskGroup, failed: Callable[[Exception], None]) -> None:
        self._tasks, self._failed = tasks, failed
        self._opening = tasks.start(self._open_workers(), name="open engine")

    async def _open_workers(self) -> None:
        tensors = [[e.name, e.dtype, list(e.shape)] for e in self._layout.entries]
        wide = self._config.head_dtype == "float32"
        addresses = await self._workers("tutti_open", tensors, os.getpid(), self._hooked, wide)
        for number, address in enumerate(addresses):
            part = RemoteReceiver(f"worker {number} of vLLM", self._worker_ended)
            try:
                await part.connect(address)
            except SyncError as error:
                raise self._fail(error) from error
            self._parts.append(part)
        for path in shared_memory_of(children_of(os.getpid())):
            if path.name.startswith("vllm_dist_"):  # of a CPU's collectives: all have mapped it, nobody tracks the name
                path.unlink(missing_ok=True)

    async def _opened(self) -> None:
        if self._opening is not None:
            await asyncio.shield(self._opening)  # who waits may give up; the others go on waiting

    def _worker_ended(self, error: Exception) -> None:
        if not self._closed:
            self._fail(error)

    def submit(self, request: Request, ended: Ended, sampled: Told | None = None) -> None:
        self.check(request)
        if any((request.id, index) in self._samples for index in range(len(request.seeds))):
            raise ValueError(f"rollout: request id {request.id} is in use; give each request its own id")
        if not self._samples:
            self._busy_since = time.perf_counter()
        for index in range(len(request.seeds)):
            sample = self._samples[request.id, index] = Sample(request, index, ended, sampled)
            self._tasks.start(self._run(sample), name=f"sample {sample.name}")

    def abort(self, request_id: int, sample: int | None = None) -> None:
        ending = [one for one in self._samples.values() if one.request.id == request_id]
        if sample is not None:
            ending = [one for one in ending if one.index == sample]
        for one in ending:
            one.aborted = True
        self._stop(ending)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        for ids in sequences:
            if not 2 <= len(ids) < self._max_len:
                raise ValueError(
                    f"score: expected 2 to {self._max_len - 1} tokens a sequence, one less than max_len, got {len(ids)}"
                )
            check_tokens("scored", ids, self._vocab_size)
        return list(await asyncio.gather(*[self._score(ids) for ids in sequences]))

    async def probe(self) -> None:
        self.drafts = tuple((await self._workers("tutti_probe"))[0])

    def weight_layout(self) -> Layout:
        return self._layout

    async def weight_workers(self) -> Sequence[Part]:
        """One receiver in each worker, in the order of their ranks."""
        await self._opened()
        return self._parts

    async def prepare_weights(self, version: int) -> None:
        """What was staged of a version made ready where a kernel wants it otherwise, a share at a time between steps.
        What is left out is made ready by the swap, which then takes longer. Raises EngineFailed."""
        if self._shares:
            while not all(await self._workers("tutti_process", version)):
                pass
            while not all(await self._workers("tutti_processed")):  # noqa: ASYNC110  # a device can only be asked
                await asyncio.sleep(0.001)

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """What the workers have staged of a version into service. `weights` is empty: they have them.

        Raises:
            ValueError: it is not.
            EngineFailed: the workers have staged something else, or a worker has ended.
        """
        if weights:
            raise ValueError("vLLM's workers receive weights by themselves; publish them through a WeightSession")
        # Who gives up waiting does not stop it: weights and their number move together (VE-3).
        await self._changing(version, "tutti_swap", version)
        if self._shares is None:
            facts = await self._workers("tutti_facts")
            self._shares = max(int(one["shares"]) for one in facts)
            self._tell_how(facts[0])

    async def _changing(self, version: int, method: str, *args: Any) -> None:
        """Let the workers change their weights by this call. Raises EngineFailed."""
        changing = self._tasks.start(self._change(version, method, *args), name=f"change to version {version}")
        failure = await asyncio.shield(changing)
        if failure is not None:
            raise failure

    async def _change(self, version: int, method: str, *args: Any) -> EngineFailed | None:
        """Returns what has failed: its caller, if there is one, raises it."""
        try:
            counts: dict[str, int] = (await self._workers(method, *args))[0]
        except EngineFailed as failure:
            return failure
        # No await from here on: outputs of later steps are looked at with the new borders only.
        self._version = version
        overtaken = []
        for sample in self._samples.values():
            if sample.name in counts:
                sample.borders.append((counts[sample.name], version))
            elif sample.borders and not sample.num_told:  # told of tokens: it has ended, and its last ones are coming
                sample.again = True
                overtaken.append(sample)
        self._stop(overtaken)
        return None

    def _tell_how(self, facts: Mapping[str, Any]) -> None:
        """Once, what new weights cost: layers that a kernel keeps in its own way are reloaded in the pause."""
        log.info(
            "new weights: %(copied_tensors)d tensors of %(copied_bytes)d bytes are copied in the pause, "
            "%(processed_layers)d layers processed before it in %(shares)d shares (%(processed_by_loaders)d by vLLM's "
            "loaders), %(held_layers)d reloaded in it %(held)s",
            facts,
        )

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            shared = shared_memory_of(children_of(os.getpid()))
            for part in self._parts:
                await part.leave()
            await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_SECONDS)
            self._llm = None  # its destructor wants the interpreter alive
            await asyncio.to_thread(self._tracker.end)
            for path in shared:  # what a process of vLLM that had to be killed has left (R10)
                path.unlink(missing_ok=True)

    async def _workers(self, method: str, *args: Any) -> Any:
        """A call of all workers, between two steps. Raises EngineFailed."""
        if method != "tutti_open":
            await self._opened()
        try:
            return await self._llm.collective_rpc(method, args=args)
        except Exception as error:  # whatever a worker raised comes as vLLM's plain Exception
            raise self._fail(error) from error

    def _fail(self, error: Exception) -> EngineFailed:
        failure = EngineFailed(f"vLLM's engine has failed: {error or type(error).__name__}; see the log of this rank")
        self._failed(failure)
        return failure

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _run(self, sample: Sample) -> None:
        """One sample from submission to its end; again from the start when weights overtook it (VE-2)."""
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._opened()
        try:
            output = await self._output_of(sample)
            while sample.again and not sample.aborted:
                if self._hooked:
                    await self._workers("tutti_take_routes", [sample.name])  # of no use to anybody
                sample.attempt += 1
                output = await self._output_of(sample)
            completion = self._completion(sample, output)
            await self._add_routes(sample, output, completion)
        except EngineDeadError as error:
            raise self._fail(error) from error
        finally:
            del self._samples[sample.request.id, sample.index]
            if not self._samples and self._busy_since is not None:
                self._busy_seconds += time.perf_counter() - self._busy_since
                self._busy_since = None
        self._num_tokens += len(completion.token_ids)
        sample.ended(Finished(request_id=sample.request.id, sample=sample.index, completion=completion))

    async def _output_of(self, sample: Sample) -> Any:
        """vLLM's final output, or None if it was stopped before vLLM had it."""
        request = sample.request
        sample.again = False
        sample.borders = [(0, self._version)]
        prompt = {
            "type": "token",
            "prompt_token_ids": list(request.prompt_ids),
            "cache_salt": f"version {self._version}",
        }
        if sample.aborted:
            return None
        queue = await self._llm.add_request(
            sample.name, prompt, parameters_of(sample, self._stop_token_ids, seeded=self._seeded)
        )
        sample.internal = queue.request_id
        if sample.aborted or sample.again:
            await self._end([sample])
        while True:
            output = await queue.get()
            if sample.sampled is not None and not sample.again:
                self._tell(sample, output)
            if output.finished:
                sample.internal = ""
                return output

    def _tell(self, sample: Sample, output: Any) -> None:
        """Tokens that have come since (RE-6)."""
        piece = piece_of(sample, output, sample.num_told)
        sample.num_told += len(piece.token_ids)
        if sample.sampled is not None and len(piece.token_ids):
            sample.sampled(Sampled(request_id=sample.request.id, sample=sample.index, piece=piece))

    def _stop(self, samples: Sequence[Sample]) -> None:
        """Let vLLM drop them; what each has comes out as its final output."""
        if started := [sample for sample in samples if sample.internal]:
            self._tasks.start(self._end(started), name=f"abort {started[0].name}")

    async def _end(self, samples: Sequence[Sample]) -> None:
        """Who is told of its tokens has them here; the others' are kept by the engine, which sends them (VQ-1)."""
        if told := [sample.internal for sample in samples if sample.sampled is not None]:
            await self._llm.abort(told, internal=True)
        if kept := [sample.internal for sample in samples if sample.sampled is None]:
            await self._llm.engine_core.abort_requests_async(kept)

    def _completion(self, sample: Sample, output: Any) -> Completion:
        """vLLM's output as ours."""
        if output is None:
            nothing = np.zeros(0, np.int32)
            return as_completion(Piece(token_ids=nothing, logprobs=np.zeros(0, np.float32), versions=nothing))
        reason = output.outputs[0].finish_reason
        return as_completion(piece_of(sample, output, 0), reason if reason in ("stop", "length") else "abort")

    async def _add_routes(self, sample: Sample, output: Any, completion: Completion) -> None:
        if not self._config.record_routes or output is None:
            return
        length = len(sample.request.prompt_ids) + len(completion.token_ids) - 1
        routes = output.outputs[0].routed_experts
        if self._hooked:
            (routes,) = (await self._workers("tutti_take_routes", [sample.name]))[0]
        if routes is not None and len(routes) >= length:
            kind = np.uint8 if routes.dtype == np.uint8 else np.uint16
            completion.routes = np.ascontiguousarray(routes[:length]).astype(kind)
        elif completion.finish_reason != "abort":
            raise EngineFailed(f"vLLM recorded {routes if routes is None else len(routes)} routes of {length} tokens")

    async def _score(self, ids: Sequence[int]) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        await self._opened()
        self._num_scores += 1
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # A salt of its own: a score never reads what another request computed.
        salt = f"score {self._num_scores}"
        prompt = {"type": "token", "prompt_token_ids": list(ids), "cache_salt": salt}
        output = await (await self._llm.add_request(f"score.{self._num_scores}", prompt, parameters)).get()
        flat = output.prompt_logprobs
        if list(flat.token_ids) != list(ids[1:]):
            raise EngineFailed("vLLM gave logprobs of other tokens than asked for; report this with its version")
        return np.array(flat.logprobs, np.float32)


def load_engine(path: str, config: RolloutConfig) -> VllmEngine:
    """The engine for a folder in Hugging Face format."""
    if config.vllm.weight_transfer == "sync":
        return VllmEngine(path, config)
    from roles.engine_vllm_transfer import TransferEngine

    return TransferEngine(path, config)
