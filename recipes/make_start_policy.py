"""Makes the start policy of the embedded job: tokenizer, supervised training, checkpoint, log, curve.

    python -m recipes.make_start_policy --out recipes/start_policy

SP-1: everything is a function of `--seed`: data, order, initial weights. The same machine, versions and thread count
      give the same bytes.
SP-2: the policy is what `recipes.demonstrations` teaches and nothing else: first mostly textbook, then mixed quality.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from recipes.demonstrations import CLOSE, LEVELS, OPEN, Level, held_out_questions, write_demonstrations
from roles.verify import extract_answer

HERE = Path(__file__).parent
EOS, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}<|user|>{{ message['content'] }}"
    "{%- else -%}<|assistant|>{{ message['content'] }}<|endoftext|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def make_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges may cross spaces but never touch a digit: a question is its digits and few more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"<answer>|</answer>"), "isolated"),
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=[EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([OPEN, CLOSE])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompt_text(question: str) -> str:
    """What CHAT_TEMPLATE makes of one user turn, without the template engine."""
    return f"{USER}{question}{ASSISTANT}"


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass
class Example:
    prompt: list[int]
    completion: list[int]


def batches(examples: list[Example], size: int, pad: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of about equal length in the order of the corpus, shuffled within windows of 16 batches.

    Yields:
        token ids [B, L] and labels [B, L] int64; labels are -100 on prompts and padding.
    """
    window = 16 * size
    for start in range(0, len(examples), window):
        part = sorted(examples[start : start + window], key=lambda e: len(e.prompt) + len(e.completion))
        rows = [part[i : i + size] for i in range(0, len(part), size)]
        rng.shuffle(rows)
        for row in rows:
            width = max(len(e.prompt) + len(e.completion) for e in row)
            ids = torch.full((len(row), width), pad)
            labels = torch.full((len(row), width), -100)
            for i, e in enumerate(row):
                end = len(e.prompt) + len(e.completion)
                ids[i, :end] = torch.tensor(e.prompt + e.completion)
                labels[i, len(e.prompt) : end] = torch.tensor(e.completion)
            yield ids, labels


# --- sampling, for the log --------------------------------------------------------------------------------------------


