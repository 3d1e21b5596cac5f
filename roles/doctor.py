"""What this machine computes with: `python -m runtime.launch --doctor`."""

from __future__ import annotations

import importlib.metadata
import textwrap

import torch

from roles import kernels, native

PACKAGES = ("torch", "transformers", "triton", "amd-aiter", "flash-attn", "megatron-core", "transformer-engine", "vllm")


def examination() -> str:
    """Devices, packages, what the small engine computes with on CPU, and per operation the implementation that bf16
    training gets; each with why it is not another one."""
    lines = ["devices"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(f"  {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("  no GPU that torch sees: training and rollout run on the CPU")
    lines += ["", "packages"]
    for package in PACKAGES:
        try:
            lines.append(f"  {package:20} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"  {package:20} not installed")
    library, why = native.attempt()
    lines += ["", "the torch engine on CPU, in float32"]
    lines += _wrapped(f"{'our C++' if library is not None else 'torch':20} {why}", " " * 23)
    lines += ["", "operations"]
    for operation, name, why in kernels.report():
        lines += _wrapped(f"{operation:16} {name:8} {why}", " " * 27)
    lines += ["", 'ask for another one with [trainer] kernels = { attention = "torch" }', ""]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent=indent, break_long_words=False)
