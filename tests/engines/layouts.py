"""Layouts recorded from vLLM's loaders against what the loaders do; a program of its own, since parallel states of vLLM
belong to a process. Prints a line of JSON for each case: `python -m tests.engines.layouts`.

Ranks of a tensor-parallel engine are simulated: a model asks its parallel state who it is, and is told.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import initialize_model

from roles.vllm_copies import Copies
from sync.explain import quantised
from sync.formats import Scaling
from sync.layout import Entry, Layout
from sync.layouts import vllm as layouts
from sync.layouts.loaders import Recorded
from sync.layouts.model import ModelShape
from sync.memory import as_bytes
from sync.pack import Packer
from sync.plan import make_plan
from sync.shadow import Shadow

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
CASES = [("qwen3", 1, False), ("qwen3", 4, False), ("llama", 2, False), ("qwen3_moe", 1, False)]
CASES += [("qwen3_moe", 2, False), ("qwen3", 2, True)]


def main() -> int:
    for kind, ranks, in_blocks in CASES:
        config = BASE | MODELS[kind] | {"model_type": kind} | ({"quantization_config": BLOCKS} if in_blocks else {})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            engine = EngineArgs(model=folder, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
            facts = case(engine.create_engine_config(), ModelShape.of(config), ranks, in_blocks)
        print(json.dumps({"kind": kind, "ranks": ranks, "in_blocks": in_blocks, **facts}), flush=True)
    return 0


def case(vllm_config: Any, model: ModelShape, ranks: int, in_blocks: bool) -> dict[str, Any]:
    """Record on every rank, plan, pack, stage, apply; compare with vLLM's loaders."""
    trainer = Layout(tuple(Entry.whole(w.name, w.shape, "bfloat16") for w in model.weights()))
    generator = torch.Generator().manual_seed(1)
    weights = {e.name: torch.randn(e.shape, generator=generator).to(torch.bfloat16) for e in trainer.entries}
    wire = trainer
    if in_blocks:
        matrices = [w.name for w in model.weights() if w.role == "matrix"]
        wire = quantised(trainer, matrices, "float8_e4m3fn", Scaling("block", "weight_scale_inv"))
    found: list[Recorded] = []
    engines: list[Any] = []
    with set_current_vllm_config(vllm_config), parallel():
        for rank in range(ranks):
            with rank_of(rank, ranks):
                engine = built(vllm_config)
                before = {name: (id(p), p.data_ptr()) for name, p in engine.named_parameters()}
                found.append(layouts.record(engine, wire.entries))
                assert before == {name: (id(p), p.data_ptr()) for name, p in engine.named_parameters()}
                engines.append(engine)
        sinks = [layouts.wanted(recorded) for recorded in found]
        staged = moved(trainer, sinks, weights)
        facts: dict[str, Any] = {"differs": [], "filled": {}, "copies": [len(r.copies) for r in found]}
        checkpoint = moved(trainer, [wire], weights)[0]
        for rank, (recorded, engine, got) in enumerate(zip(found, engines, staged, strict=True)):
            copies = Copies(engine, recorded)
            with rank_of(rank, ranks):
                facts["differs"] += compared(recorded, copies, engine, got, checkpoint)
            facts["filled"] |= {name: [str(b) for b in boxes] for name, boxes in recorded.filled.items()}
            assert copies.elsewhere(got) == set()
            twisted = {name: t.flip(0) if t.ndim == 1 else t for name, t in got.items()}
            assert engine.model.norm in copies.elsewhere(twisted)
    return facts


def moved(trainer: Layout, sinks: list[Layout], weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each rank has in its shadow after a transfer."""
    plan = make_plan([trainer], sinks, bucket_bytes=1 << 20)
    packer = Packer(weights.__getitem__, trainer.parts, "trainer")
    shadows = [Shadow(layout, 0, f"rollout rank {rank}") for rank, layout in enumerate(sinks)]
    for bucket in plan.buckets:
        memory = torch.empty(plan.largest_bucket, dtype=torch.uint8)
        packer.pack(bucket, memory[: bucket.num_bytes])
        for rank in bucket.sinks:
            shadows[rank].add(bucket, memory[: bucket.num_bytes])
    return [shadow.weights() for shadow in shadows]


def compared(
    recorded: Recorded, copies: Copies, engine: Any, got: dict[str, Tensor], checkpoint: dict[str, Tensor]
) -> list[str]:
    """Parameters that our copies leave otherwise than vLLM's own loading."""
    parameters = {name: p.detach() for name, p in engine.named_parameters(remove_duplicate=False)}
    for tensor in parameters.values():
        tensor.copy_(torch.full_like(tensor, 7, dtype=torch.float32).to(tensor.dtype))
    engine.load_weights(iter(checkpoint.items()))
    loaded = {name: tensor.clone() for name, tensor in parameters.items()}
    for name, tensor in parameters.items():
        if name not in {*recorded.filled, *recorded.aliases, *recorded.untouched}:
            tensor.copy_(torch.full_like(tensor, 3, dtype=torch.float32).to(tensor.dtype))
    copies.run(copies.of(copies.fed), got)
    return [n for n, t in parameters.items() if not torch.equal(as_bytes(t), as_bytes(loaded[n]))]


def built(vllm_config: Any) -> Any:
    """A model with memory, as it is before its weights are made ready for kernels."""
    vllm_config.compilation_config.static_forward_context.clear()
    model = initialize_model(vllm_config)
    record_metadata_for_reloading(model)
    return model


@contextmanager
def parallel() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        kernel = fp8.init_fp8_linear_kernel
        fp8.init_fp8_linear_kernel = lambda *_, **__: SimpleNamespace(input_quant_fp8=None)  # it wants AMX
        try:
            yield
        finally:
            fp8.init_fp8_linear_kernel = kernel
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    alone = parallel_state._TP
    parallel_state._TP = SimpleNamespace(
        world_size=ranks, rank_in_group=rank, rank=rank, ranks=list(range(ranks)), device_group=None, cpu_group=None
    )
    try:
        yield
    finally:
        parallel_state._TP = alone


if __name__ == "__main__":
    sys.exit(main())
