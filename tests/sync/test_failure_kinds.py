"""Kinds of failure that weight transfers of others have had, each as it would show here. Those that other files show
better are not repeated; docs/weights_failures.md names the test of each kind."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
import torch

from sync.bases import HeldBase, SentBase
from sync.formats import Scaling
from sync.layout import Entry, Layout, LayoutError
from sync.pack import Packer
from sync.plan import make_plan
from sync.session import WeightSession
from sync.shadow import Shadow
from sync.transport import Link, SyncError, resized
from sync.transports.gloo import Receiver, Sender
from tests.sync.ranks import values
from tests.sync.sessions import TRANSPORTS, assert_serving, config, meshes, train_and_publish

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", TRANSPORTS)
@in_module_loop
async def test_memory_files_and_threads_do_not_grow_from_version_to_version(host, name):
    """Elsewhere: 2 GiB more after each update, by streams and buffers made anew"""
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config(name)) as session:
            pids = [*(await rollout.pid.call()).values()]
            for version in range(3):
                await train_and_publish(trainer, session, version)
            before = [usage(pid) for pid in pids]
            for version in range(3, 15):
                await train_and_publish(trainer, session, version)
            after = [usage(pid) for pid in pids]
            # What is left behind by each version shows twelve times; an arena or a thread of a pool may come once.
            grown = [now - then for pair in zip(after, before, strict=True) for now, then in zip(*pair, strict=True)]
            assert max(grown) <= 2, (before, after)


def usage(pid: int) -> tuple[int, int, int]:
    """Open files, threads, shared or anonymous mappings above 1 MiB of a process."""
    large = 0
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        for line in maps:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            large += end - start >= 1 << 20
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), large


@in_module_loop
async def test_engine_that_copies_keeps_the_storage_that_a_captured_graph_points_to(host):
    """Elsewhere: captured graphs read freed weights after a reload"""
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("shm")) as session:
            await train_and_publish(trainer, session, 0)
            before = await rollout.addresses.call()
            await train_and_publish(trainer, session, 1)
            assert list((await rollout.addresses.call()).values()) == list(before.values())
            await assert_serving(rollout, 1)


@in_module_loop
async def test_retry_after_a_failed_transfer_does_not_count_what_came_before(host):
    """Elsewhere: a layer finishes early with parts of the failed attempt"""
    async with meshes(host) as (trainer, rollout):
        async with WeightSession(trainer, rollout, config("gloo")) as session:
            await train_and_publish(trainer, session, 0)
            await trainer.slice(rank=1).break_by.call("tear")
            for _ in range(2):
                with pytest.raises(RuntimeError, match="arrived with digest"):
                    await train_and_publish(trainer, session, 1)
                await assert_serving(rollout, 0)
            await trainer.slice(rank=1).break_by.call("")
            await train_and_publish(trainer, session, 1)
            await assert_serving(rollout, 1)


def test_differences_of_views_that_are_not_contiguous_are_those_of_their_values():
    """Elsewhere: a sparse update with a column view of a matrix writes other values to other places"""
    wide = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    live = {"columns": wide[:, 10:50], "turned": wide[:, 60:].t()}
    layout = Layout(tuple(Entry.whole(name, tuple(t.shape), "bfloat16") for name, t in live.items()))
    plan = make_plan([layout], [layout], bucket_bytes=1 << 20)
    sent, held = SentBase(plan.buckets), HeldBase()
    for version in range(3):
        wide[version::16, ::7] += 1.0
        expected = {name: tensor.contiguous() for name, tensor in live.items()}
        base = None if version == 0 else version - 1
        sizes = sent.prepare(version, base, Packer(live.__getitem__, layout.parts, "here"))
        assert bool(sizes) == (version > 0)
        if version:
            pieces = [(resized(b, sizes), sent.payload(b, whole=False)) for b in plan.buckets]
            shadow = Shadow(layout, version, "there")
            for bucket, memory in held.rebuilt(iter(pieces), {b.index: b for b in plan.buckets}, base, layout):
                assert tuple(shadow.add(bucket, memory)) == sent.digests[bucket.index]
            for name, tensor in shadow.weights().items():
                assert torch.equal(tensor, expected[name])
        held.keep(version, expected)


def test_tensor_that_comes_in_many_buckets_is_incomplete_only_when_the_last_one_is_missing():
    """Elsewhere: a check of each chunk for the layers of a draft ends updates whose layers are spread over chunks"""
    layout = Layout((Entry.whole("model.layers.61.eh_proj.weight", (64, 64), "float32"),))
    plan = make_plan([layout], [layout], bucket_bytes=2048)
    assert len(plan.buckets) == 8
    shadow = Shadow(layout, 1, "there")
    for count, bucket in enumerate(reversed(plan.buckets)):
        if count:
            with pytest.raises(SyncError, match=r"eh_proj\.weight \(\d+ elements\)"):
                shadow.check_complete()
        shadow.add(bucket, torch.zeros(bucket.num_bytes, dtype=torch.uint8))
    shadow.check_complete()


def test_draft_layers_that_no_trainer_rank_holds_are_refused_at_start():
    """Elsewhere: drafts keep old weights and their acceptance falls to nothing, without an error"""
    norm = Entry.whole("model.norm.weight", (4,), "bfloat16")
    draft = Entry.whole("model.layers.61.eh_proj.weight", (4, 8), "bfloat16")
    with pytest.raises(
        LayoutError, match=r"model\.layers\.61\.eh_proj\.weight: rollout rank 0 needs it and no trainer"
    ):
        make_plan([Layout((norm,))], [Layout((norm, draft))], bucket_bytes=1024)


def test_router_bias_keeps_its_dtype_while_the_weights_around_it_are_cast():
    """Elsewhere: float32 scales and biases are narrowed by a cast of everything"""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    source = Layout((Entry.whole("w", (4, 4), "float32"), Entry.whole(bias, (4,), "float32")))
    sink = Layout((Entry.whole("w", (4, 4), "bfloat16"), Entry.whole(bias, (4,), "float32")))
    plan = make_plan([source], [sink], bucket_bytes=1024)
    assert {s.name: s.dtype for b in plan.buckets for s in b.segments} == {"w": "bfloat16", bias: "float32"}


def test_scales_travel_in_the_bucket_of_their_weight():
    """Elsewhere: a scale is applied before its weight has come, in another bucket"""
    scaling = Scaling("block", "w.scale", (4, 4))
    entry = Entry.whole("w", (64, 64), "float8_e4m3fn")
    entry = Entry("w", entry.box, entry.shape, entry.dtype, scaling)
    source = Layout((Entry.whole("w", (64, 64), "bfloat16"), Entry.whole("z", (64, 64), "bfloat16")))
    sink = Layout((entry, entry.scales(), Entry.whole("z", (64, 64), "bfloat16")))
    plan = make_plan([source], [sink], bucket_bytes=1024)
    for bucket in plan.buckets:
        names = [segment.name for segment in bucket.segments]
        for place, segment in enumerate(bucket.segments):
            if segment.scales_of:
                assert names[place - 1] == segment.scales_of


async def test_owners_and_sinks_that_cross_never_wait_for_each_other():
    """Elsewhere: two pipeline stages and two engines made their groups in opposite order and hung. Here each owner
    serves one sink alone and both together, so that three groups of each side overlap."""
    both = Entry.whole("a", (8,), "uint8"), Entry.whole("b", (8,), "uint8")
    only = [Entry.whole(f"only{rank}", (8,), "uint8") for rank in range(2)]
    sources = [Layout((both[0], only[1])), Layout((both[1], only[0]))]
    sinks = [Layout((both[1], only[0], both[0])), Layout((both[0], only[1], both[1]))]
    plan = make_plan(sources, sinks, bucket_bytes=64)
    assert {(b.owner, b.sinks) for b in plan.buckets} == {(0, (0, 1)), (1, (0, 1)), (0, (1,)), (1, (0,))}

    def link(rank: int, buckets) -> Link:
        return Link(rank=rank, num_senders=2, num_sinks=2, buckets=buckets, slots=1, slot_bytes=64, deadline_s=20.0)

    senders = [Sender(link(rank, plan.sent_by(rank))) for rank in range(2)]
    receivers = [Receiver(link(rank, plan.received_by(rank))) for rank in range(2)]
    address = await asyncio.to_thread(senders[0].host)
    halves: list[Sender | Receiver] = [*senders, *receivers]
    await asyncio.gather(*(asyncio.to_thread(half.open, address) for half in halves))

    def send(sender: Sender) -> None:
        for bucket in sender.link.buckets:
            sender.buffer(1, bucket).fill_(bucket.index)
            sender.put(1, bucket)
        sender.drain(1)

    def receive(receiver: Receiver) -> list[int]:
        return [int(memory[0]) for _, memory in receiver.fetch(1)]

    *_, first, second = await asyncio.gather(
        *(asyncio.to_thread(send, sender) for sender in senders),
        *(asyncio.to_thread(receive, receiver) for receiver in receivers),
    )
    assert first == [bucket.index for bucket in plan.received_by(0)]
    assert second == [bucket.index for bucket in plan.received_by(1)]
    await asyncio.gather(*(asyncio.to_thread(half.close) for half in halves))


def test_values_of_two_versions_differ_in_every_tensor():
    """What these tests compare with would otherwise pass with old weights in service."""
    for name in ("model.embed.weight", "model.norm.weight"):
        assert not torch.equal(values(name, 1).to(torch.bfloat16), values(name, 2).to(torch.bfloat16))


def test_every_test_that_the_docs_name_is_there():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/weights_failures.md").read_text(encoding="utf-8")))
    defined = {
        name for path in root.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    files = {path.stem for path in root.glob("tests/**/test_*.py")}
    assert len(named) > 25
    assert named - defined - files == set()
