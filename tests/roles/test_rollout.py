"""Promises of roles/rollout.py: the rank as a plain object, then the handle over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from roles.engine import Finished
from roles.engine_torch import TorchEngine
from roles.pieces import as_piece, cut, joined_piece
from roles.rollout import Rollout, RolloutConfig, RolloutRank, RolloutStats
from roles.rollout_call import Limits
from roles.seeds import completion_seed
from roles.types import Dropped, Group, Sampling
from runtime import ActorError, ProcessDied, this_host
from tests.roles.tiny import END, prompt_at, save_tiny_policy, tiny_model
from tests.waiting import until

FOREVER = Sampling(max_tokens=16_000, ignore_eos=True)
"""Runs for much longer than a test looks at it."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a tiny model take so little that a completion would end before a test has looked at it."""
    step = TorchEngine.step

    def later(engine: TorchEngine) -> list[Finished]:
        time.sleep(0.0005 if engine.num_running else 0)
        return step(engine)

    monkeypatch.setattr(TorchEngine, "step", later)


@asynccontextmanager
async def rank_of(policy: str, **config: Any) -> AsyncIterator[RolloutRank]:
    rank = RolloutRank(RolloutConfig(**config), policy)
    try:
        yield rank
    finally:
        await rank.tasks.close()


@asynccontextmanager
async def endless_rank(policy: str, **config: Any) -> AsyncIterator[RolloutRank]:
    """Its model has no end token."""
    rank = RolloutRank(RolloutConfig(**config), policy, TorchEngine(tiny_model(), max_running=4))
    try:
        yield rank
    finally:
        await rank.tasks.close()


def seeds_of(position: int, n: int) -> tuple[int, ...]:
    return tuple(completion_seed(0, position, sample) for sample in range(n))


async def until_running(rank: RolloutRank, count: int) -> None:
    await until(rank.stats, lambda stats: stats.running == count)


async def test_generate_returns_one_completion_per_seed_with_text_and_versions(policy: str) -> None:
    async with rank_of(policy) as rank:
        completions = await rank.generate((1, 2, 3), Sampling(max_tokens=12), seeds_of(0, 5))
        assert len(completions) == 5
        for completion in completions:
            ids = completion.token_ids.tolist()
            assert len(ids) == len(completion.logprobs) == len(completion.versions)
            assert completion.finish_reason == ("stop" if ids[-1] == END else "length")
            assert completion.text.split() == [f"w{token}" for token in ids if token != END]
        stats = await rank.stats()
        assert (stats.running, stats.waiting, stats.version) == (0, 0, 0)
        assert stats.tokens == sum(len(c.token_ids) for c in completions)
        assert stats.busy_seconds > 0


async def test_calls_share_the_engine_and_each_gets_its_own_samples(policy: str) -> None:
    async with rank_of(policy, max_running=8) as rank:
        sampling = Sampling(max_tokens=20)
        together = await asyncio.gather(
            *(rank.generate(prompt_at(i).token_ids, sampling, seeds_of(i, 1 + i % 4)) for i in range(12))
        )
        for i, completions in enumerate(together):
            alone = await rank.generate(prompt_at(i).token_ids, sampling, seeds_of(i, 1 + i % 4))
            assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in alone]


async def test_a_cancelled_call_frees_its_rows_rr3(policy: str) -> None:
    async with rank_of(policy, max_running=4) as rank:
        first = asyncio.create_task(rank.generate((1, 2), FOREVER, seeds_of(0, 3)))
        await until_running(rank, 3)
        waiting = asyncio.create_task(rank.generate((1, 2), FOREVER, seeds_of(1, 4)))
        await asyncio.sleep(0)
        assert (await rank.stats()).waiting == 4
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        await until_running(rank, 0)
        assert (await rank.stats()).waiting == 0
        assert len(await rank.generate((1, 2), Sampling(max_tokens=2), seeds_of(2, 4))) == 4
        assert rank._calls.requests == {}


async def test_a_request_that_can_never_run_raises_and_harms_nobody(policy: str) -> None:
    async with rank_of(policy, max_running=4, max_len=32) as rank:
        with pytest.raises(ValueError, match="within max_len = 32"):
            await rank.generate((1, 2), Sampling(max_tokens=31), seeds_of(0, 1))
        assert len(await rank.generate((1, 2), Sampling(max_tokens=30), seeds_of(0, 1))) == 1


