"""ES-3 of runtime/steps.py for a coroutine that never began; the rest shows in the calls of actors."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect

from runtime.steps import Runner


async def test_a_coroutine_whose_task_ends_before_its_first_step_is_closed():
    loop = asyncio.get_running_loop()
    runner = Runner(loop)
    ended: list[object] = []

    async def work() -> None:
        ended.append("began")

    coroutine = work()
    runner.start(coroutine, contextvars.Context(), "work", ended.append)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "work"]
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert not ended
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED  # not left for the collector to complain of
    runner.close()
    gc.collect()
