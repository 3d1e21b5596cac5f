"""KE-1 to KE-3, KF-1 to KF-3, NC-1 to NC-3, IP-1 to IP-4 on GPUs of one host. Where there is only
one, trainer and rollout share it, by ipc."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from runtime import ActorMesh, HostMesh, ProcessDied
from sync.explain import quantised as quantised_layout
from sync.formats import Scaling
from sync.layout import Box, Entry, Layout
from sync.quantise import largest, quantised, scales_of
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError
from tests.sync.gpu_kernels import CASES, apart
from tests.sync.gpu_ranks import SHAPES, GpuRollout, GpuTrainer, WrittenOver, values

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

PLAIN = Layout(tuple(Entry.whole(name, shape, "bfloat16") for name, shape in SHAPES.items()))
SCALED = quantised_layout(PLAIN, ["layers.0.up.weight"], "float8_e4m3fn", Scaling("block", "weight_scale_inv"))


@pytest.fixture(scope="module", autouse=True)
def awake() -> None:
    """The driver and the compiler open what they keep for good; the tests are watched for what they leave."""
    from sync.kernels import copy_mixed

    source = torch.ones(64, dtype=torch.uint8, device="cuda")
    copy_mixed(torch.zeros_like(source), source)


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_its_definition_bit_for_bit(case):
    """KE-1, KE-3, KF-1, KF-3; in a process of its own, so that a crash of the compiler is one test that fails"""
    status, told = apart(case)
    assert status == 0, f"status {status}: {told}"


def check_gpus(name: str) -> None:
    if name == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")


@contextlib.asynccontextmanager
async def ranks(
    host: HostMesh, layout: Layout, kind: type[GpuRollout] = GpuRollout
) -> AsyncIterator[tuple[ActorMesh, ActorMesh]]:
    procs = await host.spawn_procs(2, name="ranks", start="fresh")
    try:
        trainer = await procs.slice(rank=0).spawn("trainer", GpuTrainer)
        yield trainer, await procs.slice(rank=1).spawn("rollout", kind, layout)
    finally:
        await procs.stop()


async def assert_serving(rollout: ActorMesh, version: int) -> None:
    served, weights = await rollout.serving.call_one()
    assert served == version
    for name, shape in SHAPES.items():
        truth = values(name, version)
        if weights[name].dtype == torch.bfloat16:
            assert torch.equal(weights[name], truth)
            continue
        scaling, box = Scaling("block", "s"), Box.whole(shape)
        scales = scales_of(largest(truth, box, shape, scaling), "float8_e4m3fn", scaling)
        codes = quantised(truth, scales, box, shape, "float8_e4m3fn", scaling)
        assert torch.equal(weights[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(weights[f"{name.removesuffix('.weight')}.weight_scale_inv"], scales)


@pytest.mark.parametrize("layout", [PLAIN, SCALED], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("name", ["ipc", "nccl", "auto"])
@in_module_loop
async def test_versions_arrive_whole_on_the_other_gpu_and_memory_is_flat(host, name, layout):
    check_gpus(name)
    async with ranks(host, layout) as (trainer, rollout):
        async with WeightSession(trainer, rollout, SyncConfig(transport=name, bucket_bytes=1 << 18)) as session:
            for version in range(3):
                await trainer.train_to.call(version)
                commit = await session.publish(version)
                await assert_serving(rollout, version)
            assert commit.transport == ("ipc" if name == "auto" else name)
            before = await rollout.used.call_one()
            for version in range(3, 20):
                await session.publish(version)
            assert await rollout.used.call_one() == before


@pytest.mark.parametrize("layout", [PLAIN, SCALED], ids=["bfloat16", "float8"])
@in_module_loop
async def test_on_one_gpu_versions_go_from_the_ring_over_the_weights_in_service(host, layout):
    """IP-4, RO-2: no second copy, on either side"""
    async with ranks(host, layout, WrittenOver) as (trainer, rollout):
        config = SyncConfig(transport="ipc", bucket_bytes=1 << 18, shadow="ring")
        async with WeightSession(trainer, rollout, config) as session:
            before = await rollout.used.call_one()
            for version in range(4):
                await trainer.train_to.call(version)
                await session.publish(version)
                await assert_serving(rollout, version)
            assert await rollout.used.call_one() - before < 64 << 20  # of the allocator; kernels are loaded, too


@pytest.mark.parametrize("name", ["ipc", "nccl"])
@in_module_loop
async def test_value_that_is_not_finite_is_named_and_the_old_version_stays(host, name):
    check_gpus(name)
    async with ranks(host, SCALED) as (trainer, rollout):
        async with WeightSession(trainer, rollout, SyncConfig(transport=name, bucket_bytes=1 << 18)) as session:
            await session.publish(0)
            await trainer.poison.call()
            with pytest.raises(SyncError, match=r"layers\.0\.up\.weight: trainer rank 0, version 1: box .* not finite"):
                await session.publish(1)
            await assert_serving(rollout, 0)
            await trainer.train_to.call(1)
            await session.publish(1)
            await assert_serving(rollout, 1)


@pytest.mark.parametrize("name", ["ipc", "nccl"])
@in_module_loop
async def test_trainer_that_is_killed_leaves_the_rollout_serving(host, name):
    """NC-3: the survivor's process and its GPU go on"""
    check_gpus(name)
    async with ranks(host, PLAIN) as (trainer, rollout):
        session = WeightSession(trainer, rollout, SyncConfig(transport=name, bucket_bytes=1 << 18))
        await session.publish(0)
        with pytest.raises(ProcessDied):
            await trainer.die.call()
        with pytest.raises(SyncError, match="killed by SIGKILL"):
            await session.publish(1)
        await assert_serving(rollout, 0)
        await session.close()
