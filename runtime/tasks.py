"""Task groups: every task has a name and an owner, and no error is lost.

    async with TaskGroup("grpo") as tasks:
        tasks.forever(produce(), name="produce")      # returning is an error
        tasks.start(evaluate(), name="evaluate")      # awaited at the end
        await train()

TG-1: leaving the block waits for the tasks started with `start`, then cancels those started with `forever`.
TG-2: the first error (of a task or of the block) cancels everything else and is re-raised as itself; later ones become
      notes on it.
TG-3: a `forever` task that returns is an error of the group.
TG-4: cancelling the task that owns the block cancels its tasks and waits for them.
TG-5: a group that isn't open refuses tasks and closes the coroutine, so that nothing is left un-awaited.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from runtime.errors import DeadlineExceeded

T = TypeVar("T")


class TaskGroup:
    """Owner of tasks. Use it as an async context manager."""

    def __init__(
        self,
        name: str,
        *,
        on_error: Callable[[BaseException, str], None] | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        """
        Args:
            name: stands in the names of its tasks and in messages.
            on_error: told at once of the first error and the name of its task; for owners that don't sit in the block.
            context: context variables that its tasks start with; by default those of whoever starts them.
        """
        self.name = name
        self._on_error = on_error
        self._context = context
        self._tasks: dict[asyncio.Task[Any], bool] = {}  # task -> is it a forever task
        self._error: BaseException | None = None
        self._parent: asyncio.Task[Any] | None = None
        self._cancelled_parent = False
        self._open = False
        self._closing = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<TaskGroup {self.name}: {', '.join(t.get_name() for t in self._tasks) or 'no task'}>"

    def start(self, coro: Coroutine[Any, Any, T], *, name: str, timeout: float | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of the group.

        Args:
            timeout: seconds after which it is cancelled and DeadlineExceeded, which names it, is its error.

        Raises:
            RuntimeError: the group is not open (TG-5).
        """
        return self._start(coro if timeout is None else _limited(coro, name, timeout), name, forever=False)

    def forever(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run a coroutine that must not return while the group is open (TG-3)."""
        return self._start(coro, name, forever=True)

    def open(self) -> None:
        """Accept tasks without a block, for an owner that calls `close` in the end."""
        self._open = True

    def cancel(self) -> None:
        """Cancel all tasks and refuse more, without waiting for them."""
        self._open, self._closing = False, True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, wait for them, refuse more. Doesn't raise their errors: `on_error` has had the first."""
        self._open, self._closing = False, True
        await self._cancel_all()

    async def __aenter__(self) -> TaskGroup:
        self._parent = asyncio.current_task()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        cancelled_by_us = isinstance(error, asyncio.CancelledError) and self._cancelled_parent
        if error is not None and not cancelled_by_us:
            self._fail(error, "")
        try:
            while self._error is None and any(not forever for forever in self._tasks.values()):
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError as cancel:
            if not self._cancelled_parent:
                self._fail(cancel, "")
        self._open, self._closing = False, True
        await self._cancel_all()
        if self._cancelled_parent and self._parent is not None:
            self._parent.uncancel()
        if self._error is None or self._error is error:
            return False
        try:
            raise self._error
        finally:
            # Otherwise the exception and this frame hold each other.
            self._error = self._parent = None

    def _start(self, coro: Coroutine[Any, Any, T], name: str, *, forever: bool) -> asyncio.Task[T]:
        if not self._open:
            coro.close()
            raise RuntimeError(
                f"task group {self.name!r} is not open, so {name!r} was not started. "
                "Start tasks inside its 'async with' block"
            )
        task = asyncio.get_running_loop().create_task(
            coro, name=f"{self.name}.{name}", context=None if self._context is None else self._context.copy()
        )
        self._tasks[task] = forever
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        forever = self._tasks.pop(task)
        self._changed.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is None and forever and not self._closing and self._error is None:
            error = RuntimeError(f"task {task.get_name()!r} returned, but it was started with forever()")
        if error is not None:
            self._fail(error, task.get_name())

    def _fail(self, error: BaseException, task_name: str) -> None:
        if self._error is not None:
            if error is not self._error:
                self._error.add_note(
                    f"Then {task_name or 'the block'} of {self.name!r}: {type(error).__name__}: {error}"
                )
            return
        self._error = error
        if self._on_error is not None:
            self._on_error(error, task_name)
        for task in self._tasks:
            task.cancel()
        if task_name and self._parent is not None and not self._closing and not self._parent.done():
            self._cancelled_parent = True
            self._parent.cancel()

    async def _cancel_all(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.wait(list(self._tasks))
            except asyncio.CancelledError as error:
                cancelled = error
            await asyncio.sleep(0)  # done callbacks run now
        if cancelled is not None and self._error is None:
            self._error = cancelled


async def wait(
    tasks: Sequence[asyncio.Future[T]], n: int = 1, *, timeout: float | None = None
) -> tuple[list[asyncio.Future[T]], list[asyncio.Future[T]]]:
    """Wait until `n` of the tasks are done, or `timeout` seconds have passed: (done, rest), in the order given.

    An error of a task raises where its `result()` is asked for. Nothing is cancelled: the tasks stay their owner's.

    Raises:
        ValueError: fewer than `n` tasks.
        TypeError: a coroutine among them. It belongs to nobody: start it in a task group first.
    """
    for task in tasks:
        if not asyncio.isfuture(task):
            raise TypeError(f"wait: expected tasks, got {type(task).__name__}. Start it: tasks.start(..., name=...)")
    if n > len(tasks):
        raise ValueError(f"wait: {n} of {len(tasks)} tasks can't be done")
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    while sum(task.done() for task in tasks) < n:
        rest = None if end is None else end - loop.time()
        if rest is not None and rest <= 0:
            break
        open_ = [task for task in tasks if not task.done()]
        await asyncio.wait(open_, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
    return [task for task in tasks if task.done()], [task for task in tasks if not task.done()]


async def _limited(coro: Coroutine[Any, Any, T], name: str, seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await coro
    except TimeoutError as error:
        if deadline.expired():
            raise DeadlineExceeded(f"task {name!r} did not finish within {seconds} s") from error
        raise
