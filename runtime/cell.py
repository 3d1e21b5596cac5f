"""One actor inside its process: its lanes, what runs, what waits.

    message -> lane queue -> running -> answer, or items and then the answer
               (credit goes back when a message leaves the queue)

CE-1: a lane runs at most its limit at once and starts messages in the order of arrival (AC-2).
CE-2: every call is answered exactly once, whatever ends it: result, error, cancel, failure of the actor, stop.
CE-3: a cancelled message that still waits never runs; a running async endpoint gets CancelledError; a sync one runs to
      its end and its result is dropped.
CE-4: once a background task of the actor has failed, running and waiting calls end with its error, and later ones too,
      whatever still runs.
CE-5: arguments are decoded and results encoded on the thread that runs the endpoint, right before and after it.
CE-6: a sync generator holds the main thread while it computes values, not while it waits for its consumer.
CE-7: an answer leaves at once, unless the next call of the lane is expected to be over in no time: answers to such
      calls leave together.
CE-8: a call does not wait for another thread or turn of the loop: the main thread answers its calls itself and goes on
      with the next one of the lane; an async call runs where it arrives until it waits for the first time (ES-1), and
      those behind it follow, for at most `TURN_SECONDS`. Each has a context of its own.

Assumed: all methods but `_execute` and what that calls run on the thread of the loop; `_lock` keeps the two apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from runtime.actor import Actor, CancelToken, Context, set_context
from runtime.cleanup import clean_up
from runtime.codec import Payload
from runtime.errors import PackedError, Stopped, pack_error
from runtime.frames import COPY_IN_THREAD, Outgoing
from runtime.interface import EndpointType, Interface
from runtime.lanes import QUICK_SECONDS, Incoming, Lane, Route
from runtime.mailbox import OVERHEAD, Mailbox
from runtime.messages import ActorFailed, Call, Fault, More, Reply, Want
from runtime.posting import main_thread_of
from runtime.steps import Runner
from runtime.streams import MainThreadGenerator, Outflow, produce
from runtime.tasks import TaskGroup
from runtime.waits import HEADS, SERIAL, ActorState, LaneState, Work
from runtime.wire import Connection

TURN_SECONDS = 0.002
"""After that the loop does other things before the next call of a lane."""

Outcome = Outgoing | PackedError
NOTHING = Outgoing(Payload(b""), 0)
"""The end of a stream."""


NEVER_RAN = "cancelled before it ran"


class Process(Protocol):
    """What a cell needs from the process around it."""

    limit: int

    def run_on_main(self, job: Callable[[], Any], label: str, done: Callable[[Any], None] | None) -> None:
        """Run the job on the main thread, in the order asked; then `done(result)` on the loop. Without `done` the
        result is a function that is called on the main thread, when the job no longer counts as running."""

    def peer_failed(self, token: CancelToken) -> None:
        """The endpoint of this token may wait for a rank that has failed: see to it that it ends."""

    def report(self, failure: ActorFailed) -> None:
        """Tell the controller of an error that no caller waits for."""


class Cell:
    """An actor and its calls."""

    def __init__(self, process: Process, key: str, instance: Any, interface: Interface, place: Context) -> None:
        self.key = key
        self.instance = instance
        self.constructed = False
        """The constructor has returned: `__cleanup__` may rely on what it made (CL-3)."""
        self.place = place
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._interface = interface
        self._serial = Lane(1)
        self._routes = {name: self._route(kind) for name, kind in interface.endpoints.items()}
        self._lock = threading.RLock()
        """Of lanes, calls and mailbox."""
        self._calls: dict[tuple[Connection, int], Incoming] = {}
        self.mailbox = Mailbox(key)
        self._error: PackedError | None = None
        clean = contextvars.Context()
        clean.run(set_context, place)
        self._runner: Runner = place.node.runner if place.node is not None else Runner(self._loop)
        self._thread = threading.get_ident()
        self.tasks = TaskGroup(place.actor_name, on_error=self._on_task_error, context=clean)
        self.tasks.open()
        if isinstance(instance, Actor):
            instance._actor_tasks = self.tasks

    # From the wire

    def deliver(self, connection: Connection, call: Call, payload: Payload) -> None:
        """A call has arrived."""
        if self._error is not None:
            self._refuse(connection, call, payload, self._error)
            return
        route = self._routes.get(call.endpoint)
        if route is None:
            unknown = AttributeError(f"{self.place.actor_name} has no endpoint {call.endpoint!r}")
            self._refuse(connection, call, payload, pack_error(unknown))
            return
        incoming = Incoming(connection, call, payload, route)
        with self._lock:
            self._calls[connection, call.id] = incoming
            self.mailbox.put(incoming.cost)
            route.lane.queue.append(incoming)
        self._drain(route.lane)

    def more(self, connection: Connection, message: More) -> None:
        """The consumer of a stream has taken values."""
        incoming = self._calls.get((connection, message.id))
        if incoming is not None and incoming.outflow is not None:
            incoming.outflow.taken(message)

    def want(self, connection: Connection, message: Want) -> None:
        """A sender asks for room."""
        with self._lock:
            self.mailbox.want(connection, message.first, message.total, message.at_once)

    def cancel(self, connection: Connection, number: int, peer_failed: bool = False) -> None:
        """The caller has given up (CE-3), perhaps because another rank of the call has failed."""
        with self._lock:
            incoming = self._calls.get((connection, number))
            if incoming is None or incoming.token.cancelled:  # a second cancel would interrupt what tidies up
                return
            incoming.token.cancel()
            if not incoming.started:
                incoming.lane.queue.remove(incoming)
                self.mailbox.take(connection, incoming.cost)
                self._answer(incoming, pack_error(Stopped(NEVER_RAN)))
            elif incoming.task is not None:
                incoming.task.cancel()
            elif peer_failed and incoming.route.on_main:
                self._process.peer_failed(incoming.token)

    def caller_lost(self, connection: Connection) -> None:
        """Nobody waits for these calls any more."""
        with self._lock:
            for sender, number in list(self._calls):
                if sender is connection:
                    self.cancel(sender, number)
            self.mailbox.lost(connection)

    def _refuse(self, connection: Connection, call: Call, payload: Payload, error: PackedError) -> None:
        """A call that will not run."""
        with self._lock:
            self.mailbox.put(payload.nbytes + OVERHEAD)
            self.mailbox.take(connection, payload.nbytes + OVERHEAD)
            self._send_answer(connection, call, error, more=False)

    # Running

    def _drain(self, lane: Lane) -> None:
        """Start what may run; on the loop, and not under the lock: async calls run in here (CE-8)."""
        if lane.draining:
            return
        lane.draining = True
        end = 0.0
        while lane.queue and (incoming := self._next(lane)) is not None:
            self._start(incoming)
            if not end:
                end = incoming.since + TURN_SECONDS
            elif incoming.since > end:
                self._loop.call_soon(self._drain, lane)
                break
        lane.draining = False

    def _next(self, lane: Lane) -> Incoming | None:
        """Take the first call out of a lane that has room. None when there is none that this thread may start."""
        with self._lock:
            if lane.queue and len(lane.running) < lane.limit:
                if not lane.queue[0].route.on_main and threading.get_ident() != self._thread:
                    with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
                        self._loop.call_soon_threadsafe(self._drain, lane)
                    return None
                incoming = lane.queue.popleft()
                self.mailbox.take(incoming.connection, incoming.cost)
                lane.running.add(incoming)
                incoming.started = True
                incoming.since = time.monotonic()
                return incoming
        return None

    def _start(self, incoming: Incoming) -> None:
        route, variables = incoming.route, self._variables(incoming)
        if route.on_main:
            run = functools.partial(variables.run, self._execute, incoming)
            self._process.run_on_main(run, route.label, None)
        elif route.kind.streams:
            run_stream = self._run_stream(incoming, variables.copy())
            self._loop.create_task(run_stream, name=route.label, context=variables)
        else:
            done = functools.partial(self._finish_on_loop, incoming)
            self._runner.start(self._run_async(incoming), variables, route.label, done)

    def _variables(self, incoming: Incoming) -> contextvars.Context:
        """The context of a call."""
        call, variables = incoming.call, contextvars.Context()
        size = 1
        for extent in call.sizes:
            size *= extent
        chain = call.chain + incoming.route.chain
        place = self.place.of_call(self.key, call.endpoint, call.rank, size, chain, incoming.token)
        variables.run(set_context, place)
        return variables

    def _route(self, kind: EndpointType) -> Route:
        node = self.place.node
        alone = kind.alone_in(self.key)
        chain = (alone,) if alone else ()
        if not kind.is_async and node is not None:
            chain = (*chain, main_thread_of(node.address))
        lane = self._serial if kind.serial else Lane(kind.concurrency)
        return Route(kind, lane, f"{self.place.actor_name}.{kind.name}", chain)

    async def _run_async(self, incoming: Incoming) -> Outcome:
        incoming.task = asyncio.current_task(self._loop)
        outcome: Outcome
        try:
            if incoming.token.cancelled:
                raise Stopped(NEVER_RAN)
            outcome = self._encode_result(incoming, await self._begin(incoming))
            if incoming.connection.shares(outcome):
                if outcome.payload.nbytes >= COPY_IN_THREAD:
                    await asyncio.to_thread(outcome.block)
                else:
                    outcome.block()
        except BaseException as error:  # whatever user code raises is the answer (R3)
            outcome = self._outcome_of(incoming, error)
        incoming.token.finished = True
        return outcome

    async def _run_stream(self, incoming: Incoming, variables: contextvars.Context) -> None:
        """Run a generator. A sync one runs in the context `variables`, on the main thread (CE-6)."""
        call, kind, label = incoming.call, incoming.route.kind, incoming.route.label
        incoming.task = asyncio.current_task()
        incoming.outflow = outflow = Outflow(incoming.connection, call.id, call.window)
        begin = functools.partial(self._begin, incoming)
        encode = functools.partial(self._encode_result, incoming)
        outcome: Outcome = NOTHING
        try:
            if incoming.token.cancelled:
                raise Stopped(NEVER_RAN)
            if kind.is_async:
                await produce(begin(), outflow, encode)
            else:
                generator = MainThreadGenerator(
                    begin,
                    encode,
                    lambda job, done: self._process.run_on_main(functools.partial(variables.run, job), label, done),
                    incoming.token,
                )
                await generator.produce(outflow)
        except BaseException as error:  # whatever user code raises is the answer (R3)
            outcome = self._outcome_of(incoming, error)
        incoming.token.finished = True
        self._finish_on_loop(incoming, outcome)

    def _begin(self, incoming: Incoming) -> Any:
        """Call the endpoint."""
        kind = incoming.route.kind
        args, kwargs = kind.decode_arguments(self._release_payload(incoming))
        return getattr(self.instance, kind.name)(*args, **kwargs)

    def _outcome_of(self, incoming: Incoming, error: BaseException) -> PackedError:
        """The answer to a call whose endpoint raised."""
        if not isinstance(error, asyncio.CancelledError):
            return pack_error(error)
        return self._error or pack_error(error if incoming.token.cancelled else Stopped("the endpoint was cancelled"))

    def _execute(self, incoming: Incoming) -> Callable[[], None]:
        """Run a sync endpoint on the main thread (CE-5); the result answers."""
        incoming.executing = True
        outcome = self._run_sync(incoming)
        incoming.token.finished = True
        incoming.executing = False
        return functools.partial(self._finish_on_main, incoming, outcome)

    def _finish_on_main(self, incoming: Incoming, outcome: Outcome) -> None:
        self._finish(incoming, outcome)
        lane = incoming.lane
        while lane.queue and (following := self._next(lane)) is not None:
            self._start(following)

    def _run_sync(self, incoming: Incoming) -> Outcome:
        try:
            if incoming.token.cancelled:
                raise Stopped(NEVER_RAN)
            outcome = self._encode_result(incoming, self._begin(incoming))
            if incoming.connection.shares(outcome):
                outcome.block()
            return outcome
        except BaseException as error:  # whatever user code raises is the answer (R3)
            return pack_error(error)

    def _encode_result(self, incoming: Incoming, value: Any) -> Outgoing:
        """The result, or nothing for a broadcast."""
        value = value if incoming.call.reply else None
        return Outgoing(incoming.route.kind.encode_result(value), self._process.limit)

    def _release_payload(self, incoming: Incoming) -> Payload:
        """The payload, no longer held by the call: memory of arguments is free as soon as user code lets go."""
        payload = incoming.payload
        incoming.payload = None
        assert payload is not None
        return payload

    # Answers and credits

    def _finish(self, incoming: Incoming, outcome: Outcome) -> None:
        """Answer a call that has run."""
        lane = incoming.lane
        incoming.route.quick = time.monotonic() - incoming.since < QUICK_SECONDS
        with self._lock:
            lane.running.discard(incoming)
            self._answer(incoming, outcome, more=lane.continues_quickly())
            if not self._calls:
                self.mailbox.give_all()

    def _finish_on_loop(self, incoming: Incoming, outcome: Outcome) -> None:
        self._finish(incoming, outcome)
        if incoming.lane.queue and not incoming.lane.draining:
            self._loop.call_soon(self._drain, incoming.lane)

    def _answer(self, incoming: Incoming, outcome: Outcome, *, more: bool = False) -> None:
        """CE-2. `more`: as in `Connection.send`."""
        call, connection = incoming.call, incoming.connection
        if self._calls.pop((connection, call.id), None) is not None:
            self._send_answer(connection, call, outcome, more=more)

    def _send_answer(self, connection: Connection, call: Call, outcome: Outcome, *, more: bool) -> None:
        if not call.reply:
            if isinstance(outcome, PackedError) and outcome is not self._error:
                self._process.report(ActorFailed(self.key, call.endpoint, outcome, False))
        elif isinstance(outcome, PackedError):
            connection.send(Fault(call.id, outcome, self.mailbox.owed(connection)), more=more)
        else:
            connection.send(Reply(call.id, self.mailbox.owed(connection)), outcome, more=more)

    def state(self) -> ActorState:
        """What runs and what waits."""
        lanes = []
        with self._lock:
            for name, lane in self._named_lanes():
                if lane.queue or lane.running:
                    heads = [_work(incoming) for incoming in itertools.islice(lane.queue, HEADS)]
                    running = [_work(incoming) for incoming in lane.running]
                    lanes.append(LaneState(name, lane.limit, running, len(lane.queue), heads))
        return ActorState(self.key, self.place.actor_name, self.place.rank, self.mailbox.nbytes, lanes)

    def _named_lanes(self) -> list[tuple[str, Lane]]:
        own = [(name, route.lane) for name, route in self._routes.items() if route.lane is not self._serial]
        return [(SERIAL, self._serial), *own]

    # The end

    def _on_task_error(self, error: BaseException, task: str) -> None:
        self._fail(pack_error(error), f"task {task!r}")

    def _fail(self, error: PackedError, place: str) -> None:
        """CE-4."""
        if self._error is not None:
            return
        self._process.report(ActorFailed(self.key, place, error, True))
        self._end_calls(error)

    def _end_calls(self, error: PackedError) -> None:
        with self._lock:
            self._error = error
            for incoming in list(self._calls.values()):
                if not incoming.started:
                    incoming.lane.queue.remove(incoming)
                    self.mailbox.take(incoming.connection, incoming.cost)
                    self._answer(incoming, error)
                elif incoming.task is not None:
                    incoming.task.cancel()
                else:
                    # A sync endpoint can't be interrupted: its caller need not wait for it.
                    incoming.token.cancel()
                    self._answer(incoming, error)

    def abandon(self) -> None:
        """The process around it is gone, though its code may still run (`testing.py`): cancel what can be."""
        for incoming in list(self._calls.values()):
            incoming.token.cancel()
            if incoming.task is not None:
                incoming.task.cancel()
        self.tasks.cancel()

    async def stop(self, grace: float) -> None:
        """End all calls with Stopped, cancel the tasks of the actor, run `__cleanup__` for at most `grace` seconds."""
        failure = self._error
        self._end_calls(failure or pack_error(Stopped(f"{self.place.actor_name} was stopped")))
        with self._lock:
            self.mailbox.close()
        running = [i.task for i in list(self._calls.values()) if i.task is not None]
        try:
            async with asyncio.timeout(grace):
                if running:
                    await asyncio.wait(running)
                await self.tasks.close()
                if self.constructed:
                    await clean_up(self.instance, self.place, failure, self._process.run_on_main)
        except TimeoutError:
            print(f"{self.place.actor_name}: clean-up did not end within {grace} s", flush=True)  # noqa: T201


def _work(incoming: Incoming) -> Work:
    waits_for_main = incoming.started and incoming.route.on_main and not incoming.executing
    return Work(incoming.call.endpoint, time.monotonic() - incoming.since, waits_for_main, incoming.executing)
