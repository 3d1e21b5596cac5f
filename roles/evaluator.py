"""Held-out accuracy of one policy version: avg@k and pass@k with intervals, greedy beside them.

EV-1: all tokens of an evaluation carry one version; otherwise it raises `VersionMoved`. Whoever publishes waits while
      an evaluation runs, unless it runs on replicas of its own: this file doesn't hold updates, it proves that they
      were held.
EV-2: the same prompts and seeds every time: two evaluations of the same weights give the same answers, and a difference
      between versions is one of the policy, not of the draw.
EV-3: at most `in_flight` requests are under way, so that training's own requests are not starved.
EV-4: a completion without a verdict is left out and counted, never taken for wrong. Each prompt has the same weight.
EV-5: intervals are over prompts: the samples of one prompt are not independent, so they count as one observation.
EV-6: `cut` ends an evaluation early: what is judged by then is the result, marked as not complete. Prompts are begun in
      order, but the answers that are missing are the slow ones: a cut result is no estimate for the whole set.
EV-7: an error ends the run, or with `on_error = "tell"` the evaluation alone. A version that moved always ends the run,
      unless a replica was lost meanwhile: it came back with newer weights than the evaluation has begun with, which are
      no longer to be had. That ends the evaluation alone.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from roles.types import Group, Prompt, Sampling, Scored
from runtime import TaskGroup
from runtime.errors import TuttiError

_Z_95 = statistics.NormalDist().inv_cdf(0.975)


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[evaluation]` table of a job."""

    every: int = 10
    """Training steps between evaluations. 0: only before the first and after the last."""
    prompts: int = 128
    """Held-out prompts. 0: no evaluation at all."""
    samples: int = 8
    """k of avg@k: completions of each prompt."""
    temperature: float = 1.0
    """Of the k samples."""
    greedy: bool = True
    """Whether to take one greedy completion of each prompt as well."""
    seed: int = 0
    """Of the samples; the same at each evaluation (EV-2)."""
    max_tokens: int = 0
    """Limit of each completion. 0: derived, that of the training samples."""
    in_flight: int = 16
    """Requests under way at once, k samples each (EV-3)."""
    part: str = ""
    """Of a reward with parts: the one that is the accuracy, such as "right". Empty: the whole reward."""
    max_delay_s: float = 0.0
    """Seconds that the next weights, or with ranks of its own the next evaluation, may wait for the one under way. Then
    it is cut short and says over how many prompts it speaks (EV-6). 0: as long as it takes."""
    ranks: int = 0
    """Replicas of its own, engines like those of [rollout]: they take a snapshot of the weights, and training goes on.
    0: it shares those of [rollout], and the next weights wait until it has ended."""

    on_error: Literal["end", "tell"] = "end"
    """What an error of an evaluation does, such as a reward that fails too often: "end" the run, or "tell": it is
    shown, the evaluation has no result, and training goes on."""

    def __post_init__(self) -> None:
        least_of = {"every": 0, "prompts": 0, "samples": 1, "max_tokens": 0, "in_flight": 1, "ranks": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(
                    f"[evaluation] {name}: expected at least {least}, got {value}; set it to {least} or more"
                )
        if not 0 <= self.max_delay_s < math.inf:
            raise ValueError(
                f"[evaluation] max_delay_s: expected at least 0, got {self.max_delay_s}; 0 waits as long as it takes"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"[evaluation] temperature: expected more than 0, got {self.temperature}; for 0 there is greedy = true"
            )


class Estimate(msgspec.Struct, frozen=True):
    """A mean over prompts."""

    value: float
    interval: tuple[float, float] | None
    """95 % confidence, clustered by prompt (EV-5). None with fewer than two prompts."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy over some prompts."""

    accuracy: float
    """avg@k: mean over prompts of the mean reward of their samples."""
    accuracy_interval: tuple[float, float] | None
    """95 % confidence interval of `accuracy`, clustered by prompt (EV-5). None with fewer than two prompts."""
    greedy: float | None
    """Mean reward of the greedy completions; None when there are none."""
    num_prompts: int
    """Prompts with at least one judged sample."""
    pass_at: dict[int, Estimate] = {}
    """k -> the chance that at least one of k samples is solved, for powers of two up to the samples of a prompt."""


class EvalResult(TaskResult, frozen=True, kw_only=True):
    """One evaluation."""

    version: int
    """The policy version that all tokens came from."""
    by_task: dict[str, TaskResult]
    """The same by task family."""
    seconds: float
    """Wall time."""
    num_tokens: int
    """Tokens sampled."""
    truncated: float
    """Share of all completions that ran into `max_tokens`."""
    unscored: int
    """Completions without a verdict (EV-4)."""
    complete: bool = True
    """Whether all prompts were judged; False after `cut` (EV-6)."""


class VersionMoved(TuttiError):
    """Weights were published while an evaluation ran, or replicas serve different versions."""

    def __init__(self, versions: Sequence[int]) -> None:
        super().__init__(
            f"evaluation: expected tokens of one policy version, got versions {list(versions)}; publish no weights "
            "while an evaluation runs, and evaluate after all replicas have committed"
        )
        self.versions = versions


class EvaluationCut(TuttiError):
    """An evaluation was ended before it had any result (EV-6), or failed where that ends nothing (EV-7)."""


class Generates(Protocol):
    """The part of `roles.rollout.Rollout` that is needed."""

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> Group: ...


class Scores(Protocol):
    """The part of `roles.reward.RewardPool` that is needed."""

    async def score(self, group: Group) -> Group: ...


class Evaluator:
    """Evaluates the policy in service on a fixed set.

    Args:
        prompts: held-out prompts; the first `config.prompts` are used, all if there are fewer.
        rollout: generates with the weights in service.
        reward: judges.
        config: how much and how.
        stops: its stop strings and tokens are those of the training samples.
        losses: tells how often a replica was lost until now.

    Raises:
        ValueError: there are no prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rollout: Generates,
        reward: Scores,
        config: EvalConfig,
        stops: Sampling = Sampling(),  # noqa: B008  # it is frozen
        losses: Callable[[], int] = lambda: 0,
    ) -> None:
        if not prompts:
            raise ValueError("[evaluation] prompts: expected held-out prompts, got none; give [data] a held-out set")
        if not config.max_tokens:
            raise ValueError("[evaluation] max_tokens: expected at least 1, got 0; give it that of [sampling]")
        self._prompts = list(prompts[: config.prompts])
        self._rollout = rollout
        self._reward = reward
        self._config = config
        self._stops = stops
        self._losses = losses
        self._cut = asyncio.Event()

    @property
    def max_delay(self) -> float | None:
        """Seconds that anybody may wait for an evaluation; None: as long as it takes."""
        return self._config.max_delay_s or None

    def cut(self) -> None:
        """End the evaluation under way with what is judged by now (EV-6)."""
        self._cut.set()

    async def evaluate(self, judged: Callable[[], None] = lambda: None) -> EvalResult:
        """Generate, judge, and add up.

        Args:
            judged: told of each request that is judged.

        Raises:
            EvaluationCut: `cut` was called before anything was judged, or it failed and that is to be told (EV-7).
            VersionMoved: the tokens carry more than one version (EV-1).
            RuntimeError: not one completion could be judged.
        """
        losses = self._losses()
        try:
            return await self._evaluate(judged)
        except EvaluationCut:
            raise
        except VersionMoved as moved:
            if self._losses() == losses:
                raise
            raise EvaluationCut(
                f"a replica was lost and came back with newer weights: got versions {list(moved.versions)}"
            ) from moved
        except (TuttiError, ValueError, RuntimeError, OSError) as error:
            if self._config.on_error == "end":
                raise
            raise EvaluationCut(f"failed: {error}") from error

    async def _evaluate(self, judged: Callable[[], None]) -> EvalResult:
        began = time.perf_counter()
        config = self._config
        sampled = Sampling(
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            stop=self._stops.stop,
            stop_token_ids=self._stops.stop_token_ids,
        )
        greedy = msgspec.structs.replace(sampled, temperature=0.0)
        plan = [(prompt, config.samples, sampled) for prompt in self._prompts]
        plan += [(prompt, 1, greedy) for prompt in self._prompts if config.greedy]
        room = asyncio.Semaphore(config.in_flight)
        versions: set[int] = set()
        self._cut.clear()
        async with TaskGroup("evaluate") as tasks:
            running = [
                tasks.start(self._judge(*one, room, versions, judged), name=f"request-{index}")
                for index, one in enumerate(plan)
            ]
            watching = tasks.start(self._cancel_when_cut(running), name="cut")
            await asyncio.wait(running)
            watching.cancel()
        ended = [None if task.cancelled() else task.result() for task in running]
        groups = [group for group in ended if group is not None]
        sampled_groups = [group for group in ended[: len(self._prompts)] if group is not None]
        greedy_groups = [group for group in ended[len(self._prompts) :] if group is not None]
        if len(groups) < len(plan) and not _means(sampled_groups):
            raise EvaluationCut("cut before one prompt was judged; raise [evaluation] max_delay_s")
        completions = [completion for group in groups for completion in group.completions]
        overall = _result(sampled_groups, greedy_groups)
        return EvalResult(
            accuracy=overall.accuracy,
            accuracy_interval=overall.accuracy_interval,
            greedy=overall.greedy,
            num_prompts=overall.num_prompts,
            pass_at=overall.pass_at,
            complete=len(groups) == len(plan),
            version=versions.pop(),
            by_task=_by_task(sampled_groups, greedy_groups),
            seconds=time.perf_counter() - began,
            num_tokens=sum(len(completion.token_ids) for completion in completions),
            truncated=sum(c.finish_reason == "length" for c in completions) / len(completions),
            unscored=sum(not isinstance(reward, Scored) for group in groups for reward in group.rewards),
        )

    async def _cancel_when_cut(self, running: Sequence[asyncio.Task[Group]]) -> None:
        await self._cut.wait()
        for task in running:
            task.cancel()

    async def _judge(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        room: asyncio.Semaphore,
        versions: set[int],
        judged: Callable[[], None],
    ) -> Group:
        async with room:
            group = await self._rollout.generate(prompt, n, sampling, self._config.seed)
            for completion in group.completions:
                versions.update(completion.versions.tolist())
            if len(versions) > 1:
                raise VersionMoved(sorted(versions))
            group = self._of_part(await self._reward.score(group))
            judged()
            return group

    def _of_part(self, group: Group) -> Group:
        """The group with the verdicts of the part that counts."""
        part = self._config.part
        if not part:
            return group
        if missing := [r for r in group.rewards if isinstance(r, Scored) and part not in r.parts]:
            raise ValueError(
                f"[evaluation] part = {part!r}: the reward has no such part, it has {sorted(missing[0].parts)}; "
                "name one of [reward.parts]"
            )
        rewards = [Scored(r.parts[part]) if isinstance(r, Scored) else r for r in group.rewards]
        return msgspec.structs.replace(group, rewards=rewards)


def _result(sampled: Sequence[Group], greedy: Sequence[Group]) -> TaskResult:
    """Of groups that are scored; the mean of each prompt is one observation."""
    means = _means(sampled)
    if not means:
        raise RuntimeError(
            "evaluation: expected verdicts, but not one completion could be judged; look at the reasons of the reward "
            "workers, and try the verifier on one answer"
        )
    average = estimate(means)
    best = _means(greedy)
    return TaskResult(
        accuracy=average.value,
        accuracy_interval=average.interval,
        pass_at=_pass_at(sampled),
        greedy=statistics.fmean(best) if best else None,
        num_prompts=len(means),
    )


def estimate(observations: Sequence[float]) -> Estimate:
    """The mean of independent observations with its 95 % interval, by the normal approximation. Of observations that
    are all from 0 to 1 it doesn't leave that range either."""
    mean = statistics.fmean(observations)
    if len(observations) < 2:
        return Estimate(mean, None)
    half = _Z_95 * statistics.stdev(observations) / math.sqrt(len(observations))
    low, high = mean - half, mean + half
    if min(observations) >= 0 and max(observations) <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, (low, high))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): without bias, the chance that k of n samples hold a solved one. arXiv:2107.03374.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 2, 3)
    (0.25, 0.5, 0.0, 1.0)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k: expected k from 1 to the {num_samples} samples, got {k}")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _pass_at(sampled: Sequence[Group]) -> dict[int, Estimate]:
    """By k; prompts with fewer judged samples than k are left out of it (EV-4)."""
    verdicts = [[reward.value >= 1.0 for reward in g.rewards if isinstance(reward, Scored)] for g in sampled]
    most = max((len(judged) for judged in verdicts), default=0)
    powers = [1 << bit for bit in range(most.bit_length())]
    return {
        k: estimate([pass_at_k(len(judged), sum(judged), k) for judged in verdicts if len(judged) >= k])
        for k in powers
        if k <= most
    }


def _by_task(sampled: Sequence[Group], greedy: Sequence[Group]) -> dict[str, TaskResult]:
    """Tasks of which no sample could be judged are left out."""
    parts: dict[str, tuple[list[Group], list[Group]]] = defaultdict(lambda: ([], []))
    for side, groups in enumerate((sampled, greedy)):
        for group in groups:
            parts[group.prompt.task][side].append(group)
    return {task: _result(*parts[task]) for task in sorted(parts) if _means(parts[task][0])}


def _means(groups: Sequence[Group]) -> list[float]:
    """Mean reward of each group that has a verdict (EV-4)."""
    values = [[reward.value for reward in group.rewards if isinstance(reward, Scored)] for group in groups]
    return [statistics.fmean(scores) for scores in values if scores]
