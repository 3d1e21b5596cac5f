"""The two actor halves of a weight transfer: mixins that give an Actor the endpoints a WeightSession calls.

A trainer actor inherits `SenderPort` and sets `self.weight_source`; a rollout actor inherits `ReceiverPort`, sets
`self.weight_sink`, and may override `apply_weights`.

PO-1: `sync_send` runs on the trainer's main thread, takes a snapshot and returns: the trainer may change its weights as
      soon as it has returned, whatever the receivers do.
PO-2: staging never runs on the event loop or the main thread of a rollout rank: decoding goes on.
PO-3: `apply_weights` is called only with weights of which every segment has the digest that its owner declared, and
      only for the version that was staged last. Before it, nothing that serves was touched; staged memory is let go
      after it.
PO-4: no rank opens a transport before its own layout has the digest that the plan was made for (W6).
PO-5: one thread per port moves bytes; abort and close wake it, wait for it, and leave no transfer behind.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from runtime import endpoint, on_main_thread
from sync.layout import Layout, LayoutError
from sync.transport import (
    Link,
    ReceiverTransport,
    SenderTransport,
    SyncError,
    TransportError,
    TransportName,
    receiver_transport,
    sender_transport,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sync.pack import Shadow

__all__ = ["Manifest", "OpenSpec", "Opened", "ReceiverPort", "SenderPort", "Side", "WeightSink", "WeightSource"]

T = TypeVar("T")


class WeightSource(Protocol):
    """What a trainer backend offers on each rank."""

    def weight_layout(self) -> Layout:
        """The boxes (Hugging Face name, half-open n-d box, dtype) that this rank holds. Cheap: asked for every
        version."""
        ...

    def weight(self, name: str) -> Tensor | Sequence[Tensor]:
        """What this rank holds of that name as it is now: a tensor in the shape of its box, any strides, any device;
        where the layout has several boxes of the name, one tensor each, in the order of its entries."""
        ...


class WeightSink(Protocol):
    """What a rollout engine offers on each rank."""

    def weight_layout(self) -> Layout:
        """The boxes it needs, in the dtype it wants: *every* runtime tensor, or named as derived or constant."""
        ...

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy into the live tensors and move the engine's version, in one go (W5).

        `weights` has every entry of the layout that is sent or derived, in the shape of its box, in CPU memory. The
        tensors are only to be read and are invalid once this returns: copy, never keep.
        """
        ...


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says about itself."""

    digest: str
    layout: Layout | None
    """None when the caller knows a layout of this digest already."""
    host: str
    """Host name and boot: equal on two ranks only if they run under one kernel."""


class OpenSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to open its half of a transfer."""

    transport: TransportName
    plan_key: str
    layout_digest: str
    """Digest of the layout that the plan assumes for this rank (PO-4)."""
    link: Link
    address: str = ""
    """What `sync_host` returned; empty for the call of `sync_host` itself."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `sync_open`. That a transport can't be reached is an answer, not an error: "auto" tries another."""

    plan_key: str
    proof: bytes = b""
    """Read through the transport; equal on all ranks when they really share it."""
    refused: str = ""
    """Why the transport can't be used by this rank; empty when it can."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was packed: the digests of the segments of each bucket, as their owners computed them."""

    plan_key: str
    version: int
    digests: dict[int, tuple[int, ...]]
    """Bucket index -> one 64-bit digest per segment."""
    seconds: float = 0.0
    """Time of the slowest trainer rank to cast, pack and hash."""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout rank holds in shadow memory, verified."""

    version: int
    digests: dict[int, int]
    """Bucket index -> combined digest of the segments as received."""
    seconds: float


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `sync_commit`."""

    version: int
    pause_seconds: float
    """Wall time of `apply_weights`: the wait for a step boundary and the swap."""


TransportT = TypeVar("TransportT", SenderTransport, ReceiverTransport)


