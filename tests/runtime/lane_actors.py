"""Actors that show in which order, task and context their endpoints run."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Actor, ActorMesh, context, current_rank, endpoint

_variable: contextvars.ContextVar[str] = contextvars.ContextVar("of_a_user", default="unset")


class Notebook(Actor):
    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.gate = asyncio.Event()

    @endpoint
    async def note(self, number: int, ballast: np.ndarray | None = None) -> int:
        self.notes.append(number)
        return number

    @endpoint
    def note_on_main(self, number: int) -> int:
        self.notes.append(number)
        return number

    @endpoint
    async def notes_so_far(self) -> list[int]:
        return self.notes

    @endpoint
    async def swap_variable(self, value: str) -> str:
        """What a call before this one has left behind."""
        before = _variable.get()
        _variable.set(value)
        return before

    @endpoint
    async def task_is_usable(self) -> bool:
        """What needs the current task works in a call that does not wait, and in one that does."""
        async with asyncio.timeout(10):
            first = asyncio.current_task()
            await asyncio.sleep(0)
        return first is asyncio.current_task() and context().endpoint == "task_is_usable"

    @endpoint
    async def cancel_yourself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint
    async def wait_twice(self) -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return "waited"


class TidiesUpSlowly(Actor):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    @endpoint
    def nothing(self) -> None: ...

    async def __cleanup__(self, error: BaseException | None) -> None:
        await asyncio.sleep(0.7)  # longer than a process whose main thread is busy would be given
        os.close(os.open(f"{self.folder}/{current_rank()}", os.O_CREAT))


class FailsToTidyUp(Actor):
    def __cleanup__(self, error: BaseException | None) -> None:
        raise ValueError("could not tidy up on the main thread")


class FailsToTidyUpOnTheLoop(Actor):
    async def __cleanup__(self, error: BaseException | None) -> None:
        raise ValueError("could not tidy up on the loop")


class NeverMade(Actor):
    """Its constructor raises, or takes longer than anybody waits."""

    def __init__(self, fails: bool, begun: str) -> None:
        Path(begun).touch()
        if fails:
            raise LookupError("no such model")
        time.sleep(60)

    async def __cleanup__(self, error: Exception | None) -> None:
        print("tidied up")


class Stuck(Actor):
    """Its background task fails while its main thread is busy."""

    @endpoint
    def hold(self, begun: str, may_end: str) -> None:
        Path(begun).touch()
        while not os.path.exists(may_end):
            time.sleep(0.005)

    @endpoint(concurrency=1)
    async def fail(self) -> None:
        self.tasks.start(self._work(), name="work")

    async def _work(self) -> None:
        raise LookupError("background work failed")

    @endpoint
    def later(self) -> None: ...


class Tidy(Actor):
    """Takes its time to tidy up when its caller gives up."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.trace: list[str] = []

    @endpoint
    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.trace.append("tidies up")
            await self.gate.wait()
            self.trace.append("has tidied up")

    @endpoint(concurrency=2)
    async def open(self) -> None:
        self.gate.set()

    @endpoint(concurrency=2)
    async def traced(self) -> list[str]:
        return self.trace

    @endpoint
    async def give_up_on(self, other: ActorMesh) -> None:
        with contextlib.suppress(TimeoutError):
            await other.wait.options(timeout=0.05).call_one()
