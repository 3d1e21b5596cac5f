"""Replicas that die, hang or fall behind: roles/rollout.py (RH-1, RH-5) and roles/publish.py, over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import catalog
from roles.engine import Behind
from roles.publish import FLOAT32_THRESHOLD, Publisher, SameWeights, WeightsDiffer
from roles.rollout import Rollout, RolloutConfig, RolloutRank
from roles.trainer import Trainer, TrainerConfig
from roles.types import Group, Sampling, TrainSample
from runtime import ActorError, HostMesh, TaskGroup, endpoint, this_host
from sync.config import SyncConfig
from sync.session import WeightSession
from tests.roles.tiny import prompt_at, save_tiny_policy
from tests.waiting import until

SEQUENCES = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
LONG = Sampling(max_tokens=600, ignore_eos=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


class System:
    """A trainer, replicas, what publishes and what watches."""

    def __init__(self, trainer: Trainer, rollout: Rollout, publisher: Publisher, same: SameWeights) -> None:
        self.trainer, self.rollout, self.publisher, self.same = trainer, rollout, publisher, same

    async def step(self) -> int:
        """One training step, published; returns the version."""
        ids = np.arange(1, 9, dtype=np.int32)
        sample = TrainSample(
            token_ids=ids,
            prompt_length=2,
            rollout_logprobs=np.full(6, -4.0, np.float32),
            advantages=np.ones(6, np.float32),
        )
        result = await self.trainer.train_step([sample, sample], catalog.objective("grpo"))
        return (await self.publisher.publish(result.version)).version

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        assert self.rollout.procs is not None
        os.kill(self.rollout.procs.pids[rank], number)


@asynccontextmanager
async def system(policy: str, **config: Any) -> AsyncIterator[System]:
    async with this_host() as host, TaskGroup("system") as tasks:
        yield await started(host, tasks, policy, **config)


async def started(
    host: HostMesh, tasks: TaskGroup, policy: str, sync: SyncConfig | None = None, **config: Any
) -> System:
    settings = {"ranks": 2, "max_running": 16, "probe_seconds": 0.2, "max_restarts": 8, **config}
    trainer, rollout = await asyncio.gather(
        Trainer.start(host, TrainerConfig(lr=0.01), policy), Rollout.start(host, RolloutConfig(**settings), policy)
    )
    session = WeightSession(trainer.mesh, rollout.mesh, sync)
    same = SameWeights(trainer, rollout, SEQUENCES, FLOAT32_THRESHOLD)
    publisher = Publisher(session, trainer, rollout, same)
    tasks.forever(rollout.watch(publisher.resend), name="watch")
    await publisher.publish(0)
    return System(trainer, rollout, publisher, same)


@pytest.mark.timeout(150)
async def test_sigkill_at_every_phase_loses_nothing_and_the_replica_comes_back_with_the_weights_rh1_rh5(
    policy: str,
) -> None:
    async with system(policy) as it:
        rollout = it.rollout
        assert await it.step() == 1
        # while it generates, with calls running and waiting
        calls = [asyncio.create_task(rollout.group(prompt_at(i), 4, LONG, 11)) for i in range(12)]
        await until(rollout.stats, lambda stats: stats[0].running, during=calls)
        it.kill(0)
        groups = await asyncio.gather(*calls)
        assert [type(group) for group in groups] == [Group] * 12
        assert {len(c.token_ids) for g in groups if isinstance(g, Group) for c in g.completions} == {LONG.max_tokens}
        await rollout.all_serve()
        assert [s.version for s in await rollout.stats()] == [1, 1]
        await it.same.check(1)
        # while it is idle: `watch` finds out by itself
        it.kill(1)
        await until(lambda: rollout.restarted >= 2)
        await it.same.check(1)
        # at several moments of a publication, with calls under way
        for version, delay in ((2, 0.0), (3, 0.01), (4, 0.03)):
            calls = [asyncio.create_task(rollout.group(prompt_at(i), 2, LONG, version)) for i in range(6)]
            publishing = asyncio.create_task(it.step())
            await asyncio.sleep(delay)
            it.kill(version % 2)
            assert await publishing == version
            assert all(isinstance(group, Group) for group in await asyncio.gather(*calls))
            await rollout.all_serve()
            assert [s.version for s in await rollout.stats()] == [version, version]
            await it.same.check(version)
        assert rollout.outstanding == (0, 0)
        assert rollout.restarted >= 5


async def test_the_only_replica_is_waited_for_and_a_stuck_one_is_ended(policy: str) -> None:
    async with system(policy, ranks=1, stuck_seconds=0.5) as it:
        assert await it.step() == 1
        it.kill(0, signal.SIGSTOP)  # alive, but no step is ever made again
        group = await it.rollout.generate(prompt_at(0), 2, Sampling(max_tokens=4), 11)
        assert len(group.completions) == 2
        assert {int(v) for c in group.completions for v in c.versions} == {1}  # RH-5
        assert it.rollout.restarted == 1


async def test_a_replica_that_is_being_started_anew_is_not_taken_for_stuck(policy: str) -> None:
    """A probe that it was sent meanwhile waits longer than `stuck_seconds`: vLLM starts in minutes."""
    async with system(policy, ranks=1, stuck_seconds=0.6) as it:
        assert it.rollout.procs is not None
        it.kill(0)
        place = it.rollout.procs.ranks[0]
        await until(lambda: place.reviving, pause=0.001)  # a restart begins with a pause of 0.5 s
        assert await it.rollout.troubled()
        await it.rollout.all_serve()
        assert (it.rollout.starts, it.rollout.restarted) == ((2,), 1)


async def test_a_proof_is_not_answered_by_the_weights_that_a_process_starts_with_rh5(policy: str) -> None:
    """It died between a commit and its proof: nothing is wrong with its engine."""
    async with this_host() as host, TaskGroup("system") as tasks:
        it = await started(host, tasks, policy, ranks=1, probe_seconds=600.0)  # only who is told notices
        assert await it.step() == 1
        assert it.rollout.procs is not None
        place = it.rollout.procs.ranks[0]
        it.kill(0)
        await until(lambda: place.reviving, pause=0.001)
        with pytest.raises(Behind, match="version 0 is in service here, 1 was before"):
            await it.same.check(1)
        assert (await it.publisher.publish(1)).version == 1
        await it.same.check(1)


@pytest.mark.timeout(120)
async def test_with_a_quorum_the_proof_is_asked_of_those_that_have_the_version_pu1(policy: str) -> None:
    """A replica that hangs is left out of a version, and holds up nobody until it is back."""
    async with this_host() as host, TaskGroup("system") as tasks:
        sync = SyncConfig(quorum=1, deadline_s=2.0)
        it = await started(host, tasks, policy, sync, probe_seconds=600.0)
        it.kill(1, signal.SIGSTOP)
        async with asyncio.timeout(60):
            assert await it.step() == 1
        it.kill(1, signal.SIGCONT)
        assert await it.step() == 2
        assert [s.version for s in await it.rollout.stats()] == [2, 2]


DIED = "TUTTI_TEST_DIED"


class DiesInASwap(RolloutRank):
    """In that of version 1, once; then it starts for longer than it is asked to stop serving."""

    def __init__(self, config: RolloutConfig, model_path: str) -> None:
        super().__init__(config, model_path)
        self._died = Path(os.environ[DIED])
        self._again = self._died.exists()
        if self._again:
            time.sleep(1.5)

    async def apply_weights(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any] | None:
        if version == 1 and not self._again:
            self._died.touch()  # a tiny file
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().apply_weights(weights, version)

    @endpoint(concurrency=4)
    async def sync_fence(self, version: int, reason: str, torn: str = "") -> None:
        await super().sync_fence(version, reason, torn)
        if self.weights_fenced:
            self._died.write_text(reason)  # a tiny file


async def test_what_a_process_died_of_is_not_held_against_the_next_one_po6(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't be told not to serve, and is told before the next version: by then that is another process, which has
    its weights and serves."""
    monkeypatch.setenv(DIED, str(tmp_path / "died"))
    monkeypatch.setattr("roles.rollout.RolloutRank", DiesInASwap)
    async with system(policy, ranks=1, probe_seconds=0.05) as it:
        assert await it.step() == 1
        assert it.rollout.starts == (2,)
        assert (tmp_path / "died").read_text() == ""
        group = await it.rollout.generate(prompt_at(0), 2, Sampling(max_tokens=4), 11)
        assert {int(v) for c in group.completions for v in c.versions} == {1}


