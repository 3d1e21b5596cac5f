"""Values that arrive one after another: generator endpoints, and the results of many ranks by arrival.

    generator -> [room?] -> Item --> arrived --> `async for` of the caller
                    ^-------- More (taken) <--------'

ST-1: the values of one rank arrive in the order produced; over several ranks by arrival, each with its coordinates.
ST-2: the generator runs ahead of its consumer by at most `window` values and about `WINDOW_BYTES` bytes: it is not
      advanced while so many are on the way or not taken yet.
ST-3: an error surfaces after the values that came before it. The other ranks are then cancelled.
ST-4: leaving the loop early, a deadline, a cancelled await or the death of the caller closes the generator where it
      runs: its `finally` blocks run, an async one that waits gets CancelledError.
ST-5: nothing is sent before the first value is asked for; arguments are checked where the stream is made.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from runtime.actor import CancelToken
from runtime.codec import Payload
from runtime.errors import DeadlineExceeded
from runtime.frames import COPY_IN_THREAD, Outgoing
from runtime.messages import Item, More
from runtime.posting import Pending
from runtime.wire import Connection

T = TypeVar("T")

WINDOW = 64
"""Values of one stream that may be on the way or wait to be taken."""
WINDOW_BYTES = 8 * 2**20
"""Bytes of those values; one value may go beyond it."""
SLICE_SECONDS = 0.005
"""For so long a sync generator may hold the main thread, then it lets others in at its next value."""


class Outflow:
    """The sending side of a stream: what its consumer has not taken yet (ST-2)."""

    __slots__ = ("_connection", "_free", "_id", "_items", "_nbytes", "_window")

    def __init__(self, connection: Connection, number: int, window: int) -> None:
        self._connection = connection
        self._id = number
        self._window = window
        self._items = 0
        self._nbytes = 0
        self._free = asyncio.Event()
        self._free.set()

    async def room(self) -> int:
        """Wait until the next value may be made; how many may."""
        await self._free.wait()
        return self._window - self._items

    def shares(self, outgoing: Outgoing) -> bool:
        """Whether it goes through shared memory, so that the block may be filled in another thread."""
        return self._connection.shares(outgoing)

    def send(self, outgoing: Outgoing) -> None:
        self._items += 1
        self._nbytes += outgoing.payload.nbytes
        if self._items >= self._window or self._nbytes >= WINDOW_BYTES:
            self._free.clear()
        self._connection.send(Item(self._id), outgoing)

    def taken(self, message: More) -> None:
        self._items -= message.items
        self._nbytes -= message.nbytes
        if self._items < self._window and self._nbytes < WINDOW_BYTES:
            self._free.set()


async def produce(values: AsyncGenerator[Any, None], outflow: Outflow, encode: Callable[[Any], Outgoing]) -> None:
    """Send what a generator yields; it is closed in any case (ST-4). Raises what the generator raises."""
    try:
        while True:
            await outflow.room()
            try:
                value = await anext(values)
            except StopAsyncIteration:
                return
            outgoing = encode(value)
            del value
            if outflow.shares(outgoing) and outgoing.payload.nbytes >= COPY_IN_THREAD:
                await asyncio.to_thread(outgoing.block)
            outflow.send(outgoing)
            del outgoing
    finally:
        await values.aclose()


class MainThreadGenerator:
    """A sync generator, advanced on the main thread by one job after another. Between two jobs other endpoints run."""

    def __init__(
        self,
        begin: Callable[[], Generator[Any, None, None]],
        encode: Callable[[Any], Outgoing],
        run_on_main: Callable[[Callable[[], Any], Callable[[Any], None]], None],
        token: CancelToken,
    ) -> None:
        self._begin = begin
        self._encode = encode
        self._run_on_main = run_on_main
        self._token = token
        self._values: Generator[Any, None, None] | None = None
        self._loop = asyncio.get_running_loop()

    async def produce(self, outflow: Outflow) -> None:
        """As the function `produce`."""
        try:
            ended = False
            while not ended:
                count = await outflow.room()
                ended = await self._job(functools.partial(self._advance, count, outflow))
        finally:
            await self._job(self._close)

    async def _job(self, job: Callable[[], bool]) -> bool:
        """Run a job to its end, also when this task is cancelled meanwhile."""
        future: asyncio.Future[bool] = self._loop.create_future()

        def run() -> tuple[bool, BaseException | None]:
            try:
                return job(), None
            except BaseException as error:  # belongs to whoever awaits the job
                return True, error

        def done(result: tuple[bool, BaseException | None]) -> None:
            ended, error = result
            if error is None:
                future.set_result(ended)
            else:
                future.set_exception(error)

        self._run_on_main(run, done)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    def _advance(self, count: int, outflow: Outflow) -> bool:
        """Make up to `count` values; True at the end. On the main thread."""
        if self._values is None:
            self._values = self._begin()
        end = time.monotonic() + SLICE_SECONDS
        nbytes = 0
        for _ in range(count):
            if self._token.cancelled:
                return True
            try:
                value = next(self._values)
            except StopIteration:
                return True
            outgoing = self._encode(value)
            if outflow.shares(outgoing):
                outgoing.block()
            nbytes += outgoing.payload.nbytes
            self._loop.call_soon_threadsafe(outflow.send, outgoing)
            if time.monotonic() >= end or nbytes >= WINDOW_BYTES // 4:
                break
        return False

    def _close(self) -> bool:
        if self._values is not None:
            self._values.close()
        return True


class _Arrivals:
    """What has arrived for a stream. Calls hold it, and the stream holds it, but it doesn't hold the stream: a stream
    that nobody holds any more must go."""

    def __init__(self) -> None:
        self.events: deque[tuple[int, Payload | None]] = deque()
        """(position of the call, value of its stream or None for its end)."""
        self.calls: list[Pending] = []
        self.waiter: asyncio.Future[None] | None = None
        self.stopped = False
        self.expired = False

    def put(self, position: int, payload: Payload | None) -> None:
        if not self.stopped:
            self.events.append((position, payload))
            self._wake()

    def put_end(self, position: int, _: asyncio.Future[Any]) -> None:
        self.put(position, None)

    def stop(self) -> None:
        """Cancel the calls that have not ended (ST-4)."""
        if self.stopped:
            return
        self.stopped = True
        for call in self.calls:
            call.abandon()
            if not call.future.cancelled():
                call.future.exception()  # that of a second rank is nobody's; asking for it keeps asyncio quiet
        self._wake()

    def expire(self) -> None:
        """The deadline."""
        self.expired = True
        self.stop()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Stream(Generic[T]):
    """An asynchronous iterator over what arrives. Also an async context manager, which closes it at the end of the
    block; without one, it is closed when the loop is left and nobody else holds it.

    Raises as `call`, where the next value is awaited.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Callable[[int, Payload], None]], Coroutine[Any, Any, list[Pending]]],
        view: Callable[[int, Any], T],
        *,
        timeout: float | None,
        window: int,
    ) -> None:
        """
        Args:
            name: mesh and endpoint, for messages.
            start: sends the calls; they pass the values of streams to its argument, with the position of the call.
            view: what the consumer gets, made of the position of a call and a value.
            timeout: seconds for all of it.
            window: as in `Call`; 0 when the endpoint returns one value rather than yield many.
        """
        self._arrivals = _Arrivals()
        self._closed = False
        self._started = False
        self._name = name
        self._start = start
        self._view = view
        self._timeout = timeout
        self._window = window
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = 0
        self._taken: dict[int, tuple[int, int]] = {}
        """(values, bytes) that were taken and not told to the producer yet, by position of the call."""
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<stream of {self._name}>"

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        if self._arrivals.waiter is not None:
            raise RuntimeError(f"{self._name}: another task waits for the next value of this stream")
        try:
            if not self._started:
                await self._begin()
            return await self._next()
        except BaseException:  # its end included
            self._close()
            raise

    async def aclose(self) -> None:
        """Stop the producers; the stream ends here. Closing twice does nothing."""
        self._close()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        if self._started and not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrivals.stop)  # the collector may run in any thread

    # Parts

    async def _begin(self) -> None:
        arrivals = self._arrivals
        self._started = True
        try:
            async with asyncio.timeout(self._timeout) as limit:
                arrivals.calls = await self._start(arrivals.put)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded(
                    f"{self._name}: deadline of {self._timeout} s has passed while it waited for room in a mailbox"
                ) from None
            raise
        when = limit.when()
        if when is not None:
            self._deadline = self._loop.call_at(when, arrivals.expire)
        for position, call in enumerate(arrivals.calls):
            call.future.add_done_callback(functools.partial(arrivals.put_end, position))

    async def _next(self) -> T:
        arrivals = self._arrivals
        while True:
            if arrivals.events:
                position, payload = arrivals.events.popleft()
                if payload is not None:
                    return self._view(position, self._take(position, payload))
                result = arrivals.calls[position].future.result()
                self._ended += 1
                if not self._window:
                    return self._view(position, result)
            elif arrivals.expired:
                raise self._late()
            elif arrivals.stopped or self._ended == len(arrivals.calls):
                raise StopAsyncIteration
            else:
                arrivals.waiter = self._loop.create_future()
                try:
                    await arrivals.waiter
                finally:
                    arrivals.waiter = None

    def _take(self, position: int, payload: Payload) -> Any:
        """Decode a value. The producer is told of several at once: it never waits for those that are held back."""
        call = self._arrivals.calls[position]
        value = call.endpoint.decode_result(payload)
        items, nbytes = self._taken.get(position, (0, 0))
        items, nbytes = items + 1, nbytes + payload.nbytes
        if items >= self._window // 2 or nbytes >= WINDOW_BYTES // 4:
            call.peer.connection.send(More(call.id, call.ref.key, items, nbytes))
            items = nbytes = 0
        self._taken[position] = (items, nbytes)
        return value

    def _late(self) -> DeadlineExceeded:
        late = [str(call.ref.rank) for call in self._arrivals.calls if call.future.cancelled()]
        return DeadlineExceeded(
            f"{self._name}: deadline of {self._timeout} s has passed; rank {', '.join(late)} had not ended and was "
            "told to stop"
        )

    def _close(self) -> None:
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._arrivals.stop()
