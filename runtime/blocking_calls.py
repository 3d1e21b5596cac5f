"""Waiting in a sync endpoint for something async: calls of other actors, ports, anything that can be awaited.

BK-1: it runs on the loop of the process, in the context of the endpoint: a call that could never run raises SelfCall.
BK-2: when the caller of the endpoint gives up, what is waited for is cancelled and CancelledError raised here.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from runtime.actor import context
from runtime.node import current_node

T = TypeVar("T")


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of this process and wait here for its result:
    `blocking(mesh.hello.call_one("x"))`.

    Raises:
        RuntimeError: called on the loop itself, which would wait for itself. Use `await` there.
        asyncio.CancelledError: the caller of this endpoint has given up.
        whatever the coroutine raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coroutine.close()
        raise RuntimeError("blocking() in an async function would stop its event loop. Use await")
    loop = current_node().loop
    done: Future[T] = Future()
    variables = contextvars.copy_context()
    task: asyncio.Task[T] | None = None

    def start() -> None:
        nonlocal task
        task = loop.create_task(coroutine, name="blocking", context=variables)
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            done.cancel()
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def cancel() -> None:
        if task is not None:
            task.cancel()

    token = context().token
    loop.call_soon_threadsafe(start)
    with token.calling(lambda: loop.call_soon_threadsafe(cancel)):
        try:
            return done.result()
        except CancelledError:
            raise asyncio.CancelledError("the caller has given up") from None
