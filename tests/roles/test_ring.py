"""EN-7, SG-5, RR-7 and PO-7: versions written over the weights that the small engine has in service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from examples.started import POLICY
from roles.engine import EngineFailed
from roles.engine_torch import TorchEngine
from roles.publish import Publisher, SameWeights
from roles.rollout import Rollout, RolloutConfig, RolloutRank
from roles.trainer import Trainer, TrainerConfig
from roles.types import Completion, Prompt, Sampling
from runtime import this_host
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError
from tests.roles.engines import forced_logprobs, request, weights_of
from tests.roles.tiny import save_tiny_policy, tiny_model
from tests.waiting import until

LONG = Sampling(max_tokens=2500, ignore_eos=True)
SHORT = Sampling(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def rank_of(policy: str, **config: Any) -> AsyncIterator[RolloutRank]:
    rank = RolloutRank(RolloutConfig(max_running=8, **config), policy)
    try:
        yield rank
    finally:
        await rank.tasks.close()


async def held(rank: RolloutRank, version: int) -> Mapping[str, torch.Tensor]:
    """The live tensors, as a session that is about to write them has them."""
    (part,) = await rank.weight_parts()
    hold: Any = part._hold  # type: ignore[attr-defined]
    tensors: Mapping[str, torch.Tensor] = await hold(version)
    return tensors


def write(live: Mapping[str, torch.Tensor], model: Any) -> None:
    for name, tensor in live.items():
        tensor.copy_(weights_of(model)[name])


def assert_forced(prompt: list[int], completion: Completion, model: Any, version: int) -> None:
    mine = completion.versions == version
    expected = forced_logprobs(model, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=1e-4)


def test_a_held_engine_runs_no_step_and_goes_on_with_what_was_written_en7() -> None:
    engine = TorchEngine(tiny_model(0), max_running=4)
    engine.submit(request(0, [1, 2], n=2, max_tokens=6))
    engine.step()
    live = engine.live_weights()
    tokens = engine.num_tokens
    engine.submit(request(1, [3, 4], max_tokens=4))
    assert engine.step() == []
    assert (engine.num_tokens, engine.num_waiting) == (tokens, 1)
    assert [one.sample for one in engine.abort(0, 1)] == [1]  # aborts are carried out
    write(live, tiny_model(1))
    engine.swap(live, 5)
    found: dict[int, Completion] = {}
    while engine.num_running or engine.num_waiting:
        found |= {one.request_id: one.completion for one in engine.step()}
    assert found[0].versions.tolist() == [0, 0, 5, 5, 5, 5]
    assert found[1].versions.tolist() == [5] * 4
    assert_forced([3, 4], found[1], tiny_model(1), 5)


@pytest.mark.parametrize("update", ["keep", "drain", "resume"])
async def test_calls_wait_while_weights_are_written_and_go_on_under_their_version_rr7(policy: str, update: str) -> None:
    async with rank_of(policy, update=update) as rank:
        running = asyncio.create_task(rank.generate((1, 2), LONG, (1, 2)))
        await until(rank.stats, lambda stats: stats.tokens >= 10, during=[running], pause=0.001)
        live = await held(rank, 7)
        late = asyncio.create_task(rank.generate((3, 4), SHORT, (3, 4, 5)))
        scores = asyncio.create_task(rank.score([[1, 2, 3]]))
        await rank.probe()  # it lives, and says so
        tokens = (await rank.stats()).tokens
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (await rank.stats()).tokens == tokens
        assert running.done() == (update == "drain")
        assert not late.done()
        assert not scores.done()
        write(live, tiny_model(1))
        await rank.apply_weights(live, 7)
        assert rank.weights_fenced == ""
        for completion in await late:
            assert completion.versions.tolist() == [7] * 5
            assert_forced([3, 4], completion, tiny_model(1), 7)
        expected = forced_logprobs(tiny_model(1), [1], np.array([2, 3]))
        np.testing.assert_allclose((await scores)[0], expected, atol=1e-4)
        for completion in await running:
            assert len(completion.token_ids) == LONG.max_tokens
            assert set(completion.versions.tolist()) == ({0} if update == "drain" else {0, 7})
            assert_forced([1, 2], completion, tiny_model(0), 0)
            if update == "resume":  # its cache was computed anew
                assert_forced([1, 2], completion, tiny_model(1), 7)


async def test_a_write_that_fails_refuses_calls_until_a_version_has_come_whole_po7_rr7(policy: str) -> None:
    async with rank_of(policy) as rank:
        await held(rank, 7)
        late = asyncio.create_task(rank.generate((3, 4), SHORT, (3,)))
        await asyncio.sleep(0)
        await rank.sync_close()
        for call in (late, rank.generate((3, 4), SHORT, (3,)), rank.probe(), rank.score([[1, 2]])):
            with pytest.raises(EngineFailed, match="must not serve: version 7 is being written over"):
                await call
        live = await held(rank, 8)
        write(live, tiny_model(1))
        await rank.apply_weights(live, 8)
        (completion,) = await rank.generate((3, 4), SHORT, (3,))
        assert completion.versions.tolist() == [8] * 5


async def test_a_swap_that_fails_refuses_calls_that_wait_rr7(policy: str) -> None:
    async with rank_of(policy) as rank:
        live = await held(rank, 7)
        late = asyncio.create_task(rank.generate((3, 4), SHORT, (3,)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="missing"):
            await rank.apply_weights({}, 7)
        for call in (late, rank.probe()):
            with pytest.raises(EngineFailed, match="must not serve: version 7 is being written over"):
                async with asyncio.timeout(5):
                    await call
        await rank.apply_weights(live, 8)  # as the session that comes next does


async def test_a_port_that_closes_before_a_byte_was_written_refuses_nobody_rr7(policy: str) -> None:
    async with rank_of(policy, update="drain") as rank:
        running = asyncio.create_task(rank.generate((1, 2), LONG, (1,)))
        await until(rank.stats, lambda stats: stats.tokens >= 10, during=[running], pause=0.001)
        holding = asyncio.create_task(held(rank, 7))
        await asyncio.sleep(0)
        await rank.sync_close()  # its trainer has gone
        with pytest.raises(SyncError, match="closed while requests ended"):
            await holding
        assert rank.weights_fenced == ""
        assert len((await running)[0].token_ids) == LONG.max_tokens
        assert len((await rank.generate((3, 4), SHORT, (3,)))[0].token_ids) == 5


@pytest.mark.timeout(120)
async def test_a_fleet_is_written_in_place_by_a_session_while_it_generates():
    prompt = Prompt(position=0, text="", token_ids=(5, 6, 7), task="any", entry={})
    async with this_host() as host:
        trainer = await Trainer.start(host, TrainerConfig(threads=1), POLICY)
        rollout = await Rollout.start(host, RolloutConfig(max_len=200, max_running=16, threads=1), POLICY)
        async with WeightSession(trainer.mesh, rollout.mesh, SyncConfig(shadow="ring")) as session:
            proof = SameWeights(trainer, rollout, [list(range(5, 25))], 1e-4)
            publisher = Publisher(session, trainer, rollout, proof)
            calls = []
            for version in range(4):
                await publisher.publish(version)
                calls.append(asyncio.create_task(rollout.generate(prompt, 8, Sampling(max_tokens=150), version)))
            for version, call in enumerate(calls):
                for completion in (await call).completions:
                    versions = completion.versions.tolist()
                    assert versions == sorted(versions)
                    assert version <= versions[0] <= versions[-1] <= 3
            assert "over the weights in service: asked for" in session.explain()
