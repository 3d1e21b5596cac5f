"""megatron-core on a machine without a GPU, for tests: the smallest replacement of the CUDA calls that it makes.

Import and `pretend()` before megatron. Nothing of this is in the product: there, no GPU is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SITE = Path(sys.prefix) / "megatron"
"""Where the Makefile puts megatron-core and what it imports: beside the environment, so that no other test sees it."""


def installed() -> bool:
    import importlib.util

    return SITE.exists() or importlib.util.find_spec("megatron") is not None


class _Nothing:
    """A stream or event where there is none."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_a, **_k: self


class _CpuForCuda(torch.overrides.TorchFunctionMode):
    """`device="cuda"` and `.cuda()` mean the CPU; type strings say CUDA, since megatron's optimizers compare them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "type" and isinstance(out, str) and out.startswith("torch."):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def pretend() -> None:
    """Replace, for the rest of the process."""
    if SITE.exists() and str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    cpu = torch.device("cpu")
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *_: _Nothing(),
        "Stream": lambda *_, **__: _Nothing(),
        "Event": lambda *_, **__: _Nothing(),
        "stream": lambda _stream: _Nothing(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "set_device": lambda _device: None,
        "device_count": lambda: 1,
        "_lazy_call": lambda *_, **__: None,  # how a random state is set
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    _lists_for_all_to_all()
    _CpuForCuda().__enter__()


def _lists_for_all_to_all() -> None:
    """The dispatcher makes lists of its sizes only when they are on a GPU. In backward no function mode is active."""
    real = dist.all_to_all_single

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *rest: Any, **named: Any
    ) -> Any:
        sizes = [s.tolist() if hasattr(s, "tolist") else s for s in (output_split_sizes, input_split_sizes)]
        return real(output, input, *sizes, *rest, **named)

    dist.all_to_all_single = all_to_all_single


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
