"""SE-3 and SE-6 of sync/session.py: replicas that are late, lost or left out, and how they come back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from runtime import ActorMesh, Restart
from sync.session import WeightSession
from sync.transport import SyncError
from tests.sync.ranks import ToyRollout, ToyTrainer
from tests.sync.sessions import TRANSPORTS, assert_serving, config, meshes, train_and_publish
from tests.waiting import SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def served_by(rollout: ActorMesh) -> list[int]:
    return [version for version, _ in (await rollout.serving.call()).values()]


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_with_a_quorum_a_stuck_replica_is_left_out_and_catches_up_with_the_next_version(host, name):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config(name, deadline_s=1.5, quorum=1, slots=1))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("stall")
        if name == "gloo":
            # one broadcast serves both, so gloo can't tell which of them is late: the version fails as a whole
            with pytest.raises(SyncError, match=r"bucket \d+ .* did not pass"):
                await train_and_publish(trainer, session, 1)
            assert await served_by(rollout) == [0, 0]
        else:
            commit = await train_and_publish(trainer, session, 1)
            assert commit.left_out == (1,)
            assert "has not taken bucket" in session.left_out[1]
            assert await served_by(rollout) == [1, 0]  # within max_behind: it goes on serving
            assert await rollout.slice(rank=1).fenced.call_one() == ""
        await rollout.slice(rank=1).break_by.call("")
        await train_and_publish(trainer, session, 1 if name == "gloo" else 2)
        assert session.left_out == {}
        assert len(set(await served_by(rollout))) == 1
        await session.close()


async def test_replica_that_lags_further_than_allowed_is_fenced_and_serves_again_after_it_has_caught_up(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1, max_behind=1))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("fail to stage")
        for version, fenced in ((1, False), (2, True)):
            assert (await train_and_publish(trainer, session, version)).left_out == (1,)
            assert bool(await rollout.slice(rank=1).fenced.call_one()) == fenced
        assert await served_by(rollout) == [2, 0]
        await rollout.slice(rank=1).break_by.call("")
        assert (await train_and_publish(trainer, session, 3)).left_out == ()
        assert await rollout.slice(rank=1).fenced.call_one() == ""
        await assert_serving(rollout, 3)
        await session.close()


async def test_replica_that_took_its_weights_another_way_and_lags_again_is_fenced_again_se6(host):
    """As by a session to it alone, with which a job brings a fenced replica back."""
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1, max_behind=0))
        await train_and_publish(trainer, session, 0)
        lagging = rollout.slice(rank=1)
        await lagging.break_by.call("fail to stage")
        await train_and_publish(trainer, session, 1)
        assert await lagging.fenced.call_one()
        await lagging.break_by.call("")
        await session.close()
        async with session.over(lagging) as alone:
            await alone.publish(1)
        assert await lagging.fenced.call_one() == ""
        await lagging.break_by.call("fail to stage")
        assert (await train_and_publish(trainer, session, 2)).left_out == (1,)
        assert await lagging.fenced.call_one()
        await session.close()


async def test_replica_that_could_not_be_told_to_stop_is_told_before_the_next_version_se6(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1, max_behind=0))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("fail to stage, deaf")
        await train_and_publish(trainer, session, 1)
        assert await rollout.slice(rank=1).fenced.call_one() == ""
        await rollout.slice(rank=1).break_by.call("fail to stage")
        await train_and_publish(trainer, session, 2)
        assert "still serves version 0" in await rollout.slice(rank=1).fenced.call_one()
        await session.close()


async def test_replica_that_has_taken_no_version_is_told_not_to_serve_se6(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1))
        await rollout.slice(rank=1).break_by.call("fail to stage")
        await train_and_publish(trainer, session, 0)
        assert "it has taken no version yet" in await rollout.slice(rank=1).fenced.call_one()
        await rollout.slice(rank=1).break_by.call("")
        await train_and_publish(trainer, session, 1)
        assert await rollout.slice(rank=1).fenced.call_one() == ""
        await session.close()


async def test_replica_that_can_not_be_opened_is_left_out_where_the_quorum_allows_it_se6(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("lose a worker")
        await trainer.sync_close.call()  # all are opened again, as after a version without another replica
        for version in (1, 2):
            assert (await train_and_publish(trainer, session, version)).left_out == (1,)
        await rollout.slice(rank=1).break_by.call("")
        assert (await train_and_publish(trainer, session, 3)).left_out == ()
        await assert_serving(rollout, 3)
        await session.close()


async def test_ports_of_replicas_that_were_left_out_are_closed_with_the_session(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1))
        await rollout.slice(rank=1).break_by.call("fail in swap")
        await train_and_publish(trainer, session, 0)
        assert session.left_out.keys() == {1}
        await session.close()
        assert list((await rollout.port_is_open.call()).values()) == [False, False]


async def test_replica_that_is_killed_and_restarted_rejoins_without_touching_the_others(host):
    trainers = await host.spawn_procs({"rank": 1}, name="trainer")
    rollouts = await host.spawn_procs({"rank": 2}, name="rollout", restart=Restart(backoff=0.0))
    trainer, rollout = await trainers.spawn("trainer", ToyTrainer, 0, 1), await rollouts.spawn("rollout", ToyRollout)
    session = WeightSession(trainer, rollout, config("shm", quorum=1))
    await train_and_publish(trainer, session, 0)
    survivor = await rollout.slice(rank=0).pid.call_one()
    await rollout.break_by.call("hold")
    publishing = asyncio.ensure_future(train_and_publish(trainer, session, 1))
    await rollout.staging.call()
    await rollout.slice(rank=0).break_by.call("")
    os.kill((await rollout.pid.call())[1], signal.SIGKILL)
    commit = await publishing
    assert commit.left_out == (1,)
    assert (await rollout.slice(rank=0).serving.call_one())[0] == 1
    version = 2
    async with asyncio.timeout(SECONDS):
        while (await train_and_publish(trainer, session, version)).left_out:  # until the process is there again
            version += 1
            await asyncio.sleep(0.1)
    await assert_serving(rollout, version)
    assert await rollout.slice(rank=0).pid.call_one() == survivor
    await session.close()
    await trainers.stop()
    await rollouts.stop()


@pytest.mark.parametrize("side", ["trainer", "rollout"])
async def test_process_that_was_started_anew_between_two_versions_takes_part_in_the_next_se3(host, side):
    trainers = await host.spawn_procs({"rank": 1}, name="trainer", restart=Restart(backoff=0.0))
    rollouts = await host.spawn_procs({"rank": 2}, name="rollout", restart=Restart(backoff=0.0))
    trainer, rollout = await trainers.spawn("trainer", ToyTrainer, 0, 1), await rollouts.spawn("rollout", ToyRollout)
    session = WeightSession(trainer, rollout, config("shm"))
    await train_and_publish(trainer, session, 0)
    procs, mesh = (trainers, trainer) if side == "trainer" else (rollouts, rollout)
    ended = procs.ranks[0].ended
    os.kill(procs.pids[0], signal.SIGKILL)
    await ended.wait()
    await mesh.break_by.call("")  # answered by the new process
    await train_and_publish(trainer, session, 1)
    await assert_serving(rollout, 1)
    await session.close()
    await trainers.stop()
    await rollouts.stop()


async def test_rank_that_fails_in_its_swap_is_told_not_to_serve(host):
    """CM-2, PO-6"""
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1))
        await train_and_publish(trainer, session, 0)
        await rollout.slice(rank=1).break_by.call("fail in swap")
        commit = await train_and_publish(trainer, session, 1)
        assert commit.left_out == (1,)
        assert "on fire" in await rollout.slice(rank=1).fenced.call_one()
        await rollout.slice(rank=1).break_by.call("")
        await train_and_publish(trainer, session, 2)
        assert await rollout.slice(rank=1).fenced.call_one() == ""
        await assert_serving(rollout, 2)
        await session.close()


async def test_too_few_replicas_for_the_quorum_is_an_error_and_nobody_moves(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", quorum=1))
        await train_and_publish(trainer, session, 0)
        await rollout.break_by.call("fail to stage")
        with pytest.raises(SyncError, match=r"version 1 was not published: rollout rank \d: .*no room"):
            await train_and_publish(trainer, session, 1)
        await assert_serving(rollout, 0)
        await session.close()
        with pytest.raises(ValueError, match=r"quorum = 3: there are 2 rollout replicas"):
            WeightSession(trainer, rollout, config("shm", quorum=3))
        with pytest.raises(ValueError, match=r"2 rollout ranks don't divide into replicas of 3"):
            WeightSession(trainer, rollout, config("shm"), ranks_per_replica=3)