async def test_weights_swap_between_steps_and_running_calls_go_on_rr1_rr4(policy: str) -> None:
    async with rank_of(policy, max_running=4) as rank:
        new = {name: parameter.detach() for name, parameter in tiny_model(seed=1).named_parameters()}
        long = Sampling(max_tokens=200, ignore_eos=True)
        running = asyncio.create_task(rank.generate((1, 2), long, seeds_of(0, 3)))
        waiting = asyncio.create_task(rank.generate((1, 2), Sampling(max_tokens=5), seeds_of(1, 4)))
        await until_running(rank, 3)
        await rank.apply_weights(new, 7)
        assert (await rank.stats()).version == 7
        for completion in await running:
            versions = completion.versions
            assert len(versions) == 200
            assert set(versions.tolist()) == {0, 7}
            assert bool((np.diff(versions) >= 0).all())
        assert {v for c in await waiting for v in c.versions.tolist()} == {7}


@pytest.mark.parametrize("update", ["drain", "resume"])
async def test_no_sample_is_lost_over_an_update_in_the_other_modes_rr4(policy: str, update: str) -> None:
    async with rank_of(policy, max_running=4, update=update) as rank:
        new = {name: parameter.detach() for name, parameter in tiny_model(seed=1).named_parameters()}
        long = Sampling(max_tokens=150, ignore_eos=True)
        running = asyncio.create_task(rank.generate((1, 2), long, seeds_of(0, 3)))
        waiting = asyncio.create_task(rank.generate((1, 2), Sampling(max_tokens=5), seeds_of(1, 4)))
        await until_running(rank, 3)
        swapping = asyncio.create_task(rank.apply_weights(new, 7))
        await asyncio.sleep(0)
        late = await rank.generate((1, 2), Sampling(max_tokens=5), seeds_of(2, 2))
        await swapping
        assert {v for c in late for v in c.versions.tolist()} == {7}  # RR-6
        for completion in await running:
            assert len(completion.token_ids) == len(completion.versions) == len(completion.logprobs) == 150
            assert set(completion.versions.tolist()) == ({0} if update == "drain" else {0, 7})
            assert completion.finish_reason == "length"
        assert len(await waiting) == 4
        assert rank._calls.requests == {}


