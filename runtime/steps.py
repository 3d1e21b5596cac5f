"""Coroutines that run at once as far as they can, rather than in the next turn of the loop.

ES-1: what a coroutine runs before it waits for the first time runs here and now, in the context given; what comes after
      it runs in a task.
ES-2: `asyncio.current_task()` is that task from the beginning: what needs one works, such as `asyncio.timeout`.
ES-3: a cancel that reaches the task before it has taken over is raised where the coroutine waits.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Steps:
    """A coroutine after its first step; awaiting this goes on with it. Raises what that first step raises."""

    __slots__ = ("_coroutine", "_run", "_waits_for", "ended", "interrupt", "value")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None) -> None:
        self._coroutine = coroutine
        self._run: Callable[..., Any] = _directly if context is None else context.run
        self.interrupt: BaseException | None = None
        """What is raised where it waits (ES-3)."""
        self.ended = False
        """It did not have to wait; it returned `value`."""
        self.value: Any = None
        try:
            self._waits_for = self._run(coroutine.send, None)
        except StopIteration as end:
            self.ended, self.value = True, end.value

    def close(self) -> None:
        """End it where it is, if it has not ended."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        if self.ended:
            return self.value
        run, send, throw, waits_for = self._run, self._coroutine.send, self._coroutine.throw, self._waits_for
        try:
            if self.interrupt is not None:
                waits_for = run(throw, self.interrupt)
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # a cancel: for the coroutine to handle
                    waits_for = run(throw, error)
                else:
                    waits_for = run(send, value)
        except StopIteration as end:
            return end.value


def _directly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Runner:
    """Starts coroutines of one loop that never raise. One task is parked for the next one that has to wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parked: _Parked | None = None
        """Made at the first use."""

    def start(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        name: str,
        done: Callable[[Any], None],
    ) -> None:
        """Run a coroutine (ES-1); `done` gets what it returns, perhaps before this returns. `name`: of its task."""
        parked, loop = self._parked, self._loop
        if parked is None or not parked.ready or asyncio.current_task(loop) is not None:
            task = loop.create_task(_run(coroutine, done), name=name, context=context)
            task.add_done_callback(lambda _: coroutine.close())  # where a cancel came before its first step
            if parked is None:
                self._parked = _Parked(loop)
            return
        task = parked.task
        asyncio._enter_task(loop, task)
        try:
            steps = Steps(coroutine, context)
        finally:
            asyncio._leave_task(loop, task)
        if not steps.ended:
            task.set_name(name)
            parked.take(steps, done)
            self._parked = _Parked(loop)
            return
        if task.cancelling():  # the coroutine did that to itself; the next one shall not feel it
            self._parked = _Parked(loop)
        done(steps.value)

    def close(self) -> None:
        """End the parked task."""
        if self._parked is not None:
            self._parked.task.cancel()


class _Parked:
    """A task that waits for what it shall go on with."""

    __slots__ = ("_begun", "_done", "_steps", "_taken", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken: asyncio.Future[None] = loop.create_future()
        self._begun = False
        self._steps: Steps | None = None
        self._done: Callable[[Any], None] | None = None
        self.task = loop.create_task(self._wait(), name="parked", context=contextvars.Context())

    @property
    def ready(self) -> bool:
        return self._begun and not self._taken.done()

    def take(self, steps: Steps, done: Callable[[Any], None]) -> None:
        """Go on with a coroutine."""
        self._steps, self._done = steps, done
        if not self._taken.done():
            self._taken.set_result(None)

    async def _wait(self) -> None:
        self._begun = True
        try:
            await self._taken
        except asyncio.CancelledError as error:
            if self._steps is None:
                raise
            self._steps.interrupt = error
        assert self._steps is not None
        assert self._done is not None
        self._done(await self._steps)


async def _run(coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
    done(await coroutine)
