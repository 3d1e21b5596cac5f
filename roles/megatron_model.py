"""A GPTModel of megatron-core from a Hugging Face config, of modules that need neither TransformerEngine nor apex.

MM-1: what goes into the local spec of megatron-core is ours where it has none that fits: a norm that sequence
      parallelism accepts, attention over packed sequences by `roles.kernels` (the local one is O(s^2) in memory and
      knows no packed rows), and latent attention whose shared rotary key has its gradient under tensor parallelism.
MM-2: with tensor parallelism sequence parallelism is on, always: activations are split, and MoE layers need it.
MM-3: parameters are made in the compute type and not initialised: they are loaded.
MM-4: nothing here reads weights; the config's keys are those of transformers, old and new.
MM-5: a packed row goes through megatron as one plain sequence. Its layers would apply rotary positions sequence by
      sequence, and wait for the GPU to learn where each begins; ours come by position, for the whole row at once.

Assumed: torch.distributed is initialised, and so is megatron's parallel state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from roles import kernels, megatron_context
from roles.trainer_config import TrainerConfig
from sync.layouts.model import ModelShape


@dataclass
class PackedRow(PackedSeqParams):
    """What megatron hands to its layers beside the row, with what ours need (MM-5)."""

    packed: kernels.Packed | None = field(default=None, kw_only=True)
    positions: Tensor | None = field(default=None, kw_only=True)


def packed_row(packed: kernels.Packed, positions: Tensor) -> PackedRow:
    """The sequences of a row of T positions.

    Args:
        positions: counted from 0 in each sequence: [T], or those of this rank's run of the row (`megatron_context`).
    """
    return PackedRow(
        qkv_format="sbhd",
        max_seqlen_q=packed.longest,
        max_seqlen_kv=packed.longest,
        packed=packed,
        positions=positions,
    )


def transformer_config(
    hugging: Mapping[str, Any], shape: ModelShape, config: TrainerConfig, device: torch.device
) -> TransformerConfig:
    """megatron's config for a model and layout that `trainer_config.check_model` let pass."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.heads if shape.mla else shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "layernorm_epsilon": float(hugging.get("rms_norm_eps", 1e-6)),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm or shape.mla is not None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.dtype == "bfloat16",
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "tensor_model_parallel_size": config.tensor_parallel,
        "context_parallel_size": config.context_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel,
        "sequence_parallel": config.tensor_parallel > 1,
        "variable_seq_lengths": config.pipeline_parallel > 1,
        "moe_token_dispatcher_type": "alltoall",  # looked at for dense models too
        "calculate_per_token_loss": True,  # the loss has global denominators already: gradients are summed (A4)
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if config.pipeline_chunks > 1:
        # Stages of two are each other's neighbours on both sides: batched sends could not be told apart.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        settings["virtual_pipeline_model_parallel_size"] = config.pipeline_chunks
    if config.pipeline_layers:
        settings["pipeline_model_parallel_layout"] = _pipeline_layout(config.pipeline_layers)
    if config.activation_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.experts is not None:
        settings |= _experts(hugging, shape)
    if shape.mla is None:
        return TransformerConfig(**settings)
    return MLATransformerConfig(**settings, **_latent(hugging, shape))


def _pipeline_layout(layers: tuple[int, ...]) -> list[list[str]]:
    """Embedding first, loss last, decoders between; one list for each model chunk in the order of the layers."""
    chunks = [["decoder"] * count for count in layers]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _experts(hugging: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    settings: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(shape.is_sparse(layer)) for layer in range(shape.layers)],
        "moe_router_topk": int(hugging["num_experts_per_tok"]),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_enable_routing_replay": True,
    }
    if experts.shared_width:
        settings["moe_shared_expert_intermediate_size"] = experts.shared_width
    if not experts.router_bias:
        # softmax over the chosen logits is softmax over all, then normalised
        return settings | {"moe_router_pre_softmax": not hugging.get("norm_topk_prob", False)}
    settings |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # frozen in RL: balancing would move the policy behind the loss's back
        "moe_router_topk_scaling_factor": float(hugging.get("routed_scaling_factor", 1.0)),
    }
    if int(hugging.get("n_group") or 1) > 1:
        settings |= {
            "moe_router_num_groups": int(hugging["n_group"]),
            "moe_router_group_topk": int(hugging["topk_group"]),
        }
    return settings


