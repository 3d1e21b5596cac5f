"""The other end of a connection, as the process that calls it sees it.

PE-1: every call is answered once (reply or fault), also a cancelled one, unless the process ends. The awaiting task
      gets the answer, the death or the stop, whichever comes first; who gave up gets nothing more.
PE-2: when a connection is lost, pending calls wait until the death is explained (`died`), so that every one of them
      raises `ProcessDied` with signal and last lines; later calls raise it at once.
PE-3: while a process is being started again (`Revival`), calls to its actors wait in line as they do before a full
      mailbox, so that they arrive in the order made (R1); only those to its agent, which makes the actors, pass.
      A call to several actors waits until all are there before it stands in any line: those that are there go on being
      called meanwhile (R5).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime import memory
from runtime.codec import Payload
from runtime.errors import Death, ProcessDied, Stopped, unpack_error
from runtime.mailbox import Room
from runtime.messages import (
    ActorFailed,
    Credit,
    Fault,
    Gone,
    Grant,
    Heartbeat,
    Item,
    Kill,
    Reply,
    Stopping,
    Want,
)
from runtime.posting import AGENT, ActorRef, Pending
from runtime.wire import Connection

if TYPE_CHECKING:
    from runtime.node import Node


class Revival:
    """The time between the death of a process and its rebuilt actors, or the decision against it (PE-3)."""

    def __init__(self, peer: Peer) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.peer = peer
        """The last process there."""
        peer.revival = self

    def take_over(self, peer: Peer) -> None:
        """Another process has connected in the place of the last one."""
        peer.revival, self.peer.revival = self, None
        peer.inherit(self.peer)
        self.peer = peer

    def end(self) -> None:
        """Let in who waits, or fail them if the last process is dead."""
        self.peer.revival = None
        self.peer.let_in()
        self.over.set_result(None)


class Peer:
    """The other end of a connection that this process calls."""

    def __init__(self, node: Node, address: str, host: str = "") -> None:
        self.node = node
        self.address = address
        self.host = host
        self.connection: Connection
        self.pending: dict[int, Pending] = {}
        self.outstanding: dict[str, int] = {}
        """Calls without an answer yet, by actor key: what `choose` looks at."""
        self.rooms: dict[str, Room] = {}
        self._refs: dict[str, ActorRef] = {}
        """Of the actors that have a room."""
        self.death: Death | None = None
        self.stopped = False
        self.lost = False
        """The connection is gone; the explanation follows."""
        self.revival: Revival | None = None
        """Its process is being started again."""
        self.beat: Heartbeat | None = None
        """The last heartbeat."""
        self.beat_at = 0.0
        """Loop time of its arrival."""
        self.on_lost: Callable[[], None] | None = None
        self.on_kill: Callable[[], None] | None = None
        self.on_actor_failed: Callable[[ActorFailed], None] | None = None
        self.on_stopping: Callable[[str], None] | None = None
        self.on_death_seen: Callable[[], None] | None = None

    def room(self, ref: ActorRef) -> Room:
        room = self.rooms.get(ref.key)
        if room is None:
            ask = functools.partial(self._want, ref.key)
            room = self.rooms[ref.key] = Room(ask, shut=self.comes_back(ref))
            self._refs[ref.key] = ref
        return room

    def _want(self, actor: str, first: int, total: int, at_once: bool) -> None:
        self.connection.send(Want(actor, first, total, at_once))

    def comes_back(self, ref: ActorRef) -> bool:
        """Whether an actor is being made again (PE-3)."""
        return self.revival is not None and ref.key != AGENT

    async def revived(self) -> None:
        """Wait until nothing is being started again here."""
        if self.revival is not None:
            await asyncio.shield(self.revival.over)

    def check(self, ref: ActorRef, endpoint: str) -> None:
        """
        Raises:
            ProcessDied, Stopped: the process is gone.
        """
        if self.death is not None or self.stopped:
            raise self.end_error(ref, endpoint)

    def end_error(self, ref: ActorRef, endpoint: str) -> Exception:
        if self.death is None:
            return Stopped(f"{ref.mesh} rank {ref.rank}, {endpoint}: the mesh was stopped. Call it before stop()")
        if self.on_death_seen is not None:
            self.on_death_seen()
        return ProcessDied(ref.mesh, ref.rank, ref.host, endpoint, self.death)

    def died(self, death: Death) -> None:
        """The end is explained: fail all that waits (PE-2)."""
        self.death = death
        self._end()

    def stop(self) -> None:
        """The process was stopped on purpose."""
        self.stopped = True
        self._end()

    def _end(self) -> None:
        self.connection.close()
        for pending in list(self.pending.values()):
            if not pending.future.done():
                pending.future.set_exception(self.end_error(pending.ref, pending.endpoint.name))
        self.pending.clear()
        self.outstanding.clear()
        for key, room in list(self.rooms.items()):
            if room.shut and self.revival is not None:
                continue
            ref = self._refs.pop(key)
            room.close(functools.partial(self.end_error, ref, "broadcast or call"))
            del self.rooms[key]

    def inherit(self, dead: Peer) -> None:
        """Take over the lines before the mailboxes of the actors that will be made again."""
        self.rooms, dead.rooms = dead.rooms, {}
        self._refs, dead._refs = dead._refs, {}

    def let_in(self) -> None:
        """Nothing is being started again any more."""
        if self.death is not None or self.stopped:
            self._end()
            return
        for key, room in self.rooms.items():
            room.open(functools.partial(self._want, key))

    def kill(self) -> None:
        """End its process: by signal where it was started, by asking it elsewhere."""
        if self.on_kill is not None:
            self.on_kill()
        elif not self.lost:
            self.connection.send(Kill())

    def serves(self, ref: ActorRef) -> bool:
        """Whether the actor can still be called, as far as is known; perhaps one has to wait for it."""
        if self.comes_back(ref):
            return True
        if self.death is not None or self.stopped or self.lost:
            return False
        room = self.rooms.get(ref.key)
        return room is None or not room.closed

    def forget_actor(self, ref: ActorRef) -> None:
        """It was stopped: later calls say so."""
        text = f"{ref.mesh} rank {ref.rank}: {ref.mesh} was stopped, or its receiver has closed"
        self.room(ref).close(lambda: Stopped(text))

    def forget(self, pending: Pending) -> None:
        self.outstanding[pending.ref.key] -= 1

    # Messages

    def on_reply(self, message: Reply, payload: Payload) -> None:
        pending = self.pending.pop(message.id, None)
        if pending is None:
            return
        self.forget(pending)
        if message.credit:
            self.rooms[pending.ref.key].credit(message.credit)
        if pending.future.done():
            return
        if pending.on_item is not None:
            pending.future.set_result(None)
            return
        try:
            pending.future.set_result(pending.endpoint.decode_result(payload))
        except Exception as error:  # decoding runs user code (constructors, unpickling): the caller gets what it raises
            pending.future.set_exception(error)

    def on_fault(self, message: Fault, payload: Payload) -> None:
        pending = self.pending.pop(message.id, None)
        if pending is None:
            return
        self.forget(pending)
        if message.credit:
            self.rooms[pending.ref.key].credit(message.credit)
        if not pending.future.done():
            ref = pending.ref
            pending.future.set_exception(
                unpack_error(message.error, ref.mesh, ref.rank, ref.host, pending.endpoint.name)
            )

    def on_credit(self, message: Credit, payload: Payload) -> None:
        room = self.rooms.get(message.actor)
        if room is not None:
            room.credit(message.nbytes)

    def on_grant(self, message: Grant, payload: Payload) -> None:
        room = self.rooms.get(message.actor)
        if room is not None:
            room.grant(message.nbytes)

    def on_gone(self, message: Gone, payload: Payload) -> None:
        ref = self._refs.get(message.actor)
        if ref is not None:
            self.forget_actor(ref)

    def on_item(self, message: Item, payload: Payload) -> None:
        pending = self.pending.get(message.id)
        if pending is not None and pending.on_item is not None:
            pending.on_item(payload)

    def on_failed(self, message: ActorFailed, payload: Payload) -> None:
        if self.on_actor_failed is not None:
            self.on_actor_failed(message)

    def on_heartbeat(self, message: Heartbeat, payload: Payload) -> None:
        self.beat, self.beat_at = message, asyncio.get_running_loop().time()
        memory.pool.trim()

    def on_stop_answer(self, message: Stopping, payload: Payload) -> None:
        if self.on_stopping is not None:
            self.on_stopping(message.busy)


ANSWERS: dict[type, Callable[[Peer, Any, Payload], None]] = {
    Reply: Peer.on_reply,
    Fault: Peer.on_fault,
    Item: Peer.on_item,
    Credit: Peer.on_credit,
    Grant: Peer.on_grant,
    Gone: Peer.on_gone,
    ActorFailed: Peer.on_failed,
    Heartbeat: Peer.on_heartbeat,
    Stopping: Peer.on_stop_answer,
}

"""What a peer does with the messages that are for whoever called it."""
