"""Weights of a rank that holds them all: MA-1 to MA-3 of `roles.masters`, SU-1 and SU-2 of `roles.sums`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roles import trainer_fsdp
from roles.fused_layers import fuse_layers
from roles.logprob import chosen_logprobs
from roles.masters import Masters
from roles.packing import pack
from roles.policy_torch import checkpoint_activations, decoder_blocks, load_policy
from roles.sums import GradientSum, add_product, sum_of
from roles.trainer_fsdp import TorchTrainer
from tests.roles.fsdp_help import BUDGET, config, on_ranks, step, whole
from tests.roles.test_policy_torch import micro_batch, run
from tests.roles.trainer_help import random_samples, save_tiny_model


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def test_parameters_are_masters_between_updates_and_copies_within_ma1() -> None:
    model = small()
    before = {name: (p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}
    masters = Masters(model, [], torch.bfloat16)
    masters.hold()
    copies = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    masters.hold()  # of the next micro-batch: nothing is cast again
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == copies
    model(torch.randn(4, 6, dtype=torch.bfloat16)).sum().backward()
    masters.release()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert p.data_ptr() == before[name][1]
        assert torch.equal(p, before[name][0])
        assert p.grad is None
    masters.hold()
    assert all(torch.equal(p.float(), before[name][0].bfloat16().float()) for name, p in model.named_parameters())


def test_copies_for_which_there_was_no_memory_are_made_when_asked_again_ma1(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    masters = Masters(model, [], torch.bfloat16)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as short:
        short.setattr(torch, "_foreach_copy_", full)
        with pytest.raises(torch.OutOfMemoryError):
            masters.hold()
    masters.hold()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_gradients_add_up_in_float32_over_many_micro_batches_ma2() -> None:
    """256 + 1 is 256 in bfloat16: a sum of that type would stand still there."""
    model = nn.Linear(1, 1, bias=False)
    masters = Masters(model, [], torch.bfloat16)
    trained = dict(model.named_parameters())
    assert masters.gradients(trained) == {}
    masters.hold()
    for _ in range(600):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    masters.release()
    assert masters.gradients(trained)["weight"].item() == 600.0
    masters.forget()
    assert masters.gradients(trained) == {}


def test_frozen_weights_are_cast_and_have_no_sum() -> None:
    model = small()
    model[0].requires_grad_(False)
    masters = Masters(model, [], torch.bfloat16)
    masters.hold()
    model(torch.randn(4, 6, dtype=torch.bfloat16)).sum().backward()
    masters.release()
    assert set(masters.gradients(dict(model.named_parameters()))) == {"2.weight", "2.bias"}
    assert sum_of(model[0].weight) is None


def test_blocks_are_given_the_compute_type_ma3() -> None:
    model = small()
    seen: list[torch.dtype] = []
    model.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    masters = Masters(model, [model], torch.bfloat16)
    masters.hold()
    assert model(torch.randn(4, 6)).dtype == torch.bfloat16
    assert seen == [torch.float32]  # of the hook before ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_in_float32_su1(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, total = torch.randn(5, 300).to(dtype), torch.randn(300, 4).to(dtype), torch.randn(5, 4)
    expected = total.double() + a.double() @ b.double()
    add_product(total, a, b)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_head_with_a_sum_leaves_autograd_nothing_su2(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, targets = torch.randn(7, 6), torch.arange(7)
    plain, summed = (nn.Parameter(torch.ones(11, 6).copy_(torch.arange(66.0).view(11, 6).sin())) for _ in range(2))
    summed.gradient_sum = GradientSum(summed)  # type: ignore[attr-defined]
    for weight in (plain, summed):
        for _ in range(2):
            chosen_logprobs(hidden, weight, targets)[0].sum().backward()
    found = sum_of(summed)
    assert summed.grad is None
    assert found is not None
    assert found.total is not None
    assert plain.grad is not None
    torch.testing.assert_close(found.total, plain.grad, rtol=1e-5, atol=1e-5)


def test_fused_layers_on_two_shards_and_two_replicas_equal_one_process(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on_ranks(2, _fused, str(tmp_path / "model"))


def _fused(model: str) -> None:
    plain = TorchTrainer(config(strategy="ddp"), model)
    expected = [step(plain, seed).grad_norm for seed in range(2)]
    back_end: Any = trainer_fsdp
    fused = list[int]()
    back_end.fuses_layers = lambda *_: True
    back_end.fuse_layers = lambda *of: fused.append(fuse_layers(*of))
    for changes in ({}, {"replicas": 2}, {"activation_checkpointing": True}):
        trainer = TorchTrainer(config(strategy="fsdp2", ranks=2, **changes), model)
        assert fused.pop() == 2
        assert [step(trainer, seed).grad_norm for seed in range(2)] == pytest.approx(expected, rel=1e-5)
        for entry in trainer.weight_layout().entries:
            rows = whole(plain, entry.name)[entry.box.slices_in(plain.weight_layout().by_name[entry.name].box)]
            torch.testing.assert_close(whole(trainer, entry.name), rows, rtol=1e-4, atol=1e-5)


def test_replicas_add_up_what_only_one_of_them_has_a_gradient_of_fs5(tmp_path: Path) -> None:
    """As of experts in modules of their own, to which the tokens of one replica alone are routed."""
    model = save_tiny_model(tmp_path / "model")
    batches = pack(random_samples(12), world=2, token_budget=BUDGET)
    first, second = ({int(token) for micro in batch.updates[0] for token in micro.token_ids.flat} for batch in batches)
    experts = (min(first - second), min(second - first))
    one = TorchTrainer(config(), model)
    serve_only(one, experts)
    norm = step(one, 0).grad_norm
    weights = {entry.name: whole(one, entry.name) for entry in one.weight_layout().entries}
    on_ranks(2, _replicas, model, experts, norm, weights)


def _replicas(model: str, experts: tuple[int, int], norm: float, weights: dict[str, torch.Tensor]) -> None:
    for changes in ({"strategy": "ddp"}, {"strategy": "fsdp2", "replicas": 2}):
        trainer = TorchTrainer(config(ranks=2, **changes), model)
        serve_only(trainer, experts)
        assert step(trainer, 0).grad_norm == pytest.approx(norm, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(whole(trainer, name), weight, rtol=1e-4, atol=1e-5)


def serve_only(trainer: TorchTrainer, tokens: tuple[int, int]) -> None:
    """The MLP of a layer is an expert for one token, and is not called where there is none."""
    model: Any = trainer.policy.model
    row = list[torch.Tensor]()
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: row.__setitem__(slice(None), args))

    def expert(mlp: Any, token: int, x: torch.Tensor) -> torch.Tensor:
        chosen = row[0] == token
        return mlp(x) * chosen[..., None] if chosen.any() else torch.zeros_like(x)

    for layer, token in zip(model.model.layers, tokens, strict=True):
        layer.mlp.forward = functools.partial(expert, layer.mlp.forward, token)


def test_recomputed_layers_give_the_same_gradients_to_the_last_bit_ma2(tmp_path: Path) -> None:
    """Those of norms too, which go into float32 sums without rounding."""
    policy = load_policy(save_tiny_model(tmp_path / "model"))
    blocks = decoder_blocks(policy.model)
    assert fuse_layers(policy.model, blocks) == 2
    masters, trained = Masters(policy, blocks, torch.bfloat16), dict(policy.named_parameters())
    found = list[dict[str, torch.Tensor]]()
    for recomputes in (False, True):
        if recomputes:
            checkpoint_activations(blocks)
        masters.hold()
        run(policy, micro_batch(), 0.8)[0].square().sum().backward()
        masters.release()
        found.append(masters.gradients(trained))
        masters.forget()
    assert found[0].keys() == trained.keys()
    assert [name for name in trained if not torch.equal(found[0][name], found[1][name])] == []
