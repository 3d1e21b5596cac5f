"""PU-1 below its threshold: a replica that kept the weights of before; PU-2 in the proof. Sides and session are small
objects here; tests/roles/test_publish_sharp.py has models."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from algorithms import catalog
from roles.engine import EngineFailed
from roles.publish import Publisher, SameWeights, WeightsDiffer
from roles.trainer import Trainer, TrainerConfig
from roles.types import StepResult, TrainSample
from sync.transport import SyncError
from tests.waiting import until


class Sides:
    """A trainer whose logprobs fall by `step` a version, and replicas that serve some version with some noise."""

    def __init__(self, *, step: float, noise: float = 1e-6) -> None:
        self.version, self.step, self.noise = 0, step, noise
        self.serves = [0, 0, 0]

    def of(self, version: int, length: int) -> np.ndarray:
        return -1 - np.arange(length) / 10 - self.step * version

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
        return [self.of(self.version, len(s.token_ids))[s.prompt_length :] for s in samples]

    async def score(
        self, sequences: Sequence[Sequence[int]], left_out: Collection[int] = ()
    ) -> dict[int, list[np.ndarray]]:
        asked = {rank: v for rank, v in enumerate(self.serves) if rank not in left_out}
        return {rank: [(self.of(v, len(ids)) + self.noise)[1:] for ids in sequences] for rank, v in asked.items()}


async def after_a_step(sides: Any, serves: list[int], threshold: float = 0.5) -> None:
    same = SameWeights(sides, sides, [[1, 2, 3, 4], [5, 6]], threshold)
    await same.check(0)
    sides.version, sides.serves = 1, serves
    await same.check(1)


async def test_replicas_that_follow_pass_pu1():
    await after_a_step(Sides(step=0.2), [1, 1, 1])


@pytest.mark.parametrize("noise", [1e-6, 0.2])
async def test_a_replica_that_kept_the_old_weights_is_named_below_the_threshold_however_it_rounds_pu1(noise):
    with pytest.raises(WeightsDiffer, match=r"since version 0, but rollout rank 1 still answers with the old ones"):
        await after_a_step(Sides(step=0.2, noise=noise), [1, 0, 1])


async def test_small_steps_of_a_replica_that_stands_still_add_up_pu1():
    sides: Any = Sides(step=0.02)
    same = SameWeights(sides, sides, [[1, 2, 3, 4], [5, 6]], 0.5)
    with pytest.raises(WeightsDiffer, match=r"version 7: .* since version 0, but rollout rank 2"):
        for version in range(20):
            sides.version, sides.serves = version, [version, version, 0]
            await same.check(version)
    assert version == 7


@pytest.mark.parametrize("step", [0.0, 1e-6])
async def test_what_has_not_moved_is_not_judged_pu1(step):
    """A learning rate of 0, or a step below what numbers of 16 bits can tell."""
    await after_a_step(Sides(step=step), [0, 0, 0])


async def test_a_replica_that_missed_a_version_is_compared_with_what_it_said_last_pu1():
    sides: Any = Sides(step=0.1)
    same = SameWeights(sides, sides, [[1, 2, 3]], 0.5)
    await same.check(0)
    sides.version, sides.serves = 1, [1, 0, 1]
    await same.check(1, left_out=[1])
    sides.version, sides.serves = 2, [2, 2, 2]
    await same.check(2)


async def test_the_same_version_again_is_not_compared_with_itself():
    sides: Any = Sides(step=0.2)
    same = SameWeights(sides, sides, [[1, 2, 3]], 0.5)
    await same.check(0)
    await same.check(0)  # as after a resume


@pytest.mark.parametrize("noise", [1.0, float("inf"), float("nan")])
async def test_beyond_the_threshold_the_difference_itself_is_told_pu1(noise):
    with pytest.raises(WeightsDiffer, match="nat from the trainer's on average"):
        await after_a_step(Sides(step=0.0, noise=noise), [1, 1, 1])


class DiesWhenAsked(Sides):
    """One of its replicas dies `deaths` times while it is asked, and is back when waited for."""

    config = SimpleNamespace(max_restarts=2)
    starts = (1, 1, 1)

    def __init__(self, deaths: int) -> None:
        super().__init__(step=1e-3)
        self.deaths, self.waited, self.out = deaths, 0, False

    async def score(
        self, sequences: Sequence[Sequence[int]], left_out: Collection[int] = ()
    ) -> dict[int, list[np.ndarray]]:
        if self.deaths > 0:
            self.deaths, self.out = self.deaths - 1, True
            raise EngineFailed("killed")
        return await super().score(sequences, left_out)

    async def troubled(self) -> bool:
        return self.out

    async def all_serve(self) -> None:
        self.waited, self.out = self.waited + 1, False

    def published(self, version: int, left_out: Sequence[int] = ()) -> None:
        assert not left_out


class Session:
    async def publish(self, version: int) -> Any:
        return SimpleNamespace(version=version, left_out=())


async def test_a_replica_that_dies_while_it_is_asked_is_waited_for_and_asked_again_pu2():
    sides: Any = DiesWhenAsked(2)
    session: Any = Session()
    publisher = Publisher(session, sides, sides, SameWeights(sides, sides, [[1, 2, 3]], 0.5))
    assert (await publisher.publish(0)).version == 0
    assert (sides.waited, sides.deaths) == (2, 0)


async def test_one_that_dies_more_often_than_it_may_ends_the_run_pu2():
    sides: Any = DiesWhenAsked(3)
    session: Any = Session()
    publisher = Publisher(session, sides, sides, SameWeights(sides, sides, [[1, 2, 3]], 0.5))
    with pytest.raises(EngineFailed):
        await publisher.publish(0)


async def test_one_that_is_back_before_it_was_missed_is_sent_the_weights_again_pu2():
    class BackAlready(Session):
        failed = False

        async def publish(self, version: int) -> Any:
            if not self.failed:
                self.failed, sides.starts = True, (1, 2, 1)
                raise SyncError("the port is closed; open the weight session first")
            return await super().publish(version)

    sides: Any = DiesWhenAsked(0)
    session: Any = BackAlready()
    assert (await Publisher(session, sides, sides).publish(0)).version == 0


class Ranks:
    """Of a trainer: one call at a time, in the order asked. A step takes until `may_end`."""

    def __init__(self) -> None:
        self.version = 0
        self.lane = asyncio.Lock()
        self.may_end = asyncio.Event()
        self.train_step = self

    async def scatter(self, calls: Sequence[Any]) -> Any:
        async with self.lane:
            await self.may_end.wait()
            self.version += 1
            result = StepResult(version=self.version, sums={}, maxima={}, grad_norm=1.0, learning_rate=0.1, seconds=1.0)
            return SimpleNamespace(values=lambda: [result for _ in calls])


async def test_a_replica_that_is_back_in_the_middle_of_a_step_gets_the_weights_after_it_under_their_number_pu3():
    ranks: Any = Ranks()
    trainer = Trainer(TrainerConfig(ranks=1), ranks)
    sent: list[tuple[int, int]] = []

    class Alone:
        async def open(self) -> None:
            pass

        async def publish(self, version: int) -> None:
            async with ranks.lane:
                sent.append((version, ranks.version))

        async def close(self) -> None:
            pass

        def over(self, receivers: Any) -> Any:
            return self

    way: Any = Alone()
    rollout: Any = SimpleNamespace(mesh=SimpleNamespace(slice=lambda rank: None))
    publisher = Publisher(way, trainer, rollout)
    step = asyncio.create_task(trainer.train_step([sample()], catalog.objective("grpo")))
    await until(ranks.lane.locked, during=[step])
    resending = asyncio.create_task(publisher.resend(0))
    for _ in range(10):
        await asyncio.sleep(0)
    ranks.may_end.set()
    await asyncio.gather(step, resending)
    assert sent == [(1, 1)]


def sample() -> TrainSample:
    zeros = np.zeros(2, np.float32)
    ids = np.array([1, 2, 3], np.int32)
    return TrainSample(token_ids=ids, prompt_length=1, rollout_logprobs=zeros, advantages=zeros + 1)
