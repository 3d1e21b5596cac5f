"""The calls of a rollout rank in its engine: which request runs for whom, who goes on, who is told.

    Call --submit--> request of the engine ---ended---> its call, which is done with the last of its samples
                          ^                  |
                          '-- the rest <-----'  interrupted by an update, not by its caller

Its promises are those of roles/rollout_rank.py: RR-2 (an error reaches everybody), RR-3 (a cancelled call leaves the
engine) and RR-4 (no sample is lost over an update).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from roles.engine import Finished, Request, RolloutEngine, Sampled
from roles.rollout_call import Call
from runtime.tasks import TaskGroup


class Calls:
    """Calls that wait for samples of one engine.

    Args:
        engine: runs their requests.
        gate: set while requests may be submitted; the rest of an interrupted sample waits for it.
    """

    def __init__(self, engine: RolloutEngine, gate: asyncio.Event) -> None:
        self.requests: dict[int, tuple[Call, tuple[int, ...]]] = {}
        """Request of the engine -> the call that it runs for, and which of its samples."""
        self._engine = engine
        self._gate = gate
        self._tasks: TaskGroup | None = None
        self._failure: Exception | None = None
        self._next_id = 0
        self._something_ended = asyncio.Event()

    def open(self, tasks: TaskGroup) -> None:
        """Start the engine's tasks, with the first call. Raises what has ended it."""
        self.check()
        if self._tasks is None:
            self._tasks = tasks
            self._engine.open(tasks, self._fail)

    def check(self) -> None:
        """Raises what has ended the engine."""
        if self._failure is not None:
            raise self._failure

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    @contextlib.asynccontextmanager
    async def running(self, call: Call) -> AsyncIterator[None]:
        """What its caller does while it runs; who leaves early ends its samples (RR-3)."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._stop(call)
            raise
        finally:
            for number in call.ids:
                self.requests.pop(number, None)

    def submit(self, call: Call, request: Request, samples: tuple[int, ...]) -> None:
        """Let these samples of it run."""
        self.check()
        self.requests[request.id] = (call, samples)
        call.ids.add(request.id)
        if call.told:
            self._engine.submit(request, self._ended, self._sampled)
        else:
            self._engine.submit(request, self._ended)

    async def until_enough(self, call: Call, seconds: float | None) -> None:
        """Wait for enough samples, then stop the others. Returns at once when the engine fails: `done` tells."""
        enough = asyncio.ensure_future(call.enough.wait())
        waited: list[asyncio.Future[Any]] = [enough, call.done]
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            enough.cancel()
        if not call.done.done():
            self._stop(call)

    def interrupt(self) -> None:
        """End what runs, to go on once the gate is open (RR-4)."""
        for number in tuple(self.requests):
            self._engine.abort(number)

    async def idle(self) -> None:
        """Wait until the engine holds no request."""
        # In this order: between the two looks a sample may come to run, and none can come to wait.
        while self._engine.num_waiting or self._engine.num_running:
            self.check()
            self._something_ended.clear()
            await self._something_ended.wait()

    def _sampled(self, news: Sampled) -> None:
        if news.request_id not in self.requests:
            return
        call, samples = self.requests[news.request_id]
        if call.took(samples[news.sample], news.piece):
            self._engine.abort(news.request_id, news.sample)

    def _ended(self, finished: Finished) -> None:
        self._something_ended.set()
        if finished.request_id not in self.requests:
            return  # its call was cancelled: a sample has nobody to go to
        call, samples = self.requests[finished.request_id]
        sample = samples[finished.sample]
        if not call.ended(sample, finished.completion):
            assert self._tasks is not None  # nothing ends before the engine was opened
            self._tasks.start(self._go_on(call, sample), name=f"go on with request {finished.request_id}")

    async def _go_on(self, call: Call, sample: int) -> None:
        """Submit what is left of a sample that an update has interrupted (RR-4)."""
        await self._gate.wait()
        if call.stopped:
            call.end(sample)
        else:
            self.submit(call, call.rest(sample, self.new_id()), (sample,))

    def _stop(self, call: Call) -> None:
        call.stopped = True
        for number in call.ids:
            self._engine.abort(number)

    def _fail(self, error: Exception) -> None:
        """Tell everybody who waits (RR-2)."""
        self._failure = error
        self._something_ended.set()
        for call, _ in self.requests.values():
            if not call.done.done():
                call.done.set_exception(error)
                call.done.exception()  # its caller may have gone: then nobody asks
