"""A1, A2, A3 over the real page, admission, buffer and routing, with simulated roles and a virtual clock.

No process and no waiting: 10^5 groups with log-normal lengths, stragglers, lost replicas and unscored completions. That
the pipeline never stops is the loop's to say: it raises `Deadlock` when nobody can go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from algorithms import virtual_time
from algorithms.buffer import Taken
from algorithms.grpo import GRPOConfig
from algorithms.play import Outcome, Stage, Times, play, stage
from algorithms.simulated import CountedPrompts, Replica, SimulatedRollout, SimulatedWeights, Speeds, lognormal
from algorithms.watchdog import WatchConfig, Watchdog
from roles.evaluator import EvalConfig, EvalResult, EvaluationCut, Evaluator
from roles.types import Dropped, Group, Prompt, Sampling, StepResult, Unscored
from runtime.errors import Death, ProcessDied
from sync.session import Commit

PLAIN = GRPOConfig(prompts_per_step=16, samples_per_prompt=1, advantage="reinforce")


def times(*, work: float = 1.0, train: float = 1.0, sigma: float = 0.0, at_once: int = 1, **changes) -> Times:
    """`work` seconds of decoding for 16 completions, one after the other; `at_once` 10^6: all at the same time."""
    one_by_one = at_once == 1
    speeds = Speeds(
        step_base=work / (16 * 100 if one_by_one else 100),
        step_per_sequence=0.0,
        train_base=train,
        train_per_token=0.0,
        publish=0.0,
        max_running=at_once,
    )
    return Times(speeds=speeds, lengths=lognormal(100, sigma, 10_000), **changes)


# --- the bound, conservation, no deadlock -----------------------------------------------------------------------------


class Misfortune(SimulatedRollout):
    """Some groups never end, some lose their replica, some hang far longer than others."""

    def __init__(self, scene: Stage, seed: int) -> None:
        super().__init__(scene.replicas, scene.rollout._lengths)
        self._rng = random.Random(seed)

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        fate = self._rng.random()
        if fate < 0.01:
            await asyncio.sleep(60.0)
            return Dropped(position=prompt.position, reason="timeout", num_tokens=3)
        if fate < 0.03:
            await asyncio.sleep(self._rng.random())
            return Dropped(position=prompt.position, reason="aborted")
        if fate < 0.06:
            await asyncio.sleep(self._rng.expovariate(0.2))
        return await super().group(prompt, n, sampling, seed, attempt=attempt)


class Moody:
    """Judges most groups."""

    def __init__(self, inner) -> None:
        self._inner = inner

    async def score(self, group: Group) -> Group:
        if group.prompt.position % 97 == 0:
            return msgspec.structs.replace(group, rewards=[Unscored("x")] * len(group.completions))
        judged: Group = await self._inner.score(group)
        return judged


def unlucky(config: GRPOConfig, staleness: float, steps: int, seed: int = 0) -> tuple[Outcome, Stage]:
    async def main() -> tuple[Outcome, Stage]:
        scene = stage(
            config,
            times(sigma=1.0, train=0.5, at_once=10**6, rollout_ranks=3),
            staleness=staleness,
            steps=steps,
            seed=seed,
        )
        scene.page.rollout = Misfortune(scene, seed)
        scene.page.reward = Moody(scene.page.reward)
        assert await scene.page.run(0, steps) == steps
        return scene.recorder.outcome(), scene

    return virtual_time.run(main())


def check_book(scene: Stage, steps: int) -> None:
    """Exact conservation at the end: every group that was issued was trained or dropped, none is left anywhere."""
    book = scene.page.admission.statistics()
    assert book.trained == 16 * steps
    assert (book.in_flight, book.buffered, book.training) == (0, 0, 0)
    assert book.issued == book.trained + sum(book.dropped.values())


@pytest.mark.parametrize("S", [0, 0.3, 1, 2, 4, 8])
def test_age_bound_and_conservation_hold_over_many_groups_with_stragglers_and_losses(S):
    """About 34,000 groups together. GR-2 asserts both after each of 350 steps; here they are looked at from outside."""
    steps = 350
    outcome, scene = unlucky(PLAIN, S, steps)
    check_book(scene, steps)
    assert outcome.age_max <= scene.page.admission.max_age == -(-S // 1)
    assert max(outcome.batch_ages) <= S + 1e-9  # a fractional S bounds the mean of a batch (BO-5)
    assert outcome.age_max == -(-S // 1)  # the bound is reached: the test tests it
    assert set(outcome.dropped) == {"timeout", "aborted", "unscored"}  # nothing was too old: strict order drops nothing


@pytest.mark.parametrize(
    ("changes", "S", "worst"),
    [
        ({"window": 5}, 1, 1),
        ({"window": 9, "too_old": "train"}, 1, 2),
        ({"window": 17, "too_old": "train"}, 2, 3),
        ({"over_sampling": 1.5}, 0, 0),
        ({"over_sampling": 1.25, "window": 3}, 1, 1),
    ],
)
def test_windows_and_over_sampling_keep_their_worst_age(changes, S, worst):
    steps = 150
    outcome, scene = unlucky(msgspec.structs.replace(PLAIN, **changes), S, steps)
    assert scene.page.admission.max_age == worst
    assert outcome.age_max <= worst
    book = scene.page.admission.statistics()
    assert book.trained == 16 * steps
    assert book.issued == book.trained + sum(book.dropped.values()) + book.in_flight + book.buffered
    assert ("stale" in outcome.dropped) == (changes.get("too_old") != "train")


@pytest.mark.parametrize("S", [0, 1])
def test_dynamic_filtering_refills_the_batch_and_never_trains_a_group_without_contrast(S):
    """DAPO: of groups of 2 with success 1/2, half have no contrast."""
    config = GRPOConfig(prompts_per_step=16, samples_per_prompt=2, no_contrast="refill")
    outcome = play(config, times(at_once=10**6), staleness=S, steps=60)
    assert len(outcome.ages) == 16 * 60  # every batch was full
    assert 0.7 < outcome.dropped["no_contrast"] / len(outcome.ages) < 1.4
    assert outcome.age_max <= S


def test_an_error_of_the_rollout_ends_the_run_with_that_error():
    class Cursed(SimulatedRollout):
        async def group(
            self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
        ) -> Group | Dropped:
            if prompt.position == 5:
                raise ProcessDied("rollout", 0, "simulated", "generate", Death(signal=11))
            return await super().group(prompt, n, sampling, seed, attempt=attempt)

    closed: list[bool] = []

    async def main() -> None:
        scene = stage(PLAIN, times(), staleness=1, steps=5)
        scene.page.rollout = Cursed(scene.replicas, scene.rollout._lengths)
        scene.recorder.close = lambda: closed.append(True)  # type: ignore[method-assign]
        await scene.page.run(0, 5)

    with pytest.raises(ProcessDied, match="SIGSEGV"):
        virtual_time.run(main())
    assert closed  # records that wait for an evaluation are written whatever the end


def test_a_pipeline_that_can_never_go_on_is_told_as_such():
    class Silent(SimulatedRollout):
        async def group(self, *_args, **_options) -> Group | Dropped:
            group: Group = await asyncio.get_running_loop().create_future()
            return group

    async def main() -> None:
        scene = stage(PLAIN, times(), staleness=1, steps=5)
        scene.page.rollout = Silent(scene.replicas, scene.rollout._lengths)
        await scene.page.run(0, 5)

    with pytest.raises(virtual_time.Deadlock, match="every coroutine waits and no timer is set"):
        virtual_time.run(main())


# --- throughput -------------------------------------------------------------------------------------------------------


def seconds(S: float, T: Times, steps: int = 60) -> float:
    return play(PLAIN, T, staleness=S, steps=steps).seconds_per_step


@pytest.mark.parametrize("T_g", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("S", [0, 1, 2, 4])
def test_throughput_of_a_busy_engine_is_that_of_the_closed_form(S, T_g):
    """Decoding work of T_g a batch, one after the other: T_g + T_t without overlap, max(T_g, T_t) with it."""
    wanted = T_g + 1 if S == 0 else max(T_g, 1)
    assert seconds(S, times(work=T_g)) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("S", [0.25, 0.5, 0.75])
def test_a_fraction_of_a_version_hides_that_fraction_of_generation(S):
    """While a step trains (1 s), S of the next batch (2 s of work) is decoded: T_g + T_t - min(S T_g, T_t)."""
    assert seconds(S, times(work=2.0)) == pytest.approx(2 + 1 - min(S * 2, 1), rel=0.03)


@pytest.mark.parametrize("S", [0, 1, 3])
def test_throughput_of_long_latencies_is_that_of_the_closed_form(S):
    """All completions at the same time, 4 s each: S + 1 batches share one round of generation and training."""
    assert seconds(S, times(work=4.0, at_once=10**6)) == pytest.approx(max(1, (4 + 1) / (S + 1)), rel=0.03)


@pytest.mark.parametrize(("T_g", "S"), [(3.0, 0), (3.0, 2), (0.4, 2)])
def test_throughput_with_a_long_tail_is_that_of_the_mean_work(T_g, S):
    """Log-normal lengths (sigma 1). The work of the trained groups is known, so that luck has no part in it."""
    steps = 400

    async def main() -> tuple[float, float]:
        scene = stage(PLAIN, times(work=T_g, sigma=1.0), staleness=S, steps=steps)
        await scene.page.run(0, steps)
        return scene.recorder.outcome().seconds_per_step, scene.replicas[0].busy_seconds / steps

    per_step, work = virtual_time.run(main())
    assert per_step == pytest.approx(work + 1 if S == 0 else max(work, 1), rel=0.03)


def test_idle_shares_add_up_to_what_the_closed_form_leaves():
    outcome = play(PLAIN, times(work=3.0), staleness=0, steps=60)
    assert (outcome.rollout_idle, outcome.trainer_idle) == pytest.approx((0.25, 0.75), abs=0.01)
    outcome = play(PLAIN, times(work=3.0), staleness=1, steps=60)
    assert outcome.rollout_idle == pytest.approx(0, abs=0.03)
    assert outcome.trainer_idle == pytest.approx(2 / 3, abs=0.03)


def test_a_window_hides_stragglers_that_strict_order_waits_for():
    tail = times(work=1.0, sigma=1.2, train=0.2, at_once=10**6)
    strict = play(PLAIN, tail, staleness=2, steps=100)
    window = play(msgspec.structs.replace(PLAIN, window=17, too_old="train"), tail, staleness=2, steps=100)
    assert window.seconds_per_step < 0.9 * strict.seconds_per_step
    assert window.age_max <= 3


def test_over_sampling_leaves_stragglers_behind_in_a_synchronous_run():
    tail = times(work=1.0, sigma=1.2, train=0.2, at_once=10**6)
    plain = play(PLAIN, tail, staleness=0, steps=100)
    more = play(msgspec.structs.replace(PLAIN, over_sampling=1.5), tail, staleness=0, steps=100)
    assert more.seconds_per_step < 0.7 * plain.seconds_per_step
    assert more.dropped["stale"] > 0
    assert more.age_max == 0


# --- the same as a plain loop -----------------------------------------------------------------------------------------


def plain_loop(T: Times, steps: int, seed: int) -> bytes:
    """Synchronous training without pipeline: generate P groups, train, send weights, repeat."""

    async def main() -> bytes:
        scene = stage(PLAIN, T, staleness=0, steps=steps, seed=seed)
        page, prompts = scene.page, CountedPrompts()
        for _ in range(steps):
            asked = [prompts.take() for _ in range(PLAIN.prompts_per_step)]
            groups = await asyncio.gather(
                *(scene.rollout.generate(p, PLAIN.samples_per_prompt, page.sampling, seed) for p in asked)
            )
            scored = [await page.reward.score(group) for group in groups]
            result = await page.trainer.train_step(await page.samples(scored), page.objective)
            await page.weights.publish(result.version)
        return scene.trainer.weights

    return virtual_time.run(main())


def test_staleness_zero_trains_what_a_plain_synchronous_loop_trains():
    T = times(sigma=1.0, at_once=4)
    outcome = play(PLAIN, T, staleness=0, steps=30, seed=3)
    assert outcome.weights == plain_loop(T, 30, seed=3)
    assert outcome.weights != plain_loop(T, 30, seed=4)
    assert play(PLAIN, T, staleness=1, steps=30, seed=3).weights != outcome.weights  # ages differ


def test_the_same_arguments_give_the_same_run_to_the_bit():
    T = times(sigma=1.0, at_once=8, rollout_ranks=2)
    one, other = (play(PLAIN, T, staleness=2, steps=30, seed=1) for _ in range(2))
    assert one == other
    assert statistics.fmean(one.ages) > 0


# --- the clock --------------------------------------------------------------------------------------------------------


def test_virtual_time_jumps_to_the_next_timer_in_order():
    async def main() -> list[float]:
        loop, marks = asyncio.get_running_loop(), list[float]()

        async def mark(after: float) -> None:
            await asyncio.sleep(after)
            marks.append(loop.time())

        await asyncio.gather(mark(3600), mark(5), mark(1e5))
        return marks

    assert virtual_time.run(main()) == pytest.approx([5, 3600, 1e5])


# --- evaluation beside training (GR-3) --------------------------------------------------------------------------------


class Evaluated(msgspec.Struct):
    results: list[EvalResult | EvaluationCut]
    waited: list[float]
    """Seconds that training waited for an evaluation, each time."""
    trained: float
    """When the last step had ended."""
    steps: int = 0
    ended: float = 0.0


def evaluated(
    max_delay: float, *, own: bool = False, every: int = 4, stop_at: float | None = None, stall: float = 0.0
) -> Evaluated:
    """Twelve steps of a second. An evaluation takes 50 s or so; the first is before them, the last after them."""

    async def main() -> Evaluated:
        scene = stage(PLAIN, times(at_once=10**6), staleness=1, steps=12)
        found, page, loop = Evaluated([], [], 0.0), scene.page, asyncio.get_running_loop()
        replicas = [Replica(times(at_once=10**6).speeds)] if own else scene.replicas
        slow = SimulatedRollout(replicas, lognormal(2000, 0.5, 10_000))
        config = EvalConfig(prompts=8, samples=1, greedy=False, max_tokens=64, in_flight=2, max_delay_s=max_delay)
        page.evaluator = Evaluator([CountedPrompts().at(10_000 + i) for i in range(8)], slow, page.reward, config)
        page.evaluate_every = every
        page.watchdog = Watchdog(WatchConfig(stall_s=stall), lambda: "")
        if own:
            weights = SimulatedWeights(replicas, times().speeds)

            async def snapshot() -> None:
                await weights.publish(scene.trainer.version)

            page.snapshot = snapshot

        @contextlib.contextmanager
        def timing(part: str) -> Iterator[None]:
            began = loop.time()
            yield
            if part == "evaluate" and loop.time() > began:
                found.waited.append(loop.time() - began)

        def step(step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None:
            found.trained = loop.time()

        def told(step: int, result: EvalResult | EvaluationCut) -> None:
            found.results.append(result)

        page.report.timing, page.report.step, page.report.evaluated = timing, step, told  # type: ignore[method-assign]
        if stop_at is not None:
            loop.call_later(stop_at, page.stop)
        found.steps = await page.run(0, 12)
        found.ended = loop.time()
        return found

    return virtual_time.run(main())


def of(found: Evaluated) -> list[tuple[bool, int, int]]:
    return [(one.complete, one.num_prompts, one.version) for one in found.results if isinstance(one, EvalResult)]


def test_the_next_weights_wait_for_an_evaluation_and_each_is_whole_and_on_one_version():
    found = evaluated(0.0)
    assert of(found) == [(True, 8, version) for version in (0, 4, 8, 12)]
    assert len(found.waited) == 3  # nothing waits for the last one


def test_an_evaluation_may_take_longer_than_a_stall_wd1():
    found = evaluated(0.0, stall=35.0)
    assert of(found) == [(True, 8, version) for version in (0, 4, 8, 12)]
    assert max(found.waited) > 35.0


def test_weights_wait_no_longer_than_the_job_allows_and_the_last_evaluation_is_never_cut():
    found = evaluated(3.0)
    assert found.waited == pytest.approx([3.0] * 3)
    assert len(found.results) == 4
    assert not any(isinstance(one, EvalResult) and one.complete for one in found.results[:-1])
    assert of(found)[-1] == (True, 8, 12)


def test_an_evaluation_with_replicas_of_its_own_delays_no_weights():
    """Only an evaluation that is due while the one before goes on waits, and that at most as long as the job allows."""
    found = evaluated(0.0, own=True, every=0)
    assert of(found) == [(True, 8, 0), (True, 8, 12)]
    assert found.waited == [found.waited[0]]  # the last one waits for the first, after all of the training
    alone = play(PLAIN, times(at_once=10**6), staleness=1, steps=12).seconds_per_step
    assert found.trained - found.waited[0] < 12 * alone + 2
    often = evaluated(3.0, own=True, every=4)
    assert often.waited == pytest.approx([3.0] * 3)
    assert of(often)[-1] == (True, 8, 12)
    assert {version for _, _, version in of(often)} <= {0, 4, 8, 12}


@pytest.mark.parametrize("own", [False, True])
def test_a_run_that_is_stopped_waits_for_no_evaluation(own):
    """At 20 s: weights wait for the first evaluation, or, with replicas of its own, the second one does."""
    found = evaluated(0.0, own=own, stop_at=20.0)
    assert found.steps == (4 if own else 1)
    assert found.ended == pytest.approx(20.0, abs=1.5)
    assert found.results == []