class _Half(Generic[TransportT]):
    """A transport with the one thread that works for it (PO-5)."""

    def __init__(self, spec: OpenSpec, transport: TransportT) -> None:
        self.spec = spec
        self.transport: TransportT = transport
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run in the thread, behind whatever it does now. Cancelling stops the waiting; `close` stops the work."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def close(self) -> None:
        """Wake the thread, wait until it has let go (bounded by the deadline of its transfers), free everything."""
        self.transport.abort()
        await self.run(self.transport.close)
        self._pool.shutdown()  # idle by now: it only joins the thread


async def _join(half: _Half[SenderTransport] | _Half[ReceiverTransport], join: Callable[[str], bytes]) -> Opened:
    try:
        proof = await half.run(join, half.spec.address)
    except TransportError as error:
        return Opened(plan_key=half.spec.plan_key, refused=str(error))
    return Opened(plan_key=half.spec.plan_key, proof=proof)


def _opened(half: _Half[TransportT] | None, call: str) -> _Half[TransportT]:
    if half is None:
        raise SyncError(f"{call}: the port is closed; open the weight session first")
    return half


def _side(layout: Layout, known: str) -> Side:
    digest = layout.digest
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return Side(digest=digest, layout=None if digest == known else layout, host=host)


def _check_layout(spec: OpenSpec, layout: Layout, where: str) -> None:
    if layout.digest != spec.layout_digest:
        raise LayoutError(
            f"{where}: its weights have layout {layout.digest[:12]} now, the plan was made for "
            f"{spec.layout_digest[:12]}; open the weight session again"
        )


class SenderPort:
    """Mixin of a trainer actor. Needs `self.weight_source` before the session opens.

    The actor must not be a ReceiverPort too: both have endpoints of the same names.
    """

    weight_source: WeightSource
    _sending: _Half[SenderTransport] | None = None

    @endpoint
    def sync_layout(self, known: str = "") -> Side:
        """This rank's layout now; without its entries when its digest is `known`."""
        return _side(self.weight_source.weight_layout(), known)

    @endpoint(concurrency=4)
    async def sync_host(self, spec: OpenSpec) -> str:
        """Make the meeting point of a transport (rank 0 only) and return its address."""
        await self.sync_close()
        self._sending = half = _Half(spec, sender_transport(spec.transport, spec.link))
        return await half.run(half.transport.host)

    @endpoint(concurrency=4)
    async def sync_open(self, spec: OpenSpec) -> Opened:
        """Join the transport that rank 0 hosts. All ranks of both sides do so at once."""
        _check_layout(spec, self.weight_source.weight_layout(), f"trainer rank {spec.link.rank}")
        half = self._sending
        if half is None or half.spec.address or half.spec.plan_key != spec.plan_key:
            await self.sync_close()
            half = _Half(spec, sender_transport(spec.transport, spec.link))
        half.spec = spec
        self._sending = half
        return await _join(half, half.transport.open)

    @endpoint
    def sync_send(self, version: int) -> Manifest:
        """Cast, pack and hash this rank's share of the weights. When it returns the weights may change (PO-1).

        Raises:
            SyncError: a weight is not finite where it is cast, or the port is not open.
        """
        from sync.pack import pack, part_of

        began = time.perf_counter()
        half = _opened(self._sending, "sync_send")
        held = self.weight_source.weight_layout().parts
        where = f"trainer rank {half.spec.link.rank}, version {version}"
        digests: dict[int, tuple[int, ...]] = {}
        for bucket in half.spec.link.buckets:
            memory = half.transport.buffer(version, bucket)
            digests[bucket.index] = tuple(
                pack(*part_of(self.weight_source.weight(s.name), held[s.name], s, where), s, memory, where)
                for s in bucket.segments
            )
        half.transport.seal(version)
        return Manifest(
            plan_key=half.spec.plan_key, version=version, digests=digests, seconds=time.perf_counter() - began
        )

    @endpoint(concurrency=4)
    async def sync_push(self, version: int) -> None:
        """Hand the packed bytes over, while training may go on. Raises TransportError."""
        half = _opened(self._sending, "sync_push")
        await half.run(half.transport.push, version)

    @endpoint(concurrency=4)
    async def sync_abort(self, version: int) -> None:
        """Stop whatever of `version` is under way. The port is closed afterwards."""
        await self.sync_close()

    @endpoint(concurrency=4)
    async def sync_close(self) -> None:
        """Close the transport; the port can be opened again."""
        half, self._sending = self._sending, None
        if half is not None:
            await half.close()


