"""AT-1, AT-2, SE-4: attempts whose ranks are stand-ins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime import DeadlineExceeded
from sync.attempt import Attempt, NotStaged
from sync.fleet import Fleet, Rank
from sync.layout import Layout
from sync.messages import Applied, Manifest, Opened, Side, Staged
from sync.plan import make_plan
from sync.session import Commit, SyncConfig, WeightSession
from sync.transport import SyncError, TransportError
from tests.sync.ranks import sharded, toy_plan, wanted


class Nobody:
    """A mesh without actors."""

    def __len__(self) -> int:
        return 0


class Stand(Rank):
    """A rank that answers what it is told to."""

    def __init__(self, side: Any, index: int, answer: Any) -> None:
        super().__init__(None, side, index)  # type: ignore[arg-type]
        self.answer = answer

    async def call(self, endpoint: str, *args: object, timeout: float) -> Any:
        return await self.answer(endpoint)


async def test_a_rank_that_is_sent_nothing_and_is_not_ready_ends_the_attempt_at1() -> None:
    plan = make_plan([sharded(0, 1)], [wanted(), Layout(())], bucket_bytes=512)
    digests = {bucket.index: (0,) * len(bucket.segments) for bucket in plan.buckets}

    async def trainer(_: str) -> Manifest:
        return Manifest(version=1, digests=digests, seconds=0.0)

    async def first(_: str) -> Staged:
        return Staged(version=1, digests=digests, seconds=0.0)

    async def second(_: str) -> Staged:
        while attempt.machine.phase == "staging":
            await asyncio.sleep(0)
        raise SyncError("its port is closed")

    ranks = [Stand("trainer", 0, trainer), Stand("rollout", 0, first), Stand("rollout", 1, second)]
    (sender,), (one,), (two,) = (rank.seats for rank in ranks)
    attempt = Attempt(1, plan, "shm", [sender], [one, two], deadline_s=5.0, kept="All keep theirs")
    with pytest.raises(NotStaged, match=r"version 1 was not published: .*its port is closed\. All keep") as caught:
        await attempt.run()
    assert set(caught.value.lost) == {1}


async def test_a_trainer_rank_that_fails_behind_the_decision_leaves_it_and_is_opened_again_se1() -> None:
    """NCCL's communicators are gone after a deadline in `drain`: the next version would fail for nothing."""
    plan = make_plan([sharded(0, 1)], [wanted()], bucket_bytes=512)
    digests = {bucket.index: (0,) * len(bucket.segments) for bucket in plan.buckets}
    staged = asyncio.Event()

    async def trainer(endpoint: str) -> Manifest:
        if endpoint == "sync_drain":
            await staged.wait()
            for _ in range(10):
                await asyncio.sleep(0)
            raise TransportError("bucket 0 did not pass")
        return Manifest(version=5, digests=digests, seconds=0.0)

    async def rollout(_: str) -> Staged:
        staged.set()
        return Staged(version=5, digests=digests, seconds=0.0)

    session: Any = WeightSession.__new__(WeightSession)
    session.config, session.version, session._open = SyncConfig(), 4, True
    session._senders = [Stand("trainer", 0, trainer)]
    session._fleet = Fleet([Stand("rollout", 0, rollout)], 1, 0)
    session._in_place, session._plan, session._transport, session._rate = "", plan, "gloo", 0.0
    machine, _ = await session._attempt(5, whole=False)
    assert machine.phase == "committing"
    assert not session._open


async def test_an_abort_is_brought_to_its_end_and_known_however_often_it_is_cancelled_se4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    session: Any = WeightSession.__new__(WeightSession)
    session.config, session.version, session._busy, session._open = SyncConfig(), 4, False, True
    session._last = Commit(
        version=4, bytes=1, seconds=1, pack_seconds=1, stage_seconds=1, pause_seconds=1, transport="shm"
    )
    session._in_place = "there is no room"  # what was in service is no more
    session._fleet, session._senders, session._plan = Fleet([], 1, 0), [], toy_plan()
    session._transport, session._rate = "shm", 0.0

    async def stuck(_: Attempt) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def aborted(version: int) -> list[str]:
        reached.set()
        await go_on.wait()
        return []

    monkeypatch.setattr(Attempt, "run", stuck)
    session._abort = aborted
    publishing = asyncio.ensure_future(session.publish(5))
    await reached.wait()
    reached.clear()
    publishing.cancel()
    await reached.wait()
    publishing.cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    assert not publishing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert (session.version, session._last, session._open) == (None, None, False)


async def test_a_rank_that_neither_opens_nor_closes_is_told_of_by_its_opening() -> None:
    session: Any = WeightSession.__new__(WeightSession)
    session.config, session._in_place = SyncConfig(deadline_s=5.0), ""

    async def silent(endpoint: str) -> None:
        raise DeadlineExceeded(f"{endpoint}: deadline of 10 s has passed")

    session._senders, session._fleet = [Stand("trainer", 0, silent)], Fleet([], 1, 0)
    plan = toy_plan(1, 0)
    side = Side(digest="", layout=None, host="", device="cpu", incarnation="")
    with pytest.raises(DeadlineExceeded, match="sync_host: deadline") as caught:
        await session._joined("shm", plan, session._senders[0].seats, [side])
    assert caught.value.__notes__ == ["not all ports could be closed again: sync_close: deadline of 10 s has passed"]


async def test_a_replica_that_never_opens_its_port_holds_up_ever_fewer_versions_fl2() -> None:
    """It describes itself, so that it belongs again; each time all wait for its port until the deadline."""
    opened: list[int] = []
    version = 0
    plan = toy_plan(1, 1)
    digests = {bucket.index: (0,) * len(bucket.segments) for bucket in plan.buckets}

    async def trainer(endpoint: str) -> Any:
        return answers(endpoint, sharded(0, 1))

    async def healthy(endpoint: str) -> Any:
        return answers(endpoint, wanted())

    async def stuck(endpoint: str) -> Any:
        if endpoint == "sync_open":
            opened.append(version)
            raise DeadlineExceeded("sync_open: deadline of 10 s has passed")
        return answers(endpoint, wanted())

    def answers(endpoint: str, layout: Layout) -> Any:
        return {
            "sync_layout": Side(digest=layout.digest, layout=layout, host="", device="cpu", incarnation=incarnation),
            "sync_host": "here",
            "sync_open": Opened(plan_key="", proof=b"1"),
            "sync_send": Manifest(version=version, digests=digests, seconds=0.0),
            "sync_stage": Staged(version=version, digests=digests, seconds=0.1),
            "sync_commit": Applied(version=version, pause_seconds=0.0),
        }.get(endpoint)

    incarnation = "first"
    nobody: Any = Nobody()
    session: Any = WeightSession(nobody, nobody, SyncConfig(transport="shm", bucket_bytes=512))
    session._senders = [Stand("trainer", 0, trainer)]
    session._fleet = Fleet([Stand("rollout", 0, healthy), Stand("rollout", 1, stuck)], 1, 1)
    for version in range(20):
        assert (await session.publish(version)).left_out == (1,)
    assert opened == [0, 1, 3, 7, 15]
    incarnation, version = "second", 20  # it was started anew
    await session.publish(version)
    assert opened[-1] == 20
