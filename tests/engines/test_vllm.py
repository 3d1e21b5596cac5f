"""Promises of roles/engine_vllm.py and roles/vllm_worker.py, by a real vLLM on CPU with tiny random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roles.rollout_rank import Limits, RolloutRank
from roles.seeds import completion_seed
from roles.types import Completion, Sampling
from sync.layout import LayoutError
from sync.transport import SyncError
from tests.engines.models import (
    build,
    check_versions_over_a_swap,
    checkpoint,
    forced_logits,
    forced_logprobs,
    forced_routes,
)
from tests.engines.sending import put
from tests.roles.tiny import END
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = (3, 1, 4, 1, 5, 9)
ENDLESS = Sampling(ignore_eos=True, max_tokens=300)


def seeds_of(position: int, n: int) -> tuple[int, ...]:
    return tuple(completion_seed(7, position, sample) for sample in range(n))


async def publish(rank: RolloutRank, seed: int, folder: Path) -> Any:
    """Weights of that seed under the next version; returns the model."""
    model = build("Qwen3Moe", seed)
    await put(rank, checkpoint(model, folder), rank._engine.version + 1)
    return model


async def until_decoding(rank: RolloutRank, call: asyncio.Task[Any]) -> None:
    """Until steps have been made for it for a while; the gate is the worker, not a clock."""
    for _ in range(30):
        await rank._engine.probe()
    assert not call.done()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}]
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from_ve1(
    rank: RolloutRank, tmp_path: Path, sampling: dict
) -> None:
    model = await publish(rank, 0, tmp_path)
    for completion in await rank.generate(PROMPT, Sampling(max_tokens=24, **sampling), seeds_of(0, 3)):
        logits = forced_logits(model, [*PROMPT, *completion.token_ids.tolist()])[len(PROMPT) - 1 : -1]
        logits = logits / sampling.get("temperature", 1.0)
        kept = torch.full_like(logits, -torch.inf)
        for row in range(len(logits)):
            order = logits[row].argsort(descending=True)[: sampling.get("top_k") or None]
            mass = logits[row, order].softmax(-1)
            order = order[: int((mass.cumsum(-1) - mass < sampling.get("top_p", 1.0)).sum())]
            kept[row, order] = logits[row, order]
        tokens = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
        expected = kept.log_softmax(-1).gather(1, tokens)[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
        assert completion.text.split() == [f"w{token}" for token in completion.token_ids if token != END]


async def test_greedy_is_argmax_with_logprob_0(rank: RolloutRank, tmp_path: Path) -> None:
    model = await publish(rank, 0, tmp_path)
    (completion,) = await rank.generate(PROMPT, Sampling(max_tokens=12, temperature=0.0), seeds_of(0, 1))
    ids = list(PROMPT)
    for token in completion.token_ids.tolist():
        assert token == int(forced_logits(model, ids)[-1].argmax())
        ids.append(token)
    assert completion.logprobs.tolist() == [0.0] * len(completion.token_ids)


async def test_completions_depend_on_their_seeds_and_not_on_the_crowd_re3(rank: RolloutRank, tmp_path: Path) -> None:
    await publish(rank, 0, tmp_path)
    sampling = Sampling(max_tokens=20)
    alone = await rank.generate(PROMPT, sampling, seeds_of(1, 3))
    crowd = await asyncio.gather(*(rank.generate(PROMPT, sampling, seeds_of(i, 3)) for i in range(5)))
    for mine, theirs in zip(alone, crowd[1], strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    assert len({tuple(c.token_ids.tolist()) for group in crowd for c in group}) == 15


async def test_routes_are_those_that_transformers_takes(rank: RolloutRank, tmp_path: Path) -> None:
    model = await publish(rank, 0, tmp_path)
    calls = (rank.generate(PROMPT[: 2 + i], Sampling(max_tokens=6 + 5 * i), seeds_of(i, 2)) for i in range(4))
    for i, completions in enumerate(await asyncio.gather(*calls)):
        for completion in completions:
            ids = [*PROMPT[: 2 + i], *completion.token_ids.tolist()][:-1]
            assert completion.routes is not None
            assert completion.routes.dtype == np.uint8
            # The order of two experts of nearly equal weight is nobody's business.
            assert np.sort(completion.routes).tolist() == np.sort(forced_routes(model, ids)).tolist()


async def test_scores_are_a_teacher_forced_forward(rank: RolloutRank, tmp_path: Path) -> None:
    model = await publish(rank, 0, tmp_path)
    sequences = [[*PROMPT, 8, 7, 6], [1, 2]]
    for ids, got in zip(sequences, await rank.score(sequences), strict=True):
        np.testing.assert_allclose(got, forced_logprobs(model, ids[:1], np.array(ids[1:])), atol=1e-4)


async def test_each_reload_is_exact_also_the_second_and_third(rank: RolloutRank, tmp_path: Path) -> None:
    for seed in (1, 2, 1):
        model = await publish(rank, seed, tmp_path / str(seed))
        (got,) = await rank.score([[*PROMPT, 8, 7, 6]])
        np.testing.assert_allclose(got, forced_logprobs(model, PROMPT[:1], np.array([*PROMPT[1:], 8, 7, 6])), atol=1e-4)


async def test_a_request_that_spans_an_update_has_exact_versions_w5(rank: RolloutRank, tmp_path: Path) -> None:
    old = await publish(rank, 1, tmp_path / "old")
    first = rank._engine.version
    call = asyncio.create_task(rank.generate(PROMPT, ENDLESS, seeds_of(0, 3)))
    await until_decoding(rank, call)
    new = await publish(rank, 2, tmp_path / "new")
    for completion in await call:
        check_versions_over_a_swap(completion, first, 300, old, new, PROMPT)


@pytest.mark.parametrize("update", ["drain", "resume"])
async def test_the_other_modes_lose_nothing_and_match_their_labels_rr4(
    rank: RolloutRank, tmp_path: Path, update: Any
) -> None:
    rank._config = type(rank._config)(engine="vllm", update=update, record_routes=True)
    old = await publish(rank, 1, tmp_path / "old")
    first = rank._engine.version
    call = asyncio.create_task(rank.generate(PROMPT, ENDLESS, seeds_of(0, 2)))
    await until_decoding(rank, call)
    new = await publish(rank, 2, tmp_path / "new")
    for completion in await call:
        assert len(completion.token_ids) == 300
        assert set(completion.versions.tolist()) == ({first} if update == "drain" else {first, first + 1})
        for version, model in ((first, old), (first + 1, new)):
            mine = completion.versions == version
            expected = forced_logprobs(model, PROMPT, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=2e-4)
        assert completion.routes is not None
        assert completion.routes.shape == (len(PROMPT) + 299, 2, 2)


async def test_more_calls_than_room_wait_and_those_overtaken_by_weights_start_anew_re4(
    rank: RolloutRank, tmp_path: Path
) -> None:
    old = await publish(rank, 1, tmp_path / "old")
    first = rank._engine.version
    calls = [
        asyncio.create_task(rank.generate(PROMPT, Sampling(ignore_eos=True, max_tokens=120), seeds_of(i, 4)))
        for i in range(5)
    ]
    await until_decoding(rank, calls[-1])
    new = await publish(rank, 2, tmp_path / "new")
    seen = set()
    for group in await asyncio.gather(*calls):
        for completion in group:
            versions = completion.versions
            seen.add((int(versions[0]), int(versions[-1])))
            if versions[0] == versions[-1]:
                model = old if versions[0] == first else new
                np.testing.assert_allclose(
                    completion.logprobs, forced_logprobs(model, PROMPT, completion.token_ids), atol=2e-4
                )
    assert (first + 1, first + 1) in seen


async def test_abort_is_legal_in_any_state(rank: RolloutRank) -> None:
    rank._engine.abort(123_456)
    cut = await rank.generate(PROMPT, Sampling(ignore_eos=True, max_tokens=500), seeds_of(0, 8), Limits(seconds=0.1))
    assert {c.finish_reason for c in cut} == {"abort"}
    sampling = Sampling(ignore_eos=True, max_tokens=500)
    tasks = [asyncio.create_task(rank.generate(PROMPT, sampling, seeds_of(i, 4))) for i in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # not yet submitted
    await until_decoding(rank, tasks[3])
    tasks[1].cancel()  # running
    tasks[3].cancel()  # waiting
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [True, True, False, True]
    await until(lambda: rank._engine.num_running == 0)


async def test_the_engine_speaks_of_a_sample_once_vq1(rank: RolloutRank, monkeypatch: pytest.MonkeyPatch) -> None:
    processor: Any = rank._engine._llm.output_processor  # type: ignore[attr-defined]
    before, told = processor.process_outputs, list[Any]()

    def process(outputs: Any, *rest: Any, **named: Any) -> Any:
        told.extend(outputs)
        return before(outputs, *rest, **named)

    monkeypatch.setattr(processor, "process_outputs", process)
    completions = await rank.generate(PROMPT, Sampling(ignore_eos=True, max_tokens=20), seeds_of(9, 4))
    assert [len(one.token_ids) for one in completions] == [20] * 4
    assert sorted(len(one.new_token_ids) for one in told) == [20] * 4


async def test_enough_samples_stop_the_others(rank: RolloutRank) -> None:
    completions: list[Completion] = await rank.generate(
        PROMPT, Sampling(max_tokens=300), seeds_of(5, 8), Limits(enough=2)
    )
    assert sum(c.finish_reason != "abort" for c in completions) >= 2
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)


@pytest.mark.parametrize(
    ("prompt", "sampling", "n", "text"),
    [
        ((), {}, 1, "prompt of at least one token"),
        (PROMPT, {"max_tokens": 507}, 1, "within max_len = 512"),
        ((1, 61), {}, 1, r"prompt tokens in 0\.\.60, got 1 to 61"),
        (PROMPT, {"stop_token_ids": (99,)}, 1, r"stop tokens in 0\.\.60"),
        (PROMPT, {}, 0, "at least 1 sample"),
        (PROMPT, {"temperature": 0.001}, 1, "samples at 0.01 or more"),
        (PROMPT, {"top_p": 0.0}, 1, r"number in \(0, 1\]"),
    ],
)
async def test_what_can_never_run_is_refused_and_harms_nobody(
    rank: RolloutRank, prompt: tuple, sampling: dict, n: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await rank.generate(prompt, Sampling(**{"max_tokens": 4, **sampling}), seeds_of(0, n))
    assert len(await rank.generate(PROMPT, Sampling(max_tokens=2), seeds_of(0, 1))) == 1


async def test_weights_that_do_not_fit_are_refused_with_nothing_changed(rank: RolloutRank, tmp_path: Path) -> None:
    model = await publish(rank, 0, tmp_path)
    version = rank._engine.version
    weights = checkpoint(build("Qwen3Moe", 3), tmp_path / "other")
    weights.pop("model.norm.weight")
    with pytest.raises(LayoutError, match=r"model.norm.weight"):
        await put(rank, weights, version + 1)
    with pytest.raises(SyncError, match="nothing is staged"):
        await rank.sync_commit(version + 1)
    assert rank._engine.version == version
    (got,) = await rank.score([[*PROMPT]])
    np.testing.assert_allclose(got, forced_logprobs(model, PROMPT[:1], np.array(PROMPT[1:])), atol=1e-4)


async def test_the_likeliest_tokens_stand_beside_the_sampled_ones(rank: RolloutRank, tmp_path: Path) -> None:
    model = await publish(rank, 0, tmp_path)
    for temperature, top_k in ((1.0, 0), (0.7, 0), (0.0, 0), (1.0, 2)):
        sampling = Sampling(max_tokens=12, temperature=temperature, top_k=top_k, top_logprobs=4)
        (completion,) = await rank.generate(PROMPT, sampling, seeds_of(0, 1))
        assert completion.top_ids is not None
        assert completion.top_logprobs is not None
        logits = forced_logits(model, [*PROMPT, *completion.token_ids.tolist()])[len(PROMPT) - 1 : -1]
        best = (logits / (temperature or 1.0)).topk(4, dim=-1)
        kept = best.values.clone()
        if top_k:
            kept[:, top_k:] = -torch.inf
            normal = kept.logsumexp(-1, keepdim=True)
        else:
            normal = (logits / (temperature or 1.0)).logsumexp(-1, keepdim=True)
        count = top_k or 4
        assert completion.top_ids[:, :count].tolist() == best.indices[:, :count].tolist()
        np.testing.assert_allclose(completion.top_logprobs, (kept - normal).numpy(), atol=1e-4)


async def test_tokens_are_told_as_they_come_and_are_those_of_the_completion_re6(
    rank: RolloutRank, tmp_path: Path
) -> None:
    await publish(rank, 1, tmp_path / "old")
    first = rank._engine.version
    pieces: list[Any] = []

    async def read() -> None:
        sampling = Sampling(ignore_eos=True, max_tokens=200, top_logprobs=2)
        pieces.extend([piece async for piece in rank.stream(PROMPT, sampling, seeds_of(3, 1)[0])])

    reading = asyncio.create_task(read())
    await until_decoding(rank, reading)
    await publish(rank, 2, tmp_path / "new")
    await reading
    completion = pieces.pop().completion
    assert len(pieces) > 20
    for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs"):
        told = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(told, getattr(completion, name))
    assert set(completion.versions.tolist()) == {first, first + 1}


async def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(rank: RolloutRank, tmp_path: Path) -> None:
    await publish(rank, 0, tmp_path)
    (whole,) = await rank.generate(PROMPT, Sampling(max_tokens=40), seeds_of(0, 1))
    words = whole.text.split()
    stop = f"{words[5]} {words[6]}"
    ends = next(i for i in range(1, len(words)) if f"{words[i - 1]} {words[i]}" == stop) + 1
    (cut,) = await rank.generate(PROMPT, Sampling(max_tokens=40, stop=(stop,)), seeds_of(0, 1))
    assert cut.token_ids.tolist() == whole.token_ids[:ends].tolist()
    np.testing.assert_array_equal(cut.logprobs, whole.logprobs[:ends])
    assert cut.finish_reason == "stop"
    assert cut.routes is not None
    assert len(cut.routes) == len(PROMPT) + ends - 1
