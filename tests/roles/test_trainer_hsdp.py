"""Four ranks of the torch back end: shards, replicas of shards and whole copies against one process; saves in the
background."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from roles import measures
from roles.checkpoint import CheckpointError
from roles.packing import pack
from roles.tensor_parallel import styles_of
from roles.trainer import TrainerConfig
from roles.trainer_config import check_model
from roles.trainer_fsdp import TorchTrainer
from roles.types import TrainSample
from sync.layout import Box, Entry
from tests.roles.fsdp_help import bits, on_ranks, whole
from tests.roles.megatron_models import save_models
from tests.roles.trainer_help import (
    ADAM,
    clipped,
    draws,
    fails,
    infinite_gradient,
    random_samples,
    save_tiny_model,
    spec,
    value_error,
)

BUDGET = 60
WAYS: dict[str, dict[str, Any]] = {
    "shards": {"strategy": "fsdp2"},
    "experts": {"strategy": "fsdp2", "activation_checkpointing": True},
    "replicas": {"strategy": "fsdp2", "replicas": 2},
    "adapters, replicas": {"strategy": "fsdp2", "replicas": 2, "lora_rank": 2},
    "critic": {"strategy": "fsdp2", "head": "value"},
    "copies": {"strategy": "ddp"},
    "tensor": {"tensor_parallel": 2},
    "tensor, vocabulary": {"tensor_parallel": 2, "activation_checkpointing": True},
    "tensor, replicas, vocabulary": {"tensor_parallel": 2, "replicas": 2, "max_skipped": 1},
}


def alone(way: str) -> TrainerConfig:
    """What one process computes to the same end."""
    return config(**{name: value for name, value in WAYS[way].items() if name in ("lora_rank", "head")})


def objective_of(way: str) -> Any:
    return value_error if way == "critic" else clipped


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"lr": 1e-3, "token_budget": BUDGET, "device": "cpu", "grad_clip": 0.5, **ADAM, **changes})


def model_of(folder: Path | str, way: str) -> str:
    if "vocabulary" in way:
        return f"{folder}/{'untied' if 'replicas' in way else 'tied'}"
    return f"{folder}/{'qwen3_moe' if way == 'experts' else 'model'}"


def samples_of(trainer: TorchTrainer, seed: int) -> list[TrainSample]:
    """With recorded routes where there are experts."""
    samples = random_samples(11, seed)
    if trainer.policy.replay is not None:
        for sample in samples:
            drawn = np.random.default_rng(seed).random((len(sample.token_ids) - 1, 2, 4))
            sample.routes = drawn.argsort(-1)[..., :2].astype(np.uint8)
    return samples


def step(trainer: TorchTrainer, seed: int, objective: Any = clipped, **options: Any) -> Any:
    config = trainer.config
    batches = pack(samples_of(trainer, seed), world=config.data_parallel, token_budget=BUDGET)
    batch = batches[config.data_rank(trainer.rank)]
    return trainer.train_step(batch, spec(objective, **options), 0.8)


def _train(folder: str) -> None:
    for name, changes in WAYS.items():
        trainer = TorchTrainer(config(ranks=4, **changes), model_of(folder, name))
        results = [step(trainer, seed, objective_of(name)) for seed in range(2)]
        skipped = step(trainer, 9, infinite_gradient).skipped
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        torch.distributed.barrier()
        trainer.save(f"{folder}/{name}", background=True)
        if "tensor" in name:
            trainer.export(f"{folder}/{name}/exported", "float32")
        moved = step(trainer, 3, objective_of(name))
        trainer.finish_save()
        layout = [(e.name, e.box, view.clone()) for e, view in _held(trainer)]
        said = {"results": results, "skipped": skipped, "moved": moved, "held": layout}
        torch.save(said, f"{folder}/{name}/said-{trainer.rank}.pt")


def _held(trainer: TorchTrainer) -> Iterator[tuple[Entry, torch.Tensor]]:
    names = {entry.name for entry in trainer.weight_layout().entries}
    for name in names:
        entries = [entry for entry in trainer.weight_layout().entries if entry.name == name]
        yield from zip(entries, trainer.weight(name), strict=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "tied", vocab_size=38)
    save_tiny_model(folder / "untied", tied=False, vocab_size=38)
    save_models(folder)
    on_ranks(4, _train, str(folder))
    return folder


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_four_ranks_equal_those_of_one_process_however_they_share(folder: Path, way: str) -> None:
    one = TorchTrainer(alone(way), model_of(folder, way))
    expected = [step(one, seed, objective_of(way)) for seed in range(2)]
    said = [torch.load(folder / way / f"said-{rank}.pt", weights_only=False) for rank in range(4)]
    for rank in said:
        for got, reference in zip(rank["results"], expected, strict=True):
            assert got.sums == pytest.approx(reference.sums, rel=1e-5, abs=1e-5)
            assert got.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
        assert rank["skipped"] == said[0]["skipped"] != []
    saved = TorchTrainer(alone(way), model_of(folder, way))
    saved.load(str(folder / way))
    assert saved.version == 3
    if "tensor" in way:
        assert bits(TorchTrainer(config(), str(folder / way / "exported"))) == bits(saved)
    for entry in one.weight_layout().entries:
        torch.testing.assert_close(whole(saved, entry.name), whole(one, entry.name), rtol=1e-5, atol=1e-5)
    assert step(saved, 3, objective_of(way)).grad_norm == pytest.approx(said[0]["moved"].grad_norm, rel=1e-5)
    for rank in said:  # what each rank sends is what its layout says
        for name, box, view in rank["held"]:
            part = whole(saved, name)[box.slices_in(Box.whole(whole(saved, name).shape))]
            torch.testing.assert_close(view, part, rtol=1e-5, atol=1e-5)
    shapes = {name: box.shape for name, box, _ in said[0]["held"]}
    query, full = "model.layers.0.self_attn.q_proj.weight", whole(saved, "model.layers.0.self_attn.q_proj.weight").shape
    parts = 1 if way == "copies" else 2 if "replicas" in way else 4
    assert np.prod(shapes[query]) == full.numel() / parts


@pytest.mark.timeout(240)
def test_two_tensor_parallel_ranks_continue_what_four_ranks_saved(folder: Path) -> None:
    on_ranks(2, _continue, str(folder))


def _continue(folder: str) -> None:
    for way in ("tensor, vocabulary", "shards"):
        expected = torch.load(f"{folder}/{way}/said-0.pt", weights_only=False)["moved"]
        trainer = TorchTrainer(config(ranks=2, tensor_parallel=2), model_of(folder, way))
        _draws_alike(trainer)
        with pytest.raises(CheckpointError, match="of another model"):
            trainer.load(f"{folder}/{'experts' if way == 'shards' else 'shards'}")
        trainer.load(f"{folder}/{way}")
        moved = step(trainer, 3)
        assert moved.version == expected.version == 4
        assert moved.sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-5)
        assert moved.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        _draws_alike(trainer)
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM wants '\w+' for layers.0.mlp.experts"):
        TorchTrainer(config(ranks=2, tensor_parallel=2), model_of(folder, "experts"))
    torch.distributed.barrier()  # whoever ends first takes the store away


def _draws_alike(trainer: TorchTrainer) -> None:
    """What is whole on each rank stays the same there, also under an objective that draws (TP-1)."""
    step(trainer, 4, draws)
    one, other = measures.gather(whole(trainer, "model.norm.weight").tolist())
    assert one == other


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 4, "tensor_parallel": 4}, "tensor_parallel = 4 does not divide num_key_value_heads = 2"),
        ({"ranks": 6, "tensor_parallel": 3}, "tensor_parallel = 3 does not divide num_attention_heads = 4"),
        ({"ranks": 3, "tensor_parallel": 2}, "does not divide ranks = 3"),
        ({"ranks": 4, "tensor_parallel": 2, "replicas": 4}, "replicas x tensor_parallel = 4 x 2 does not divide"),
        ({"ranks": 2, "tensor_parallel": 2, "lora_rank": 4}, "does not go with lora_rank yet"),
        ({"ranks": 2, "tensor_parallel": 2, "strategy": "ddp"}, "is of strategy = 'fsdp2'"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_fit_are_refused_before_any_process(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_model(config(**changes), save_tiny_model(tmp_path / "model"))


def test_plan_for_the_embedding_is_left_out_since_the_vocabulary_is_split_here_tp3() -> None:
    layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(2)])
    base = nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2), "layers": layers})
    plan = {"embed_tokens": "embedding_rowwise", "layers.*.q_proj": "colwise"}
    found = styles_of(base, plan, base["embed_tokens"])
    assert found == {"layers.0.q_proj": "colwise", "layers.1.q_proj": "colwise"}


def test_one_rank_of_fsdp2_steps_as_without_it_and_keeps_no_copy_of_its_weights_sh3(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on_ranks(1, _alone, str(tmp_path))


def _alone(folder: str) -> None:
    model = f"{folder}/model"
    sharded = TorchTrainer(config(strategy="fsdp2"), model)
    assert sharded.strategy == "fsdp2"
    plain = TorchTrainer(config(strategy="ddp"), model)
    for seed in range(3):
        assert step(sharded, seed).grad_norm == pytest.approx(step(plain, seed).grad_norm, rel=1e-5)
    for entry in plain.weight_layout().entries:
        torch.testing.assert_close(whole(sharded, entry.name), whole(plain, entry.name), rtol=1e-5, atol=1e-6)
    with pytest.raises(ZeroDivisionError):
        step(sharded, 0, fails, width=11)  # of the second micro-batch: gradients of the first are not reduced yet
    assert step(sharded, 4).grad_norm == pytest.approx(step(plain, 4).grad_norm, rel=1e-5)
    os.makedirs(f"{folder}/saved")
    plain.save(f"{folder}/saved")
    batch = pack(random_samples(3), world=1, token_budget=BUDGET)[0]
    expected = plain.logprobs(batch, 1.0)[0][0]
    other = TorchTrainer(config(strategy="fsdp2"), model)
    assert not np.allclose(other.logprobs(batch, 1.0)[0][0], expected, atol=1e-2)
    with pytest.raises(ZeroDivisionError):
        step(other, 0, fails, width=11)  # leaves the weights that it has gathered
    other.load(f"{folder}/saved")
    np.testing.assert_allclose(other.logprobs(batch, 1.0)[0][0], expected, rtol=1e-5, atol=1e-5)


def test_save_in_the_background_holds_the_moment_of_the_call(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    trainer, reader = TorchTrainer(config(), model), TorchTrainer(config(), model)
    step(trainer, 0)
    before = bits(trainer)
    (tmp_path / "saved").mkdir()
    trainer.save(str(tmp_path / "saved"), background=True)
    step(trainer, 1)
    trainer.finish_save()
    reader.load(str(tmp_path / "saved"))
    assert bits(reader) == before
    step(reader, 1)
    assert bits(reader) == bits(trainer)


def test_error_of_a_save_in_the_background_is_raised_by_whoever_waits(tmp_path: Path) -> None:
    trainer = TorchTrainer(config(), save_tiny_model(tmp_path / "model"))
    trainer.save(str(tmp_path / "nowhere"), background=True)
    with pytest.raises(Exception, match="nowhere"):
        trainer.finish_save()
    trainer.finish_save()
    trainer.save(str(tmp_path / "nowhere"), background=True)  # given up by whoever began it
    (tmp_path / "saved").mkdir()
    trainer.save(str(tmp_path / "saved"), background=True)
    trainer.finish_save()
    trainer.load(str(tmp_path / "saved"))


def test_frozen_trainer_scores_and_never_trains(tmp_path: Path) -> None:
    trainer = TorchTrainer(config(frozen=True), save_tiny_model(tmp_path / "model"))
    batch = pack(random_samples(3), world=1, token_budget=BUDGET)[0]
    assert trainer.logprobs(batch, 1.0)[0][0].any()
    with pytest.raises(RuntimeError, match="frozen = true"):
        trainer.train_step(batch, spec(clipped), 1.0)
