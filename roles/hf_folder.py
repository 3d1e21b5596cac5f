"""Hugging Face folders read and written by boxes: each rank reads only what it holds, and one rank writes the whole.

HF-1: a tensor is read by slices of the safetensors files; a rank never holds more than its own part and one slice.
HF-2: what is exported after loading, in the same type, is what was read, bit for bit.
HF-3: ranks send their boxes to rank 0 in one order, by name; it writes files of at most `FILE_BYTES` and an index.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roles.whole_weights import WholeWeights
from sync.layout import ITEM_BYTES, Box
from sync.layouts.held import Held

FILE_BYTES = 4 * 2**30

Memory = Sequence[Mapping[str, Tensor]]
"""Local parameters and buffers by name, of each model chunk."""


def read_into(folder: str, held: Held, memory: Memory, *, new: str = "") -> None:
    """Fill the memory of a rank from a folder (HF-1).

    Args:
        new: names with this prefix keep what they are when the folder has none of them: a head to be trained.

    Raises:
        OSError: a file is missing.
        ValueError: a tensor is missing or has another shape; its name is told.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise OSError(f"model {folder}: no *.safetensors in it; give a Hugging Face folder with safetensors weights")
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    where = {name: file for file in opened for name in file.keys()}
    boxes = _boxes(held)
    with torch.no_grad():
        for name, entries in boxes.items():
            if name not in where:
                if new and name.startswith(new):
                    continue
                raise ValueError(f"model {folder}: no tensor {name} in its files; config.json is of another model")
            source = where[name].get_slice(name)
            if tuple(source.get_shape()) != entries[0][1]:
                raise ValueError(
                    f"model {folder}: {name} has shape {source.get_shape()}, config.json says {list(entries[0][1])}"
                )
            for (box, shape), view in zip(entries, held.views(name, memory), strict=True):
                view.copy_(source[box.slices_in(Box.whole(shape))] if shape else where[name].get_tensor(name))


def export(folder: str, held: Held, memory: Memory, *, dtype: str, start_path: str, critic: bool = False) -> None:
    """Gather all tensors on rank 0 and write them as a folder, with config and tokenizer of the start model (HF-3)."""
    rank = dist.get_rank()
    weights = WholeWeights(held.layout, lambda name: held.views(name, memory))
    target = Path(folder)
    files = _plan(weights.shapes, dtype)
    index: dict[str, str] = {}
    for number, group in enumerate(files):
        file = "model.safetensors" if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        state: dict[str, Tensor] = {}
        for name in group:
            whole = weights.whole(name)
            if whole is not None:
                state[name] = whole.to("cpu", _written(name, dtype))
        index |= dict.fromkeys(group, file)
        if rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            save_file(state, target / file, {"format": "pt"})
    if rank == 0:
        if len(files) > 1:
            size = sum(math.prod(shape) * _written(name, dtype).itemsize for name, shape in weights.shapes.items())
            record = {"metadata": {"total_size": size}, "weight_map": index}
            (target / "model.safetensors.index.json").write_text(json.dumps(record, indent=1))
        copy_rest(start_path, target, dtype, critic=critic)


def copy_rest(start_path: str, target: Path, dtype: str, *, critic: bool = False) -> None:
    """Everything of the start model but its weights; config.json with the type of those that were written, and the
    class that reads a critic's."""
    config: dict[str, Any] = json.loads((Path(start_path) / "config.json").read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    if critic:
        names = config.get("architectures") or []
        config["architectures"] = [name.replace("ForCausalLM", "ForTokenClassification") for name in names]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for file in Path(start_path).iterdir():
        if file.is_file() and file.name not in ("config.json", "README.md") and not holds_weights(file):
            shutil.copy2(file, target / file.name)


def holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")


def _boxes(held: Held) -> dict[str, list[tuple[Box, tuple[int, ...]]]]:
    found: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for part in held.parts:
        found.setdefault(part.entry.name, []).append((part.entry.box, part.entry.shape))
    return found


def _written(name: str, dtype: str) -> torch.dtype:
    """The router bias stays float32: its differences are below what bfloat16 tells apart."""
    kind: torch.dtype = torch.float32 if name.endswith("e_score_correction_bias") else getattr(torch, dtype)
    return kind


def _plan(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[list[str]]:
    """Names of each file, in their order."""
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(shapes):
        num_bytes = math.prod(shapes[name]) * ITEM_BYTES[dtype]
        if files[-1] and size + num_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes
    return files