class ReceiverPort:
    """Mixin of a rollout actor. Needs `self.weight_sink` before the session opens."""

    weight_sink: WeightSink
    _receiving: _Half[ReceiverTransport] | None = None
    _shadow: Shadow | None = None
    _applied: Applied | None = None

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Put verified weights into service between two decode steps and move the version with them (W5).

        Override it when the engine has a loop of its own; the default swaps on the main thread, between two calls of
        it. The tensors belong to the transport: copy them before returning.
        """
        await on_main_thread(self.weight_sink.swap, weights, version)

    @endpoint(concurrency=4)
    async def sync_layout(self, known: str = "") -> Side:
        """This rank's layout now; without its entries when its digest is `known`."""
        return _side(self.weight_sink.weight_layout(), known)

    @endpoint(concurrency=4)
    async def sync_open(self, spec: OpenSpec) -> Opened:
        """Join the transport that trainer rank 0 hosts. All ranks of both sides do so at once."""
        await self.sync_close()
        _check_layout(spec, self.weight_sink.weight_layout(), f"rollout rank {spec.link.rank}")
        self._receiving = half = _Half(spec, receiver_transport(spec.transport, spec.link))
        return await _join(half, half.transport.open)

    @endpoint(concurrency=4)
    async def sync_stage(self, version: int, manifest: Manifest) -> Staged:
        """Fetch and verify a version into shadow memory while decoding goes on (PO-2).

        Raises:
            SyncError: the manifest is of another plan or version, or a digest differs; names tensor, box and owner.
            TransportError: a trainer rank is gone or silent.
        """
        from sync.pack import Shadow

        half = _opened(self._receiving, "sync_stage")
        where = f"rollout rank {half.spec.link.rank}"
        if (manifest.plan_key, manifest.version) != (half.spec.plan_key, version):
            raise SyncError(
                f"{where}: asked to stage version {version} of plan {half.spec.plan_key[:12]}, got the manifest of "
                f"version {manifest.version} of plan {manifest.plan_key[:12]}; open the session again"
            )
        self._shadow = None
        shadow = Shadow(self.weight_sink.weight_layout(), version, where)
        began = time.perf_counter()

        def fetch() -> dict[int, int]:
            return {
                bucket.index: shadow.add(bucket, memory, manifest.digests[bucket.index])
                for bucket, memory in half.transport.fetch(version)
            }

        digests = await half.run(fetch)
        shadow.check_complete()
        self._shadow = shadow
        return Staged(version=version, digests=digests, seconds=time.perf_counter() - began)

    @endpoint(concurrency=4)
    async def sync_commit(self, version: int) -> Applied:
        """Put the staged version into service. Repeating it for the version in service changes nothing.

        Raises:
            SyncError: this version is not the one that was staged and verified.
        """
        if self._applied is not None and self._applied.version == version:
            return self._applied
        shadow, self._shadow = self._shadow, None
        if shadow is None or shadow.version != version:
            held = "nothing" if shadow is None else f"version {shadow.version}"
            raise SyncError(f"can't commit version {version}: {held} is staged; stage it first")
        began = time.perf_counter()
        await self.apply_weights(shadow.weights(), version)
        self._applied = Applied(version=version, pause_seconds=time.perf_counter() - began)
        return self._applied

    @endpoint(concurrency=4)
    async def sync_abort(self, version: int) -> None:
        """Forget what was staged of `version` and close the port. What serves is untouched."""
        await self.sync_close()

    @endpoint(concurrency=4)
    async def sync_close(self) -> None:
        """Close the transport; the port can be opened again."""
        half, self._receiving = self._receiving, None
        self._shadow = None
        if half is not None:
            await half.close()
