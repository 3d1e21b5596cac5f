"""A whole run under a virtual clock: the real page, admission, buffer and routing over roles that only take time.

PL-1: the order of things is that of the real objects; nothing of it is modelled here.
PL-2: the same arguments give the same outcome, to the bit.
PL-3: what the pipeline needs to fill at the start is not counted (`WARM_UP`).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from algorithms import virtual_time
from algorithms.admission import Admission
from algorithms.buffer import Buffer, Taken
from algorithms.catalog import advantage
from algorithms.grpo import GRPO, GRPOConfig
from algorithms.simulated import (
    CountedPrompts,
    Lengths,
    Replica,
    SimulatedReward,
    SimulatedRollout,
    SimulatedTrainer,
    SimulatedWeights,
    Speeds,
)
from algorithms.watchdog import WatchConfig, Watchdog
from roles.evaluator import EvalResult, EvaluationCut
from roles.objective import ObjectiveSpec
from roles.types import Dropped, Prompt, Sampling, StepResult
from sync.session import Commit

__all__ = ["Outcome", "Recorder", "Stage", "Times", "play", "stage"]

WARM_UP = 0.2
"""Share of the steps that is played and not counted: the pipeline fills first."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a job is simulated with: how long things take, and how long completions are."""

    speeds: Speeds
    lengths: Lengths
    rollout_ranks: int = 1
    """The ranks that these times are of."""
    trainer_ranks: int = 1
    source: str = "given"

    def of_ranks(self, rollout: int, trainer: int) -> Times:
        """The same work over other ranks: training is spread evenly (SM-1), replicas are added as they are."""
        share = self.trainer_ranks / trainer
        speeds = replace(
            self.speeds,
            train_base=self.speeds.train_base * share,
            train_per_token=self.speeds.train_per_token * share,
        )
        return replace(self, speeds=speeds, rollout_ranks=rollout, trainer_ranks=trainer)


@dataclass(kw_only=True)
class Outcome:
    """What happened in simulated time. Ages in versions, shares from 0 to 1."""

    seconds_per_step: float
    tokens_per_second: float
    age_mean: float
    age_max: int
    rollout_idle: float
    """Share of the time that a replica has nothing to decode, mean over replicas."""
    trainer_idle: float
    dropped: dict[str, int]
    wasted: float
    """Tokens of dropped groups over all sampled tokens; those of groups that were stopped half way are not counted."""
    ages: list[int] = field(default_factory=list)
    """Of all trained groups, in the order of training."""
    batch_ages: list[float] = field(default_factory=list)
    """Mean of each batch."""
    weights: bytes = b""
    """Digest of everything that was trained, in order."""


class Recorder:
    """Counts what a page tells (`Observer`)."""

    def __init__(self, admission: Admission, replicas: Sequence[Replica], trainer: SimulatedTrainer) -> None:
        self._admission = admission
        self._replicas = replicas
        self._trainer = trainer
        self.ages: list[list[int]] = []
        self.marks: list[tuple[float, float, float, float]] = []
        """After each step: time, busy seconds of replicas, of the trainer, tokens trained."""
        self._tokens = 0.0

    def start(self) -> None:
        self._mark()

    def timing(self, part: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def generating(self, prompt: Prompt) -> Iterator[dict[str, object]]:
        yield {}

    def step(self, step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None:
        self.ages.append([one.age for one in taken])
        self._tokens += sum(one.group.num_tokens for one in taken)
        self._mark()

    def evaluating(self, step: int) -> None: ...

    def evaluated(self, step: int, result: EvalResult | EvaluationCut) -> None: ...

    def dropped(self, dropped: Dropped) -> None: ...

    def close(self) -> None: ...

    def _mark(self) -> None:
        now = asyncio.get_running_loop().time()
        busy = statistics.fmean(replica.busy_seconds for replica in self._replicas)
        self.marks.append((now, busy, self._trainer.busy_seconds, self._tokens))

    def outcome(self) -> Outcome:
        first = min(int(len(self.ages) * WARM_UP), len(self.ages) - 1)
        (t0, r0, b0, n0), (t1, r1, b1, n1) = self.marks[first], self.marks[-1]
        seconds = max(t1 - t0, 1e-12)
        book = self._admission.statistics()
        ages = [age for batch in self.ages for age in batch]
        return Outcome(
            seconds_per_step=seconds / (len(self.ages) - first),
            tokens_per_second=(n1 - n0) / seconds,
            age_mean=statistics.fmean(age for batch in self.ages[first:] for age in batch),
            age_max=max(ages),
            rollout_idle=max(0.0, 1 - (r1 - r0) / seconds),
            trainer_idle=max(0.0, 1 - (b1 - b0) / seconds),
            dropped=book.dropped,
            wasted=book.dropped_tokens / max(book.dropped_tokens + self._tokens, 1.0),
            ages=ages,
            batch_ages=[statistics.fmean(batch) for batch in self.ages],
            weights=self._trainer.weights,
        )


@dataclass(kw_only=True)
class Stage:
    """A page over simulated roles, ready to run inside of a virtual loop."""

    page: GRPO
    recorder: Recorder
    replicas: list[Replica]
    rollout: SimulatedRollout
    trainer: SimulatedTrainer


def stage(
    config: GRPOConfig,
    times: Times,
    *,
    staleness: float,
    steps: int,
    seed: int = 0,
    success: float = 0.5,
    prompts: CountedPrompts | None = None,
) -> Stage:
    """Put a page together. To be called inside of the loop that it runs in."""
    admission = Admission(
        prompts or CountedPrompts(),
        groups_per_step=config.prompts_per_step,
        staleness=staleness,
        window=config.window,
        over_sampling=config.over_sampling,
        too_old=config.too_old,
        num_groups=steps * config.prompts_per_step,
    )
    buffer = Buffer(admission)
    replicas = [Replica(times.speeds) for _ in range(times.rollout_ranks)]
    rollout = SimulatedRollout(replicas, times.lengths)
    trainer = SimulatedTrainer(times.speeds)
    recorder = Recorder(admission, replicas, trainer)
    page = GRPO(
        rollout=rollout,
        reward=SimulatedReward(success=success),
        trainer=trainer,
        weights=SimulatedWeights(replicas, times.speeds),
        evaluator=None,
        admission=admission,
        buffer=buffer,
        checkpoints=None,
        report=recorder,
        watchdog=Watchdog(WatchConfig(stall_s=0.0), buffer.who_waits),
        config=config,
        sampling=Sampling(),
        advantage=advantage(config.advantage),
        objective=ObjectiveSpec(function="algorithms.losses:ppo"),
        evaluate_every=0,
        seed=seed,
    )
    return Stage(page=page, recorder=recorder, replicas=replicas, rollout=rollout, trainer=trainer)


def play(
    config: GRPOConfig, times: Times, *, staleness: float, steps: int, seed: int = 0, success: float = 0.5
) -> Outcome:
    """Run a job in virtual time.

    Args:
        success: chance that a completion is solved; matters where groups without contrast leave.

    Raises:
        Deadlock: the pipeline can't go on: a fault of ours.
    """

    async def main() -> Outcome:
        scene = stage(config, times, staleness=staleness, steps=steps, seed=seed, success=success)
        await scene.page.run(0, steps)
        return scene.recorder.outcome()

    return virtual_time.run(main())
