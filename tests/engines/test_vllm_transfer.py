"""Weights by vLLM's own `nccl` and `ipc` engines, over real vLLM; what stands for the GPU is in standin.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from algorithms import catalog
from roles.publish import FLOAT32_THRESHOLD, Publisher, SameWeights
from roles.rollout import Rollout, RolloutConfig, VllmConfig
from roles.trainer import Trainer, TrainerConfig
from roles.types import Completion, Group, Prompt, Sampling, TrainSample
from roles.vllm_transfer import VllmTransfer
from runtime import TaskGroup, this_host
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError
from tests.engines.models import forced_logprobs, logprobs_over_a_swap, save_policy
from tests.engines.standin import StandInTrainer
from tests.engines.test_vllm_processes import process_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(700)]

LONG = tuple((7 * i) % 59 + 1 for i in range(300))
"""More than two blocks of the prefix cache."""
TOKENS = 600
"""More than are sampled before a publication has begun."""


class System:
    def __init__(self, trainer: Trainer, rollout: Rollout, publisher: Publisher, same: SameWeights) -> None:
        self.trainer, self.rollout, self.publisher, self.same = trainer, rollout, publisher, same

    async def train(self) -> int:
        sample = TrainSample(
            token_ids=np.arange(1, 9, dtype=np.int32),
            prompt_length=2,
            rollout_logprobs=np.full(6, -4.0, np.float32),
            advantages=np.ones(6, np.float32),
        )
        return (await self.trainer.train_step([sample, sample], catalog.objective("grpo"))).version

    async def exported(self, folder: Path) -> Any:
        await self.trainer.export(folder, "float32")
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    def call(self, tokens: int, n: int = 2, ids: tuple[int, ...] = LONG[:9]) -> asyncio.Task[Any]:
        prompt = Prompt(position=0, text="", token_ids=ids, task="words", entry={})
        return asyncio.create_task(
            self.rollout.group(prompt, n, Sampling(max_tokens=tokens, ignore_eos=True), 5), name="completions"
        )

    async def decoding(self, tokens: int) -> asyncio.Task[Any]:
        """A call for which steps have been made: a probe comes in between two of them."""
        call = self.call(tokens)
        while (await self.rollout.stats())[0].running == 0:
            assert not call.done(), "done before it was seen"
            await asyncio.sleep(0.01)
        for _ in range(30):
            await self.rollout.mesh.probe.call()
        assert not call.done()
        return call


@asynccontextmanager
async def system(policy: str, way: Literal["nccl", "ipc"], ranks: int) -> AsyncIterator[System]:
    vllm = VllmConfig(weight_transfer=way, arguments={"worker_extension_cls": "tests.engines.standin_worker.Extension"})
    config = RolloutConfig(
        engine="vllm", max_running=8, max_len=1024, probe_seconds=0.5, stuck_seconds=15.0, threads=1, vllm=vllm
    )
    trained = TrainerConfig(lr=0.02, ranks=ranks, strategy="fsdp2" if ranks > 1 else "auto", device="cpu")
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(this_host())
        tasks = await stack.enter_async_context(TaskGroup("system"))
        starting = asyncio.create_task(Rollout.start(host, config, policy))
        procs = await host.spawn_procs({"rank": ranks}, name="trainer")
        await procs.init_process_group("gloo")
        trainer = Trainer(trained, await procs.spawn("trainer", StandInTrainer, trained, policy))
        rollout = await starting
        transfer = VllmTransfer(trainer.mesh, rollout.mesh, way, SyncConfig(deadline_s=30.0))
        same = SameWeights(trainer, rollout, [LONG[:20], LONG[20:30]], FLOAT32_THRESHOLD)
        publisher = Publisher(transfer, trainer, rollout, same)
        watching = tasks.forever(rollout.watch(publisher.resend), name="watch")
        await publisher.publish(0)
        yield System(trainer, rollout, publisher, same)
        watching.cancel()


def completions(group: Any) -> list[Completion]:
    assert isinstance(group, Group)
    return group.completions


async def three_versions_while_requests_decode(system: System, folder: Path) -> None:
    """Each is proven by `SameWeights`, and each token by the model of its label (VE-3, W5)."""
    models = [await system.exported(folder / "0")]
    for version in (1, 2, 3):
        assert await system.train() == version
        call = await system.decoding(TOKENS)
        commit = await system.publisher.publish(version)
        assert (commit.version, commit.stage_seconds) == (version, 0.0)
        models.append(await system.exported(folder / str(version)))
        for completion in completions(await call):
            border = int((completion.versions == version - 1).sum())
            assert 0 < border < TOKENS
            assert completion.versions.tolist() == [version - 1] * border + [version] * (TOKENS - border)
            expected = logprobs_over_a_swap(models[-2], models[-1], LONG[:9], completion.token_ids, border)
            np.testing.assert_allclose(completion.logprobs, expected, atol=5e-4)


async def a_cached_prompt_is_computed_anew(system: System, folder: Path) -> None:
    """VE-2."""
    for number in range(2):
        for _ in range(2):  # the second time from the cache
            found = completions(await system.call(6, ids=LONG))
        model = await system.exported(folder / f"cached {number}")
        for completion in found:
            assert set(completion.versions.tolist()) == {system.trainer.version}
            expected = forced_logprobs(model, LONG, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=5e-4)
        await system.publisher.publish(await system.train())


async def killed_half_way_it_is_fenced_and_sent_all_of_it(system: System) -> None:
    """VT-1: nothing is sampled from parts of two versions, and nothing is lost."""
    rollout, before = system.rollout, system.trainer.version
    engine = process_of(rollout, "EngineCore")
    assert engine is not None
    first = system.trainer.mesh.slice(rank=0)
    await first.hold.call_one()
    version = await system.train()
    call = await system.decoding(TOKENS)
    publication = asyncio.create_task(system.publisher.publish(version))
    await first.halfway.call_one()
    os.kill(engine.pid, signal.SIGKILL)
    await first.go_on.call_one()
    assert (await publication).version == version
    assert rollout.restarted == 1
    await system.same.check(version)
    for completion in completions(await call):
        assert set(completion.versions.tolist()) <= {before, version}
    assert await system.train() == version + 1
    await system.publisher.publish(version + 1)


async def no_other_session_gets_through(system: System) -> None:
    with pytest.raises(SyncError, match=r"weight_transfer = 'nccl'.*publish them through a VllmTransfer"):
        await WeightSession(system.trainer.mesh, system.rollout.mesh).open()
    wrong = VllmTransfer(system.trainer.mesh, system.rollout.mesh, "ipc")
    with pytest.raises(SyncError, match="take weights in different ways"):
        await wrong.open()


async def test_nccl_from_two_ranks_to_a_mixture_of_experts(policy: str, tmp_path: Path) -> None:
    async with system(policy, "nccl", 2) as both:
        await no_other_session_gets_through(both)
        await three_versions_while_requests_decode(both, tmp_path)
        await a_cached_prompt_is_computed_anew(both, tmp_path)
        await killed_half_way_it_is_fenced_and_sent_all_of_it(both)


async def test_ipc_from_one_rank_to_a_dense_model(tmp_path: Path) -> None:
    async with system(save_policy(tmp_path / "dense", "Qwen3"), "ipc", 1) as both:
        await three_versions_while_requests_decode(both, tmp_path)
