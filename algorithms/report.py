"""What a run tells: one record a step for the files, the same numbers for the screen, and a timeline of who did what.

RP-1: a record is written once, under the step it belongs to, in the order of steps; the evaluation of a step goes into
      the record of that step, which waits for it, as do those of later steps. What waits survives a kill (JO-8).
RP-2: nothing here steers the run; a page can be read, and would train the same, without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from algorithms import metrics
from algorithms.admission import Admission
from algorithms.buffer import Buffer, Taken
from algorithms.halves import keep
from roles.evaluator import EvalResult, EvaluationCut
from roles.types import Dropped, Prompt, Scored, StepResult
from runtime.curves import Panel, Series
from runtime.display import Column, Display
from runtime.journal import Journal
from sync.session import Commit

__all__ = ["COLUMNS", "Observer", "Report"]

COLUMNS = (
    Column("reward/mean", "reward", ".3f", "up"),
    Column("eval/accuracy", "held-out", ".3f", "up"),
    Column("eval/greedy", "greedy", ".3f", "up"),
    Column("rate/tokens_per_second", "tokens/s", "si"),
    Column("age/mean", "age", ".2f"),
    Column("length/mean", "length", ".1f"),
    Column("mismatch/kl_k3", "mismatch KL", ".1e"),
    Column("policy/entropy", "entropy", ".3f"),
    Column("time/step", "seconds a step", ".2f"),
)
"""What the screen shows of a record."""

PANELS = (
    Panel(
        "held-out accuracy",
        (
            Series("eval/accuracy", "sampled", "eval/accuracy_low", "eval/accuracy_high"),
            Series("eval/greedy", "greedy"),
        ),
        smooth=False,
        bottom=0.0,
        top=1.0,
    ),
    Panel("reward of training samples", (Series("reward/mean"),), bottom=0.0, top=1.0),
    Panel("age of samples, versions, mean", (Series("age/mean"),), bottom=0.0),
    Panel("sampled tokens a second", (Series("rate/tokens_per_second"),), bottom=0.0),
    Panel("KL, rollout against trainer, nat", (Series("mismatch/kl_k3"),), log=True),
    Panel("entropy, nat", (Series("policy/entropy"),), bottom=0.0),
    Panel("completion length, tokens", (Series("length/mean", "mean"), Series("length/max", "max")), bottom=0.0),
)
"""What curves.png shows, the first of them wide."""

TRACKS = {
    "wait": "trainer 0",
    "train": "trainer 0",
    "advise": "trainer 0",
    "publish": "weights",
    "evaluate": "weights",
    "save": "trainer 0",
}
"""Where the timeline shows a part of the loop; "evaluate" is publishing that waits for an evaluation."""

WAITS = {"wait": "trainer: waits for groups", "evaluate": "trainer: waits for the evaluation"}


BUSY = {
    "advise": "asks reference and critic",
    "train": "trains",
    "publish": "sends weights",
    "save": "writes a checkpoint",
}


class Observer(Protocol):
    """What a page tells while it runs. `Report` writes it down; a simulation counts it."""

    def start(self) -> None: ...

    def timing(self, part: str) -> AbstractContextManager[None]: ...

    def generating(self, prompt: Prompt) -> AbstractContextManager[dict[str, object]]: ...

    def step(self, step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None: ...

    def evaluating(self, step: int) -> None: ...

    def evaluated(self, step: int, result: EvalResult | EvaluationCut) -> None: ...

    def dropped(self, dropped: Dropped) -> None: ...

    def close(self) -> None: ...


class Report:
    """Journal and display of one run."""

    def __init__(
        self, journal: Journal, display: Display, admission: Admission, buffer: Buffer, *, keep_groups: bool = False
    ) -> None:
        self._keep_groups = keep_groups
        self._journal = journal
        self._display = display
        self._admission = admission
        self._buffer = buffer
        self._seconds: dict[str, float] = {}
        self._held: dict[int, dict[str, float | None]] = {}
        """Records by step, of which the first waits for its evaluation (RP-1)."""
        self._awaited: set[int] = set()
        """Steps whose evaluation has not ended."""
        self._step_began = time.monotonic()
        self._generating = 0
        self._idle_since: float | None = self._step_began
        self._rollout_idle = 0.0

    def start(self) -> None:
        """The first step begins now."""
        self._step_began = time.monotonic()
        self._idle_since = self._step_began

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """A part of the loop: its seconds go into the record of the step, its bar onto the timeline."""
        self._show(part)
        start, began = time.time(), time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - began
            self._journal.add_span(TRACKS[part], part, start, time.time())
            self._show("")

    @contextmanager
    def generating(self, prompt: Prompt) -> Iterator[dict[str, object]]:
        """One group under way, from its request to its last token. What is put into the dict stands in the timeline."""
        self._show_rollout()
        self._generates(1)
        start, facts = time.time(), dict[str, object](prompt=prompt.position, task=prompt.task)
        try:
            yield facts
        finally:
            self._generates(-1)
            self._journal.add_span("rollout 0", "generate", start, time.time(), **facts)

    def _generates(self, change: int) -> None:
        """A group begins or ends: the rollout is idle while there is none."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._rollout_idle += now - self._idle_since
        self._generating += change
        self._idle_since = None if self._generating else now

    def step(self, step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None:
        """A step has ended."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        groups = [one.group for one in taken]
        record: dict[str, float | None] = {
            "version": float(result.version),
            **metrics.of_groups(groups, [one.age for one in taken]),
            **metrics.finish(result.sums, result.maxima),
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/skipped_updates": float(len(result.skipped)),
            "sync/bytes": float(commit.bytes),
            "sync/wire_bytes": float(commit.wire_bytes),
            "sync/left_out": float(len(commit.left_out)),
            "sync/seconds": commit.seconds,
            "sync/pack_seconds": commit.pack_seconds,
            "sync/stage_seconds": commit.stage_seconds,
            "sync/pause_seconds": commit.pause_seconds,
            "time/step": seconds,
            **{f"time/{part}": value for part, value in self._seconds.items()},
            **self._pipeline(),
            **self._idle(seconds),
        }
        record["rate/tokens_per_second"] = sum(group.num_tokens for group in groups) / seconds
        self._seconds.clear()
        self._journal.samples(step, self._samples(taken))
        self._journal.instant("weights", f"version {commit.version}")
        self._journal.counter("age of samples", sum(one.age for one in taken) / len(taken))
        if self._keep_groups:
            keep(self._journal.folder, step, groups)
        self._held[step] = record
        if min(self._held) in self._awaited:
            self._journal.hold(step, record)
        self._write_held()
        self._display.step(step, record)
        for why in result.skipped:
            self._display.event(f"step {step}: an update was left out: {why}")

    def _idle(self, seconds: float) -> dict[str, float]:
        """Shares of the step, from 0 to 1, in which the trainer waited, and in which no group was generated."""
        self._generates(0)
        waited = sum(self._seconds.get(part, 0.0) for part in WAITS)
        shares = {"idle/trainer_fraction": waited / seconds, "idle/rollout_fraction": self._rollout_idle / seconds}
        self._rollout_idle = 0.0
        return {name: min(max(share, 0.0), 1.0) for name, share in shares.items()}

    def evaluating(self, step: int) -> None:
        """The evaluation of the weights of `step` begins: its record, which comes after, waits for the end of it."""
        self._awaited.add(step)
        self._held[step] = {}
        self._display.status("evaluation", f"scores the weights of step {step}")

    def evaluated(self, step: int, result: EvalResult | EvaluationCut) -> None:
        """The held-out set was scored on the weights of `step`, or why it was not."""
        self._awaited.discard(step)
        self._display.status("evaluation", "")
        if isinstance(result, EvaluationCut):
            self._write_held()
            self._display.event(f"step {step}: the evaluation has no result: {result}")
            return
        low, high = result.accuracy_interval or (result.accuracy, result.accuracy)
        values: dict[str, float | None] = {
            "version": float(result.version),
            "eval/accuracy": result.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/greedy": result.greedy,
            "eval/truncated_fraction": result.truncated,
            "eval/seconds": result.seconds,
            "eval/prompts": float(result.num_prompts),
            **{f"eval/pass@{k}": one.value for k, one in result.pass_at.items()},
            **{f"eval/accuracy/{task}": one.accuracy for task, one in result.by_task.items()},
        }
        self._held[step] = {**self._held.get(step, {}), **values}
        self._write_held()
        end = time.time()
        self._journal.add_span("evaluation", f"step {step}", end - result.seconds, end, version=result.version)
        greedy = f", greedy {result.greedy:.3f}" if result.greedy is not None else ""
        cut = "" if result.complete else f", cut after {result.num_prompts} prompts"
        self._display.event(
            f"step {step}: held-out accuracy {result.accuracy:.3f} ({low:.3f} to {high:.3f}){greedy}{cut}"
        )
        self._display.values({"eval/accuracy": result.accuracy, "eval/greedy": result.greedy})

    def dropped(self, dropped: Dropped) -> None:
        """A group left untrained."""
        self._journal.instant("rollout 0", f"dropped: {dropped.reason}", prompt=dropped.position)

    def close(self) -> None:
        """Write the records that still wait for an evaluation that won't come."""
        self._awaited.clear()
        self._write_held()

    def _write_held(self) -> None:
        while self._held and (step := min(self._held)) not in self._awaited:
            if record := self._held.pop(step):
                self._journal.metrics(step, record)
        if not self._held:
            self._journal.release()

    def _show(self, part: str) -> None:
        waiting = self._buffer.who_waits()
        busy = BUSY.get(part, "")
        self._display.status("trainer", busy or WAITS.get(part, "between steps"), waiting=not busy)
        self._display.status("waiting", waiting, waiting=True)
        self._show_rollout()

    def _show_rollout(self) -> None:
        pipeline = self._admission.statistics()
        self._display.status(
            "rollout",
            f"{pipeline.in_flight} of {pipeline.slots} groups in flight, {pipeline.buffered} ready",
            waiting=pipeline.in_flight == 0,
        )

    def _pipeline(self) -> dict[str, float]:
        book = self._admission.statistics()
        return {
            "pipeline/in_flight": float(book.in_flight),
            "pipeline/buffered": float(book.buffered),
            "pipeline/issued": float(book.issued),
            "pipeline/trained": float(book.trained),
            "pipeline/dropped": float(sum(book.dropped.values())),
            "pipeline/dropped_tokens": float(book.dropped_tokens),
        }

    @staticmethod
    def _samples(taken: Sequence[Taken]) -> Iterator[dict[str, object]]:
        """The first completion of each group, then the second of each, ...: the few that are kept are many prompts."""
        most = max(len(one.group.completions) for one in taken)
        for index in range(most):
            for one in taken:
                if index < len(one.group.completions):
                    yield _sample(one, index)


def _sample(taken: Taken, index: int) -> dict[str, object]:
    group = taken.group
    completion, reward = group.completions[index], group.rewards[index]
    return {
        "position": group.prompt.position,
        "task": group.prompt.task,
        "prompt": group.prompt.text,
        "completion": completion.text,
        "reward": reward.value if isinstance(reward, Scored) else None,
        "version": completion.oldest_version,
        "age": taken.age,
        "finish_reason": completion.finish_reason,
    }
