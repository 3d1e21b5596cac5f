"""Drives an engine whose steps are plain calls, on the main thread of its process.

    submit, abort --commands--> turn: commands, then steps for some milliseconds   main thread
                                 |
    ended(finished) <------------'                                                 event loop

SG-1: the engine is touched on the main thread only, by one function at a time: a turn, a swap or a score. Weights and
      version move inside one such function, so no step sees the one without the other (W5).
SG-2: an aborted request leaves the engine within one turn: its rows are free for others (R6).
SG-3: without requests nothing runs: the driver sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from roles.engine import Ended, Finished, Request, StepEngine
from runtime import on_main_thread

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from runtime import TaskGroup
    from sync.layout import Layout

TURN_SECONDS = 0.01
"""How long a turn goes on before the main thread is free for a swap and ended samples are told: a few steps of a small
model, one step of a large one. A hop between threads costs about 0.1 ms."""


class Stepper:
    """A `roles.engine.RolloutEngine` over a `StepEngine`."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._listeners: dict[int, tuple[Ended, int]] = {}  # by request: who is told, samples that have not ended
        # From the event loop to the main thread: a Request to submit, or the id of one to abort.
        self._commands: deque[Request | int] = deque()
        self._work = asyncio.Event()
        self._busy_seconds = 0.0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Those included that the next turn will submit."""
        coming = sum(len(one.seeds) for one in tuple(self._commands) if isinstance(one, Request))
        return self._engine.num_waiting + coming

    @property
    def num_tokens(self) -> int:
        return self._engine.num_tokens

    @property
    def busy_seconds(self) -> float:
        return self._busy_seconds

    def check(self, request: Request) -> None:
        self._engine.check(request)

    def open(self, tasks: TaskGroup, failed: Callable[[Exception], None]) -> None:
        tasks.forever(self._drive(failed), name="engine")

    def submit(self, request: Request, ended: Ended) -> None:
        self._engine.check(request)
        if request.id in self._listeners:
            raise ValueError(f"rollout: request id {request.id} is in use; give each request its own id")
        self._listeners[request.id] = (ended, len(request.seeds))
        self._tell(request)

    def abort(self, request_id: int) -> None:
        if request_id in self._listeners:
            self._tell(request_id)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await on_main_thread(self._engine.score, sequences)

    async def probe(self) -> None:
        await on_main_thread(lambda: None)

    def weight_layout(self) -> Layout:
        return self._engine.weight_layout()

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        return await on_main_thread(self._engine.swap, weights, version)

    async def close(self) -> None:
        """Nothing runs outside of the tasks of its owner."""

    def _tell(self, command: Request | int) -> None:
        self._commands.append(command)
        self._work.set()

    async def _drive(self, failed: Callable[[Exception], None]) -> None:
        """Turns while there is work, for ever."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._commands or self._engine.num_running or self._engine.num_waiting:
                    for finished in await on_main_thread(self._turn):
                        self._told(finished)
        except Exception as error:
            failed(error)
            raise

    def _told(self, finished: Finished) -> None:
        ended, left = self._listeners[finished.request_id]
        if left == 1:
            del self._listeners[finished.request_id]
        else:
            self._listeners[finished.request_id] = (ended, left - 1)
        ended(finished)

    def _turn(self) -> list[Finished]:
        """Commands and steps for some milliseconds, on the main thread. Returns the samples that ended."""
        began = time.perf_counter()
        engine, ended = self._engine, list[Finished]()
        while True:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, Request):
                    engine.submit(command)
                else:
                    ended += engine.abort(command)
            ended += engine.step()
            seconds = time.perf_counter() - began
            if seconds > TURN_SECONDS or not (engine.num_running or engine.num_waiting):
                self._busy_seconds += seconds
                return ended
