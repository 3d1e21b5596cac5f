"""What is staged for an engine on a device of its own, by a transport that has memory of the host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from sync.half import Half
from sync.layout import Layout
from sync.messages import OpenSpec, PortClosed
from sync.plan import Bucket, make_plan
from sync.receiver import Receiver
from sync.transport import Link, ReceiverTransport, SyncError, TransportError
from tests.sync.ranks import SHAPES, ToyTrainer, shm_spec, wanted


class Sink:
    def weight_layout(self) -> Layout:
        return wanted()


async def test_what_comes_through_the_host_is_staged_on_the_device_in_memory_that_is_used_again() -> None:
    trainer, receiver = ToyTrainer(0, 1), Receiver(Sink(), place="meta")
    plan = make_plan([trainer.layout], [wanted()], bucket_bytes=512)

    address = await trainer.sync_host(shm_spec(plan, trainer.layout.digest, plan.sent_by(0)))
    await trainer.sync_open(shm_spec(plan, trainer.layout.digest, plan.sent_by(0), address))
    await receiver.open(shm_spec(plan, wanted().digest, plan.received_by(0), address))
    before: tuple[list[int], list[int]] = ([], [])
    for version in (1, 2, 3):
        trainer.version = version
        manifest = trainer.sync_send(version)
        staged = await receiver.stage(version, plan.key, None, None)
        assert staged.digests == manifest.digests
        with pytest.raises(SyncError, match=f"can't commit version 0: version {version} is staged"):
            receiver.take(0)  # of a commit that was given up; nothing is lost by it
        weights = receiver.take(version)
        assert {weights[name].device.type for name in SHAPES} == {"meta"}
        now = ([id(weights[n]) for n in SHAPES], [t.data_ptr() for t in receiver._passed.values()])
        assert before in (([], []), now)
        before = now
        receiver.applied(version, weights, None)
    with pytest.raises(SyncError, match="can't commit version 4: nothing is staged"):
        receiver.take(4)
    await receiver.close()
    await trainer.sync_close()
    assert torch.equal(next(iter(receiver._passed.values())), trainer.weight(next(iter(receiver._passed))))


async def test_a_transport_that_does_not_close_leaves_no_thread() -> None:
    class Stuck(ReceiverTransport):
        def open(self, address: str) -> bytes:
            raise NotImplementedError

        def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
            raise NotImplementedError

        def abort(self) -> None:
            pass

        def close(self) -> None:
            raise TransportError("its memory can't be given back")

    link = Link(rank=0, num_senders=1, num_sinks=1, buckets=(), slots=1, slot_bytes=64, deadline_s=1.0)
    half = Half(OpenSpec(transport="shm", plan_key="", layout_digest="", link=link), Stuck(link))
    with pytest.raises(TransportError, match="can't be given back"):
        await half.close()
    (thread,) = half._pool._threads
    thread.join(5)
    assert not thread.is_alive()


async def test_a_port_that_is_closed_while_it_is_opened_again_stays_closed_rc2() -> None:
    receiver, go_on = Receiver(Sink()), threading.Event()
    plan = make_plan([wanted()], [wanted()], bucket_bytes=512)
    spec = shm_spec(plan, wanted().digest, plan.received_by(0), "/proc/1/fd/999")
    await receiver.open(spec)
    assert receiver.half is not None
    working = asyncio.ensure_future(receiver.half.run(go_on.wait, 5))  # what closing it waits for
    opening = asyncio.ensure_future(receiver.open(spec))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(receiver.close())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(working, closing)
    with pytest.raises(PortClosed, match="closed while it was opened"):
        await opening
    assert receiver.half is None
