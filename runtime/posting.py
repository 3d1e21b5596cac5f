"""A call on its way: whom it goes to, what it waits for, and how it gets room in all mailboxes at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.actor import context
from runtime.codec import Payload
from runtime.frames import Outgoing
from runtime.interface import EndpointType
from runtime.mailbox import Place, Room
from runtime.messages import Cancel
from runtime.shape import Shape

if TYPE_CHECKING:
    from runtime.peer import Peer


AGENT = "agent"
"""Key of the actor that every worker has from the start; it makes the others (see `agent.py`)."""


class ActorRef(msgspec.Struct, frozen=True):
    """One actor: where it is, and how messages shall call it."""

    address: str
    key: str
    """Unique in the job."""
    mesh: str
    rank: int
    host: str


def main_thread_of(address: str) -> str:
    """How a call chain names the main thread of a process."""
    return f"main thread at {address}"


class Pending:
    """A call that waits for its result."""

    __slots__ = ("_told", "caller", "endpoint", "future", "id", "kill_after", "on_item", "peer", "ref", "since")

    def __init__(self, id: int, ref: ActorRef, how: Posting, peer: Peer) -> None:
        self.id = id
        self.ref = ref
        self.endpoint = how.endpoint
        self.caller = how.caller
        self.since = how.since
        self.kill_after = how.kill_after
        self.peer = peer
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_item: Callable[[Payload], None] | None = None
        """Takes the values of a stream; its end is the end of the call."""
        self._told = False

    def abandon(self, *, peer_failed: bool = False) -> None:
        """The caller gives up, perhaps because another rank has failed: tell the callee to stop (R6)."""
        if self.id in self.peer.pending and not self._told:
            # It stays pending: the callee answers every call once, and its credits come with the answer.
            self._told = True
            self.peer.connection.send(Cancel(self.id, self.ref.key, peer_failed))
            if self.kill_after is not None:
                self.peer.node.loop.call_later(self.kill_after, self._insist)
        self.future.cancel()

    def _insist(self) -> None:
        """The last resort against an endpoint that does not stop."""
        if self.id in self.peer.pending:
            self.peer.kill()


Target = tuple[ActorRef, Outgoing]


class Posting:
    """What the calls to all targets of one post have in common."""

    __slots__ = (
        "caller",
        "chain",
        "endpoint",
        "first_rank",
        "kill_after",
        "names",
        "on_item",
        "reply",
        "since",
        "sizes",
        "window",
    )

    def __init__(
        self,
        endpoint: EndpointType,
        shape: Shape,
        *,
        chain: tuple[str, ...] = (),
        reply: bool = True,
        first_rank: int = 0,
        window: int = 0,
        kill_after: float | None = None,
        on_item: Callable[[int, Payload], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.names, self.sizes = shape.names, shape.sizes
        """Of the mesh that the caller used."""
        self.caller = context()
        """Where the call was made."""
        self.since = time.monotonic()
        self.chain = chain
        self.reply = reply
        self.first_rank = first_rank
        """Rank of the first target in that mesh."""
        self.window = window
        self.kill_after = kill_after
        """Seconds between telling the callee to stop and killing its process."""
        self.on_item = on_item
        """Takes the values of a stream, with the position of their target."""


def try_room(rooms: Sequence[tuple[Room, int]]) -> bool:
    """Take room in every mailbox at once, or in none."""
    for index, (room, nbytes) in enumerate(rooms):
        if not room.try_acquire(nbytes):
            for taken, size in rooms[:index]:
                taken.release(size)
            return False
    return True


async def line_up(rooms: Sequence[tuple[Room, int]], wait: bool) -> list[tuple[Room, Place]]:
    """Wait for room in all mailboxes. Returns the places that are held: the caller frees them after sending.

    A call to several actors that must wait for one of them has its place in the lines of all of them from the
    beginning, so that a later call arrives nowhere before it (R1). Lines can't block each other: all calls stand in
    the same order in all of them.
    """
    places: list[tuple[Room, Place]] = []
    try:
        hold = len(rooms) > 1
        places.extend((room, room.enqueue(nbytes, wait=wait, hold=hold)) for room, nbytes in rooms)
        for _, place in places:
            await place.future
    except BaseException:
        for room, place in places:
            room.leave(place)
        raise
    return places
