"""Low-rank adapters on the linear layers of a model (LoRA, arXiv:2106.09685), in the names of PEFT.

    y = x W^T + (alpha / r) (x A^T) B^T      W [out, in] frozen, A [r, in] random, B [out, r] zero at first

LO-1: at first the adapted model is the model, bit for bit: B is zero.
LO-2: A is drawn from the seed and the layer's name alone, so that all ranks draw the same.
LO-3: merged weights are float32 sums: W + (alpha / r) B A.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from roles.trainer_config import TrainerConfig

PEFT_PREFIX = "base_model.model."


class Lora:
    """The adapters of a model.

    Args:
        model: its weights are frozen here; the targets get parameters `lora_A` and `lora_B`.

    Raises:
        ValueError: no linear layer has one of the target names.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig) -> None:
        self.config = config
        self.scale = config.lora_alpha / config.lora_rank
        self.layers: list[str] = []
        """Names of the adapted layers."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        linear = {name: module for name, module in linear.items() if not _is_head(model, module)}
        for name, module in linear.items():
            if name.rpartition(".")[2] in config.lora_targets:
                self._adapt(name, module)
        if not self.layers:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"[trainer] lora_targets = {list(config.lora_targets)} names none of the model's linear layers; "
                f"it has {', '.join(known) or 'none'}"
            )

    def _adapt(self, name: str, module: nn.Linear) -> None:
        a, b = drawn(self.config, name, module.out_features, module.in_features)
        module.lora_A = nn.Parameter(a.to(module.weight.dtype))
        module.lora_B = nn.Parameter(b.to(module.weight.dtype))
        module.lora_scale = self.scale  # type: ignore[assignment]
        module.forward = types.MethodType(_adapted, module)  # type: ignore[method-assign]
        self.layers.append(name)

    def peft_name(self, name: str) -> str:
        return peft_name(name)

    def parameters_of(self, name: str) -> tuple[str, str] | None:
        """The adapter's parameters of a weight; None when it has none."""
        layer = name.removesuffix(".weight")
        return (f"{layer}.lora_A", f"{layer}.lora_B") if name.endswith(".weight") and layer in self._known else None

    @property
    def _known(self) -> set[str]:
        return set(self.layers)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Rows of the merged weight from the same rows of W and B, and all of A (LO-3)."""
        return torch.addmm(weight, b, a, alpha=self.scale)

    def export(self, adapters: Mapping[str, Tensor], folder: Path, base: str) -> None:
        export(adapters, folder, base, self.config)


def drawn(config: TrainerConfig, layer: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A and B of a layer at first, float32 on the CPU (LO-1, LO-2)."""
    digest = hashlib.blake2b(f"{config.seed}/{layer}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    bound = 1 / math.sqrt(columns)  # kaiming_uniform(a = sqrt 5), as PEFT draws
    a = torch.rand(config.lora_rank, columns, generator=generator) * 2 * bound - bound
    return a, torch.zeros(rows, config.lora_rank)


def peft_name(name: str) -> str:
    """PEFT's name of one of our parameters: `...q_proj.lora_A` is `base_model.model....q_proj.lora_A.weight`."""
    return f"{PEFT_PREFIX}{name}.weight"


def export(adapters: Mapping[str, Tensor], folder: Path, base: str, config: TrainerConfig) -> None:
    """Write a folder that PEFT loads: adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {peft_name(name): tensor.contiguous() for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))


def _is_head(model: nn.Module, module: nn.Module) -> bool:
    """The trainer multiplies by the head's weight, in blocks: an adapter of its module would not be asked."""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)
    return module is output()


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _adapted(self: Any, x: Tensor) -> Tensor:
    out = F.linear(x, self.weight, self.bias)
    adapted: Tensor = out + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.lora_scale
    return adapted
