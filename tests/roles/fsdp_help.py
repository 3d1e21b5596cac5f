"""Trainers of the torch back end, in this process or on real ranks, and what tests look at."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from roles.packing import pack
from roles.trainer import TrainerConfig
from roles.trainer_fsdp import TorchTrainer
from tests.roles.trainer_help import (
    clipped,
    random_samples,
    spec,
)

BUDGET = 60
"""Small enough that a step has several micro-batches."""


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-2, "token_budget": BUDGET, "device": "cpu", "grad_clip": 0.5, **changes})


def step(trainer: TorchTrainer, seed: int, objective: Any = clipped, updates: int = 1, **options: Any) -> Any:
    samples = random_samples(12, seed)
    batch = pack(samples, world=trainer.world, token_budget=BUDGET, updates=updates)[trainer.rank]
    return trainer.train_step(batch, spec(objective, **options), 0.8)


def whole(trainer: TorchTrainer, name: str) -> torch.Tensor:
    """A weight that this rank holds as one box."""
    (box,) = trainer.weight(name)
    return box


def bits(trainer: TorchTrainer) -> dict[str, bytes]:
    return {e.name: whole(trainer, e.name).numpy().tobytes() for e in trainer.weight_layout().entries}


def on_ranks(world: int, function: Callable[..., None], *args: Any) -> None:
    """Run the function on every rank of a new gloo group. One fork server imports torch for all of them."""
    torch.multiprocessing.set_forkserver_preload(["transformers.models.qwen3.modeling_qwen3", "roles.trainer_fsdp"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _rank, args=(world, port, function, args), nprocs=world, start_method="forkserver"
    )


def _rank(rank: int, world: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        function(*args)
    finally:
        torch.distributed.destroy_process_group()
