"""One run of the embedded job for `benchmarks/async_.py`, in a process of its own: settings in, one JSON line out.

The page and its roles are those of `runtime.launch`. Added is what a launch does not have: completions that can be held
back for a log-normal time, as if an engine elsewhere took that long, so that a long tail costs no core of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from algorithms import catalog
from algorithms.admission import Admission
from algorithms.buffer import Buffer, Taken
from algorithms.grpo import GRPO
from algorithms.job import Job, count_cores, resolve
from algorithms.watchdog import Watchdog
from roles.evaluator import EvalResult, EvaluationCut, Evaluator
from roles.prompts import PromptEncoder, PromptSource, held_out
from roles.reward import RewardPool
from roles.rollout import Rollout
from roles.seeds import completion_seed
from roles.trainer import Trainer
from roles.types import Dropped, Group, Prompt, Sampling, StepResult
from runtime import this_host
from runtime.config import load
from sync.session import Commit, WeightSession

RECIPE = Path(__file__).parents[1] / "recipes" / "default.toml"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    staleness: float
    overrides: list[str] = []
    tail_mean: float = 0.0
    """Seconds that a group is held back, on average; 0: not at all."""
    tail_sigma: float = 0.0
    """Deviation of the logarithm of that time."""


class Measured(msgspec.Struct, kw_only=True):
    """What a run says. Seconds since its first step, evaluations not counted."""

    step_seconds: list[float] = []
    parts: dict[str, float] = {}
    """Seconds of the loop by part, over all steps but the first."""
    ages: list[float] = []
    """Mean of each batch."""
    age_max: int = 0
    evaluations: list[tuple[int, float, float]] = []
    """(steps done, accuracy, half of its 95 % interval)."""
    dropped: dict[str, int] = {}
    wasted_tokens: int = 0
    trained_tokens: int = 0
    rollout_busy: float = 0.0
    """Seconds of engine steps."""


class Late:
    """A rollout whose groups come later."""

    def __init__(self, rollout: Rollout, settings: Settings) -> None:
        self._rollout = rollout
        self._mean, self._sigma = settings.tail_mean, settings.tail_sigma

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        group = await self._rollout.group(prompt, n, sampling, seed, attempt=attempt)
        if self._mean:
            await asyncio.sleep(held_back(self._mean, self._sigma, seed, prompt.position, attempt))
        return group


def held_back(mean: float, sigma: float, seed: int, position: int, attempt: int) -> float:
    """The seconds that a group is held back: log-normal of that mean, the same for the same group."""
    rng = random.Random(completion_seed(seed, position, 1 << 20, attempt))
    return mean * math.exp(rng.gauss(-(sigma**2) / 2, sigma))


class Watch:
    """Counts what the page tells (`algorithms.report.Observer`). Its clock stands still while the page waits for an
    evaluation."""

    def __init__(self) -> None:
        self.measured = Measured()
        self._parts: dict[str, float] = {}
        self._last = self._start = time.monotonic()
        self._evaluating = 0.0

    def start(self) -> None:
        self._last = self._start = time.monotonic()

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._parts[part] = self._parts.get(part, 0.0) + seconds
            self._evaluating += seconds if part == "evaluate" else 0.0

    @contextlib.contextmanager
    def generating(self, prompt: Prompt) -> Iterator[dict[str, object]]:
        yield {}

    def step(self, step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None:
        now, m = time.monotonic(), self.measured
        m.step_seconds.append(now - self._last - self._parts.get("evaluate", 0.0))
        self._last = now
        ages = [one.age for one in taken]
        m.ages.append(sum(ages) / len(ages))
        m.age_max = max(m.age_max, *ages)
        m.trained_tokens += sum(one.group.num_tokens for one in taken)
        if step > 1:  # the first pays for what is done once
            for part, seconds in self._parts.items():
                m.parts[part] = m.parts.get(part, 0.0) + seconds
        self._parts.clear()

    def evaluating(self, step: int) -> None: ...

    def evaluated(self, step: int, result: EvalResult | EvaluationCut) -> None:
        if isinstance(result, EvalResult):
            low, high = result.accuracy_interval or (result.accuracy, result.accuracy)
            self.measured.evaluations.append((step, result.accuracy, (high - low) / 2))

    def dropped(self, dropped: Dropped) -> None: ...

    def close(self) -> None: ...


async def run(settings: Settings) -> Measured:
    job = load(RECIPE, Job, [f"staleness={settings.staleness}", *settings.overrides])
    job = resolve(job, folder=RECIPE.parent, source=RECIPE.name, gpus=0, cores=count_cores()).job
    encoder = PromptEncoder(job.model.path, job.data)
    kept_out = held_out(job.data, job.evaluation.prompts, job.evaluation.seed, encoder)
    prompts = PromptSource(job.data, encoder, kept_out)
    async with this_host() as host:
        trainer = await Trainer.start(host, job.trainer, job.model.path)
        rollout = await Rollout.start(host, job.rollout, job.model.path)
        reward = await RewardPool.start(host, job.reward)
        weights = WeightSession(trainer.mesh, rollout.mesh, job.sync)
        await weights.open()
        size = job.grpo.prompts_per_step
        admission = Admission(prompts, groups_per_step=size, staleness=job.staleness, num_groups=job.steps * size)
        buffer, watch = Buffer(admission), Watch()
        page = GRPO(
            rollout=Late(rollout, settings),
            reward=reward,
            trainer=trainer,
            weights=weights,
            evaluator=Evaluator(kept_out, rollout, reward, job.evaluation) if kept_out else None,
            admission=admission,
            buffer=buffer,
            checkpoints=None,
            report=watch,
            watchdog=Watchdog(job.watch, buffer.who_waits),
            config=job.grpo,
            sampling=job.sampling,
            advantage=catalog.advantage(job.grpo.advantage),
            objective=catalog.objective(job.grpo.loss, job.grpo.loss_options),
            evaluate_every=job.evaluation.every,
            seed=job.seed,
        )
        await page.run(0, job.steps)
        measured, book = watch.measured, admission.statistics()
        measured.dropped, measured.wasted_tokens = book.dropped, book.dropped_tokens
        measured.rollout_busy = sum(one.busy_seconds for one in await rollout.stats())
        prompts.close()
        await weights.close()
    return measured


def main() -> None:
    settings: Any = msgspec.json.decode(sys.argv[1], type=Settings)
    print(json.dumps(msgspec.to_builtins(asyncio.run(run(settings)))))


if __name__ == "__main__":
    main()
