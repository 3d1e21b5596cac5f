"""What a process serves: its actors and ports by key, and the messages that reach them.

SE-1: a call to a key that isn't served (any more) is answered with `Stopped`; its sender gets its room back. One that
      wants no answer is dropped, and the next one raises `Stopped` at the sender.
SE-2: when a caller is gone, everything that it asked for is cancelled.
SE-3: an actor gets its first message after its constructor has returned. In a process that was started again, what
      comes for it before that waits for it, in order. What still waits when all of them are made (`all_made`) is for
      none of them: SE-1.
"""

from __future__ import annotations

from typing import Any, Protocol

from runtime.codec import Payload
from runtime.errors import Stopped, pack_error
from runtime.mailbox import OVERHEAD
from runtime.messages import Call, Cancel, Credit, Fault, Gone, Grant, More, Want
from runtime.wire import Connection


class Served(Protocol):
    """An actor or a port, as its process sees it."""

    def deliver(self, connection: Connection, call: Call, payload: Payload) -> None:
        """A call has arrived."""

    def cancel(self, connection: Connection, number: int, peer_failed: bool = False) -> None:
        """Nobody waits for this call any more, perhaps because another rank of it has failed."""

    def more(self, connection: Connection, message: More) -> None:
        """Values of a stream have been taken."""

    def want(self, connection: Connection, message: Want) -> None:
        """A sender asks for room in the mailbox."""

    def caller_lost(self, connection: Connection) -> None:
        """A sender is gone."""


class Serving:
    """The actors and ports of one process."""

    def __init__(self) -> None:
        self.by_key: dict[str, Served] = {}
        """Change it by `add` and `remove`."""
        self._making = False
        self._held: dict[str, list[tuple[Connection, Any, Payload]]] = {}
        """By key, while actors are being made. The rooms of the senders bound it (R7)."""

    def hold(self) -> None:
        """Actors are being made again (SE-3)."""
        self._making = True

    def add(self, key: str, served: Served) -> None:
        """From now on it gets its messages."""
        self.by_key[key] = served
        for message in self._held.pop(key, ()):
            self.take(*message)

    def remove(self, key: str) -> None:
        """Calls to it are refused from now on (SE-1)."""
        self.by_key.pop(key, None)

    def all_made(self) -> None:
        """Whatever isn't served now won't be."""
        self._making = False
        for key in list(self._held):
            for message in self._held.pop(key):
                self.take(*message)

    def take(self, connection: Connection, message: Any, payload: Payload) -> bool:
        """Pass a message on; False when it isn't for an actor or port."""
        kind = type(message)
        if kind not in _FOR_THE_SERVED:
            return False
        served = self.by_key.get(message.actor)
        if served is None and self._making:
            self._held.setdefault(message.actor, []).append((connection, message, payload))
        elif served is None:
            _refuse(connection, message, payload)
        elif kind is Call:
            served.deliver(connection, message, payload)
        elif kind is Cancel:
            served.cancel(connection, message.id, message.peer_failed)
        elif kind is More:
            served.more(connection, message)
        else:
            served.want(connection, message)
        return True

    def caller_lost(self, connection: Connection) -> None:
        """SE-2."""
        for served in list(self.by_key.values()):
            served.caller_lost(connection)
        for messages in self._held.values():
            messages[:] = [message for message in messages if message[0] is not connection]


_FOR_THE_SERVED = frozenset((Call, Cancel, More, Want))


def _refuse(connection: Connection, message: Any, payload: Payload) -> None:
    """SE-1. Room is granted without limit: what comes into it is refused as well."""
    kind = type(message)
    if kind is Want and message.total > 0:
        connection.send(Grant(message.actor, message.total))
    elif kind is Call:
        cost = payload.nbytes + OVERHEAD
        if message.reply:
            gone = Stopped(f"{message.actor.partition('#')[0]} was stopped")
            connection.send(Fault(message.id, pack_error(gone), cost))
        else:
            connection.send(Credit(message.actor, cost))
            connection.send(Gone(message.actor))