def _latent(hugging: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    mla, rope = shape.mla, rope_of(hugging)
    assert mla is not None
    settings: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": float(rope["rope_theta"]),
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,  # otherwise it scales the softmax even of plain positions
    }
    if rope["rope_type"] == "yarn":
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(rope["factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "mscale": float(rope.get("mscale") or 1.0),
            "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
        }
    return settings


def rope_of(hugging: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary positions; transformers 5 keeps them together, older configs in two places."""
    rope = dict(hugging.get("rope_parameters") or hugging.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hugging.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def build(
    hugging: Mapping[str, Any], shape: ModelShape, config: TransformerConfig, trainer: TrainerConfig
) -> list[GPTModel]:
    """The model chunks of this rank: one, or `pipeline_chunks` with the interleaved schedule."""
    chunks = []
    for index in range(trainer.pipeline_chunks):
        stage = index if trainer.pipeline_chunks > 1 else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        chunks.append(
            PackedModel(
                config=config,
                transformer_layer_spec=_ours(spec),
                vocab_size=-(-shape.vocab // trainer.tensor_parallel) * trainer.tensor_parallel,
                max_sequence_length=int(hugging.get("max_position_embeddings", 0)),
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                position_embedding_type="rope",
                rotary_base=float(rope_of(hugging)["rope_theta"]),
                share_embeddings_and_output_weights=shape.tied and not shape.critic,
                vp_stage=stage,
            )
        )
        if shape.critic and chunks[-1].post_process:
            chunks[-1].output_layer = ValueHead(config)
    return chunks


class PackedModel(GPTModel):
    """GPTModel whose rotary positions are those of a packed row (MM-5)."""

    def _preprocess(self, *args: Any, packed_seq_params: PackedRow, **named: Any) -> Any:
        if self.position_embedding_type == "rope" and not self.config.multi_latent_attention:
            with _by_position(self.rotary_pos_emb, packed_seq_params):
                return super()._preprocess(*args, packed_seq_params=packed_seq_params, **named)
        return super()._preprocess(*args, packed_seq_params=packed_seq_params, **named)


@contextlib.contextmanager
def _by_position(rotary: Any, row: PackedRow, *, latent: bool = False) -> Iterator[None]:
    """megatron's table of angles, [positions, 1, 1, D] for the longest sequence, gives one row for each token. Latent
    attention works on a row without its second dimension."""
    real = rotary.forward

    def forward(*args: Any, **named: Any) -> Any:
        found = real(*args, **named | {"packed_seq": True})  # the whole table, whoever has which part of the row
        table, *factor = found if isinstance(found, tuple) else (found,)  # yarn has a factor
        angles = table.index_select(0, row.positions)
        if latent:
            angles = angles.squeeze(1)
        return (angles, *factor) if factor else angles

    rotary.forward = forward
    try:
        yield
    finally:
        rotary.forward = real


def _ours(spec: Any) -> Any:
    """Put our modules into a block spec of the local back end (MM-1)."""
    spec = copy.deepcopy(spec)
    spec.layer_norm = RootMeanSquareNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RootMeanSquareNorm
        attention = parts.self_attention
        attention.submodules.core_attention = PackedAttention
        if issubclass(attention.module, MLASelfAttention):
            attention.module = LatentAttention
            attention.submodules.q_layernorm = attention.submodules.kv_layernorm = RootMeanSquareNorm
        elif attention.submodules.q_layernorm is not IdentityOp:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RootMeanSquareNorm
    return spec


class RootMeanSquareNorm(nn.Module):
    """RMS norm that says that its weight's gradient is to be summed over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class ValueHead(nn.Module):
    """One number a position; every tensor-parallel rank has it whole and computes it alike."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[K, H] to [K] float32."""
        return F.linear(hidden, self.weight, self.bias).squeeze(-1).float()


class PackedAttention(nn.Module):
    """Core attention over a packed row: `kernels.attention` on this rank's heads."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_unused: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.window = _window(config, layer_number)
        self.sink: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.sink = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRow | None = None,
        **_unused: Any,
    ) -> Tensor:
        """[T, 1, heads, D], [T, 1, groups, D], [T, 1, groups, D'] to [T, 1, heads x D']; latent attention leaves the
        1 out."""
        assert packed_seq_params is not None
        assert packed_seq_params.packed is not None
        q, k, v = (tensor.flatten(0, -3) for tensor in (query, key, value))
        packed, shared = packed_seq_params.packed, megatron_context.ranks() > 1
        sink = None if self.sink is None else self.sink[megatron_context.heads_of(q.shape[1])]
        if shared:
            q, k, v = (megatron_context.to_heads(tensor) for tensor in (q, k, v))
        out = kernels.attention(q, k, v, packed, scale=self.scale, window=self.window, sink=sink)
        if shared:
            out = megatron_context.to_run(out)
        return out.flatten(1).unsqueeze(1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Positions that a layer sees, itself included; megatron counts those before it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return int(config.window_size[0]) + 1


class LatentAttention(MLASelfAttention):
    """MLA whose rotary key, which all heads share, gets the gradient of the heads of every tensor-parallel rank.

    The local spec splits the down projection over the ranks and gathers its output, with a backward pass that hands
    each rank its own columns: right for what goes on into a column-parallel layer, which has summed its gradient, but
    the rotary key goes straight into the heads of this rank. Gathered here, and split along the sequence again, it
    takes the path with a sum (MM-2).
    """

    def get_query_key_value_tensors(
        self, hidden: Tensor, states: Any, positions: Any, row: PackedRow, **named: Any
    ) -> Any:
        with _by_position(self.rotary_pos_emb, row, latent=True):
            return super().get_query_key_value_tensors(hidden, states, positions, row, **named)

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = super()._qkv_down_projection(hidden_states)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            keys = mappings.gather_from_tensor_model_parallel_region(keys)
            keys = mappings.scatter_to_sequence_parallel_region(keys)
        return queries, keys
