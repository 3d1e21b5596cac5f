"""The acceptance cases over one start of the processes: engines and trainers load once, runs follow one another.

    python -m benchmarks.gpu.sweep --out DIR [--model /tmp/smollm2] --cases s1 s0 trl_server s4 kill+moe+megatron+fp8

Cases of `benchmarks.gpu.smollm2` are runs of an `algorithms.series.Series`; others are programs (`programs.py`).

SW-1: everything that the cases need starts at once, before the first of them. Engines start from `--engine-model` while
      the model is still being trained, if that is given: weights come with the first publication.
SW-2: cases joined by `+` run at the same time: programs beside runs, which follow one another. Figures of such a group
      that are times are not comparable with others. Otherwise one case runs at a time, and what else is up idles.
SW-3: each case has a limit. A run that reaches it ends after the step under way; what fails is told, and the next case
      runs as long as its roles live. Facts are written when a case ends.
SW-4: a case that is not expected to fit into what is left of the budget is passed over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from msgspec.structs import replace

from algorithms.assemble import PRELOAD, connect, make_prompts
from algorithms.grpo import GRPO
from algorithms.job import Job, Resolved, count_cores, resolve
from algorithms.series import Series, save_start
from benchmarks.gpu import programs, smollm2
from benchmarks.gpu.launched import LOOK_SECONDS, RECIPE, ROOT, Gpus, Look, Run, look_at, saying
from benchmarks.gpu.programs import PROGRAMS
from roles.reward import RewardPool
from roles.rollout import Rollout
from roles.trainer import Trainer
from runtime import HostMesh, TaskGroup, this_host
from runtime.config import ConfigError, load
from runtime.errors import TuttiError
from runtime.journal import read_metrics
from sync.session import WeightSession

T = TypeVar("T")
Say = Callable[[dict[str, Any]], None]

START_SECONDS = 120.0
"""Expected of everything that starts at once."""
START_LIMIT = 240.0
"""Most that is waited for it: then cases run for which trainer and rollout are there."""
STEP_SECONDS = {"s0": 1.4, "megatron": 1.5}
"""Expected of one step; others take 1.1."""
END_SECONDS = 20.0
"""Left of the budget for the end of what runs last."""
LOADED_SECONDS = 90.0
"""Most that is waited for programs once the roles are up."""
FAILURES = (TuttiError, ValueError, OSError, TimeoutError)
"""Of a case: a role's, a setting's, a limit's."""
GRACE_SECONDS = 30.0
"""After its limit a run gets so long for the step under way and its evaluation."""


def kinds_of(case: str) -> tuple[str, str]:
    """The trainer and the rollout of a run."""
    return "megatron" if case == "megatron" else "fsdp", "fp8" if case.startswith("fp8") else "plain"


def steps_of(case: str, options: argparse.Namespace) -> int:
    if options.tiny:
        return 6
    return int(options.s1_steps if case == "s1" else smollm2.STEPS.get(case, options.steps))


def expected_of(case: str, options: argparse.Namespace) -> float:
    """Seconds of a case, without the start."""
    if case in PROGRAMS:
        return PROGRAMS[case].expected
    return steps_of(case, options) * STEP_SECONDS.get(case, 1.1) + 8


def expected_of_group(group: list[str], options: argparse.Namespace) -> float:
    """Programs run beside the runs, which follow one another (SW-2)."""
    runs = sum(expected_of(case, options) for case in group if case not in PROGRAMS)
    return max([runs, *(expected_of(case, options) for case in group if case in PROGRAMS)])


def resolved_of(case: str, options: argparse.Namespace) -> Resolved:
    """The job of a case. The model may come later than what engines start with, which has its shapes.

    Raises:
        ConfigError: it can't run here.
    """
    settings = smollm2.overrides_of(
        case, options.engine_model or options.model, steps_of(case, options), tiny=options.tiny
    )
    words = [*settings, f"name={case}", f"run_dir={options.out / 'runs'}", *options.set]
    job = load(RECIPE, Job, words)
    gpus = 0 if options.tiny else len(Gpus().memory())
    resolved = resolve(job, folder=RECIPE.parent, source=case, gpus=gpus, cores=count_cores())
    return replace(resolved, job=replace(resolved.job, model=replace(resolved.job.model, path=options.model)))


