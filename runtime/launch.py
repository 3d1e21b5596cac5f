"""Start a job: `python -m runtime.launch [job.toml] [key=value ...]`, alone or under torchrun.

The composition root: the only file of this room that imports upward, and only inside functions.

LA-1: a job that can't work ends with exit code 2 before any process or file of it exists; the text names the key.
LA-2: Ctrl+C or SIGTERM once: the step under way is finished and saved, everything ends, exit code 130 or 143. A second
      time: at once.
LA-3: a role that fails ends the job with exit code 1 and one message: role, rank, host, what happened, its last words.
LA-4: whatever the end, no process, socket or shared memory stays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from runtime.config import ConfigError, is_job_file, load, render
from runtime.errors import TuttiError
from runtime.tasks import TaskGroup

if TYPE_CHECKING:
    from algorithms.job import Resolved
    from runtime.display import Display
    from runtime.journal import Journal
    from runtime.mesh import HostMesh
    from runtime.trackers import Trackers

EMBEDDED = Path(__file__).resolve().parent.parent / "recipes" / "default.toml"
"""The job that runs when none is given."""

OK, FAILED, REFUSED = 0, 1, 2

ROLES = (
    *("trainer", "rollout", "reward", "reward_model", "evaluation", "reference", "critic"),
    *("environment", "evaluation_environment"),
)
"""What `--log` may name: the meshes of processes that jobs have."""


def command() -> NoReturn:
    """`main` as a process. When it returns nothing that needs an end is left (LA-4), so that the interpreter need not
    take apart, module by module, what was imported: over a second and a half with torch, after every Ctrl+C."""
    try:
        code = main()
    except KeyboardInterrupt:  # before there is a run that could end well
        code = 128 + signal.SIGINT
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    from runtime.rendezvous import in_torchrun, join_main

    arguments = _parser().parse_args(argv, _Arguments())
    arguments.give_back()
    if in_torchrun() and os.environ["RANK"] != "0":
        join_main()
    if arguments.doctor:
        from roles.doctor import examination

        print(examination(), end="")
        return OK
    try:
        resolved, resume_from = _prepare(arguments)
        levels = arguments.log_levels
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    if arguments.dry_run:
        from algorithms.describe import describe
        from algorithms.job import count_cores, count_gpus

        print(describe(resolved, cores=count_cores(), gpus=count_gpus(), overrides=arguments.overrides), end="")
        return OK
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_run(resolved, resume_from, arguments.overrides, levels))
    except _Failed:
        return FAILED
    except TuttiError as error:  # of the run folder: nobody has told it yet
        print(f"error: {error}", file=sys.stderr)
        return FAILED


class _Arguments(argparse.Namespace):
    words: list[str]
    dry_run: bool
    doctor: bool
    resume: str | None
    log: list[str]

    def give_back(self) -> None:
        """What follows `--resume` and is no run belongs to the job: `--resume staleness=0`, `--resume job.toml`."""
        if self.resume and not Path(self.resume).is_dir() and ("=" in self.resume or is_job_file(self.resume)):
            self.words, self.resume = [self.resume, *self.words], ""

    @property
    def overrides(self) -> list[str]:
        return [word for word in self.words if "=" in word]

    @property
    def log_levels(self) -> dict[str, str]:
        """By role. Raises ConfigError for one that isn't `role=level`."""
        from runtime.logs import check_levels

        unknown = sorted({word.partition("=")[0] for word in self.log} - set(ROLES))
        if unknown:
            problem = f"no role is called {unknown[0]!r}; expected one of {', '.join(ROLES)}, such as trainer=info"
            raise ConfigError("--log", [problem])
        try:
            return check_levels({role: level for role, _, level in (word.partition("=") for word in self.log)})
        except ValueError as error:
            raise ConfigError("--log", [str(error)]) from error

    @property
    def files(self) -> list[str]:
        return [word for word in self.words if "=" not in word]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.launch",
        description="Train a language model by reinforcement learning. Without a job file the embedded job runs: a "
        "small model learns arithmetic on the CPU of this machine in a few minutes.",
        epilog="example: python -m runtime.launch staleness=0 steps=50 trainer.lr=5e-4",
    )
    parser.add_argument("words", nargs="*", metavar="job.toml | key=value", help="a TOML or YAML file, then overrides")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved job and its sizes; start nothing")
    parser.add_argument("--doctor", action="store_true", help="print what this machine computes with, and why")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the last checkpoint of a run folder; without RUN: of the newest run with the job's name",
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="ROLE=LEVEL",
        help="log level of a role, such as trainer=info; the default is warning",
    )
    return parser


# --- before any process -----------------------------------------------------------------------------------------------


