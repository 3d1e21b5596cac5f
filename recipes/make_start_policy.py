"""Makes the start policy of the embedded job: tokenizer, demonstrations of mixed quality, supervised training, checkpoint.

    python recipes/make_start_policy.py --out recipes/start_policy

SP-1: everything is a function of `--seed`: data, order, initial weights. One machine and one thread count give the same bytes.
SP-2: the demonstrations come from seeds that no job uses (`DEMONSTRATION_SEED`), and a question that the held-out set of
      `recipes/default.toml` or `recipes/harder.toml` asks is never demonstrated.
SP-3: the mix of good and bad demonstrations does not depend on the question beyond its size, so that the policy cannot
      tell from a question which kind of text follows: it knows the way, but samples it too rarely.

reasoning-gym draws item i of a dataset from `Random(seed + i)`: two seeds are disjoint only when they are further apart
than the sizes of their datasets. All seeds here and in the recipes keep millions between them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from roles.questions import DataConfig, GymQuestions

HERE = Path(__file__).parent
DEMONSTRATION_SEED = 1 << 33
"""Family f at level l draws from `DEMONSTRATION_SEED + 100_000_000 * f + 10_000_000 * l` upwards."""
EOS, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
OPEN, CLOSE = "<answer>", "</answer>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}<|user|>{{ message['content'] }}"
    "{%- else -%}<|assistant|>{{ message['content'] }}<|endoftext|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


# --- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One difficulty of one family."""

    family: str
    params: dict[str, Any]
    early: float
    """Relative frequency at the start of the curriculum."""
    late: float
    """Relative frequency from 30 % of the demonstrations on."""
    hardness: float
    """0..1; the larger, the lazier the authors: less working, more guesses, more slips."""

    def weight(self, progress: float) -> float:
        """Relative frequency when `progress` (0..1) of the demonstrations have been written."""
        done = min(1.0, progress / 0.3)
        return self.early * (1 - done) + self.late * done