class Watch:
    """Looks at this process and all that it started, from a thread, but for `apart`."""

    def __init__(self, apart: Callable[[], set[int]]) -> None:
        self.looks: list[Look] = []
        self._gpus, self._apart = Gpus(), apart
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError):
                self.looks.append(look_at(os.getpid(), self._gpus, self._apart()))


class Roles:
    """What is up: trainers, rollouts and the pool of rewards, each started once; one pair is connected at a time."""

    def __init__(self, options: argparse.Namespace, host: HostMesh, tasks: TaskGroup, cases: list[str]) -> None:
        self._options, self._host, self._tasks = options, host, tasks
        self._resolved: dict[str, Resolved] = {}
        self.refused: dict[str, ConfigError] = {}
        for case in cases:
            try:
                self._resolved[case] = resolved_of(case, options)
            except ConfigError as error:
                self.refused[case] = error
        self._series: Series | None = None
        self._pair: tuple[str, str] | None = None
        self._trainers: dict[str, asyncio.Task[Trainer]] = {}
        self._rollouts: dict[str, asyncio.Task[Rollout]] = {}
        for case, resolved in self._resolved.items():
            trainer, rollout = kinds_of(case)
            if trainer not in self._trainers:
                loading = self._trainer(trainer, resolved)
                self._trainers[trainer] = asyncio.create_task(loading, name=f"trainer {trainer}")
            if rollout not in self._rollouts:
                starting = self._rollout(rollout, resolved)
                self._rollouts[rollout] = asyncio.create_task(starting, name=f"rollout {rollout}")
        first = resolved_of(next(iter(self._resolved), "s1"), options)
        self._reward = asyncio.ensure_future(RewardPool.start(host, first.job.reward))
        self._saved: set[str] = set()
        """Kinds of trainers of which the start is on disk."""

    async def started(self, limit: float) -> dict[str, str]:
        """Wait for all of them, and at most so long; how each came up.

        Raises:
            TimeoutError: none of the pairs is up.
        """
        everything: dict[str, asyncio.Task[Any]] = {f"trainer {k}": t for k, t in self._trainers.items()}
        everything |= {f"rollout {k}": t for k, t in self._rollouts.items()} | {"reward": self._reward}
        await asyncio.wait(everything.values(), timeout=limit)
        how = {name: _outcome(task) for name, task in everything.items()}
        if how["reward"] != "up" or not self._up(self._trainers) or not self._up(self._rollouts):
            raise TimeoutError(f"no trainer with a rollout came up within {limit:.0f} s: {how}")
        return how | {case: str(error)[:300] for case, error in self.refused.items()}

    def _up(self, tasks: Mapping[str, asyncio.Task[Any]]) -> bool:
        return any(_outcome(task) == "up" for task in tasks.values())

    async def series(self, case: str) -> tuple[Series, Resolved]:
        """The series that runs a case, connected. Raises what kept one of its roles from starting."""
        if case in self.refused:
            raise self.refused[case]
        resolved, pair = self._resolved[case], kinds_of(case)
        for task in (self._trainers[pair[0]], self._rollouts[pair[1]]):
            if not task.done():
                raise TimeoutError(f"the {task.get_name()} is not up")
        trainer, rollout, reward = await self._trainers[pair[0]], await self._rollouts[pair[1]], await self._reward
        if self._series is None or self._pair != pair:
            await self.close()
            questions = await asyncio.to_thread(make_prompts, resolved.job)
            roles = await connect(resolved, self._host, self._tasks, trainer, rollout, reward, questions)
            saved = self._options.out / f"start_{pair[0]}"
            self._series, self._pair = Series(resolved=resolved, roles=roles, saved=saved), pair
            if pair[0] not in self._saved:  # before its first step: what it was started as
                shutil.rmtree(saved, ignore_errors=True)  # of a sweep that has ended
                await save_start(roles, saved)
                self._saved.add(pair[0])
            assert isinstance(roles.weights, WeightSession)
            print(roles.weights.explain(), flush=True)
        return self._series, resolved

    async def close(self) -> None:
        """End the connection that there is."""
        series, self._series = self._series, None
        if series is not None:
            await series.roles.close()

    async def _trainer(self, kind: str, resolved: Resolved) -> Trainer:
        await file_is_there(Path(resolved.job.model.path) / "config.json")
        name = "trainer" if kind == "fsdp" else f"trainer_{kind}"
        return await timed(
            f"trainer {kind}",
            Trainer.start(
                self._host, resolved.job.trainer, resolved.job.model.path, name=name, gpus=resolved.placement.trainer
            ),
        )

    async def _rollout(self, kind: str, resolved: Resolved) -> Rollout:
        path = self._options.engine_model or resolved.job.model.path
        await file_is_there(Path(path) / "config.json")
        name = "rollout" if kind == "plain" else f"rollout_{kind}"
        return await timed(
            f"rollout {kind}",
            Rollout.start(self._host, resolved.job.rollout, path, gpus=resolved.placement.rollout, name=name),
        )


