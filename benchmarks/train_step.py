"""One side of the training benchmark: `python -m benchmarks.train_step PLACE WORKS SIDE FOLDER`, SIDE one of `SIDES`.

WORKS are names of works with one model, joined by commas. When it has loaded that, and after each training step, it
says so in a line `RESULT {json}`; a line of its input is the work to do a step of. Exit code 3 says that the peer is
not installed.

TS-1: both sides compute the loss of plain GRPO (clipped ratio, mean over all tokens of the step), the entropy without
      gradient, clip the norm of the gradient to 1 and step AdamW; weights, gradients' sums and moments are float32, and
      products bfloat16 on a GPU. No activation checkpointing; else each side keeps what it does by default.
      Their gradient norms agree.
TS-2: the peer is what its trainer makes of the model, and the loss is its `_compute_loss`. The loop of micro-batches
      around it is ours: sorted by length, as many as fit the budget, so that it pads little.
TS-3: memory is counted from before the weights are loaded: weights, gradients, moments and everything of the step. The
      peak is that of the work, on a GPU; on a CPU that of the process.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train_work import WORKS, Work

SIDES = ("ours", "compiled", "trl")
NOT_INSTALLED = 3


Step = Callable[[], float]
"""A training step; returns the norm of the gradient."""


def ours(works: dict[str, Work], folder: Path, **changes: Any) -> dict[str, Step]:
    from algorithms import catalog
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_fsdp import TorchTrainer
    from roles.types import TrainSample

    device = next(iter(works.values())).device
    if device == "cuda":  # FSDP2 over the one GPU
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        changes |= {"strategy": "fsdp2", "dtype": "bfloat16"}
    trainer = TorchTrainer(TrainerConfig(device=device, lr=1e-6, grad_clip=1.0, **changes), str(folder))
    objective = catalog.objective("ppo", {"tis_cap": None})  # importance weights, which the peer has no samples for

    def step_of(work: Work) -> Step:
        samples = [
            TrainSample(
                token_ids=ids.astype(np.int32),
                prompt_length=work.prompt,
                rollout_logprobs=np.full(len(ids) - work.prompt, -np.log(work.sizes["vocab_size"]), np.float32),
                advantages=np.full(len(ids) - work.prompt, advantage, np.float32),
            )
            for ids, advantage in zip(work.tokens(), work.advantages(), strict=True)
        ]

        def step() -> float:
            batch = pack(samples, world=1, token_budget=work.budget)[0]
            return trainer.train_step(batch, objective, 1.0).grad_norm

        return step

    return {name: step_of(work) for name, work in works.items()}


def trl(works: dict[str, Work], folder: Path) -> dict[str, Step]:
    trainer = _trl_trainer(next(iter(works.values())), folder)
    model = trainer.accelerator.prepare_model(trainer.model).train()
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def step_of(work: Work) -> Step:
        rows, advantages = work.tokens(), work.advantages()
        by_length = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        chunks = _chunks(work, rows, by_length)
        micros = [_padded(work, [rows[i] for i in chunk], advantages[chunk]) for chunk in chunks]
        total = sum(len(ids) - work.prompt for ids in rows)

        def step() -> float:
            for inputs in micros:
                share = float(inputs["completion_mask"].sum()) / total
                on_device = {name: tensor.to(work.device) for name, tensor in inputs.items()}
                (trainer._compute_loss(model, on_device) * share).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(norm)

        return step

    return {name: step_of(work) for name, work in works.items()}


def _trl_trainer(work: Work, folder: Path) -> Any:
    try:
        peer: Any = importlib.import_module("trl")
        datasets: Any = importlib.import_module("datasets")
        grpo = peer.GRPOTrainer
    except (ImportError, RuntimeError):  # its lazy modules turn the first into the second
        sys.exit(NOT_INSTALLED)
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizers: Any = importlib.import_module("tokenizers")
    words = {f"w{i}": i for i in range(work.sizes["vocab_size"])}
    settings = peer.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=work.device == "cpu",
        bf16=work.device == "cuda",
        per_device_train_batch_size=2,
        num_generations=2,
        loss_type="bnpo",
        report_to=[],
        beta=0.0,
        gradient_checkpointing=False,
    )
    return grpo(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1"] * 4}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
            eos_token="w0",
            pad_token="w0",
        ),
    )


def _chunks(work: Work, rows: list[np.ndarray], order: list[int]) -> list[list[int]]:
    """The longest of a chunk is its first: what all of it is padded to."""
    chunks: list[list[int]] = []
    for i in order:
        if chunks and len(rows[chunks[-1][0]]) * (len(chunks[-1]) + 1) <= work.budget:
            chunks[-1].append(i)
        else:
            chunks.append([i])
    return chunks


def _padded(work: Work, rows: list[np.ndarray], advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """What TRL's collator makes: answers padded on the right."""
    width = max(map(len, rows)) - work.prompt
    completion, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for at, ids in enumerate(rows):
        completion[at, : len(ids) - work.prompt] = ids[work.prompt :]
        mask[at, : len(ids) - work.prompt] = 1
    prompt = torch.tensor(np.stack([ids[: work.prompt] for ids in rows]))
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": torch.tensor(completion),
        "completion_mask": torch.tensor(mask),
        "advantages": torch.tensor(advantages),
    }


class Memory:
    """Bytes beyond those in use when it was made, at most (TS-3)."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if not self._cuda:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self._before = self._kilobytes("VmRSS")

    def forget(self) -> None:
        """What comes now is of another work."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_mib(self) -> float:
        if self._cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        return (self._kilobytes("VmHWM") - self._before) / 2**10

    @staticmethod
    def _kilobytes(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1])


def say(**facts: Any) -> None:
    print("RESULT " + json.dumps(facts), flush=True)


def main() -> None:
    place, names, side, folder = sys.argv[1], sys.argv[2].split(","), sys.argv[3], Path(sys.argv[4])
    works = {name: WORKS[place][name] for name in names}
    first = works[names[0]]
    if place != "gpu":
        torch.set_num_threads(1)
    if side == "model":
        first.write_model(folder)
        return
    importlib.import_module("roles.trainer_fsdp" if side != "trl" else "transformers.models.qwen3.modeling_qwen3")
    memory = Memory(first.device)
    steps = trl(works, folder) if side == "trl" else ours(works, folder, compile=side == "compiled")
    say(version=importlib.import_module("trl").__version__ if side == "trl" else "")
    before = names[0]
    for line in sys.stdin:
        name = line.strip()
        if name != before:
            memory.forget()
        before = name
        began, spent = time.perf_counter(), time.process_time()
        norm = steps[name]()
        if first.device == "cuda":
            torch.cuda.synchronize()
        took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
        say(**took, grad_norm=norm, peak_MiB=memory.peak_mib())


if __name__ == "__main__":
    main()
