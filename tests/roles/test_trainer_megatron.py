"""The megatron-core back end on one, two and four CPU ranks (gloo, CUDA calls replaced): MT-1 to MT-5, HF-1 to HF-3,
MR-1 to MR-3, ML-1 to ML-4, against the torch back end on transformers' own modules. One start of processes for all
layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roles.checkpoint import CheckpointError
from roles.lora import drawn
from roles.packing import fill, plan, unpack
from roles.trainer import TrainerConfig
from roles.trainer_config import check_model
from roles.trainer_fsdp import TorchTrainer
from tests.roles.megatron_models import samples_for, save_models
from tests.roles.megatron_on_cpu import installed
from tests.roles.megatron_ranks import BUDGET, LATER, LORA, SCENARIOS, Scenario, objective_of
from tests.roles.trainer_help import ADAM, save_tiny_model

needs_megatron = pytest.mark.skipif(not installed(), reason="megatron-core is not here; `make test` installs it")
pytestmark = pytest.mark.timeout(420)  # four processes import and run megatron, on a machine that may be busy


def torch_trainer(model: str, **changes: Any) -> TorchTrainer:
    settings = {"lr": 1e-3, "token_budget": BUDGET, "device": "cpu", "grad_clip": 0.5, **ADAM, **changes}
    return TorchTrainer(TrainerConfig(**settings), model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all ranks of all layouts said."""
    folder = tmp_path_factory.mktemp("megatron")
    samples = {kind: samples_for(model) for kind, model in save_models(folder).items()}
    torch.save(samples, folder / "samples.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.roles.megatron_ranks", str(folder)],
            stdout=log,
            stderr=log,
            env=environment,
            timeout=360,
        )
    assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    return folder


Key = tuple[str, str, int]


class Reference:
    """The torch back end on one process, asked the same."""

    def __init__(self, folder: Path, kind: str, head: str, lora_rank: int) -> None:
        self.samples = torch.load(folder / "samples.pt", weights_only=False)[kind]
        changes = LORA if lora_rank else {"head": head}
        trainer, objective = torch_trainer(str(folder / kind), **changes), objective_of(head)
        layout = plan(self.samples, world=1, token_budget=BUDGET, updates=1)
        self.logprobs = unpack(self.samples, layout, [trainer.logprobs(fill(self.samples, layout)[0], 0.8)])
        self.results = []
        for _ in range(2):
            two = plan(self.samples, world=1, token_budget=BUDGET, updates=2)
            batch = fill(self.samples, two)[0]
            self.results.append(trainer.train_step(batch, objective, 0.8))
        own = folder / f"{kind}-{head}-{lora_rank}-reference"
        trainer.export(str(own), "float32")
        self.weights = load_file(own / "model.safetensors")
        self.adapter = load_file(own / "adapter" / "adapter_model.safetensors") if lora_rank else {}
        trainer.version += 2  # the steps that the ranks leave out
        self.next = trainer.train_step(fill(self.samples, layout)[0], objective, 0.8)


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[Key, Reference]:
    return {key: Reference(folder, *key) for key in {s.reference for s in SCENARIOS if not s.peer}}


TRAINED = [scenario for scenario in SCENARIOS if not scenario.resumes and not scenario.peer]
every_layout = pytest.mark.parametrize("scenario", TRAINED, ids=lambda scenario: scenario.name)


def said(folder: Path, scenario: Scenario) -> list[dict[str, Any]]:
    return [
        torch.load(folder / scenario.name / f"rank-{rank}.pt", weights_only=False) for rank in range(scenario.world)
    ]


@needs_megatron
@every_layout
def test_weights_come_out_as_they_went_in_bit_for_bit_hf2(folder: Path, scenario: Scenario) -> None:
    start, out = (
        load_file(path / "model.safetensors") for path in (folder / scenario.kind, scenario.of(folder, "start"))
    )
    assert set(out) - set(start) == ({"score.weight", "score.bias"} if scenario.reference[1] == "value" else set())
    assert all(torch.equal(out[name], tensor.float()) for name, tensor in start.items())


