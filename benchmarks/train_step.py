"""One process of `benchmarks/train.py`: `python -m benchmarks.train_step models|step|memory ours|trl FOLDER`.

Both sides compute the loss of plain GRPO (clipped ratio, mean over tokens), entropy without gradient, clip the gradient
to 1 and step AdamW. The last line of the output is a JSON object; exit code 3 says that the peer is not installed.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = {
    "step": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "memory": {"vocab_size": 151936, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2},
}
PROMPT = 24
BUDGET = {"step": 2048, "memory": 4096}
STEPS = {"step": 3, "memory": 1}


def lengths_of(what: str) -> list[int]:
    """Tokens of each sequence, prompt included: answers have long tails."""
    if what == "memory":
        return [4096]
    drawn = np.random.default_rng(0).lognormal(4.4, 0.55, 64)
    return [int(PROMPT + np.clip(length, 16, 276)) for length in drawn]


def write_models(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for what, sizes in SIZES.items():
        torch.manual_seed(0)
        config = Qwen3Config(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=sizes["hidden_size"] // 4,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / what)


def tokens(what: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, SIZES[what]["vocab_size"], length) for length in lengths_of(what)]


def advantages(count: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=count).astype(np.float32)


def ours(what: str, folder: Path) -> Any:
    from algorithms import catalog
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_fsdp import TorchTrainer
    from roles.types import TrainSample

    config = TrainerConfig(device="cpu", lr=1e-6, token_budget=BUDGET[what], grad_clip=1.0)
    trainer = TorchTrainer(config, str(folder / what))
    samples = [
        TrainSample(
            token_ids=ids.astype(np.int32),
            prompt_length=PROMPT,
            rollout_logprobs=np.full(len(ids) - PROMPT, -np.log(SIZES[what]["vocab_size"]), np.float32),
            advantages=np.full(len(ids) - PROMPT, advantage, np.float32),
        )
        for ids, advantage in zip(tokens(what), advantages(len(tokens(what))), strict=True)
    ]
    objective = catalog.objective("ppo", {"tis_cap": None})  # importance weights, which the peer has no samples for

    def step() -> float:
        batch = pack(samples, world=1, token_budget=BUDGET[what])[0]
        return trainer.train_step(batch, objective, 1.0).grad_norm

    return step


def trl(what: str, folder: Path) -> Any:
    try:
        peer: Any = importlib.import_module("trl")
        datasets: Any = importlib.import_module("datasets")
        grpo = peer.GRPOTrainer
    except (ImportError, RuntimeError):
        sys.exit(3)
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizers: Any = importlib.import_module("tokenizers")
    words = {f"w{i}": i for i in range(SIZES[what]["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        eos_token="w0",
        pad_token="w0",
    )
    rows = tokens(what)
    longest = max(len(ids) for ids in rows)
    per_batch = max(1, min(len(rows), BUDGET[what] // longest))
    settings = peer.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=2,
        loss_type="bnpo",
        report_to=[],
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer = grpo(
        model=AutoModelForCausalLM.from_pretrained(folder / what, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1"] * 4}),
        processing_class=tokenizer,
    )
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    by_length = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    weights = advantages(len(rows))
    total = sum(len(ids) - PROMPT for ids in rows)

    def micro(chunk: list[int]) -> tuple[dict[str, torch.Tensor], float]:
        width = max(len(rows[i]) for i in chunk) - PROMPT
        completion, mask = np.zeros((len(chunk), width), np.int64), np.zeros((len(chunk), width), np.int64)
        for row, i in enumerate(chunk):
            completion[row, : len(rows[i]) - PROMPT] = rows[i][PROMPT:]
            mask[row, : len(rows[i]) - PROMPT] = 1
        prompt = torch.tensor(np.stack([rows[i][:PROMPT] for i in chunk]))
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": torch.tensor(completion),
            "completion_mask": torch.tensor(mask),
            "advantages": torch.tensor(weights[chunk]),
        }
        return inputs, float(mask.sum()) / total

    def step() -> float:
        for start in range(0, len(rows), per_batch):
            inputs, share = micro(by_length[start : start + per_batch])
            (trainer._compute_loss(model, inputs) * share).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def main() -> None:
    what, who, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    if what == "models":
        write_models(folder)
        print("{}")
        return
    step = (ours if who == "ours" else trl)(what, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = step()
    times = []
    for _ in range(STEPS[what]):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    seconds = min(times)
    facts = {
        "tokens_per_s": sum(lengths_of(what)) / seconds,
        "seconds": seconds,
        "peak_MB": peak,
        "grad_norm": norm,
        "score": -seconds if what == "step" else -peak,
        "version": importlib.import_module("trl").__version__ if who == "trl" else "",
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
