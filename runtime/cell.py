"""One actor inside its process: its lanes, what runs, what waits.

    message -> lane queue -> running -> answer, or items and then the answer
               (credit goes back when a message leaves the queue)

CE-1: a lane runs at most its limit at once and starts messages in the order of arrival (AC-2).
CE-2: every call is answered exactly once, whatever ends it: result, error, cancel, failure of the actor, stop.
CE-3: a cancelled message that still waits never runs; a running async endpoint gets CancelledError; a sync one runs to
      its end and its result is dropped.
CE-4: once a background task of the actor has failed, running and waiting calls end with its error, and later ones too.
CE-5: arguments are decoded and results encoded on the thread that runs the endpoint, right before and after it.
CE-6: a sync generator holds the main thread while it computes values, not while it waits for its consumer.

Assumed: all methods but `_execute` run on the thread of the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from runtime.actor import Actor, CancelToken, Context, set_context
from runtime.codec import Payload
from runtime.errors import PackedError, Stopped, pack_error
from runtime.frames import COPY_IN_THREAD, Outgoing
from runtime.interface import EndpointType, Interface
from runtime.lanes import Incoming, Lane
from runtime.mailbox import Mailbox
from runtime.messages import ActorFailed, Call, Fault, More, Reply, Want
from runtime.posting import main_thread_of
from runtime.streams import MainThreadGenerator, Outflow, produce
from runtime.tasks import TaskGroup
from runtime.waits import HEADS, SERIAL, ActorState, LaneState, Work
from runtime.wire import Connection

Outcome = Outgoing | PackedError
NOTHING = Outgoing(Payload(b""), 0)
"""The end of a stream."""


class Process(Protocol):
    """What a cell needs from the process around it."""

    limit: int

    def run_on_main(self, job: Callable[[], Any], label: str, done: Callable[[Any], None]) -> None:
        """Run the job on the main thread, in the order asked; `done(result)` on the loop."""

    def peer_failed(self, token: CancelToken) -> None:
        """The endpoint of this token may wait for a rank that has failed: see to it that it ends."""

    def report(self, failure: ActorFailed) -> None:
        """Tell the controller of an error that no caller waits for."""


class Cell:
    """An actor and its calls."""

    def __init__(self, process: Process, key: str, instance: Any, interface: Interface, place: Context) -> None:
        self.key = key
        self.instance = instance
        self.place = place
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._interface = interface
        self._serial = Lane(1)
        self._lanes = {
            name: self._serial if kind.serial else Lane(kind.concurrency) for name, kind in interface.endpoints.items()
        }
        self._calls: dict[tuple[Connection, int], Incoming] = {}
        self.mailbox = Mailbox(key)
        self._error: PackedError | None = None
        clean = contextvars.Context()
        clean.run(set_context, place)
        self.tasks = TaskGroup(place.actor_name, on_error=self._on_task_error, context=clean)
        self.tasks.open()
        if isinstance(instance, Actor):
            instance._actor_tasks = self.tasks

    # From the wire

    def deliver(self, connection: Connection, call: Call, payload: Payload) -> None:
        """A call has arrived."""
        lane = self._lanes.get(call.endpoint, self._serial)
        incoming = Incoming(connection, call, payload, lane)
        self._calls[connection, call.id] = incoming
        self.mailbox.put(incoming.cost)
        lane.queue.append(incoming)
        self._pump(lane)

    def more(self, connection: Connection, message: More) -> None:
        """The consumer of a stream has taken values."""
        incoming = self._calls.get((connection, message.id))
        if incoming is not None and incoming.outflow is not None:
            incoming.outflow.taken(message)

    def want(self, connection: Connection, message: Want) -> None:
        """A sender asks for room."""
        self.mailbox.want(connection, message.first, message.total, message.at_once)

    def cancel(self, connection: Connection, number: int, peer_failed: bool = False) -> None:
        """The caller has given up (CE-3), perhaps because another rank of the call has failed."""
        incoming = self._calls.get((connection, number))
        if incoming is None:
            return
        incoming.token.cancel()
        if not incoming.started:
            incoming.lane.queue.remove(incoming)
            self.mailbox.take(connection, incoming.cost)
            self._answer(incoming, pack_error(Stopped("cancelled before it ran")))
        elif incoming.task is not None:
            incoming.task.cancel()
        elif peer_failed:
            self._process.peer_failed(incoming.token)

    def caller_lost(self, connection: Connection) -> None:
        """Nobody waits for these calls any more."""
        for sender, number in list(self._calls):
            if sender is connection:
                self.cancel(sender, number)
        self.mailbox.lost(connection)

    # Running

    def _pump(self, lane: Lane) -> None:
        while lane.queue and len(lane.running) < lane.limit:
            incoming = lane.queue.popleft()
            self.mailbox.take(incoming.connection, incoming.cost)
            if self._error is not None:
                self._answer(incoming, self._error)
                continue
            kind = self._interface.endpoints.get(incoming.call.endpoint)
            if kind is None:
                text = f"{self.place.actor_name} has no endpoint {incoming.call.endpoint!r}"
                self._answer(incoming, pack_error(AttributeError(text)))
                continue
            lane.running.add(incoming)
            incoming.started = True
            incoming.since = time.monotonic()
            self._start(incoming, kind)

    def _start(self, incoming: Incoming, kind: EndpointType) -> None:
        name = f"{self.place.actor_name}.{kind.name}"
        variables = contextvars.Context()
        variables.run(set_context, self._context(incoming, kind))
        if kind.streams:
            run = self._run_stream(incoming, kind, variables.copy(), name)
            incoming.task = self._loop.create_task(run, name=name, context=variables)
        elif kind.is_async:
            incoming.task = self._loop.create_task(self._run_async(incoming, kind), name=name, context=variables)
        else:
            self._process.run_on_main(
                functools.partial(variables.run, self._execute, incoming, kind),
                name,
                functools.partial(self._finish, incoming),
            )

    def _context(self, incoming: Incoming, kind: EndpointType) -> Context:
        call, place = incoming.call, self.place
        size = 1
        for extent in call.sizes:
            size *= extent
        return Context(
            rank=place.rank,
            size=place.size,
            proc_name=place.proc_name,
            actor_name=place.actor_name,
            host=place.host,
            endpoint=kind.name,
            message_rank=call.rank,
            message_size=size,
            chain=self._chain(call.chain, kind),
            token=incoming.token,
            node=place.node,
            actor_key=self.key,
        )

    def _chain(self, chain: tuple[str, ...], kind: EndpointType) -> tuple[str, ...]:
        """What waits for the calls that this endpoint makes: its actor, and the main thread of the process."""
        if kind.serial:
            chain = (*chain, self.key)
        return chain if kind.is_async or self.place.node is None else (*chain, main_thread_of(self.place.node.address))

    async def _run_async(self, incoming: Incoming, kind: EndpointType) -> None:
        outcome: Outcome
        try:
            outcome = self._encode_result(incoming, kind, await self._begin(incoming, kind))
            if incoming.connection.shares(outcome):
                if outcome.payload.nbytes >= COPY_IN_THREAD:
                    await asyncio.to_thread(outcome.block)
                else:
                    outcome.block()
        except BaseException as error:  # whatever user code raises is the answer (R3)
            outcome = self._outcome_of(incoming, error)
        incoming.token.finished = True
        self._finish(incoming, outcome)

    async def _run_stream(
        self, incoming: Incoming, kind: EndpointType, variables: contextvars.Context, name: str
    ) -> None:
        """Run a generator. A sync one runs in the context `variables`, on the main thread (CE-6)."""
        call = incoming.call
        incoming.outflow = outflow = Outflow(incoming.connection, call.id, call.window)
        outcome: Outcome = NOTHING
        try:
            if kind.is_async:
                encode = functools.partial(self._encode_result, incoming, kind)
                await produce(self._begin(incoming, kind), outflow, encode)
            else:
                generator = MainThreadGenerator(
                    functools.partial(self._begin, incoming, kind),
                    functools.partial(self._encode_result, incoming, kind),
                    lambda job, done: self._process.run_on_main(functools.partial(variables.run, job), name, done),
                    incoming.token,
                )
                await generator.produce(outflow)
        except BaseException as error:  # whatever user code raises is the answer (R3)
            outcome = self._outcome_of(incoming, error)
        incoming.token.finished = True
        self._finish(incoming, outcome)

    def _begin(self, incoming: Incoming, kind: EndpointType) -> Any:
        """Call the endpoint."""
        args, kwargs = kind.decode_arguments(self._release_payload(incoming))
        return getattr(self.instance, kind.name)(*args, **kwargs)

    def _outcome_of(self, incoming: Incoming, error: BaseException) -> PackedError:
        """The answer to a call whose endpoint raised."""
        if not isinstance(error, asyncio.CancelledError):
            return pack_error(error)
        return self._error or pack_error(error if incoming.token.cancelled else Stopped("the endpoint was cancelled"))

    def _execute(self, incoming: Incoming, kind: EndpointType) -> Outcome:
        """Run a sync endpoint; on the main thread (CE-5)."""
        if incoming.token.cancelled:
            return pack_error(Stopped("cancelled before it ran"))
        incoming.executing = True
        try:
            outcome = self._encode_result(incoming, kind, self._begin(incoming, kind))
            if incoming.connection.shares(outcome):
                outcome.block()
            return outcome
        except BaseException as error:  # whatever user code raises is the answer (R3)
            return pack_error(error)
        finally:
            incoming.token.finished = True
            incoming.executing = False

    def _encode_result(self, incoming: Incoming, kind: EndpointType, value: Any) -> Outgoing:
        """The result, or nothing for a broadcast."""
        return Outgoing(kind.encode_result(value if incoming.call.reply else None), self._process.limit)

    def _release_payload(self, incoming: Incoming) -> Payload:
        """The payload, no longer held by the call: memory of arguments is free as soon as user code lets go."""
        payload = incoming.payload
        incoming.payload = None
        assert payload is not None
        return payload

    # Answers and credits

    def _finish(self, incoming: Incoming, outcome: Outcome) -> None:
        incoming.lane.running.discard(incoming)
        self._answer(incoming, outcome)
        self._pump(incoming.lane)
        if not self._calls:
            self.mailbox.give_all()

    def _answer(self, incoming: Incoming, outcome: Outcome) -> None:
        call, connection = incoming.call, incoming.connection
        if self._calls.pop((connection, call.id), None) is None:
            return
        if not call.reply:
            if isinstance(outcome, PackedError) and outcome is not self._error:
                self._process.report(ActorFailed(self.key, call.endpoint, outcome, False))
            return
        if isinstance(outcome, PackedError):
            connection.send(Fault(call.id, outcome, self.mailbox.owed(connection)))
        else:
            connection.send(Reply(call.id, self.mailbox.owed(connection)), outcome)

    def state(self) -> ActorState:
        """What runs and what waits."""
        lanes = []
        for name, lane in self._named_lanes():
            if lane.queue or lane.running:
                heads = [self._work(incoming) for incoming in itertools.islice(lane.queue, HEADS)]
                running = [self._work(incoming) for incoming in list(lane.running)]
                lanes.append(LaneState(name, lane.limit, running, len(lane.queue), heads))
        return ActorState(self.key, self.place.actor_name, self.place.rank, self.mailbox.nbytes, lanes)

    def _named_lanes(self) -> list[tuple[str, Lane]]:
        own = [(name, lane) for name, lane in self._lanes.items() if lane is not self._serial]
        return [(SERIAL, self._serial), *own]

    def _work(self, incoming: Incoming) -> Work:
        kind = self._interface.endpoints.get(incoming.call.endpoint)
        is_sync = kind is not None and not kind.is_async and not kind.streams and incoming.started
        seconds = time.monotonic() - incoming.since
        return Work(incoming.call.endpoint, seconds, is_sync and not incoming.executing, is_sync and incoming.executing)

    # The end

    def _on_task_error(self, error: BaseException, task: str) -> None:
        self._fail(pack_error(error), f"task {task!r}")

    def _fail(self, error: PackedError, place: str) -> None:
        """CE-4."""
        if self._error is not None:
            return
        self._error = error
        self._process.report(ActorFailed(self.key, place, error, True))
        self._end_calls(error)

    def _end_calls(self, error: PackedError) -> None:
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
        self._error = self._error or pack_error(Stopped(f"{self.place.actor_name} was stopped"))
        self._end_calls(self._error)
        running = [i.task for i in self._calls.values() if i.task is not None]
        try:
            async with asyncio.timeout(grace):
                if running:
                    await asyncio.wait(running)
                await self.tasks.close()
                await self._clean_up(failure)
        except TimeoutError:
            print(f"{self.place.actor_name}: clean-up did not end within {grace} s", flush=True)  # noqa: T201

    async def _clean_up(self, failure: PackedError | None) -> None:
        hook = getattr(self.instance, "__cleanup__", None)
        if hook is None:
            return
        error = None if failure is None else RuntimeError(f"{failure.exception_type}: {failure.text}")
        if inspect.iscoroutinefunction(hook):
            await hook(error)
            return
        done: asyncio.Future[None] = self._loop.create_future()
        self._process.run_on_main(
            lambda: hook(error), f"{self.place.actor_name}.__cleanup__", lambda _: done.set_result(None)
        )
        await done
