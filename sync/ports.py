"""The two actor halves of a weight transfer: mixins that give an Actor the endpoints a WeightSession calls.

A trainer actor inherits `SenderPort` and sets `self.weight_source`; a rollout actor inherits `ReceiverPort`, sets
`self.weight_sink`, and may override `apply_weights` and `fence_weights`.

PO-1: `sync_send` runs on the trainer's main thread and returns when everything is packed: the trainer may change its
      weights as soon as it has returned. How long it waits for rollout ranks is bounded by the deadline and ends with
      `sync_abort`.
PO-2: staging never runs on the event loop or the main thread of a rollout rank: decoding goes on.
PO-3: `apply_weights` is called only for the version that was staged last, whole, by every part of the rank, for a
      session that has compared the digests of every segment. Before it, nothing that serves was touched.
PO-4: no rank opens a transport, sends or stages before its own layout has the digest that the plan was made for (W6).
PO-5: one thread per port moves bytes, and the main thread of a trainer rank while it packs; abort and close wake them,
      wait for them, and leave no transfer behind: memory that a transport gave out is not freed under whoever writes.
PO-6: a rank that was fenced serves again only after it has put a version into service through a session. What a process
      has done is not held against the one that was started in its place.
PO-7: in place (`OpenSpec.in_place`) a rank is fenced before the first byte is written over its live tensors, and until
      `sync_commit`; an abort leaves it fenced.
PO-8: where the weights of a rollout rank lie in other processes, this one relays what the session says and holds no
      tensor of theirs; each of them is a part of the rank, with a number.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from runtime import endpoint, on_main_thread
from sync.devices import on_device
from sync.half import Half, check_layout, device_of, join, opened, side_of, with_device
from sync.layout import Layout
from sync.messages import Applied, Largest, Manifest, Opened, OpenSpec, Side, Staged
from sync.receiver import Part, Receiver
from sync.transport import SenderTransport, SyncError, resized, sender_transport

if TYPE_CHECKING:
    from torch import Tensor

    from sync.bases import SentBase
    from sync.pack import Packer
    from sync.repeat import Repeats

__all__ = ["Part", "ReceiverPort", "SenderPort", "WeightSink", "WeightSource"]


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
    """What a rollout engine offers on each rank.

    An engine whose weights lie on a GPU, and that takes new ones there, has an attribute `weight_device = "cuda"`. One
    that can do without a second copy has a method `live_weights()`, called on the main thread: it runs no step from
    then on, until `swap`, and returns the tensors in service, by the names of the layout, contiguous, to be written
    over; `swap` gets them back when they are whole.

    One whose weights lie in other processes has a method `async weight_workers()` that returns a `Part` for each, in an
    order that stays; `weight_layout` is not asked then, and `swap` is given no tensors: each process has its own.

    One that has work to do on what was staged before a swap has a method `async prepare_weights(version)`: it serves
    meanwhile, and that is no part of the pause.
    """

    def weight_layout(self) -> Layout:
        """The boxes it needs, in the dtype it wants: *every* runtime tensor, or named as derived or constant."""
        ...

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """Put the weights into service and move the engine's version, in one go (W5).

        `weights` has every entry of the layout that is sent, made on the way (scales) or derived, in the shape of its
        box, in CPU memory or on `weight_device`. Either copy them into the live tensors and return None: they are
        overwritten once this returns. Or keep them as the live tensors and return those that were live before, by the
        same names: the next version is staged in them. The pause is then that of an assignment.
        """
        ...


class SenderPort:
    """Mixin of a trainer actor. Needs `self.weight_source` before the session opens.

    The actor must not be a ReceiverPort too: both have endpoints of the same names.
    """

    weight_source: WeightSource
    _incarnation = ""
    _sending: Half[SenderTransport] | None = None
    _base: SentBase | None = None
    """What was packed last, where differences are sent."""
    _repeats: Repeats | None = None
    """What was launched for the version before, where weights lie on a GPU."""

    @endpoint
    def sync_layout(self, known: str = "") -> Side:
        """This rank's layout now; without its entries when its digest is `known`."""
        self._incarnation = self._incarnation or secrets.token_hex(8)
        layout = self.weight_source.weight_layout()
        return side_of(layout, known, device_of(self.weight_source), self._incarnation)

    @endpoint(concurrency=4)
    async def sync_host(self, spec: OpenSpec) -> str:
        """Make the meeting point of a transport (rank 0 only) and return its address."""
        await self.sync_close()
        spec = with_device(spec, device_of(self.weight_source))
        self._sending = half = Half(spec, sender_transport(spec.transport, spec.link))
        return await half.run(half.transport.host)

    @endpoint(concurrency=4)
    async def sync_open(self, spec: OpenSpec) -> Opened:
        """Join the transport that rank 0 hosts. All ranks of both sides do so at once."""
        check_layout(spec, self.weight_source.weight_layout(), f"trainer rank {spec.link.rank}")
        spec = with_device(spec, device_of(self.weight_source))
        half = self._sending
        self._base = None  # of another plan, perhaps
        self._repeats = None
        if half is None or half.spec.address or half.spec.plan_key != spec.plan_key:
            await self.sync_close()
            half = Half(spec, sender_transport(spec.transport, spec.link))
        half.spec = spec
        self._sending = half
        return await join(half, half.transport.open)

    @endpoint
    def sync_measure(self, version: int) -> list[Largest]:
        """Largest values of the blocks that reach beyond this rank's segments, for all ranks to agree on."""
        from sync.pack import measure

        layout = self.weight_source.weight_layout()
        half = opened(self._sending, "sync_measure", layout, "trainer")
        where = f"trainer rank {half.spec.link.rank}, version {version}"
        found = measure(half.spec.link.buckets, self.weight_source.weight, layout.parts, where)
        return [
            Largest(name=name, blocks=blocks, values=most.numpy().tobytes())
            for name, parts in found.items()
            for blocks, most in parts
        ]

    @endpoint
    def sync_differ(self, version: int, base: int | None, agreed: list[Largest] | None = None) -> dict[int, int]:
        """Pack a version on the host and find what differs from `base`; `sync_send` then sends that or all (BA-1).

        Returns:
            Bytes of the difference of each bucket that has a small one. When it returns the weights may change.
        """
        from sync.bases import SentBase

        half, packer = self._packing("sync_differ", version, agreed)
        if self._base is None:
            self._base = SentBase(half.spec.link.buckets)
        return self._base.prepare(version, base, packer)

    @endpoint
    def sync_send(
        self, version: int, agreed: list[Largest] | None = None, sizes: dict[int, int] | None = None
    ) -> Manifest:
        """Cast, pack, hash and hand over this rank's share. When it returns the weights may change (PO-1).

        Args:
            agreed: largest values of blocks over all ranks, where the plan has shared scales.
            sizes: buckets to send as differences, with their bytes, as `sync_differ` found them.

        Raises:
            SyncError: a weight is not finite where it is cast, or the port is not open.
            TransportError: rollout ranks don't take what was packed.
        """
        began = time.perf_counter()
        half, packer = self._packing("sync_send", version, agreed)
        prepared = self._base if self._base is not None and self._base.version == version else None
        with half.in_use, on_device(half.spec.link.device):
            for whole in half.spec.link.buckets:
                bucket = resized(whole, sizes)
                memory = half.transport.buffer(version, bucket)
                if prepared is None:
                    packer.pack(bucket, memory)
                else:
                    memory.copy_(prepared.payload(whole, whole=bucket is whole))
                half.transport.put(version, bucket)
            digests = packer.digests() if prepared is None else prepared.digests
        return Manifest(version=version, digests=digests, seconds=time.perf_counter() - began)

    def _packing(self, call: str, version: int, agreed: list[Largest] | None) -> tuple[Half[SenderTransport], Packer]:
        from sync.pack import Packer
        from sync.repeat import Repeats

        layout = self.weight_source.weight_layout()
        half = opened(self._sending, call, layout, "trainer")
        where = f"trainer rank {half.spec.link.rank}, version {version}"
        common = {item.name: (item.blocks, _values(item)) for item in agreed or ()}
        self._repeats = self._repeats or Repeats()
        return half, Packer(self.weight_source.weight, layout.parts, where, common, self._repeats)

    @endpoint(concurrency=4)
    async def sync_drain(self, version: int) -> None:
        """Wait until all that was handed over has been taken, while training may go on. Raises TransportError."""
        half = opened(self._sending, "sync_drain", self.weight_source.weight_layout(), "trainer")
        await half.run(half.transport.drain, version)

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


