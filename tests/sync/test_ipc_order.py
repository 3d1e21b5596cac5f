"""IP-1, IP-3, IP-4, HP-2: the order of things in `ipc`, on a GPU of host memory whose events pass when waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sync.plan import Bucket, Plan
from sync.transport import Link
from sync.transports import ipc
from tests.sync.ranks import toy_plan


class FakeDriver:
    """Memory of this process; mapping is being told the address."""

    kept: dict[int, Any] = {}

    def allocate(self, num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.kept[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, pointer: int) -> None: ...

    def handle(self, pointer: int) -> bytes:
        return str(pointer).encode().ljust(64)

    def map(self, handle: bytes) -> int:
        return int(handle)

    def unmap(self, pointer: int) -> None: ...

    def copy(self, target: Tensor, source: int, num_bytes: int) -> None:
        ctypes.memmove(target.data_ptr(), source, num_bytes)


class FakeEvent:
    def synchronize(self) -> None: ...


class FakeStream:
    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: FakeEvent) -> None: ...

    def synchronize(self) -> None: ...


def over(ring: Any, device: str) -> Tensor:
    pointer, size = ring.__cuda_array_interface__["data"][0], ring.__cuda_array_interface__["shape"][0]
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.uint8)


@pytest.fixture(params=["one GPU", "two GPUs"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer and rollout ranks on one GPU or on two."""
    numbers = iter(range(1000)) if request.param == "two GPUs" else iter([7] * 1000)
    cuda = SimpleNamespace(
        current_stream=FakeStream,
        current_device=lambda: 0,
        synchronize=lambda: None,
        Stream=FakeStream,
        Event=FakeEvent,
        stream=lambda _: contextlib.nullcontext(),
    )
    fake = SimpleNamespace(
        cuda=cuda, as_tensor=over, uint8=torch.uint8, empty=lambda n, dtype, device: torch.empty(n, dtype=dtype)
    )
    monkeypatch.setattr(ipc, "torch", fake)
    monkeypatch.setattr(ipc, "_Driver", FakeDriver)
    monkeypatch.setattr(ipc, "_this_gpu", lambda: str(next(numbers)).encode().ljust(48))
    yield
    FakeDriver.kept.clear()


def content(bucket: Bucket, version: int) -> Tensor:
    return torch.full((bucket.num_bytes,), (bucket.index + 7 * version) % 251, dtype=torch.uint8)


def link(plan: Plan, rank: int, buckets: tuple[Bucket, ...], slots: int) -> Link:
    return Link(
        rank=rank,
        num_senders=plan.num_senders,
        num_sinks=plan.num_sinks,
        buckets=buckets,
        slots=slots,
        slot_bytes=plan.largest_bucket,
        deadline_s=5.0,
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_versions_pass_whole_and_nobody_waits_for_what_another_one_holds_back(gpu, slots):
    plan = toy_plan(2, 2)
    senders = [ipc.Sender(link(plan, rank, plan.sent_by(rank), slots)) for rank in range(2)]
    receivers = [ipc.Receiver(link(plan, rank, plan.received_by(rank), slots)) for rank in range(2)]
    address = senders[0].host()
    assert address.startswith(f"/proc/{os.getpid()}/")

    decided = Barrier(4, timeout=20)  # a session begins a version when the one before has ended

    def send(rank: int) -> None:
        for version in range(3):
            decided.wait()
            for bucket in plan.sent_by(rank):
                senders[rank].buffer(version, bucket).copy_(content(bucket, version))
                senders[rank].put(version, bucket)

    def receive(rank: int) -> int:
        count = 0
        for version in range(3):
            decided.wait()
            for bucket, memory in receivers[rank].fetch(version):
                assert torch.equal(memory, content(bucket, version))
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda t: t.open(address), [*senders, *receivers]))
        sending = [pool.submit(send, rank) for rank in range(2)]
        receiving = [pool.submit(receive, rank) for rank in range(2)]
        assert [r.result() for r in receiving] == [3 * len(plan.received_by(rank)) for rank in range(2)]
        for sent in sending:
            sent.result()
    assert len(plan.sent_by(0)) > 3
    for receiver in receivers:
        receiver.close()
    for sender in senders:
        sender.close()


def test_the_ring_of_a_trainer_is_freed_though_a_rollout_rank_was_killed_ip5(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(FakeDriver, "free", lambda _, pointer: freed.append(pointer))
    plan = toy_plan(1, 1)
    sender, receiver = (
        ipc.Sender(link(plan, 0, plan.sent_by(0), 2)),
        ipc.Receiver(link(plan, 0, plan.received_by(0), 2)),
    )
    address = sender.host()
    sender.open(address)
    ended = subprocess.Popen(["true"])
    with monkeypatch.context() as there:
        there.setattr(os, "getpid", lambda: ended.pid)
        receiver.open(address)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken note yet
    sender.close()
    ended.wait()
    assert len(freed) == 1
