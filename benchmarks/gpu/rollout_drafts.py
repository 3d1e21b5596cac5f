"""The case `speculative` of `benchmarks.gpu.rollout`: drafts beside none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.rollout import DENSE, REQUESTS, TOKENS, Say, differences, folder_of, prompts, settings
from benchmarks.gpu.rollout_ranks import model_of, pair, tensors_of


def speculative(say: Say) -> None:
    """Completions with a draft must be those without: what differs is rounding, told as a share of equal first tokens.

    Random weights are loaded from a folder, so that a draft can be the policy itself, which is always right, or its
    first layers. Greedy completions of random weights repeat themselves: that is what n-grams are good for.
    """
    policy = saved(folder_of(DENSE) + "-saved", DENSE)
    short = saved(folder_of(DENSE) + "-short", DENSE | {"num_hidden_layers": max(1, DENSE["num_hidden_layers"] // 7)})
    plain: dict[float, list[Any]] = {}
    for name, draft in (("none", ""), ("ngram", "ngram"), ("itself", policy), ("short", short)):
        try:
            asyncio.run(_speculative(say, name, draft, policy, plain))
        except Exception as error:  # the other drafts are measured all the same
            say(case="speculative", draft=name, error=repr(error))


async def _speculative(say: Say, name: str, draft: str, policy: str, plain: dict[float, list[Any]]) -> None:
    facts: dict[str, Any] = {"case": "speculative", "draft": name}
    config = settings(DENSE, vllm={"draft": draft, "draft_tokens": 3, "arguments": {}})
    async with pair(policy, config, prompts(), (1, 2)) as both:
        say(**facts, recorded=True, **await both.publish(1))
        await both.replica.seed.call_one(1000)
        await both.all(16, REQUESTS)  # warm
        for temperature in (1.0, 0.0):
            for requests in (min(8, REQUESTS), REQUESTS):
                before = await both.replica.drafts.call_one()
                seconds, found = await both.all(TOKENS, requests, temperature=temperature)
                drafted, kept = (b - a for a, b in zip(before, await both.replica.drafts.call_one(), strict=True))
                rate = sum(len(c.token_ids) for c in found) / seconds
                say(**facts, temperature=temperature, requests=requests, tokens_per_s=rate, drafted=drafted, kept=kept)
            say(**facts, temperature=temperature, same=same_share(found, plain.setdefault(temperature, found)))
        model = model_of(policy, 1)
        _, found = await both.all(min(64, TOKENS), min(24, REQUESTS))
        gap = differences(model, found, 1)
        say(**facts, tokens=len(gap), mean=float(gap.mean()), most=float(gap.max()))
        running = asyncio.ensure_future(both.all(TOKENS, REQUESTS))
        await asyncio.sleep(0.5)
        say(**facts, busy=True, **await both.publish(2))
        _, found = await running
        gap = differences(model, found[:24], 1)  # labels: those of version 1 are its own, exactly up to the border
        say(**facts, label=1, tokens=len(gap), mean=float(gap.mean()) if len(gap) else None)


def same_share(found: list[Any], plain: list[Any]) -> float:
    """Of the tokens, those before the first that differs."""
    same = sum(int((a.token_ids == b.token_ids).cumprod().sum()) for a, b in zip(found, plain, strict=True))
    return same / sum(len(c.token_ids) for c in found)


def saved(folder: str, config: dict[str, Any]) -> str:
    """A folder with the weights of seed 1; with fewer layers, those of a longer model that come first."""
    made = Path(folder)
    if not (made / "model.safetensors").exists():
        from safetensors.torch import save_file

        whole = model_of(folder_of(DENSE), 1)
        names = {f"layers.{i}." for i in range(config["num_hidden_layers"])}
        tensors = {
            name: tensor.contiguous().cpu()
            for name, tensor in tensors_of(whole).items()
            if ".layers." not in name or any(part in name for part in names)
        }
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(config))
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return str(made)
