"""Policy gradients over groups, with bounded staleness, on one page: GRPO and its kin.

Two coroutines share a pipeline (`Admission`, `Buffer`) and nothing else. `generate` turns slots into scored groups,
`train` turns groups into policy versions. Every line calls one room and gets a value back; nothing below calls up.

    generate:  slot -> prompt -> completions -> rewards -> buffer     as many groups at once as there are slots
    train:     buffer -> advantages -> step -> publish -> free slots  one step after the other

GR-1: a slot frees only after the fleet has committed the new weights, so that no group is born too old; `Buffer.take`
      checks the age again (A1). With staleness 0 this is plain synchronous training.
GR-2: conservation (A2) and the age bound are asserted after every step.
GR-3: the weights of an evaluation never move: publishing waits for it, for as long as the job allows; or it has a
      snapshot of them on replicas of its own, and only the next evaluation waits.
GR-4: a checkpoint is written between two steps and holds everything that was issued and not trained, so that a resumed
      run issues the same prompts in the same order; the weights of the trainer are published before anything else (A5).
GR-5: `stop` ends the run at the same place: the step under way is finished and saved, nothing is trained half.
GR-6: a group that can't be trained leaves as a value with its reason, and its slot goes to the next prompt: the batch
      is refilled, never short. When nearly all leave, the run ends (`max_refill`) rather than burn prompts for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from algorithms.admission import Admission, Closed, Ticket
from algorithms.advantages import Advantage, has_contrast, scored_mask
from algorithms.advisors import Advisors, CriticConfig
from algorithms.bounds import TooOld
from algorithms.buffer import Buffer
from algorithms.report import Observer
from algorithms.resume import Checkpoints
from algorithms.samples import scored_values, shape_overlong, to_samples, whiten
from algorithms.watchdog import Watchdog
from roles.evaluator import EvalResult, EvaluationCut, Evaluator
from roles.objective import ObjectiveSpec
from roles.types import Dropped, DropReason, Group, Prompt, Sampling, StepResult, TrainSample
from runtime import TaskGroup, TuttiError
from sync.session import Commit

__all__ = ["GRPO", "GRPOConfig", "NothingToTrain"]


class NothingToTrain(TuttiError):
    """Nearly every group leaves untrained (GR-6)."""


class GRPOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[grpo]` table of a job: GRPO (arXiv:2402.03300) and its kin, besides the settings of its roles."""

    prompts_per_step: int = 0
    """P, the groups of one training step. 0: derived, 32 on GPUs and 16 on CPU."""
    samples_per_prompt: int = 8
    """G, the completions of one group."""
    advantage: str = "grpo"
    """How rewards become advantages: a name of `algorithms.catalog`, or `module:function`."""
    loss: str = "grpo"
    """The objective: a name of `algorithms.catalog`, or `module:function`."""
    loss_options: dict[str, Any] = {}
    """Options of the objective, such as clip_low, clip_high, tis_cap, aggregate."""
    no_contrast: Literal["keep", "drop", "refill"] = "keep"
    """What becomes of a group whose rewards are all exactly equal. "keep": its tokens stay in the denominators. "drop":
    it takes its place in the batch but is not trained. "refill": another group takes its place (DAPO)."""
    max_refill: Annotated[int, Meta(ge=1)] = 20
    """The run ends when this many times prompts_per_step groups have left untrained since the last step."""
    overlong_buffer: Annotated[int, Meta(ge=0)] = 0
    """Tokens before sampling.max_tokens over which the reward falls (DAPO). It is applied after `no_contrast`, which
    looks at the verdict. 0: no penalty."""
    overlong_factor: Annotated[float, Meta(ge=0)] = 1.0
    """What the longest completion loses."""
    window: Annotated[int, Meta(ge=1)] = 1
    """A group may be passed by this many younger ones, less one, while it is generated. 1: strict order."""
    over_sampling: Annotated[float, Meta(ge=1)] = 1.0
    """Groups generated for each one trained; stragglers are dropped and issued again."""
    kl_in_reward: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of a penalty on each token for leaving the start model: log mu - log reference is taken off the reward."""
    critic: CriticConfig | None = None
    """A learned value for each token in place of a baseline: PPO. Needs advantage = "reinforce"."""
    too_old: TooOld = "drop"
    """What becomes of groups older than staleness allows; only a window or over_sampling makes any. "train" leaves them
    to the correction of the objective."""


class Generates(Protocol):
    """What the page needs of `roles.rollout.Rollout`."""

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped: ...


class Scores(Protocol):
    """What the page needs of `roles.reward.RewardPool`."""

    async def score(self, group: Group) -> Group: ...


class Trains(Protocol):
    """What the page needs of `roles.trainer.Trainer`."""

    version: int

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult: ...


class Publishes(Protocol):
    """What the page needs of `sync.session.WeightSession`."""

    async def publish(self, version: int) -> Commit: ...


@dataclass(kw_only=True)
class GRPO:
    """One run: the roles it drives, the pipeline between them, and what it is told."""

    rollout: Generates
    reward: Scores
    trainer: Trains
    weights: Publishes
    evaluator: Evaluator | None
    admission: Admission
    buffer: Buffer
    checkpoints: Checkpoints | None
    report: Observer
    watchdog: Watchdog
    advisors: Advisors | None = None
    snapshot: Callable[[], Awaitable[None]] | None = None
    """Brings the weights of now to the replicas of the evaluator; None: it shares those of training."""

    config: GRPOConfig
    sampling: Sampling
    advantage: Advantage
    objective: ObjectiveSpec
    evaluate_every: int
    """In steps, besides the evaluations before the first and after the last; 0: only those."""
    seed: int
    _evaluation: asyncio.Task[None] | None = None
    _groups: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Of the groups in flight, by ticket."""
    _left: Counter[str] = field(default_factory=Counter)
    """Groups that left untrained since the last step, by reason."""

    async def run(self, start: int, steps: int) -> int:
        """Train from step `start` until `steps` are done or `stop` is called; returns the steps done, all saved."""
        self.report.start()
        try:
            async with TaskGroup("grpo") as tasks:
                tasks.forever(self.watchdog.run(), name="watchdog")
                commit = await self.weights.publish(self.trainer.version)  # before anything else (GR-4)
                self.admission.commit(commit.version)
                generation = tasks.start(self.generate(), name="generate")
                done = await self.train(tasks, start, steps)
                if self.admission.closed and self.checkpoints is not None and self.checkpoints.exact:
                    await asyncio.wait([generation])  # until what is in flight has finished (RS-4)
                generation.cancel()
        except Exception:
            if self.checkpoints is not None:
                await self.checkpoints.rescue()
            raise
        finally:
            self.report.close()  # whatever the end: steps that waited for an evaluation are told
        if self.checkpoints is not None:
            await self.checkpoints.save(done)
        return done

    def stop(self) -> None:
        """Let the run end after the step under way (GR-5)."""
        self.buffer.close()
        if self._evaluation is not None:
            self._evaluation.cancel()

    # --- generate -----------------------------------------------------------------------------------------------------

    async def generate(self) -> None:
        """Keep every slot busy. Whoever cancels this cancels all groups under way."""
        async with TaskGroup("groups") as groups:
            with contextlib.suppress(Closed):
                while True:
                    ticket = await self.admission.admit()
                    task = groups.start(self.one_group(ticket), name=f"prompt {ticket.prompt.position}")
                    self._groups[ticket.number] = task
                    task.add_done_callback(functools.partial(self._ended, ticket.number))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._groups[number]

    async def one_group(self, ticket: Ticket) -> None:
        """From a ticket to a scored group in the buffer, or to a drop with its reason."""
        prompt, samples = ticket.prompt, self.config.samples_per_prompt
        with self.report.generating(prompt) as facts:
            group = await self.rollout.group(prompt, samples, self.sampling, self.seed, attempt=ticket.attempt)
            if isinstance(group, Group):
                facts.update(tokens=group.num_tokens, longest=max(len(c.token_ids) for c in group.completions))
        if isinstance(group, Dropped):
            self.drop(ticket, group.reason, group.num_tokens)
        else:
            group = await self.reward.score(group)
            reason = self.not_trainable(group)
            if reason is None:
                self.buffer.put(ticket, group)
            else:
                self.drop(ticket, reason, group.num_tokens)
        self.watchdog.beat()

    def drop(self, ticket: Ticket, reason: DropReason, num_tokens: int) -> None:
        """The group leaves untrained; too many in a row end the run (GR-6)."""
        self.report.dropped(self.admission.drop(ticket, reason, num_tokens=num_tokens))
        self._left[reason] += 1
        if self._left.total() >= self.config.max_refill * self.config.prompts_per_step:
            counts = ", ".join(f"{name} {count}" for name, count in self._left.most_common())
            raise NothingToTrain(
                f"{self._left.total()} groups have left untrained since the last step ({counts}); expected fewer than "
                f"{self.config.max_refill} times prompts_per_step. no_contrast: the prompts are too easy or too hard "
                "for the policy, or the reward is constant; others: look at their cause. [grpo] max_refill allows more"
            )

    def not_trainable(self, group: Group) -> DropReason | None:
        """Why a scored group leaves, or None. The verdict is looked at before it is shaped (GR-6)."""
        verdicts = scored_mask(group.rewards)
        if not verdicts.any():
            return "unscored"
        sampled = [len(c.token_ids) > 0 if c.mask is None else bool(c.mask.any()) for c in group.completions]
        if not any(verdict and own for verdict, own in zip(verdicts, sampled, strict=True)):
            return "empty"
        if self.config.no_contrast == "refill" and not has_contrast(group.rewards):
            return "no_contrast"
        return None

    # --- train --------------------------------------------------------------------------------------------------------

    async def train(self, tasks: TaskGroup, start: int, steps: int) -> int:
        if start == 0:
            await self.evaluate(tasks, 0)
        for step in range(start, steps):
            with self.timing("wait"):
                try:
                    taken = await self.buffer.take(self.config.prompts_per_step, version=self.trainer.version)
                except Closed:
                    return step
            samples = await self.samples([one.group for one in taken])
            with self.timing("train"):
                result = await self.trainer.train_step(samples, self.objective, temperature=self.sampling.temperature)
            if self.advisors is not None:
                await self.advisors.learn(samples, self.sampling.temperature)
            self.watchdog.check(result.version - 1, result.sums)
            if self.snapshot is None:
                with self.timing("evaluate"):
                    await self.evaluated()  # GR-3
            with self.timing("publish"):
                commit = await self.weights.publish(result.version)
            self.admission.commit(commit.version)
            self._left.clear()
            self.admission.release(one.ticket for one in taken)
            self.expire(commit.version)
            self.buffer.check()  # GR-2
            self.watchdog.beat()
            due = step + 1 == steps or (self.evaluate_every > 0 and (step + 1) % self.evaluate_every == 0)
            if due:
                await self.evaluate(tasks, step + 1)
            self.report.step(step + 1, taken, result, commit)
            if self.checkpoints is not None:
                await self.checkpoints.settle()
                if self.checkpoints.due(step + 1):
                    await self.save(self.checkpoints, step + 1)
        await self.evaluated(training_waits=False)
        return steps

    async def samples(self, groups: list[Group]) -> list[TrainSample]:
        """What is trained, in the order of `algorithms.samples` (SA-3)."""
        config = self.config
        limit = self.sampling.max_tokens
        shaped = [
            shape_overlong(group, max_length=limit, buffer=config.overlong_buffer, factor=config.overlong_factor)
            for group in groups
        ]
        version = self.trainer.version
        samples = to_samples(
            shaped, self.advantage, version=version, no_signal="drop" if config.no_contrast == "drop" else "keep"
        )
        if not samples:  # a batch without any signal still makes its step, of gradient 0
            samples = to_samples(shaped, self.advantage, version=version)
        if self.advisors is not None:
            with self.timing("advise"):
                await self.advisors.advise(samples, self.sampling.temperature)
        whiten(samples, self.advantage.whiten, rewards=scored_values(shaped))
        return samples

    def expire(self, version: int) -> None:
        """Stop generating what will be too old. In strict order there is nothing."""
        for ticket in self.buffer.expire(version):
            if (task := self._groups.get(ticket.number)) is not None:
                task.cancel()

    async def save(self, checkpoints: Checkpoints, step: int) -> None:
        with self.timing("save"):
            if checkpoints.exact:
                if self.snapshot is None:
                    await self.evaluated()
                try:
                    await self.admission.quiet()
                except Closed:  # then `run` saves this step, once all is quiet
                    return
            await checkpoints.begin(step)
            self.admission.go_on()

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        with self.report.timing(part), self.watchdog.part(part):
            yield

    # --- evaluate -----------------------------------------------------------------------------------------------------

    async def evaluate(self, tasks: TaskGroup, step: int) -> None:
        """Score the held-out set beside whatever goes on, on the weights of now (GR-3)."""

        async def score(evaluator: Evaluator) -> None:
            try:
                result: EvalResult | EvaluationCut = await evaluator.evaluate(self.watchdog.beat)
            except EvaluationCut as cut:
                result = cut
            self.report.evaluated(step, result)
            self.watchdog.beat()

        if self.evaluator is None:
            return
        if self.snapshot is not None and not self.admission.closed:
            with self.timing("evaluate"):
                await self.evaluated()
            with self.timing("publish"):
                await self.snapshot()
        if self.admission.closed:  # `stop` has ended the evaluations that there were
            return
        self.report.evaluating(step)
        self._evaluation = tasks.start(score(self.evaluator), name=f"evaluate step {step}")

    async def evaluated(self, *, training_waits: bool = True) -> None:
        """Wait for the evaluation under way, if any. Where training waits for it, it is cut short after what the job
        allows. Its error is the task group's to raise."""
        if self._evaluation is None or self.evaluator is None:
            return
        done, _ = await asyncio.wait([self._evaluation], timeout=self.evaluator.max_delay if training_waits else None)
        if not done:
            self.evaluator.cut()
            await asyncio.wait([self._evaluation])
        self._evaluation = None
