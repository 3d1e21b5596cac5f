"""PO-1 to PO-6, the ports as plain objects in one process (AC-4)."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from sync.layout import Layout, LayoutError
from sync.messages import LayoutMoved
from sync.plan import make_plan
from sync.transport import SyncError
from tests.sync.ranks import SHAPES, ToyRollout, ToyTrainer, shm_spec, values


async def opened() -> tuple[ToyTrainer, ToyRollout]:
    trainer, rollout = ToyTrainer(0, 1), ToyRollout()
    plan = make_plan([trainer.layout], [rollout.layout], bucket_bytes=512)

    address = await trainer.sync_host(shm_spec(plan, trainer.layout.digest, plan.sent_by(0)))
    ours = await trainer.sync_open(shm_spec(plan, trainer.layout.digest, plan.sent_by(0), address))
    theirs = await rollout.sync_open(shm_spec(plan, rollout.layout.digest, plan.received_by(0), address))
    assert ours.proof == theirs.proof != b""
    return trainer, rollout


def key_of(rollout: ToyRollout) -> str:
    assert rollout.receiver.half is not None
    return rollout.receiver.half.spec.plan_key


async def closed(trainer: ToyTrainer, rollout: ToyRollout) -> None:
    await trainer.sync_close()
    await rollout.sync_close()


async def test_weights_go_from_one_port_to_the_other_and_a_repeated_commit_changes_nothing():
    trainer, rollout = await opened()
    trainer.version = 5
    manifest = trainer.sync_send(5)
    trainer.version = 6  # PO-1: all is packed
    await trainer.sync_drain(5)
    staged = await rollout.sync_stage(5, key_of(rollout))
    assert staged.digests == manifest.digests
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
    assert rollout.receiver.half is not None
    inner = rollout.receiver.half.transport.fetch

    def fetch(version, sizes=None):
        where.append(threading.current_thread().name)
        yield from inner(version, sizes)

    rollout.receiver.half.transport.fetch = fetch  # type: ignore[method-assign]
    trainer.sync_send(1)
    await rollout.sync_stage(1, key_of(rollout))
    assert where[0] != threading.current_thread().name
    await closed(trainer, rollout)


async def test_only_the_staged_version_can_be_committed():
    """PO-3"""
    trainer, rollout = await opened()
    with pytest.raises(SyncError, match="can't commit version 1: nothing is staged"):
        await rollout.sync_commit(1)
    trainer.sync_send(1)
    await rollout.sync_stage(1, key_of(rollout))
    with pytest.raises(SyncError, match="can't commit version 2: version 1 is staged"):
        await rollout.sync_commit(2)
    assert rollout.version == -1
    await closed(trainer, rollout)


async def test_port_that_is_open_for_another_plan_refuses_to_stage():
    """W6"""
    trainer, rollout = await opened()
    trainer.sync_send(1)
    with pytest.raises(SyncError, match=r"asked to stage version 1 of plan other, the port is open for plan"):
        await rollout.sync_stage(1, "other")
    await closed(trainer, rollout)


async def test_what_was_packed_for_an_earlier_version_is_not_taken_for_a_later_one():
    trainer, rollout = await opened()
    trainer.sync_send(1)
    await rollout.sync_stage(1, key_of(rollout))
    staging = asyncio.ensure_future(rollout.sync_stage(3, key_of(rollout)))
    await asyncio.sleep(0.05)
    await rollout.sync_abort(3)
    with pytest.raises(SyncError, match=r"rollout rank 0: stopped; open the session again"):
        await staging
    await closed(trainer, rollout)


async def test_rank_whose_layout_moved_neither_sends_nor_stages():
    """PO-4"""
    trainer, rollout = await opened()
    key = key_of(rollout)
    rollout.want("bfloat16")
    with pytest.raises(LayoutMoved, match=r"rollout rank 0: its weights have layout .* now, the plan was made for"):
        await rollout.sync_stage(1, key)
    trainer.layout = Layout(trainer.layout.entries[:1])
    with pytest.raises(LayoutMoved, match="trainer rank 0: its weights have layout"):
        trainer.sync_send(1)
    await closed(trainer, rollout)


async def test_fenced_rank_serves_again_after_it_has_applied_a_version():
    """PO-6"""
    trainer, rollout = await opened()
    await rollout.sync_fence(4, "too far behind")
    assert rollout.weights_fenced == "version 4: too far behind"
    trainer.version = 5
    trainer.sync_send(5)
    await rollout.sync_stage(5, key_of(rollout))
    assert rollout.weights_fenced
    await rollout.sync_commit(5)
    assert not rollout.weights_fenced
    await closed(trainer, rollout)


async def test_what_a_process_may_hold_parts_of_is_not_held_against_another_one():
    """PO-6"""
    rollout = ToyRollout()
    await rollout.sync_fence(1, "it failed in its swap", "another process")
    assert rollout.weights_fenced == ""
    side = await rollout.sync_layout()
    await rollout.sync_fence(1, "it failed in its swap", "another process")
    assert rollout.weights_fenced == ""
    await rollout.sync_fence(1, "it has taken no version yet")
    assert (rollout.weights_fenced, rollout.weights_torn) == ("version 1: it has taken no version yet", False)
    await rollout.sync_fence(1, "it failed in its swap", side.incarnation)
    assert (rollout.weights_fenced, rollout.weights_torn) == ("version 1: it failed in its swap", True)
    await rollout.sync_fence(2, "it still serves version 0")
    assert rollout.weights_torn


async def test_same_version_staged_again_is_applied_again():
    """After a resume a session may carry any version, also the one that this rank had from an earlier session."""
    trainer, rollout = await opened()
    for content in (5, 8):
        trainer.version = content
        trainer.sync_send(5 if content == 5 else 6)
        await rollout.sync_stage(5 if content == 5 else 6, key_of(rollout))
        rollout.receiver.shadow.version = 5  # type: ignore[union-attr]  # as a new session would number it
        rollout._staged = {0: 5}
        await rollout.sync_commit(5)
        assert all(torch.equal(rollout.weights[name], values(name, content)) for name in SHAPES)
    await closed(trainer, rollout)


async def test_port_that_is_not_open_says_so():
    with pytest.raises(SyncError, match="sync_send: the port is closed; open the weight session first"):
        ToyTrainer(0, 1).sync_send(1)
    with pytest.raises(SyncError, match="sync_stage: the port is closed"):
        await ToyRollout().sync_stage(1, "")


async def test_rank_whose_layout_moved_refuses_to_open():
    """PO-4"""
    trainer, rollout = await opened()
    assert rollout.receiver.half is not None
    spec = rollout.receiver.half.spec
    rollout.want("bfloat16")
    with pytest.raises(LayoutError, match=r"rollout rank 0: its weights have layout .* now, the plan was made for"):
        await rollout.sync_open(spec)
    await closed(trainer, rollout)


async def test_close_waits_for_the_thread_of_the_port():
    """PO-5"""
    trainer, rollout = await opened()
    trainer.sync_send(1)
    staging = asyncio.ensure_future(rollout.sync_stage(1, key_of(rollout)))
    await asyncio.sleep(0)
    staging.cancel()
    await asyncio.gather(staging, return_exceptions=True)
    await closed(trainer, rollout)
    assert [t.name for t in threading.enumerate() if t.name.startswith("sync_")] == []
