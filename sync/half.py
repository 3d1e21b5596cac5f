"""What both halves of a port share: a transport with the thread that works for it, and what a rank says of itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from sync.devices import on_device
from sync.layout import Layout
from sync.messages import LayoutMoved, Opened, OpenSpec, PortClosed, Side
from sync.transport import ReceiverTransport, SenderTransport, TransportError

if TYPE_CHECKING:
    from sync.ports import WeightSource

__all__ = ["Half", "check_layout", "device_of", "join", "opened", "side_of", "weight_device", "with_device"]

T = TypeVar("T")
TransportT = TypeVar("TransportT", SenderTransport, ReceiverTransport)


class Half(Generic[TransportT]):
    """A transport with the one thread that works for it (PO-5)."""

    def __init__(self, spec: OpenSpec, transport: TransportT) -> None:
        self.spec = spec
        self.transport: TransportT = transport
        self.in_use = threading.Lock()
        """Held by another thread while it is in calls of the transport, or in memory that it gave (PO-5)."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run in the thread, behind whatever it does now. Cancelling stops the waiting; `close` stops the work."""

        def on_its_device() -> T:
            with on_device(self.spec.link.device):
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._pool, on_its_device)

    async def close(self) -> None:
        """Wake the thread, wait until it has let go (bounded by the deadline of its transfers), free everything."""
        self.transport.abort()
        try:
            await self.run(self._close)
        except BaseException:  # also where nobody waits any more: the thread ends when it has closed
            self._pool.shutdown(wait=False)
            raise
        self._pool.shutdown()  # idle by now: it only joins the thread

    def _close(self) -> None:
        with self.in_use:
            self.transport.close()


async def join(half: Half[SenderTransport] | Half[ReceiverTransport], join: Callable[[str], bytes]) -> Opened:
    try:
        proof = await half.run(join, half.spec.address)
    except TransportError as error:
        return Opened(plan_key=half.spec.plan_key, refused=str(error))
    return Opened(plan_key=half.spec.plan_key, proof=proof)


def opened(half: Half[TransportT] | None, call: str, layout: Layout, side: str) -> Half[TransportT]:
    if half is None:
        raise PortClosed(f"{call}: the port is closed; open the weight session first")
    check_layout(half.spec, layout, f"{side} rank {half.spec.link.rank}")
    return half


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def check_layout(spec: OpenSpec, layout: Layout, where: str) -> None:
    if layout.digest != spec.layout_digest:
        raise LayoutMoved(
            f"{where}: its weights have layout {layout.digest[:12]} now, the plan was made for "
            f"{spec.layout_digest[:12]}; open the weight session again"
        )


def side_of(
    layout: Layout, known: str, device: str, incarnation: str, *, in_place: bool = False, room_bytes: int = -1
) -> Side:
    """What a rank, or a part of one, tells about itself."""
    digest = layout.digest
    return Side(
        digest=digest,
        layout=None if digest == known else layout,
        host=_host(),
        device="cuda" if device.startswith("cuda") else "cpu",
        incarnation=incarnation,
        in_place=in_place,
        room_bytes=room_bytes,
    )


def device_of(source: WeightSource) -> str:
    """Device of the first weight that is not empty."""
    for entry in source.weight_layout().entries:
        if not entry.box.is_empty:
            weight = source.weight(entry.name)
            first = weight[0] if isinstance(weight, Sequence) else weight
            return str(first.device)
    return "cpu"


def weight_device(sink: object) -> str:
    return str(getattr(sink, "weight_device", "cpu"))


def with_device(spec: OpenSpec, device: str) -> OpenSpec:
    return msgspec.structs.replace(spec, link=msgspec.structs.replace(spec.link, device=device))
