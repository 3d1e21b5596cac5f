"""Decoder layers in few kernels: FU-1 to FU-4 of `roles.fused_layers`, here with the torch forms of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from roles import trainer_fsdp
from roles.fused_layers import fuse_layers, fuses_layers
from roles.policy_torch import Policy, decoder_blocks, load_policy
from roles.trainer_fsdp import TorchTrainer
from tests.roles.fsdp_help import config, step, whole
from tests.roles.test_policy_torch import micro_batch, run
from tests.roles.trainer_help import VOCAB, save_tiny_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def policy_of(folder: Path, family: str, **changes: Any) -> Policy:
    torch.manual_seed(0)
    sizes = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model: Any = getattr(transformers, f"{family}ForCausalLM")(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases too
    model.save_pretrained(folder)
    return load_policy(str(folder))


def gradients(policy: Policy) -> list[torch.Tensor]:
    logprobs = run(policy, micro_batch(), 0.8)[0]
    logprobs.square().sum().backward()
    grads = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return [logprobs.detach(), *grads]


def near(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GLM = {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, **MOE}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3", {"head_dim": 6}),
        ("Qwen2", {}),  # biases of the projections
        ("Llama", {"mlp_bias": True}),
        ("Mistral", {"sliding_window": 3}),
        ("Qwen3Moe", {"head_dim": 6, **MOE}),
    ],
)
def test_fused_layers_give_values_and_gradients_of_the_layers_fu1(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    policy = policy_of(tmp_path, family, **changes)
    expected = gradients(policy)
    assert fuse_layers(policy.model, decoder_blocks(policy.model)) == 2
    got = gradients(policy)
    near(got, expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Olmo2", {}),  # norms behind
        ("Gemma", {"head_dim": 6}),  # norms of 1 + weight
        ("SmolLM3", {"no_rope_layers": [0, 0]}),  # positions are not rotated
        ("Qwen3", {"head_dim": 6, "hidden_act": "gelu", "attention_bias": True}),
        ("Phi3", {}),  # projections in one matrix
        ("Glm4Moe", {"head_dim": 8, "partial_rotary_factor": 0.5, **GLM}),  # half of a head is rotated
    ],
)
def test_layers_of_another_kind_stay_as_they_are_or_lose_nothing_fu1(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    policy = policy_of(tmp_path, family, **changes)
    expected = gradients(policy)
    assert fuse_layers(policy.model, decoder_blocks(policy.model)) == (2 if family in ("Qwen3", "Glm4Moe") else 0)
    near(gradients(policy), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"lora_rank": 3},
        {"lora_rank": 3, "lora_targets": ("q_proj", "down_proj")},
    ],
)
def test_trainer_with_fused_layers_makes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    path = save_tiny_model(tmp_path / "model")
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for fuses in (False, True):
        monkeypatch.setattr(trainer_fsdp, "fuses_layers", lambda *_, fuses=fuses: fuses)
        trainer = TorchTrainer(config(**{"activation_checkpointing": False, **changes}), path)
        names = [entry.name for entry in trainer.weight_layout().entries]
        norms = [step(trainer, seed).grad_norm for seed in range(2)]
        found.append((norms, {name: whole(trainer, name).clone() for name in names}))
    (norms, weights), (fused_norms, fused_weights) = found
    assert fused_norms == pytest.approx(norms, rel=1e-5)
    torch.testing.assert_close(fused_weights, weights, rtol=1e-4, atol=1e-5)


def kept_per_position(policy: Policy) -> float:
    """Elements that a forward pass keeps of a layer, by the number of positions."""
    layer, positions = decoder_blocks(policy.model)[0], 512
    weights = {p.data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tensor.numel() >= positions:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(1, positions, 16, requires_grad=True)
    angles = torch.randn(1, positions, 6)
    from roles.kernels import Packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cast(Callable[..., Any], layer)(
            x,
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            packed=Packed([positions], torch.device("cpu")),
        )
    return (sum(kept.values()) - 2 * angles.numel()) / positions


def test_a_layer_keeps_its_inputs_and_what_a_product_made_fu2(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Qwen3", head_dim=6)
    before = kept_per_position(policy)
    fuse_layers(policy.model, decoder_blocks(policy.model))
    x, q, kv, inner = 16, 24, 12, 24
    expected = 2 * x + q + 2 * kv + q + 2 * inner  # x, h; q, k, v rotated; what attention gives; gate and up
    assert kept_per_position(policy) <= expected + 3 * q  # and copies that attention on a CPU makes for itself
    assert kept_per_position(policy) < 0.6 * before


def test_layers_are_fused_on_a_gpu_unless_a_compiler_does_it() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert fuses_layers(config(), gpu)
    assert not fuses_layers(config(), cpu)
    assert not fuses_layers(config(compile=True), gpu)


def test_a_layer_without_the_usual_parts_is_none() -> None:
    assert fuse_layers(nn.Module(), [nn.Linear(2, 2)]) == 0
