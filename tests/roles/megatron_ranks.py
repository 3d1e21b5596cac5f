"""Four megatron ranks on CPU with gloo: the program that `test_trainer_megatron.py` starts.

    python -m tests.roles.megatron_ranks FOLDER

megatron is imported once and the ranks are forked. They form worlds of one, then of two, then of four, and write what
they saw to FOLDER/<scenario>/rank-<r>.pt.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.roles.megatron_on_cpu import pretend

BUDGET = 48
PATIENCE = timedelta(seconds=90)


def config(**changes: Any) -> Any:
    from roles.trainer import TrainerConfig
    from tests.roles.trainer_help import ADAM

    settings = {"backend": "megatron", "lr": 1e-3, "token_budget": BUDGET, "grad_clip": 0.5, **ADAM}
    return TrainerConfig(**settings | changes)


def batch_of(trainer: Any, samples: Any, updates: int = 1) -> Any:
    from roles.packing import fill, plan

    layout = plan(
        samples,
        world=trainer.config.data_parallel,
        token_budget=BUDGET,
        updates=updates,
        multiple=trainer.config.micro_batch_multiple,
    )
    return layout, fill(samples, layout)[trainer.config.data_rank(trainer.rank)]


def objective_of(head: str) -> Any:
    from tests.roles.trainer_help import clipped, spec, value_error

    return spec(value_error) if head == "value" else spec(clipped, entropy_weight=0.1)


class Scenario(NamedTuple):
    """One layout of one model."""

    name: str
    kind: str
    world: int
    changes: dict[str, Any]
    resumes: str = ""
    """Name of the scenario whose checkpoint it continues; empty: it starts from the model."""
    peer: str = ""
    """Name of the scenario that must come to the same, where the torch back end can't: it adapts no experts."""

    def config(self) -> Any:
        return config(ranks=self.world, **self.changes)

    @property
    def reference(self) -> tuple[str, str, int]:
        """Model, head and rank of the adapters of the one process that computes the same."""
        return self.kind, self.config().head, self.config().lora_rank

    def of(self, folder: Path, what: str) -> Path:
        return folder / self.name / what


LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 12.0, "lr": 1e-4}
"""A rate at which elements whose gradient is rounding alone stay below the tolerance."""

EXPERTS_ALONE = "qwen3_moe-lora-1"
LORA_SAVED = "qwen3-lora-tp2"

