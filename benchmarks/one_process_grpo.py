"""GRPO in one process, in the plainest way that is still quick: the peer of the embedded job.

    python -m benchmarks.one_process_grpo --recipe recipes/default.toml --seconds 240 --seed 0

Sample, score, update, repeat; nothing overlaps. Policy, tasks, held-out set, verifier and objective are those of the
recipe: token mean, advantages (r - mean) / (std + 1e-6) in each group, one AdamW update per batch, no KL term, fp32.
`seconds` is time spent on sampling, scoring and training; held-out evaluation is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from roles.prompts import DataConfig, PromptEncoder, PromptSource, held_out
from roles.types import Prompt
from roles.verify import reasoning_gym


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, eos: int
) -> list[list[int]]:
    """Continue all prompts in one left-padded batch with a KV cache; finished rows leave it. Temperature 0 is greedy.

    Returns:
        the sampled ids of each prompt, `eos` included when it was reached within `max_tokens`.
    """
    width = max(map(len, prompts))
    inputs = torch.tensor([[eos] * (width - len(p)) + [*p] for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    rows: list[list[int]] = [[] for _ in prompts]
    alive, cache = list(range(len(prompts))), None
    for _ in range(max_tokens):
        out = model(
            inputs, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(-1)
        for row, token in zip(alive, tokens.tolist(), strict=True):
            if not rows[row] or rows[row][-1] != eos:
                rows[row].append(token)
        running = [i for i, row in enumerate(alive) if rows[row][-1] != eos]
        if not running:
            break
        inputs, position = tokens[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(inputs)], -1)
        if len(running) < 0.75 * len(alive):
            keep = torch.tensor(running)
            alive = [alive[i] for i in running]
            cache.batch_select_indices(keep)
            inputs, position, mask = inputs[keep], position[keep], mask[keep]
    return rows


def verdicts(items: list[Prompt], rows: list[list[int]], tokenizer: Any, eos: int) -> list[float]:
    """Rewards; a completion that did not end by itself scores 0."""
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [
        reasoning_gym(item, text) if row[-1] == eos else 0.0 for item, row, text in zip(items, rows, texts, strict=True)
    ]


def update(
    model: Any, optimizer: Any, items: list[Prompt], rows: list[list[int]], advantages: Tensor, max_norm: float
) -> dict[str, float]:
    """One optimizer step on the token mean of -A * ratio; on policy it is 1, its gradient the logprob's."""
    width = max(len(i.token_ids) + len(r) for i, r in zip(items, rows, strict=True))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (item, row) in enumerate(zip(items, rows, strict=True)):
        start, end = len(item.token_ids), len(item.token_ids) + len(row)
        ids[i, :end] = torch.tensor([*item.token_ids, *row])
        mask[i, start:end] = True
    num_tokens = int(mask.sum())
    entropy = 0.0
    order = sorted(range(len(rows)), key=lambda i: len(items[i].token_ids) + len(rows[i]))
    for start in range(0, len(order), 64):  # sorted micro-batches: less padding
        part = order[start : start + 64]
        longest = max(len(items[i].token_ids) + len(rows[i]) for i in part)
        x, m = ids[part, :longest], mask[part, 1:longest]
        logprobs = model(x[:, :-1]).logits[m].log_softmax(-1)
        taken = logprobs.gather(-1, x[:, 1:][m][:, None]).squeeze(-1)
        weight = advantages[part][:, None].expand(m.shape)[m]
        loss = -(weight * (taken - taken.detach()).exp()).sum() / num_tokens
        loss.backward()
        entropy -= float((logprobs.detach().exp() * logprobs.detach()).sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return {"entropy": entropy / num_tokens, "grad_norm": float(norm)}


def evaluate(
    model: Any, tokenizer: Any, items: list[Prompt], samples: int, max_tokens: int, eos: int
) -> dict[str, Any]:
    """avg@`samples` at temperature 1, also by family, and greedy accuracy. The sampler's state is left as it was."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    repeated = [item for item in items for _ in range(samples)]
    score = verdicts(repeated, sample(model, [i.token_ids for i in repeated], 1.0, max_tokens, eos), tokenizer, eos)
    best = verdicts(items, sample(model, [i.token_ids for i in items], 0.0, max_tokens, eos), tokenizer, eos)
    torch.set_rng_state(state)
    by_family: dict[str, list[float]] = {}
    for item, value in zip(repeated, score, strict=True):
        by_family.setdefault(item.task, []).append(value)
    return {
        "avg": round(sum(score) / len(score), 4),
        "greedy": round(sum(best) / len(best), 4),
        "by_family": {k: round(sum(v) / len(v), 4) for k, v in sorted(by_family.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/default.toml"))
    parser.add_argument("--seconds", type=float, default=240.0, help="sampling and training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, help="prompts per step")
    parser.add_argument("--samples", type=int, help="samples per prompt")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--eval-seconds", type=float, default=30.0, help="evaluate each time this much time was spent")
    parser.add_argument("--eval-prompts", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object per step and evaluation")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    job = tomllib.loads(args.recipe.read_text())
    grpo, trainer = job.get("grpo", {}), job["trainer"]
    num_prompts = args.prompts or grpo.get("prompts_per_step", 16)
    num_samples = args.samples or grpo.get("samples_per_prompt", 8)
    lr, max_tokens = args.lr or trainer["lr"], job["sampling"]["max_tokens"]
    warmup, max_norm = trainer.get("warmup_steps", 0), trainer.get("grad_clip", 1.0)
    last = trainer.get("total_steps", 0)  # of the linear schedule
    policy = args.policy or args.recipe.parent / "start_policy"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    eos = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=tuple(trainer.get("betas", (0.9, 0.999))), weight_decay=0.0, fused=True
    )
    data = msgspec.convert({**job["data"], "seed": args.seed}, DataConfig)
    encoder = PromptEncoder(policy, data)
    held = held_out(data, args.eval_prompts or job["evaluation"]["prompts"], job["evaluation"].get("seed", 0), encoder)
    source = PromptSource(data, encoder, held)

    def say(kind: str, **values: Any) -> None:
        print(json.dumps({"kind": kind, **values}) if args.json else f"{kind:5} {values}", flush=True)

    spent, step, next_eval = 0.0, 0, 0.0
    shares = {"sample": 0.0, "score": 0.0, "train": 0.0}
    while True:
        if spent >= next_eval or spent >= args.seconds or step == last > 0:
            say("eval", step=step, seconds=round(spent, 1), **evaluate(model, tokenizer, held, 8, max_tokens, eos))
            next_eval += args.eval_seconds
        if spent >= args.seconds or step == last > 0:
            break
        t0 = time.perf_counter()
        items = [prompt for prompt in (source.take() for _ in range(num_prompts)) for _ in range(num_samples)]
        rows = sample(model, [i.token_ids for i in items], 1.0, max_tokens, eos)
        t1 = time.perf_counter()
        rewards = torch.tensor(verdicts(items, rows, tokenizer, eos)).view(num_prompts, num_samples)
        t2 = time.perf_counter()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, warmup), (last - step) / (last - warmup) if last else 1.0)
        metrics = update(model, optimizer, items, rows, advantages.flatten(), max_norm)
        t3 = time.perf_counter()
        step, spent = step + 1, spent + t3 - t0
        for name, seconds in zip(shares, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            shares[name] += seconds
        tokens = sum(map(len, rows))
        say(
            "step",
            step=step,
            reward=round(float(rewards.mean()), 3),
            tokens=tokens,
            mean_length=round(tokens / len(rows), 1),
            seconds=round(t3 - t0, 3),
            **{k: round(v, 4) for k, v in metrics.items()},
        )
    say("end", steps=step, seconds=round(spent, 1), shares={k: round(v / spent, 3) for k, v in shares.items()})


if __name__ == "__main__":
    main()
