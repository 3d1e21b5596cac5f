"""Which implementation runs an operation: AITER on ROCm, Triton, cuDNN or flash attention on a GPU, else plain torch.

    from roles import kernels
    out = kernels.attention(q, k, v, packed)          the best one for these tensors
    kernels.use({"attention": "torch"})               this one, for the rest of the process
    python -m runtime.launch --doctor                 prints the table for this machine

KE-1: an implementation says itself why it can't run: device, architecture, type, shape, gradient, missing package. The
      first one without a reason is taken, in the order of `IMPLEMENTATIONS`; plain torch is the last and never refuses.
KE-2: a choice that was asked for and can't run is an error that carries the reason, never a silent other one.
KE-3: what a process imports, it imports when the operation is first used; `import roles.kernels` needs torch alone.
KE-4: ROCm is told by `torch.version.hip` and `gcnArchName`, not by the device type, which says "cuda" there too.
KE-5: all implementations of an operation have the signature of the torch form in `roles.kernels_torch`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roles import kernels_torch
from roles.kernels_torch import Packed

__all__ = [
    "OPERATIONS",
    "Need",
    "Packed",
    "attention",
    "choose",
    "gated",
    "gated_slope",
    "head_rope",
    "head_rope_slope",
    "quantize_rows",
    "report",
    "rms_norm",
    "rms_norm_slope",
    "softmax_fold",
    "softmax_slope",
    "use",
]

OPERATIONS = (
    "attention",
    "rms_norm",
    "rms_norm_slope",
    "head_rope",
    "head_rope_slope",
    "gated",
    "gated_slope",
    "softmax_fold",
    "softmax_slope",
    "rope",
    "route",
    "moe",
    "quantize_rows",
    "gemm_blocks",
)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a call asks of an implementation."""

    device: torch.device
    dtype: torch.dtype
    gradient: bool = False
    head_dims: tuple[int, int] = (0, 0)
    """Of attention: D of queries and keys, D' of values."""
    sink: bool = False
    window: bool = False
    """Of attention, both."""

    @property
    def low(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Implementation:
    operation: str
    name: str
    refuses: Callable[[Need], str | None]
    """Why it can't run here; None when it can (KE-1)."""
    load: Callable[[], Callable[..., Any]]


def use(choices: Mapping[str, str]) -> None:
    """Ask for implementations by name in this process (KE-2).

    Raises:
        ValueError: there is no such operation or implementation.
    """
    for operation, name in choices.items():
        if operation not in OPERATIONS:
            raise ValueError(f"kernels: no operation {operation!r}; there are {', '.join(OPERATIONS)}")
        names = [one.name for one in IMPLEMENTATIONS if one.operation == operation]
        if name not in names:
            raise ValueError(f"kernels: {operation} has no implementation {name!r}; there are {', '.join(names)}")
    _asked.update(choices)
    _loaded.cache_clear()


def choose(operation: str, need: Need) -> tuple[Implementation, list[str]]:
    """The implementation for this need, and why each one before it was passed over.

    Raises:
        RuntimeError: one was asked for by `use` and can't run.
    """
    passed: list[str] = []
    for one in IMPLEMENTATIONS:
        if one.operation != operation or _asked.get(operation, one.name) != one.name:
            continue
        reason = one.refuses(need)
        if reason is None:
            return one, passed
        passed.append(f"{one.name}: {reason}")
    raise RuntimeError(f"kernels: {operation} was asked to be {_asked[operation]!r}, which can't run: {passed[0]}")


def report(device: torch.device | None = None) -> list[tuple[str, str, str]]:
    """Per operation: its name, what bf16 training on this device gets, and why nothing before it was taken."""
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for operation in OPERATIONS:
        gradient = operation in ("attention", "rms_norm", "head_rope", "gated", "rope")
        need = Need(device=place, dtype=torch.bfloat16, gradient=gradient, head_dims=(128, 128))
        one, passed = choose(operation, need)
        rows.append((operation, one.name, "; ".join(passed) or "first choice"))
    return rows


# --- the operations that training calls -------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence of a row; see `kernels_torch.attention`."""
    widths, limited = (q.shape[-1], v.shape[-1]), window is not None and window < packed.longest
    run = _loaded("attention", q.device, q.dtype, _gradient(q, k, v), widths, sink is not None, limited)
    out: Tensor = run(q, k, v, packed, scale=scale, window=window, sink=sink)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension; see `kernels_torch.rms_norm`."""
    out: Tensor = _loaded("rms_norm", x.device, x.dtype, _gradient(x, weight))(x, weight, eps)
    return out


def rms_norm_slope(
    x: Tensor, weight: Tensor, eps: float, slope: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`; see `kernels_torch.rms_norm_slope`."""
    out: tuple[Tensor, Tensor] = _loaded("rms_norm_slope", x.device, x.dtype)(x, weight, eps, slope, beside)
    return out


def head_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed and rotated; see `kernels_torch.head_rope`."""
    run = _loaded("head_rope", q.device, q.dtype, _gradient(q, k))
    out: tuple[Tensor, Tensor] = run(q, k, q_weight, k_weight, eps, cos, sin)
    return out


def head_rope_slope(
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_slope: Tensor,
    k_slope: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `head_rope`; see `kernels_torch.head_rope_slope`."""
    run = _loaded("head_rope_slope", q_slope.device, q_slope.dtype)
    out: tuple[Tensor, Tensor, Tensor | None, Tensor | None] = run(
        q, k, q_weight, k_weight, eps, cos, sin, q_slope, k_slope
    )
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU; see `kernels_torch.gated`."""
    out: Tensor = _loaded("gated", gate.device, gate.dtype, _gradient(gate, up))(gate, up)
    return out


def gated_slope(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated`; see `kernels_torch.gated_slope`."""
    out: tuple[Tensor, Tensor, Tensor] = _loaded("gated_slope", gate.device, gate.dtype)(gate, up, slope)
    return out


def softmax_fold(state: Tensor, logits: Tensor, temperature: float) -> None:
    """One more block of logits into a running softmax; see `kernels_torch.softmax_fold`."""
    _loaded("softmax_fold", logits.device, logits.dtype)(state, logits, temperature)


def softmax_slope(
    logits: Tensor,
    temperature: float,
    logsum: Tensor,
    target: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Gradient by the logits; see `kernels_torch.softmax_slope`."""
    run = _loaded("softmax_slope", logits.device, logits.dtype)
    out: Tensor = run(logits, temperature, logsum, target, of_logprob, of_entropy, entropy)
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    """FP8 with a scale per group of a row; see `kernels_torch.quantize_rows`."""
    out: tuple[Tensor, Tensor] = _loaded("quantize_rows", x.device, x.dtype)(x, dtype, group)
    return out


def _gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@functools.cache
def _loaded(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    gradient: bool = False,
    head_dims: tuple[int, int] = (0, 0),
    sink: bool = False,
    window: bool = False,
) -> Callable[..., Any]:
    need = Need(device=device, dtype=dtype, gradient=gradient, head_dims=head_dims, sink=sink, window=window)
    return choose(operation, need)[0].load()


_asked: dict[str, str] = {}

# --- who can run where ------------------------------------------------------------------------------------------------


@functools.cache
def _installed(package: str, part: str = "") -> bool:
    """Whether it is here, with this part in it: another package may have the name. Nothing is imported."""
    spec = importlib.util.find_spec(package)
    places = () if spec is None else spec.submodule_search_locations or ()
    return spec is not None and (not part or any((Path(place) / part).exists() for place in places))


@functools.cache
def _architecture(device: torch.device) -> str:
    """`gfx942` on ROCm; `sm_90` on CUDA."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _aiter(need: Need, *, backward: bool) -> str | None:
    if not torch.version.hip:
        return "this torch is not built for ROCm"
    if not _installed("aiter", "ops"):
        return "package aiter (amd-aiter) is not installed"
    if need.device.type != "cuda" or not (architecture := _architecture(need.device)).startswith(("gfx94", "gfx95")):
        return f"it needs a CDNA3 GPU or newer, not {'the CPU' if need.device.type != 'cuda' else architecture}"
    if need.gradient and not backward:
        return "it has no backward pass"
    return None if need.low else f"it computes in bf16 and fp16, not in {need.dtype}"


def _triton(need: Need) -> str | None:
    if need.device.type != "cuda":
        return f"Triton has no back end for {need.device.type}"
    return None if _installed("triton") else "package triton is not installed"


def _flash(need: Need) -> str | None:
    if need.device.type != "cuda":
        return f"torch's flash attention does not run on {need.device.type}"
    if not _installed("torch.nn.attention.varlen"):
        return "this torch has no torch.nn.attention.varlen; 2.10 is the first"
    if not need.low:
        return f"it computes in bf16 and fp16, not in {need.dtype}"
    if need.sink:
        return "it has no attention sink"
    return None if max(need.head_dims) <= 256 else f"its heads are at most 256 wide, not {max(need.head_dims)}"


def _cudnn(need: Need) -> str | None:
    """cuDNN where it is the faster one: Hopper, H100 and H200."""
    if need.device.type != "cuda":
        return f"cuDNN does not run on {need.device.type}"
    if (reason := _flash(need)) is not None:
        return reason  # short sequences go there
    if torch.version.hip or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if not (architecture := _architecture(need.device)).startswith("sm_9"):
        return f"it was measured on sm_90 alone, not on {architecture}"
    if need.window:
        return "it has no window"
    width, value_width = need.head_dims
    return None if width == value_width <= 128 else f"its heads have one width of at most 128, not {need.head_dims}"


def _never(_need: Need) -> None:
    return None


def _from(module: str, function: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"roles.{module}"), function)
        return found

    return load


def _aiter_kernel(operation: str, *, backward: bool = False) -> Implementation:
    refuses = functools.partial(_aiter, backward=backward)
    return Implementation(operation, "aiter", refuses, _from("kernels_aiter", operation))


def _layer_kernel(operation: str) -> Implementation:
    return Implementation(operation, "triton", _triton, _from("kernels_triton_layer", operation))


def _torch_kernel(operation: str) -> Implementation:
    return Implementation(operation, "torch", _never, _from("kernels_torch", operation))


IMPLEMENTATIONS = (
    _aiter_kernel("attention", backward=True),
    Implementation("attention", "cudnn", _cudnn, _from("kernels_cudnn", "attention")),
    Implementation("attention", "flash", _flash, _from("kernels_flash", "attention")),
    _torch_kernel("attention"),
    _layer_kernel("rms_norm"),
    _torch_kernel("rms_norm"),
    _layer_kernel("rms_norm_slope"),
    _torch_kernel("rms_norm_slope"),
    _layer_kernel("head_rope"),
    _torch_kernel("head_rope"),
    _layer_kernel("head_rope_slope"),
    _torch_kernel("head_rope_slope"),
    _layer_kernel("gated"),
    _torch_kernel("gated"),
    _layer_kernel("gated_slope"),
    _torch_kernel("gated_slope"),
    Implementation("softmax_fold", "triton", _triton, _from("kernels_triton", "softmax_fold")),
    _torch_kernel("softmax_fold"),
    Implementation("softmax_slope", "triton", _triton, _from("kernels_triton", "softmax_slope")),
    _torch_kernel("softmax_slope"),
    _aiter_kernel("rope", backward=True),
    _torch_kernel("rope"),
    _aiter_kernel("route"),
    _torch_kernel("route"),
    _aiter_kernel("moe"),
    _torch_kernel("moe"),
    _aiter_kernel("quantize_rows"),
    Implementation("quantize_rows", "triton", _triton, _from("kernels_triton", "quantize_rows")),
    _torch_kernel("quantize_rows"),
    _aiter_kernel("gemm_blocks"),
    _torch_kernel("gemm_blocks"),
)
"""In the order of preference, per operation (KE-1)."""


def signature(operation: str) -> inspect.Signature:
    """What every implementation of an operation takes (KE-5)."""
    return inspect.signature(getattr(kernels_torch, operation))
