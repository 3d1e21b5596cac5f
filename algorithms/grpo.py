"""GRPO with bounded staleness, on one page.

Two coroutines share a pipeline (`Admission`, `Buffer`) and nothing else. `generate` turns slots into scored groups,
`train` turns groups into policy versions. Every line calls one room and gets a value back; nothing below calls up.

    generate:  slot -> prompt -> completions -> rewards -> buffer     as many groups at once as there are slots
    train:     buffer -> advantages -> step -> publish -> free slots  one step after the other

GR-1: a slot frees only after the fleet has committed the new weights, so that no group is born too old; `Buffer.take`
      checks the age again (A1). With staleness 0 this is plain synchronous training.
GR-2: conservation (A2) and the age bound are asserted after every step.
GR-3: weights never move while an evaluation runs: publishing waits for it, training and generation do not.
GR-4: a checkpoint is written between two steps and holds everything that was issued and not trained, so that a resumed
      run issues the same prompts in the same order; the weights of the trainer are published before anything else (A5).
GR-5: `stop` ends the run at the same place: the step under way is finished and saved, nothing is trained half.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec

from algorithms.admission import Admission, Closed, Ticket
from algorithms.advantages import Advantage
from algorithms.buffer import Buffer
from algorithms.report import Report
from algorithms.resume import Checkpoints
from algorithms.samples import scored_values, to_samples, whiten
from roles.evaluator import Evaluator
from roles.objective import ObjectiveSpec
from roles.reward import RewardPool
from roles.rollout import Rollout
from roles.trainer import Trainer
from roles.types import Sampling, Scored
from runtime import TaskGroup
from sync.session import WeightSession

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[grpo]` table of a job: GRPO (arXiv:2402.03300) besides the settings of its roles."""

    prompts_per_step: int = 0
    """P, the groups of one training step. 0: derived, 32 on GPUs and 16 on CPU."""
    samples_per_prompt: int = 8
    """G, the completions of one group."""
    advantage: str = "grpo"
    """How the rewards of a group become advantages: a name of `algorithms.catalog`, or `module:function`."""
    loss: str = "grpo"
    """The objective: a name of `algorithms.catalog`, or `module:function`."""
    loss_options: dict[str, Any] = {}
    """Options of the objective, such as clip_low, clip_high, tis_cap, aggregate."""


@dataclass(kw_only=True)
class GRPO:
    """One run: the roles it drives, the pipeline between them, and what it is told."""

    rollout: Rollout
    reward: RewardPool
    trainer: Trainer
    weights: WeightSession
    evaluator: Evaluator | None
    admission: Admission
    buffer: Buffer
    checkpoints: Checkpoints
    report: Report

    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    advantage: Advantage
    objective: ObjectiveSpec
    evaluate_every: int
    """In steps, besides the evaluations before the first and after the last; 0: only those."""
    seed: int
    _evaluation: asyncio.Task[None] | None = None

    async def run(self, start: int, steps: int) -> int:
        """Train from step `start` until `steps` are done or `stop` is called; returns the steps done, all saved."""
        self.report.start()
        async with TaskGroup("grpo") as tasks:
            commit = await self.weights.publish(self.trainer.version)  # before anything else (GR-4)
            self.admission.commit(commit.version)
            generation = tasks.start(self.generate(), name="generate")
            done = await self.train(tasks, start, steps)
            generation.cancel()
        self.report.close()
        await self.checkpoints.save(done)
        return done

    def stop(self) -> None:
        """Let the run end after the step under way (GR-5)."""
        self.buffer.close()
        if self._evaluation is not None:
            self._evaluation.cancel()

    async def generate(self) -> None:
        """Keep every slot busy. Whoever cancels this cancels all groups under way."""
        async with TaskGroup("groups") as groups:
            with contextlib.suppress(Closed):
                while True:
                    ticket = await self.admission.admit()
                    groups.start(self.one_group(ticket), name=f"prompt {ticket.prompt.position}")

    async def one_group(self, ticket: Ticket) -> None:
        prompt, samples = ticket.prompt, self.samples_per_prompt
        with self.report.generating(prompt):
            group = await self.rollout.generate(prompt, samples, self.sampling, self.seed, attempt=ticket.attempt)
        group = await self.reward.score(group)
        if any(isinstance(reward, Scored) for reward in group.rewards):
            self.buffer.put(ticket, group)
        else:
            self.report.dropped(self.admission.drop(ticket, "unscored", num_tokens=group.num_tokens))

    async def train(self, tasks: TaskGroup, start: int, steps: int) -> int:
        if start == 0:
            self.evaluate(tasks, 0)
        for step in range(start, steps):
            with self.report.timing("wait"):
                try:
                    taken = await self.buffer.take(self.prompts_per_step, version=self.trainer.version)
                except Closed:
                    return step
            groups = [one.group for one in taken]
            samples = to_samples(groups, self.advantage, version=self.trainer.version)
            whiten(samples, self.advantage.whiten, rewards=scored_values(groups))
            with self.report.timing("train"):
                result = await self.trainer.train_step(samples, self.objective, temperature=self.sampling.temperature)
            with self.report.timing("evaluate"):
                await self.evaluated()  # GR-3
            with self.report.timing("publish"):
                commit = await self.weights.publish(result.version)
            self.admission.commit(commit.version)
            self.admission.release(one.ticket for one in taken)
            self.buffer.check()  # GR-2
            due = step + 1 == steps or (self.evaluate_every > 0 and (step + 1) % self.evaluate_every == 0)
            self.report.step(step + 1, taken, result, commit, evaluating=due)
            if due:
                self.evaluate(tasks, step + 1)
            if self.checkpoints.due(step + 1):
                with self.report.timing("save"):
                    await self.checkpoints.save(step + 1)
        await self.evaluated()
        return steps

    def evaluate(self, tasks: TaskGroup, step: int) -> None:
        """Score the held-out set beside whatever goes on; until `evaluated`, the version is pinned (GR-3)."""

        async def score(evaluator: Evaluator) -> None:
            self.report.evaluated(step, await evaluator.evaluate())

        if self.evaluator is not None and not self.admission.closed:
            self._evaluation = tasks.start(score(self.evaluator), name=f"evaluate step {step}")

    async def evaluated(self) -> None:
        """Wait for the evaluation under way, if any. Its error is the task group's to raise."""
        if self._evaluation is not None:
            await asyncio.wait([self._evaluation])
            self._evaluation = None