async def test_a_new_process_that_is_told_not_to_serve_before_it_has_weights_is_sent_them_po6(policy: str) -> None:
    """Versions that go on without the replica while it starts tell it so: that waits at its door."""
    async with system(policy, ranks=1) as it:
        assert await it.step() == 1
        assert it.rollout.procs is not None
        place = it.rollout.procs.ranks[0]
        it.kill(0)
        await until(lambda: place.reviving, pause=0.001)
        await it.rollout.mesh.sync_fence.options(timeout=30.0).call_one(1, "it has taken no version yet")
        assert await it.rollout.troubled()
        await it.rollout.all_serve()
        assert it.rollout.starts == (2,)
        await it.same.check(1)


async def test_a_replica_that_dies_too_often_ends_the_run_with_its_name(policy: str) -> None:
    with pytest.raises(ActorError, match="rollout rank 0"):
        async with system(policy, ranks=1, max_restarts=1) as it:
            for _ in range(2):
                with suppress(ActorError):
                    await it.rollout.generate(prompt_at(0), 1, Sampling(max_tokens=2), 11)
                it.kill(0)
                await asyncio.sleep(0.3)
            await it.rollout.generate(prompt_at(0), 1, Sampling(max_tokens=2), 11)


async def test_weights_that_are_not_the_trainers_are_found_by_the_first_publication_pu1(
    policy: str, tmp_path: Path
) -> None:
    other = save_tiny_policy(tmp_path, seed=5)
    async with this_host() as host:
        trainer = await Trainer.start(host, TrainerConfig(), policy)
        rollout = await Rollout.start(host, RolloutConfig(), other)
        same = SameWeights(trainer, rollout, SEQUENCES, FLOAT32_THRESHOLD)
        with pytest.raises(WeightsDiffer, match=r"version 0: rollout rank 0 gives 7 fixed tokens logprobs that are"):
            await same.check(0)
        await Publisher(WeightSession(trainer.mesh, rollout.mesh), trainer, rollout, same).publish(0)
