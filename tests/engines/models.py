"""Tiny random checkpoints for real engines, and what transformers says about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from roles.types import Completion
from tests.roles.tiny import END, VOCAB, WORDS

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
EXTRA: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "Qwen3": {"tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
}


def build(kind: str, seed: int = 0) -> Any:
    """A random model in float32 whose norms are random too."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **EXTRA[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_policy(folder: Path, kind: str, seed: int = 0) -> str:
    """Model and tokenizer in one folder."""
    build(kind, seed).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({**{word: i for i, word in enumerate(WORDS)}, "<end>": END}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>").save_pretrained(
        folder
    )
    return str(folder)


def save_mtp_policy(folder: Path, seed: int = 0) -> tuple[str, Any]:
    """A MiMo: a Qwen2 with one more layer that predicts the token after the next, which transformers doesn't know.
    Returns the folder and the Qwen2."""
    save_policy(folder, "Qwen3")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.manual_seed(seed)
    shapes = {**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    config = transformers.Qwen2Config(**shapes)
    model = transformers.Qwen2ForCausalLM(config).eval()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    last = f"model.layers.{config.num_hidden_layers - 1}."
    more = {name.replace(last, "model.mtp_layers.0."): t.clone() for name, t in own.items() if name.startswith(last)}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        more[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(config.hidden_size)
    more["model.mtp_layers.0.input_proj.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.1
    save_file({**own, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    told = {**config.to_dict(), "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(told))
    return str(folder), model


def checkpoint(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Its tensors by the names of a checkpoint: transformers keeps the experts of a layer as one."""
    model.save_pretrained(folder)
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@torch.no_grad()
def forced_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] of one pass."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0].float()


def forced_logprobs(model: Any, prompt: Sequence[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[C] of the tokens after the prompt."""
    logits = forced_logits(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[:, None].astype(np.int64)))[:, 0].numpy()


@torch.no_grad()
def forced_routes(model: Any, ids: Sequence[int]) -> list:
    """[T, L, K] experts of one pass."""
    seen: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [router.register_forward_hook(lambda _module, _args, out: seen.append(out[2])) for router in routers]
    forced_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).tolist()


def check_versions_over_a_swap(
    completion: Completion, first: int, length: int, old: Any, new: Any, prompt: Sequence[int]
) -> None:
    """Versions are `first` and then the next, and the weights changed at the very token that they say."""
    border = int((completion.versions == first).sum())
    assert completion.versions.tolist() == [first] * border + [first + 1] * (length - border)
    assert 0 < border < length
    expected = logprobs_over_a_swap(old, new, prompt, completion.token_ids, border)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
    off_by_one = logprobs_over_a_swap(old, new, prompt, completion.token_ids, border + 1)
    assert np.abs(completion.logprobs - off_by_one).max() > 1e-2


@torch.no_grad()
def logprobs_over_a_swap(old: Any, new: Any, prompt: Sequence[int], tokens: np.ndarray, border: int) -> np.ndarray:
    """[C] logprobs when the weights change after `border` tokens and the cache of the old ones is kept: the exact
    arithmetic of mode `keep`."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    fed = len(prompt) + border - 1  # tokens that the old weights have read
    before = old(input_ids=ids[:, :fed], use_cache=True)
    after = new(input_ids=ids[:, fed:-1], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]]).log_softmax(-1)
    return logits.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