SCENARIOS = (
    Scenario("llama-1", "llama", 1, {}),
    Scenario("qwen3-1", "qwen3", 1, {}),
    Scenario("qwen3_moe-1", "qwen3_moe", 1, {"activation_checkpointing": True}),
    Scenario("deepseek_v3-1", "deepseek_v3", 1, {}),
    Scenario("qwen3-tp2", "qwen3", 2, {"tensor_parallel": 2}),
    Scenario("deepseek_v3-tp2ep2", "deepseek_v3", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    Scenario("qwen3_moe-ep2", "qwen3_moe", 2, {"expert_parallel": 2}),
    Scenario("qwen3-cp2", "qwen3", 2, {"context_parallel": 2}),
    Scenario("llama-pp2x2", "llama", 2, {"pipeline_parallel": 2, "pipeline_chunks": 2}),
    Scenario("qwen3-tp2pp2", "qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    Scenario(
        "deepseek_v3-pp2ep2",
        "deepseek_v3",
        4,
        {
            "pipeline_parallel": 2,
            "expert_parallel": 2,
            "pipeline_layers": (1, 2),
            "activation_checkpointing": True,
        },
    ),
    Scenario(
        "deepseek_v3-tp2cp2ep2",
        "deepseek_v3",
        4,
        {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2, "activation_checkpointing": True},
    ),
    Scenario("qwen3-critic", "qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2, "head": "value"}),
    Scenario(  # experts on a stage whose micro-batches overlap: routes of an earlier one are replayed in recomputation
        "qwen3_moe-tp2pp2etp2",
        "qwen3_moe",
        4,
        {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "expert_tensor_parallel": 2,
            "activation_checkpointing": True,
        },
    ),
    Scenario(EXPERTS_ALONE, "qwen3_moe", 1, LORA, peer=EXPERTS_ALONE),
    Scenario(
        "qwen3_moe-lora-tp2ep2", "qwen3_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2, **LORA}, "", EXPERTS_ALONE
    ),
    Scenario(LORA_SAVED, "qwen3", 2, {"tensor_parallel": 2, **LORA}),
    Scenario("qwen3-lora-1", "qwen3", 1, LORA),
    Scenario(  # recomputed behind a frozen embedding; boxes of one layer on several model chunks, copies on two ranks
        "llama-lora-pp2x2dp2",
        "llama",
        4,
        {"pipeline_parallel": 2, "pipeline_chunks": 2, "activation_checkpointing": True, **LORA},
    ),
    Scenario("qwen3-lora-resume", "qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2, **LORA}, LORA_SAVED),
    Scenario("qwen3-resume", "qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2}, "qwen3-tp2"),
)
"""By size of the world. Of those with less than four ranks, four in all run beside each other."""


def train(scenario: Scenario, folder: Path, samples: Any) -> dict[str, Any]:
    """All that a layout is asked."""
    from roles.trainer_megatron import MegatronTrainer
    from tests.roles.trainer_help import infinite_gradient, spec

    model, own = str(folder / scenario.kind), folder / scenario.name
    trainer = MegatronTrainer(scenario.config(), model)
    layout, batch = batch_of(trainer, samples)
    said: dict[str, Any] = {
        "logprobs": (layout, trainer.logprobs(batch, 0.8)),
        "layout": trainer.weight_layout(),
        "results": [],
    }
    trainer.export(str(own / "start"), "float32")
    if scenario.kind == "llama":  # back to the start after a step, which must leave no trace
        (own / "untrained").mkdir(exist_ok=True)
        trainer.save(str(own / "untrained"))
        trainer.train_step(batch, objective_of(trainer.config.head), 0.8)
        trainer.load(str(own / "untrained"))
    for _ in range(2):
        _, two = batch_of(trainer, samples, 2)
        said["results"].append(trainer.train_step(two, objective_of(trainer.config.head), 0.8))
    said["window and sink"] = window_and_sink(trainer)
    said["skipped"] = trainer.train_step(batch, spec(infinite_gradient), 0.8).skipped
    said["one alone"] = one_bad_gradient(trainer, batch)
    trainer.export(str(own / "trained"), "float32")
    if trainer._lora is not None:
        said["adapters"] = {f"base_model.model.{name}.weight": p.clone() for name, p in trainer._lora.params.items()}
    (own / "saved").mkdir(exist_ok=True)
    dist.barrier()
    trainer.save(str(own / "saved"), background=True)
    trainer.finish_save()
    if trainer.world == 1:
        fail(trainer, batch)
    said["next"] = trainer.train_step(batch, objective_of(trainer.config.head), 0.8)
    return said


def fail(trainer: Any, batch: Any) -> None:
    """A step that an error of the objective ends in its first micro-batch: the next step must not see it."""
    from tests.roles.trainer_help import fails, spec

    with contextlib.suppress(ZeroDivisionError):
        trainer.train_step(batch, spec(fails, width=batch.updates[0][0].mask.shape[1]), 0.8)


def one_bad_gradient(trainer: Any, batch: Any) -> list[str]:
    """What a step says when one element of one gradient is not finite, on the last rank alone."""
    real = trainer._forward.run

    def spoiled(*args: Any, **named: Any) -> Any:
        found = real(*args, **named)
        if trainer.rank == trainer.world - 1:
            _, param = next(trainer._trained())
            param.main_grad.view(-1)[0] = torch.inf
        return found

    trainer._forward.run = spoiled
    try:
        skipped: list[str] = trainer.train_step(batch, objective_of(trainer.config.head), 0.8).skipped
    finally:
        del trainer._forward.run
    return skipped


def window_and_sink(trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Core attention with a window and a learned sink, which no model here has: what it gives this rank's positions,
    and what the plain form gives all of them."""
    from roles import kernels, kernels_torch, megatron_context
    from roles.megatron_model import PackedAttention, packed_row

    settings = copy.copy(trainer._settings)
    settings.window_size, settings.softmax_type = (2, 0), "learnable"
    attention = PackedAttention(settings, 1)
    heads = settings.num_attention_heads // settings.tensor_model_parallel_size
    torch.manual_seed(0)
    assert attention.sink is not None
    attention.sink.data = torch.randn(heads)
    q, k, v = (torch.randn(16, 1, count, 6) for count in (heads, heads, heads))
    row = packed_row(kernels.Packed([7, 4, 5], torch.device("cpu")), torch.arange(16))
    run = megatron_context.run_of(16)
    assert row.packed is not None
    got = attention(q[run], k[run], v[run], packed_seq_params=row)
    plain = kernels_torch.attention(q.squeeze(1), k.squeeze(1), v.squeeze(1), row.packed, window=3, sink=attention.sink)
    return got.squeeze(1).detach(), plain.flatten(1)[run].detach()


LATER = 40
"""The version that loaded weights get (TR-2)."""


def resume(scenario: Scenario, folder: Path, samples: Any) -> dict[str, Any]:
    """Continue what another layout saved."""
    from roles.checkpoint import CheckpointError
    from roles.trainer_megatron import MegatronTrainer

    saved = folder / scenario.resumes / "saved"
    refused = ""
    trainer = MegatronTrainer(scenario.config(), str(folder / scenario.kind))
    try:
        trainer.load(str(folder / (f"{scenario.kind}-1" if trainer._lora else "llama-1") / "saved"))
    except CheckpointError as error:
        refused = str(error)
    trainer.load(str(saved), LATER)
    version = trainer.version
    _, batch = batch_of(trainer, samples)
    return {"version": version, "next": trainer.train_step(batch, objective_of("lm"), 0.8), "refused": refused}


def in_world(scenario: Scenario, folder: Path, rank: int, samples: Any) -> None:
    """Run a scenario in a group of its own."""
    own = folder / scenario.name
    own.mkdir(exist_ok=True)
    store = dist.FileStore(str(own / "store"), scenario.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.world, timeout=PATIENCE)
    try:
        said = (resume if scenario.resumes else train)(scenario, folder, samples)
        torch.save(said, own / f"rank-{rank}.pt")
    finally:
        dist.destroy_process_group()


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    samples = torch.load(folder / "samples.pt", weights_only=False)
    wanted = [s for s in SCENARIOS if s.name in os.environ.get("SCENARIOS", s.name).split(",")]
    for world in (1, 2, 4):
        side_by_side = 4 // world
        for index, scenario in enumerate(s for s in wanted if s.world == world):
            if index % side_by_side == rank // world:
                in_world(scenario, folder, rank % world, samples[scenario.kind])


def main() -> None:
    folder = Path(sys.argv[1])
    pretend()
    import roles.trainer_megatron  # noqa: F401 (once, for all ranks)

    context = multiprocessing.get_context("fork")

    def guarded(rank: int) -> None:
        try:
            rank_main(rank, folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    ranks = [context.Process(target=guarded, args=(rank,)) for rank in range(4)]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        for process in ranks:
            process.join(0.2)
        if any(process.exitcode for process in ranks):  # the others would wait for it in a collective
            for process in ranks:
                process.kill()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
