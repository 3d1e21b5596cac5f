"""The policy's logprobs: PT-1 to PT-4 of `roles.policy_torch`, against plain transformers with full logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roles import policy_torch
from roles.packing import pack
from roles.policy_torch import (
    Policy,
    checkpoint_activations,
    decoder_blocks,
    export_policy,
    fuse_norms,
    load_policy,
)
from tests.roles.trainer_help import VOCAB, random_samples, save_tiny_model


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(save_tiny_model(tmp_path / "model"))


def batch(count: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    micro = pack(random_samples(count), world=1, token_budget=1000)[0].updates[0][0]
    return torch.tensor(micro.token_ids), torch.tensor(micro.mask), torch.tensor(micro.lengths)


def masked_reference(policy: Policy, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every logit of every position, with an explicit padding mask, in the plain way."""
    token_ids, mask, lengths = batch()
    attention_mask = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
    logits = policy.model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits / temperature
    all_logprobs = torch.log_softmax(logits, -1)[:, :-1]
    logprobs = torch.zeros(token_ids.shape)
    entropy = torch.zeros(token_ids.shape)
    logprobs[:, 1:] = all_logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2)
    entropy[:, 1:] = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return logprobs * mask, entropy * mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_right_padding_without_a_mask_equals_the_masked_run(policy: Policy, temperature: float) -> None:
    token_ids, mask, _ = batch()
    expected_logprobs, expected_entropy = masked_reference(policy, temperature)
    logprobs, entropy = policy(token_ids, mask, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    assert not logprobs[~mask].any()


def test_what_stands_in_the_padding_changes_nothing(policy: Policy) -> None:
    token_ids, mask, lengths = batch()
    other = token_ids.clone()
    other[torch.arange(token_ids.shape[1]) >= lengths[:, None]] = VOCAB - 1
    assert torch.equal(policy(token_ids, mask, 1.0)[0], policy(other, mask, 1.0)[0])


def test_head_sees_only_the_trained_positions(policy: Policy) -> None:
    token_ids, mask, _ = batch()
    seen: list[int] = []
    policy._head[0].register_forward_hook(lambda _m, args, _o: seen.append(len(args[0])))
    policy(token_ids, mask, 1.0)
    assert seen == [int(mask.sum())]


def test_chunks_of_logits_give_the_same_values_and_gradients(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids, mask, _ = batch()

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs, entropy = policy(token_ids, mask, 0.9, True)
        (logprobs.sum() + entropy.square().sum()).backward()
        grads = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        policy.zero_grad()
        return logprobs.detach(), grads

    whole, whole_grads = run()
    monkeypatch.setattr(policy_torch, "LOGITS_AT_ONCE", 5 * VOCAB)
    chunked, chunked_grads = run()
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    for chunked_grad, whole_grad in zip(chunked_grads, whole_grads, strict=True):
        torch.testing.assert_close(chunked_grad, whole_grad, rtol=1e-4, atol=1e-5)


def test_entropy_has_a_gradient_only_when_asked(policy: Policy) -> None:
    token_ids, mask, _ = batch()
    assert not policy(token_ids, mask, 1.0)[1].requires_grad
    assert policy(token_ids, mask, 1.0, True)[1].requires_grad


def test_fused_norms_and_recomputed_activations_change_no_value(policy: Policy) -> None:
    token_ids, mask, _ = batch()
    expected = policy(token_ids, mask, 1.0)[0]
    assert fuse_norms(policy.model) == 9  # two blocks of four (input, post-attention, query, key) and the last
    checkpoint_activations(decoder_blocks(policy.model))
    logprobs = policy(token_ids, mask, 1.0)[0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


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
