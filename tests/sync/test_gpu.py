"""KE-1 to KE-3, NC-1 to NC-3, IP-1 to IP-3 on GPUs of one host; trainer and rollout share a single one, by ipc."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from runtime import ActorMesh, HostMesh, ProcessDied
from sync.digest import mix64
from sync.explain import quantised as quantised_layout
from sync.formats import Scaling
from sync.layout import Box, Entry, Layout
from sync.quantise import largest, quantised, scales_of
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError
from tests.sync.gpu_ranks import SHAPES, GpuRollout, GpuTrainer, values

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


def test_copies_are_whole_and_their_digests_those_of_the_definition():
    from sync.kernels import copy_mixed

    for num_bytes in (0, 1, 3, 4, 5, 64, 8192 * 4, 8192 * 4 + 1, 3_000_001):
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        digest = copy_mixed(target, source)
        assert torch.equal(target, source)
        assert digest.item() == mix64(source.cpu()).item()
    strided = torch.randn(64, 96, device="cuda").to(torch.bfloat16)[:, 10:50]
    target = torch.zeros(64, 40, dtype=torch.bfloat16, device="cuda")
    digest = copy_mixed(target, strided)
    assert torch.equal(target, strided)
    assert digest.item() == mix64(target.cpu().view(torch.uint8).view(-1)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("box", [Box((0, 0), (512, 768)), Box((100, 130), (500, 700)), Box((128, 0), (129, 3))])
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_codes_and_scales_are_those_of_the_definition_on_cpu(dtype, scale, box, kind):
    """KE-1, KE-3"""
    from sync.kernels import quantise

    shape = (512, 768)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)).mul(0.02).to(dtype)
    weight[0, :128] = 0
    scaling = Scaling(kind, "s", (128, 128), scale)
    part = weight[box.slices_in(Box.whole(shape))]
    most = largest(part, box, shape, scaling)
    expected = scales_of(most, "float8_e4m3fn", scaling)
    codes = quantised(part, expected, box, shape, "float8_e4m3fn", scaling)
    for given in (None, most.cuda() * 1.5):
        if given is not None:
            expected = scales_of(given.cpu(), "float8_e4m3fn", scaling)
            codes = quantised(part, expected, box, shape, "float8_e4m3fn", scaling)
        out = torch.empty(box.shape, dtype=torch.float8_e4m3fn, device="cuda")
        on_gpu = weight.cuda()[box.slices_in(Box.whole(shape))]
        scales, broken = quantise(on_gpu, out, box, shape, scaling, given)
        assert torch.equal(scales.cpu(), expected)
        assert torch.equal(out.cpu().view(torch.uint8), codes.view(torch.uint8))
        assert broken.item() == 0
    on_gpu = weight.cuda()
    on_gpu[box.lo] = float("nan")
    assert quantise(on_gpu[box.slices_in(Box.whole(shape))], out, box, shape, scaling, None)[1].item() > 0


def check_gpus(name: str) -> None:
    if name == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")


@contextlib.asynccontextmanager
async def ranks(host: HostMesh, layout: Layout) -> AsyncIterator[tuple[ActorMesh, ActorMesh]]:
    procs = await host.spawn_procs(2, name="ranks", start="fresh")
    try:
        trainer = await procs.slice(rank=0).spawn("trainer", GpuTrainer)
        yield trainer, await procs.slice(rank=1).spawn("rollout", GpuRollout, layout)
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
