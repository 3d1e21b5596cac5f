"""WD-1 to WD-3, under a virtual clock."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from algorithms import virtual_time
from algorithms.grpo import GRPOConfig
from algorithms.play import Stage, Times, stage
from algorithms.simulated import SimulatedRollout, SimulatedWeights, Speeds, lognormal
from algorithms.watchdog import NotServed, Stalled, WatchConfig, Watchdog
from roles.types import Dropped, Group

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
