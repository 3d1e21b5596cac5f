"""The torch back end on two real ranks: FS-1 to FS-6 of `roles.trainer_fsdp`, TR-1 to TR-4."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from roles.packing import pack
from roles.trainer_fsdp import TorchTrainer
from tests.roles.fsdp_help import BUDGET, bits, config, on_ranks, step, whole
from tests.roles.trainer_help import (
    clipped,
    infinite_gradient,
    random_samples,
    save_tiny_model,
    spec,
    undefined,
)


def _train_on_this_rank(strategy: str, model_path: str, folder: str) -> None:
    """All that can be asked of a rank; what it says goes to a file."""
    trainer = TorchTrainer(config(strategy=strategy), model_path)
    results = [step(trainer, seed, updates=2) for seed in range(3)]
    os.makedirs(f"{folder}/saved", exist_ok=True)
    trainer.save(f"{folder}/saved")
    trainer.export(f"{folder}/exported", "float32")
    before = bits(trainer)
    errors = [step(trainer, 9, objective).skipped[0] for objective in (undefined, infinite_gradient)]
    samples = random_samples(1, 7)  # fewer sequences than ranks: one rank has padding only
    batch = pack(samples, world=trainer.world, token_budget=BUDGET)[trainer.rank]
    logprobs = trainer.logprobs(batch, 1.0)
    lone = trainer.train_step(batch, spec(clipped), 1.0)
    after = {e.name: whole(trainer, e.name).clone() for e in trainer.weight_layout().entries}
    trainer.load(f"{folder}/../one")
    continued = step(trainer, 3)
    os.makedirs(f"{folder}/continued", exist_ok=True)
    trainer.save(f"{folder}/continued")
    facts = {
        "results": results,
        "layout": trainer.weight_layout(),
        "before": before,
        "errors": errors,
        "logprobs": logprobs,
        "lone": lone,
        "after": after,
        "continued": continued,
    }
    torch.save(facts, f"{folder}/rank-{trainer.rank}.pt")


def _both_strategies(folder: str) -> None:
    for strategy in STRATEGIES:
        os.makedirs(f"{folder}/{strategy}", exist_ok=True)
        _train_on_this_rank(strategy, f"{folder}/model", f"{folder}/{strategy}")


STRATEGIES = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks said, under both strategies, in one start of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    model_path = save_tiny_model(folder / "model")
    one = TorchTrainer(config(), model_path)
    step(one, 0)
    (folder / "one").mkdir()
    one.save(str(folder / "one"))
    on_ranks(2, _both_strategies, str(folder))
    return folder


two_ranks = pytest.mark.timeout(240)  # two processes import torch, which takes its time on a busy machine


def said(folder: Path, strategy: str) -> list[dict[str, Any]]:
    return [torch.load(folder / strategy / f"rank-{r}.pt", weights_only=False) for r in range(2)]


def loaded(folder: Path, saved: Path) -> TorchTrainer:
    trainer = TorchTrainer(config(), str(folder / "model"))
    trainer.load(str(saved))
    return trainer


def close(one: TorchTrainer, other: TorchTrainer) -> None:
    for entry in one.weight_layout().entries:
        torch.testing.assert_close(whole(one, entry.name), whole(other, entry.name), rtol=1e-5, atol=1e-5)


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_two_ranks_equal_those_of_one_process(folder: Path, strategy: str) -> None:
    ranks = said(folder, strategy)
    one = TorchTrainer(config(), str(folder / "model"))
    for seed in range(3):
        expected, got = step(one, seed, updates=2), ranks[0]["results"][seed]
        assert got == ranks[1]["results"][seed]  # to the bit, also the seconds
        assert got.version == expected.version
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert got.sums == pytest.approx(expected.sums, rel=1e-4, abs=1e-5)
        assert got.maxima == pytest.approx(expected.maxima, rel=1e-4)
    close(loaded(folder, folder / strategy / "saved"), one)


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoint_and_export_of_two_ranks_hold_the_whole_model(folder: Path, strategy: str) -> None:
    reader = loaded(folder, folder / strategy / "saved")
    assert reader.version == 3
    assert bits(TorchTrainer(config(), str(folder / strategy / "exported"))) == bits(reader)


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_hold_the_rows_that_their_layout_says(folder: Path, strategy: str) -> None:
    reader, ranks = loaded(folder, folder / strategy / "saved"), said(folder, strategy)
    for entry in reader.weight_layout().entries:
        held = [r["layout"].by_name[entry.name] for r in ranks]
        for rank, part in zip(ranks, held, strict=True):
            rows = np.frombuffer(rank["before"][entry.name], np.float32).reshape(part.box.shape)
            assert np.array_equal(rows, whole(reader, entry.name).numpy()[part.box.slices_in(entry.box)])
        if strategy == "fsdp2":
            assert held[0].box.hi[0] == held[1].box.lo[0]
        else:
            assert held[0] == held[1] == entry


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_non_finite_numbers_of_one_rank_are_told_by_all_and_move_nothing(folder: Path, strategy: str) -> None:
    first, second = said(folder, strategy)
    assert first["errors"] == second["errors"]
    assert "the loss of rank" in first["errors"][0]
    assert "the gradient of model." in first["errors"][1]
    assert (first["lone"].version, second["lone"].version) == (6, 6)


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_with_padding_alone_takes_part(folder: Path, strategy: str) -> None:
    reader, ranks = loaded(folder, folder / strategy / "saved"), said(folder, strategy)
    batch = pack(random_samples(1, 7), world=1, token_budget=BUDGET)[0]
    np.testing.assert_allclose(ranks[0]["logprobs"][0][0], reader.logprobs(batch, 1.0)[0][0], rtol=1e-5, atol=1e-5)
    assert ranks[1]["logprobs"][0][0].shape == (1, 1)
    assert ranks[0]["lone"] == ranks[1]["lone"]
    lone = reader.train_step(batch, spec(clipped), 1.0)
    assert ranks[0]["lone"].sums == pytest.approx(lone.sums, rel=1e-4, abs=1e-5)
    for entry in reader.weight_layout().entries:
        rows = whole(reader, entry.name)[ranks[1]["layout"].by_name[entry.name].box.slices_in(entry.box)]
        torch.testing.assert_close(ranks[1]["after"][entry.name], rows, rtol=1e-4, atol=1e-4)


@two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoint_of_one_process_is_continued_by_two_ranks(folder: Path, strategy: str) -> None:
    one = loaded(folder, folder / "one")
    expected = step(one, 3)
    assert said(folder, strategy)[1]["continued"].sums == pytest.approx(expected.sums, rel=1e-4, abs=1e-5)
    back = loaded(folder, folder / strategy / "continued")
    assert back.version == 2
    close(back, one)
