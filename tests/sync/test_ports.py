"""PO-1 to PO-5, the ports as plain objects in one process (AC-4)."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from sync.layout import Layout, LayoutError
from sync.plan import Bucket, make_plan
from sync.ports import Manifest, OpenSpec
from sync.transport import Link, SyncError
from tests.sync.ranks import SHAPES, ToyRollout, ToyTrainer, values


async def opened() -> tuple[ToyTrainer, ToyRollout]:
    trainer, rollout = ToyTrainer(0, 1), ToyRollout()
    plan = make_plan([trainer.layout], [rollout.layout], bucket_bytes=512)

    def spec(layout: Layout, buckets: tuple[Bucket, ...], address: str) -> OpenSpec:
        link = Link(rank=0, num_senders=1, num_sinks=1, buckets=buckets, arena_bytes=plan.arena_bytes, deadline_s=5.0)
        return OpenSpec(transport="shm", plan_key=plan.key, layout_digest=layout.digest, link=link, address=address)

    address = await trainer.sync_host(spec(trainer.layout, plan.sent_by(0), ""))
    ours = await trainer.sync_open(spec(trainer.layout, plan.sent_by(0), address))
    theirs = await rollout.sync_open(spec(rollout.layout, plan.received_by(0), address))
    assert ours.proof == theirs.proof != b""
    return trainer, rollout


async def closed(trainer: ToyTrainer, rollout: ToyRollout) -> None:
    await trainer.sync_close()
    await rollout.sync_close()


async def test_weights_go_from_one_port_to_the_other_and_a_repeated_commit_changes_nothing():
    trainer, rollout = await opened()
    trainer.version = 5
    manifest = trainer.sync_send(5)
    trainer.version = 6  # PO-1: the snapshot is taken
    await trainer.sync_push(5)
    staged = await rollout.sync_stage(5, manifest)
    assert staged.digests.keys() == manifest.digests.keys()
    assert rollout.version == -1
    applied = await rollout.sync_commit(5)
    assert rollout.version == 5
    assert all(torch.equal(rollout.weights[name], values(name, 5)) for name in SHAPES)
    assert await rollout.sync_commit(5) is applied
    await closed(trainer, rollout)


async def test_staging_runs_beside_the_event_loop():
    """PO-2"""
    trainer, rollout = await opened()
    where: list[str] = []
    assert rollout._receiving is not None
    inner = rollout._receiving.transport.fetch

    def fetch(version):
        where.append(threading.current_thread().name)
        yield from inner(version)

    rollout._receiving.transport.fetch = fetch  # type: ignore[method-assign]
    manifest = trainer.sync_send(1)
    await rollout.sync_stage(1, manifest)
    assert where[0] != threading.current_thread().name
    await closed(trainer, rollout)


async def test_only_the_staged_version_can_be_committed():
    """PO-3"""
    trainer, rollout = await opened()
    with pytest.raises(SyncError, match="can't commit version 1: nothing is staged"):
        await rollout.sync_commit(1)
    await rollout.sync_stage(1, trainer.sync_send(1))
    with pytest.raises(SyncError, match="can't commit version 2: version 1 is staged"):
        await rollout.sync_commit(2)
    assert rollout.version == -1
    await closed(trainer, rollout)


async def test_manifest_of_another_plan_or_version_is_refused():
    """W6"""
    trainer, rollout = await opened()
    manifest = trainer.sync_send(1)
    for other in (Manifest(plan_key="other", version=1, digests=manifest.digests), trainer.sync_send(2)):
        with pytest.raises(SyncError, match=r"asked to stage version 1 of plan .* got the manifest of"):
            await rollout.sync_stage(1, other)
    await closed(trainer, rollout)


async def test_stale_arena_is_not_taken_for_the_version_asked_for():
    trainer, rollout = await opened()
    old = trainer.sync_send(1)
    with pytest.raises(SyncError, match=r"trainer rank 0 has not finished packing version 3 .* stamped 1"):
        await rollout.sync_stage(3, Manifest(plan_key=old.plan_key, version=3, digests=old.digests))
    await closed(trainer, rollout)


async def test_port_that_is_not_open_says_so():
    with pytest.raises(SyncError, match="sync_send: the port is closed; open the weight session first"):
        ToyTrainer(0, 1).sync_send(1)
    with pytest.raises(SyncError, match="sync_stage: the port is closed"):
        await ToyRollout().sync_stage(1, Manifest(plan_key="", version=1, digests={}))


async def test_rank_whose_layout_moved_refuses_to_open():
    """PO-4"""
    trainer, rollout = await opened()
    assert rollout._receiving is not None
    spec = rollout._receiving.spec
    rollout.want("bfloat16")
    with pytest.raises(LayoutError, match=r"rollout rank 0: its weights have layout .* now, the plan was made for"):
        await rollout.sync_open(spec)
    await closed(trainer, rollout)


async def test_close_waits_for_the_thread_of_the_port():
    """PO-5"""
    trainer, rollout = await opened()
    manifest = trainer.sync_send(1)
    staging = asyncio.ensure_future(rollout.sync_stage(1, manifest))
    await asyncio.sleep(0)
    staging.cancel()
    await asyncio.gather(staging, return_exceptions=True)
    await closed(trainer, rollout)
    assert [t.name for t in threading.enumerate() if t.name.startswith("sync_")] == []
