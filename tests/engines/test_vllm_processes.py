"""A trainer, a WeightSession and vLLM on real processes: publications, the prefix cache over them, and SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
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
from roles.types import Group, Prompt, Sampling, TrainSample
from runtime import TaskGroup, this_host
from sync.session import WeightSession
from tests.engines.models import forced_logprobs, save_policy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LONG = tuple((7 * i) % 59 + 1 for i in range(300))
"""More than two blocks of the prefix cache."""


class System:
    def __init__(
        self, trainer: Trainer, rollout: Rollout, publisher: Publisher, same: SameWeights, stack: AsyncExitStack
    ) -> None:
        self.trainer, self.rollout, self.publisher, self.same = trainer, rollout, publisher, same
        self.close = stack.aclose

    async def step(self) -> int:
        ids = np.arange(1, 9, dtype=np.int32)
        sample = TrainSample(
            token_ids=ids,
            prompt_length=2,
            rollout_logprobs=np.full(6, -4.0, np.float32),
            advantages=np.ones(6, np.float32),
        )
        result = await self.trainer.train_step([sample, sample], catalog.objective("grpo"))
        return (await self.publisher.publish(result.version)).version


def prompt(ids: tuple[int, ...]) -> Prompt:
    return Prompt(position=0, text="", token_ids=ids, task="words", entry={})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    policy = save_policy(tmp_path_factory.mktemp("dense"), "Qwen3")
    config = RolloutConfig(engine="vllm", max_running=8, max_len=512, probe_seconds=0.5, threads=1)
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


async def test_a_killed_engine_is_started_anew_and_sent_the_weights_and_its_calls_are_answered(system: System) -> None:
    rollout = system.rollout
    assert rollout.procs is not None
    version = system.trainer.version
    calls = [
        asyncio.create_task(rollout.group(prompt(LONG[:8]), 2, Sampling(max_tokens=300, ignore_eos=True), i))
        for i in range(3)
    ]
    while (await rollout.stats())[0].running == 0:
        await asyncio.sleep(0.01)
    leader = psutil.Process(rollout.procs.pids[0])
    engine = next(p for p in leader.children(recursive=True) if "EngineCore" in " ".join([p.name(), *p.cmdline()]))
    os.kill(engine.pid, signal.SIGKILL)
    for group in await asyncio.gather(*calls):
        assert isinstance(group, Group)
        assert {int(v) for c in group.completions for v in c.versions} == {version}
    assert rollout.restarted == 1
    await system.same.check(version)
    assert await system.step() == version + 1
    await system.close()  # the last test: what it started anew would look like its leftovers
