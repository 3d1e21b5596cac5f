"""Several runs over one start of the processes: a sweep that loads models and starts engines once.

    series = await Series.start(resolved, host, tasks, folder)     roles up, start of the trainer saved
    await series.run(other)                                        as often as there are jobs, each with a run folder

SR-1: each run is that of a job of its own, from its first prompt to its records: weights, optimizer, schedule and
      random numbers of the trainer are those of the start, pipeline and reports are new, nothing of the run before is
      in flight. Only the numbers of versions go on, because rollouts never go back (TR-2).
SR-2: jobs may differ in what the controller reads: staleness, steps, seed, [grpo], [sampling], [data], [evaluation],
      [checkpoint], [watch]. What a process was started with is refused when it differs, by name.
SR-3: a run that fails raises; as long as its roles live, the next run starts as if it had not been.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from algorithms.assemble import Roles, assemble, make_prompts, start_roles
from algorithms.describe import headline
from algorithms.grpo import GRPO
from algorithms.job import Job, Resolved
from algorithms.job_checks import needs_reference
from algorithms.report import COLUMNS, PANELS
from roles import checkpoint
from roles.trainer import Trainer
from runtime.config import ConfigError, render
from runtime.curves import draw
from runtime.display import Display
from runtime.journal import Journal

if TYPE_CHECKING:
    from runtime.mesh import HostMesh
    from runtime.tasks import TaskGroup

__all__ = ["Series", "differences", "save_start"]

FIXED = ("model", "environment", "trainer", "rollout", "reward", "sync")
"""Tables of a job that processes are started with."""


@dataclass(kw_only=True)
class Series:
    """Roles that run, and where their trainer started. Use `start`, or the constructor for roles of `connect`."""

    resolved: Resolved
    """What the processes were started with."""
    roles: Roles
    saved: Path
    """The start, as `save_start` has written it."""

    @classmethod
    async def start(cls, resolved: Resolved, host: HostMesh, tasks: TaskGroup, folder: Path) -> Series:
        """Start the roles of a job, and save the start of their trainer.

        Args:
            folder: a new one, for that; as large as a checkpoint.

        Raises:
            TuttiError: a role could not start.
            ConfigError: the job has no trainer and rollout that could start again.
        """
        if resolved.job.debug.groups or not resolved.job.debug.train:
            raise ConfigError("series", ["[debug]: a job of one side alone has nothing to start again"])
        roles = await start_roles(resolved, host, tasks)
        await save_start(roles, folder)
        return cls(resolved=resolved, roles=roles, saved=folder)

    async def run(self, resolved: Resolved, *, started: Callable[[GRPO], None] | None = None) -> Path:
        """One run, from the start to its last step or `page.stop`, in a new run folder like those of the launcher.

        Args:
            started: is given the page before it runs, for who may want to stop it.

        Returns:
            The run folder.

        Raises:
            ConfigError: the job needs other processes (SR-2).
            TuttiError: the run has failed, or a role.
        """
        job = resolved.job
        if problems := differences(self.resolved.job, job):
            raise ConfigError(job.name, problems)
        await self._back_to_start()
        journal = Journal.create(job.run_dir, job.name)
        with journal, Display(job.name, job.steps, COLUMNS, subtitle=headline(resolved)) as display:
            journal.write_job(render(job, derived=resolved.derived))
            prompts, held_out = await asyncio.to_thread(make_prompts, job)
            try:
                page, _ = assemble(resolved, replace(self.roles, prompts=prompts, held_out=held_out), journal, display)
                if started is not None:
                    started(page)
                done = await page.run(0, job.steps)
                display.close(f"{done} of {job.steps} steps done, run folder {journal.folder}")
            finally:
                prompts.close()
                draw(journal.folder, PANELS)
        return journal.folder

    async def _back_to_start(self) -> None:
        """Trainer and critic as they were saved, under a number that the replicas have not seen."""
        trainer, fleet = self.roles.trainer, self.roles.fleet
        assert isinstance(trainer, Trainer)
        assert fleet is not None
        await trainer.finish_save()  # of a run that has failed
        await trainer.load(self.saved / "trainer", version=fleet.version + 1 if fleet.version else 0)
        if self.roles.advisors is not None:
            await self.roles.advisors.load(self.saved)


async def save_start(roles: Roles, folder: Path) -> None:
    """Write what trainer and critic are now into a new folder, for `Series`.

    Raises:
        FileExistsError: it is there already.
        CheckpointError: the disk refuses it.
    """
    assert isinstance(roles.trainer, Trainer)
    with checkpoint.folder(folder) as writing:
        await roles.trainer.save(writing / "trainer")
        if roles.advisors is not None:
            await roles.advisors.begin_save(writing)
            await roles.advisors.finish_save()


def differences(started: Job, other: Job) -> list[str]:
    """What `other` needs otherwise than the processes of `started` have it (SR-2)."""
    problems = [
        f"{table}.{key}: the processes were started with {ours!r}, this job has {its!r}; give it a start of its own"
        for table in FIXED
        for key, ours, its in _pairs(getattr(started, table), getattr(other, table))
        if ours != its and key not in _free(started, table)
    ]
    if needs_reference(started.grpo) != needs_reference(other.grpo) or started.grpo.critic != other.grpo.critic:
        problems.append("grpo: reference and critic must be those that the processes were started for")
    if started.evaluation.ranks != other.evaluation.ranks:
        problems.append(f"evaluation.ranks: {started.evaluation.ranks} were started, got {other.evaluation.ranks}")
    return problems


def _pairs(ours: Any, its: Any) -> list[tuple[str, Any, Any]]:
    other = asdict(its)
    return [(key, value, other[key]) for key, value in asdict(ours).items()]


def _free(started: Job, table: str) -> set[str]:
    """Keys that may differ: threads are shared out at the start, and a trainer without adapters draws nothing."""
    seed = {"seed"} if table == "trainer" and not started.trainer.lora_rank else set()
    return {"threads", *seed}
