"""This process among others: its connections, and the calls that it sends.

NO-1: messages to one actor leave in the order of the calls, also when one of them must first be copied to shared memory
      in another thread, or wait for room in its mailbox or in that of another actor of the same call (R1).
NO-2: a process that has ended for good leaves the table of peers; how it ended is remembered for later calls, of
      `MAX_GONE` processes.
NO-3: who loses a process that others have started asks the controller how it ended, for `EXPLAIN_SECONDS` at most,
      before what waits for it fails.
NO-4: at most `MAX_UNPROVEN` connections are proving themselves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from runtime.actor import MainThreadRunner, context
from runtime.auth import Refusals, Trust
from runtime.codec import Payload
from runtime.errors import ActorError, Death, PackedError, Stopped, TuttiError, unpack_error
from runtime.frames import COPY_IN_THREAD, Outgoing
from runtime.mailbox import OVERHEAD, Room
from runtime.messages import Call as CallMessage
from runtime.messages import Heartbeat, Hello, Message
from runtime.peer import ANSWERS, Peer
from runtime.posting import ActorRef, Answer, Pending, Posting, Target, line_up, try_room
from runtime.serving import Serving
from runtime.sockets import Listener, dial, parse_address
from runtime.steps import Runner
from runtime.wire import Connection

MAX_GONE = 1024
"""Ends of processes that a node remembers, so that a call made later says what happened."""

EXPLAIN_SECONDS = 2.0
"""How long a lost process waits for the controller to say how it ended."""

MAX_UNPROVEN = 4096
"""Connections that may be proving themselves at once; more are dropped, so that strangers can't use up descriptors."""

Server = Callable[[Connection, Message, Payload], None]


