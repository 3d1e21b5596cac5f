"""WD-1 to WD-3 and FO-1 to FO-3. The clock is virtual; the two sides that are compared are small arrays."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest

from algorithms import virtual_time
from algorithms.follow import Follow
from algorithms.grpo import GRPOConfig
from algorithms.play import Stage, Times, stage
from algorithms.simulated import SimulatedRollout, SimulatedWeights, Speeds, lognormal
from algorithms.watchdog import NotServed, Stalled, WatchConfig, Watchdog
from roles.types import Dropped, Group, TrainSample

PLAIN = GRPOConfig(prompts_per_step=4, samples_per_prompt=1, advantage="reinforce")
TIMES = Times(
    speeds=Speeds(step_base=0.01, step_per_sequence=0, train_base=1.0, train_per_token=0, publish=0.1),
    lengths=lognormal(50, 0.5, 500),
)


def scene_with_watchdog(seconds: float) -> Stage:
    scene = stage(PLAIN, TIMES, staleness=1, steps=20)
    scene.page.watchdog = Watchdog(WatchConfig(stall_s=seconds), scene.page.buffer.who_waits)
    return scene


def test_a_generation_that_never_ends_is_told_with_the_prompt_that_everybody_waits_for():
    class Stuck(SimulatedRollout):
        async def group(self, prompt, n, sampling, seed, *, attempt=0) -> Group | Dropped:
            if prompt.position == 9:
                await asyncio.sleep(1e9)
            return await super().group(prompt, n, sampling, seed, attempt=attempt)

    async def main() -> None:
        scene = scene_with_watchdog(600)
        scene.page.rollout = Stuck(scene.replicas, scene.rollout._lengths)
        await scene.page.run(0, 20)

    with pytest.raises(
        Stalled, match=r"for 600 s\. Under way: wait for \d+ s\. training waits for prompt 9, in flight"
    ):
        virtual_time.run(main())


def test_a_publication_that_hangs_is_named():
    class Hangs(SimulatedWeights):
        async def publish(self, version: int):
            if version == 3:
                await asyncio.sleep(1e9)
            return await super().publish(version)

    async def main() -> None:
        scene = scene_with_watchdog(600)
        scene.page.weights = Hangs(scene.replicas, TIMES.speeds)
        await scene.page.run(0, 20)

    with pytest.raises(Stalled, match="Under way: publish for"):
        virtual_time.run(main())


def test_slow_is_not_stalled_and_zero_never_ends_a_run():
    async def main(seconds: float, slowness: float) -> int:
        scene = scene_with_watchdog(seconds)
        scene.trainer._speeds = Speeds(
            step_base=0.01, step_per_sequence=0, train_base=slowness, train_per_token=0, publish=0
        )
        return await scene.page.run(0, 20)

    assert virtual_time.run(main(600, 500)) == 20  # hours in all, each step within the limit
    assert virtual_time.run(main(0, 1e6)) == 20
    with pytest.raises(Stalled, match="train for 600 s"):
        virtual_time.run(main(600, 601))


def sums(correlation: float, gap: float, tokens: int = 1000) -> dict[str, float]:
    """Of two sides with mean -1, deviation 1 and this correlation."""
    return {
        "tokens": tokens,
        "fresh_tokens": tokens,
        "fresh_gap": gap * tokens,
        "fresh_trainer": -tokens,
        "fresh_rollout": -tokens,
        "fresh_trainer_squared": 2 * tokens,
        "fresh_rollout_squared": 2 * tokens,
        "fresh_product": (1 + correlation) * tokens,
    }


def test_logprobs_that_no_longer_follow_end_the_run_after_three_steps_in_a_row():
    watch = Watchdog(WatchConfig(), str)
    bad, good = sums(0.5, 0.4), sums(0.999, 0.01)
    for one in (bad, bad, good, bad, bad, sums(0.5, 0.01), bad, bad, sums(0.1, 0.9, tokens=10)):
        watch.check(7, one)  # never three in a row; few tokens say nothing
    watch.check(0, bad)  # nothing has moved yet
    with pytest.raises(NotServed, match=r"correlate with 0\.500 .* differ by 0\.400 nat on average"):
        watch.check(7, bad)
    relaxed = Watchdog(WatchConfig(min_correlation=0), str)
    for _ in range(5):
        relaxed.check(7, bad)
    watch.check(7, {"tokens": 5.0})  # an objective of one's own that reports nothing


# --- asked, not believed ----------------------------------------------------------------------------------------------


class Sides:
    """A trainer whose logprobs fall by `step` a version, and replicas that serve some version with some noise."""

    def __init__(self, *, step: float, serves: Sequence[int], noise: float = 1e-6) -> None:
        self.version, self.step, self.serves, self.noise = 0, step, list(serves), noise
        self.asked = 0

    def of(self, version: int, length: int) -> np.ndarray:
        return -1 - np.arange(length) / 10 - self.step * version

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
        self.asked += 1
        return [self.of(self.version, len(s.token_ids))[s.prompt_length :] for s in samples]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        return [[(self.of(v, len(ids)) + self.noise)[1:] for ids in sequences] for v in self.serves]


def samples(count: int = 6) -> list[TrainSample]:
    return [
        TrainSample(
            token_ids=np.arange(3 + i, dtype=np.int32),
            prompt_length=2,
            rollout_logprobs=np.zeros(1 + i, np.float32),
            advantages=np.zeros(1 + i, np.float32),
        )
        for i in range(count)
    ]


async def after_a_step(sides: Sides) -> None:
    follow = Follow(sides, sides, every=10)
    await follow.before(samples())
    sides.version = 1
    await follow.after(1)


async def test_replicas_that_follow_pass():
    await after_a_step(Sides(step=1e-3, serves=[1, 1]))


async def test_a_replica_that_kept_the_old_weights_is_named_by_its_rank():
    with pytest.raises(NotServed, match="rollout rank 1 still answers with those of version 0"):
        await after_a_step(Sides(step=1e-3, serves=[1, 0, 1]))


@pytest.mark.parametrize(("step", "noise"), [(0.0, 1e-6), (1e-6, 1e-2)])
async def test_what_can_not_be_told_apart_is_not_judged(step, noise):
    """A learning rate of 0, or an engine whose rounding is larger than the step."""
    await after_a_step(Sides(step=step, serves=[0], noise=noise))


async def test_only_some_steps_pay_for_the_question():
    follow = Follow(Sides(step=0, serves=[]), Sides(step=0, serves=[]), every=10)
    assert [v for v in range(25) if follow.due(v)] == [1, 2, 10, 20]
    assert [v for v in range(25) if Follow(follow._rollout, follow._trainer, every=0).due(v)] == [1, 2]
    await follow.before([])
    await follow.after(1)


def test_the_page_asks_at_the_first_two_steps_and_ends_with_the_rank():
    async def main() -> tuple[int, Sides]:
        scene = stage(PLAIN, TIMES, staleness=1, steps=4)
        sides = Sides(step=1e-3, serves=[1, 0])
        scene.page.follow = Follow(sides, sides, every=0)
        train = scene.trainer.train_step

        async def train_step(*args, **options):
            result = await train(*args, **options)
            sides.version = result.version
            return result

        scene.trainer.train_step = train_step  # type: ignore[method-assign]
        return await scene.page.run(0, 4), sides

    with pytest.raises(NotServed, match="rollout rank 1"):
        virtual_time.run(main())


def test_correlation_of_two_sides_is_that_of_numpy():
    from algorithms.metrics import Step

    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    y = x + rng.normal(size=50)
    named = {
        "fresh_tokens": 50.0,
        "fresh_trainer": x.sum(),
        "fresh_rollout": y.sum(),
        "fresh_trainer_squared": (x**2).sum(),
        "fresh_rollout_squared": (y**2).sum(),
        "fresh_product": (x * y).sum(),
    }
    assert Step(named, {}).fresh_correlation() == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert Step({**named, "fresh_tokens": 0.0}, {}).fresh_correlation() is None
    flat = {**named, "fresh_trainer": 50.0, "fresh_trainer_squared": 50.0}
    assert Step(flat, {}).fresh_correlation() is None
    assert not math.isnan(Step(named, {}).fresh_correlation() or 0.0)