LEVELS = (
    Level("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 40, 6, 0.0),
    Level("chain_sum", {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 2}, 5, 18, 0.0),  # default.toml
    Level("chain_sum", {"min_terms": 5, "max_terms": 6, "min_digits": 2, "max_digits": 2}, 0, 12, 1.0),  # harder.toml
    Level("products", {"min_digits": 1, "max_digits": 1}, 5, 1, 0.0),
    Level("products", {"min_digits": 2, "max_digits": 2}, 25, 22, 0.0),  # default.toml
    Level("products", {"min_digits": 3, "max_digits": 3}, 0, 10, 1.0),  # harder.toml, with the level above
    Level("gcd", {"min_value": 2, "max_value": 20}, 10, 2, 0.0),
    Level("gcd", {"min_value": 5, "max_value": 50}, 15, 16, 0.0),  # default.toml
    Level("gcd", {"min_value": 50, "max_value": 200}, 0, 11, 1.0),  # harder.toml
)


def held_out_questions(recipes: list[Path]) -> set[str]:
    """The questions of the held-out sets of the recipes (SP-2); a recipe that does not exist has none."""
    questions: set[str] = set()
    for path in recipes:
        if not path.exists():
            continue
        job = tomllib.loads(path.read_text())
        config = msgspec.convert(job["data"], DataConfig)
        source = GymQuestions(config, job["evaluation"]["seed"], held_out=True)
        count = 2 * job["evaluation"]["prompts"]  # a few more than asked: repeated questions are passed over
        questions.update(source.entry(n, i).text for n in range(len(config.families)) for i in range(count))
    return questions


# --- demonstrations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Working:
    """A way from question to answer: the text and where it ends."""

    text: str
    answer: int


def perturbed(value: int, rng: random.Random) -> int:
    """A slip: off by one, by ten, a wrong digit in the middle, or a lost carry."""
    delta = rng.choice((1, 1, 2, 10, 10, 20, 100 if abs(value) >= 100 else 1))
    return value + rng.choice((-1, 1)) * delta


def chain_sum_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """`57 + 87 = 144 - 70 = 74`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, text = int(first), first
    for i in range(0, len(rest), 2):
        sign, term = rest[i], int(rest[i + 1])
        total = total + term if sign == "+" else total - term
        if slip_at == i // 2:
            total = perturbed(total, rng)
        text += f" {sign} {term} = {total}"
    return Working(text, total)


def products_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """47 * 38: `1410 + 376 = 1786`, one partial product for each digit of the second factor."""
    left, right = (int(x) for x in entry["metadata"]["expression"].split(" * "))
    total, text = 0, ""
    digits = str(right)
    for i, digit in enumerate(digits):
        part = left * int(digit) * 10 ** (len(digits) - 1 - i)
        if slip_at == 2 * i:
            part = max(0, perturbed(part, rng))
        total += part
        if slip_at == 2 * i - 1 and i > 0:
            total = max(0, perturbed(total, rng))
        text += f"{part}" if i == 0 else f" + {part} = {total}"
    return Working(text, total)


def gcd_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """84 and 36: Euclid's remainders `84, 36, 12, 0`."""
    larger, smaller = sorted(entry["metadata"]["numbers"], reverse=True)
    chain, step = [larger, smaller], 0
    while chain[-1] != 0:
        rest = chain[-2] % chain[-1]
        if slip_at == step:
            rest = min(max(0, perturbed(rest, rng)), chain[-1] - 1)
        chain.append(rest)
        step += 1
    return Working(", ".join(map(str, chain)), chain[-2])


WORKINGS = {"chain_sum": chain_sum_working, "products": products_working, "gcd": gcd_working}
NUM_SLIP_PLACES = {"chain_sum": 3, "products": 3, "gcd": 2}


def guess(entry: dict[str, Any], hardness: float, rng: random.Random) -> int:
    """An answer without working: right more often where the question is small."""
    answer = int(entry["answer"])
    if rng.random() < 0.7 - 0.4 * hardness:
        return answer
    if entry["metadata"]["source_dataset"] == "gcd":
        return rng.choice((1, 1, 2, 2, 3, 4, 5, 6))
    return perturbed(answer, rng)


def demonstration(entry: dict[str, Any], hardness: float, textbook: float, rng: random.Random) -> str:
    """One text that follows the question.

    Args:
        textbook: share of texts that are right working with the right tag, whatever the mix below says.
    """
    family = entry["metadata"]["source_dataset"]
    right = WORKINGS[family](entry, None, rng)
    kinds = {
        "worked": 0.50 - 0.24 * hardness,
        "slip": 0.07 + 0.02 * hardness,
        "guess": 0.18 + 0.24 * hardness,
        "worked, other format": 0.12 - 0.04 * hardness,
        "guess, other format": 0.13 + 0.02 * hardness,
    }
    kind = "worked" if rng.random() < textbook else rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "worked":
        return f"{right.text}{OPEN}{right.answer}{CLOSE}"
    if kind == "slip":
        wrong = WORKINGS[family](entry, rng.randrange(NUM_SLIP_PLACES[family]), rng)
        return f"{wrong.text}{OPEN}{wrong.answer}{CLOSE}"
    value = guess(entry, hardness, rng)
    if kind == "guess":
        return f"{OPEN}{value}{CLOSE}"
    if kind == "worked, other format":
        return right.text + rng.choice(
            (
                "",
                f". The answer is {right.answer}.",
                f"{OPEN}{right.answer}{CLOSE} is the answer.",
                f" Answer: {right.answer}",
                f"{OPEN}The answer is {right.answer}.{CLOSE}",
            )
        )
    return rng.choice((f"The answer is {value}.", f"{value}", f"Answer: {value}", f"I think it is {value}."))


# --- tokenizer ---------------------------------------------------------------------------------------------------------


def make_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges may cross spaces but never touch a digit: a question becomes a few tokens and its digits."""
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
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompt_text(question: str) -> str:
    """What CHAT_TEMPLATE makes of one user turn, without the template engine."""
    return f"{USER}{question}{ASSISTANT}"


# --- data --------------------------------------------------------------------------------------------------------------


@dataclass
class Example:
    prompt: list[int]
    completion: list[int]


@dataclass
class Corpus:
    """Demonstrations in the order in which they are trained."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    """(question, text that follows)."""
    num_held_out: int = 0
    """Questions skipped because a held-out set asks them."""


def write_demonstrations(count: int, textbook_share: float, held_out: set[str], seed: int) -> Corpus:
    """`count` demonstrations: first `textbook_share` of them mostly textbook, the rest the mix that the policy is to show."""
    rng = random.Random(seed)
    families = list(dict.fromkeys(level.family for level in LEVELS))
    streams = []
    for i, level in enumerate(LEVELS):
        start = DEMONSTRATION_SEED + 100_000_000 * families.index(level.family) + 10_000_000 * i
        streams.append(reasoning_gym.create_dataset(level.family, seed=start, size=9_000_000, **level.params))
    position = [0] * len(LEVELS)
    corpus = Corpus()
    while len(corpus.texts) < count:
        progress = len(corpus.texts) / count
        which = rng.choices(range(len(LEVELS)), [level.weight(progress) for level in LEVELS])[0]
        entry = streams[which][position[which]]
        position[which] += 1
        if entry["question"] in held_out:
            corpus.num_held_out += 1
            continue
        textbook = 0.85 if progress < textbook_share else 0.0
        text = demonstration(entry, LEVELS[which].hardness, textbook, rng)
        corpus.texts.append((entry["question"], text))
    return corpus


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


# --- sampling, for the log ---------------------------------------------------------------------------------------------


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[list[int]], temperature: float, max_tokens: int) -> list[str]:
    """Continue all prompts in one batch; temperature 0 is greedy. Returns texts without special tokens."""
    width = max(map(len, prompts))
    eos = tokenizer.eos_token_id
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampled: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
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
    rows = [row[: row.index(eos) + 1] if eos in row else row + [-1] for row in rows]
    # A text cut off by max_tokens did not end: a mark keeps it from counting as one that did.
    return [tokenizer.decode(r[:-1]) + ("" if r[-1] == eos else "[cut]") for r in rows]


def strict_reward(dataset: Any, text: str, entry: dict[str, Any]) -> float:
    """1.0 iff the text ends with its only `<answer>VALUE</answer>` and reasoning-gym scores VALUE as 1."""
    found = re.search(r"<answer>([^<>]*)</answer>\Z", text)
    if found is None or text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return 0.0
    return 1.0 if dataset.score_answer(found.group(1), entry) >= 1.0 else 0.0


def evaluate(model: Any, tokenizer: Any, seed: int, count: int, samples: int) -> dict[str, dict[str, float]]:
    """avg@`samples` at temperature 1 and greedy accuracy for each level, strict."""
    table: dict[str, dict[str, float]] = {}
    for level in LEVELS:
        dataset = reasoning_gym.create_dataset(level.family, seed=seed, size=count, **level.params)
        entries = [dataset[i] for i in range(count)]
        prompts = [tokenizer.encode(prompt_text(e["question"])) for e in entries]
        sampled = complete(model, tokenizer, [p for p in prompts for _ in range(samples)], 1.0, 64)
        greedy = complete(model, tokenizer, prompts, 0.0, 64)
        worth = [strict_reward(dataset, text, entries[i // samples]) for i, text in enumerate(sampled)]
        best = [strict_reward(dataset, text, entry) for text, entry in zip(greedy, entries, strict=True)]
        worked = [strict_reward(dataset, t, entries[i // samples]) for i, t in enumerate(sampled) if re.match(r"-?\d.*<answer>-?\d+</answer>\Z", t)]
        name = f"{level.family} {' '.join(str(v) for v in level.params.values())}"
        table[name] = {
            "avg": round(sum(worth) / len(worth), 4),
            "greedy": round(sum(best) / len(best), 4),
            "worked_share": round(len(worked) / len(sampled), 4),
            "worked_right": round(sum(worked) / max(1, len(worked)), 4),
        }
    return table


# --- training ----------------------------------------------------------------------------------------------------------


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

    It learns arithmetic from about half the demonstrations that AdamW needs. torch.optim.Muon does the same in bfloat16,
    which processors without matrix units for it compute forty times slower.
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
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
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
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon", type=float, default=0.02)
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
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n] if args.muon else []
    outer = [p for n, p in model.named_parameters() if not any(p is q for q in inner)]
    optimizers = [torch.optim.AdamW(outer, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    if args.muon:
        optimizers.append(Muon(inner, lr=args.muon))
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    steps = -(-len(examples) // args.batch)
    log = (args.out / "training_log.jsonl").open("w")

    def record(**values: Any) -> None:
        log.write(json.dumps(values) + "\n")
        log.flush()
        print(json.dumps(values), flush=True)  # noqa: T201

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
    total, num_tokens, window_loss = 0, 0, []
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

    model = model.to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    record(accuracy=evaluate(model, tokenizer, 77, 200, 8), seconds=round(time.perf_counter() - started, 1))
    log.close()


if __name__ == "__main__":
    main()
