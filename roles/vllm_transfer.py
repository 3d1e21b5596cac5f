"""New weights by vLLM's own engines, in place of `sync.session.WeightSession`: `publish(version)`, from the controller.

    trainer ranks   transfer_send: gather tensor after tensor; rank 0 hands them to vLLM's sending half
    session         what that asks of the engines, to all of them, and their answer back
    rollout ranks   transfer_hold, then transfer_take: decoding stands still, vLLM's loaders write over what serves

VT-1: nothing is staged. A version that does not come whole leaves every rank that had begun fenced: it is started anew
      and sent all of the weights (`Rollout.watch`); no token is sampled from parts of two versions.
VT-2: one broadcast goes to all rollout ranks: when one is lost the others are as well, and all are started anew. None
      goes back to the version before.
VT-3: each phase (join, hold, take) ends within `deadline_s` plus GRACE_S; the trainer is freed, whoever is at fault.
VT-4: after a failure, and where ranks were started anew, the ranks meet again before the next version.
VT-5: what vLLM loads is checked against what the trainer has when they meet, by name and shape. Bytes are not hashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Literal, TypeVar

from roles.vllm_transfer_ports import Asked, Receiving, TransferSpec
from runtime import ActorMesh, ProcessDied, Stopped, TuttiError
from sync.config import Commit, SyncConfig
from sync.fleet import Rank, first_line, together
from sync.opening import GRACE_S
from sync.transport import SyncError

__all__ = ["OPEN_S", "VllmTransfer", "transfer_problems"]

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 60.0
"""How much longer joining may take than a version: the trainer imports vLLM, communicators are made."""


class VllmTransfer:
    """The transfer of weights between two meshes of actors. A `roles.publish.Delivery`.

    Args:
        senders: trainer ranks.
        receivers: rollout ranks whose engines take weights in this way.
        way: vLLM's engine.
        config: `deadline_s` and `interface` of it; `transfer_problems` names what else is refused.
    """

    def __init__(
        self, senders: ActorMesh, receivers: ActorMesh, way: Literal["nccl", "ipc"], config: SyncConfig | None = None
    ) -> None:
        self.config = config or SyncConfig()
        self.way: Literal["nccl", "ipc"] = way
        self._mesh = senders
        self._senders = Rank.all_of(senders, "trainer")
        self._receivers = Rank.all_of(receivers, "rollout")
        self._spec: TransferSpec | None = None
        """Of the ranks that have met; None when they have not."""
        self._offsets: list[int] = []
        """First rank of each replica in the communicator."""
        self._last: Commit | None = None

    def over(self, receivers: ActorMesh) -> VllmTransfer:
        """The same way to other rollout ranks. Close this one before."""
        return VllmTransfer(self._mesh, receivers, self.way, self.config)

    async def open(self) -> None:
        """Compare what both sides have, and let them meet; nothing if that is done.

        Raises:
            LayoutError: the trainer lacks tensors that the engines load.
            SyncError: they have not met.
        """
        if self._spec is not None:
            return
        seconds = self.config.deadline_s + OPEN_S
        asking = (rank.call("transfer_layout", timeout=seconds) for rank in self._receivers)
        found: list[Receiving] = await together(asking)
        if len({one.layout.digest for one in found}) > 1 or any(one.way != self.way for one in found):
            raise SyncError("rollout ranks load different models, or take weights in different ways; give all one job")
        self._offsets = [1 + sum(one.workers for one in found[:rank]) for rank in range(len(found))]
        address, port = await self._senders[0].call(
            "transfer_address", self.config.interface, timeout=self.config.deadline_s
        )
        spec = TransferSpec(
            way=self.way,
            wanted=found[0].layout.entries,
            address=address,
            port=port,
            world=1 + sum(one.workers for one in found),
            deadline_s=seconds,
        )
        await self._to_trainer("transfer_open", spec, timeout=seconds)
        joining = self._senders[0].call("transfer_join", spec, timeout=seconds + GRACE_S)
        await self._carried(joining, "the ranks have not met", 0, seconds)
        self._spec = spec
        log.info("weights travel by vLLM's %s: %d tensors, %d ranks", self.way, len(spec.wanted), spec.world)

    async def publish(self, version: int) -> Commit:
        """Bring the trainer's weights, as they are now, into service on every rollout rank.

        Raises:
            SyncError: it has not come to all of them (VT-1, VT-2). The error that caused it is its `__cause__`.
            LayoutError: as `open`.
        """
        if self._last is not None and version == self._last.version:
            return self._last
        began = time.perf_counter()
        await self.open()
        assert self._spec is not None
        seconds, failed = self.config.deadline_s, f"version {version} was not published"
        holding = together(rank.call("transfer_hold", version, timeout=seconds) for rank in self._receivers)
        async with self._all_or_anew(failed):
            await holding
        sending = self._to_trainer("transfer_send", version, timeout=seconds + GRACE_S)
        took, pauses = await self._carried(sending, failed, version, seconds)
        self._last = Commit(
            version=version,
            bytes=sum(entry.num_bytes for entry in self._spec.wanted),
            wire_bytes=sum(entry.num_bytes for entry in self._spec.wanted),
            seconds=time.perf_counter() - began,
            pack_seconds=max(took),
            stage_seconds=0.0,
            pause_seconds=max(pauses),
            transport=self.way,
        )
        return self._last

    async def close(self) -> None:
        """Leave the communicator. What is in service stays; ranks that hold calls back let them go on."""
        self._spec = self._last = None
        await self._let_go()

    # --- between the two sides ----------------------------------------------------------------------------------------

    async def _carried(
        self, sending: Coroutine[Any, Any, T], failed: str, version: int, seconds: float
    ) -> tuple[T, list[float]]:
        """Both sides at once: what the sending half asks for is done by all engines; returns what both say."""
        sent = asyncio.ensure_future(sending)
        async with self._all_or_anew(failed, sent):
            sender = self._senders[0]
            asked: Asked = await _unless(sent, sender.call("transfer_asked", timeout=seconds))
            ranks = range(len(self._receivers))
            answers = await _unless(sent, together(self._put(asked, index, version, seconds) for index in ranks))
            await sender.call("transfer_answer", timeout=seconds)
            return await asyncio.shield(sent), answers

    async def _put(self, asked: Asked, index: int, version: int, seconds: float) -> float:
        """To one rollout rank; returns how long it paused."""
        rank = self._receivers[index]
        if asked.call == "join":
            info = asked.info if self.way == "ipc" else {**asked.info, "rank_offset": self._offsets[index]}
            await rank.call("transfer_meet", info, timeout=seconds)
            return 0.0
        applied = await rank.call("transfer_take", version, asked.info, timeout=seconds)
        return float(applied.pause_seconds)

    @contextlib.asynccontextmanager
    async def _all_or_anew(self, failed: str, sent: asyncio.Future[Any] | None = None) -> AsyncIterator[None]:
        """What fails inside, or is given up, leaves nobody waiting, and the ranks meet again (VT-3, VT-4)."""
        try:
            yield
        except BaseException as error:
            self._spec = self._last = None
            await asyncio.shield(asyncio.ensure_future(self._let_go(sent)))
            if isinstance(error, TuttiError | SyncError):
                raise SyncError(f"{failed}: {first_line(error)}. Rollout ranks that had begun don't serve") from error
            raise

    async def _let_go(self, sent: asyncio.Future[Any] | None = None) -> None:
        """Free the trainer of whom it waits for, and the calls that wait on rollout ranks (VP-1)."""

        async def tell(rank: Rank, call: str) -> None:
            try:
                await rank.call(call, timeout=2 * GRACE_S)
            except (ProcessDied, Stopped):
                return  # a process that is gone waits for nobody
            except (TuttiError, SyncError) as error:
                log.warning("%s could not be told of the end of a transfer: %s", rank, first_line(error))

        await tell(self._senders[0], "transfer_stop")
        await together(tell(rank, "sync_close") for rank in self._receivers)
        if sent is not None:  # its calls have deadlines
            await asyncio.wait([sent])
            sent.cancelled() or sent.exception()  # told already, or for want of the engines

    async def _to_trainer(self, call: str, *args: object, timeout: float) -> list[Any]:
        """To all of its ranks, each to its end: none is left alone in a collective (VP-2). Raises the first error."""
        calls = [rank.call(call, *args, timeout=timeout) for rank in self._senders]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


async def _unless(ended: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; what has ended before it raises."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            ended.result()
            raise SyncError("the trainer's half of the transfer has ended before the engines'")
        return working.result()
    finally:
        working.cancel()
        await asyncio.wait([working])


def transfer_problems(way: str, config: SyncConfig) -> list[str]:
    """Settings of `[sync]` that vLLM's own ways can't keep, one text each."""
    why = {
        "transport": "the way is that of rollout.vllm.weight_transfer",
        "bucket_bytes": "vLLM sends whole tensors",
        "slots": "vLLM sends whole tensors",
        "quorum": "one broadcast reaches all replicas or none",
        "max_behind": "no replica stays behind: all take each version",
        "differences": "vLLM sends all of the weights",
        "shadow": "nothing is staged: versions are written over the weights in service",
    }
    plain = SyncConfig()
    return [
        f"sync.{name} = {getattr(config, name)!r} with rollout.vllm.weight_transfer = {way!r}: {reason}; leave one of "
        "the two out"
        for name, reason in why.items()
        if getattr(config, name) != getattr(plain, name)
    ]
