"""RL-1 to RL-4, SE-7: receivers behind a relay, two for one rollout rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Actor, HostMesh, endpoint
from sync import relay
from sync.layout import Entry, Layout
from sync.messages import LayoutMoved, OpenSpec, PortClosed
from sync.ports import ReceiverPort
from sync.receiver import Part, Receiver
from sync.relay import RemoteReceiver, Served, serve
from sync.session import SyncConfig, WeightSession
from sync.transport import Link, SyncError
from tests.sync.ranks import SHAPES, ToyTrainer, values
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Shard:
    """One of two parts of a rank: its rows of each tensor."""

    def __init__(self, part: int) -> None:
        self.rows = {name: (part * s[0] // 2, (part + 1) * s[0] // 2) for name, s in SHAPES.items()}
        self.weights = {n: torch.zeros(b - a, *SHAPES[n][1:]) for n, (a, b) in self.rows.items()}

    def weight_layout(self) -> Layout:
        return Layout(tuple(Entry.rows(n, SHAPES[n], "float32", a, b) for n, (a, b) in self.rows.items()))


class Parted(ReceiverPort, Actor):
    """Two receivers behind relays; their processes are this one."""

    def __init__(self) -> None:
        self.weight_sink: Any = self
        self.shards = [Shard(0), Shard(1)]
        self.receivers = [Receiver(shard) for shard in self.shards]
        self.served: list[Served] = []
        self.version = -1
        self.given: list[str] = []
        self.broken = False

    async def weight_workers(self) -> Sequence[Part]:
        self.served = [serve(receiver, os.getpid()) for receiver in self.receivers]
        remotes = [RemoteReceiver(f"worker {i}", lambda _: None) for i in range(2)]
        for remote, served in zip(remotes, self.served, strict=True):
            await remote.connect(served.address)
        return remotes

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.given += weights
        if self.broken:
            raise ValueError("the engine is on fire")
        for shard, receiver in zip(self.shards, self.receivers, strict=True):
            new = receiver.take(version)
            for name, tensor in shard.weights.items():
                tensor.copy_(new[name])
            receiver.applied(version, new, None)
        self.version = version

    @endpoint
    def serving(self) -> tuple[int, list[str], dict[str, Tensor]]:
        first, second = (shard.weights for shard in self.shards)
        return self.version, self.given, {name: torch.cat([first[name], second[name]]) for name in SHAPES}

    @endpoint
    def break_down(self) -> None:
        self.broken = True

    @endpoint(concurrency=4)
    async def lose(self, part: int) -> None:
        """Its connection ends, as with the end of its process."""
        remote = (await self.weight_parts())[part]
        assert isinstance(remote, RemoteReceiver)
        assert remote._writer is not None
        remote._writer.transport.abort()
        await until(lambda: not self.served[part].thread.is_alive())


@pytest.mark.parametrize("transport", ["shm", "gloo"])
async def test_each_part_of_a_rank_is_sent_what_it_wants_and_all_apply_at_once_se7(
    host: HostMesh, transport: Any
) -> None:
    trainers, rollouts = await host.spawn_procs(1, name="trainer"), await host.spawn_procs(2, name="rollout")
    trainer = await trainers.spawn("trainer", ToyTrainer, 0, 1)
    rollout = await rollouts.spawn("rollout", Parted)
    settings = SyncConfig(transport=transport, bucket_bytes=512, deadline_s=5.0)
    async with WeightSession(trainer, rollout, settings) as session:
        for version in (3, 4):
            await trainer.train_to.call(version)
            await session.publish(version)
            for served, given, weights in (await rollout.serving.call()).values():
                assert (served, given) == (version, [])  # the rank holds no tensor of theirs
                assert all(torch.equal(weights[name], values(name, version)) for name in SHAPES)
        assert len({sink for bucket in session.plan.buckets for sink in bucket.sinks}) == 4
        await rollout.slice(rank=1).lose.call_one(1)
        with pytest.raises(SyncError, match=r"rank 1, worker 1: .*worker 1: its process is gone|did not pass"):
            await session.publish(5)
        assert [one[0] for one in (await rollout.serving.call()).values()] == [4, 4]
    await trainers.stop()
    await rollouts.stop()


@pytest.mark.parametrize("fault", ["a part is lost", "the swap fails"])
async def test_a_rank_that_loses_a_part_or_fails_in_its_swap_is_left_out_whole_fl1(host: HostMesh, fault: str) -> None:
    trainers, rollouts = await host.spawn_procs(1, name="trainer"), await host.spawn_procs(3, name="rollout")
    trainer = await trainers.spawn("trainer", ToyTrainer, 0, 1)
    rollout = await rollouts.spawn("rollout", Parted)
    settings = SyncConfig(transport="shm", bucket_bytes=512, deadline_s=5.0, quorum=2)
    async with WeightSession(trainer, rollout, settings) as session:
        await session.publish(3)
        if fault == "a part is lost":
            await rollout.slice(rank=1).lose.call_one(0)
        else:
            await rollout.slice(rank=1).break_down.call_one()
        for version in (4, 5):
            await trainer.train_to.call(version)
            assert (await session.publish(version)).left_out == (1,)
            served = {rank: one[0] for rank, one in enumerate((await rollout.serving.call()).values())}
            assert (served[0], served[2]) == (version, version)
            assert served[1] == 3
        for _, _, weights in [one for one in (await rollout.serving.call()).values() if one[0] == 5]:
            assert all(torch.equal(weights[name], values(name, 5)) for name in SHAPES)
    await trainers.stop()
    await rollouts.stop()


@contextlib.asynccontextmanager
async def connected(receiver: Any) -> AsyncIterator[tuple[RemoteReceiver, Served, list[SyncError]]]:
    ends: list[SyncError] = []
    remote, served = RemoteReceiver("worker 0", ends.append), serve(receiver, os.getpid())
    await remote.connect(served.address)
    yield remote, served, ends
    await remote.leave()
    served.thread.join(5)
    assert not served.thread.is_alive()


async def test_only_the_process_that_it_was_told_of_may_connect_rl1() -> None:
    served = serve(Receiver(Shard(0)), os.getpid() + 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect("\0" + served.address)
        assert stranger.recv(1) == b""
    assert served.thread.is_alive()  # it goes on waiting for the right one
    served._peer = os.getpid()
    remote = RemoteReceiver("worker 0", lambda _: None)
    await remote.connect(served.address)
    assert (await remote.describe("")).layout == Shard(0).weight_layout()
    await remote.leave()
    served.thread.join(5)
    with pytest.raises(SyncError, match="worker 0: its process can't be reached"):
        await RemoteReceiver("worker 0", lambda _: None).connect(served.address)


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x02\0\0\0hi"])
async def test_what_is_no_frame_ends_the_connection_rl2(garbage: bytes) -> None:
    async with connected(Receiver(Shard(0))) as (remote, served, ends):
        assert remote._writer is not None
        remote._writer.write(garbage)
        with pytest.raises(SyncError, match="worker 0: its process is gone"):
            await remote.describe("")
        assert len(ends) == 1
        assert "gone" in str(ends[0])
        served.thread.join(5)
        with pytest.raises(SyncError, match="gone"):
            await remote.describe("")


async def test_a_call_without_an_answer_ends_at_its_deadline_rl2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Receiver):
        async def describe(self, known: str) -> Any:
            await asyncio.Event().wait()

        async def close(self) -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    monkeypatch.setattr(relay, "DESCRIBE_S", 0.05)
    async with connected(Slow(Shard(0))) as (remote, _, ends):
        with pytest.raises(SyncError, match=r"worker 0: no answer to describe within 0\.05 s"):
            await remote.describe("")
        assert not ends


async def test_errors_keep_the_kind_that_the_session_looks_at_rl4() -> None:
    class Broken(Receiver):
        async def describe(self, known: str) -> Any:
            raise MemoryError("no room")

    async with connected(Broken(Shard(0))) as (remote, _, _):
        with pytest.raises(PortClosed, match="sync_stage: the port is closed"):
            await remote.stage(1, "", None, None)
        link = Link(rank=0, num_senders=1, num_sinks=1, buckets=(), slots=1, slot_bytes=512, deadline_s=1.0)
        with pytest.raises(LayoutMoved, match="the plan was made for other"):
            await remote.open(OpenSpec(transport="shm", plan_key="", layout_digest="other", link=link))
        with pytest.raises(SyncError, match="worker 0: MemoryError: no room"):
            await remote.describe("")
        await remote.close()


async def test_what_ends_while_it_closes_is_closed_tr5() -> None:
    class Slow(Receiver):
        async def close(self) -> None:
            await asyncio.sleep(0.05)

    async with connected(Slow(Shard(0))) as (remote, served, ends):
        closing = asyncio.ensure_future(remote.close())
        await asyncio.sleep(0)
        assert remote._writer is not None
        remote._writer.transport.abort()
        await closing
        assert len(ends) == 1
        served.thread.join(5)


async def test_a_part_that_does_not_close_keeps_no_other_open() -> None:
    closed = []

    class One(Receiver):
        broken = False

        async def close(self) -> None:
            if self.broken:
                raise SyncError("stuck")
            closed.append(self)

    rank, parts = ReceiverPort(), [One(Shard(0)), One(Shard(1))]
    parts[0].broken = True
    rank._parts = parts
    with pytest.raises(SyncError, match="stuck"):
        await rank.sync_close()
    assert closed == parts[1:]


async def test_what_an_engine_prepares_before_its_swap_is_no_pause_po3(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []

    class Sink(Shard):
        async def prepare_weights(self, version: int) -> None:
            told.append(("prepared", version))
            now[0] += 100

    class Rank(ReceiverPort):
        async def apply_weights(self, weights: Any, version: int) -> None:
            told.append(("applied", version))
            now[0] += 1

    rank: Any = Rank()
    rank.weight_sink, rank._parts, rank._staged = Sink(0), [RemoteReceiver("worker 0", lambda _: None)], {0: 3}
    monkeypatch.setattr("sync.ports.time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert (await rank.sync_commit(3)).pause_seconds == 1
    assert told == [("prepared", 3), ("applied", 3)]


async def test_who_listens_must_be_of_our_user_rl1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_peer_of", lambda _: (os.getpid(), os.getuid() + 1))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0tutti-test-rl1")
        listening.listen(1)
        with pytest.raises(SyncError, match="worker 0: another user listens"):
            await RemoteReceiver("worker 0", lambda _: None).connect("tutti-test-rl1")


async def test_leaving_waits_for_no_worker_that_reads_nothing_any_more() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0tutti-test-leave")
        listening.listen(1)
        remote = RemoteReceiver("worker 0", lambda _: None)
        await remote.connect("tutti-test-leave")
        asking = asyncio.ensure_future(remote.describe("x" * (8 << 20)))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await remote.leave()
        with pytest.raises(SyncError, match="gone"):
            await asking
