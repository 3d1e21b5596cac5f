"""What a model folder in Hugging Face format says of itself, without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

from sync.layout import Entry, Layout


def layout_of(path: str, dtype: str) -> Layout:
    """The tensors of a checkpoint, by its own names, in the dtype of the engine. A tied head is none of its own.

    Without weights in the folder: those of the model that transformers builds from its config.
    """
    shapes = _checkpoint_shapes(Path(path)) or _model_shapes(path)
    entries = tuple(Entry.whole(name, shape, dtype) for name, shape in sorted(shapes.items()))
    return Layout(entries)


def _checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return shapes


def _model_shapes(path: str) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sync.layouts import dtensor

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    parts = dtensor.held(model.named_parameters(), split_experts=True).parts
    return {part.entry.name: part.entry.shape for part in parts}


def stop_tokens_of(path: str) -> tuple[int, ...]:
    """End tokens of the model's generation settings, else of its config."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        ends = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()