@needs_megatron
@every_layout
def test_logprobs_equal_those_of_transformers(
    folder: Path, scenario: Scenario, references: dict[Key, Reference]
) -> None:
    reference, config = references[scenario.reference], scenario.config()
    ranks = said(folder, scenario)
    first = (config.pipeline_parallel - 1) * config.row_ranks * config.data_parallel
    answers = [rank["logprobs"][1] for rank in ranks[first :: config.row_ranks]]
    for got, expected in zip(
        unpack(reference.samples, ranks[0]["logprobs"][0], answers), reference.logprobs, strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@needs_megatron
@every_layout
def test_steps_equal_those_of_one_torch_process(
    folder: Path, scenario: Scenario, references: dict[Key, Reference]
) -> None:
    reference, ranks = references[scenario.reference], said(folder, scenario)
    assert all(rank["results"][0].version == 1 for rank in ranks)
    for at, expected in enumerate(reference.results):
        for rank in ranks:
            assert rank["results"][at].sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-5)
            assert rank["results"][at].grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert rank["results"][at].learning_rate == expected.learning_rate
    trained = load_file(scenario.of(folder, "trained") / "model.safetensors")
    for name, expected_weight in reference.weights.items():
        assert torch.allclose(trained[name], expected_weight, rtol=1e-5, atol=1e-5), name
    assert ranks[0]["next"].grad_norm == pytest.approx(reference.next.grad_norm, rel=1e-5)


ADAPTED = [scenario for scenario in TRAINED if scenario.reference[2]]


@needs_megatron
@pytest.mark.parametrize("scenario", ADAPTED, ids=lambda scenario: scenario.name)
def test_adapters_equal_those_of_the_torch_back_end_and_are_what_the_weights_have_moved_by_ml1_ml3(
    folder: Path, scenario: Scenario, references: dict[Key, Reference]
) -> None:
    start = load_file(folder / scenario.kind / "model.safetensors")
    trained = load_file(scenario.of(folder, "trained") / "model.safetensors")
    adapter = load_file(scenario.of(folder, "trained") / "adapter" / "adapter_model.safetensors")
    expected = references[scenario.reference].adapter
    assert set(adapter) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-5, atol=5e-6)
    config = scenario.config()
    for name, weight in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if name.split(".")[-2] in config.lora_targets:
            product = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            torch.testing.assert_close(trained[name], weight + 4.0 * product, rtol=1e-6, atol=1e-7)
            assert not torch.equal(trained[name], weight)
        else:
            assert torch.equal(trained[name], weight), name
    ranks = said(folder, scenario)
    assert {name for rank in ranks for name in rank["adapters"]} == set(expected)
    for name, tensor in ((name, tensor) for rank in ranks for name, tensor in rank["adapters"].items()):
        assert torch.equal(tensor, adapter[name])  # ML-2


@needs_megatron
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.peer], ids=lambda scenario: scenario.name)
def test_each_expert_has_an_adapter_that_trains_alike_in_any_layout_ml2(folder: Path, scenario: Scenario) -> None:
    own, other = (
        load_file(folder / name / "trained" / "adapter" / "adapter_model.safetensors")
        for name in (scenario.name, scenario.peer)
    )
    start = TrainerConfig(**LORA)
    assert set(own) == set(other)
    for name, tensor in other.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=5e-6)
        layer, _, half = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        a, b = drawn(start, layer, *((1, tensor.shape[1]) if half == "A" else (tensor.shape[0], 1)))
        assert not torch.equal(tensor, a if half == "A" else b)
    experts = {name.split(".experts.")[1].partition(".")[0] for name in own if ".experts." in name}
    assert experts == {"0", "1", "2", "3"}


@needs_megatron
def test_checkpoint_has_each_adapter_once_and_nothing_else_ml4(folder: Path) -> None:
    scenario = next(scenario for scenario in ADAPTED if scenario.world == 4)
    saved = scenario.of(folder, "saved")
    written = [name for file in saved.glob("rank-*.safetensors") for name in load_file(file) if "/" in name]
    adapters = {name for rank in said(folder, scenario) for name in rank["adapters"]}
    assert len(written) == len(set(written)) == 3 * len(adapters)
    assert not any(path.is_dir() for path in saved.iterdir())


@needs_megatron
@every_layout
def test_update_with_an_infinite_gradient_is_left_out_and_told_by_every_rank(folder: Path, scenario: Scenario) -> None:
    texts = {rank["skipped"][0] for rank in said(folder, scenario)}
    assert len(texts) == 1
    assert "the gradient of" in texts.pop()


@needs_megatron
@every_layout
def test_gradient_that_one_rank_alone_finds_infinite_moves_nothing_anywhere_mt4(
    folder: Path, scenario: Scenario
) -> None:
    """Nor do the weights that are compared with the reference's afterwards."""
    texts = {rank["one alone"][0] for rank in said(folder, scenario)}
    assert len(texts) == 1
    assert f" on rank {scenario.world - 1}" in texts.pop()


