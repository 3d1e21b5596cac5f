"""Stands in for the GPU under vLLM's `nccl` and `ipc` weight transfer: gloo for NCCL, a file for CUDA memory.

All else is vLLM's own: its sending halves, its engines in the workers, what they say to each other, its reload. What is
replaced are the functions of those modules that touch a device.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roles.trainer import TrainerRank
from runtime import endpoint

LIMIT = timedelta(seconds=60)
GO_ON, HALFWAY = threading.Event(), threading.Event()
GO_ON.set()


class Gloo:
    """Stands for vLLM's PyNcclCommunicator. One that lost a peer is mute, as one that was aborted is."""

    def __init__(self, address: str, port: int, rank: int, world: int) -> None:
        self.store = dist.TCPStore(address, port, world, rank == 0, LIMIT)
        self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), rank, world, LIMIT)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self.group = None


def meet_as_worker(info: Any, parallel: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, info.rank_offset + parallel.rank, info.world_size)


def meet_as_trainer(info: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, 0, info.world_size)


def produce(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], Tensor], **_: Any) -> None:
    """Tensor by tensor; waits after a few of them where a test wants to do something then."""
    for number, item in enumerate(iterator):
        if number == 5:
            HALFWAY.set()
            assert GO_ON.wait(LIMIT.total_seconds())
        try:
            group.broadcast(post_iter_func(item).contiguous(), src)
        except (RuntimeError, AttributeError):  # the peer is gone, or the group was left
            continue


def consume(iterator: Iterator[Any], group: Any, src: int, post_unpack_func: Callable[[Any], None], **_: Any) -> None:
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def share(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Stands for torch's reduce_tensor: a file for a handle, the device in its place among the arguments."""
    with tempfile.NamedTemporaryFile(delete=False, suffix=".weight") as file:
        torch.save(tensor.clone(), file)
    return None, (file.name, None, None, None, None, None, 0)


def rebuild(name: str, *_: Any) -> Tensor:
    tensor: Tensor = torch.load(name)
    Path(name).unlink()
    return tensor


def install() -> None:
    """In this process."""
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine

    replaced: dict[Any, dict[str, Any]] = {
        nccl_engine: {
            "worker_init_process_group": meet_as_worker,
            "open_trainer_endpoint": meet_as_trainer,
            "packed_nccl_broadcast_producer": produce,
            "packed_nccl_broadcast_consumer": consume,
        },
        ipc_engine: {"reduce_tensor": share, "rebuild_cuda_tensor": rebuild},
        torch.accelerator: {"synchronize": lambda *_: None, "current_device_index": lambda: 0},
        torch.cuda: {"get_device_properties": lambda _: SimpleNamespace(uuid="GPU-0"), "ipc_collect": lambda: None},
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            assert hasattr(module, name), f"vLLM has no {name} any more"
            setattr(module, name, function)


class StandInTrainer(TrainerRank):
    """A trainer rank whose transfers a test can hold half-way."""

    def __init__(self, *args: Any) -> None:
        install()
        super().__init__(*args)

    @endpoint(concurrency=2)
    async def hold(self) -> None:
        HALFWAY.clear()
        GO_ON.clear()

    @endpoint(concurrency=2)
    async def halfway(self) -> None:
        await asyncio.to_thread(HALFWAY.wait, LIMIT.total_seconds())

    @endpoint(concurrency=2)
    async def go_on(self) -> None:
        GO_ON.set()
