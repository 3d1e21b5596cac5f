"""PO-7, RO-1, RO-2, SH-4: versions written over the weights in service, and what is left when that fails half-way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest

from runtime import ActorMesh, HostMesh
from sync.config import SyncConfig
from sync.layout import Entry, Layout
from sync.messages import Side
from sync.room import SPARE, host_piece_bytes, in_place, piece_bytes
from sync.session import WeightSession
from sync.transport import SyncError
from tests.sync.ranks import RingRollout, ToyRollout, ToyTrainer
from tests.sync.sessions import assert_serving, config, train_and_publish

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def meshes(host: HostMesh, kind: type[ToyRollout] = RingRollout) -> AsyncIterator[tuple[ActorMesh, ActorMesh]]:
    """One trainer rank, two rollout ranks."""
    procs = await host.spawn_procs({"rank": 3}, name="ranks")
    try:
        trainer = await procs.slice(rank=0).spawn("trainer", ToyTrainer, 0, 1)
        yield trainer, await procs.slice(rank=slice(1, 3)).spawn("rollout", kind)
    finally:
        await procs.stop()


@in_module_loop
async def test_versions_are_written_over_the_live_tensors_and_nothing_else(host):
    async with meshes(host) as (trainer, rollout):
        before = await rollout.addresses.call()
        async with WeightSession(trainer, rollout, config("shm", shadow="ring")) as session:
            for version in range(3):
                await train_and_publish(trainer, session, version)
                await assert_serving(rollout, version)
                assert set((await rollout.fenced.call()).values()) == {""}
            assert "over the weights in service: asked for" in session.explain()
        assert await rollout.addresses.call() == before


@pytest.mark.parametrize("fault", ["flip a byte", "tear", "nan"])
@in_module_loop
async def test_failure_half_way_leaves_ranks_that_do_not_serve_until_a_version_has_come_whole(host, fault):
    async with meshes(host) as (trainer, rollout):
        await rollout.want.call("bfloat16")
        async with WeightSession(trainer, rollout, config("shm", shadow="ring")) as session:
            await train_and_publish(trainer, session, 4)
            await trainer.break_by.call(fault)
            with pytest.raises(SyncError, match="may hold parts of two versions, and don't serve until"):
                await train_and_publish(trainer, session, 5)
            for reason in (await rollout.fenced.call()).values():
                assert "version 5 is being written over the weights in service" in reason
            assert session.version is None
            await trainer.break_by.call("")
            await train_and_publish(trainer, session, 5)
            await assert_serving(rollout, 5, dtype="bfloat16")
            assert set((await rollout.fenced.call()).values()) == {""}


@in_module_loop
async def test_trainer_that_dies_half_way_leaves_ranks_that_do_not_serve(host):
    async with meshes(host) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", shadow="ring"))
        await train_and_publish(trainer, session, 0)
        await trainer.break_by.call("die")
        with pytest.raises(SyncError, match=r"(?s)killed by SIGKILL.*may hold parts of two versions"):
            await train_and_publish(trainer, session, 1)
        for reason in (await rollout.fenced.call()).values():
            assert "version 1 is being written over" in reason
        await session.close()


@in_module_loop
async def test_version_goes_on_without_a_rollout_that_was_killed_and_comes_whole_to_the_other(host):
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm", shadow="ring", quorum=1)) as session:
            await train_and_publish(trainer, session, 0)
            os.kill(await rollout.slice(rank=1).pid.call_one(), signal.SIGKILL)
            commit = await train_and_publish(trainer, session, 1)
            assert commit.left_out == (1,)
            await assert_serving(rollout.slice(rank=0), 1)
            assert await rollout.slice(rank=0).fenced.call_one() == ""


@in_module_loop
async def test_auto_takes_the_ring_only_where_a_second_copy_has_no_room(host):
    async with meshes(host) as (trainer, rollout):
        for room, ring in ((-1, False), (1 << 30, False), (100, True)):
            await rollout.have_room.call(room)
            async with WeightSession(trainer, rollout, config("shm")) as session:
                assert ("over the weights in service: rollout rank 0 has room for" in session.explain()) == ring
                await train_and_publish(trainer, session, 1)
                await assert_serving(rollout, 1)


@in_module_loop
async def test_ring_is_refused_where_the_engine_cannot(host):
    async with meshes(host, ToyRollout) as (trainer, rollout):
        session = WeightSession(trainer, rollout, config("shm", shadow="ring"))
        with pytest.raises(SyncError, match=r"rollout rank 0: .* its engine can't be written in place"):
            await session.open()


def test_ring_contradicts_differences():
    with pytest.raises(ValueError, match="differences are made against weights that a ring overwrites"):
        SyncConfig(shadow="ring", differences=True)


def side(**more: object) -> Side:
    return msgspec.structs.replace(
        Side(digest="d", layout=None, host="h", device="cuda", incarnation="i", in_place=True, room_bytes=0), **more
    )


LAYERS = Layout(
    tuple(
        Entry.whole(f"{prefix}.weight", shape, "float32")
        for prefix, shape in {"embed": (1000, 64), "layers.0.a": (16, 64), "layers.1.a": (32, 64)}.items()
    )
)


def test_room_is_that_of_what_is_sent_and_all_ranks_do_alike():
    need = int(SPARE * sum(entry.num_bytes for entry in LAYERS.entries))
    enough, short = side(room_bytes=need), side(room_bytes=need - 1)
    for sides, told in (([enough, enough], ""), ([enough, short], "b has room for 0.0 GB, a second copy takes 0.0 GB")):
        assert in_place(SyncConfig(), ["a", "b"], sides, [LAYERS, LAYERS]) == told
    assert in_place(SyncConfig(shadow="full"), ["b"], [short], [LAYERS]) == ""
    assert in_place(SyncConfig(differences=True), ["b"], [short], [LAYERS]) == ""
    assert in_place(SyncConfig(), ["b"], [side(in_place=False)], [LAYERS]) == ""


def test_pieces_on_their_way_are_at_most_two_layers():
    layer = 32 * 64 * 4
    assert piece_bytes(1 << 20, 4, [LAYERS]) == 2 * layer // 4
    assert piece_bytes(1024, 4, [LAYERS]) == 1024


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 512 << 10), (4 << 10, 512 << 10), (8 << 10, 1 << 20), (1 << 20, 4 << 20)]
)
def test_pieces_in_host_memory_are_an_eighth_of_what_a_rank_receives(rows, expected):
    small = Layout((Entry.whole("norm", (8,), "float32"),))
    assert host_piece_bytes([small, Layout((Entry.whole("w", (rows, 256), "float32"),))]) == expected
    assert host_piece_bytes([]) == 512 << 10
