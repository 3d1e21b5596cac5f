"""Our rollout engine against transformers' `generate`, on one core and small policies.

Both get the same model, the same prompts and samples, and the same sampling. First the work of the default job: its
policy, questions of its families, 8 prompts with 8 samples each, as long as the policy makes them. Then a random policy
of 2 M parameters with 16 prompts of 8 samples, whose lengths are set. Rounds alternate; the best of each side counts.
Time is processor time of one thread, so that a shared machine disturbs less; on an idle core it is the wall time. Only
tokens up to and including the stop token count.

With equal lengths `generate` computes nothing in vain, and what the products of a step take bounds any engine in
float32. So the row of equal lengths is followed by the rate of its arithmetic, two operations for each weight and
token, beside that of torch's own product of the largest matrices of a step, which does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.table import Row

TITLE = "Rollout: torch engine against transformers' generate (one core)"

POLICY = Path(__file__).parents[1] / "recipes" / "start_policy"
"""What the default job starts from."""

QUESTIONS = [
    f"State the final answer to the following arithmetic problem: {a} - {b} + {c} ="
    for a, b, c in ((38, 19, 11), (54, 76, 76), (46, 87, 62), (92, 34, 20))
] + [
    f"Solve the following multiplication: {a} * {b}. Give only the result as your final answer."
    for a, b in ((71, 58), (23, 44), (67, 19), (35, 82))
]

PROMPTS, SAMPLES, VOCAB, ROUNDS = 16, 8, 512, 3
STOPS = tuple(range(VOCAB - 17, VOCAB))
"""A random policy is close to uniform: with 17 of 512 tokens stopping, completions have about 30 tokens on average."""


def run() -> list[Row]:
    """Workloads at different batch sizes, with equal or sampled lengths."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows()
    finally:
        torch.set_num_threads(threads)


def _rows() -> list[Row]:
    import torch

    from roles.engine_torch import TorchEngine

    rows = [_default_job()]
    model = _policy()
    prompts = torch.randint(0, STOPS[0], (PROMPTS, 20), generator=torch.Generator().manual_seed(0)).tolist()
    engine = TorchEngine(model, max_running=PROMPTS * SAMPLES)
    for name, batch, samples, limit, stops, goal in (
        ("128 completions, lengths as sampled (mean about 30)", prompts, SAMPLES, 128, STOPS, ">= 5x"),
        ("128 completions of 30 tokens each", prompts, SAMPLES, 30, (), ">= 5x"),
        ("8 completions of one prompt, 30 tokens each", prompts[:1], SAMPLES, 30, (), ">= 2x"),
    ):
        ours, peer, seconds = _compare(
            partial(_ours, engine, batch, samples, limit, stops), partial(_peer, model, batch, samples, limit, stops)
        )
        rows.append(Row(name=name, ours=ours, peer=peer, unit="tokens/s", goal=goal, note="peer: generate"))
        if not stops and len(batch) > 1:
            rows.append(Row(name=f"{name}: time", ours=seconds, unit="s", goal="<= 0.7", note="processor time"))
            rate = ours * _operations(model) / 1e9
            note = "the whole engine beside torch.mm alone"
            rows.append(Row(name=f"{name}: arithmetic", ours=rate, peer=_product_rate(), unit="GFLOP/s", note=note))
    return rows


def _default_job() -> Row:
    """64 completions as the default job asks for them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from roles.dialogue import Dialogue
    from roles.engine_torch import TorchEngine

    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    dialogue = Dialogue(AutoTokenizer.from_pretrained(POLICY))
    prompts = [list(dialogue.prompt([{"role": "user", "content": question}])) for question in QUESTIONS]
    work = (prompts, SAMPLES, 48, dialogue.end_ids)
    engine = TorchEngine(model, max_running=len(prompts) * SAMPLES)
    ours, peer, _ = _compare(partial(_ours, engine, *work), partial(_peer, model, *work))
    name = f"{len(prompts) * SAMPLES} completions of the default job, as long as its policy makes them"
    return Row(name=name, ours=ours, peer=peer, unit="tokens/s", goal=">= 5x", note="peer: generate")


def _compare(ours: Callable[[int], int], peer: Callable[[int], int]) -> tuple[float, float, float]:
    """Best tokens/s of each, and the seconds of our best round. A first round of each is not counted."""
    best = [0.0, 0.0]
    seconds = 0.0
    for number in range(ROUNDS + 1):
        for side, generate in enumerate((ours, peer)):
            began = time.process_time()
            tokens = generate(number)
            elapsed = time.process_time() - began
            if number and tokens / elapsed > best[side]:
                best[side] = tokens / elapsed
                seconds = elapsed if side == 0 else seconds
    return best[0], best[1], seconds


def _ours(engine: Any, prompts: list[list[int]], n: int, limit: int, stops: tuple[int, ...], seed: int) -> int:
    from roles.engine import Request
    from roles.seeds import completion_seed
    from roles.types import Sampling

    sampling = Sampling(max_tokens=limit, stop_token_ids=stops)
    for i, prompt in enumerate(prompts):
        seeds = tuple(completion_seed(seed, i, sample) for sample in range(n))
        engine.submit(Request(id=i, prompt_ids=tuple(prompt), seeds=seeds, sampling=sampling))
    tokens = 0
    while engine.num_running or engine.num_waiting:
        tokens += sum(len(finished.completion.token_ids) for finished in engine.step())
    return tokens


def _peer(model: Any, prompts: list[list[int]], n: int, limit: int, stops: tuple[int, ...], seed: int) -> int:
    import torch

    torch.manual_seed(seed)
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"eos_token_id": list(stops)} if stops else {"eos_token_id": None}
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=n,
            max_new_tokens=limit,
            pad_token_id=0,
            **settings,
        )
    completions = output[:, ids.shape[1] :]
    if not stops:
        return int(completions.numel())
    stopped = torch.isin(completions, torch.tensor(stops)).int()
    # A token counts while no stop token stands before it.
    return int((stopped.cumsum(1) - stopped == 0).sum())


def _operations(model: Any) -> int:
    """Multiplications and additions that a token costs, without attention."""
    count: int = 2 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    return count


def _product_rate() -> float:
    """GFLOP/s of gate and up of 128 rows, the largest product of a layer."""
    import torch

    x, weight = torch.randn(PROMPTS * SAMPLES, 192), torch.randn(2 * 512, 192).t()
    times = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(20):
            torch.mm(x, weight)
        times.append(time.process_time() - began)
    return 20 * 2 * x.shape[0] * weight.numel() / min(times) / 1e9


def _policy() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()
