"""Steps of the megatron back end: on one GPU, and what two make of it in each layout."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.gpu.train_common import alone, config_of, samples_of, say, synchronize


def write_model(folder: Path, config: Any) -> str:
    """A folder with random weights, written from the GPU."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        torch.cuda.empty_cache()
    return str(folder)


def megatron_step(name: str, model: str, lengths: list[int], budget: int, **changes: Any) -> None:
    """Steps of the megatron back end on this rank; rank 0 speaks."""
    from algorithms import catalog
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_megatron import MegatronTrainer

    rank, world = dist.get_rank(), dist.get_world_size()
    settings = TrainerConfig(
        backend="megatron", ranks=world, device="cuda", dtype="bfloat16", token_budget=budget, lr=1e-6, **changes
    )
    torch.cuda.reset_peak_memory_stats()
    trainer = MegatronTrainer(settings, model)
    hugging = json.loads((Path(model) / "config.json").read_text())
    samples = samples_of(hugging["vocab_size"], lengths)
    multiple = settings.micro_batch_multiple
    batch = pack(samples, world=settings.data_parallel, token_budget=budget, multiple=multiple)[
        settings.data_rank(rank)
    ]
    seconds = []
    for _ in range(4):
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        result = trainer.train_step(batch, catalog.objective("grpo", {}), 1.0)
        synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        say(
            case=name,
            step_s=seconds,
            tokens_per_s=sum(lengths) / min(seconds[1:]),
            peak_GiB=torch.cuda.max_memory_allocated() / 2**30,
            micro_batches=len(batch.updates[0]),
            grad_norm=result.grad_norm,
        )
    del trainer
    torch.cuda.empty_cache()


DENSE = {"num_hidden_layers": 8, "vocab_size": 32768}
"""1.8 B parameters in the matrices of the 8B model: what a rank of a larger layout computes with."""
MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
PACKED = [2048] * 8 + [1024] * 16
"""32k tokens: 8 micro-batches of 4096."""


def megatron_models() -> tuple[str, str]:
    dense = write_model(Path("/tmp/dense"), config_of("8B", **DENSE))
    return dense, write_model(Path("/tmp/moe"), config_of("0.6B", **MOE))


def case_megatron() -> None:
    alone()
    dense, moe = megatron_models()
    for name, changes in (
        ("", {}),
        (", moments offloaded", {"offload_optimizer": True}),
        (", recomputed", {"activation_checkpointing": True}),
    ):
        megatron_step(f"megatron, 1.8B, one GPU{name}", dense, PACKED, 4096, **changes)
    megatron_step("megatron, 16 experts, one GPU", moe, PACKED, 4096)


def case_pairs() -> None:
    """Two GPUs. Of a pipeline of p stages and m micro-batches (p - 1) / (m + p - 1) is idle: 1 / 9 of PP2 here, so that
    it should take 9/16 of one GPU's time."""
    megatron_models()
    torch.multiprocessing.spawn(_pair, nprocs=2)


def _pair(rank: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = f"{rank},{1 - rank}"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    store = dist.TCPStore("127.0.0.1", 29641, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    for name, model, changes in (
        ("TP2", "/tmp/dense", {"tensor_parallel": 2}),
        ("PP2", "/tmp/dense", {"pipeline_parallel": 2}),
        ("DP2", "/tmp/dense", {}),
        ("PP2 with 2 chunks", "/tmp/dense", {"pipeline_parallel": 2, "pipeline_chunks": 2}),
        ("CP2", "/tmp/dense", {"context_parallel": 2}),
        ("16 experts, EP2", "/tmp/moe", {"expert_parallel": 2}),
    ):
        megatron_step(f"megatron, two GPUs, {name}", model, PACKED, 4096, **changes)
    dist.destroy_process_group()
