"""TG-1 to TG-5 of runtime/tasks.py."""

from __future__ import annotations

import asyncio

import pytest

from runtime import DeadlineExceeded, TaskGroup, wait


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(error: BaseException) -> None:
    raise error


async def test_block_waits_for_finite_tasks_and_cancels_the_others():
    done = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append("work")

    async with TaskGroup("g") as tasks:
        tasks.start(work(), name="work")
        endless = tasks.forever(forever(), name="endless")
    assert done == ["work"]
    assert endless.cancelled()


async def test_first_error_is_raised_as_itself_and_cancels_the_block():
    error = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught:
        async with TaskGroup("g") as tasks:
            endless = tasks.start(forever(), name="endless")
            tasks.start(fail(error), name="bad")
            await forever()
    assert caught.value is error
    assert endless.cancelled()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_later_errors_become_notes():
    async def fail_when_cancelled() -> None:
        try:
            await forever()
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first") as caught:
        async with TaskGroup("g") as tasks:
            tasks.start(fail_when_cancelled(), name="stubborn")
            await asyncio.sleep(0)
            tasks.start(fail(ValueError("first")), name="bad")
    assert caught.value.__notes__ == ["Then g.stubborn of 'g': KeyError: 'second'"]


async def test_error_of_the_block_cancels_tasks():
    with pytest.raises(LookupError, match="block"):
        async with TaskGroup("g") as tasks:
            endless = tasks.forever(forever(), name="endless")
            raise LookupError("block")
    assert endless.cancelled()


async def test_forever_task_that_returns_is_an_error():
    async def stop_early() -> None:
        return

    with pytest.raises(RuntimeError, match=r"'g\.early' returned, but it was started with forever"):
        async with TaskGroup("g") as tasks:
            tasks.forever(stop_early(), name="early")
            await forever()


async def test_cancelling_the_owner_cancels_its_tasks():
    inner: list[asyncio.Task[None]] = []

    async def owner() -> None:
        async with TaskGroup("g") as tasks:
            inner.append(tasks.start(forever(), name="endless"))
            await forever()

    task = asyncio.create_task(owner())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner[0].cancelled()


async def test_cancelling_the_owner_while_it_waits_at_the_end():
    async def owner() -> None:
        async with TaskGroup("g") as tasks:
            tasks.start(forever(), name="endless")

    task = asyncio.create_task(owner())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_deadline_names_the_task():
    with pytest.raises(DeadlineExceeded, match=r"task 'slow' did not finish within 0\.01 s") as caught:
        async with TaskGroup("g") as tasks:
            tasks.start(forever(), name="slow", timeout=0.01)
    assert isinstance(caught.value, TimeoutError)


async def test_closed_group_refuses_tasks_and_leaves_no_coroutine_unawaited():
    async with TaskGroup("g") as tasks:
        pass
    with pytest.raises(RuntimeError, match="'g' is not open"):
        tasks.start(forever(), name="late")


async def test_owner_without_a_block_hears_of_the_first_error():
    heard: list[tuple[BaseException, str]] = []
    tasks = TaskGroup("g", on_error=lambda error, name: heard.append((error, name)))
    tasks.open()
    error = ValueError("x")
    tasks.start(fail(error), name="bad")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await tasks.close()
    assert heard == [(error, "g.bad")]


async def test_wait_returns_when_enough_are_done_and_leaves_the_rest_running():
    gate = asyncio.Event()

    async def value(number: int) -> int:
        if number > 1:
            await gate.wait()
        return number

    async with TaskGroup("t") as tasks:
        started = [tasks.start(value(n), name=str(n)) for n in (3, 1, 0, 2)]
        done, rest = await wait(started, 2)
        assert [task.result() for task in done] == [1, 0]
        assert rest == [started[0], started[3]]
        assert await wait(started, 3, timeout=0.01) == (done, rest)
        gate.set()
        assert (await wait(started, 4))[1] == []
        with pytest.raises(ValueError, match="5 of 4 tasks"):
            await wait(started, 5)
        coroutine = value(1)
        with pytest.raises(TypeError, match="expected tasks, got coroutine"):
            await wait([coroutine])  # type: ignore[arg-type]
        coroutine.close()