async def test_a_request_that_is_being_admitted_is_waited_for_by_an_update_rr6(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in no queue any more and in no row yet, for as long as its prompt is computed."""
    engine, main_thread = TorchEngine(tiny_model(), max_running=4), ThreadPoolExecutor(1)
    prefill, began, goes_on = engine._decoder.prefill, threading.Event(), threading.Event()

    def slow(*args: Any) -> torch.Tensor:
        began.set()
        assert goes_on.wait(30)
        return prefill(*args)

    async def on_main_thread(function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(main_thread, function, *args)

    monkeypatch.setattr(engine._decoder, "prefill", slow)
    monkeypatch.setattr("roles.stepping.on_main_thread", on_main_thread)
    rank = RolloutRank(RolloutConfig(max_running=4, update="drain"), policy, engine)
    sampling = Sampling(max_tokens=150, ignore_eos=True)
    call = asyncio.create_task(rank.generate((1, 2), sampling, seeds_of(0, 2)))
    await until(began.is_set, during=[call])
    new = {name: parameter.detach() for name, parameter in tiny_model(seed=1).named_parameters()}
    swapping = asyncio.create_task(rank.apply_weights(new, 7))
    for _ in range(10):
        await asyncio.sleep(0)
    goes_on.set()
    for completion in await call:
        assert len(completion.token_ids) == 150
        assert set(completion.versions.tolist()) == {0}
    await swapping
    assert (await rank.stats()).waiting == 0
    await rank.tasks.close()
    main_thread.shutdown()


async def test_tokens_after_a_resumed_update_have_the_logprobs_of_the_new_weights_rr4(policy: str) -> None:
    async with rank_of(policy, max_running=4, update="resume") as rank:
        old, new = tiny_model(seed=0), tiny_model(seed=1)
        call = asyncio.create_task(rank.generate((1, 2), Sampling(max_tokens=90, ignore_eos=True), seeds_of(0, 2)))
        await until_running(rank, 2)
        await rank.apply_weights({name: p.detach() for name, p in new.named_parameters()}, 1)
        for completion in await call:
            ids = torch.tensor([[1, 2, *completion.token_ids.tolist()]])
            for version, model in ((0, old), (1, new)):
                with torch.no_grad():
                    logits = model(input_ids=ids, use_cache=False).logits[0, 1:-1]
                expected = logits.log_softmax(-1).gather(1, ids[0, 2:, None])[:, 0].numpy()
                mine = completion.versions == version
                assert mine.any()
                np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=1e-4)


async def test_enough_samples_end_a_call_and_the_others_come_back_as_they_are(policy: str) -> None:
    async with rank_of(policy, max_running=8) as rank:
        plain = await rank.generate((1, 2), Sampling(max_tokens=400), seeds_of(3, 8))
        completions = await rank.generate((1, 2), Sampling(max_tokens=400), seeds_of(3, 8), Limits(enough=3))
        ended = [i for i, c in enumerate(completions) if c.finish_reason != "abort"]
        assert len(ended) >= 3
        for index, completion in enumerate(completions):
            tokens = plain[index].token_ids[: len(completion.token_ids)].tolist()
            assert completion.token_ids.tolist() == tokens  # a part of what it would have become
        await until_running(rank, 0)


async def test_a_stop_string_ends_a_completion_with_its_token_and_costs_no_other_rc1(policy: str) -> None:
    async with endless_rank(policy) as rank:
        whole = await rank.generate((1, 2, 3), Sampling(max_tokens=40), seeds_of(0, 3))
        stop = whole[1].text[20:26]  # from one word into another
        sampling = Sampling(max_tokens=40, stop=("w77", stop))
        for one, before in zip(await rank.generate((1, 2, 3), sampling, seeds_of(0, 3)), whole, strict=True):
            count = len(one.token_ids)
            assert one.token_ids.tolist() == before.token_ids[:count].tolist()
            np.testing.assert_allclose(one.logprobs, before.logprobs[:count], atol=1e-5)
            ends = [n for n in range(1, 41) if stop in rank._text(before.token_ids[:n].tolist())]
            assert (one.finish_reason, count) == (("stop", ends[0]) if ends else ("length", 40))
        sampled = (await rank.stats()).tokens
        (one,) = await rank.generate((1, 2, 3), sampling, seeds_of(0, 3)[1:2])
        assert one.finish_reason == "stop"
        assert stop in one.text
        assert (await rank.stats()).tokens - sampled == len(one.token_ids) < 40
        assert rank._calls.requests == {}


async def test_a_special_token_can_be_named_by_its_text(policy: str) -> None:
    async with rank_of(policy) as rank:
        sampling = Sampling(max_tokens=400, stop=("<end>",), stop_token_ids=(0,))
        (one,) = await rank.generate((1, 2, 3), sampling, (7,))
        assert one.finish_reason == "stop"
        assert one.token_ids[-1] in (0, END)
        assert END not in one.token_ids[:-1]


async def test_a_stop_string_is_found_across_an_update_that_interrupts_rr4(policy: str) -> None:
    async with endless_rank(policy, update="resume") as rank:
        weights = dict(tiny_model(0).named_parameters())
        (whole,) = await rank.generate((1, 2, 3), Sampling(max_tokens=800), (7,))
        text = whole.text
        half = len(text) // 2
        stop = next(text[i : i + 12] for i in range(half, len(text)) if text.find(text[i : i + 12]) == i)
        sampling = Sampling(max_tokens=800, stop=(stop,))
        call = asyncio.create_task(rank.generate((1, 2, 3), sampling, (7,)))
        await until_running(rank, 1)
        for version in range(1, 6):  # the same weights, so that the tokens are the same
            await rank.apply_weights(weights, version)
            await asyncio.sleep(0.02)
        (one,) = await call
        expected = next(n for n in range(1, 801) if stop in rank._text(whole.token_ids[:n].tolist()))
        assert (one.finish_reason, len(one.token_ids)) == ("stop", expected)
        assert one.token_ids.tolist() == whole.token_ids[:expected].tolist()
        assert len(set(one.versions.tolist())) > 1


async def test_a_stream_tells_the_tokens_of_its_completion_one_by_one_rc2(policy: str) -> None:
    async with rank_of(policy) as rank:
        sampling = Sampling(max_tokens=30, ignore_eos=True, top_logprobs=2)
        (whole,) = await rank.generate((1, 2, 3), sampling, (7,))
        pieces = [piece async for piece in rank.stream((1, 2, 3), sampling, 7)]
        assert [piece.completion is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        told = joined_piece(pieces[:-1])
        completion = pieces[-1].completion
        assert completion is not None
        for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(told, name), getattr(completion, name))
        assert told.token_ids.tolist() == whole.token_ids.tolist()
        assert completion.text == whole.text
        assert len(pieces) > 10
        # What is there already is not told again, and the rest is drawn with the numbers that it would have had.
        had = cut(told, 12)
        rest = [piece async for piece in rank.stream((1, 2, 3), sampling, 7, had)]
        assert joined_piece(rest[:-1]).token_ids.tolist() == whole.token_ids[12:].tolist()
        assert rest[-1].completion is not None
        assert rest[-1].completion.token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.parametrize("end", ["length", "stop token", "end token", "stop string"])
async def test_a_stream_whose_replica_died_after_its_last_token_goes_no_further_rh1(policy: str, end: str) -> None:
    async with rank_of(policy) as rank:
        (free,) = await rank.generate((1, 2, 3), Sampling(max_tokens=12, ignore_eos=True), (7,))
        latest = int(free.token_ids[-1])
        sampling = Sampling(max_tokens=12)
        if end != "length":
            sampling = Sampling(max_tokens=40)
        if end == "stop token":
            sampling = Sampling(max_tokens=40, stop_token_ids=(latest,))
        if end == "end token":
            rank._stop_token_ids = (latest,)
        if end == "stop string":
            sampling = Sampling(max_tokens=40, stop=(free.text[-3:],))
        (last,) = [piece async for piece in rank.stream((1, 2, 3), sampling, 7, as_piece(free))]
        assert last.completion is not None
        assert last.completion.token_ids.tolist() == free.token_ids.tolist()
        assert last.completion.text == free.text
        assert last.completion.finish_reason == ("length" if end == "length" else "stop")


async def test_a_slow_reader_is_told_the_tokens_that_came_meanwhile_rc2(policy: str) -> None:
    async with rank_of(policy) as rank:
        told = list[int]()
        async for piece in rank.stream((1, 2, 3), Sampling(max_tokens=20, ignore_eos=True), 7):
            told += piece.token_ids.tolist()
            # the completion ends while this piece is looked at
            await until(rank.stats, lambda stats: stats.running == 0, pause=0.001)
            if piece.completion is not None:
                assert told == piece.completion.token_ids.tolist()
        assert len(told) == 20


async def test_a_stream_that_is_left_frees_its_row_rr3(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=2), policy)
        async with aclosing(rollout.stream((1, 2), FOREVER, 3)) as stream:
            async for piece in stream:
                assert len(piece.token_ids) >= 1
                break
        await until(rollout.mesh.stats.call_one, lambda stats: stats.running == 0)
        assert rollout.outstanding == (0,)


async def test_a_stream_goes_on_where_its_replica_died_rh1(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=2, max_restarts=0), policy)
        assert rollout.procs is not None
        sampling = Sampling(max_tokens=1500, ignore_eos=True)
        expected = await rollout.complete((1, 2), sampling, 3)
        tokens: list[int] = []
        async for piece in rollout.stream((1, 2), sampling, 3):
            if len(tokens) < 20 <= len(tokens) + len(piece.token_ids):
                os.kill(rollout.procs.pids[0], signal.SIGKILL)
            tokens += piece.token_ids.tolist()
        assert piece.completion is not None
        assert tokens == piece.completion.token_ids.tolist() == expected.token_ids.tolist()
        assert rollout.serving == (1,)


async def test_a_call_ends_at_its_time_limit_with_what_there_is(policy: str) -> None:
    async with rank_of(policy, max_running=8) as rank:
        for completion in await rank.generate((1, 2), FOREVER, seeds_of(0, 3), Limits(seconds=0.1)):
            assert completion.finish_reason == "abort"
        assert len(await rank.generate((1, 2), Sampling(max_tokens=2), seeds_of(0, 8))) == 8


async def test_an_engine_error_reaches_every_caller_now_and_later_rr2(policy: str) -> None:
    failures: list[str] = []
    rank = RolloutRank(RolloutConfig(max_running=2), policy)
    rank.tasks._on_error = lambda error, name: failures.append(f"{name}: {error}")
    broken = {name: parameter.detach().clone() for name, parameter in tiny_model(seed=1).named_parameters()}
    broken["model.norm.weight"].fill_(float("nan"))
    calls = [asyncio.create_task(rank.generate((1, 2), FOREVER, seeds_of(i, 2))) for i in range(3)]
    await until_running(rank, 2)
    await rank.apply_weights(broken, 1)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, FloatingPointError)
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        await rank.generate((1, 2), FOREVER, seeds_of(0, 1))
    assert len(failures) == 1
    assert "RolloutRank.engine: sampling: expected finite logits" in failures[0]
    await rank.tasks.close()


async def test_a_rank_without_requests_takes_no_steps_rr5(policy: str) -> None:
    steps = 0
    engine = TorchEngine(tiny_model(), max_running=4)
    step = engine.step

    def counted() -> list:
        nonlocal steps
        steps += 1
        return step()

    engine.step = counted  # type: ignore[method-assign]
    rank = RolloutRank(RolloutConfig(), policy, engine)
    await rank.generate((1, 2), Sampling(max_tokens=3, ignore_eos=True), seeds_of(0, 2))
    assert steps == 2  # prefill and the first decode share a step
    for _ in range(100):
        await asyncio.sleep(0)
    assert steps == 2
    await rank.tasks.close()


@pytest.mark.parametrize(("field", "value"), [("ranks", 0), ("max_running", 0), ("max_len", -1)])
def test_settings_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=rf"\[rollout\] {field}: expected at least \d, got {value}"):
        RolloutConfig(**settings)


async def test_groups_come_from_the_least_loaded_of_two_real_replicas(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=8), policy)
        sampling = Sampling(max_tokens=16)
        groups = await asyncio.gather(*(rollout.generate(prompt_at(i), 3, sampling, 11) for i in range(6)))
        assert [group.replica for group in groups] == [0, 1, 0, 1, 0, 1]
        assert rollout.outstanding == (0, 0)
        for i, group in enumerate(groups):
            assert group.prompt == prompt_at(i)
            assert group.rewards == []
            assert group.oldest_version == 0
        again = await rollout.generate(prompt_at(3), 3, sampling, 11)  # on replica 0 this time, and alone
        assert again.replica == 0
        for mine, theirs in zip(again.completions, groups[3].completions, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert mine.text == theirs.text
        other = await rollout.generate(prompt_at(3), 3, sampling, 11, attempt=1)
        assert [c.token_ids.tolist() for c in other.completions] != [c.token_ids.tolist() for c in again.completions]
        stats = await rollout.stats()
        assert [s.rank for s in stats] == [0, 1]
        assert sum(s.tokens for s in stats) == sum(g.num_tokens for g in [*groups, again, other])
        with pytest.raises(ValueError, match="expected 1 to 8 samples") as refused:
            await rollout.generate(prompt_at(0), 9, sampling, 11)
        assert isinstance(refused.value, ActorError)
        assert rollout.outstanding == (0, 0)


async def test_a_group_takes_the_first_samples_and_is_dropped_when_it_is_late(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=16, oversample=4), policy)
        group = await rollout.group(prompt_at(0), 4, Sampling(max_tokens=2000), 11)
        assert isinstance(group, Group)
        assert [c.finish_reason == "abort" for c in group.completions] == [False] * 4
        rollout.config = RolloutConfig(sample_seconds=0.2)
        late = await rollout.group(prompt_at(1), 4, FOREVER, 11)
        assert isinstance(late, Dropped)
        assert (late.position, late.reason) == (1, "timeout")
        assert rollout.outstanding == (0,)


async def test_calls_of_a_dead_replica_are_issued_again_on_another_rh1(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=8, max_restarts=0), policy)
        assert rollout.procs is not None
        sampling = Sampling(max_tokens=1500, ignore_eos=True)
        expected = await rollout.generate(prompt_at(0), 2, sampling, 11)
        calls = [asyncio.create_task(rollout.generate(prompt_at(0), 2, sampling, 11)) for _ in range(4)]

        async def stats() -> RolloutStats:
            return (await rollout.stats())[0]

        await until(stats, lambda stats: stats.running == 4)
        os.kill(rollout.procs.pids[0], signal.SIGKILL)
        for group in await asyncio.gather(*calls):
            assert group.replica == 1 or group.completions
            for mine, theirs in zip(group.completions, expected.completions, strict=True):
                assert mine.token_ids.tolist() == theirs.token_ids.tolist()  # RH-2
        first, _ = expected.completions
        row = [*prompt_at(0).token_ids, *first.token_ids.tolist()]
        values = await rollout.logprobs(row)  # at temperature 1 they are those that were sampled by
        np.testing.assert_allclose(values[len(row) - len(first.token_ids) - 1 :], first.logprobs, atol=1e-4)
        with pytest.raises(ValueError, match="at least one token"):
            await rollout.logprobs([1])
        assert rollout.outstanding == (0, 0)
        with pytest.raises(ProcessDied):
            await rollout.stats()


async def test_a_cancelled_await_frees_rows_on_a_real_replica_rr3(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=4), policy)
        call = asyncio.create_task(rollout.generate(prompt_at(0), 4, FOREVER, 0))

        async def stats() -> RolloutStats:
            return (await rollout.stats())[0]

        await until(stats, lambda stats: stats.running == 4)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(stats, lambda stats: stats.running == 0)
        assert rollout.outstanding == (0,)
        assert (await rollout.generate(prompt_at(1), 4, Sampling(max_tokens=2), 0)).num_tokens <= 8
