"""The two actor halves of vLLM's own weight transfer, on trainer and rollout ranks; `vllm_transfer.py` stands between.

    trainer rank 0   vLLM's sending half --> Client ..waits..        its broadcast, or handles of its CUDA memory
                                               | transfer_asked   ^ transfer_answer
    session                                    '--> to all -------'
    rollout rank     transfer_meet, transfer_take: a call of vLLM's workers, so between two steps

VP-1: the sending half runs on the trainer's main thread, as all that touches its weights. What it says to the engines
      goes through the session: it waits for nobody longer than the deadline, and `transfer_stop` ends its waiting.
VP-2: ranks of a trainer gather tensor after tensor to the last, whatever goes wrong with the engines: none is left
      alone in a collective.
VP-3: a rollout rank is fenced before the first byte is written over its weights, until the version is whole; a call
      that fails or is given up leaves it fenced.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from runtime import endpoint
from sync.devices import on_device
from sync.half import device_of
from sync.layout import Entry, Layout
from sync.messages import Applied
from sync.transport import SyncError

if TYPE_CHECKING:
    from roles.whole_weights import WholeWeights
    from sync.ports import WeightSource

__all__ = ["Asked", "Receiving", "TransferReceiver", "TransferSender", "TransferSpec"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Way = Literal["nccl", "ipc"]

STOPPED = "the transfer was stopped"


class TransferSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What trainer ranks must know of a transfer."""

    way: Way
    wanted: tuple[Entry, ...]
    """Each tensor that engines load, whole, in the order in which it is sent and the dtype that they want."""
    address: str = ""
    port: int = 0
    world: int = 1
    """Ranks of the communicator: the sender and all workers of the engines."""
    deadline_s: float = 60.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's sending half says to the engines."""

    call: Literal["join", "take"]
    info: dict[str, Any]


