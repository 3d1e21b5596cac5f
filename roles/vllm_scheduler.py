"""vLLM's scheduler but for one thing: it speaks of a sample once, when the sample has ended. Runs in vLLM's engine.

vLLM tells its client of every token of every request: with 512 requests, 512 records of three arrays each step, which
Python packs on one side and unpacks on the other. That is most of what its client does, and a good part of what the
engine does beside a small model. Who asks for the final output only has no use for them, so they stay here until then.

    step -> outputs of vLLM's scheduler -> kept     of requests that want their final output only
                                     '---> sent     of all others, and of those that have ended, with all that was kept

VQ-1: tokens, logprobs and experts of a kept request come in one output, with its end; where it is aborted, among the
      outputs of the next step. Its client must not end it by itself: it knows nothing of its tokens.
VQ-2: requests that want tokens as they come, or logprobs of their prompt, are told as vLLM tells them.
VQ-3: ids travel beside the logprobs, as the sampler has put them there, so that VS-1 can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from roles import vllm_slots
from roles.vllm_sample import packed_logprobs


class _Kept:
    """What a request has so far."""

    __slots__ = ("client", "experts", "ids", "logprobs", "tokens", "top")

    def __init__(self, request: Request) -> None:
        self.client = request.client_index
        self.top = int(request.sampling_params.num_logprobs)
        self.tokens: list[int] = []
        self.ids: list[Any] = []
        """Beside each logprob the id that it belongs to; arrays where the likeliest tokens are asked for as well."""
        self.logprobs: list[Any] = []
        self.experts: list[np.ndarray] = []

    def into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """The last output of a request, with all of them."""
        join = np.concatenate if self.top and self.ids else np.array
        output.new_token_ids = self.tokens
        output.new_logprobs = None
        output.kv_transfer_params = packed_logprobs(join(self.ids), join(self.logprobs))
        output.routed_experts = np.concatenate(self.experts) if self.experts else None
        return output


class _Rows:
    """In place of a step's logprobs: of a request only where they begin, since few are cut out."""

    def __init__(self, lists: LogprobsLists) -> None:
        self._starts = lists.cu_num_generated_tokens

    def slice_request(self, index: int, _count: int) -> int:
        return index if self._starts is None else self._starts[index]


class _Once:
    """Mixed into a scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, _Kept] = {}
        self._aborted: list[tuple[int, EngineCoreOutput]] = []

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        if _wants_only_the_end(request):
            self._kept[request.request_id] = _Kept(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        if request_ids is None:
            names = list(self.requests)  # type: ignore[attr-defined]
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = super().finish_requests(names, finished_status)  # type: ignore[misc]
        for name in names:
            kept = self._kept.pop(name, None)
            if kept is not None and finished_status == RequestStatus.FINISHED_ABORTED:
                output = EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=FinishReason.ABORT)
                self._aborted.append((kept.client, kept.into(output)))
        return ended

    def has_finished_requests(self) -> bool:
        return bool(self._aborted or super().has_finished_requests())  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        lists = model_runner_output.logprobs
        if lists is not None:
            model_runner_output.logprobs = _Rows(lists)
        told: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for outputs in told.values():
            outputs.outputs = self._to_tell(outputs.outputs, lists)
        for client, output in self._aborted:
            told.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._aborted.clear()
        return {client: outputs for client, outputs in told.items() if not _is_empty(outputs)}

    def _to_tell(self, outputs: list[EngineCoreOutput], lists: LogprobsLists | None) -> list[EngineCoreOutput]:
        """Those that are sent now. The loop turns once for each running request and step: nothing slow belongs here."""
        told = []
        ids = [] if lists is None else lists.logprob_token_ids[:, 0].tolist()
        logprobs = [] if lists is None else lists.logprobs[:, 0].tolist()
        for output in outputs:
            row, count = output.new_logprobs, len(output.new_token_ids)
            kept = self._kept.get(output.request_id)
            if kept is None:
                if row is not None:
                    output.new_logprobs = _cut(lists, row, row + count)
                told.append(output)
                continue
            kept.tokens += output.new_token_ids
            if row is not None and kept.top:
                some = _cut(lists, row, row + count)  # copied: a view would keep the whole step
                kept.ids.append(some.logprob_token_ids[:, : kept.top + 1].copy())
                kept.logprobs.append(some.logprobs[:, : kept.top + 1].copy())
            elif row is not None:
                kept.ids += ids[row : row + count]
                kept.logprobs += logprobs[row : row + count]
            if output.routed_experts is not None:
                kept.experts.append(output.routed_experts.copy())
            if output.finish_reason is not None:
                told.append(self._kept.pop(output.request_id).into(output))
        return told


class OnceScheduler(_Once, Scheduler):  # type: ignore[misc]  # vLLM has no types for us
    pass


class OnceAsyncScheduler(_Once, AsyncScheduler):  # type: ignore[misc]
    pass


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """What vLLM calls as its `scheduler_cls`."""
    kind = OnceAsyncScheduler if vllm_config.scheduler_config.async_scheduling else OnceScheduler
    made: Any = kind(vllm_config=vllm_config, **kwargs)
    vllm_slots.install(made.kv_cache_manager)
    return made


def _wants_only_the_end(request: Request) -> bool:
    wanted = request.sampling_params
    return (
        wanted is not None
        and wanted.output_kind == RequestOutputKind.FINAL_ONLY
        and wanted.num_logprobs is not None
        and wanted.prompt_logprobs is None
    )


def _cut(lists: LogprobsLists | None, start: int, end: int) -> LogprobsLists:
    """Rows of a step; as vLLM's own `slice_request`, where the row is known."""
    assert lists is not None
    columns = (lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)
    return LogprobsLists(*[column[start:end] for column in columns], None)


def _is_empty(outputs: EngineCoreOutputs) -> bool:
    return not outputs.outputs and outputs.scheduler_stats is None and not outputs.finished_requests
