"""Recorded routes in transformers' models: RR-1 to RR-3 of `roles.replay`, and experts offered to weight transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roles.packing import pack
from roles.trainer import TrainerConfig
from roles.trainer_fsdp import TorchTrainer
from roles.types import TrainSample
from tests.roles.megatron_models import samples_for, save_models
from tests.roles.trainer_help import clipped, spec

SPARSE = ("qwen3_moe", "deepseek_v3")
BUDGET = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def trainer_of(folder: Path, kind: str, **changes: Any) -> TorchTrainer:
    return TorchTrainer(TrainerConfig(lr=1e-2, token_budget=BUDGET, device="cpu", **changes), str(folder / kind))


def samples(trainer: TorchTrainer) -> list[TrainSample]:
    return samples_for(trainer.policy.model)


def logprobs(trainer: TorchTrainer, batch: list[TrainSample]) -> list[np.ndarray]:
    return trainer.logprobs(pack(batch, world=1, token_budget=BUDGET)[0], 1.0)[0]


def routers(trainer: TorchTrainer) -> list[torch.nn.Module]:
    return [module for name, module in trainer.policy.model.named_modules() if name.endswith("mlp.gate")]


def recorded(trainer: TorchTrainer, batch: list[TrainSample]) -> list[TrainSample]:
    """The same samples with the routes that this model itself chooses."""
    seen: list[list[torch.Tensor]] = []
    hooks = [router.register_forward_hook(lambda _m, _a, out: seen[-1].append(out[2])) for router in routers(trainer)]
    for sample in batch:
        sample.routes = None
        seen.append([])
        logprobs(trainer, [sample])
    for hook in hooks:
        hook.remove()
    for sample, layers in zip(batch, seen, strict=True):
        sample.routes = torch.stack(layers, 1).numpy().astype(np.uint8)
    return batch


@pytest.mark.parametrize("kind", SPARSE)
def test_own_routes_change_nothing_and_others_do(folder: Path, kind: str) -> None:
    trainer = trainer_of(folder, kind)
    assert trainer.policy.packed
    batch = samples(trainer)
    other = logprobs(trainer, batch)
    own = recorded(trainer, batch)
    replayed = logprobs(trainer, own)
    for sample in own:
        sample.routes = None
    chosen = logprobs(trainer, own)
    for a, b in zip(replayed, chosen, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert max(float(abs(a - b).max()) for a, b in zip(other, chosen, strict=True)) > 1e-2


@pytest.mark.parametrize("kind", SPARSE)
def test_routes_stay_when_the_gate_has_moved_and_the_gate_still_learns(folder: Path, kind: str) -> None:
    trainer = trainer_of(folder, kind)
    batch = samples(trainer)
    used: list[torch.Tensor] = []
    for router in routers(trainer):
        torch.nn.init.normal_(router.weight)  # type: ignore[arg-type]
        router.register_forward_hook(lambda _m, _a, out: used.append(out[2]))
    gates = {name for name in trainer._trained if name.endswith("mlp.gate.weight")}
    before = {name: trainer.weight(name)[0].clone() for name in gates}
    packed = pack(batch, world=1, token_budget=BUDGET)[0]
    trainer.train_step(packed, spec(clipped), 1.0)
    expected = torch.cat([torch.tensor(micro.routes).long() for micro in packed.updates[0]])
    layers = len(routers(trainer))
    for layer in range(layers):
        assert torch.equal(torch.cat(used[layer::layers]), expected[:, layer])
    assert all(not torch.equal(before[name], trainer.weight(name)[0]) for name in gates)


@pytest.mark.parametrize("kind", SPARSE)
def test_recomputed_activations_see_the_same_routes(folder: Path, kind: str) -> None:
    results = []
    for recompute in (False, True):
        trainer = trainer_of(folder, kind, activation_checkpointing=recompute)
        batch = pack(samples(trainer), world=1, token_budget=BUDGET)[0]
        results.append(trainer.train_step(batch, spec(clipped), 1.0))
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)


@pytest.mark.parametrize("kind", SPARSE)
def test_row_without_packing_replays_the_same(folder: Path, kind: str) -> None:
    trainer = trainer_of(folder, kind)
    batch = samples(trainer)
    packed = logprobs(trainer, batch)
    trainer.policy.packed = False
    trainer.policy.model.set_attn_implementation("sdpa")  # type: ignore[operator]
    for a, b in zip(packed, logprobs(trainer, batch), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_routes_of_another_model_are_refused(folder: Path) -> None:
    trainer = trainer_of(folder, "qwen3_moe")
    batch = samples(trainer)
    for sample in batch:
        assert sample.routes is not None
        sample.routes = sample.routes[:, :1]
    with pytest.raises(ValueError, match="routes are of 1 MoE layers with 2 experts per token, the model has 2 with 2"):
        logprobs(trainer, batch)


@pytest.mark.parametrize("kind", SPARSE)
def test_experts_are_offered_stacked_and_one_by_one_in_checkpoint_names(folder: Path, kind: str) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(folder, kind)
    names = {entry.name for entry in trainer.weight_layout().entries}
    for name, tensor in load_file(folder / kind / "model.safetensors").items():
        assert name in names, name
        (box,) = trainer.weight(name)
        assert torch.equal(box, tensor.float())
    assert any(name.endswith("experts.gate_up_proj") for name in names)


@pytest.mark.parametrize("kind", SPARSE)
def test_export_writes_checkpoint_names_bit_for_bit(folder: Path, tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    trainer_of(folder, kind).export(str(tmp_path), "float32")
    start, out = (load_file(path / "model.safetensors") for path in (folder / kind, tmp_path))
    assert set(out) == set(start)
    assert all(torch.equal(out[name], tensor.float()) for name, tensor in start.items())
