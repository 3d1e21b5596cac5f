"""The handle of roles/rollout.py in orders that real processes seldom take (RH-1, RH-5). The replica is a small object
here, that does what it is told; those of tests/roles/test_recovery.py are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roles.engine import EngineFailed, TooOld
from roles.pieces import last_piece
from roles.rollout import Rollout, RolloutConfig
from roles.types import Completion, Piece, Sampling
from runtime import Death, ProcessDied, TaskGroup
from sync.transport import SyncError


class Replica:
    """A mesh of one replica, and its process."""

    def __init__(self) -> None:
        self.version = 0
        self.failure: Exception | None = None
        """What calls raise."""
        self.num_starts = 1
        self.reviving = False
        self.process = SimpleNamespace(kill=lambda _signal: self.started_anew())
        self.ended = asyncio.Event()
        self.ended.set()
        self.told: list[list[Piece | Exception]] = []
        """What each stream gives."""
        self.probe = self.stream = self

    def started_anew(self) -> None:
        self.num_starts, self.failure, self.version = self.num_starts + 1, None, 0

    def __len__(self) -> int:
        return 1

    def slice(self, rank: int) -> Replica:
        return self

    def options(self, timeout: float) -> Replica:
        return self

    async def call_one(self) -> Any:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(version=self.version)

    def stream_one(self, *_: Any) -> Stream:
        return Stream(self.told.pop(0))


class Stream(AbstractAsyncContextManager[None]):
    """What a call of `stream` gives."""

    def __init__(self, told: list[Piece | Exception]) -> None:
        self.told = told

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for one in self.told:
            if isinstance(one, Exception):
                raise one
            yield one


def death() -> ProcessDied:
    return ProcessDied("rollout", 0, "here", "generate", Death(signal=9))


@asynccontextmanager
async def watched(
    replica: Replica, resend: Callable[[int], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[Rollout, asyncio.Task[Any]]]:
    mesh: Any = replica
    procs: Any = SimpleNamespace(ranks=[replica])
    rollout = Rollout(mesh, procs, RolloutConfig(probe_seconds=0))
    async with TaskGroup("replica") as tasks:
        yield rollout, tasks.forever(rollout.watch(resend), name="watch")


@pytest.mark.parametrize("fault", ["death", "engine"])
async def test_a_replica_that_is_lost_again_while_it_gets_its_weights_is_brought_back_again_rh1(fault: str) -> None:
    replica, resent = Replica(), list[int]()

    async def resend(rank: int) -> None:
        resent.append(rank)
        if len(resent) > 1:
            replica.version = 1
        elif fault == "death":
            replica.started_anew()  # by its policy
            raise SyncError("rollout rank 0 died")
        else:
            replica.failure = EngineFailed("out of memory")
            raise replica.failure

    async with watched(replica, resend) as (rollout, _):
        rollout.published(1)
        assert await rollout.troubled()  # it is behind
        await rollout.all_serve()
        assert (resent, rollout.serving, rollout.restarted, replica.num_starts) == ([0, 0], (0,), 1, 2)


@pytest.mark.parametrize("takes_it", [True, False])
async def test_one_that_must_not_serve_for_its_old_weights_gets_new_ones_and_a_new_process_only_if_it_takes_none_rh1(
    takes_it: bool,
) -> None:
    replica, resent = Replica(), list[int]()

    async def resend(rank: int) -> None:
        resent.append(replica.num_starts)
        if not takes_it and replica.num_starts == 1:
            raise SyncError("rollout rank 0 does not fetch")
        replica.failure, replica.version = None, 3

    replica.version = 1
    async with watched(replica, resend) as (rollout, _):
        rollout.published(1)
        replica.failure = TooOld("it still serves version 1")
        assert await rollout.troubled()
        await rollout.all_serve()
        assert (resent, rollout.serving) == ([1] if takes_it else [1, 2], (0,))


@pytest.mark.parametrize("gone", [True, False])
async def test_one_that_is_gone_for_good_or_not_to_blame_ends_the_run_rh1(gone: bool) -> None:
    replica = Replica()

    async def resend(rank: int) -> None:
        if gone:
            replica.failure = death()
        raise SyncError("weights were not sent")

    with pytest.raises(SyncError, match="weights were not sent"):
        async with watched(replica, resend) as (rollout, watch):
            rollout.published(1)
            assert await rollout.troubled()
            await asyncio.wait([watch])
    assert replica.num_starts == 1


@pytest.mark.parametrize("error", [death(), EngineFailed("a step has failed")])
async def test_who_reads_late_of_a_loss_does_not_disturb_the_replica_that_is_back_rh1(error: Exception) -> None:
    replica = Replica()
    ids = np.array([5, 6], np.int32)
    whole = Completion(token_ids=ids, logprobs=-ids.astype(np.float32), versions=0 * ids, finish_reason="length")
    first = Piece(token_ids=ids[:1], logprobs=whole.logprobs[:1], versions=whole.versions[:1])
    replica.told = [[first, error], [last_piece(whole)]]
    async with watched(replica) as (rollout, _):
        told = list[Piece]()
        async for piece in rollout.stream((1, 2), Sampling(max_tokens=2), 3):
            if not told:
                replica.failure = EngineFailed("a step has failed")
                assert await rollout.troubled()
                await rollout.all_serve()
            told.append(piece)
        assert told[-1].completion is whole
        for _ in range(20):
            await asyncio.sleep(0)
        assert (replica.num_starts, rollout.serving, rollout.restarted) == (2, (0,), 1)
