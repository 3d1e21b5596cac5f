"""SE-1 to SE-5 through the runtime: 2 trainer ranks that shard rows, 2 rollout ranks that want everything."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import torch

from runtime import ActorMesh, ProcessDied
from sync.layout import LayoutError
from sync.session import WeightSession
from sync.transport import SyncError
from tests.sync.ranks import SHAPES, nudged
from tests.sync.sessions import TRANSPORTS, assert_serving, config, meshes, train_and_publish

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_all_rollout_ranks_serve_each_published_version(host, name):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config(name)) as session:
            for version in (0, 1, 2, 3):
                commit = await train_and_publish(trainer, session, version)
                await assert_serving(rollout, version)
            assert (commit.version, commit.transport) == (3, name)
            assert commit.bytes == sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
            assert 0 < commit.pause_seconds <= commit.seconds
            assert f"by {name}: asked for" in session.explain()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize(
    ("side", "fault", "text"),
    [
        (
            "trainer",
            "flip a byte",
            r"rollout rank \d: model\.\S+, box .*, arrived with digest .* bytes changed on the way",
        ),
        ("trainer", "reorder", r"rollout rank \d: model\.\S+, box .*, arrived with digest"),
        ("trainer", "tear", r"rollout rank \d: model\.\S+, box .*, arrived with digest .*, trainer rank 1 packed"),
        ("trainer", "nan", r"trainer rank 1: .*: trainer rank 1, version 1: box .* not finite"),
        ("rollout", "fail to stage", r"rollout rank 1: .*MemoryError: no room for model\.norm\.weight"),
    ],
    ids=["flipped byte", "reordered", "torn", "not finite", "receiver fails to stage"],
)
async def test_fault_before_the_decision_leaves_every_rank_on_the_old_version_and_can_be_retried(
    host, name, side, fault, text
):
    async with meshes(host) as (trainer, rollout):
        await rollout.want.call("bfloat16")
        async with WeightSession(trainer, rollout, config(name)) as session:
            await train_and_publish(trainer, session, 0)
            mesh = trainer if side == "trainer" else rollout
            await mesh.slice(rank=1).break_by.call(fault)
            with pytest.raises(SyncError, match=text) as caught:
                await train_and_publish(trainer, session, 1)
            assert "All rollout ranks keep version 0" in str(caught.value)
            assert session.version == 0
            await assert_serving(rollout, 0, dtype="bfloat16")
            await mesh.slice(rank=1).break_by.call("")
            await train_and_publish(trainer, session, 1)
            await assert_serving(rollout, 1, dtype="bfloat16")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_trainer_rank_that_dies_before_all_have_staged_leaves_the_old_version_in_service(host, name):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config(name))
        await train_and_publish(trainer, session, 0)
        await trainer.slice(rank=1).break_by.call("die")
        # gloo may tell of the cut connection first; the death is then a note of the error
        with pytest.raises(SyncError, match=r"(?s)trainer rank 1.*killed by SIGKILL"):
            await train_and_publish(trainer, session, 1)
        await assert_serving(rollout, 0)
        await session.close()


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_bucket_that_is_lost_is_named_at_the_deadline_and_nothing_is_applied(host, name):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config(name, deadline_s=1.0))
        await train_and_publish(trainer, session, 0)
        await trainer.slice(rank=1).break_by.call("lose")
        with pytest.raises(
            SyncError, match=r"version 1 was not published: .*model\..* All rollout ranks keep version 0"
        ):
            await train_and_publish(trainer, session, 1)
        await assert_serving(rollout, 0)
        await trainer.slice(rank=1).break_by.call("")
        await train_and_publish(trainer, session, 1)  # the ports are opened again
        await assert_serving(rollout, 1)
        await session.close()


async def test_decoding_goes_on_while_a_version_is_staged_and_nothing_of_it_serves(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm")) as session:
            await train_and_publish(trainer, session, 0)
            await rollout.break_by.call("hold")
            publishing = asyncio.ensure_future(train_and_publish(trainer, session, 1))
            await rollout.staging.call()
            await assert_serving(rollout, 0)  # both ranks answer, with the old version
            await trainer.train_to.call(9)  # the snapshot is taken: training on changes nothing (PO-1)
            with pytest.raises(SyncError, match="another publish is under way"):
                await session.publish(1)
            await rollout.slice(rank=0).let_go.call()
            await assert_serving(rollout, 0)  # one has staged, one has not: none has moved
            await rollout.slice(rank=1).let_go.call()
            await publishing
            await assert_serving(rollout, 1)


async def test_publish_cancelled_while_staging_aborts_and_can_be_repeated(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm")) as session:
            await train_and_publish(trainer, session, 0)
            await rollout.break_by.call("hold")
            publishing = asyncio.ensure_future(train_and_publish(trainer, session, 1))
            await rollout.staging.call()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            await assert_serving(rollout, 0)
            await rollout.break_by.call("")
            await session.publish(1)
            await assert_serving(rollout, 1)


async def test_a_decided_version_is_brought_to_its_end_however_often_it_is_cancelled_se4():
    reached, go_on = asyncio.Event(), asyncio.Event()
    session: Any = WeightSession.__new__(WeightSession)
    session.version, session._last, session._busy = None, None, False

    async def nothing() -> None:
        pass

    async def staged(version: int) -> tuple[None, None]:
        return None, None

    async def applied(machine: None) -> float:
        reached.set()
        await go_on.wait()
        session.version = 1
        return 0.0

    session._take_back, session._staged, session._apply = nothing, staged, applied
    publishing = asyncio.ensure_future(session.publish(1))
    await reached.wait()
    for _ in range(3):
        publishing.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not publishing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert session.version == 1


async def test_silent_rollout_rank_is_named_at_the_deadline(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm", deadline_s=1.0)) as session:
            await train_and_publish(trainer, session, 0)
            await rollout.slice(rank=1).break_by.call("hold")
            with pytest.raises(SyncError, match=r"rollout rank 1: rollout\.sync_stage: deadline of 6\.0 s has passed"):
                await train_and_publish(trainer, session, 1)
            await assert_serving(rollout, 0)


async def test_rank_that_fails_in_its_swap_is_named_and_the_others_serve_the_version(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm"))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("fail in swap")
        with pytest.raises(
            SyncError, match=r"in service on rollout ranks \[0\], but not on: rollout rank 1: .*on fire"
        ):
            await train_and_publish(trainer, session, 1)
        assert session.version == 1
        assert [served for served, _ in (await rollout.serving.call()).values()] == [1, 0]
        await rollout.slice(rank=1).break_by.call("")
        commit = await session.publish(1)  # not in service everywhere: once more (SE-2)
        assert (commit.version, commit.left_out) == (1, ())
        await assert_serving(rollout, 1)
        await session.close()


async def test_versions_rise_by_one_after_a_first_that_may_be_any(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm")) as session:
            first = await train_and_publish(trainer, session, 40)  # after a resume
            await trainer.train_to.call(41)
            assert await session.publish(40) is first  # in service already: nothing moves
            await assert_serving(rollout, 40)
            for wrong in (39, 42):
                with pytest.raises(
                    SyncError, match=rf"publish\({wrong}\): version 40 is in service, so the next is 41"
                ):
                    await session.publish(wrong)
            await session.publish(41)
            await assert_serving(rollout, 41)


async def test_layout_that_moves_is_planned_anew(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm")) as session:
            await train_and_publish(trainer, session, 0)
            key = session.plan.key
            await train_and_publish(trainer, session, 1)
            assert session.plan.key == key
            await rollout.slice(rank=1).want.call("bfloat16")
            commit = await train_and_publish(trainer, session, 2)
            assert session.plan.key != key
            assert commit.bytes == 1.5 * sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
            (_, full), (_, half) = (await rollout.serving.call()).values()
            assert torch.equal(full["model.norm.weight"].to(torch.bfloat16), half["model.norm.weight"])


async def test_sides_that_do_not_fit_are_refused_before_any_transfer(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm"))
        await rollout.slice(rank=1).want.call("int8")
        with pytest.raises(LayoutError, match=r"trainer rank 0 holds float32 .*, rollout rank 1 wants int8"):
            await session.open()
        await assert_not_moved(rollout)


async def assert_not_moved(rollout: ActorMesh) -> None:
    assert [served for served, _ in (await rollout.serving.call()).values()] == [-1, -1]


async def test_auto_takes_shared_memory_where_a_trial_shows_it_and_gloo_where_it_fails(host, caplog):
    caplog.set_level("INFO", logger="sync")
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("auto")) as session:
            assert "by shm: all ranks share a host, weights lie in host memory, proved by a trial" in session.explain()
        await rollout.slice(rank=1).break_by.call("no shared memory")
        async with WeightSession(trainer, rollout, config("auto")) as session:
            await train_and_publish(trainer, session, 0)
            assert "proved by a trial; shm is not possible: rollout rank 1: " in session.explain()
        await assert_serving(rollout, 0)
    assert "weights travel by shm" in caplog.text
    assert "weights travel by gloo" in caplog.text


async def test_killed_rollout_rank_is_named_and_the_other_keeps_the_old_version(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm"))
        await train_and_publish(trainer, session, 0)
        await rollout.break_by.call("hold")
        publishing = asyncio.ensure_future(train_and_publish(trainer, session, 1))
        await rollout.staging.call()
        os.kill((await rollout.pid.call())[1], signal.SIGKILL)
        with pytest.raises(SyncError, match=r"rollout rank 1: .*killed by SIGKILL") as caught:
            await publishing
        assert isinstance(caught.value.__cause__, ProcessDied)
        assert (await rollout.slice(rank=0).serving.call_one())[0] == 0
        await session.close()


# --- differences between versions (BA-1, BA-2, AT-3) ------------------------------------------------------------------


async def assert_nudged(rollout: ActorMesh, version: int) -> None:
    for served, weights in (await rollout.serving.call()).values():
        assert served == version
        for name in SHAPES:
            assert torch.equal(weights[name], nudged(name, version))


@pytest.mark.parametrize("swap", ["", "keep"], ids=["engine copies", "engine keeps"])
async def test_versions_that_differ_little_arrive_as_differences_and_are_the_same_bits(host, swap):
    async with meshes(host) as (trainer, rollout):
        await trainer.nudge.call()
        await rollout.break_by.call(swap)
        async with WeightSession(trainer, rollout, config("gloo", differences=True)) as session:
            sizes = [(await train_and_publish(trainer, session, version)).wire_bytes for version in range(12)]
            await assert_nudged(rollout, 11)
        whole = session.plan.payload_bytes
        assert sizes[0] == whole
        assert all(size < 0.6 * whole for size in sizes[1:])


async def test_base_that_an_engine_has_changed_is_found_by_the_digests_and_whole_buckets_are_sent(host):
    """BA-2"""
    async with meshes(host) as (trainer, rollout):
        await trainer.nudge.call()
        await rollout.break_by.call("keep")
        async with WeightSession(trainer, rollout, config("gloo", differences=True)) as session:
            for version in (0, 1):
                await train_and_publish(trainer, session, version)
            await rollout.slice(rank=1).spoil.call()
            commit = await train_and_publish(trainer, session, 2)
            assert commit.wire_bytes == commit.bytes
            await assert_nudged(rollout, 2)
            assert (await train_and_publish(trainer, session, 3)).wire_bytes < commit.bytes
            await assert_nudged(rollout, 3)


async def test_rank_that_holds_another_version_refuses_differences(host):
    """BA-2: the base version is enforced"""
    async with meshes(host) as (trainer, rollout):
        await trainer.nudge.call()
        async with WeightSession(trainer, rollout, config("gloo", differences=True)) as session:
            for version in (0, 1):
                await train_and_publish(trainer, session, version)
            await rollout.slice(rank=1).forget.call()  # as if it were another process
            commit = await train_and_publish(trainer, session, 2)
            assert commit.wire_bytes == commit.bytes
            await assert_nudged(rollout, 2)


async def test_trainer_that_has_lost_its_port_is_opened_again_before_differences_are_found_se3(host):
    async with meshes(host) as (trainer, rollout):
        await trainer.nudge.call()
        async with WeightSession(trainer, rollout, config("shm", differences=True)) as session:
            await train_and_publish(trainer, session, 0)
            await trainer.slice(rank=1).sync_close.call_one()  # as if its process were new
            await train_and_publish(trainer, session, 1)
            await assert_nudged(rollout, 1)
