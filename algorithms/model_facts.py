"""What can be known of a model from its folder, without loading it: sizes for the derived values and memory estimates.

MF-1: reads `config.json` and the headers of the safetensors files alone; neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ModelFacts", "read_model"]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    parameters: int
    """Elements of all stored tensors; a tied head counts once."""
    stored_bytes: int
    layers: int
    hidden_size: int
    kv_bytes_per_token: int
    """Keys and values of one token over all layers, in float32."""
    max_positions: int
    vocabulary: int


def read_model(path: Path) -> ModelFacts:
    """Read the facts of a Hugging Face model folder.

    Raises:
        ValueError: the folder, its config or its weights are missing, or the config lacks a size.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"model.path: {path} has no config.json; give the folder of a Hugging Face model")
    config: dict[str, Any] = json.loads(config_file.read_text())
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"model.path: {path} has no *.safetensors; save the model with safe serialization")
    shapes = [shape for file in weights for shape in _shapes(file)]
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return ModelFacts(
            architecture=(config.get("architectures") or [config["model_type"]])[0],
            parameters=sum(math.prod(shape) for shape in shapes),
            stored_bytes=sum(file.stat().st_size for file in weights),
            layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            kv_bytes_per_token=2 * config["num_hidden_layers"] * heads * head_dim * 4,
            max_positions=config["max_position_embeddings"],
            vocabulary=config["vocab_size"],
        )
    except KeyError as error:
        raise ValueError(
            f"model.path: {config_file} has no {error.args[0]!r}; it is no causal language model"
        ) from error


def _shapes(file: Path) -> list[list[int]]:
    """Shapes of the tensors of a safetensors file: 8 bytes little-endian length, then a JSON header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