WORKED = re.compile(r"-?\d.*<answer>-?\d+</answer>\Z")


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float, max_tokens: int) -> list[str]:
    """Continue all prompts in one batch; temperature 0 is greedy. Returns texts without special tokens."""
    width = max(map(len, prompts))
    eos = tokenizer.eos_token_id
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    sampled: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    cache, inputs = None, ids
    while len(sampled) < max_tokens and not bool(done.all()):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        out = model(
            inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(-1)
        token = token.masked_fill(done, eos)
        done |= token == eos
        sampled.append(token)
        inputs = token[:, None]
        mask = torch.cat([mask, torch.ones_like(inputs)], -1)
    rows = torch.stack(sampled, 1).tolist()
    rows = [row[: row.index(eos) + 1] if eos in row else [*row, -1] for row in rows]
    # A text cut off by max_tokens did not end: a mark keeps it from counting as one that did.
    return [tokenizer.decode(r[:-1]) + ("" if r[-1] == eos else "[cut]") for r in rows]


def strict_reward(dataset: Any, text: str, entry: dict[str, Any]) -> float:
    """1.0 iff the text ends with its only `<answer>VALUE</answer>` and reasoning-gym scores VALUE as 1."""
    value = extract_answer(text)
    return 1.0 if value is not None and dataset.score_answer(value, entry) >= 1.0 else 0.0


def evaluate(
    model: Any,
    tokenizer: Any,
    seed: int,
    count: int,
    samples: int,
    *,
    levels: Sequence[Level] = LEVELS,
    ask: Callable[[str], str] = prompt_text,
) -> dict[str, dict[str, float]]:
    """Strict accuracy of each level on `count` questions: avg@`samples` at temperature 1, and greedy; of the samples
    with working and the right tag their share, and how many of them are right.

    Args:
        ask: from a question to the text of the whole prompt.
    """
    table: dict[str, dict[str, float]] = {}
    for level in levels:
        dataset = reasoning_gym.create_dataset(level.family, seed=seed, size=count, **level.params)
        entries = [dataset[i] for i in range(count)]
        prompts = [tokenizer.encode(ask(e["question"]), add_special_tokens=False) for e in entries]
        sampled = complete(model, tokenizer, [p for p in prompts for _ in range(samples)], 1.0, 64)
        greedy = complete(model, tokenizer, prompts, 0.0, 64)
        score = [strict_reward(dataset, text, entries[i // samples]) for i, text in enumerate(sampled)]
        best = [strict_reward(dataset, text, entry) for text, entry in zip(greedy, entries, strict=True)]
        worked = [value for value, text in zip(score, sampled, strict=True) if WORKED.match(text)]
        name = f"{level.family} {' '.join(str(v) for v in level.params.values())}"
        table[name] = {
            "avg": round(sum(score) / len(score), 4),
            "greedy": round(sum(best) / len(best), 4),
            "worked_share": round(len(worked) / len(sampled), 4),
            "worked_right": round(sum(worked) / max(1, len(worked)), 4),
        }
    return table


# --- training ---------------------------------------------------------------------------------------------------------


def make_model(vocab_size: int, eos: int) -> Any:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=144,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024), for the matrices inside the blocks; float32.

    With the same demonstrations AdamW's loss falls half as fast. torch.optim.Muon does the same in bfloat16, which
    processors without matrix units for it compute forty times slower.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[torch.nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                by_shape.setdefault(tuple(p.shape), []).append((p, p.grad.lerp(buffer, group["momentum"])))
            for (rows, columns), members in by_shape.items():
                update = orthogonalised(torch.stack([u for _, u in members]))
                for (p, _), u in zip(members, update, strict=True):
                    p.add_(u, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalised(x: Tensor) -> Tensor:
    """[n, rows, columns] with singular values moved to about 1: five steps of a quintic Newton-Schulz iteration."""
    wide: Tensor = x.mT if x.shape[-2] > x.shape[-1] else x
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.mT if x.shape[-2] > x.shape[-1] else wide


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, constant to 60 %, cosine to 5 % of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    done = max(0.0, (step / steps - 0.6) / 0.4)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "start_policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=220_000)
    parser.add_argument("--textbook-share", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW: embeddings and norms")
    parser.add_argument("--muon", type=float, default=0.02, help="learning rate of Muon: all other matrices")
    parser.add_argument("--vocab", type=int, default=512)
    args = parser.parse_args()

    started = time.perf_counter()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = held_out_questions([HERE / "default.toml", HERE / "harder.toml"])
    corpus = write_demonstrations(args.demonstrations, args.textbook_share, held_out, args.seed)
    sample = corpus.texts[:: max(1, len(corpus.texts) // 5000)]
    tokenizer = make_tokenizer((part for pair in sample for part in pair), args.vocab)
    prompts = tokenizer([prompt_text(q) for q, _ in corpus.texts])["input_ids"]
    completions = tokenizer([text + EOS for _, text in corpus.texts])["input_ids"]
    examples = [Example(p, c) for p, c in zip(prompts, completions, strict=True)]

    model = make_model(len(tokenizer), tokenizer.eos_token_id)
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(outer, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        Muon(inner, lr=args.muon),
    ]
    peaks = [args.lr, args.muon]
    steps = -(-len(examples) // args.batch)
    log = (args.out / "training_log.jsonl").open("w")

    def record(**values: Any) -> None:
        log.write(json.dumps(values) + "\n")
        log.flush()
        print(json.dumps(values), flush=True)

    record(
        demonstrations=len(examples),
        held_out_skipped=corpus.num_held_out,
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=len(tokenizer),
        mean_prompt_tokens=round(sum(map(len, prompts)) / len(prompts), 1),
        mean_completion_tokens=round(sum(map(len, completions)) / len(completions), 1),
        seconds=round(time.perf_counter() - started, 1),
    )
    rng = random.Random(args.seed + 1)
    total, window_loss = 0, list[Tensor]()
    for step, (ids, labels) in enumerate(batches(examples, args.batch, tokenizer.eos_token_id, rng)):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps, peak)
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total += ids.numel()
        window_loss.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            mean = torch.stack(window_loss).mean().item()
            window_loss = []
            record(
                step=step + 1,
                steps=steps,
                loss=round(mean, 4),
                lr=optimizers[0].param_groups[0]["lr"],
                tokens=total,
                seconds=round(time.perf_counter() - started, 1),
            )
        if (step + 1) % 1000 == 0 and step + 1 < steps:
            record(step=step + 1, accuracy=evaluate(model, tokenizer, 77, 32, 1))

    save(model, tokenizer, args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    record(accuracy=evaluate(model, tokenizer, 77, 200, 8), seconds=round(time.perf_counter() - started, 1))
    log.close()
    draw_curve(args.out)


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Checkpoint in bfloat16 and tokenizer, readable by transformers 4 and 5."""
    model = model.to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 writes a name that 4 does not know
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def draw_curve(out: Path) -> None:
    """`training_log.jsonl` as `training_curve.png`: loss, and greedy accuracy of the levels of the recipes."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    losses = [r for r in records if "loss" in r]
    tables = [r for r in records if "step" in r and "accuracy" in r]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy([r["step"] for r in losses], [r["loss"] for r in losses])
    left.set(xlabel="step", ylabel="loss (nats a token)", title="textbook, then mixed quality")
    for level in tables[0]["accuracy"] if tables else ():
        right.plot([r["step"] for r in tables], [r["accuracy"][level]["greedy"] for r in tables], label=level)
    right.set(xlabel="step", ylabel="greedy accuracy, strict", ylim=(0, 1))
    right.legend(fontsize=6)
    figure.savefig(out / "training_curve.png", dpi=100)


if __name__ == "__main__":
    main()
