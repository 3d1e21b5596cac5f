"""HA-1 to HA-3: one side of a run alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from algorithms import virtual_time
from algorithms.assemble import PRELOAD, start_generation
from algorithms.buffer import Taken
from algorithms.halves import (
    AlreadyScored,
    DebugConfig,
    FixedWeights,
    KeptGroups,
    KeptPrompts,
    Unsent,
    Untrained,
    keep,
    kept_files,
    read_kept,
)
from algorithms.job import Job, resolve_here
from algorithms.play import Stage, stage
from roles.types import Group, Sampling, StepResult
from runtime import TaskGroup, this_host
from runtime.config import load
from runtime.errors import TuttiError
from runtime.journal import read_metrics, read_samples
from runtime.launch import EMBEDDED
from sync.session import Commit
from tests.algorithms.helpers import prompt
from tests.algorithms.test_bad_input import CONFIG, TIMES

STEPS = 6


def ran(change=lambda scene: None, prompts=None, folder: Path | None = None) -> Stage:
    """A run of the page in which something is replaced; its groups are kept in `folder`."""

    async def main() -> Stage:
        scene = stage(CONFIG, TIMES, staleness=1, steps=STEPS, prompts=prompts)
        change(scene)
        told = scene.page.report.step

        def step(step: int, taken: Sequence[Taken], result: StepResult, commit: Commit) -> None:
            told(step, taken, result, commit)
            if folder is not None:
                keep(folder, step, [one.group for one in taken])

        scene.page.report.step = step  # type: ignore[method-assign]
        assert await scene.page.run(0, STEPS) == STEPS
        return scene

    return virtual_time.run(main())


def test_training_on_kept_groups_trains_exactly_what_the_run_has_trained(tmp_path):  # HA-1, HA-2
    first = ran(folder=tmp_path)
    groups = read_kept(tmp_path)
    assert len(groups) == 4 * STEPS

    def alone(kept: list[Group]) -> Stage:
        def change(scene: Stage) -> None:
            scene.page.rollout, scene.page.reward, scene.page.weights = KeptGroups(kept), AlreadyScored(), Unsent()

        return ran(change, prompts=KeptPrompts(kept))

    again = alone(groups)
    assert again.trainer.weights == first.trainer.weights  # a digest of tokens, advantages and ages, in order
    assert max(again.recorder.outcome().ages) == 1
    other = [msgspec.structs.replace(group, rewards=group.rewards[::-1]) for group in groups]
    assert alone(other).trainer.weights != first.trainer.weights


@pytest.mark.timeout(120)
async def test_generation_alone_goes_on_when_its_only_replica_dies():  # with real processes
    resolved = resolve_here(load(EMBEDDED, Job, ["debug.train=false", "rollout.threads=1"]), EMBEDDED)
    async with this_host(preload=PRELOAD) as host, TaskGroup("test") as tasks:
        roles = await start_generation(resolved, host, tasks)
        one, fleet = roles.prompts.at(0), roles.fleet
        assert fleet is not None
        assert fleet.procs is not None
        before = await roles.rollout.group(one, 2, Sampling(max_tokens=8), 3)
        os.kill(fleet.procs.pids[0], signal.SIGKILL)
        after = await roles.rollout.group(one, 2, Sampling(max_tokens=8), 3)
        assert isinstance(before, Group)
        assert isinstance(after, Group)
        for mine, other in zip(before.completions, after.completions, strict=True):
            assert mine.token_ids.tolist() == other.token_ids.tolist()
        await roles.close()


def test_groups_of_steps_that_are_done_again_go_with_those_that_came_after_them(tmp_path):  # HA-1
    """A run that was killed after step 3 and goes on from the checkpoint of step 1."""
    for step in (1, 2, 3, 2):
        keep(tmp_path, step, [])
    assert [file.name for file in kept_files(tmp_path)] == ["000001.msgpack", "000002.msgpack"]


def test_more_steps_than_groups_are_told_and_a_place_is_restored(tmp_path):
    keep(tmp_path, 1, [])
    prompts = KeptPrompts(read_kept(tmp_path))
    with pytest.raises(TuttiError, match="all 0 kept groups are used; lower steps"):
        prompts.take()
    with pytest.raises(ValueError, match=r"nowhere has no kept groups; make some with debug.keep_groups=true"):
        read_kept(tmp_path / "nowhere")
    one = Group(prompt=prompt(7), completions=[])
    prompts = KeptPrompts([one, one])
    prompts.take()
    other = KeptPrompts([one, one])
    other.restore(prompts.state())
    assert (other.state(), other.at(7)) == ({"next": 1}, one.prompt)


def test_generation_alone_goes_through_its_steps_with_the_same_weights():  # HA-3
    def alone(scene: Stage) -> None:
        fixed = FixedWeights(scene.rollout)
        scene.page.rollout, scene.page.weights = fixed, fixed
        scene.page.trainer = Untrained()

    scene = ran(alone)
    outcome = scene.recorder.outcome()
    assert (len(outcome.ages), outcome.age_max, outcome.dropped) == (4 * STEPS, 1, {})
    assert scene.trainer.version == 0  # the one that stands there was never asked
    with pytest.raises(TuttiError, match="has no checkpoint to go on from"):
        asyncio.run(Untrained().load("x"))


def test_arrays_come_back_as_they_were(tmp_path):
    ran(folder=tmp_path)
    first = read_kept(tmp_path)[0].completions[0]
    assert (first.token_ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    assert len(first.token_ids) == len(first.versions)


@pytest.mark.parametrize("given", [{"train": False}, {"keep_groups": True}])
def test_sides_that_exclude_each_other_are_refused(given):
    with pytest.raises(ValueError, match="goes with neither train = false nor keep_groups"):
        DebugConfig(groups="runs/x", **given)


@pytest.mark.timeout(240)
def test_a_job_generates_alone_and_another_trains_alone_on_that(tmp_path):
    small = ["steps=2", "grpo.prompts_per_step=4", "grpo.samples_per_prompt=4", "evaluation.prompts=0"]

    def launch(name: str, *words: str) -> list[str]:
        command = [sys.executable, "-m", "runtime.launch", f"run_dir={tmp_path}", f"name={name}", *small, *words]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=200)
        return [row["prompt"] + row["completion"] for row in read_samples(tmp_path / name)]

    made = launch("first", "debug.train=false", "debug.keep_groups=true")
    assert launch("second", f"debug.groups={tmp_path / 'first'}") == made
    assert not (tmp_path / "first" / "checkpoints").exists()
    assert [path.name for path in (tmp_path / "second" / "checkpoints").iterdir()] == ["step-000002"]
    rows = read_metrics(tmp_path / "second")
    assert [(row["version"], row["train/tokens"] > 0, row["sync/bytes"]) for row in rows] == [
        (1, True, 0),
        (2, True, 0),
    ]
