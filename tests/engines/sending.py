"""Tensors of a test into a rollout rank, by the ports of both and a real transport; a session without meshes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from torch import Tensor

from sync.layout import Entry, Layout
from sync.messages import OpenSpec, Side
from sync.plan import Bucket, make_plan
from sync.ports import ReceiverPort, SenderPort
from sync.transport import Link


class Sender(SenderPort):
    """A trainer rank that holds all of it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.layout = Layout(tuple(Entry.whole(n, t.shape, str(t.dtype)[6:]) for n, t in weights.items()))
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


async def sides_of(rank: ReceiverPort) -> list[Side]:
    first = await rank.sync_layout()
    return [first, *[await rank.sync_layout("", part) for part in range(1, first.parts)]]


async def put(rank: ReceiverPort, weights: Mapping[str, Tensor], version: int) -> None:
    """Into service. Raises LayoutError if they don't fit."""
    sender, sides = Sender(weights), await sides_of(rank)
    layouts = [side.layout for side in sides if side.layout is not None]
    plan = make_plan([sender.layout], layouts, bucket_bytes=1 << 20)

    def spec(number: int, digest: str, buckets: tuple[Bucket, ...], address: str = "") -> OpenSpec:
        link = Link(
            rank=number,
            num_senders=1,
            num_sinks=len(sides),
            buckets=buckets,
            slots=len(plan.buckets),
            slot_bytes=plan.largest_bucket,
            deadline_s=20.0,
        )
        return OpenSpec(transport="shm", plan_key=plan.key, layout_digest=digest, link=link, address=address)

    mine = spec(0, sender.layout.digest, plan.sent_by(0))
    address = await sender.sync_host(mine)
    theirs = [spec(n, side.digest, plan.received_by(n), address) for n, side in enumerate(sides)]
    opening = [rank.sync_open(one, part) for part, one in enumerate(theirs)]
    opened = await asyncio.gather(sender.sync_open(msgspec.structs.replace(mine, address=address)), *opening)
    assert len({one.proof for one in opened}) == 1, opened
    packed = sender.sync_send(version)
    for staged in await asyncio.gather(*[rank.sync_stage(version, plan.key, None, None, p) for p in range(len(sides))]):
        assert all(packed.digests[bucket] == digests for bucket, digests in staged.digests.items())
    await rank.sync_commit(version)
    await asyncio.gather(sender.sync_close(), rank.sync_close())
