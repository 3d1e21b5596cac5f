"""A trainer, a WeightSession and vLLM on real processes: publications, the prefix cache over them, and SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from algorithms import catalog
from roles.publish import FLOAT32_THRESHOLD, Publisher, SameWeights
from roles.rollout import Rollout, RolloutConfig
from roles.trainer import Trainer, TrainerConfig
from roles.types import Group, Prompt, Sampling, StepResult, TrainSample
from roles.vllm_leftovers import children_of, shared_memory_of
from runtime import TaskGroup, this_host
from sync.session import WeightSession
from tests.engines.models import forced_logprobs, save_policy
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(700)]

LONG = tuple((7 * i) % 59 + 1 for i in range(300))
"""More than two blocks of the prefix cache."""

SECONDS = 240.0
"""How long anything here may take; an engine starts in 20, several times as long on a loaded machine."""


class System:
    def __init__(
        self, trainer: Trainer, rollout: Rollout, publisher: Publisher, same: SameWeights, stack: AsyncExitStack
    ) -> None:
        self.trainer, self.rollout, self.publisher, self.same = trainer, rollout, publisher, same
        self.close = stack.aclose

    async def train(self) -> StepResult:
        ids = np.arange(1, 9, dtype=np.int32)
        sample = TrainSample(
            token_ids=ids,
            prompt_length=2,
            rollout_logprobs=np.full(6, -4.0, np.float32),
            advantages=np.ones(6, np.float32),
        )
        return await self.trainer.train_step([sample, sample], catalog.objective("grpo"))

    async def step(self) -> int:
        return (await self.publisher.publish((await self.train()).version)).version


def prompt(ids: tuple[int, ...]) -> Prompt:
    return Prompt(position=0, text="", token_ids=ids, task="words", entry={})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    policy = save_policy(tmp_path_factory.mktemp("dense"), "Qwen3")
    config = RolloutConfig(
        engine="vllm", max_running=8, max_len=512, probe_seconds=0.5, stuck_seconds=15.0, threads=1, max_restarts=9
    )
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(this_host())
        tasks = await stack.enter_async_context(TaskGroup("system"))
        trainer, rollout = await asyncio.gather(
            Trainer.start(host, TrainerConfig(lr=0.02), policy), Rollout.start(host, config, policy)
        )
        session = WeightSession(trainer.mesh, rollout.mesh)
        same = SameWeights(trainer, rollout, [LONG[:20], LONG[20:30]], FLOAT32_THRESHOLD)
        publisher = Publisher(session, trainer, rollout, same)
        tasks.forever(rollout.watch(publisher.resend), name="watch")
        await publisher.publish(0)
        yield System(trainer, rollout, publisher, same, stack)


async def exported(system: System, folder: Path) -> Any:
    await system.trainer.export(folder, "float32")
    return AutoModelForCausalLM.from_pretrained(folder).eval()


async def test_a_prompt_that_is_cached_is_computed_anew_after_a_publication(system: System, tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    for number in range(2):
        for _ in range(2):  # the second time from the cache
            group = await system.rollout.generate(prompt(LONG), 2, sampling, 5)
        model = await exported(system, tmp_path / str(number))
        for completion in group.completions:
            assert {int(v) for v in completion.versions} == {system.trainer.version}
            expected = forced_logprobs(model, LONG, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
        before = expected
        await system.step()
    assert before.shape == (6,)


async def test_publications_while_it_decodes_are_proven_and_lose_nothing(system: System) -> None:
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    first = system.trainer.version
    calls = [asyncio.create_task(system.rollout.group(prompt(LONG[i : i + 9]), 2, sampling, i)) for i in range(4)]
    for _ in range(2):
        await asyncio.sleep(0.05)
        await system.step()  # the proof is part of it
    versions = set()
    for group in await asyncio.gather(*calls):
        assert isinstance(group, Group)
        for completion in group.completions:
            assert len(completion.token_ids) == 200
            assert bool((np.diff(completion.versions) >= 0).all())
            versions |= {int(v) for v in completion.versions}
    assert versions <= {first, first + 1, first + 2}


def process_of(rollout: Rollout, name: str) -> psutil.Process | None:
    """The process of vLLM of that name, below the leader that there is now."""
    assert rollout.procs is not None
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(rollout.procs.pids[0]).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if name in " ".join([process.name(), *process.cmdline()]):
                    return process
    return None


@asynccontextmanager
async def load(rollout: Rollout) -> AsyncIterator[list[Group]]:
    """Three callers that ask again and again, so that some request always runs, however fast the engine is. Entered
    when one does; left when all are answered: the groups that they got."""
    groups: list[Group] = []
    over = False

    async def ask(number: int) -> None:
        while not over:
            group = await rollout.group(prompt(LONG[:8]), 2, Sampling(max_tokens=300, ignore_eos=True), number)
            assert isinstance(group, Group)
            groups.append(group)

    async with asyncio.TaskGroup() as callers:
        for number in range(3):
            callers.create_task(ask(number))
        await until(rollout.stats, lambda stats: stats[0].running)
        yield groups
        over = True


def versions_of(groups: list[Group]) -> set[int]:
    return {int(v) for group in groups for c in group.completions for v in c.versions}


async def until_restarted(rollout: Rollout, times: int) -> None:
    assert await until(lambda: rollout.restarted, lambda seen: seen >= times, seconds=SECONDS) == times


async def kill_the_engine(system: System) -> None:
    rollout, version = system.rollout, system.trainer.version
    engine = process_of(rollout, "EngineCore")
    assert engine is not None
    async with load(rollout) as groups:
        os.kill(engine.pid, signal.SIGKILL)
        await until_restarted(rollout, 1)
    assert versions_of(groups) == {version}
    await system.same.check(version)


async def stop_the_engine(system: System) -> None:
    rollout, version = system.rollout, system.trainer.version
    engine = process_of(rollout, "EngineCore")
    assert engine is not None
    async with load(rollout) as groups:
        os.kill(engine.pid, signal.SIGSTOP)  # its port stays open
        await until_restarted(rollout, 2)
    assert versions_of(groups) == {version}
    assert not engine.is_running()


async def kill_a_worker_in_a_publication(system: System) -> None:
    """It holds the weights and is a rank of the transfer."""
    rollout, before = system.rollout, system.trainer.version
    worker = process_of(rollout, "VLLM::Worker")
    assert worker is not None
    async with load(rollout) as groups:
        result = await system.train()
        publication = asyncio.create_task(system.publisher.publish(result.version))
        await asyncio.sleep(0.01)
        os.kill(worker.pid, signal.SIGKILL)
        assert (await publication).version == result.version
        await until_restarted(rollout, 3)
    assert versions_of(groups) <= {before, result.version}
    await system.same.check(result.version)


async def kill_the_leader_in_a_publication_and_again_while_it_starts(system: System) -> None:
    rollout, procs = system.rollout, system.rollout.procs
    assert procs is not None
    leader = procs.pids[0]
    named = shared_memory_of([leader, *children_of(leader)])
    result = await system.train()
    publication = asyncio.create_task(system.publisher.publish(result.version))
    await asyncio.sleep(0.03)
    os.kill(leader, signal.SIGKILL)
    await until(lambda: not any(path.exists() for path in named), seconds=2)  # R10: one; two on a loaded machine
    await until(lambda: procs.pids[0] not in (leader, 0) and process_of(rollout, "EngineCore"), seconds=SECONDS)
    os.kill(procs.pids[0], signal.SIGKILL)
    assert (await publication).version == result.version
    await until_restarted(rollout, 4)  # the publication may have been through when it was killed
    await system.same.check(result.version)
    group = await rollout.generate(prompt(LONG[:8]), 2, Sampling(max_tokens=50, ignore_eos=True), 1)
    assert versions_of([group]) == {result.version}


async def test_whoever_is_killed_or_stuck_in_whatever_phase_comes_back_and_nothing_is_lost(system: System) -> None:
    """One test, the last one: what is started anew would look like leftovers of it."""
    await kill_the_engine(system)
    await stop_the_engine(system)
    await kill_a_worker_in_a_publication(system)
    await kill_the_leader_in_a_publication_and_again_while_it_starts(system)
    await system.close()
