"""Random models, requests and what they should give: help of the tests of the small engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from roles.engine import Finished, Request
from roles.engine_torch import TorchEngine
from roles.sampling import completion_seed
from roles.types import Completion, Sampling

VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(kind: str = "Qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random model whose norms and biases are random as well, so that leaving one out shows."""
    torch.manual_seed(seed)
    own = {"head_dim": 16, "tie_word_embeddings": True} if kind.startswith("Qwen3") else {}
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **own, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
            if "embed_tokens" in name or "lm_head" in name:
                parameter.mul_(3)  # logits with some spread, so that sampling is not uniform
    return model


def engine_of(model: Any, max_running: int = 16, **settings: Any) -> TorchEngine:
    return TorchEngine(model, max_running=max_running, **settings)


def request(number: int, prompt: Sequence[int], n: int = 1, **sampling: Any) -> Request:
    seeds = tuple(completion_seed(5, number, i) for i in range(n))
    return Request(id=number, prompt_ids=tuple(prompt), seeds=seeds, sampling=Sampling(**sampling))


def prompt_of(number: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(0, VOCAB, length)]


def drain(engine: TorchEngine) -> dict[tuple[int, int], Completion]:
    found: dict[tuple[int, int], Completion] = {}
    while engine.num_running or engine.num_waiting:
        collect(found, engine.step())
    return found


def collect(found: dict[tuple[int, int], Completion], finished: list[Finished]) -> None:
    for one in finished:
        assert (one.request_id, one.sample) not in found
        found[one.request_id, one.sample] = one.completion


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def forced_logprobs(model: Any, prompt: Sequence[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return np.asarray(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