@needs_megatron
@every_layout
def test_attention_has_windows_and_sinks_whatever_ranks_share_a_row_mx1(folder: Path, scenario: Scenario) -> None:
    for rank in said(folder, scenario):
        torch.testing.assert_close(*rank["window and sink"], rtol=1e-5, atol=1e-6)


@needs_megatron
@every_layout
def test_layout_covers_every_tensor_of_the_checkpoint(folder: Path, scenario: Scenario) -> None:
    start = load_file(folder / scenario.kind / "model.safetensors")
    entries = [entry for rank in said(folder, scenario) for entry in rank["layout"].entries]
    for name, tensor in start.items():
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for entry in entries:
            if entry.name == name:
                covered[tuple(slice(a, b) for a, b in zip(entry.box.lo, entry.box.hi, strict=True))] = True
        assert covered.all(), name


@needs_megatron
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.resumes], ids=lambda scenario: scenario.name)
def test_checkpoint_of_one_layout_is_continued_by_another(folder: Path, scenario: Scenario) -> None:
    writer = next(s for s in SCENARIOS if s.name == scenario.resumes)
    expected = said(folder, writer)[0]["next"]
    for rank in said(folder, scenario):
        assert (rank["version"], rank["next"].version) == (LATER, LATER + 1)
        assert rank["next"].learning_rate == expected.learning_rate
        assert rank["next"].sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-5)
        assert rank["next"].grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert "it is of another model" in rank["refused"]
    saved = folder / scenario.resumes / "saved"
    with pytest.raises(CheckpointError, match=r"written by \[trainer\] backend = 'megatron', this run has 'fsdp'"):
        torch_trainer(str(folder / scenario.kind)).load(str(saved))


# --- before any process starts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor_parallel": 3, "ranks": 3}, "does not divide|can't share evenly|axis"),
        ({"pipeline_parallel": 4, "ranks": 4}, "2 layers don't divide by pp = 4"),
        ({"pipeline_parallel": 2, "pipeline_layers": (1, 2), "ranks": 2}, r"add up to 3, the model has 2"),
        ({"expert_parallel": 2, "ranks": 2}, "expert_parallel is for mixture-of-experts models"),
        ({"lora_rank": 2, "lora_targets": ("c_attn",)}, r"\['c_attn'\] names none .* it has down_proj, gate_proj"),
        ({"context_parallel": 4, "ranks": 4}, r"1 x 4 does not divide the 2 key-value heads"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    model = save_tiny_model(tmp_path)
    with pytest.raises(ValueError, match=text):
        check_model(TrainerConfig(backend="megatron", **changes), model)


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type = 'gpt2': its tensors are not described"):
        check_model(TrainerConfig(backend="megatron"), tmp_path)
    check_model(TrainerConfig(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": "megatron", "ranks": 6, "tensor_parallel": 4}, "4 x 1 x 1 = 4 does not divide ranks = 6"),
        ({"backend": "megatron", "ranks": 4, "context_parallel": 3}, "1 x 3 x 1 = 3 does not divide ranks = 4"),
        ({"context_parallel": 2, "ranks": 2}, "context_parallel = 2 is of backend = 'megatron'"),
        ({"backend": "megatron", "ranks": 4, "expert_parallel": 3}, "= 3 does not divide ranks = 4"),
        ({"backend": "megatron", "pipeline_chunks": 2}, "needs pipeline_parallel of at least 2"),
        ({"backend": "megatron", "compile": True}, "compile = True is of backend = 'fsdp'"),
        ({"pipeline_parallel": 2, "ranks": 2}, "pipeline_parallel = 2 is of backend = 'megatron'"),
        ({"replicas": 3, "ranks": 4}, "replicas = 3 does not divide ranks = 4"),
        ({"lora_rank": 4, "lora_targets": ("q_proj", "lm_head")}, "takes no adapter; leave lm_head out"),
        ({"lora_rank": 4, "frozen": True}, "lora_rank is for a policy that is trained"),
    ],
)
def test_mesh_that_does_not_come_out_even_and_foreign_settings_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainerConfig(**changes)


@needs_megatron
def test_machine_without_a_gpu_is_told_to_use_the_other_backend(folder: Path) -> None:
    code = (
        "import sys; from tests.roles.megatron_on_cpu import SITE, one_rank; sys.path.append(str(SITE))\n"
        "from roles.trainer_megatron import MegatronTrainer\n"
        "from roles.trainer import TrainerConfig\n"
        "with one_rank():\n"
        f"    MegatronTrainer(TrainerConfig(backend='megatron', device='cpu'), {str(folder / 'qwen3')!r})"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240)
    assert "computes on GPUs alone, and torch sees none; use backend = 'fsdp'" in done.stderr