def _prepare(arguments: _Arguments) -> tuple[Resolved, Path | None]:
    """Read and resolve the job, and find the checkpoint that it goes on from.

    Raises:
        ConfigError: with everything that is wrong.
    """
    from algorithms.job import Job, resolve_here
    from runtime.journal import latest_job

    if len(arguments.files) > 1:
        raise ConfigError("command line", [f"expected one job file at most, got {', '.join(arguments.files)}"])
    path = Path(arguments.files[0]) if arguments.files else EMBEDDED
    run = _run_to_resume(arguments, path)
    resume_from = None if run is None else _checkpoint_of(run)
    if run is not None and not arguments.files:
        path = latest_job(run) or run / "job.toml"
    job = load(path, Job, arguments.overrides)
    if resume_from is not None and (done := _step_of(resume_from)) >= job.steps:
        raise ConfigError("--resume", [f"{run} has done {done} steps and steps = {job.steps}; raise it to go on"])
    resolved = resolve_here(job, path)
    _check_torchrun(resolved, str(path))
    if resume_from is not None:
        _check_checkpoint(resolved, resume_from)
    return resolved, resume_from


def _check_checkpoint(resolved: Resolved, resume_from: Path) -> None:
    """Before the run folder is touched: a resume that is refused leaves its records and settings as they are."""
    from algorithms.assemble import check_resume

    try:
        check_resume(resolved.job, resume_from)
    except ValueError as error:
        raise ConfigError("--resume", [str(error)]) from error


def _check_torchrun(resolved: Resolved, source: str) -> None:
    from runtime.rendezvous import in_torchrun

    if not in_torchrun():
        return
    trainer, rollout, started = resolved.job.trainer.ranks, resolved.job.rollout, int(os.environ["WORLD_SIZE"])
    # A replica over several GPUs has one leader; the ranks that torchrun started for its other GPUs leave them to it.
    parallel = rollout.vllm.tensor_parallel if rollout.engine == "vllm" else 1
    fitting = sorted({trainer + rollout.ranks, trainer + rollout.ranks * parallel})
    if started not in fitting:
        numbers = " or ".join(map(str, fitting))
        over = f" with {parallel} GPUs each" if parallel > 1 else ""
        problem = (
            f"trainer.ranks = {trainer} and rollout.ranks = {rollout.ranks}{over} need {numbers} ranks, torchrun "
            f"started {started}; change them, or start with --nproc-per-node {fitting[-1]}"
        )
        raise ConfigError(source, [problem])


def _run_to_resume(arguments: _Arguments, path: Path) -> Path | None:
    """The folder that `--resume` names, or the newest one of the job's name. Raises ConfigError: there is none."""
    if arguments.resume is None:
        return None
    if arguments.resume:
        run = Path(arguments.resume)
        if not run.is_dir():
            raise ConfigError("--resume", [f"{run} is no folder; give that of a run, such as runs/default"])
        return run
    from algorithms.job import Job
    from roles import checkpoint
    from runtime.journal import runs_of

    job = load(path, Job, arguments.overrides)
    runs = runs_of(job.run_dir, job.name)
    if not runs:
        raise ConfigError("--resume", [f"no run called {job.name!r} in {job.run_dir!r}; give the folder of the run"])
    able = [run for run in runs if checkpoint.latest(run)]
    if able and able[-1] != runs[-1]:  # an older run is never gone on with unless somebody says so
        problem = f"{runs[-1]}, the newest, has no complete checkpoint; for the one before: --resume {able[-1]}"
        raise ConfigError("--resume", [problem])
    return runs[-1]


def _checkpoint_of(run: Path) -> Path:
    from roles import checkpoint

    found = checkpoint.latest(run)
    if found is None:
        raise ConfigError("--resume", [f"{run} has no complete checkpoint in {run / 'checkpoints'}; start a new run"])
    return found


def _step_of(saved: Path) -> int:
    """Steps that were done when a checkpoint was written."""
    return int(saved.name.rpartition("-")[2])


def _last_recorded(saved: Path) -> int:
    """The step whose record stays when a run goes on from a checkpoint. Before its first step it begins anew, and the
    evaluation that is step 0 is made again."""
    return _step_of(saved) or -1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


# --- the run ----------------------------------------------------------------------------------------------------------


async def _run(
    resolved: Resolved, resume_from: Path | None, overrides: Sequence[str], levels: Mapping[str, str]
) -> int:
    from algorithms.describe import headline
    from algorithms.report import COLUMNS, PANELS
    from runtime.curves import draw
    from runtime.display import Display
    from runtime.journal import Journal
    from runtime.trackers import TrackerError

    job = resolved.job
    if resume_from is None:
        journal = Journal.create(job.run_dir, job.name)
    else:
        journal = Journal.resume(resume_from.parent.parent, _last_recorded(resume_from))
    stopping = _Stopping()
    with journal, Display(job.name, job.steps, COLUMNS, subtitle=headline(resolved)) as display:
        journal.write_job(render(job, derived=resolved.derived, overrides=overrides))
        display.event(f"run folder {journal.folder}")
        host = _host(resolved, journal.folder / "logs", display, levels)
        try:
            with _trackers(resolved, journal, display), stopping.signals(display):
                done = await _train(resolved, resume_from, host, journal, display, stopping)
            display.close(_summary(journal.folder, done, job.steps))
        except asyncio.CancelledError:
            if not stopping.signal:
                raise
            display.close(f"stopped; {_how_to_go_on(journal.folder)}")
        except TrackerError as error:
            display.close()
            print(f"error: {error}", file=sys.stderr)
            raise _Failed from error
        finally:
            try:
                draw(journal.folder, PANELS)
            except OSError as error:
                print(f"curves.png is not drawn: {error.strerror}", file=sys.stderr)
    return 128 + stopping.signal if stopping.signal else OK