class Node:
    """A process that calls others and may be called. Lives on one event loop."""

    def __init__(self, address: str, trust: Trust, limit: int, *, known: bool = True) -> None:
        """
        Args:
            known: found by handles that arrive outside of actors (`node_for`), and by `current_node`.
        """
        self.address = address
        """Where it listens; the port is known once it does."""
        self.trust = trust
        self.limit = limit
        self.hello: Hello
        """What it says first on the connections that it makes."""
        self.refusals = Refusals()
        self.peers: dict[str, Peer] = {}
        self._gone: dict[str, Peer] = {}
        self.on_actors_stopped: Callable[[Sequence[ActorRef]], None] | None = None
        self.serve: Server | None = None
        """Takes what is neither an answer nor for something served: the first message of whoever connects."""
        self.explain: Callable[[str], Coroutine[Any, Any, Death | None]] | None = None
        """Asks how the process at an address ended; for processes that others have started."""
        self._explaining: set[asyncio.Task[None]] = set()
        self.on_caller_lost: Callable[[Connection], None] | None = None
        self.serving = Serving()
        """What others can call here."""
        self.controller = address
        """Where the controller of the job listens."""
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        """Of its loop."""
        self.runner = Runner(self.loop)
        """Starts the async calls of what is served here."""
        self.main_thread_runner: MainThreadRunner | None = None
        """How `on_main_thread` gets there."""
        self.waiting_for_room: list[tuple[ActorRef, Posting]] = []
        """Calls that were not sent yet, because a mailbox is full or a process is being started again."""
        self.moved = 0
        """Messages that have come in, heartbeats aside: while it stands still, nothing happens."""
        self._ids = itertools.count(1)
        self._life = os.urandom(4).hex()
        self._order = asyncio.Lock()
        self._in_order = 0
        """Calls that have the lock or wait for it."""
        self._connections: set[Connection] = set()
        self._unproven: set[Connection] = set()
        self._listeners: list[Listener] = []
        if known:
            _nodes.append(self)

    def listen(self, *also: str) -> None:
        """Accept connections at the own address, and at others. Raises as `Listener`."""
        self._listeners.append(Listener(self.address, self.trust, self._accept))
        self.address = self.controller = self._listeners[0].address
        for address in also:
            self._listeners.append(Listener(address, self.trust, self._accept))

    def _accept(self, sock: socket.socket) -> None:
        self._unproven = {c for c in self._unproven if not c.proven and not c.closed}
        if len(self._unproven) >= MAX_UNPROVEN:
            self.refusals.note("crowd", "a new peer", f"{MAX_UNPROVEN} others have not proven themselves yet")
            sock.close()
            return
        try:
            self._unproven.add(self._connection(sock, dialled=False))
        except OSError:  # it has gone again
            sock.close()

    def dial(self, address: str, hello: Hello | None = None) -> Connection:
        """Connect and say hello.

        Raises:
            ConnectionRefused: nobody listens there. Over TCP the connection is lost later instead.
        """
        connection = self._connection(dial(address), dialled=True)
        connection.send(hello or self.hello)
        return connection

    def _connection(self, sock: socket.socket, *, dialled: bool) -> Connection:
        connection = Connection(
            sock,
            self.trust,
            self._on_message,
            self._on_lost,
            dialled=dialled,
            limit=self.limit,
            refusals=self.refusals,
        )
        self._connections.add(connection)
        return connection

    def unique(self, name: str) -> str:
        """A key that nothing else in the job has; nor had, in a process before this one at the same address."""
        return f"{name}#{self.address.rpartition('/')[2]}.{self._life}.{next(self._ids)}"

    def adopt(self, connection: Connection, address: str, host: str) -> Peer:
        """Make a process that connected to us callable."""
        peer = Peer(self, address, host)
        peer.connection = connection
        connection.peer = peer
        before, self.peers[address] = self.peers.get(address), peer
        if before is not None and before.revival is not None:
            before.revival.take_over(peer)
        return peer

    def peer(self, address: str) -> Peer:
        """The process at an address, connected to when it wasn't yet.

        Raises:
            ConnectionRefused: nobody listens there.
        """
        peer = self.peers.get(address) or self._gone.get(address)
        if peer is None:
            peer = self.adopt(self.dial(address), address, "")
            peer.on_lost = functools.partial(self._end, peer)
        return peer

    def _end(self, peer: Peer) -> None:
        """A process that this one had called is gone. If it comes back, it will be there at the same address."""
        if self.peers.get(peer.address) is peer:
            del self.peers[peer.address]
        if self.explain is None or peer.address == self.controller:
            peer.died(Death())
            return
        task = self.loop.create_task(self._explain(peer, self.explain(peer.address)), name=f"explain {peer.address}")
        self._explaining.add(task)
        task.add_done_callback(self._explaining.discard)

    async def _explain(self, peer: Peer, answer: Coroutine[Any, Any, Death | None]) -> None:
        """Ask the controller how a process ended; only then fail what waits for it (PE-2)."""
        death = None
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                death = await answer
        except (TimeoutError, TuttiError):
            pass  # the controller is busy or gone: what is known is that the process is
        finally:
            peer.died(death or Death())

    def forget(self, address: str) -> None:
        """A process has ended for good: keep only how."""
        peer = self.peers.pop(address, None)
        if peer is not None:
            self._gone[address] = peer
            while len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]

    def forget_actors(self, refs: Sequence[ActorRef]) -> None:
        """These actors were stopped; their processes go on."""
        for ref in refs:
            peer = self.peers.get(ref.address)
            if peer is not None:
                peer.forget_actor(ref)
        if self.on_actors_stopped is not None:
            self.on_actors_stopped(refs)

    async def post(
        self, targets: Sequence[Target], how: Posting, *, wait: bool = True, answer: Answer | None = None
    ) -> list[Pending]:
        """Send one call to each target, in order, once there is room for all of them. No reply, no Pending.

        Args:
            answer: of the only target, if somebody waits for it already.

        Raises:
            ProcessDied, Stopped, ConnectionRefused: a target is gone; nothing was sent.
            MailboxFull: with `wait=False`.
        """
        if len(targets) == 1 and how.reply and (sent := self.post_at_once(*targets[0], how, answer)) is not None:
            return [sent]
        rooms: list[tuple[Room, int]] = []
        for ref, outgoing in targets:
            peer = self.peer(ref.address)
            if not peer.comes_back(ref):
                peer.check(ref, how.endpoint.name)
            elif len(targets) > 1 and wait:
                with self._told(targets, how):
                    await peer.revived()
                return await self.post(targets, how, wait=wait, answer=answer)
            rooms.append((peer.room(ref), outgoing.payload.nbytes + OVERHEAD))
        in_line = not try_room(rooms)
        if in_line:
            with self._told(targets, how):
                await line_up(rooms, wait)
        try:
            peers = [self.peer(ref.address) for ref, _ in targets]  # others than before, if they were started again
            large = [
                o
                for peer, (_, o) in zip(peers, targets, strict=True)
                if o.payload.nbytes >= COPY_IN_THREAD and peer.connection.shares(o)
            ]
            if not large and not self._in_order:
                return self._send(peers, targets, how, answer)
            self._in_order += 1
            try:
                async with self._order:
                    for outgoing in {id(o): o for o in large}.values():
                        await asyncio.to_thread(outgoing.block)
                    return self._send(peers, targets, how, answer)
            finally:
                self._in_order -= 1
        except BaseException:
            for room, nbytes in rooms:
                room.release(nbytes)
            raise
        finally:
            if in_line:
                for room, _ in rooms:
                    room.free()

    @contextlib.contextmanager
    def _told(self, targets: Sequence[Target], how: Posting) -> Iterator[None]:
        """Reports tell meanwhile that the call waits to be sent."""
        waiting = [(ref, how) for ref, _ in targets]
        self.waiting_for_room += waiting
        try:
            yield
        finally:
            for entry in waiting:
                self.waiting_for_room.remove(entry)

    def post_at_once(
        self, ref: ActorRef, outgoing: Outgoing, how: Posting, answer: Answer | None = None
    ) -> Pending | None:
        """What most calls need: no other target, nothing to wait for, nothing to copy. None when that isn't so.

        Raises:
            ProcessDied, Stopped, ConnectionRefused: the target is gone.
        """
        peer = self.peers.get(ref.address) or self.peer(ref.address)
        if self._in_order or peer.revival is not None or outgoing.is_large:
            return None
        if peer.death is not None or peer.stopped:
            raise peer.end_error(ref, how.endpoint.name)
        room = peer.rooms.get(ref.key) or peer.room(ref)
        if not room.try_acquire(outgoing.payload.nbytes + OVERHEAD):
            return None
        return self._send_one(peer, ref, outgoing, how, 0, answer)

    def _send(
        self, peers: Sequence[Peer], targets: Sequence[Target], how: Posting, answer: Answer | None
    ) -> list[Pending]:
        endpoint = how.endpoint
        for peer, (ref, outgoing) in zip(peers, targets, strict=True):
            peer.check(ref, endpoint.name)
            if peer.connection.shares(outgoing):
                outgoing.block()  # may raise; nothing has been sent yet
        calls: list[Pending] = []
        for position, (peer, (ref, outgoing)) in enumerate(zip(peers, targets, strict=True)):
            pending = self._send_one(peer, ref, outgoing, how, position, answer)
            if pending is not None:
                calls.append(pending)
        return calls

    def _send_one(
        self, peer: Peer, ref: ActorRef, outgoing: Outgoing, how: Posting, position: int, answer: Answer | None
    ) -> Pending | None:
        number = next(self._ids)
        rank = how.first_rank + position
        message = CallMessage(
            number, ref.key, how.endpoint.name, rank, how.names, how.sizes, how.chain, how.reply, how.window
        )
        pending = None
        if how.reply:
            pending = peer.pending[number] = Pending(number, ref, how, peer, answer)
            if how.on_item is not None:
                pending.on_item = functools.partial(how.on_item, position)
            peer.outstanding[ref.key] = peer.outstanding.get(ref.key, 0) + 1
        peer.connection.send(message, outgoing)
        return pending

    def close(self) -> None:
        """Close all connections and the listening socket."""
        self.runner.close()
        for task in self._explaining:
            task.cancel()
        while self._listeners:
            self._listeners.pop().close()
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        if self in _nodes:
            _nodes.remove(self)

    def _on_message(self, connection: Connection, message: Any, payload: Payload) -> None:
        kind = type(message)
        if kind is not Heartbeat:
            self.moved += 1
        if kind is CallMessage and (served := self.serving.by_key.get(message.actor)) is not None:
            served.deliver(connection, message, payload)
            return
        answer = ANSWERS.get(kind)
        if answer is not None:
            if isinstance(connection.peer, Peer):
                answer(connection.peer, message, payload)
        elif not self.serving.take(connection, message, payload) and self.serve is not None:
            self.serve(connection, message, payload)

    def _on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.serving.caller_lost(connection)
        peer = connection.peer
        if isinstance(peer, Peer):
            peer.lost = True
            if peer.on_lost is not None:
                peer.on_lost()
        elif self.on_caller_lost is not None:
            self.on_caller_lost(connection)


_nodes: list[Node] = []


def node_for(address: str) -> Node:
    """The node of this process that belongs to the job of an address: for handles that arrive as values.

    Raises:
        Stopped: this process has none (any more).
    """
    own = context().node
    if isinstance(own, Node):
        return own
    job = parse_address(address).job
    for node in _nodes:
        if parse_address(node.address).job == job:
            return node
    raise Stopped(
        f"handle of an actor at {address}: its job is not running in this process. Use handles while the host is up"
    )


def current_node() -> Node:
    """The node of the process that this code runs for.

    Raises:
        Stopped: no host runs in this process.
        RuntimeError: several do, and this code runs in none of their actors.
    """
    own = context().node
    if isinstance(own, Node):
        return own
    if not _nodes:
        raise Stopped("no host is running in this process. Do this inside 'async with this_host() as host'")
    if len(_nodes) > 1:
        raise RuntimeError("several hosts are running in this process, and it is not clear which one is meant")
    return _nodes[0]


def actor_error(packed: PackedError, ref: ActorRef, endpoint: str) -> ActorError:
    """The error of an actor that no call waits for."""
    return unpack_error(packed, ref.mesh, ref.rank, ref.host, endpoint)
