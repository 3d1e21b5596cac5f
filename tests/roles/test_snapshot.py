"""PU-3 and GR-3 with real processes: replicas beside the fleet keep the weights of their snapshot."""

from __future__ import annotations

import asyncio
import functools
import os
import signal

import msgspec
import pytest

from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import POLICY, SAMPLING, started
from roles.publish import Publisher, SameWeights
from roles.rollout import Rollout, RolloutConfig
from roles.types import Scored
from runtime import TaskGroup
from tests.waiting import until


@pytest.mark.timeout(120)
async def test_a_snapshot_stays_while_the_fleet_moves_on():
    async with started() as roles:
        config = RolloutConfig(max_len=256, threads=1, max_restarts=0)
        others = await Rollout.start(roles.host, config, POLICY, name="evaluation")
        publisher = Publisher(roles.weights, roles.trainer, roles.rollout)
        same = SameWeights(roles.trainer, others, [roles.prompts.at(0).token_ids], 1e-3)
        prompt = roles.prompts.take()

        async def versions(rollout: Rollout) -> set[int]:
            group = await rollout.generate(prompt, 2, SAMPLING, 0)
            return {int(v) for one in group.completions for v in one.versions}

        start = roles.trainer.version
        await publisher.publish(start)
        await publisher.snapshot(others, same)
        group = await roles.rollout.generate(prompt, 2, SAMPLING, 0)
        scored = msgspec.structs.replace(group, rewards=[Scored(1.0), Scored(0.0)])
        result = await roles.trainer.train_step(to_samples([scored]), objective("grpo"))
        await publisher.publish(result.version)
        assert (await versions(roles.rollout), await versions(others)) == ({start + 1}, {start})
        await publisher.snapshot(others, same)
        assert await versions(others) == {start + 1}


@pytest.mark.timeout(120)
async def test_a_replica_beside_the_fleet_that_is_lost_comes_back_with_the_weights_of_now_pu2():
    async with started() as roles, TaskGroup("test") as tasks:
        config = RolloutConfig(max_len=256, threads=1, probe_seconds=0.2)
        others = await Rollout.start(roles.host, config, POLICY, name="evaluation")
        publisher = Publisher(roles.weights, roles.trainer, roles.rollout)
        tasks.forever(others.watch(functools.partial(publisher.resend, others=others)), name="watch")
        same = SameWeights(roles.trainer, others, [roles.prompts.at(0).token_ids], 1e-3)
        prompt = roles.prompts.take()
        await publisher.publish(roles.trainer.version)
        group = await roles.rollout.generate(prompt, 2, SAMPLING, 0)
        samples = to_samples([msgspec.structs.replace(group, rewards=[Scored(1.0), Scored(0.0)])])
        await roles.trainer.train_step(samples, objective("grpo"))
        await publisher.snapshot(others, same)
        await roles.trainer.train_step(samples, objective("grpo"))

        def kill() -> None:
            assert others.procs is not None
            os.kill(others.procs.pids[0], signal.SIGKILL)

        kill()  # while nobody asks
        await until(lambda: others.restarted == 1, seconds=60)
        assert others.losses == 1
        await same.check(roles.trainer.version)
        kill()  # with a snapshot on its way
        await asyncio.sleep(0.01)
        await publisher.snapshot(others, same)
        answer = await others.generate(prompt, 2, SAMPLING, 0)
        assert {int(v) for one in answer.completions for v in one.versions} == {roles.trainer.version}
