"""A call on its way: whom it goes to, what it waits for, and how it gets room in all mailboxes at once.

UW-1: a `Call` is under way from the moment it is made: it is sent at once, or stands in line at once (R1). Nobody has
      to await it for that.
UW-2: cancelling what waits for a call, or the deadline of the call, tells its endpoint to stop (R6).
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.actor import context
from runtime.codec import Payload
from runtime.errors import TuttiError
from runtime.frames import Outgoing
from runtime.interface import EndpointType
from runtime.mailbox import Place, Room
from runtime.messages import Cancel
from runtime.shape import Shape
from runtime.steps import Steps

if TYPE_CHECKING:
    from runtime.node import Node
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

    def __init__(
        self, id: int, ref: ActorRef, how: Posting, peer: Peer, future: asyncio.Future[Any] | None = None
    ) -> None:
        self.id = id
        self.ref = ref
        self.endpoint = how.endpoint
        self.caller = how.caller
        self.since = how.since
        self.kill_after = how.kill_after
        self.peer = peer
        self.future = peer.node.loop.create_future() if future is None else future
        self.on_item: Callable[[Payload], None] | None = None
        """Takes the values of a stream; its end is the end of the call."""
        self._told = False

    def abandon(self, *, peer_failed: bool = False) -> None:
        """The caller gives up, perhaps because another rank has failed: tell the callee to stop (R6)."""
        self.tell_to_stop(peer_failed=peer_failed)
        self.future.cancel()

    def tell_to_stop(self, *, peer_failed: bool = False) -> None:
        """Nobody waits any more."""
        if self.id in self.peer.pending and not self._told:
            # It stays pending: the callee answers every call once, and its credits come with the answer.
            self._told = True
            self.peer.connection.send(Cancel(self.id, self.ref.key, peer_failed))
            if self.kill_after is not None:
                self.peer.node.loop.call_later(self.kill_after, self._insist)

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


class Answer(asyncio.Future[Any]):
    """What one call returns or raises. Cancelling it stops the endpoint (UW-2)."""

    pending: Pending | None = None
    """Once it is sent."""
    sending: asyncio.Task[None] | None = None
    """As long as it stands in line."""

    def cancel(self, msg: Any | None = None) -> bool:
        self._give_up()
        return super().cancel(msg)

    def fail(self, error: Exception) -> None:
        """End with an error of this side, as the deadline."""
        if not self.done():
            self._give_up()
            self.set_exception(error)

    def _give_up(self) -> None:
        if self.pending is not None:
            self.pending.tell_to_stop()
        if self.sending is not None:
            self.sending.cancel()


class Call(Coroutine[Any, Any, Any]):
    """A call to one actor, under way (UW-1). Await it, or give it to what takes coroutines: `asyncio.gather`,
    `asyncio.create_task`, `TaskGroup.start`, `blocking`."""

    __slots__ = ("_answer", "_steps")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._answer = Answer(loop=loop)
        self._steps: Generator[Any, Any, Any] | None = None

    @classmethod
    def to(cls, node: Node, ref: ActorRef, outgoing: Outgoing, how: Posting, wait: bool) -> Call:
        """Send a call; on the thread of the loop."""
        call = cls(node.loop)
        _send(node, ref, outgoing, how, wait, call._answer)
        return call

    @classmethod
    def made_on(cls, loop: asyncio.AbstractEventLoop, make: Callable[[], Call]) -> Call:
        """For another thread: a call that is made on the loop, in the context of here."""
        call = cls(loop)
        loop.call_soon_threadsafe(_relay, make, call._answer, context=contextvars.copy_context())
        return call

    def as_asyncio(self) -> asyncio.Future[Any]:
        """Its answer as a plain future: the least that thousands of calls at once can cost."""
        return self._answer

    def expire_after(self, seconds: float, error: Callable[[bool], Exception]) -> None:
        """Set the deadline. `error` makes what is raised, told whether the call has been sent."""
        answer = self._answer

        def expire() -> None:
            if not answer.done():
                answer.fail(error(answer.pending is not None))

        timer = answer.get_loop().call_later(seconds, expire)
        answer.add_done_callback(lambda _: timer.cancel())

    # As a coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer.__await__()

    def send(self, value: Any) -> Any:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Nobody awaits it; it goes on."""


def _send(node: Node, ref: ActorRef, outgoing: Outgoing, how: Posting, wait: bool, answer: Answer) -> None:
    """UW-1."""
    try:
        answer.pending = node.post_at_once(ref, outgoing, how, answer)
        if answer.pending is not None:
            return
        post = Steps(node.post([(ref, outgoing)], how, wait=wait, answer=answer))
    except TuttiError as error:
        answer.set_exception(error)
        return
    answer.sending = node.loop.create_task(_stand_in_line(post, answer), name=f"send to {ref.mesh}")
    answer.sending.add_done_callback(lambda _: post.close())


def _relay(make: Callable[[], Call], answer: Answer) -> None:
    async def answer_of_another() -> None:
        try:
            answer.set_result(await make())
        except asyncio.CancelledError:
            answer.cancel()
        except Exception as error:  # whoever waits for the answer gets it
            answer.set_exception(error)

    if not answer.done():
        answer.sending = answer.get_loop().create_task(answer_of_another(), name="call of another thread")


async def _stand_in_line(post: Steps, answer: Answer) -> None:
    try:
        (answer.pending,) = await post
    except asyncio.CancelledError:
        pass  # the answer was
    except Exception as error:  # whoever waits for the answer gets it
        answer.set_exception(error)
    finally:
        answer.sending = None


def try_room(rooms: Sequence[tuple[Room, int]]) -> bool:
    """Take room in every mailbox at once, or in none."""
    for index, (room, nbytes) in enumerate(rooms):
        if not room.try_acquire(nbytes):
            for taken, size in rooms[:index]:
                taken.release(size)
            return False
    return True


async def line_up(rooms: Sequence[tuple[Room, int]], wait: bool) -> None:
    """Wait for room in all mailboxes; the caller frees each of them after sending.

    A call to several actors that must wait for one of them has its place in the lines of all of them from the
    beginning, so that a later call arrives nowhere before it (R1). Lines can't block each other: all calls stand in
    the same order in all of them.
    """
    places: list[tuple[Room, Place]] = []
    try:
        places.extend((room, room.enqueue(nbytes, wait=wait)) for room, nbytes in rooms)
        for _, place in places:
            await place.future
    except BaseException:
        for room, place in places:
            room.leave(place)
        raise
