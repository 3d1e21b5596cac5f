"""Steps of the torch back end with random weights in the shapes of Qwen3: utilisation, offload, two GPUs."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.gpu.train_common import (
    DEVICE,
    GPU,
    PEAK,
    alone,
    config_of,
    model_flops,
    peak_gib,
    samples_of,
    say,
    synchronize,
)
from benchmarks.gpu.train_split import Phases, by_kind


@contextmanager
def random_policy(config: Any) -> Iterator[None]:
    """The torch back end with random weights made on the GPU instead of a folder's."""
    from transformers import AutoModelForCausalLM

    from roles import policy_torch

    back_end: Any = importlib.import_module("roles.trainer_fsdp")

    def made(_path: str, **_options: Any) -> Any:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        policy = policy_torch.Policy(model)
        policy.packed = policy_torch._can_pack(policy)
        assert policy.packed
        return policy

    kept, back_end.load_policy = back_end.load_policy, made
    try:
        yield
    finally:
        back_end.load_policy = kept


def torch_step(name: str, config: Any, lengths: list[int], budget: int, steps: int = 3, **changes: Any) -> None:
    """Steps of the torch back end under FSDP2 on the GPUs of this group; on one, also where a step goes."""
    from algorithms import catalog
    from roles import logprob
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_fsdp import TorchTrainer

    if not GPU:
        lengths, budget = [max(70, length // 32) for length in lengths], max(256, budget // 32)
    started = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = TrainerConfig(
        ranks=world, device=DEVICE, strategy="fsdp2", dtype="bfloat16", token_budget=budget, lr=1e-6, **changes
    )
    torch.manual_seed(0)  # all ranks make the same model
    with random_policy(config):
        trainer = TorchTrainer(settings, "random")
    ready = time.perf_counter() - started
    if rank == 0:
        say(case=f"{name}: loaded", ready_s=ready, GiB=torch.cuda.memory_allocated() / 2**30 if GPU else 0)
    batches = pack(samples_of(config.vocab_size, lengths), world=settings.data_parallel, token_budget=budget)
    batch = batches[settings.data_rank(rank)]
    objective = catalog.objective("grpo", {})
    phases = Phases()
    phases.watch("forward", trainer, "_score")
    phases.watch("backward", trainer, "_backward")
    phases.watch("update", trainer, "_apply")
    phases.watch("head, forward", logprob._ChosenLogprobs, "forward")
    phases.watch("head, backward", logprob._ChosenLogprobs, "backward")
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = time.perf_counter(), []
    for index in range(2 + steps):
        if index == 2:  # from here on nothing waits for the device but the steps themselves
            synchronize()
            began = time.perf_counter()
        if index in (0, 2 + steps - 1):
            phases.on = index > 0
        step_began = time.perf_counter()
        result = trainer.train_step(batch, objective, 1.0)
        seconds.append(time.perf_counter() - step_began)
    synchronize()
    best = (time.perf_counter() - began) / steps
    phases.on = False
    if rank:
        return
    say(
        case=name,
        step_s=[best, best],
        each_s=seconds,
        warm_up_s=began - first,
        tokens=sum(lengths),
        tokens_per_s=sum(lengths) / best,
        mfu=model_flops(config, lengths) / best / PEAK / world,
        peak_GiB=peak_gib(),
        reserved_GiB=torch.cuda.max_memory_reserved() / 2**30 if GPU else 0,
        micro_batches=len(batch.updates[0]),
        grad_norm=result.grad_norm,
        phases_s=phases.seconds(),
    )
    if world == 1:
        say(case=f"{name}: kernels of a step", **by_kind(lambda: trainer.train_step(batch, objective, 1.0)))


ROWS = [8192] * 4 + [4096] * 4 + [2048] * 8
"""64k tokens: what a GPU gets in a step of 256 answers of 4k tokens on 16 GPUs."""


def case_mfu() -> None:
    alone()
    small = config_of("8B", num_hidden_layers=10)
    torch_step(
        "8B shapes, 10 of 36 layers, compiled",
        small,
        ROWS,
        8192,
        steps=4,
        compile=GPU,
    )


def case_offload() -> None:
    alone()
    small = config_of("8B", num_hidden_layers=10)
    changes: dict[str, Any] = {"compile": GPU, "offload_optimizer": True}
    torch_step("8B shapes, 10 of 36 layers, compiled, moments offloaded", small, ROWS, 8192, **changes)


def case_deep() -> None:
    """All layers without recomputation: what the head's share of ten layers hides."""
    alone()
    changes: dict[str, Any] = {"compile": GPU, "offload_optimizer": True}
    try:
        torch_step("8B shapes, 36 layers, compiled, moments offloaded", config_of("8B"), ROWS, 8192, **changes)
    except RuntimeError as error:
        say(case="8B shapes, 36 layers", error=str(error)[:400])


def case_shards() -> None:
    """Two GPUs, eager: rows of the weights spread over both, and every matrix split."""
    for way in ("shards", "tensor"):
        torch.multiprocessing.spawn(_shards, args=(way, 29643 if way == "shards" else 29645), nprocs=2)


def _shards(rank: int, way: str, port: int) -> None:
    if GPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = f"{rank},{1 - rank}"
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=rank, world_size=2)
    changes: dict[str, Any] = {"tensor_parallel": 2} if way == "tensor" else {}
    name = f"8B shapes, 10 of 36 layers, eager, two GPUs, {'TP2' if changes else 'two shards'}"
    torch_step(name, config_of("8B", num_hidden_layers=10), ROWS, 8192, steps=2, **changes)
    dist.destroy_process_group()
