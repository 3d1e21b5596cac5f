"""The torch back end on one process: FS-1 to FS-6 of `roles.trainer_fsdp`, TR-1 to TR-4."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.multiprocessing

from roles import measures
from roles.adamw import AdamW
from roles.checkpoint import CheckpointError
from roles.packing import fill, pack, plan, unpack
from roles.policy_torch import PACKED
from roles.trainer import NonFiniteError
from roles.trainer_fsdp import TorchTrainer
from roles.types import TrainSample
from tests.roles.fsdp_help import BUDGET, bits, config, step, whole
from tests.roles.trainer_help import (
    clipped,
    constant,
    fails,
    infinite_gradient,
    random_samples,
    save_tiny_model,
    spec,
    undefined,
    undefined_later,
)


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


def test_micro_batches_give_the_gradient_of_the_whole_batch(model_path: str) -> None:
    samples = random_samples(12)
    results = []
    for budget in (BUDGET, 10_000):
        trainer = TorchTrainer(config(), model_path)
        batch = pack(samples, world=1, token_budget=budget)[0]
        result = trainer.train_step(batch, spec(clipped), 1.0)
        results.append((len(batch.updates[0]), result, trainer))
    (many, first, one), (single, second, other) = results
    assert many > single == 1
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    assert first.sums == pytest.approx(second.sums, rel=1e-5)
    assert first.maxima == pytest.approx(second.maxima, rel=1e-5)
    for entry in one.weight_layout().entries:
        torch.testing.assert_close(whole(one, entry.name), whole(other, entry.name), rtol=1e-5, atol=1e-5)


def test_step_equals_plain_torch(model_path: str) -> None:
    """The same step written with full logits, one batch, `clip_grad_norm_` and `AdamW`."""
    from transformers import AutoModelForCausalLM

    samples = random_samples(5)
    trainer = TorchTrainer(config(weight_decay=0.1, lr=0.05, warmup_steps=2), model_path)
    result = trainer.train_step(pack(samples, world=1, token_budget=BUDGET)[0], spec(clipped, entropy_weight=0.1), 0.8)

    model = AutoModelForCausalLM.from_pretrained(model_path)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.025)  # the first of two warm-up steps
    tokens = sum(s.completion_length for s in samples)
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor(sample.token_ids).long()[None]
        all_logprobs = torch.log_softmax(model(ids).logits[0, :-1] / 0.8, -1)[sample.prompt_length - 1 :]
        logprobs = all_logprobs.gather(1, ids[0, sample.prompt_length :, None]).squeeze(1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = loss - ((ratio * torch.tensor(sample.advantages)).sum() + 0.1 * entropy.sum()) / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert result.learning_rate == 0.025
    assert result.version == trainer.version == 1
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(trainer, name), param.detach(), rtol=1e-4, atol=1e-5)


def test_one_update_takes_the_detached_logprobs_as_proximal_and_more_updates_recompute_them(model_path: str) -> None:
    forwards: list[bool] = []
    for updates, expected in ((1, 0), (3, 2)):
        trainer = TorchTrainer(config(), model_path)
        forwards.clear()
        trainer.policy.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
        result = step(trainer, 0, updates=updates)
        batch = pack(random_samples(12, 0), world=1, token_budget=BUDGET, updates=updates)[0]
        recomputed = sum(len(micros) for micros in batch.updates[1:]) if expected else 0
        assert forwards.count(False) == recomputed
        assert (result.sums["moved"] > 0) == (updates > 1)
        assert trainer.version == 1


def test_learning_rate_of_zero_keeps_every_bit(model_path: str) -> None:
    trainer = TorchTrainer(config(lr=0.0, weight_decay=0.5), model_path)
    before = bits(trainer)
    for seed in range(3):
        assert step(trainer, seed).grad_norm > 0
    assert bits(trainer) == before
    assert trainer.version == 3


@pytest.mark.parametrize(
    ("objective", "text"),
    [(undefined, "the loss of rank 0, micro-batch"), (infinite_gradient, "the gradient of model.")],
)
def test_non_finite_numbers_leave_an_update_out_and_end_the_run_after_k_in_a_row(
    model_path: str, objective: Any, text: str
) -> None:
    trainer = TorchTrainer(config(max_skipped=2), model_path)
    step(trainer, 0)
    before = bits(trainer)
    for _ in range(2):
        result = step(trainer, 1, objective)
        assert re.search(text, result.skipped[0])
        assert np.isnan(result.grad_norm)
        assert not result.sums
    with pytest.raises(NonFiniteError, match=rf"{text}.*3 updates in a row were so"):
        step(trainer, 1, objective)
    assert bits(trainer) == before
    assert trainer.version == 3
    healthy = TorchTrainer(config(), model_path)
    step(healthy, 0)
    assert step(trainer, 2).grad_norm == step(healthy, 2).grad_norm
    assert bits(trainer) == bits(healthy)
    step(trainer, 1, objective)  # the count starts again with an update that was made


def test_objective_that_fails_leaves_nothing_behind_for_the_next_step(model_path: str) -> None:
    """Gradients of the micro-batches before it are not added to those of a step that is made later."""
    trainer, healthy = TorchTrainer(config(), model_path), TorchTrainer(config(), model_path)
    with pytest.raises(ZeroDivisionError):
        step(trainer, 1, fails, width=15)  # of the last micro-batch
    assert step(trainer, 0).grad_norm == step(healthy, 0).grad_norm
    assert bits(trainer) == bits(healthy)


def test_a_step_that_fails_after_its_first_update_has_a_number_of_its_own_tr2(model_path: str) -> None:
    trainer = TorchTrainer(config(max_skipped=0), model_path)
    before = bits(trainer)
    with pytest.raises(NonFiniteError, match="step 1, update 1"):
        step(trainer, 0, undefined_later, updates=2)
    assert bits(trainer) != before
    assert (trainer.version, trainer.steps) == (1, 1)
    assert step(trainer, 1).version == 2


def test_checkpoint_of_another_model_leaves_the_trainer_as_it_was(model_path: str, tmp_path: Path) -> None:
    trainer, healthy = TorchTrainer(config(), model_path), TorchTrainer(config(), model_path)
    other = TorchTrainer(config(), save_tiny_model(tmp_path / "other", intermediate_size=20))
    for one in (trainer, healthy, other):
        step(one, 0)
    step(other, 1)
    (tmp_path / "saved").mkdir()
    other.save(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="of another model"):
        trainer.load(str(tmp_path / "saved"))
    assert bits(trainer) == bits(healthy)
    assert step(trainer, 1).version == step(healthy, 1).version
    assert bits(trainer) == bits(healthy)


def test_loss_without_a_gradient_moves_nothing(model_path: str) -> None:
    trainer = TorchTrainer(config(), model_path)
    before = bits(trainer)
    result = step(trainer, 0, constant)
    assert result.grad_norm == 0
    assert result.sums == {"seen": sum(s.completion_length for s in random_samples(12, 0))}
    assert bits(trainer) == before


def test_update_without_trained_tokens_is_left_out(model_path: str) -> None:
    empty = TrainSample(
        token_ids=np.arange(4, dtype=np.int32),
        prompt_length=4,
        rollout_logprobs=np.zeros(0, np.float32),
        advantages=np.zeros(0, np.float32),
    )
    trainer = TorchTrainer(config(), model_path)
    result = trainer.train_step(
        pack([empty, *random_samples(1)], world=1, token_budget=BUDGET, updates=2)[0], spec(clipped), 1.0
    )
    assert result.sums["tokens"] == random_samples(1)[0].completion_length


def plain_logits(trainer: TorchTrainer, ids: torch.Tensor) -> torch.Tensor:
    """Of transformers' own attention."""
    model = cast(Any, trainer.policy.model)
    model.set_attn_implementation("sdpa")
    logits: torch.Tensor = model(ids).logits
    model.set_attn_implementation(PACKED)
    return logits


