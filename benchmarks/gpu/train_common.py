"""What the cases of `benchmarks.gpu.train` share: configs, samples, arithmetic, clocks, how they speak."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.sync_ranks import SIZES

GPU = torch.cuda.is_available()
DEVICE: Literal["cuda", "cpu"] = "cuda" if GPU else "cpu"
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200."""


def config_of(size: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    settings = {**SIZES[size], "max_position_embeddings": 40960, "rope_theta": 1e6, **changes}
    if not GPU:
        settings |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 998}
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kind = settings.pop("model_type")
    return AutoConfig.for_model(kind, **settings)


def samples_of(vocab: int, lengths: list[int], prompt: int = 64) -> list[Any]:
    from roles.types import TrainSample

    rng = np.random.default_rng(0)
    return [
        TrainSample(
            token_ids=rng.integers(0, vocab, length).astype(np.int32),
            prompt_length=prompt,
            rollout_logprobs=np.full(length - prompt, -10, np.float32),
            advantages=rng.normal(size=length - prompt).astype(np.float32),
        )
        for length in lengths
    ]


def model_flops(config: Any, lengths: list[int]) -> float:
    """See the top of `benchmarks.gpu.train`."""
    head_dim, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    attention = config.hidden_size * head_dim * (2 * heads + 2 * groups)
    matrices = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    products = 6 * (matrices + config.vocab_size * config.hidden_size) * sum(lengths)
    return float(products + 6 * config.num_hidden_layers * heads * head_dim * sum(length**2 for length in lengths))


def say(**facts: Any) -> None:
    print("RESULT " + json.dumps(facts), flush=True)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0


def milliseconds(function: Callable[[], Any], rounds: int = 20) -> float:
    if not GPU:
        began = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - began)
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def alone() -> None:
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
