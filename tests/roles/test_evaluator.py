"""Promises of roles/evaluator.py, with a simulated rollout and reward; then once with the real engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np
import pytest

from roles.evaluator import EvalConfig, EvaluationCut, Evaluator, VersionMoved, estimate, pass_at_k
from roles.types import Completion, Group, Prompt, Reward, Sampling, Scored, Unscored


def prompt(position: int, task: str = "sums") -> Prompt:
    return Prompt(position=position, text="?", token_ids=(1, 2), task=task, entry={})


class SimulatedRollout:
    """Answers after one turn of the loop; the version of each request is what `version` returns."""

    def __init__(self, version: Callable[[int], int] = lambda number: 5) -> None:
        self.version = version
        self.calls: list[tuple[int, int, Sampling, int]] = []
        self.running = self.most_running = 0

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> Group:
        number = len(self.calls)
        self.calls.append((prompt.position, n, sampling, seed))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        completions = [
            Completion(
                token_ids=np.array([i, i], np.int32),
                logprobs=np.zeros(2, np.float32),
                versions=np.full(2, self.version(number), np.int32),
                finish_reason="length" if sampling.temperature == 0 else "stop",
            )
            for i in range(n)
        ]
        return Group(prompt=prompt, completions=completions)


class SimulatedReward:
    """Scores the samples of a prompt from a table; greedy groups (of one) from another."""

    def __init__(self, sampled: dict[int, list[Reward]], greedy: dict[int, Reward]) -> None:
        self.sampled, self.greedy = sampled, greedy

    async def score(self, group: Group) -> Group:
        position = group.prompt.position
        group.rewards = [self.greedy[position]] if len(group.completions) == 1 else self.sampled[position]
        return group


def scored(*values: float) -> list[Reward]:
    return [Scored(value) for value in values]


async def test_accuracy_and_interval_are_over_prompts_ev5() -> None:
    # Means of the prompts: 1, .5, 0, .5; mean .5, sample variance (.25 + 0 + .25 + 0) / 3 = 1/6,
    # standard error sqrt(1/6 / 4) = .204124, 95 %: .5 -+ 1.959964 * .204124 = .5 -+ .400076.
    reward = SimulatedReward(
        {0: scored(1, 1), 1: scored(1, 0), 2: scored(0, 0), 3: scored(0, 1)},
        {0: Scored(1), 1: Scored(1), 2: Scored(0), 3: Scored(1)},
    )
    rollout = SimulatedRollout()
    result = await Evaluator(
        [prompt(i) for i in range(4)], rollout, reward, EvalConfig(max_tokens=8, samples=2)
    ).evaluate()
    assert result.accuracy == 0.5
    assert result.accuracy_interval == pytest.approx((0.099924, 0.900076), abs=1e-6)
    assert result.greedy == 0.75
    assert (result.version, result.num_prompts, result.unscored) == (5, 4, 0)
    assert result.num_tokens == 4 * (2 + 1) * 2
    assert result.truncated == pytest.approx(4 / 12)
    assert result.seconds > 0


async def test_results_are_told_by_task() -> None:
    reward = SimulatedReward(
        {0: scored(1, 1), 1: scored(1, 0), 2: scored(0, 0)}, {0: Scored(1), 1: Scored(0), 2: Scored(0)}
    )
    prompts = [prompt(0, "sums"), prompt(1, "sums"), prompt(2, "chains")]
    result = await Evaluator(prompts, SimulatedRollout(), reward, EvalConfig(max_tokens=8, samples=2)).evaluate()
    assert list(result.by_task) == ["chains", "sums"]
    assert (result.by_task["sums"].accuracy, result.by_task["sums"].greedy) == (0.75, 0.5)
    assert result.by_task["chains"].accuracy_interval is None  # one prompt has no spread
    assert sum(part.num_prompts for part in result.by_task.values()) == result.num_prompts


async def test_one_part_of_a_weighted_sum_may_be_the_accuracy() -> None:
    rewards: list[Reward] = [Scored(1.1, {"right": 1.0, "short": 0.5}), Scored(0.2, {"right": 0.0, "short": 1.0})]
    reward = SimulatedReward({0: rewards}, {})
    config = EvalConfig(max_tokens=8, samples=2, greedy=False, part="right")
    result = await Evaluator([prompt(0)], SimulatedRollout(), reward, config).evaluate()
    assert (result.accuracy, result.pass_at[2].value) == (0.5, 1.0)
    wrong = EvalConfig(max_tokens=8, samples=2, greedy=False, part="rigth")
    with pytest.raises(ValueError, match=r"no such part, it has \['right', 'short'\]"):
        await Evaluator([prompt(0)], SimulatedRollout(), reward, wrong).evaluate()


def test_pass_at_k_worked_values() -> None:
    """n = 8 samples, c = 2 solved: 1 - C(6, k) / C(8, k)."""
    assert [round(pass_at_k(8, 2, k), 6) for k in (1, 2, 4, 8)] == [0.25, 0.464286, 0.785714, 1.0]
    assert (pass_at_k(3, 0, 3), pass_at_k(3, 3, 1)) == (0.0, 1.0)
    for k in (0, 4):
        with pytest.raises(ValueError, match=r"expected k from 1 to the 3 samples, got \d"):
            pass_at_k(3, 1, k)


async def test_pass_at_k_and_its_interval_are_over_prompts_ev5() -> None:
    # pass@2 of the prompts: 1 of 4 solved -> .5, 4 of 4 -> 1, 0 of 4 -> 0: mean .5, deviation .5,
    # half width 1.959964 * .5 / sqrt(3) = .565793, which leaves 0 to 1.
    reward = SimulatedReward({0: scored(1, 0, 0, 0), 1: scored(1, 1, 1, 1), 2: scored(0, 0, 0, 0)}, {})
    config = EvalConfig(max_tokens=8, samples=4, greedy=False)
    result = await Evaluator([prompt(i) for i in range(3)], SimulatedRollout(), reward, config).evaluate()
    assert list(result.pass_at) == [1, 2, 4]
    assert result.pass_at[1].value == result.accuracy == pytest.approx((0.25 + 1 + 0) / 3)
    assert result.pass_at[2].value == 0.5
    assert result.pass_at[2].interval == (0.0, 1.0)
    assert result.pass_at[4].value == pytest.approx(2 / 3)


class SlowAfter(SimulatedRollout):
    """Answers the first prompts at once, the others never."""

    def __init__(self, quick: int) -> None:
        super().__init__()
        self.quick = quick

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> Group:
        if prompt.position >= self.quick:
            await asyncio.Event().wait()
        return await super().generate(prompt, n, sampling, seed)


async def test_a_cut_evaluation_says_over_how_many_prompts_it_speaks_ev6() -> None:
    table = {i: scored(1, i % 2) for i in range(6)}
    reward = SimulatedReward(table, {i: Scored(1) for i in range(6)})
    config = EvalConfig(max_tokens=8, samples=2, max_delay_s=1.5)
    evaluator = Evaluator([prompt(i) for i in range(6)], SlowAfter(4), reward, config)
    assert evaluator.max_delay == 1.5
    running = asyncio.create_task(evaluator.evaluate())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not running.done()
    evaluator.cut()
    result = await running
    assert (result.complete, result.num_prompts, result.accuracy, result.greedy) == (False, 4, 0.75, 1.0)


async def test_an_evaluation_cut_before_any_verdict_has_no_result_ev6() -> None:
    evaluator = Evaluator(
        [prompt(0)], SlowAfter(0), SimulatedReward({0: scored(1)}, {}), EvalConfig(max_tokens=8, samples=1)
    )
    assert evaluator.max_delay is None
    running = asyncio.create_task(evaluator.evaluate())
    await asyncio.sleep(0)
    evaluator.cut()
    with pytest.raises(EvaluationCut, match="cut before one prompt was judged"):
        await running


async def test_unscored_completions_are_left_out_and_counted_ev4() -> None:
    silent = Unscored("time limit")
    reward = SimulatedReward(
        {0: [Scored(1), silent], 1: [silent, silent], 2: scored(0, 1)}, {0: silent, 1: Scored(1), 2: Scored(0)}
    )
    prompts = [prompt(0), prompt(1, "silent"), prompt(2)]
    result = await Evaluator(prompts, SimulatedRollout(), reward, EvalConfig(max_tokens=8, samples=2)).evaluate()
    assert result.accuracy == 0.75  # prompts 0 and 2: 1 and .5
    assert result.greedy == 0.5  # prompts 1 and 2
    assert (result.num_prompts, result.unscored) == (2, 4)
    assert list(result.by_task) == ["sums"]


async def test_nothing_judged_is_an_error_not_zero_ev4() -> None:
    reward = SimulatedReward({0: [Unscored("x")] * 2}, {0: Unscored("x")})
    with pytest.raises(RuntimeError, match="not one completion could be judged"):
        await Evaluator([prompt(0)], SimulatedRollout(), reward, EvalConfig(max_tokens=8, samples=2)).evaluate()


async def test_an_update_during_the_evaluation_is_an_error_that_names_the_versions_ev1() -> None:
    rollout = SimulatedRollout(version=lambda number: 3 if number < 20 else 4)
    reward = SimulatedReward({i: scored(1, 1) for i in range(40)}, {i: Scored(1) for i in range(40)})
    evaluator = Evaluator(
        [prompt(i) for i in range(40)], rollout, reward, EvalConfig(max_tokens=8, samples=2, in_flight=4)
    )
    with pytest.raises(VersionMoved, match=r"got versions \[3, 4\]; publish no weights while an evaluation runs"):
        await evaluator.evaluate()
    assert len(rollout.calls) < 30  # the rest is not generated in vain
    assert rollout.running == 0


async def test_a_version_that_moved_because_a_replica_was_lost_ends_the_evaluation_alone_ev7() -> None:
    rollout = SimulatedRollout(version=lambda number: 3 if number < 20 else 4)
    reward = SimulatedReward({i: scored(1, 1) for i in range(40)}, {i: Scored(1) for i in range(40)})
    evaluator = Evaluator(
        [prompt(i) for i in range(40)],
        rollout,
        reward,
        EvalConfig(max_tokens=8, samples=2, in_flight=4),
        losses=lambda: 1 if len(rollout.calls) < 10 else 2,
    )
    with pytest.raises(EvaluationCut, match=r"a replica was lost and came back with newer weights: .* \[3, 4\]"):
        await evaluator.evaluate()


async def test_requests_in_flight_are_bounded_ev3() -> None:
    rollout = SimulatedRollout()
    reward = SimulatedReward({i: scored(1, 1) for i in range(40)}, {i: Scored(1) for i in range(40)})
    await Evaluator(
        [prompt(i) for i in range(40)], rollout, reward, EvalConfig(max_tokens=8, samples=2, in_flight=6)
    ).evaluate()
    assert rollout.most_running == 6
    assert len(rollout.calls) == 80


async def test_each_evaluation_asks_for_the_same_ev2() -> None:
    reward = SimulatedReward({i: scored(1, 1) for i in range(5)}, {i: Scored(1) for i in range(5)})
    rollout = SimulatedRollout()
    config = EvalConfig(samples=2, seed=9, temperature=0.7, max_tokens=12, prompts=3)
    evaluator = Evaluator([prompt(i) for i in range(5)], rollout, reward, config)
    await evaluator.evaluate()
    first, rollout.calls = rollout.calls, []
    await evaluator.evaluate()
    assert rollout.calls == first
    assert first == [
        *((i, 2, Sampling(temperature=0.7, max_tokens=12), 9) for i in range(3)),
        *((i, 1, Sampling(temperature=0.0, max_tokens=12), 9) for i in range(3)),
    ]


async def test_without_greedy_there_is_none() -> None:
    reward = SimulatedReward({i: scored(1, 0) for i in range(3)}, {})
    config = EvalConfig(max_tokens=8, samples=2, greedy=False)
    result = await Evaluator([prompt(i) for i in range(3)], SimulatedRollout(), reward, config).evaluate()
    assert result.greedy is None
    assert result.truncated == 0


async def test_an_error_of_the_reward_ends_the_evaluation_as_itself() -> None:
    class BrokenReward:
        async def score(self, group: Group) -> Group:
            raise OSError("verifier gone")

    with pytest.raises(OSError, match="verifier gone"):
        await Evaluator([prompt(0)], SimulatedRollout(), BrokenReward(), EvalConfig(max_tokens=8)).evaluate()


async def test_an_error_may_cost_the_evaluation_alone_but_a_version_that_moved_never_does_ev7() -> None:
    class BrokenReward:
        async def score(self, group: Group) -> Group:
            raise OSError("verifier gone")

    config = EvalConfig(max_tokens=8, on_error="tell")
    with pytest.raises(EvaluationCut, match="failed: verifier gone"):
        await Evaluator([prompt(0)], SimulatedRollout(), BrokenReward(), config).evaluate()
    reward = SimulatedReward({i: scored(*[1] * 8) for i in range(3)}, {i: Scored(1) for i in range(3)})
    moving = SimulatedRollout(version=lambda number: 3 if number < 2 else 4)
    with pytest.raises(VersionMoved):
        await Evaluator([prompt(i) for i in range(3)], moving, reward, config).evaluate()


@pytest.mark.parametrize(
    ("field", "value"),
    [("every", -1), ("ranks", -1), ("prompts", -1), ("samples", 0), ("in_flight", 0), ("temperature", 0.0)],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\[evaluation\] {field}: expected .* got {value}"):
        EvalConfig(**{field: value})  # type: ignore[arg-type]


def test_an_interval_of_shares_stays_between_0_and_1_ev5() -> None:
    # 7 of 8: .875 +- 1.96 x .354 / sqrt(8) = .63 to 1.12
    assert estimate([1.0] * 7 + [0.0]).interval == pytest.approx((0.63, 1.0), abs=1e-3)
    low, high = estimate([2.0] * 7 + [0.0]).interval or (0.0, 0.0)  # no shares: nothing is cut
    assert (low, high) == pytest.approx((1.26, 2.24), abs=1e-2)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected held-out prompts, got none"):
        Evaluator([], SimulatedRollout(), SimulatedReward({}, {}), EvalConfig())


def test_the_interval_covers_the_truth_in_about_19_of_20_cases_ev5() -> None:
    # Prompts of unlike difficulty, 8 samples each. 400 intervals: .95 -+ 4 standard errors of .0109.
    from roles.evaluator import _result

    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        difficulty = rng.beta(0.5, 0.5, size=64)  # mean .5
        groups = []
        for i, p in enumerate(difficulty):
            group = Group(prompt=prompt(i), completions=[])
            group.rewards = scored(*(float(x) for x in rng.random(8) < p))
            groups.append(group)
        interval = _result(groups, []).accuracy_interval
        assert interval is not None
        covered += interval[0] <= 0.5 <= interval[1]
    assert math.isclose(covered / 400, 0.95, abs_tol=0.045)
