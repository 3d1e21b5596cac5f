"""The policy's logprobs: PT-1 to PT-4 of `roles.policy_torch`, against plain transformers with full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from roles.measures import in_columns
from roles.packing import pack
from roles.policy_torch import (
    Policy,
    checkpoint_activations,
    decoder_blocks,
    export_policy,
    fuse_norms,
    load_policy,
)
from roles.types import MicroBatch
from tests.roles.trainer_help import VOCAB, random_samples, save_tiny_model


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(save_tiny_model(tmp_path / "model"))


def micro_batch(count: int = 6) -> MicroBatch:
    return pack(random_samples(count), world=1, token_budget=1000)[0].updates[0][0]


def run(policy: Policy, micro: MicroBatch, temperature: float, entropy_gradient: bool = False) -> list[torch.Tensor]:
    """Logprobs and entropies in columns."""
    out = policy(policy.positions(micro, torch.device("cpu")), temperature, entropy_gradient)
    return [in_columns(torch.tensor(micro.mask), values) for values in out]


def batch(count: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    micro = micro_batch(count)
    return torch.tensor(micro.token_ids), torch.tensor(micro.mask), torch.tensor(micro.lengths)


def masked_reference(policy: Policy, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every logit of every position, with an explicit padding mask, in the plain way."""
    token_ids, mask, lengths = batch()
    model = cast(Any, policy.model)
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    attention_mask = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
    logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits / temperature
    model.set_attn_implementation(ours)
    all_logprobs = torch.log_softmax(logits, -1)[:, :-1]
    logprobs = torch.zeros(token_ids.shape)
    entropy = torch.zeros(token_ids.shape)
    logprobs[:, 1:] = all_logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2)
    entropy[:, 1:] = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return logprobs * mask, entropy * mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [True, False])
def test_both_forms_of_a_row_equal_the_masked_run(policy: Policy, temperature: float, packed: bool) -> None:
    assert policy.packed
    expected_logprobs, expected_entropy = masked_reference(policy, temperature)
    if not packed:
        policy.packed = False
        cast(Any, policy.model).set_attn_implementation("sdpa")
    logprobs, entropy = run(policy, micro_batch(), temperature)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)


def test_model_computes_no_padding_and_the_head_only_the_trained_positions(policy: Policy) -> None:
    micro = micro_batch()
    seen: list[tuple[int, ...]] = []
    policy._backbone[0].register_forward_hook(lambda _m, _a, out: seen.append(tuple(out.last_hidden_state.shape[:2])))
    run(policy, micro, 1.0)
    assert seen == [(1, int((micro.lengths - 1).sum()))]


def test_what_stands_in_the_padding_changes_nothing(policy: Policy) -> None:
    policy.packed = False
    cast(Any, policy.model).set_attn_implementation("sdpa")
    micro = micro_batch()
    before = run(policy, micro, 1.0)[0]
    micro.token_ids[np.arange(micro.token_ids.shape[1]) >= micro.lengths[:, None]] = VOCAB - 1
    assert torch.equal(run(policy, micro, 1.0)[0], before)


def test_fused_norms_and_recomputed_activations_change_no_value(policy: Policy) -> None:
    expected = run(policy, micro_batch(), 1.0)[0]
    device = torch.device("cpu")
    assert fuse_norms(policy.model, device) == 9  # two blocks of four (input, post-attention, query, key) and the last
    checkpoint_activations(decoder_blocks(policy.model))
    logprobs = run(policy, micro_batch(), 1.0)[0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


def test_critic_starts_with_values_of_zero_and_reads_back_its_own(tmp_path: Path) -> None:
    start = save_tiny_model(tmp_path / "model")
    policy = load_policy(start, head="value")
    values = run(policy, micro_batch(), 1.0)[0]
    assert not values.any()
    with torch.no_grad():
        cast(Any, policy.model).score.weight.fill_(0.1)
    values = run(policy, micro_batch(), 0.5)[0]
    state = {name: p.detach() for name, p in policy.model.named_parameters()}
    export_policy(policy, state, str(tmp_path / "critic"), dtype="float32", start_path=start)
    again = load_policy(str(tmp_path / "critic"), head="value")
    assert values.any()
    assert torch.equal(run(again, micro_batch(), 1.0)[0], values)  # the temperature is the policy's, not the critic's


def test_weights_are_float32_whatever_the_checkpoint_holds(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path, dtype=torch.bfloat16))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    GraniteForCausalLM(
        GraniteConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            logits_scaling=8.0,
            initializer_range=0.5,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="soft-capped or scaled logits"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
def test_exported_folder_loads_in_transformers_with_its_tokenizer(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    start = tmp_path / "model"
    policy = load_policy(save_tiny_model(start, tied=tied))
    (start / "tokenizer.json").write_text("{}")
    state = {name: p.detach().bfloat16() for name, p in policy.model.named_parameters()}
    export_policy(policy, state, str(tmp_path / "out"), dtype="bfloat16", start_path=str(start))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded.dtype == torch.bfloat16
    assert (tmp_path / "out" / "tokenizer.json").exists()
    expected = policy.model.state_dict()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in loaded.state_dict().items())


def test_a_model_with_a_mask_of_its_own_is_not_packed_pt1(tmp_path: Path) -> None:
    """Doge's says nothing at first: it shows when training moves it, or in sequences above its window."""
    from transformers import DogeConfig, DogeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    DogeForCausalLM(DogeConfig(vocab_size=VOCAB, **sizes, **heads)).save_pretrained(tmp_path)
    assert not load_policy(str(tmp_path)).packed


@pytest.mark.parametrize(("family", "packed"), [("Mistral", True), ("Qwen2Moe", False)])
def test_window_that_only_the_mask_tells_is_not_lost_in_long_sequences_pt1(
    tmp_path: Path, family: str, packed: bool
) -> None:
    """Mistral hands its window to its attention; of Qwen2-MoE the mask alone has it, which packed rows don't read."""
    import transformers

    kind = getattr(transformers, f"{family}Config")
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    changes = {**windows, **experts, "shared_expert_intermediate_size": 8} if packed is False else {"sliding_window": 8}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(vocab_size=VOCAB, **sizes, **special, **changes)).eval()
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.arange(24) * 7 % VOCAB
    sample = msgspec.structs.replace(
        random_samples(1)[0],
        token_ids=ids.numpy().astype(np.int32),
        prompt_length=1,
        rollout_logprobs=np.zeros(23, np.float32),
        advantages=np.zeros(23, np.float32),
    )
    micro = pack([sample], world=1, token_budget=24)[0].updates[0][0]
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        got = run(policy, micro, 1.0)[0][0, 1:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert policy.packed == packed
    assert cast(Any, policy.model).config.sliding_window == 8
