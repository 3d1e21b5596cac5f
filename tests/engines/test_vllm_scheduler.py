"""What vLLM's engine tells of a sample, and when: roles/vllm_scheduler.py over an imitated scheduler."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roles.engine import EngineFailed, Request
from roles.types import Sampling
from roles.vllm_sample import Sample, piece_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's imports
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make engines` runs these")
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import RequestStatus

    from roles.vllm_scheduler import _Once


class Base:
    """Of vLLM's scheduler what ours calls; `steps` are the outputs it will make, by client."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.rows: dict[str, int] = {}
        self.outputs: list[EngineCoreOutput] = []

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, names: Any, status: Any) -> list[str]:
        return [name for name in names if self.requests.pop(name, None)]

    def has_finished_requests(self) -> bool:
        return False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        logprobs = model_runner_output.logprobs
        for output in self.outputs:
            if logprobs and output.request_id in self.rows:
                count = len(output.new_token_ids)
                output.new_logprobs = logprobs.slice_request(self.rows[output.request_id], count)
        return {0: EngineCoreOutputs(outputs=self.outputs)} if self.outputs else {}


class Scheduler(_Once, Base):
    pass


def request(name: str, kind: Any = RequestOutputKind.FINAL_ONLY, **wanted: Any) -> Any:
    parameters = SamplingParams(output_kind=kind, **{"logprobs": 0, **wanted})
    return SimpleNamespace(request_id=name, client_index=0, sampling_params=parameters)


def step(scheduler: Any, ids: list, logprobs: list, *outputs: EngineCoreOutput, starts: Any = None) -> list:
    """Run one; what is sent of it."""
    scheduler.outputs = list(outputs)
    columns = (np.array(ids), np.array(logprobs, np.float32), np.zeros(len(ids), np.int64))
    lists = LogprobsLists(*columns, starts) if ids else None
    told = scheduler.update_from_output(None, SimpleNamespace(logprobs=lists))
    return told[0].outputs if told else []


def piece(output: EngineCoreOutput, top: int = 0) -> Any:
    """As the engine's other side reads it."""
    sample = Sample(Request(id=1, prompt_ids=(1,), seeds=(0,), sampling=Sampling(top_logprobs=top)), 0, print, None)
    sample.borders = [(0, 3)]
    one = SimpleNamespace(token_ids=output.new_token_ids, logprobs=None)
    return piece_of(sample, SimpleNamespace(outputs=[one], kv_transfer_params=output.kv_transfer_params), 0)


def test_a_sample_is_told_once_and_who_reads_along_at_each_step_vq1_vq2() -> None:
    scheduler = Scheduler()
    scheduler.add_request(request("kept"))
    scheduler.add_request(request("read", RequestOutputKind.CUMULATIVE))
    scheduler.rows = {"kept": 0, "read": 1}
    told = step(scheduler, [[5], [8]], [[-1], [-2]], EngineCoreOutput("kept", [5]), EngineCoreOutput("read", [8]))
    assert [one.request_id for one in told] == ["read"]
    assert told[0].new_logprobs.logprob_token_ids.tolist() == [[8]]
    assert told[0].new_logprobs.logprobs.tolist() == [[-2]]
    assert step(scheduler, [[6], [8]], [[-3], [-2]], EngineCoreOutput("kept", [6])) == []
    (told_last,) = step(
        scheduler, [[7]], [[-4]], EngineCoreOutput("kept", [7], finish_reason=FinishReason.STOP, stop_reason=7)
    )
    assert (told_last.new_token_ids, told_last.finish_reason, told_last.stop_reason) == (
        [5, 6, 7],
        FinishReason.STOP,
        7,
    )
    found = piece(told_last)
    assert found.token_ids.tolist() == [5, 6, 7]
    assert found.versions.tolist() == [3, 3, 3]
    assert found.logprobs.tolist() == [-1, -3, -4]


def test_an_aborted_sample_is_told_with_the_next_step_even_if_nothing_else_runs_vq1() -> None:
    scheduler = Scheduler()
    for name in ("some", "none", "read"):
        scheduler.add_request(
            request(name, RequestOutputKind.CUMULATIVE if name == "read" else RequestOutputKind.FINAL_ONLY)
        )
    scheduler.rows = {"some": 0}
    step(scheduler, [[5]], [[-1]], EngineCoreOutput("some", [5]))
    assert not scheduler.has_finished_requests()
    scheduler.finish_requests(["some", "unknown"], RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests("some", RequestStatus.FINISHED_ABORTED)  # twice is once
    assert scheduler.has_finished_requests()
    some, none = step(scheduler, [], [])
    assert (some.request_id, some.new_token_ids, some.finish_reason) == ("some", [5], FinishReason.ABORT)
    assert (none.request_id, none.new_token_ids, none.finish_reason) == ("none", [], FinishReason.ABORT)
    assert piece(some).logprobs.tolist() == [-1]
    assert piece(none).logprobs.tolist() == []
    assert not scheduler.has_finished_requests()
    assert step(scheduler, [], []) == []


def test_the_likeliest_tokens_and_experts_of_all_steps_come_with_the_end() -> None:
    """Also where a neighbour asks for more of them, and where a step samples several tokens of one."""
    scheduler = Scheduler()
    scheduler.add_request(request("top", logprobs=1))
    scheduler.rows = {"top": 1}
    first, second = (
        EngineCoreOutput("top", ids, routed_experts=np.full((len(ids), 1, 2), ids[0])) for ids in ([5, 6], [7])
    )
    second.finish_reason = FinishReason.LENGTH
    rows = [[9, 0, 0], [5, 2, 0], [6, 6, 0]]
    assert step(scheduler, rows, [[0, 0, 0], [-3, -1, -9], [-1, -1, -9]], first, starts=[0, 1]) == []
    (told,) = step(scheduler, [[9, 0, 0], [7, 4, 0]], [[0, 0, 0], [-2, -1, -9]], second)
    found = piece(told, top=1)
    assert found.logprobs.tolist() == [-3, -1, -2]
    assert found.top_ids.tolist() == [[2], [6], [4]]
    assert found.top_logprobs.tolist() == [[-1], [-1], [-1]]
    assert told.routed_experts[:, 0, 0].tolist() == [5, 5, 7]


def test_logprobs_of_other_tokens_are_an_error_vs1() -> None:
    scheduler = Scheduler()
    scheduler.add_request(request("kept"))
    scheduler.rows = {"kept": 0}
    (told,) = step(scheduler, [[4]], [[-1]], EngineCoreOutput("kept", [5], finish_reason=FinishReason.STOP))
    with pytest.raises(EngineFailed, match="other tokens"):
        piece(told)


def test_scores_of_a_prompt_are_told_as_vllm_tells_them_vq2() -> None:
    scheduler = Scheduler()
    scheduler.add_request(request("score", prompt_logprobs=0, max_tokens=1))
    first = EngineCoreOutput("score", [5], new_prompt_logprobs_tensors="theirs", finish_reason=FinishReason.LENGTH)
    (told,) = step(scheduler, [], [], first)
    assert told is first
    assert told.new_prompt_logprobs_tensors == "theirs"
    assert told.kv_transfer_params is None
