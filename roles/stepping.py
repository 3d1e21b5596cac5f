"""Drives an engine whose steps are plain calls, on the main thread of its process.

    submit, abort --commands--> turn: commands, then steps for some milliseconds   main thread
                                 |
    sampled(news), ended(finished) <-'                                             event loop

SG-1: the engine is touched on the main thread only, by one function at a time: a turn, a swap or a score. Weights and
      version move inside one such function, so no step sees the one without the other (W5).
SG-2: an aborted request leaves the engine within one turn: its rows are free for others (R6).
SG-3: without requests nothing runs: the driver sleeps.
SG-4: while somebody reads along, a turn is one step: tokens are told as they come, and who ends a sample because of one
      has paid for no other.
SG-5: an engine that is held (`live_weights`) is given commands, and no step until its swap.
SG-6: a sample is running or waiting from its submission until its end is told, whatever is done with it just then on
      the main thread: who waits for none to be there misses none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from roles.engine import Ended, Finished, Request, Sampled, StepEngine, Told
from runtime import on_main_thread

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from runtime import TaskGroup
    from sync.layout import Layout

TURN_SECONDS = 0.01
"""How long a turn goes on before the main thread is free for a swap and ended samples are told: a few steps of a small
model, one step of a large one. A hop between threads costs about 0.1 ms."""


class _Submit(NamedTuple):
    request: Request
    told: bool


class _Abort(NamedTuple):
    request_id: int
    sample: int | None


class _Listener:
    """Who waits for a request."""

    def __init__(self, request: Request, ended: Ended, sampled: Told | None) -> None:
        self.ended = ended
        self.sampled = sampled
        self.left = len(request.seeds)
        """Samples that have not ended."""


class Stepper:
    """A `roles.engine.RolloutEngine` over a `StepEngine`."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._listeners: dict[int, _Listener] = {}  # by request
        self._num_told = 0  # of them with `sampled`
        self._num_samples = 0  # submitted, and their end not told yet
        self._commands: deque[_Submit | _Abort] = deque()  # from the event loop to the main thread
        self._work = asyncio.Event()
        self._held = False
        self._busy_seconds = 0.0

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """SG-6."""
        return max(0, self._num_samples - self._engine.num_running)

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

    def submit(self, request: Request, ended: Ended, sampled: Told | None = None) -> None:
        self._engine.check(request)
        if request.id in self._listeners:
            raise ValueError(f"rollout: request id {request.id} is in use; give each request its own id")
        self._listeners[request.id] = _Listener(request, ended, sampled)
        self._num_told += sampled is not None
        self._num_samples += len(request.seeds)
        self._tell(_Submit(request, sampled is not None))

    def abort(self, request_id: int, sample: int | None = None) -> None:
        if request_id in self._listeners:
            self._tell(_Abort(request_id, sample))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return await on_main_thread(self._engine.score, sequences)

    async def probe(self) -> None:
        await on_main_thread(lambda: None)

    def weight_layout(self) -> Layout:
        return self._engine.weight_layout()

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        left = await on_main_thread(self._engine.swap, weights, version)
        self._held = False
        self._work.set()
        return left

    @property
    def live_weights(self) -> Callable[[], Mapping[str, Tensor]]:
        """As `sync.ports.WeightSink` says; AttributeError where the engine has none."""
        live: Callable[[], Mapping[str, Tensor]] = self._engine.live_weights  # type: ignore[attr-defined]

        def hold() -> Mapping[str, Tensor]:
            self._held = True
            return live()

        return hold

    async def close(self) -> None:
        """Nothing runs outside of the tasks of its owner."""

    def _tell(self, command: _Submit | _Abort) -> None:
        self._commands.append(command)
        self._work.set()

    async def _drive(self, failed: Callable[[Exception], None]) -> None:
        """Turns while there is work, for ever."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._commands or self._has_steps():
                    news, ended = await on_main_thread(self._turn)
                    for one in news:
                        self._tell_news(one)
                    for finished in ended:
                        self._told(finished)
        except Exception as error:
            failed(error)
            raise

    def _has_steps(self) -> bool:
        return not self._held and self._engine.num_running + self._engine.num_waiting > 0

    def _tell_news(self, news: Sampled) -> None:
        sampled = self._listeners[news.request_id].sampled
        assert sampled is not None
        sampled(news)

    def _told(self, finished: Finished) -> None:
        listener = self._listeners[finished.request_id]
        listener.left -= 1
        self._num_samples -= 1
        if listener.left == 0:
            del self._listeners[finished.request_id]
            self._num_told -= listener.sampled is not None
        listener.ended(finished)

    def _turn(self) -> tuple[list[Sampled], list[Finished]]:
        """Commands and steps for some milliseconds, on the main thread. Returns tokens that somebody reads along, and
        the samples that ended."""
        began = time.perf_counter()
        engine, ended = self._engine, list[Finished]()
        while True:
            while self._commands:
                command = self._commands.popleft()
                if isinstance(command, _Submit):
                    engine.submit(command.request, told=command.told)
                else:
                    ended += engine.abort(command.request_id, command.sample)
            if self._has_steps():
                ended += engine.step()
            seconds = time.perf_counter() - began
            if self._num_told or seconds > TURN_SECONDS or not self._has_steps():
                self._busy_seconds += seconds
                return engine.news(), ended