def _outcome(task: asyncio.Task[Any]) -> str:
    """ "up", or what kept it from that."""
    return str(task.exception() or "up")[:300] if task.done() else "not up yet"


async def file_is_there(path: Path) -> None:
    """Wait for it: somebody else writes it."""
    while not path.exists():  # noqa: ASYNC110, ASYNC240  # another program's
        await asyncio.sleep(0.2)


async def timed(what: str, work: Awaitable[T]) -> T:
    began = time.monotonic()
    try:
        return await work
    finally:
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


class Sweep:
    """All cases, one group after the other."""

    def __init__(self, options: argparse.Namespace, say: Say, told: Say) -> None:
        self.options = options
        self.groups: list[list[str]] = [text.split("+") for text in options.cases]
        self._say, self._told = say, told
        self._loading: dict[str, asyncio.subprocess.Process] = {}
        """Programs that wait for their turn."""

    @property
    def left(self) -> float:
        return float(self.options.until - time.time())

    async def run(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        await file_is_there(Path(self.options.engine_model or self.options.model) / "config.json")
        runs = [case for group in self.groups for case in group if case not in PROGRAMS]
        last = max((i for i, group in enumerate(self.groups) if set(group) & set(runs)), default=-1)
        for name in (n for group in self.groups for n in group if n in PROGRAMS and PROGRAMS[n].waits):
            self._loading[name] = await programs.start(name, self.options, PROGRAMS[name].limit)
        try:
            if runs:
                host = this_host(
                    log_dir=self.options.out / "ranks", sink=lambda text: print(text, flush=True), preload=PRELOAD
                )
                async with host, TaskGroup("sweep") as tasks:
                    tasks.forever(host.watch(), name="watch")
                    roles = Roles(self.options, host, tasks, runs)
                    up = await roles.started(1500 if self.options.tiny else START_LIMIT)
                    self._told({"started": up | await self._loaded(), "left_s": round(self.left)})
                    gc.freeze()
                    for group in self.groups[: last + 1]:
                        await self._group(group, roles)
                    await roles.close()
            for group in self.groups[last + 1 :]:
                await self._group(group, None)
        finally:
            for process in self._loading.values():
                await programs.ended(process, 0)

    async def _loaded(self) -> dict[str, str]:
        """Wait for the programs that load before their turn, at most so long; how each stands."""
        until = time.monotonic() + LOADED_SECONDS
        while time.monotonic() < until and "loads" in self._stand().values():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return self._stand()

    def _stand(self) -> dict[str, str]:
        def of(name: str, process: asyncio.subprocess.Process) -> str:
            if process.returncode is not None:
                return f"ended with {process.returncode}"
            return "waits" if programs.ready(name, self.options.out).exists() else "loads"

        return {name: of(name, process) for name, process in self._loading.items()}

    async def _group(self, group: list[str], roles: Roles | None) -> None:
        expected = expected_of_group(group, self.options)
        if expected > self.left and not self.options.tiny:
            self._told({"passed": group, "expected_s": expected, "left_s": round(self.left)})
            return
        beside = [case for case in group if case in PROGRAMS]
        running = [asyncio.ensure_future(self._case(name, self._program(name))) for name in beside]
        for case in (case for case in group if case not in PROGRAMS):
            assert roles is not None
            await self._case(case, self._job(case, roles))
        await asyncio.gather(*running)

    async def _case(self, name: str, work: Coroutine[Any, Any, int | str]) -> None:
        began = time.monotonic()
        how: int | str
        try:
            how = await work
        except FAILURES as error:
            how = text_of(error)
        seconds = round(time.monotonic() - began, 1)
        held = {"gpu_GiB": Gpus().holders()} if how else {}  # a GPU that is full is a reason
        self._told({"case": name, "ended": how, "seconds": seconds, "left_s": round(self.left)} | held)

    async def _program(self, name: str) -> int | str:
        limit = 3600.0 if self.options.tiny else min(PROGRAMS[name].limit, self.left - END_SECONDS)
        process = self._loading.pop(name, None)
        if process is None or process.returncode is not None:  # it has failed while it loaded: once more
            return await programs.run(name, self.options, limit)
        programs.baton(name, self.options.out).touch()
        return await programs.ended(process, limit)

    async def _job(self, case: str, roles: Roles) -> int | str:
        """One run, of which the facts are said whatever its end."""
        limit = 3600.0 if self.options.tiny else min(2 * expected_of(case, self.options), self.left - END_SECONDS)
        series, resolved = await roles.series(case)
        run = Run(case)
        began, then = time.monotonic(), set((self.options.out / "runs").glob(f"{case}*"))
        watch = Watch(lambda: {p.pid for p in self._loading.values()})
        try:
            with watch:
                await asyncio.wait_for(series.run(resolved, started=stopped_after(limit)), limit + GRACE_SECONDS)
            run.code = 0
        except FAILURES as error:
            run.error = text_of(error)
            raise
        finally:
            run.seconds = time.monotonic() - began
            run.folder = next(iter(set((self.options.out / "runs").glob(f"{case}*")) - then), None)
            run.records = [] if run.folder is None else read_metrics(run.folder)
            run.looks = watch.looks
            self._say(run.as_facts())
        return run.code


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def stopped_after(seconds: float) -> Callable[[GRPO], None]:
    """Ends a page well after so long (SW-3). One that has ended by then is told in vain."""

    def started(page: GRPO) -> None:
        asyncio.get_running_loop().call_later(seconds, page.stop)

    return started


def plan_of(options: argparse.Namespace) -> Iterator[str]:
    """What will run when, and what is left of the budget then."""
    left = options.until - time.time()
    groups = [text.split("+") for text in options.cases]
    if any(case not in PROGRAMS for group in groups for case in group):
        left -= START_SECONDS
        yield f"start of everything: {START_SECONDS:.0f} s, then {left:.0f} s are left"
    for group in groups:
        expected = expected_of_group(group, options)
        fits = expected <= left
        left -= expected if fits else 0
        after = f"then {left:.0f} s are left" if fits else f"does not fit into {left:.0f} s"
        yield f"{'+'.join(group)}: {expected:.0f} s, {after}"


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sweep")
    parser.add_argument("--out", type=Path, default=Path("sweep"))
    parser.add_argument("--model", default="/tmp/smollm2", help="waited for: its config.json is what comes last")
    parser.add_argument("--engine-model", default="", help="a folder of the same shapes that is there already")
    parser.add_argument("--cases", nargs="*", default=["s1", "s0", "s2", "s4"])
    parser.add_argument("--until", type=float, default=0, help="epoch seconds at which all is ended; 0: in 20 minutes")
    parser.add_argument("--steps", type=int, default=60, help="of the cases that have no number of their own")
    parser.add_argument("--s1-steps", type=int, default=smollm2.STEPS["s1"], help="of the long run")
    parser.add_argument("--trl-steps", type=int, default=50)
    parser.add_argument("--layout", default="ep", help="of the mixture of experts, see benchmarks.gpu.moe")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all jobs")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU with the start policy of the recipes")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in what is left out, and refuse unknown cases."""
    known = {*PROGRAMS, *smollm2.CASES}
    if unknown := {name for text in options.cases for name in text.split("+")} - known:
        parser.error(f"--cases: {', '.join(sorted(unknown))}: expected some of {', '.join(sorted(known))}")
    options.out = options.out.resolve()
    options.until = options.until or time.time() + 1200
    if options.tiny:
        options.model = str(ROOT / "recipes" / "start_policy")
        options.trl_steps = 3


def main() -> int:
    parser = parser_of()
    options = parser.parse_args()
    check(parser, options)
    with saying(options.out, smollm2.FILE) as say, saying(options.out, "acceptance.jsonl") as tell:

        def told(facts: dict[str, Any]) -> None:
            print(facts, flush=True)
            tell(facts)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Sweep(options, say, told).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
