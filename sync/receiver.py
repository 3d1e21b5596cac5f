"""The receiving half of one part of a rollout rank: a plain object in the process whose weights it brings.

    describe -> open -> stage -> take -> (the engine's swap) -> applied        or close, at any time

RC-1: a version is taken only if it is the one that was staged last, whole. Before it, nothing that serves was touched.
RC-2: one thread moves bytes; close wakes it, waits for it, and leaves no transfer behind: also of a port that is being
      opened, which stays closed then.
RC-3: the port is open for one plan, made for the layout that the sink has now; else it refuses (W6).
RC-4: what the engine hands back is staged in next; until the GPU has done with it (`busy_until`) it is not written.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sync.devices import free_bytes, side_stream
from sync.half import Half, check_layout, join, opened, side_of, weight_device, with_device
from sync.messages import Opened, OpenSpec, PortClosed, Side, Staged
from sync.transport import TRANSPORTS, ReceiverTransport, SyncError, receiver_transport

if TYPE_CHECKING:
    from torch import Tensor

    from sync.bases import HeldBase
    from sync.layout import Layout
    from sync.repeat import Repeats
    from sync.shadow import Shadow

__all__ = ["Part", "Receiver", "Wanting"]


class Wanting(Protocol):
    """What a receiver asks of the engine: which boxes it wants, and (`weight_device`, optional) where."""

    def weight_layout(self) -> Layout: ...


class Part(Protocol):
    """A receiver, here or in another process (`sync.relay`). The calls are those of the session."""

    async def describe(self, known: str) -> Side:
        """What it wants; without its entries when their digest is `known`."""
        ...

    async def open(self, spec: OpenSpec) -> Opened:
        """Join the transport that trainer rank 0 hosts."""
        ...

    async def stage(self, version: int, plan_key: str, sizes: dict[int, int] | None, base: int | None) -> Staged:
        """Fetch a version into shadow memory, and hash what lies there."""
        ...

    async def close(self) -> None:
        """Forget what is staged and close the transport; it can be opened again."""
        ...

    def take(self, version: int) -> Mapping[str, Tensor]:
        """The staged tensors, for the swap; none where they lie in another process, whose swap takes them there."""
        ...

    def applied(self, version: int, weights: Mapping[str, Tensor], left: Mapping[str, Tensor] | None) -> None:
        """They are in service; `left` is what the engine handed back."""
        ...


class Receiver:
    """A `Part` in this process.

    Args:
        sink: the engine.
        hold: stops it and returns its live tensors, where it can be written in place.
        place: device that staged tensors are brought to before they count as staged; "" leaves them where the transport
            has its memory.
    """

    def __init__(
        self,
        sink: Wanting,
        hold: Callable[[int], Awaitable[Mapping[str, Tensor]]] | None = None,
        place: str = "",
    ) -> None:
        self._sink = sink
        self._hold = hold
        self._place = place
        self._incarnation = secrets.token_hex(8)
        self.half: Half[ReceiverTransport] | None = None
        self.shadow: Shadow | None = None
        """What is staged."""
        self.held: HeldBase | None = None
        """What is in service, as it came, where differences are received."""
        self.busy_until: Any = None
        """Event of the GPU after which nothing reads what was handed back; None: when all that it was told is done."""
        self._spare: Mapping[str, Tensor] | None = None
        """Memory that the next version is staged in."""
        self._passed: Mapping[str, Tensor] = {}
        """Memory of the host that a version comes through on its way to `place`."""
        self._in_place = False
        """What is staged lies in the live tensors."""
        self._repeats: Repeats | None = None
        """How buckets were stored before, since the port was opened."""

    async def describe(self, known: str) -> Side:
        device = weight_device(self._sink)
        spare = sum(tensor.nbytes for tensor in (self._spare or {}).values())
        return side_of(
            self._sink.weight_layout(),
            known,
            device,
            self._incarnation,
            in_place=self._hold is not None,
            room_bytes=-1 if free_bytes(device) < 0 else free_bytes(device) + spare,
        )

    async def open(self, spec: OpenSpec) -> Opened:
        where = f"rollout rank {spec.link.rank}"
        check_layout(spec, self._sink.weight_layout(), where)
        spec = with_device(spec, weight_device(self._sink))
        half = Half(spec, receiver_transport(spec.transport, spec.link))
        before, self.half = self.half, half
        if before is not None:
            await before.close()
        if self.half is not half:
            raise PortClosed(f"{where}: the port was closed while it was opened; open the session again")
        self._reclaim()
        self._in_place = spec.in_place
        self._repeats = None
        return await join(half, half.transport.open)

    async def stage(self, version: int, plan_key: str, sizes: dict[int, int] | None, base: int | None) -> Staged:
        from sync.bases import HeldBase
        from sync.batch import Digest
        from sync.pack import to_ints
        from sync.repeat import Repeats
        from sync.shadow import Shadow

        layout = self._sink.weight_layout()
        half = opened(self.half, "sync_stage", layout, "rollout")
        where = f"rollout rank {half.spec.link.rank}"
        if plan_key != half.spec.plan_key:
            raise SyncError(
                f"{where}: asked to stage version {version} of plan {plan_key[:12]}, the port is open for plan "
                f"{half.spec.plan_key[:12]}; open the session again"
            )
        self._reclaim()
        spare = await self._held_live(version, where) if half.spec.in_place else self._spare
        through_host = self._place not in ("", "cpu") and TRANSPORTS[half.spec.transport].device == "cpu"
        room = self._passed if through_host else spare
        self._repeats = self._repeats or Repeats()
        shadow = Shadow(layout, version, where, room, in_place=half.spec.in_place, repeats=self._repeats)
        began = time.perf_counter()

        def fetch() -> dict[int, tuple[int, ...]]:
            with side_stream(half.spec.link.device, self.busy_until):
                found: dict[int, list[Digest]] = {}
                fetched = half.transport.fetch(version, sizes)
                if sizes:
                    held = self.held or HeldBase()
                    fetched = held.rebuilt(fetched, {b.index: b for b in half.spec.link.buckets}, base, layout)
                for bucket, memory in fetched:
                    found[bucket.index] = shadow.add(bucket, memory)
                if through_host:
                    self._passed = shadow.moved(self._place, spare or {})
                return to_ints(found)

        digests = await half.run(fetch)
        shadow.check_complete()
        self.shadow = shadow
        return Staged(version=version, digests=digests, seconds=time.perf_counter() - began)

    async def close(self) -> None:
        half, self.half = self.half, None
        if half is not None:
            await half.close()
        self._reclaim()

    def take(self, version: int) -> Mapping[str, Tensor]:
        shadow = self.shadow
        if shadow is None or shadow.version != version:  # late, perhaps: what is staged stays
            held = "nothing" if shadow is None else f"version {shadow.version}"
            raise SyncError(f"can't commit version {version}: {held} is staged; stage it first")
        self.shadow = self._spare = None
        return shadow.weights()

    def applied(self, version: int, weights: Mapping[str, Tensor], left: Mapping[str, Tensor] | None) -> None:
        from sync.bases import HeldBase

        self._spare = None if self._in_place else left or weights
        self.held = HeldBase()
        self.held.keep(version, weights)

    def _reclaim(self) -> None:
        """Forget what is staged; its memory serves the next version."""
        shadow, self.shadow = self.shadow, None
        if shadow is not None and not self._in_place:
            self._spare = shadow.weights()

    async def _held_live(self, version: int, where: str) -> Mapping[str, Tensor]:
        if self._hold is None:
            raise SyncError(f'{where}: its engine can\'t be written in place; set [sync] shadow = "full"')
        self._spare = None
        return await self._hold(version)