def test_logprobs_come_back_in_the_order_of_the_samples_and_follow_the_weights(model_path: str) -> None:
    trainer = TorchTrainer(config(), model_path)
    samples = random_samples(9)

    def logprobs() -> list[np.ndarray]:
        layout = plan(samples, world=1, token_budget=BUDGET, updates=1)
        return unpack(samples, layout, [trainer.logprobs(fill(samples, layout)[0], 0.8)])

    for sample, value in zip(samples, logprobs(), strict=True):
        ids = torch.tensor(sample.token_ids).long()[None]
        with torch.no_grad():
            expected = torch.log_softmax(plain_logits(trainer, ids)[0, :-1] / 0.8, -1)
        expected = expected.gather(1, ids[0, 1:, None]).squeeze(1)[sample.prompt_length - 1 :]
        np.testing.assert_allclose(value, expected.numpy(), rtol=1e-5, atol=1e-5)
    before = logprobs()
    step(trainer, 0)
    assert not np.allclose(before[0], logprobs()[0])


def test_memory_of_smaller_micro_batches_is_given_back_before_a_larger_one_ms3(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
    room = measures.Room(torch.device("cuda"))
    of = {n: pack(random_samples(n), world=1, token_budget=10_000)[0].updates[0] for n in (4, 6, 12)}  # each one longer
    counts = []
    for micros in (of[6], of[6], of[4], of[12], [*of[4], *of[12]], of[6]):
        room.make(micros)
        counts.append(len(given_back))
    assert counts == [1, 1, 1, 2, 2, 2]
    room.make(of[12], padded=True)  # what pads takes more
    assert len(given_back) == 3
    measures.Room(torch.device("cpu")).make(of[4])
    assert len(given_back) == 3


def test_offloaded_moments_come_in_behind_the_blocks_of_the_last_backward_pass_and_change_no_bit(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, offloaded = TorchTrainer(config(), model_path), TorchTrainer(config(offload_optimizer=True), model_path)
    names = {name: offloaded._local[name] for name in offloaded._trained}
    offloaded._optimizer = AdamW(names, offloaded.config, offload=True)  # on a CPU the trainer leaves them in place
    rooms: list[int] = []
    real = offloaded._optimizer.prefetch

    def prefetch(room: int) -> None:
        rooms.append(room)
        real(room)

    monkeypatch.setattr(offloaded._optimizer, "prefetch", prefetch)
    monkeypatch.setattr(measures, "freed_memory", lambda _device: 2**20)
    for seed in range(2):
        assert step(offloaded, seed, updates=2).grad_norm == step(plain, seed, updates=2).grad_norm
    assert rooms == [2**20] * (2 * 2 * 2)  # steps, updates, blocks: of each update's last micro-batch alone
    assert bits(offloaded) == bits(plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_compute_what_plain_ones_do(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the tracer and the autograd of torch.compile, without its code generation, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, compiled = TorchTrainer(config(), model_path), TorchTrainer(config(compile=True), model_path)
    for seed in range(2):
        assert step(compiled, seed).grad_norm == pytest.approx(step(plain, seed).grad_norm, rel=1e-5)
    for name in plain._params:
        torch.testing.assert_close(plain._local[name], compiled._local[name], rtol=1e-5, atol=1e-5)


def test_bfloat16_compute_keeps_float32_weights_and_stays_near(model_path: str) -> None:
    low, high = TorchTrainer(config(dtype="bfloat16"), model_path), TorchTrainer(config(), model_path)
    assert step(low, 0).grad_norm == pytest.approx(step(high, 0).grad_norm, rel=0.1)
    assert {e.dtype for e in low.weight_layout().entries} == {"float32"}
    assert all(whole(low, e.name).dtype == torch.float32 for e in low.weight_layout().entries)


@pytest.mark.parametrize("tied", [True, False])
def test_layout_has_every_weight_once_in_checkpoint_names(tmp_path: Path, tied: bool) -> None:
    from safetensors import safe_open

    path = save_tiny_model(tmp_path, tied=tied)
    layout = TorchTrainer(config(), path).weight_layout()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert {e.name for e in layout.entries} == set(file.keys()) - ({"lm_head.weight"} if tied else set())
        assert all(e.shape == tuple(file.get_slice(e.name).get_shape()) == e.box.shape for e in layout.entries)
    assert ("lm_head.weight" in layout.by_name) == (not tied)


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    settings = config(schedule="cosine", total_steps=6, warmup_steps=1, weight_decay=0.1)
    whole = TorchTrainer(settings, model_path)
    expected = [step(whole, seed, updates=2) for seed in range(4)]
    draw = torch.rand(())

    first = TorchTrainer(settings, model_path)
    for seed in range(2):
        step(first, seed, updates=2)
    first.save(str(tmp_path))
    second = TorchTrainer(settings, model_path)
    second.load(str(tmp_path))
    assert second.version == 2
    resumed = [step(second, seed, updates=2) for seed in (2, 3)]
    for result, reference in zip(resumed, expected[2:], strict=True):
        result.seconds = reference.seconds
        assert result == reference
    assert bits(second) == bits(whole)
    assert torch.equal(torch.rand(()), draw)


def test_loaded_weights_may_get_a_later_version_and_keep_their_place_in_the_schedule_tr2(
    model_path: str, tmp_path: Path
) -> None:
    settings = config(schedule="linear", total_steps=6, warmup_steps=1)
    trainer, again = TorchTrainer(settings, model_path), TorchTrainer(settings, model_path)
    step(trainer, 0)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    trainer.save(str(tmp_path / "one"))
    expected = [step(trainer, seed) for seed in (1, 2)]
    again.load(str(tmp_path / "one"), 40)
    assert again.version == 40
    first = step(again, 1)
    again.save(str(tmp_path / "two"))
    again.load(str(tmp_path / "two"))
    found = [first, step(again, 2)]
    assert [r.version for r in found] == [41, 42]
    assert [r.learning_rate for r in found] == [r.learning_rate for r in expected]
    assert bits(again) == bits(trainer)


def test_checkpoint_before_the_first_step_resumes_without_moments(model_path: str, tmp_path: Path) -> None:
    TorchTrainer(config(), model_path).save(str(tmp_path))
    trainer, fresh = TorchTrainer(config(), model_path), TorchTrainer(config(), model_path)
    step(trainer, 5)
    trainer.load(str(tmp_path))
    assert trainer.version == 0
    step(trainer, 0)
    step(fresh, 0)
    assert bits(trainer) == bits(fresh)


def test_checkpoint_of_another_model_is_refused(model_path: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", tied=False)
    (tmp_path / "saved").mkdir()
    TorchTrainer(config(), model_path).save(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight are in no rank file.*\[model\] path"):
        TorchTrainer(config(), other).load(str(tmp_path / "saved"))


def test_cuda_without_a_gpu_says_what_to_set(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="use 'auto' or 'cpu'"):
        TorchTrainer(config(device="cuda"), model_path)