MAX_PARTS = 64
"""Processes that the weights of one rollout rank may lie in."""


class ReceiverPort:
    """Mixin of a rollout actor. Needs `self.weight_sink` before the session opens."""

    weight_sink: WeightSink
    weights_fenced: str = ""
    """Why this rank must not serve; empty when it may (PO-6)."""
    weights_torn: bool = True
    """Where it must not: it may hold parts of two versions. Otherwise they are whole, and too old."""
    _parts: Sequence[Part] = ()
    _staged: Mapping[int, int] = {}
    """Part -> the version that it has staged."""
    _applied: Applied | None = None
    _incarnation = ""
    """As sessions know it."""

    async def weight_parts(self) -> Sequence[Part]:
        """Where the weights of this rank lie: here, or where the engine says (PO-8)."""
        if not self._parts:
            elsewhere = getattr(self.weight_sink, "weight_workers", None)
            self._parts = [self._receiver()] if elsewhere is None else await elsewhere()
        return self._parts

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """Put verified weights into service between two decode steps and move the version with them (W5).

        Override it when the engine has a loop of its own, and return what `swap` does; the default swaps on the main
        thread, between two calls of it.
        """
        return await on_main_thread(self.weight_sink.swap, weights, version)

    def fence_weights(self, reason: str) -> None:
        """Stop serving: this rank may hold parts of two versions. Override it to refuse requests; call this too."""
        self.weights_fenced, self.weights_torn = reason, True

    async def hold_weights(self) -> None:
        """A version is about to be written over the weights in service. Override it to let requests wait meanwhile;
        `apply_weights` or `sync_close` ends that."""

    @endpoint(concurrency=MAX_PARTS)
    async def sync_layout(self, known: str = "", part: int = 0) -> Side:
        """The layout of a part now; without its entries when its digest is `known`."""
        parts = await self.weight_parts()
        side = await parts[part].describe(known)
        if part == 0:
            self._incarnation = side.incarnation
        return msgspec.structs.replace(side, parts=len(parts))

    @endpoint(concurrency=MAX_PARTS)
    async def sync_open(self, spec: OpenSpec, part: int = 0) -> Opened:
        """Join the transport that trainer rank 0 hosts. All ranks of both sides do so at once."""
        return await (await self.weight_parts())[part].open(spec)

    @endpoint(concurrency=MAX_PARTS)
    async def sync_stage(
        self, version: int, plan_key: str, sizes: dict[int, int] | None = None, base: int | None = None, part: int = 0
    ) -> Staged:
        """Fetch a version into shadow memory while decoding goes on (PO-2), and hash what lies there.

        Args:
            sizes: buckets that come as differences, with their bytes.
            base: the version that they are differences from.

        Raises:
            BaseMissing: this rank does not hold version `base`.
            SyncError: the port was opened for another plan, or a tensor is incomplete.
            TransportError: a trainer rank is gone or silent.
        """
        staged = await (await self.weight_parts())[part].stage(version, plan_key, sizes, base)
        self._staged = {**self._staged, part: version}
        return staged

    @endpoint(concurrency=4)
    async def sync_commit(self, version: int) -> Applied:
        """Put the staged version into service. Repeating it for the version in service changes nothing.

        Raises:
            SyncError: this version is not the one that was staged.
        """
        if not self._staged and self._applied is not None and self._applied.version == version:
            return self._applied
        parts, staged = await self.weight_parts(), self._staged
        self._staged = {}
        if wrong := [part for part in range(len(parts)) if staged.get(part) != version]:
            held = f"version {staged[wrong[0]]}" if wrong[0] in staged else "nothing"
            raise SyncError(f"can't commit version {version}: {held} is staged; stage it first")
        prepare = getattr(self.weight_sink, "prepare_weights", None)
        if prepare is not None:
            await prepare(version)
        began = time.perf_counter()
        taken = [part.take(version) for part in parts]
        weights = {name: tensor for one in taken for name, tensor in one.items()}
        self._applied = None
        left = await self.apply_weights(weights, version)
        for part, one in zip(parts, taken, strict=True):
            part.applied(version, one, left)
        self._applied = Applied(version=version, pause_seconds=time.perf_counter() - began)
        self.weights_fenced = ""
        return self._applied

    @endpoint(concurrency=4)
    async def sync_fence(self, version: int, reason: str, torn: str = "") -> None:
        """Stop serving until a version has been put into service through a session (PO-6).

        Args:
            torn: incarnation of the process that may hold parts of two versions; empty: the weights are too old,
                whatever process has them.
        """
        if torn and torn != self._incarnation:
            return
        if torn or not self.weights_fenced:  # else it stands, with its first reason
            self._applied = None
            self.fence_weights(f"version {version}: {reason}")
            self.weights_torn = bool(torn)

    @endpoint(concurrency=4)
    async def sync_abort(self, version: int) -> None:
        """Forget what was staged of `version` and close the port. What serves is untouched."""
        await self.sync_close()

    @endpoint(concurrency=4)
    async def sync_close(self) -> None:
        """Close the transports; the port can be opened again."""
        self._staged = {}
        await asyncio.gather(*[part.close() for part in self._parts])  # one that fails stops none of the others

    def _receiver(self) -> Receiver:
        live: Callable[[], Mapping[str, Tensor]] | None = getattr(self.weight_sink, "live_weights", None)
        if live is None:
            return Receiver(self.weight_sink)

        async def hold(version: int) -> Mapping[str, Tensor]:
            """Stop serving and take the live tensors (PO-7)."""
            self._applied = None
            await self.hold_weights()
            self.fence_weights(f"version {version} is being written over the weights in service")
            return await on_main_thread(live)

        return Receiver(self.weight_sink, hold)


def _values(item: Largest) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(item.values), dtype=torch.float32).view(item.blocks.shape)
