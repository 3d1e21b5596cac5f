"""Adapters: LO-1 to LO-3 of `roles.lora`, WT-3 of `roles.weights_torch`, on the torch back end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roles.packing import pack
from roles.trainer import TrainerConfig
from roles.trainer_fsdp import TorchTrainer
from tests.roles.trainer_help import clipped, random_samples, save_tiny_model, spec

BUDGET = 60


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


def config(**changes: Any) -> TrainerConfig:
    settings = {"lr": 1e-2, "token_budget": BUDGET, "device": "cpu", "lora_rank": 2, "lora_alpha": 8.0}
    return TrainerConfig(**{**settings, **changes})


def batch(seed: int = 0) -> Any:
    return pack(random_samples(8, seed), world=1, token_budget=BUDGET)[0]


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {e.name: trainer.weight(e.name)[0].clone() for e in trainer.weight_layout().entries}


def test_adapted_model_is_the_model_at_first_bit_for_bit(model_path: str) -> None:
    adapted, plain = TorchTrainer(config(), model_path), TorchTrainer(config(lora_rank=0), model_path)
    for one, other in zip(adapted.logprobs(batch(), 0.8)[0], plain.logprobs(batch(), 0.8)[0], strict=True):
        assert (one == other).all()
    assert set(weights(adapted)) == set(weights(plain))


def test_step_moves_adapters_alone_and_the_merged_weights_are_those_of_the_model_that_computes(model_path: str) -> None:
    trainer = TorchTrainer(config(), model_path)
    before = weights(trainer)
    for seed in range(2):
        assert trainer.train_step(batch(seed), spec(clipped), 0.8).grad_norm > 0
    after = weights(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.split(".")[-2] in config().lora_targets}
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model_path)
    merged.load_state_dict(after, strict=False)
    sample = random_samples(8)[0]
    ids = torch.tensor(sample.token_ids).long()[None]
    expected = torch.log_softmax(merged(ids).logits[0, :-1] / 0.8, -1).gather(1, ids[0, 1:, None]).squeeze(1)
    got = trainer.logprobs(pack([sample], world=1, token_budget=BUDGET)[0], 0.8)[0][0][0]
    start = sample.prompt_length
    torch.testing.assert_close(torch.tensor(got[start:]), expected[start - 1 :].detach(), rtol=1e-4, atol=1e-4)


def test_adapter_alone_is_offered_in_the_names_of_peft_and_exported_in_its_format(
    model_path: str, tmp_path: Path
) -> None:
    trainer = TorchTrainer(config(lora_send="adapter", lora_targets=("q_proj",)), model_path)
    trainer.train_step(batch(), spec(clipped), 0.8)
    names = {e.name for e in trainer.weight_layout().entries}
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert names == {stem.format(layer, half) for layer in (0, 1) for half in "AB"}
    trainer.export(str(tmp_path / "out"), "float32")
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert set(adapter) == names
    assert all(torch.equal(adapter[name], trainer.weight(name)[0]) for name in names)
    settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 8.0, ["q_proj"])
    merged, start = (load_file(path / "model.safetensors") for path in (tmp_path / "out", Path(model_path)))
    name = "model.layers.0.self_attn.q_proj.weight"
    product = adapter[stem.format(0, "B")] @ adapter[stem.format(0, "A")]
    torch.testing.assert_close(merged[name], start[name] + 4 * product)


def test_checkpoint_holds_adapters_alone_and_continues_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    first, second = TorchTrainer(config(), model_path), TorchTrainer(config(seed=5), model_path)
    first.train_step(batch(), spec(clipped), 0.8)
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    results = [trainer.train_step(batch(1), spec(clipped), 0.8) for trainer in (first, second)]
    assert results[0].grad_norm == results[1].grad_norm
    for name, weight in weights(first).items():
        assert torch.equal(weight, weights(second)[name])
    (file,) = tmp_path.glob("rank-*.safetensors")
    assert all(".lora_" in name for name in load_file(file) if name.startswith("weight/"))


def test_targets_that_no_layer_has_are_told_with_those_that_there_are(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"lora_targets = \['c_attn'\] names none .* it has down_proj, gate_proj"):
        TorchTrainer(config(lora_targets=("c_attn",)), model_path)
