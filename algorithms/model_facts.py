"""What can be known of a model from its folder, without loading it: sizes for the derived values and memory estimates.

MF-1: reads `config.json` and the headers of the safetensors files alone; neither torch nor transformers is imported.
MF-2: a folder that is damaged or incomplete (a download that broke off, weights or tokenizer left out) is refused here,
      by the name of the file, before a process starts.
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


INDEX = "model.safetensors.index.json"
"""Names the weight files of a model that has several."""

TOKENIZER = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
"""Any file like these makes a tokenizer."""

MAX_HEADER = 100 << 20
"""Bytes that the format allows a header to have."""


def read_model(path: Path) -> ModelFacts:
    """Read the facts of a Hugging Face model folder.

    Raises:
        ValueError: the folder lacks its config, weights or tokenizer, a file is damaged, or the config lacks a size.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"model.path: {path} has no config.json; give the folder of a Hugging Face model")
    config = _read_json(config_file)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"model.path: {path} has no *.safetensors; save the model with safe serialization")
    if (path / INDEX).is_file():
        wanted = set(_read_json(path / INDEX).get("weight_map", {}).values())
        if missing := sorted(wanted - {file.name for file in weights}):
            raise ValueError(f"model.path: {path} lacks {', '.join(missing)}, which {INDEX} names; fetch them")
    if not any(any(path.glob(name)) for name in TOKENIZER):
        raise ValueError(f"model.path: {path} has no tokenizer ({', '.join(TOKENIZER)}); copy the model's own into it")
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"model.path: {file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"model.path: {file} holds a {type(found).__name__}, expected an object; fetch it again")
    return found


def _shapes(file: Path) -> list[list[int]]:
    """Shapes of the tensors of a safetensors file: 8 bytes little-endian length, a JSON header, then the data."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(length)) if length <= min(size, MAX_HEADER) else {}
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            shapes, end = [entry["shape"] for entry in entries], max(entry["data_offsets"][1] for entry in entries)
        except (ValueError, AttributeError, TypeError, LookupError) as error:
            raise ValueError(
                f"model.path: {file} is no safetensors file, or its header is damaged; fetch it again"
            ) from error
    if 8 + length + end != size:
        raise ValueError(f"model.path: {file} has {size} bytes, its header says {8 + length + end}; fetch it again")
    return shapes
