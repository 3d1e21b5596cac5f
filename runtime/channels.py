"""Channels: a port that can be sent anywhere, and the receiver that stays where it was opened.

    port, receiver = Channel.open(int)
    await mesh.work.broadcast(port)           # any process of the job may send through the port
    async for value in receiver: ...

CH-1: the values of one sender arrive in the order sent; nothing is promised across senders.
CH-2: a port is bounded as a mailbox is (MB-1): while its receiver is slow, `send` waits.
CH-3: `close` and `exception` come after what was sent before them.
CH-4: sending to a receiver that has closed, or whose process is gone, raises. A sender learns of it with the first
      message that it sends in vain, so that one may be lost.
CH-5: a value is checked against the type of the channel by the sender and decoded straight into it.

Assumed: a receiver is used on the loop of its process. It does not know who holds its port, so a sender that dies
silently doesn't end it: give `recv` a timeout, or let an endpoint stream instead (`streams.py`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from runtime import codec, records
from runtime.actor import SERIAL, context
from runtime.codec import Payload
from runtime.errors import DeadlineExceeded, PackedError, Stopped, pack_error, unpack_error
from runtime.frames import Outgoing
from runtime.interface import EndpointType
from runtime.mailbox import OVERHEAD, Mailbox
from runtime.messages import Call, More, Want
from runtime.node import Node, current_node, node_for
from runtime.posting import ActorRef, Posting
from runtime.shape import Shape
from runtime.wire import Connection

T = TypeVar("T")

_ONE = Shape({})
_VALUE = inspect.Signature([inspect.Parameter("value", inspect.Parameter.POSITIONAL_ONLY)])


@functools.lru_cache(maxsize=256)
def _message(name: str, kind: Any) -> EndpointType:
    """What travels through a port, as an endpoint with one argument."""
    kind = kind if kind is Any or codec.supported(kind) else Any
    return EndpointType(name, SERIAL, True, False, _VALUE, {"value": kind, "return": None})


class Channel:
    """Opens channels."""

    @staticmethod
    def open(kind: Any = Any, *, once: bool = False, name: str = "port") -> tuple[Port[Any], PortReceiver[Any]]:
        """A port and its receiver, in this process.

        Args:
            kind: type of the values; `Any` sends them as they are.
            once: the channel ends by itself after one value or exception; the receiver can then be awaited.
            name: what messages call it.

        Raises:
            Stopped: no host runs in this process.
        """
        node = current_node()
        ref = ActorRef(node.address, node.unique(name), name, 0, context().host)
        receiver: PortReceiver[Any] = PortReceiver(node, ref, kind, once)
        node.serving.add(ref.key, receiver)
        return Port(ref, kind, once), receiver


class Port(Generic[T]):
    """The sending end. It can be an argument or a result, kept, and used by any number of processes."""

    def __init__(self, ref: ActorRef, kind: Any, once: bool) -> None:
        self.ref = ref
        self.kind = kind
        self.once = once

    def __repr__(self) -> str:
        return f"<Port {self.ref.mesh} to {self.ref.host}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Port) and self.ref == other.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    async def send(self, value: T) -> None:
        """Send a value; waits while the port is full (CH-2).

        Raises:
            TypeError: the value is not of the channel's type, or can't be sent.
            Oversize: it is larger than the limit of a message.
            Stopped: the receiver has closed (CH-4).
            ProcessDied, ConnectionRefused: its process is gone.
        """
        await self._post("send", self.kind, value)

    async def exception(self, error: Exception) -> None:
        """Let the receiver raise this error where it waits. Raises as `send`."""
        await self._post("exception", PackedError, pack_error(error))

    async def close(self) -> None:
        """No value comes any more: the receiver ends after those that were sent before (CH-3). Closing twice does
        nothing."""
        try:
            await self._post("close", Any, None)
        except Stopped:
            return

    async def _post(self, name: str, kind: Any, value: Any) -> None:
        node = node_for(self.ref.address)
        message = _message(name, kind)
        try:
            outgoing = Outgoing(message.encode_arguments((value,), {}), node.limit)
        except (TypeError, ValueError) as error:
            error.args = (f"{self.ref.mesh}.{error.args[0] if error.args else ''}", *error.args[1:])
            raise
        await node.post([(self.ref, outgoing)], Posting(message, _ONE, reply=False))


class PortReceiver(Generic[T]):
    """The receiving end. Iterate over it, or call `recv`; leaving its `async with` block closes it."""

    def __init__(self, node: Node, ref: ActorRef, kind: Any, once: bool) -> None:
        self._node = node
        self._ref = ref
        self._kind = kind
        self._once = once
        self._mailbox = Mailbox(ref.key)
        self._queue: deque[tuple[Connection, str, Payload]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended = False
        """Nothing is accepted any more; what came before can still be received."""

    def __repr__(self) -> str:
        return f"<PortReceiver {self._ref.mesh}: {len(self._queue)} waiting>"

    def __reduce__(self) -> Any:
        raise TypeError(f"the receiver of {self._ref.mesh} stays in its process. Send the port")

    async def recv(self, timeout: float | None = None) -> T:
        """The next value.

        Args:
            timeout: seconds to wait for it.

        Raises:
            what a sender gave to `exception`; also an instance of ActorError.
            Stopped: the channel has ended.
            DeadlineExceeded: nothing came in time. The channel stays open.
        """
        try:
            async with asyncio.timeout(timeout) as limit:
                while not self._queue and not self._ended:
                    await self._arrival()
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded(f"{self._ref.mesh}: no value came within {timeout} s") from None
            raise
        if not self._queue:
            raise Stopped(f"{self._ref.mesh}: the channel is closed")
        return self._take(*self._queue.popleft())

    def __await__(self) -> Any:
        return self.recv().__await__()

    def __aiter__(self) -> PortReceiver[T]:
        return self

    async def __anext__(self) -> T:
        while not self._queue and not self._ended:
            await self._arrival()
        if not self._queue:
            raise StopAsyncIteration
        return self._take(*self._queue.popleft())

    def close(self) -> None:
        """Drop what has not been received, and let senders know. Closing twice does nothing."""
        self._end()
        while self._queue:
            connection, _, payload = self._queue.popleft()
            self._mailbox.take(connection, payload.nbytes + OVERHEAD)
        self._mailbox.give_all()

    async def __aenter__(self) -> PortReceiver[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # What the process calls (`serving.Served`)

    def deliver(self, connection: Connection, call: Call, payload: Payload) -> None:
        """A value, an exception or the end has arrived."""
        self._mailbox.put(payload.nbytes + OVERHEAD)
        if call.endpoint == "close":
            self._mailbox.take(connection, payload.nbytes + OVERHEAD)
            self._end()
            return
        self._queue.append((connection, call.endpoint, payload))
        if self._once:
            self._end()
        self._wake()

    def want(self, connection: Connection, message: Want) -> None:
        """A sender asks for room."""
        self._mailbox.want(connection, message.first, message.total, message.at_once)

    def caller_lost(self, connection: Connection) -> None:
        """A sender is gone; what it sent stays."""
        self._mailbox.lost(connection)

    def cancel(self, connection: Connection, number: int, peer_failed: bool = False) -> None:
        """Nothing waits for an answer of a port."""

    def more(self, connection: Connection, message: More) -> None:
        """A port has no streams."""

    # Parts

    def _take(self, connection: Connection, name: str, payload: Payload) -> T:
        self._mailbox.take(connection, payload.nbytes + OVERHEAD)
        if not self._queue:
            self._mailbox.give_all()
        if name == "exception":
            (packed,), _ = _message(name, PackedError).decode_arguments(payload)
            raise unpack_error(packed, self._ref.mesh, None, "", "")
        (value,), _ = _message(name, self._kind).decode_arguments(payload)
        return value  # type: ignore[no-any-return]

    def _end(self) -> None:
        self._ended = True
        self._node.serving.remove(self._ref.key)
        self._mailbox.close()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _wake(self) -> None:
        """Wake the task that has waited longest."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
                return

    async def _arrival(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self._wake()  # what came for this task is for the next one
            raise
        finally:
            self._waiting.remove(future)


def _port_from_parts(ref: dict[str, Any], kind: Any, once: bool) -> Port[Any]:
    return Port(ActorRef(**ref), kind, once)


def _parts_of(port: Port[Any]) -> tuple[Any, ...]:
    kind = port.kind if isinstance(port.kind, type) else Any
    return msgspec.structs.asdict(port.ref), None if kind is Any else kind, port.once


records.register_handle(
    Port, _parts_of, lambda ref, kind, once: _port_from_parts(ref, Any if kind is None else kind, once)
)
