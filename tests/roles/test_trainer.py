"""Settings, learning rate, and the handle over real processes: TR-1 to TR-5 of `roles.trainer`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from roles import checkpoint
from roles.packing import pack
from roles.trainer import NonFiniteError, Trainer, TrainerConfig, TrainerRank, learning_rate
from runtime import ActorError, HostMesh, this_host
from tests.roles.trainer_help import clipped, random_samples, save_tiny_model, spec, undefined, undefined_later


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-2, "token_budget": 60, "device": "cpu", **changes})


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 0}, r"\[trainer\] ranks = 0: expected at least 1"),
        ({"lr": -1.0}, r"\[trainer\] lr = -1.0"),
        ({"lr": float("nan")}, r"\[trainer\] lr = nan"),
        ({"betas": (0.9, 1.0)}, "expected betas in"),
        ({"schedule": "cosine"}, "set total_steps to the steps of the run"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "above warmup_steps"),
        ({"total_steps": 5}, "remove it or set schedule"),
    ],
)
def test_settings_without_a_meaning_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(**changes)


def test_unknown_setting_is_refused_with_its_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="learning_rate"):
        msgspec.convert({"learning_rate": 1e-3}, TrainerConfig)


def test_learning_rate_warms_up_and_falls_by_the_version_alone() -> None:
    # lr 8, 4 steps of warm-up, then 4 down to 0
    linear = config(lr=8.0, warmup_steps=4, schedule="linear", total_steps=8)
    assert [learning_rate(linear, v) for v in range(10)] == [2, 4, 6, 8, 8, 6, 4, 2, 0, 0]
    cosine = config(lr=8.0, schedule="cosine", total_steps=2)
    assert [learning_rate(cosine, v) for v in range(4)] == pytest.approx([8, 4, 0, 0])
    assert [learning_rate(config(lr=8.0, warmup_steps=2), v) for v in range(4)] == [4, 8, 8, 8]


# --- the actor as a plain object --------------------------------------------------------------------------------------


def test_actor_is_a_weight_source_without_any_process(tmp_path: Path) -> None:
    actor = TrainerRank(config(), save_tiny_model(tmp_path))
    layout = actor.weight_source.weight_layout()
    for entry in layout.entries:
        (box,) = actor.weight_source.weight(entry.name)
        assert tuple(box.shape) == entry.box.shape


# --- the handle over processes ----------------------------------------------------------------------------------------

slow_start = pytest.mark.timeout(240)  # processes import torch, which takes its time on a busy machine


@pytest.fixture
async def host() -> AsyncIterator[HostMesh]:
    async with this_host() as host:
        yield host


@slow_start
async def test_two_ranks_train_save_and_resume_through_the_handle(host: HostMesh, tmp_path: Path) -> None:
    model_path = save_tiny_model(tmp_path / "model")
    alone = TrainerRank(config(), model_path)
    trainer = await Trainer.start(host, config(ranks=2, threads=1, max_skipped=0), model_path)
    samples = random_samples(10)

    result = await trainer.train_step(samples, spec(clipped), 0.8)
    expected = alone.train_step(pack(samples, world=1, token_budget=60)[0], spec(clipped), 0.8)
    assert result.sums == pytest.approx(expected.sums, rel=1e-4, abs=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert trainer.version == result.version == 1

    logprobs = await trainer.logprobs(samples, 0.8)
    assert [len(value) for value in logprobs] == [sample.completion_length for sample in samples]

    with checkpoint.folder(checkpoint.step_folder(tmp_path, 1)) as temporary:
        await trainer.save(temporary / "trainer")
        checkpoint.write_state(temporary, {"step": 1})
    saved = checkpoint.latest(tmp_path)
    assert saved is not None

    with pytest.raises(NonFiniteError, match="the loss of rank") as error:
        await trainer.train_step(samples, spec(undefined))
    assert isinstance(error.value, ActorError)
    assert trainer.version == 1

    moved = await trainer.train_step(samples, spec(clipped), 0.8)
    await trainer.load(saved / "trainer")
    assert trainer.version == 1
    for value, before in zip(await trainer.logprobs(samples, 0.8), logprobs, strict=True):
        np.testing.assert_array_equal(value, before)
    again = await trainer.train_step(samples, spec(clipped), 0.8)
    assert (again.sums, again.grad_norm) == (moved.sums, moved.grad_norm)

    trainer.config = msgspec.structs.replace(trainer.config, updates_per_step=2)
    with pytest.raises(NonFiniteError, match="step 3, update 1"):
        await trainer.train_step(samples, spec(undefined_later))
    assert trainer.version == 3  # its first update was made (TR-2)

    await trainer.export(tmp_path / "exported", "float32")
    assert (tmp_path / "exported" / "model.safetensors").exists()


@slow_start
async def test_model_that_is_not_there_is_told_by_the_start(host: HostMesh, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        await Trainer.start(host, config(threads=1), str(tmp_path / "nothing"))


async def test_greedy_temperature_is_refused_before_anything_is_sent() -> None:
    trainer = Trainer(config(), mesh=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperature = 0.*set \[sampling\] temperature"):
        await trainer.train_step(random_samples(1), spec(clipped), 0.0)


class Diverged:
    """A mesh whose two ranks answer differently."""

    class load:
        @staticmethod
        async def call(path: str, version: int | None) -> Diverged:
            return Diverged()

    def values(self) -> list[int]:
        return [3, 4]


class Sixteen:
    """A mesh of 16 megatron ranks, TP2 x CP2 x DP2 x PP2: whose batch each got, and what each answers."""

    def __init__(self) -> None:
        self.logprobs = self
        self.answers: list[Any] = []

    async def scatter(self, calls: list[Any]) -> Sixteen:
        batches = [batch for batch, _ in calls]
        first, second = batches[0], batches[4]
        assert [batch is first for batch in batches] == ([True] * 4 + [False] * 4) * 2
        assert [batch is second for batch in batches] == ([False] * 4 + [True] * 4) * 2
        for rank, batch in enumerate(batches):
            told = [[micro.token_ids.astype(np.float32) for micro in update] for update in batch.updates]
            self.answers.append(told if rank >= 8 else [[] for _ in batch.updates])
        return self

    def values(self) -> list[Any]:
        return self.answers


async def test_ranks_that_share_a_model_get_one_batch_and_its_last_stage_tells_the_logprobs_tr4() -> None:
    """Each token's number stands for its logprob."""
    layout = {"tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2}
    trainer = Trainer(config(backend="megatron", ranks=16, **layout), mesh=Sixteen())  # type: ignore[arg-type]
    samples = random_samples(10)
    for value, sample in zip(await trainer.logprobs(samples), samples, strict=True):
        np.testing.assert_array_equal(value, sample.token_ids[sample.prompt_length :])


async def test_ranks_that_disagree_stop_the_run() -> None:
    trainer = Trainer(config(ranks=2), mesh=Diverged())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="3 on rank 0 and 4 on rank 1"):
        await trainer.load("anywhere")


class Saves:
    """A mesh whose ranks take a turn of the loop for whatever is asked of them."""

    def __init__(self) -> None:
        self.save = self.finish_save = self

    async def call(self, *_: Any) -> Saves:
        await asyncio.sleep(0)
        return self

    def values(self) -> list[int]:
        return [3, 3]


async def test_saves_begun_at_one_time_all_appear_and_whoever_waits_waits_to_the_end(tmp_path: Path) -> None:
    trainer = Trainer(config(ranks=2), mesh=Saves())  # type: ignore[arg-type]
    await asyncio.gather(trainer.begin_save(tmp_path / "a"), trainer.begin_save(tmp_path / "b"))
    first = asyncio.create_task(trainer.finish_save())
    await asyncio.sleep(0)
    await trainer.finish_save()
    assert checkpoint.is_complete(tmp_path / "a")
    assert checkpoint.is_complete(tmp_path / "b")
    await first
