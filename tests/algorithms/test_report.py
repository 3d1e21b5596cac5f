"""Records of a run: one per step, the evaluation in that of its step. Cites RP-rules."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest

from algorithms.admission import Admission, Ticket
from algorithms.buffer import Buffer, Taken
from algorithms.report import COLUMNS, Report
from roles.evaluator import EvalResult, EvaluationCut
from roles.types import Completion, Group, Prompt, Scored, StepResult
from runtime.display import Display
from runtime.journal import Journal, read_metrics, read_samples
from sync.session import Commit


class Endless:
    position = -1

    def take(self) -> Prompt:
        self.position += 1
        return Prompt(position=self.position, text=f"question {self.position}", token_ids=(1,), task="t", entry={})


def taken(number: int, samples: int) -> Taken:
    prompt = Prompt(position=number, text=f"question {number}", token_ids=(1,), task="t", entry={})
    completions = [
        Completion(
            token_ids=np.ones(3, np.int32),
            logprobs=np.zeros(3, np.float32),
            versions=np.zeros(3, np.int32),
            finish_reason="stop",
            text=f"answer {index}",
        )
        for index in range(samples)
    ]
    group = Group(prompt=prompt, completions=completions, rewards=[Scored(1.0)] * samples)
    return Taken(Ticket(number=number, prompt=prompt, version=0, attempt=0), group, 0)


STEP = StepResult(version=1, sums={"tokens": 6.0}, maxima={}, grad_norm=1.0, learning_rate=0.1, seconds=1.0)
COMMIT = Commit(
    version=1,
    bytes=8,
    wire_bytes=8,
    seconds=0.1,
    pack_seconds=0.1,
    stage_seconds=0.1,
    pause_seconds=0.01,
    transport="shm",
)
SCORE = EvalResult(
    accuracy=0.5,
    accuracy_interval=(0.4, 0.6),
    greedy=0.7,
    num_prompts=4,
    version=1,
    by_task={},
    seconds=1.0,
    num_tokens=10,
    truncated=0.0,
    unscored=0,
)


@pytest.fixture
def journal(tmp_path):
    with Journal.create(tmp_path, "run") as journal:
        yield journal


@pytest.fixture
def report(journal):
    admission = Admission(Endless(), groups_per_step=2, staleness=0)
    return Report(journal, Display("run", 3, COLUMNS, stream=io.StringIO()), admission, Buffer(admission))


def test_evaluation_stands_in_the_record_of_its_step_rp1(report, journal):
    report.evaluating(0)
    report.evaluated(0, SCORE)
    report.evaluating(1)
    report.step(1, [taken(0, 2)], STEP, COMMIT)
    report.evaluated(1, SCORE)
    report.step(2, [taken(1, 2)], STEP, COMMIT)
    rows = read_metrics(journal.folder)
    assert [(row["step"], "eval/accuracy" in row, "reward/mean" in row) for row in rows] == [
        (0, True, False),
        (1, True, True),
        (2, False, True),
    ]


def test_record_that_waits_for_an_evaluation_that_never_comes_is_written_at_the_end_rp1(report, journal):
    report.evaluating(1)
    report.step(1, [taken(0, 2)], STEP, COMMIT)
    assert read_metrics(journal.folder) == []
    report.close()
    assert [row["step"] for row in read_metrics(journal.folder)] == [1]


def test_later_steps_wait_behind_an_evaluation_that_goes_on_beside_them_rp1(report, journal):
    report.evaluating(0)
    for step in (1, 2):
        report.step(step, [taken(step, 2)], STEP, COMMIT)
    assert read_metrics(journal.folder) == []
    report.evaluated(0, EvaluationCut("cut"))  # cut before anything was judged: there is no row of step 0
    assert [row["step"] for row in read_metrics(journal.folder)] == [1, 2]
    report.evaluating(3)
    for step in (3, 4):
        report.step(step, [taken(step, 2)], STEP, COMMIT)
    report.evaluated(3, SCORE)
    rows = read_metrics(journal.folder)
    assert [(row["step"], "eval/accuracy" in row) for row in rows[2:]] == [(3, True), (4, False)]


def test_kept_samples_are_of_many_prompts(report, journal):
    report.step(1, [taken(number, 4) for number in range(4)], STEP, COMMIT)
    journal.flush()
    assert [row["position"] for row in read_samples(journal.folder)] == [0, 1, 2, 3] * 2


def test_seconds_of_each_part_of_the_loop_belong_to_one_step(report, journal):
    report.start()
    with report.timing("wait"), report.timing("train"):
        pass
    report.step(1, [taken(0, 2)], STEP, COMMIT)
    report.step(2, [taken(1, 2)], STEP, COMMIT)
    first, second = read_metrics(journal.folder)
    assert {"time/wait", "time/train"} <= first.keys()
    assert "time/wait" not in second


def test_idle_shares_count_waiting_and_time_without_a_group(report, journal, monkeypatch):
    """The clock is set by hand: of 10 s the trainer waits 4, and for 3 s no group is under way."""
    now = [100.0]
    monkeypatch.setattr("algorithms.report.time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    report.start()
    passes(1)  # idle
    with report.timing("wait"):
        with report.generating(taken(0, 1).group.prompt) as facts:
            passes(3)
            facts["tokens"] = 5
        passes(1)  # idle
    with report.generating(taken(1, 1).group.prompt):
        passes(4)
    passes(1)  # idle
    report.step(1, [taken(0, 2)], STEP, COMMIT)
    (row,) = read_metrics(journal.folder)
    assert row["time/step"] == 10
    assert (row["idle/trainer_fraction"], row["idle/rollout_fraction"]) == (0.4, 0.3)


def test_updates_left_out_are_counted_and_told(journal):
    admission = Admission(Endless(), groups_per_step=2, staleness=0)
    stream = io.StringIO()
    report = Report(journal, Display("run", 3, COLUMNS, stream=stream), admission, Buffer(admission))
    skipped = msgspec.structs.replace(STEP, skipped=["the gradient of lm_head.weight is not finite on rank 0"])
    report.step(1, [taken(0, 2)], skipped, COMMIT)
    report.step(2, [taken(1, 2)], STEP, COMMIT)
    assert [row["train/skipped_updates"] for row in read_metrics(journal.folder)] == [1, 0]
    assert stream.getvalue().count("an update was left out: the gradient of lm_head.weight is not finite") == 1
