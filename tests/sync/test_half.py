"""PO-5: who closes a port waits for those who use it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from torch import Tensor

from sync.messages import OpenSpec
from sync.plan import make_plan
from sync.transports.shm import Sender
from tests.sync.ranks import ToyTrainer, shm_spec, wanted


async def test_memory_of_a_transport_is_not_given_back_while_the_trainer_packs_into_it_po5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    class Slow(ToyTrainer):
        def weight(self, name: str) -> Tensor:
            if self.version:
                packing.set()
                go_on.wait(5)
                seen.append(closed.wait(0.1))
            return super().weight(name)

    def close(self: Sender) -> None:
        closed.set()
        before(self)

    before = Sender.close
    monkeypatch.setattr(Sender, "close", close)
    trainer = Slow(0, 1)
    plan = make_plan([trainer.layout], [wanted()], bucket_bytes=512)

    def spec(address: str = "") -> OpenSpec:
        return shm_spec(plan, trainer.layout.digest, plan.sent_by(0), address)

    await trainer.sync_open(spec(await trainer.sync_host(spec())))
    trainer.version = 1
    sending = asyncio.ensure_future(asyncio.to_thread(trainer.sync_send, 1))
    await asyncio.to_thread(packing.wait, 5)
    closing = asyncio.ensure_future(trainer.sync_abort(1))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(Exception, match="the transport is closed"):
        await sending
    await closing
    assert seen == [False]
    assert closed.is_set()