def _trackers(resolved: Resolved, journal: Journal, display: Display) -> Trackers:
    """Trackers that follow the journal."""
    import msgspec

    from runtime.trackers import Run, Trackers

    config = resolved.job.trackers
    settings = msgspec.to_builtins(resolved.job)
    run = Run(folder=journal.folder, project=config.project, settings=settings)
    trackers = Trackers(config.use, run, display.event)
    journal.follow(trackers.metrics)
    return trackers


async def _train(
    resolved: Resolved,
    resume_from: Path | None,
    host: HostMesh,
    journal: Journal,
    display: Display,
    stopping: _Stopping,
) -> int:
    """Start the roles, put the page together, run it; returns the steps done."""
    from algorithms.assemble import assemble, start_roles

    job = resolved.job
    async with host, _failures_told(display, journal.folder), TaskGroup("job") as tasks:
        tasks.forever(host.watch(), name="watch")
        with _starting(display):
            roles = await start_roles(resolved, host, tasks)
        page, checkpoints = assemble(resolved, roles, journal, display)
        start = 0 if resume_from is None else await checkpoints.restore(resume_from)
        if start:
            display.event(f"resumed after step {start} from {resume_from}")
        stopping.call(page.stop, after_minutes=job.minutes)
        done = await page.run(start, job.steps)
        await roles.close()
    return done


def _host(resolved: Resolved, log_dir: Path, display: Display, levels: Mapping[str, str]) -> HostMesh:
    """This machine, or under torchrun its ranks. Ranks that compute at the same time get cores of their own (R11); a
    trainer and a rollout that take turns each have all."""
    from algorithms.assemble import PRELOAD
    from runtime.mesh import this_host
    from runtime.rendezvous import in_torchrun, torchrun_host

    host = torchrun_host if in_torchrun() else this_host
    job = resolved.job
    processes = job.trainer.ranks + job.rollout.ranks if job.staleness else None
    return host(log_dir=log_dir, sink=display.print, preload=PRELOAD, log=levels, processes=processes)


class _Failed(Exception):
    """The job has failed, and the user has been told why."""


@contextlib.asynccontextmanager
async def _failures_told(display: Display, folder: Path) -> AsyncIterator[None]:
    """Tell a failure when it is known, before what is left is stopped (LA-3). Faults of ours keep their traceback."""
    from roles import checkpoint

    try:
        yield
    except TuttiError as error:
        display.close()
        print(f"error: {error}", file=sys.stderr)
        if checkpoint.latest(folder) is not None:
            print(_how_to_go_on(folder), file=sys.stderr)
        raise _Failed from error


def _how_to_go_on(folder: Path) -> str:
    from roles import checkpoint

    saved = checkpoint.latest(folder)
    if saved is None:
        return f"{folder} has no checkpoint to go on from"
    return f"the last checkpoint is {saved.name}; go on from it with --resume {folder}"


@contextlib.contextmanager
def _starting(display: Display) -> Iterator[None]:
    display.event("starting trainer, rollout and reward processes")
    display.status("start", "processes load the model", waiting=True)
    began = time.monotonic()
    yield
    display.status("start", "")
    gc.freeze()  # what a run is made of lives to its end: collections need not walk over it
    display.event(f"everything is up after {time.monotonic() - began:.1f} s")


class _Stopping:
    """Ctrl+C, SIGTERM and the time limit: once to end well, a second signal to end at once (LA-2)."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that ended the run; 0 when none did."""
        self._stop: Callable[[], None] | None = None

    def call(self, stop: Callable[[], None], *, after_minutes: float) -> None:
        """What ends the run well, from now on."""
        self._stop = stop
        if after_minutes:
            asyncio.get_running_loop().call_later(60 * after_minutes, stop)

    @contextlib.contextmanager
    def signals(self, display: Display) -> Iterator[None]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            if self._stop is None or self.signal:
                task.cancel()
            else:
                display.event("stopping: the step under way is finished and saved; once more to stop at once")
                self._stop()
            self.signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _summary(folder: Path, done: int, steps: int) -> list[str]:
    """What is said at the end."""
    from algorithms.metrics import unhealthy
    from runtime.journal import read_metrics

    rows = read_metrics(folder)
    scores = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    lines = [f"{done} of {steps} steps done"]
    if len(scores) > 1:
        (_, first), (last_step, last) = scores[0], scores[-1]
        lines.append(f"held-out accuracy {first:.3f} -> {last:.3f} (step {last_step})")
    lines += [f"worth a look: {text}" for text in (unhealthy(rows[-1]) if rows else [])]
    lines.append(f"run folder {folder}: curves.png, metrics.jsonl, samples.jsonl, trace.json, checkpoints/")
    if done < steps:
        lines.append(f"resume with: python -m runtime.launch --resume {folder}")
    return lines


if __name__ == "__main__":
    command()
