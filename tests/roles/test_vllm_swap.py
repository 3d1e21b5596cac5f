"""VE-3 of roles/engine_vllm.py, with workers that answer late; and what is done before a swap."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roles.engine import EngineFailed
from roles.engine_vllm import VllmEngine
from runtime import TaskGroup


async def test_a_swap_that_nobody_waits_for_any_more_moves_the_number_with_the_weights_ve3() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def workers(method: str, *args: Any) -> Any:
        assert method == "tutti_swap"
        reached.set()
        await go_on.wait()
        return [{}]

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._version, engine._shares, engine._samples, engine._workers = 1, 0, {}, workers
    async with TaskGroup("engine") as tasks:
        engine._tasks = tasks
        swap = asyncio.ensure_future(engine.swap({}, 2))
        await reached.wait()
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert engine.version == 1
        go_on.set()
    assert engine.version == 2


async def test_a_swap_that_fails_is_the_error_of_who_waits_for_it() -> None:
    async def workers(method: str, *args: Any) -> Any:
        raise EngineFailed("worker 1 is gone")

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._version, engine._shares, engine._samples, engine._workers = 1, 0, {}, workers
    async with TaskGroup("engine") as tasks:
        engine._tasks = tasks
        with pytest.raises(EngineFailed, match="worker 1 is gone"):
            await engine.swap({}, 2)
    assert engine.version == 1


async def test_layers_are_made_ready_before_the_pause_by_all_workers() -> None:
    calls: list[str] = []
    answers = {"tutti_process": [[True, False], [True, True]], "tutti_processed": [[True, True]]}

    async def workers(method: str, *args: Any) -> Any:
        calls.append(method)
        return answers[method].pop(0)

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._shares, engine._workers = None, workers
    await engine.prepare_weights(2)  # the first weights: what has to be done is not known yet
    assert not calls
    engine._shares = 2
    await engine.prepare_weights(2)
    assert calls == ["tutti_process", "tutti_process", "tutti_processed"]
