"""Tiny models of the four families that the megatron back end knows, and samples for them, with routes from their own
routers where they have experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from roles.types import TrainSample
from tests.roles.trainer_help import VOCAB, random_samples

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_models(folder: Path) -> dict[str, Any]:
    """Write all families; returns the models in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds: dict[str, dict[str, Any]] = {
        "llama": {"num_hidden_layers": 4, "head_dim": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        "qwen3": {"num_hidden_layers": 2, "head_dim": 6, "tie_word_embeddings": True},
        "qwen3_moe": {
            "num_hidden_layers": 2,
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        "deepseek_v3": {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
            },
        },
    }
    models = {}
    for seed, (kind, changes) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **changes})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.05))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        model.save_pretrained(folder / kind)
        models[kind] = model
    return models


def samples_for(model: Any) -> list[TrainSample]:
    """Some samples; with experts, routes that a router of other weights chose, so that replaying them shows."""
    samples = random_samples(9, 1)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    if not routers:
        return samples
    rng = np.random.default_rng(5)
    experts, k = routers[0].weight.shape[0], routers[0].top_k
    for sample in samples:
        shape = (len(sample.token_ids) - 1, len(routers), experts)
        sample.routes = rng.random(shape).argsort(-1)[..., :k].astype(np.uint8)
    return samples
