"""Toy models, and a trainer's memory built from their full tensors by the plain steps of a converter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from sync.layouts.megatron import MegatronParallel, MegatronRank
from sync.layouts.model import ModelShape

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 37,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TIED = DENSE | {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 12,
    "num_key_value_heads": 4,
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "vocab_size": 37,
    "dtype": "bfloat16",
}
MODELS = {
    name: ModelShape.of(config)
    for name, config in (("dense", DENSE), ("tied", TIED), ("sparse", SPARSE), ("latent", LATENT))
}


def full_weights(model: ModelShape) -> dict[str, Tensor]:
    """Every tensor of the checkpoint; the bytes of each follow from its name, so that nothing is right by chance."""
    found: dict[str, Tensor] = {}
    for weight in model.weights():
        seed = int.from_bytes(hashlib.blake2b(weight.name.encode(), digest_size=4).digest())
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        found[weight.name] = values.to(getattr(torch, weight.dtype))
    return found


def megatron_chunks(
    model: ModelShape, full: Mapping[str, Tensor], parallel: MegatronParallel, rank: MegatronRank
) -> list[dict[str, Tensor]]:
    """The local parameters of a megatron rank, as a converter makes them: fuse the whole tensor, pad, cut."""
    te = parallel.spec == "transformer_engine"

    def tp(tensor: Tensor, axis: int) -> Tensor:
        return tensor.chunk(parallel.tp, axis)[rank.tp].contiguous()

    def vocab(tensor: Tensor) -> Tensor:
        multiple = parallel.vocab_divisor * parallel.tp
        padding = -len(tensor) % multiple
        return tp(torch.cat([tensor, torch.full((padding, tensor.shape[1]), 99.0, dtype=tensor.dtype)]), 0)

    def gate_up(prefix: str, ranks: int, index: int) -> Tensor:
        halves = [full[f"{prefix}.{part}_proj.weight"].chunk(ranks)[index] for part in ("gate", "up")]
        return torch.cat(halves)

    def fused_qkv(prefix: str, kind: str) -> Tensor:
        q, k, v = (full[f"{prefix}.{part}_proj.{kind}"] for part in "qkv")
        groups = [t.reshape(model.kv_heads, -1, *t.shape[1:]) for t in (q, k, v)]
        return tp(torch.cat(groups, 1).reshape(-1, *q.shape[1:]), 0)

    chunks: list[dict[str, Tensor]] = []
    for layers in parallel.chunks(model, rank.pp):
        params: dict[str, Tensor] = {}
        for local, layer in enumerate(layers):
            hf, mc = f"model.layers.{layer}", f"decoder.layers.{local}"
            sparse = model.is_sparse(layer)
            at, mlp = f"{mc}.self_attention", f"{mc}.mlp"
            fused = te and model.mla is None
            params[f"{at}.linear_qkv.layer_norm_weight" if fused else f"{mc}.input_layernorm.weight"] = full[
                f"{hf}.input_layernorm.weight"
            ]
            norm = f"{mlp}.linear_fc1.layer_norm_weight" if te and not sparse else f"{mc}.pre_mlp_layernorm.weight"
            params[norm] = full[f"{hf}.post_attention_layernorm.weight"]
            params[f"{at}.linear_proj.weight"] = tp(full[f"{hf}.self_attn.o_proj.weight"], 1)
            if model.mla is None:
                params[f"{at}.linear_qkv.weight"] = fused_qkv(f"{hf}.self_attn", "weight")
                if model.qkv_bias:
                    params[f"{at}.linear_qkv.bias"] = fused_qkv(f"{hf}.self_attn", "bias")
                if model.qk_norm:
                    for part in "qk":
                        params[f"{at}.{part}_layernorm.weight"] = full[f"{hf}.self_attn.{part}_norm.weight"]
            else:
                for mine, theirs in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
                    down = full[f"{hf}.self_attn.{theirs}.weight"]
                    params[f"{at}.linear_{mine}_down_proj.weight"] = down if te else tp(down, 0)
                    params[f"{at}.linear_{mine}_up_proj.weight"] = tp(full[f"{hf}.self_attn.{mine}_b_proj.weight"], 0)
                    latent = full[f"{hf}.self_attn.{mine}_a_layernorm.weight"]
                    name = f"linear_{mine}_up_proj.layer_norm_weight" if te else f"{mine}_layernorm.weight"
                    params[f"{at}.{name}"] = latent
            if not sparse:
                params[f"{mlp}.linear_fc1.weight"] = gate_up(f"{hf}.mlp", parallel.tp, rank.tp)
                params[f"{mlp}.linear_fc2.weight"] = tp(full[f"{hf}.mlp.down_proj.weight"], 1)
                continue
            assert model.experts is not None
            params[f"{mlp}.router.weight"] = full[f"{hf}.mlp.gate.weight"]
            if model.experts.router_bias:
                params[f"{mlp}.router.expert_bias"] = full[f"{hf}.mlp.gate.e_score_correction_bias"]
            if model.experts.shared_width:
                shared = f"{hf}.mlp.shared_experts"
                params[f"{mlp}.shared_experts.linear_fc1.weight"] = gate_up(shared, parallel.tp, rank.tp)
                params[f"{mlp}.shared_experts.linear_fc2.weight"] = tp(full[f"{shared}.down_proj.weight"], 1)
            count = model.experts.count // parallel.ep
            for e in range(count):
                expert = f"{hf}.mlp.experts.{rank.ep * count + e}"
                down = full[f"{expert}.down_proj.weight"].chunk(parallel.expert_tp, 1)[rank.etp].contiguous()
                for fc, tensor in (("1", gate_up(expert, parallel.expert_tp, rank.etp)), ("2", down)):
                    name = f"linear_fc{fc}.weight{e}" if te else f"local_experts.{e}.linear_fc{fc}.weight"
                    params[f"{mlp}.experts.{name}"] = tensor
        chunks.append(params)
    if rank.pp == 0:
        chunks[0]["embedding.word_embeddings.weight"] = vocab(full["model.embed_tokens.weight"])
    if rank.pp == parallel.pp - 1:
        chunks[-1]["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not model.tied or parallel.pp > 1:
            head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
            chunks[-1]["output_layer.weight"] = vocab(full[head])
    return chunks
