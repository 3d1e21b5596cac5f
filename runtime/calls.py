"""Meshes of actors and the ways to call them.

CA-1: the first error of a call surfaces at once; the endpoints of the other ranks are then cancelled.
CA-2: cancelling the task that awaits a call, or its deadline, cancels the endpoint on every rank that has not answered:
      an async endpoint gets CancelledError, a sync one sees `context().cancelled`; one that waits in a mailbox never
      runs.
CA-3: a slice is a mesh of its own: `current_rank()` and `current_size()` count within the mesh that was called.
CA-4: a call that could never run (a serial actor waiting for itself, directly or through other actors) raises
      `SelfCall`.
CA-5: arguments are encoded once for all ranks, and cross to the ranks of a host as one copy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime import records
from runtime.actor import context
from runtime.codec import Payload
from runtime.errors import ActorError, DeadlineExceeded, SelfCall
from runtime.frames import Outgoing
from runtime.interface import EndpointType, Interface
from runtime.node import Node, node_for
from runtime.posting import AGENT, ActorRef, Pending, Posting, Target, main_thread_of
from runtime.shape import Point, Selector, Shape, ValueMesh
from runtime.streams import WINDOW, Stream


class ActorMesh:
    """Actors of one class, one for each rank. Every endpoint is an attribute with the adverbs of `EndpointHandle`.

    A mesh can be sent as an argument: other actors can then call it too.
    """

    def __init__(self, name: str, shape: Shape, refs: Sequence[ActorRef], interface: Interface, node: Node) -> None:
        self.name = name
        self.shape = shape
        self.refs = tuple(refs)
        self.interface = interface
        self._node = node

    def __getattr__(self, name: str) -> EndpointHandle:
        # Reached only for names that the mesh itself doesn't have.
        interface = self.__dict__.get("interface")
        if interface is None or name not in interface.endpoints:
            cls = interface.class_name if interface is not None else "?"
            known = ", ".join(interface.endpoints) if interface is not None else ""
            raise AttributeError(
                f"{self.__dict__.get('name', '?')}: {cls} has no endpoint {name!r}; it has {known or 'none'}. "
                "Methods that other processes call need @endpoint"
            )
        handle = EndpointHandle(self, interface.endpoints[name])
        self.__dict__[name] = handle
        return handle

    def __len__(self) -> int:
        return len(self.refs)

    def __repr__(self) -> str:
        return f"<ActorMesh {self.name} of {self.interface.class_name} {self.shape}>"

    def __reduce__(self) -> Any:
        return _rebuild_mesh, (self.name, self.shape.to_dict(), self.refs, self.interface)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by dimension."""
        return self.shape.to_dict()

    def size(self, name: str | None = None) -> int:
        """Size of one dimension, or number of actors."""
        return len(self.refs) if name is None else self.shape.size(name)

    def is_alive(self) -> bool:
        """Whether, as far as this process knows, one of the actors can still be called."""
        peers = self._node.peers
        return any(ref.address not in peers or peers[ref.address].serves(ref) for ref in self.refs)

    def slice(self, **selectors: Selector) -> ActorMesh:
        """A part of the mesh (CA-3): `slice(replica=0, tp=slice(0, 2))`."""
        shape, ranks = self.shape.select(**selectors)
        return self._with(shape, [self.refs[rank] for rank in ranks])

    def flatten(self, name: str) -> ActorMesh:
        """The same actors along one dimension."""
        return self._with(self.shape.flatten(name), self.refs)

    def split(self, name: str, **parts: int) -> ActorMesh:
        """The same actors with one dimension split into several."""
        return self._with(self.shape.split(name, **parts), self.refs)

    def rename(self, **names: str) -> ActorMesh:
        """The same actors with other names of dimensions."""
        return self._with(self.shape.rename(**names), self.refs)

    async def stop(self) -> None:
        """Stop these actors, running `__cleanup__`; their processes go on. Later calls raise Stopped."""
        agents = ActorMesh(self.name, self.shape, [agent_of(ref) for ref in self.refs], agent_interface(), self._node)
        await agents.remove.scatter([(ref.key,) for ref in self.refs])
        self._node.forget_actors(self.refs)

    def _with(self, shape: Shape, refs: Sequence[ActorRef]) -> ActorMesh:
        return ActorMesh(self.name, shape, refs, self.interface, self._node)


