"""The ways to call an endpoint of a mesh.

CA-1: the first error of a call surfaces at once; the endpoints of the other ranks are then cancelled.
CA-2: cancelling the task that awaits a call, or its deadline, cancels the endpoint on every rank that has not answered:
      an async endpoint gets CancelledError, a sync one sees `context().cancelled`; one that waits in a mailbox never
      runs.
CA-3: `current_rank()` and `current_size()` count within the mesh that was called.
CA-4: a call that could never run (a serial actor, or a lane for one call, waiting for itself, directly or through
      other actors) raises `SelfCall`.
CA-5: arguments are encoded once for all ranks, and cross to the ranks of a host as one copy.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.actor import context
from runtime.codec import Payload
from runtime.errors import ActorError, ConnectionRefused, DeadlineExceeded, SelfCall
from runtime.frames import Outgoing
from runtime.interface import EndpointType
from runtime.posting import ActorRef, Call, Pending, Posting, Target, main_thread_of
from runtime.shape import Point, ValueMesh
from runtime.streams import WINDOW, Stream

if TYPE_CHECKING:
    from runtime.calls import ActorMesh


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `EndpointHandle.options` sets."""

    timeout: float | None = None
    wait: bool = True
    window: int = WINDOW
    kill_after: float | None = None


DEFAULTS = Options()


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

    __slots__ = ("_mesh", "_options", "_turn", "_type")

    def __init__(self, mesh: ActorMesh, type_: EndpointType, options: Options = DEFAULTS) -> None:
        self._mesh = mesh
        self._type = type_
        self._options = options
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
        options = Options(timeout=timeout, wait=wait, window=window, kill_after=kill_after)
        return EndpointHandle(self._mesh, self._type, options)

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

    def call_one(self, *args: Any, **kwargs: Any) -> Call:
        """Call the only actor of the mesh. It is under way at once; await its result. Raises ValueError when there are
        several actors, and as `call`; what is wrong with the arguments at once."""
        if self._type.streams:
            self._wants_one_result("call_one", "stream_one")
        refs, node = self._mesh.refs, self._mesh._node
        ref = refs[0] if len(refs) == 1 else self._only("call_one", "call() or choose()")
        if threading.get_ident() != node.thread:
            return Call.made_on(node.loop, functools.partial(self.call_one, *args, **kwargs))
        return self._to_one(ref, 0, self._encode(args, kwargs))

    def choose(self, *args: Any, **kwargs: Any) -> Call:
        """As `call_one`, for the actor with the fewest calls of this process outstanding, passing over dead ones."""
        if self._type.streams:
            self._wants_one_result("choose", "stream_choose")
        node = self._mesh._node
        if threading.get_ident() != node.thread:
            return Call.made_on(node.loop, functools.partial(self.choose, *args, **kwargs))
        outgoing = self._encode(args, kwargs)
        ref, rank = self._least_busy()
        return self._to_one(ref, rank, outgoing)

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
        await self._mesh._node.post([(ref, outgoing) for ref in self._mesh.refs], posting, wait=self._options.wait)

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
            try:
                peer = node.peer(ref.address)
            except ConnectionRefused:  # dead, for all that is known here
                continue
            if peer.death is not None or peer.lost or peer.comes_back(ref):
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

    def _to_one(self, ref: ActorRef, rank: int, outgoing: Outgoing) -> Call:
        mesh, options = self._mesh, self._options
        how = Posting(self._type, mesh.shape, first_rank=rank, kill_after=options.kill_after)
        if how.caller.chain:
            how.chain = self._chain([(ref, outgoing)])
        call = Call.to(mesh._node, ref, outgoing, how, options.wait)
        if options.timeout is not None:
            call.expire_after(options.timeout, lambda sent: self._late([str(ref.rank)] if sent else []))
        return call

    async def _all(self, targets: list[Target]) -> ValueMesh[Any]:
        pending: list[Pending] = []
        if self._options.timeout is None:
            return await self._answers(targets, pending)
        try:
            async with asyncio.timeout(self._options.timeout) as deadline:
                return await self._answers(targets, pending)
        except TimeoutError:
            if deadline.expired():
                raise self._late([str(call.ref.rank) for call in pending if call.future.cancelled()]) from None
            raise

    async def _answers(self, targets: list[Target], pending: list[Pending]) -> ValueMesh[Any]:
        try:
            posting = Posting(
                self._type,
                self._mesh.shape,
                chain=self._chain(targets),
                kill_after=self._options.kill_after,
            )
            pending += await self._mesh._node.post(targets, posting, wait=self._options.wait)
            return ValueMesh(self._mesh.shape, await asyncio.gather(*[call.future for call in pending]))
        except BaseException as error:
            for call in pending:
                call.abandon(peer_failed=isinstance(error, ActorError))
            raise

    def _stream(self, targets: Callable[[], tuple[list[Target], int]], view: Callable[[int, Any], Any]) -> Stream[Any]:
        window = self._options.window if self._type.streams else 0

        async def start(on_item: Callable[[int, Payload], None]) -> list[Pending]:
            chosen, first_rank = targets()
            posting = Posting(
                self._type,
                self._mesh.shape,
                chain=self._chain(chosen),
                first_rank=first_rank,
                window=window,
                kill_after=self._options.kill_after,
                on_item=on_item if window else None,
            )
            return await self._mesh._node.post(chosen, posting, wait=self._options.wait)

        return Stream(self._name, start, view, timeout=self._options.timeout, window=window)

    def _chain(self, targets: list[Target]) -> tuple[str, ...]:
        """The serial actors that wait for what is about to be called.

        Raises:
            SelfCall: one of the targets is among them (CA-4).
        """
        chain = context().chain
        if not chain:
            return chain
        for ref, _ in targets:
            if self._type.alone_in(ref.key) in chain:
                who = "the actor runs one endpoint" if self._type.serial else "the endpoint runs one call"
                raise SelfCall(
                    f"{ref.mesh} rank {ref.rank}, {self._type.name}: this call could never run, because {who} at a "
                    "time and the one running waits for this call. Call the method directly, or mark one of the two "
                    "@endpoint(concurrency=n)"
                )
            if not self._type.is_async and main_thread_of(ref.address) in chain:
                raise SelfCall(
                    f"{ref.mesh} rank {ref.rank}, {self._type.name}: this call could never run, because it needs the "
                    "main thread of a process that waits for it there. Make one of the two async"
                )
        return chain

    def _late(self, late: list[str]) -> DeadlineExceeded:
        """The error of the deadline; `late` are the ranks that have the call and did not answer."""
        who = f"rank {', '.join(late)} had not answered" if late else "it was still waiting for room in a mailbox"
        return DeadlineExceeded(
            f"{self._name}: deadline of {self._options.timeout} s has passed; {who} and was told to stop"
        )
