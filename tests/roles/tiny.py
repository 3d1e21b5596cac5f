"""Small models and tokenizers for the tests of rollout and evaluator: real ones, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roles.types import Prompt

WORDS = [f"w{i}" for i in range(60)]
END = 60
VOCAB = 61
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
"""A chat template, for what needs one."""


def tiny_model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 of two layers over `WORDS` and an end token."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_tiny_policy(folder: Path, seed: int = 0) -> str:
    """Model and tokenizer in one folder; returns its path."""
    model = tiny_model(seed)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({**{word: i for i, word in enumerate(WORDS)}, "<end>": END}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    return str(folder)


def prompt_at(position: int, task: str = "words", length: int = 4) -> Prompt:
    """A prompt of words that depend on its position."""
    ids = tuple((7 * position + 3 * i) % 60 for i in range(length))
    return Prompt(
        position=position, text=" ".join(WORDS[i] for i in ids), token_ids=ids, task=task, entry={"answer": "w1"}
    )