def _rebuild_mesh(name: str, sizes: dict[str, int], refs: tuple[ActorRef, ...], interface: Interface) -> ActorMesh:
    return ActorMesh(name, Shape(sizes), refs, interface, node_for(refs[0].address))


def _mesh_from_parts(name: str, sizes: dict[str, int], refs: list[dict[str, Any]], class_name: str) -> ActorMesh:
    """Without pickle: the interface is read from the class once more."""
    interface = Interface.of(records.class_named(class_name))
    return _rebuild_mesh(name, sizes, tuple(ActorRef(**ref) for ref in refs), interface)


records.register_handle(
    ActorMesh,
    lambda mesh: (
        mesh.name,
        mesh.shape.to_dict(),
        [msgspec.structs.asdict(ref) for ref in mesh.refs],
        mesh.interface.importable_name(),
    ),
    _mesh_from_parts,
)


class EndpointHandle:
    """One endpoint of a mesh, and the ways to call it.

    |                     | one result    | values of a generator |
    | ------------------- | ------------- | --------------------- |
    | all ranks           | `call`        | `stream`              |
    | the only rank       | `call_one`    | `stream_one`          |
    | the least busy rank | `choose`      | `stream_choose`       |

    `stream` also gives the results of an endpoint that returns one, by arrival. `scatter` calls all ranks with
    arguments of their own, `broadcast` without a result.
    """

    __slots__ = ("_kill_after", "_mesh", "_timeout", "_turn", "_type", "_wait", "_window")

    def __init__(
        self,
        mesh: ActorMesh,
        type_: EndpointType,
        timeout: float | None = None,
        wait: bool = True,
        window: int = WINDOW,
        kill_after: float | None = None,
    ) -> None:
        self._mesh = mesh
        self._type = type_
        self._timeout = timeout
        self._wait = wait
        self._window = window
        self._kill_after = kill_after
        self._turn = itertools.count()

    def __repr__(self) -> str:
        return f"<endpoint {self._name}{self._type.signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        how = "async for value in {}.stream_one(...)" if self._type.streams else "await {}.call(...)"
        raise TypeError(
            f"{self._name} is an endpoint of a mesh: say how to call it, for example '{how.format(self._name)}'"
        )

    def options(
        self,
        *,
        timeout: float | None = None,
        wait: bool = True,
        window: int = WINDOW,
        kill_after: float | None = None,
    ) -> EndpointHandle:
        """The same endpoint with other settings.

        Args:
            timeout: deadline in seconds for a call (or stream) as a whole, waiting in mailboxes included; it stops the
                remote endpoint.
            wait: False raises MailboxFull rather than wait for room.
            window: values by which a generator may run ahead of its consumer.
            kill_after: last resort: an endpoint that still runs so many seconds after it was told to stop (deadline,
                cancel, error of another rank) has its process killed. Its other callers get ProcessDied; a mesh with a
                restart policy starts it again.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"{self._name}: expected a timeout above 0 seconds, got {timeout}")
        if window < 1:
            raise ValueError(f"{self._name}: expected a window of at least 1 value, got {window}")
        if kill_after is not None and kill_after < 0:
            raise ValueError(f"{self._name}: expected kill_after of at least 0 seconds, got {kill_after}")
        return EndpointHandle(self._mesh, self._type, timeout, wait, window, kill_after)

    async def call(self, *args: Any, **kwargs: Any) -> ValueMesh[Any]:
        """Call all ranks; the results by rank.

        Raises:
            ActorError: an endpoint raised (CA-1); also an instance of the user's class.
            ProcessDied, Stopped: a process is gone.
            DeadlineExceeded: the deadline of `options` passed (CA-2).
            TypeError: the arguments don't fit the signature, or it is a generator.
            Oversize: the arguments are larger than the limit.
            SelfCall: the call could never run (CA-4).
        """
        self._wants_one_result("call", "stream")
        outgoing = self._encode(args, kwargs)
        return await self._all([(ref, outgoing) for ref in self._mesh.refs])

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Call the only actor of the mesh. Raises ValueError when there are several, and as `call`."""
        self._wants_one_result("call_one", "stream_one")
        ref = self._only("call_one", "call() or choose()")
        return (await self._run([(ref, self._encode(args, kwargs))]))[0]

    async def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Call the actor with the fewest calls of this process outstanding, passing over dead ones. Raises as
        `call`."""
        self._wants_one_result("choose", "stream_choose")
        outgoing = self._encode(args, kwargs)
        ref, rank = self._least_busy()
        return (await self._run([(ref, outgoing)], rank))[0]

    def stream(self, *args: Any, **kwargs: Any) -> Stream[tuple[Point, Any]]:
        """Call all ranks; (coordinates, value) as they arrive: what each one returns, or all that its generator yields.

        Leaving the loop cancels the rest (ST-4). Raises as `call`.
        """
        outgoing = self._encode(args, kwargs)
        shape = self._mesh.shape

        def targets() -> tuple[list[Target], int]:
            return [(ref, outgoing) for ref in self._mesh.refs], 0

        return self._stream(targets, lambda position, value: (Point(position, shape), value))

    def stream_one(self, *args: Any, **kwargs: Any) -> Stream[Any]:
        """The values of the generator of the only actor of the mesh, in order (ST-1 to ST-5).

        Raises:
            ValueError: the mesh has several actors.
            TypeError: the arguments don't fit the signature, or it is no generator.
            The rest as `call`, where the next value is awaited.
        """
        self._wants_stream("stream_one", "call_one")
        ref = self._only("stream_one", "stream() or stream_choose()")
        outgoing = self._encode(args, kwargs)
        return self._stream(lambda: ([(ref, outgoing)], 0), lambda _, value: value)

    def stream_choose(self, *args: Any, **kwargs: Any) -> Stream[Any]:
        """As `stream_one`, of the actor that `choose` would take."""
        self._wants_stream("stream_choose", "choose")
        outgoing = self._encode(args, kwargs)

        def targets() -> tuple[list[Target], int]:
            ref, rank = self._least_busy()
            return [(ref, outgoing)], rank

        return self._stream(targets, lambda _, value: value)

    async def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to all ranks and return once their mailboxes have taken it. No result; an error in the endpoint goes to
        supervision. Raises ProcessDied, Stopped, TypeError, Oversize."""
        self._wants_one_result("broadcast", "stream")
        outgoing = self._encode(args, kwargs)
        posting = Posting(self._type, self._mesh.shape, reply=False)
        await self._mesh._node.post([(ref, outgoing) for ref in self._mesh.refs], posting, wait=self._wait)

    async def scatter(self, arguments: Sequence[tuple[Any, ...]]) -> ValueMesh[Any]:
        """Call rank i with the arguments `arguments[i]`; the results by rank. Raises as `call`, and ValueError for a
        wrong number of argument tuples."""
        self._wants_one_result("scatter", "stream")
        refs = self._mesh.refs
        if len(arguments) != len(refs):
            raise ValueError(
                f"{self._name}.scatter: expected {len(refs)} argument tuples (one a rank), got {len(arguments)}"
            )
        for rank, args in enumerate(arguments):
            if not isinstance(args, tuple):
                raise TypeError(
                    f"{self._name}.scatter: expected a tuple of arguments for rank {rank}, got {type(args).__name__}. "
                    "Write (value,) for a single one"
                )
        return await self._all([(ref, self._encode(args, {})) for ref, args in zip(refs, arguments, strict=True)])

    # Parts

    @property
    def _name(self) -> str:
        return f"{self._mesh.name}.{self._type.name}"

    def _wants_one_result(self, adverb: str, instead: str) -> None:
        if self._type.streams:
            raise TypeError(
                f"{self._name}.{adverb}: the endpoint is a generator. "
                f"Use 'async for value in {self._name}.{instead}(...)'"
            )

    def _wants_stream(self, adverb: str, instead: str) -> None:
        if not self._type.streams:
            raise TypeError(
                f"{self._name}.{adverb}: the endpoint returns one value. Use 'await {self._name}.{instead}(...)', or "
                "make it a generator with yield"
            )

    def _only(self, adverb: str, instead: str) -> ActorRef:
        refs = self._mesh.refs
        if len(refs) != 1:
            raise ValueError(
                f"{self._name}.{adverb}: expected a mesh of 1 actor, got {self._mesh.shape}. Slice it to one rank, or "
                f"use {instead}"
            )
        return refs[0]

    def _least_busy(self) -> tuple[ActorRef, int]:
        """The actor with the fewest calls outstanding, and its rank in this mesh; in turn among equals."""
        node, refs = self._mesh._node, self._mesh.refs
        start = next(self._turn)
        best: tuple[int, ActorRef, int] | None = None
        for step in range(len(refs)):
            rank = (start + step) % len(refs)
            ref = refs[rank]
            peer = node.peer(ref.address)
            if peer.death is not None or peer.lost:
                continue
            load = peer.outstanding.get(ref.key, 0)
            if best is None or load < best[0]:
                best = (load, ref, rank)
        return (refs[0], 0) if best is None else best[1:]

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outgoing:
        try:
            return Outgoing(self._type.encode_arguments(args, kwargs), self._mesh._node.limit)
        except (TypeError, ValueError) as error:
            error.args = (f"{self._mesh.name}.{error.args[0] if error.args else ''}", *error.args[1:])
            raise

    async def _all(self, targets: list[Target]) -> ValueMesh[Any]:
        return ValueMesh(self._mesh.shape, await self._run(targets))

    async def _run(self, targets: list[Target], first_rank: int = 0) -> list[Any]:
        pending: list[Pending] = []
        if self._timeout is None:
            return await self._answers(targets, first_rank, pending)
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await self._answers(targets, first_rank, pending)
        except TimeoutError:
            if deadline.expired():
                raise self._late(pending) from None
            raise

    async def _answers(self, targets: list[Target], first_rank: int, pending: list[Pending]) -> list[Any]:
        try:
            posting = Posting(
                self._type,
                self._mesh.shape,
                chain=self._chain(targets),
                first_rank=first_rank,
                kill_after=self._kill_after,
            )
            pending += await self._mesh._node.post(targets, posting, wait=self._wait)
            if len(pending) == 1:
                return [await pending[0].future]
            return await asyncio.gather(*[call.future for call in pending])
        except BaseException as error:
            for call in pending:
                call.abandon(peer_failed=isinstance(error, ActorError))
            raise

    def _stream(self, targets: Callable[[], tuple[list[Target], int]], view: Callable[[int, Any], Any]) -> Stream[Any]:
        window = self._window if self._type.streams else 0

        async def start(on_item: Callable[[int, Payload], None]) -> list[Pending]:
            chosen, first_rank = targets()
            posting = Posting(
                self._type,
                self._mesh.shape,
                chain=self._chain(chosen),
                first_rank=first_rank,
                window=window,
                kill_after=self._kill_after,
                on_item=on_item if window else None,
            )
            return await self._mesh._node.post(chosen, posting, wait=self._wait)

        return Stream(self._name, start, view, timeout=self._timeout, window=window)

    def _chain(self, targets: list[Target]) -> tuple[str, ...]:
        """The serial actors that wait for what is about to be called.

        Raises:
            SelfCall: one of the targets is among them (CA-4).
        """
        chain = context().chain
        if not chain:
            return chain
        for ref, _ in targets:
            if self._type.serial and ref.key in chain:
                raise SelfCall(
                    f"{ref.mesh} rank {ref.rank}, {self._type.name}: this call could never run, because the actor "
                    "runs one endpoint at a time and the one running waits for this call. Call the method "
                    "directly, or mark one of the two @endpoint(concurrency=n)"
                )
            if not self._type.is_async and main_thread_of(ref.address) in chain:
                raise SelfCall(
                    f"{ref.mesh} rank {ref.rank}, {self._type.name}: this call could never run, because it needs the "
                    "main thread of a process that waits for it there. Make one of the two async"
                )
        return chain

    def _late(self, pending: list[Pending]) -> DeadlineExceeded:
        late = [str(call.ref.rank) for call in pending if call.future.cancelled()]
        who = f"rank {', '.join(late)} had not answered" if late else "it was still waiting for room in a mailbox"
        return DeadlineExceeded(f"{self._name}: deadline of {self._timeout} s has passed; {who} and was told to stop")


def agent_of(ref: ActorRef) -> ActorRef:
    """The agent in the process of an actor."""
    return ActorRef(ref.address, AGENT, ref.mesh, ref.rank, ref.host)


def agent_interface() -> Interface:
    """The endpoints of the agent."""
    from runtime.agent import Agent

    return Interface.of(Agent)
