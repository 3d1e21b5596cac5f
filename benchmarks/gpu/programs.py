"""The acceptance cases that are programs of their own, beside the runs of `benchmarks.gpu.sweep`.

PG-1: each is a process with a time limit and a log, and writes its rows at once. What it has started ends with it.
PG-2: a program that waits for a file (`--wait-for`) loads before its turn and is timed from it. It says so when it has
      loaded (`ready`), so that nothing is timed beside that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.launched import descendants, kill_all, kill_each


@dataclass(frozen=True)
class Program:
    module: str
    words: list[str] = field(default_factory=list)
    expected: float = 80.0
    """Seconds, start included unless it waits for a file."""
    limit: float = 130.0
    waits: bool = False


PROGRAMS = {
    "trl_server": Program("trl_grpo", ["--cases", "server"], 110, 160, waits=True),
    "trl_colocate": Program("trl_grpo", ["--cases", "colocate"], 170, 240),
    "shapes_0.6B": Program("shapes", ["--cases", "0.6B"], 100, 150),
    "shapes_8B": Program("shapes", ["--cases", "8B"], 150, 220),
    "moe": Program("moe", [], 190, 260),
    "kill": Program("kill", [], 200, 400),
}


LOAD_SECONDS = 150.0
"""Most that a program loads for that could not do so before its turn."""


def command_of(name: str, options: argparse.Namespace, limit: float) -> list[str]:
    """What a program is started with, to end by itself within `limit` seconds."""
    program = PROGRAMS[name]
    words = [sys.executable, "-W", "ignore", "-m", f"benchmarks.gpu.{program.module}", "--out", str(options.out)]
    words += ["--model", options.model, *program.words, *(["--tiny"] if options.tiny else [])]
    if program.module == "trl_grpo":
        words += ["--seconds", str(limit - 10), "--steps", str(options.trl_steps), "--set", *options.set]
        if program.waits:
            words += ["--wait-for", str(baton(name, options.out)), "--engine-model", options.engine_model]
    elif program.module == "shapes":
        words += ["--seconds", str(limit - 20)]
    elif program.module == "moe":
        words += ["--seconds", str(limit / 2 - 5), "--layout", options.layout]
    elif program.module == "kill":
        words += ["--seconds", str(min(600.0 if options.tiny else 140.0, limit / 2))]
    return words


def baton(name: str, out: Path) -> Path:
    """The file that a program waits for."""
    return out / f"{name}.go"


def ready(name: str, out: Path) -> Path:
    """The file that says that it waits."""
    return baton(name, out).with_suffix(".ready")


async def start(name: str, options: argparse.Namespace, limit: float) -> asyncio.subprocess.Process:
    """The process; its log is `case_NAME.log`."""
    for file in (baton(name, options.out), ready(name, options.out)):
        file.unlink(missing_ok=True)
    command = command_of(name, options, limit)
    with (options.out / f"case_{name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, start_new_session=True)


async def ended(process: asyncio.subprocess.Process, limit: float) -> int | str:
    """Its exit code, or "too long" (PG-1)."""
    code: int | str
    try:
        code = await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        code, started = "too long", descendants(process.pid)  # as long as they are
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5)
        kill_each(started)
    finally:
        kill_all(process.pid)
    return code


async def run(name: str, options: argparse.Namespace, limit: float) -> int | str:
    """Start and wait."""
    process = await start(name, options, limit)
    if PROGRAMS[name].waits:
        baton(name, options.out).touch()
        limit += LOAD_SECONDS
    return await ended(process, limit)