class Receiving(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout rank says of itself."""

    layout: Layout
    workers: int
    way: str


# --- trainer ----------------------------------------------------------------------------------------------------------


class TransferSender:
    """Mixin of a trainer actor. Needs `self.weight_source` before the session opens."""

    weight_source: WeightSource
    _source: Source | None = None
    _transfer: _Transfer | None = None
    _leads = False
    """Whether this rank is the one that sends."""

    @endpoint
    def transfer_open(self, spec: TransferSpec) -> None:
        """Agree with the other ranks on who has what. Raises LayoutError on all of them (WH-2)."""
        from roles.whole_weights import WholeWeights

        weights = WholeWeights(self.weight_source.weight_layout(), self._views)
        weights.check(spec.wanted)
        self._source = Source(weights, spec.wanted)
        self._leads = False

    @endpoint(concurrency=4)
    async def transfer_address(self, interface: str) -> tuple[str, int]:
        """Where the engines meet this rank. vLLM wants a number before it listens: a port that is free now."""
        from sync.transports.store import address_of

        address = address_of(interface)
        with socket.create_server((address, 0)) as free:
            return address, int(free.getsockname()[1])

    @endpoint(concurrency=4)
    async def transfer_join(self, spec: TransferSpec) -> None:
        """Make vLLM's sending half and let the engines join it (rank 0 only)."""
        await self.transfer_stop()
        assert self._source is not None
        self._leads = True
        self._transfer = transfer = _Transfer(spec, asyncio.get_running_loop())
        await transfer.join(self._source, device_of(self.weight_source))

    @endpoint(concurrency=4)
    async def transfer_asked(self) -> Asked:
        """The next thing that the sending half asks of the engines."""
        return await self._joined().client.asked.get()

    @endpoint(concurrency=4)
    async def transfer_answer(self) -> None:
        """All engines have done it."""
        self._joined().client.answer("")

    @endpoint
    def transfer_send(self, version: int) -> float:
        """Send the weights as they are now; returns the seconds. When it returns they may change.

        Raises:
            SyncError: the engines have failed, or the transfer was stopped.
        """
        began = time.perf_counter()
        assert self._source is not None
        if self._transfer is not None:
            self._transfer.send(version)
        else:
            for _ in self._source:  # VP-2
                pass
            if self._leads:
                raise SyncError(f"version {version} was not sent: the transfer was stopped; open the session again")
        return time.perf_counter() - began

    @endpoint(concurrency=4)
    async def transfer_stop(self) -> None:
        """End the transfer under way, if any, and leave the communicator."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.stop()

    def _joined(self) -> _Transfer:
        if self._transfer is None:
            raise SyncError("the transfer was stopped; open the session again")
        return self._transfer

    def _views(self, name: str) -> Any:
        import torch

        found = self.weight_source.weight(name)
        return [found] if isinstance(found, torch.Tensor) else found


class Source:
    """What vLLM's sending half reads: whole tensors, one at a time. On ranks but the first they are None."""

    def __init__(self, weights: WholeWeights, wanted: tuple[Entry, ...]) -> None:
        import torch

        self._weights = weights
        self._wanted = [(entry.name, getattr(torch, entry.dtype), entry.shape) for entry in wanted]

    def metadata(self) -> list[Meta]:
        return [Meta(*one) for one in self._wanted]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, dtype, _ in self._wanted:
            yield name, self._weights.whole(name, dtype)


class Meta(msgspec.Struct, frozen=True):
    """Of one tensor, in vLLM's words."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class _Transfer:
    """vLLM's sending half on trainer rank 0, and what keeps it from waiting for ever."""

    def __init__(self, spec: TransferSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self.client = Client(spec.deadline_s, loop)
        self._engine: Any = None
        self._device = "cpu"
        self._stopped = loop.create_future()

    async def join(self, source: Source, device: str) -> None:
        """In a thread that is left to itself when this is given up: vLLM's meeting point waits for up to 300 s."""
        self._device = device

        def make() -> Any:
            from roles.vllm_compat import weight_sender

            with on_device(device):
                engine = weight_sender(self._spec, self.client, source)
                if self._stopped.done():
                    _leave(engine)
                return engine

        made = _in_thread(make)
        await asyncio.wait([made, self._stopped], return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise SyncError(STOPPED)
        self._engine = made.result()

    def send(self, version: int) -> None:
        with on_device(self._device):
            _synchronize(self._device)  # vLLM reads on streams of its own what the optimizer has written
            self.client.failure = ""
            self._engine.send_weights()
            _synchronize(self._device)
        if self.client.failure or self._stopped.done():
            raise SyncError(f"version {version} was not taken by all engines: {self.client.failure or STOPPED}")

    async def stop(self) -> None:
        self._stopped.set_result(None)
        self.client.stop()
        if self._engine is not None:
            await _in_thread(lambda: _leave(self._engine))


class Client:
    """How vLLM's sending half calls its engines, from any thread.

    `update_weights` raises nothing: what the engines say is looked at when the sending half has come to its end (VP-2).
    """

    def __init__(self, deadline_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.failure = ""
        self._deadline_s = deadline_s
        self._loop = loop
        self._waiting: Future[str] | None = None
        self._stopped = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if failure := self._say(Asked(call="join", info=init_info)):
            raise SyncError(failure)

    def start_weight_update(self) -> None:
        """Starting, taking and finishing are one call of the engines, so that no step comes in between."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.failure = self._say(Asked(call="take", info=as_plain(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As `start_weight_update`."""

    def answer(self, failure: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(failure)

    def stop(self) -> None:
        self._stopped = True
        self.answer(STOPPED)

    def _say(self, what: Asked) -> str:
        """Returns what went wrong with it."""
        answer: Future[str] = Future()

        def say() -> None:
            self._waiting = answer
            if self._stopped:
                self.answer(STOPPED)
            else:
                self.asked.put_nowait(what)

        self._loop.call_soon_threadsafe(say)
        try:
            return answer.result(self._deadline_s)
        except TimeoutError:
            return f"the engines did not answer within {self._deadline_s:g} s"


def as_plain(update: Mapping[str, Any]) -> dict[str, Any]:
    """What can go over any wire. Handles of CUDA memory are pickled, in the way that vLLM has for it."""
    plain = {name: value for name, value in update.items() if value is not None}
    if handles := plain.pop("ipc_handles", None):
        plain["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
    return plain


def _leave(engine: Any) -> None:
    """Abort the communicator: kernels that wait for engines end, and what is told to it later is nothing."""
    group = getattr(engine, "model_update_group", None)
    if group is not None:
        group.broadcast = lambda *args, **options: None  # what the main thread may tell it yet
        group.destroy()


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread that nothing waits for when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # told to whoever waits
            error = raised
        loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return done


# --- rollout ----------------------------------------------------------------------------------------------------------


class TransferReceiver:
    """Mixin of a rollout actor, in front of `sync.ports.ReceiverPort`, whose `hold_weights`, `sync_close` and fence are
    meant where they are named."""

    if TYPE_CHECKING:

        @property
        def transfer_engine(self) -> Any:
            """The engine that takes weights in this way. Raises SyncError when there is none."""

        async def hold_weights(self) -> None: ...

        def fence_weights(self, reason: str) -> None: ...

        async def put_weights(self, put: Callable[[], Awaitable[T]]) -> T:
            """Put them into service by this call, in the way that the job chose."""

    @endpoint(concurrency=4)
    async def transfer_layout(self) -> Receiving:
        """What this rank loads. Raises SyncError where its engine takes weights in another way."""
        engine = self.transfer_engine
        return Receiving(layout=engine.weight_layout(), workers=engine.num_workers, way=engine.weight_transfer)

    @endpoint(concurrency=4)
    async def transfer_meet(self, info: dict[str, Any]) -> None:
        """Join the sending half; all at once. vLLM's workers stand still until all are there."""
        try:
            await self.transfer_engine.join(info)
        except BaseException as error:  # its workers may wait for ever by now
            self.fence_weights(f"it did not join the transfer of weights: {error or type(error).__name__}")
            raise

    @endpoint(concurrency=4)
    async def transfer_hold(self, version: int) -> None:
        """Let new calls wait, and see to what runs as `[rollout] update` says; `sync_close` ends it."""
        await self.hold_weights()

    @endpoint(concurrency=4)
    async def transfer_take(self, version: int, info: dict[str, Any]) -> Applied:
        """Take a version over the weights in service (VP-3)."""
        began = time.perf_counter()
        self.fence_weights(f"version {version} was being written over the weights in service")
        await self.put_weights(lambda: self.transfer_engine.receive(info, version))
        return Applied(version=version, pause_seconds=time.perf_counter() - began)
