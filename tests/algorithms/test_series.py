"""SR-1 to SR-3 with real processes: a run of a series is the run of a job of its own, to the last digit.

Groups are generated one at a time (max_running = samples of a group), so that what is computed together never depends
on when a request came: see test_synchronous.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from algorithms.assemble import PRELOAD, connect, make_prompts
from algorithms.grpo import NothingToTrain
from algorithms.job import Job, Resolved, resolve_here
from algorithms.series import Series, save_start
from roles.trainer import Trainer
from runtime import HostMesh, TaskGroup, this_host
from runtime.config import ConfigError, load
from runtime.launch import EMBEDDED, main

STEPS = 2
WORDS = [
    "grpo.prompts_per_step=3",
    "grpo.samples_per_prompt=4",
    "rollout.max_running=4",
    "rollout.threads=1",
    "trainer.threads=1",
    "sampling.max_tokens=16",
    "evaluation.prompts=4",
    "evaluation.samples=1",
    "evaluation.in_flight=1",
    "checkpoint.every=0",
    f"steps={STEPS}",
]
NOTHING = ["sampling.max_tokens=1", "grpo.no_contrast=refill", "grpo.max_refill=1"]
"""Settings of a run that fails at once."""
OF_A_CLOCK = ("time", "elapsed", "rate/", "idle/", "sync/", "eval/seconds", "version", "pipeline/", "age/")


def words(folder: Path, *more: str) -> list[str]:
    return [*WORDS, f"run_dir={folder}", *more]


def job_of(folder: Path, *more: str) -> Resolved:
    return resolve_here(load(EMBEDDED, Job, words(folder, *more)), EMBEDDED)


def told(run: Path) -> list[dict[str, Any]]:
    """The records of a run but for what a clock says, and the numbers of versions."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: r[key] for key in r if not key.startswith(OF_A_CLOCK)} for r in records]


async def another_trainer(series: Series, host: HostMesh, tasks: TaskGroup, folder: Path) -> Series:
    """The rollout of a series under a trainer of its own (AS-3)."""
    resolved, fleet = series.resolved, series.roles.fleet
    assert fleet is not None
    await series.roles.close()
    trainer = await Trainer.start(host, resolved.job.trainer, resolved.job.model.path, name="other")
    roles = await connect(resolved, host, tasks, trainer, fleet, series.roles.reward, make_prompts(resolved.job))
    await save_start(roles, folder / "other")
    return Series(resolved=resolved, roles=roles, saved=folder / "other")


@pytest.mark.timeout(180)
def test_each_run_of_a_series_is_the_run_of_a_fresh_job_bit_for_bit(tmp_path: Path) -> None:
    assert main(words(tmp_path, "staleness=0", "name=own", "seed=5")) == 0

    def same(name: str) -> Resolved:
        return job_of(tmp_path, "staleness=0", "seed=5", f"name={name}")

    async def runs() -> None:
        async with this_host(preload=PRELOAD, sink=print) as host, TaskGroup("series") as tasks:
            series = await Series.start(job_of(tmp_path), host, tasks, tmp_path / "start")
            await series.run(job_of(tmp_path, "name=first"))
            await series.run(same("second"))
            assert series.roles.trainer.version == 2 * STEPS + 1  # one for the start of the second run (TR-2)

            with pytest.raises(NothingToTrain):
                await series.run(job_of(tmp_path, *NOTHING, "name=failed"))
            await series.run(same("after_failure"))  # SR-3

            with pytest.raises(ConfigError, match=r"trainer.lr: the processes were started with 0.0006"):  # SR-2
                await series.run(job_of(tmp_path, "trainer.lr=1e-3"))

            series = await another_trainer(series, host, tasks, tmp_path)
            await series.run(same("other_trainer"))
            await series.roles.close()

    asyncio.run(runs())
    own = told(tmp_path / "own")
    assert [r["step"] for r in own] == list(range(STEPS + 1))
    assert any(r.get("train/grad_norm") for r in own)
    for name in ("second", "after_failure", "other_trainer"):
        assert told(tmp_path / name) == own
    assert told(tmp_path / "first") != own
