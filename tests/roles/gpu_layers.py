"""Whether Triton's forms of what a decoder layer computes equal the torch forms: KL-1 to KL-3, and FU-1 to FU-4.

python -m tests.roles.gpu_layers            on a GPU, at the shapes of real models, with times
TRITON_INTERPRET=1 python -c "from tests.roles.gpu_layers import main; main('cpu')"
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Case = tuple[str, tuple[Any, ...]]


def _random(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Name of an operation, its arguments."""
    small = device == "cpu"
    for rows, width in ((37, 48), (3, 5000)) if small else ((4095, 1024), (8191, 4096), (1001, 5120)):
        x, weight, slope, beside = _random(device, dtype, (rows, width), (width,), (rows, width), (rows, width))
        yield "rms_norm", (x, weight, 1e-6)
        yield "rms_norm_slope", (x, weight, 1e-6, slope)
        yield "rms_norm_slope", (x, weight, 1e-6, slope, beside)
    for tokens, heads, kv_heads, width in ((11, 5, 2, 12),) if small else ((4095, 16, 8, 128), (2047, 9, 3, 64)):
        shapes = ((tokens, heads, width), (tokens, kv_heads, width), (heads, tokens, width), (tokens, kv_heads, width))
        q, k, by_q, by_k = _random(device, dtype, *shapes)
        by_q = by_q.transpose(0, 1)  # as attention hands it back
        angles = torch.randn(tokens, width // 2, device=device).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = _random(device, dtype, (width,), (width,))
        yield "head_rope", (q, k, *weights, 1e-6, cos, sin)
        yield "head_rope", (q, k, None, None, 0.0, cos, sin)
        yield "head_rope_slope", (q, k, *weights, 1e-6, cos, sin, by_q, by_k)
        yield "head_rope_slope", (None, None, None, None, 0.0, cos, sin, by_q, by_k)
    for shape in ((7, 700),) if small else ((4095, 3072), (8191, 12288)):
        gate, up, slope = _random(device, dtype, shape, shape, shape)
        yield "gated", (gate, up)
        yield "gated_slope", (gate, up, slope)


def compare(operation: str, arguments: tuple[Any, ...]) -> None:
    """Values, and gradients where torch has them from the torch form."""
    from roles import kernels_torch, kernels_triton_layer

    tensors = [a for a in arguments if isinstance(a, Tensor)]
    exact = tensors[0].dtype == torch.float32
    found = []
    for form in (kernels_torch, kernels_triton_layer):
        run = getattr(form, operation)
        if operation.endswith("slope"):
            found.append([part for part in run(*arguments) if part is not None])
            continue
        learns = [a.clone().requires_grad_() for a in tensors[: 2 if len(tensors) < 4 else len(tensors) - 2]]
        rest = iter([*learns, *tensors[len(learns) :]])
        out = run(*(next(rest) if isinstance(a, Tensor) else a for a in arguments))
        parts = list(out) if isinstance(out, tuple) else [out]
        slopes = [
            torch.linspace(-1, 1, part.numel(), device=part.device).view_as(part).to(part.dtype) for part in parts
        ]
        found.append([*parts, *torch.autograd.grad(parts, learns, slopes)])
    for one, other in zip(*found, strict=True):
        if exact:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5 * max(1.0, float(one.abs().max())))
        else:  # a rounding or two of bf16, of the largest for sums
            gap = (other.float() - one.float()).norm() / one.float().norm()
            assert gap < 8e-3, f"{operation} {[tuple(t.shape) for t in tensors]}: relative gap {gap:.4f}"


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 20


def times(operation: str, arguments: tuple[Any, ...]) -> str:
    from roles import kernels_torch, kernels_triton_layer

    with torch.no_grad():
        torch_ms, triton_ms = (
            milliseconds(functools.partial(getattr(form, operation), *arguments))
            for form in (kernels_torch, kernels_triton_layer)
        )
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    megabytes = sum(a.numel() * a.element_size() for a in tensors) / 1e6
    shapes = [tuple(a.shape) for a in tensors][:2]
    return f"{operation:16} {shapes} torch {torch_ms:.3f} ms, triton {triton_ms:.3f} ms, {megabytes:.0f} MB in"


def whole_steps(device: str) -> int:
    """A trainer's steps with fused layers beside those of transformers' layers; returns how many differ."""
    from roles import sums, trainer_fsdp
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from tests.roles.trainer_help import clipped, random_samples, save_tiny_model, spec

    if device == "cuda":
        place, ones = torch.device("cuda", 0), torch.bfloat16
        print(f"products are added to a float32 sum in place: {sums._adds_in_place(place, ones)}")
    back_end: Any = trainer_fsdp
    kept, failed = back_end.fuses_layers, 0
    kind = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, store=torch.distributed.HashStore(), rank=0, world_size=1)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "initializer_range": 0.05}
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), **sizes)
        for dtype, near in (("float32", 1e-4), ("bfloat16", 3e-2)):
            norms = []
            for fuses in (False, True):
                back_end.fuses_layers = lambda *_, fuses=fuses: fuses
                settings = TrainerConfig(device=device, strategy="fsdp2", dtype=dtype, lr=1e-3, token_budget=64)  # type: ignore[arg-type]
                trainer = trainer_fsdp.TorchTrainer(settings, path)
                batches = [pack(random_samples(40, seed), world=1, token_budget=64)[0] for seed in range(3)]
                norms.append([trainer.train_step(batch, spec(clipped), 1.0).grad_norm for batch in batches])
            same = all(abs(one - other) <= near * one for one, other in zip(*norms, strict=True))
            failed += not same
            print(f"steps in {dtype}: gradient norms {norms[0]} and fused {norms[1]}: {'equal' if same else 'DIFFER'}")
    torch.distributed.destroy_process_group()
    back_end.fuses_layers = kept
    return failed


def main(device: str = "cuda") -> int:
    failed = 0
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for operation, arguments in cases(device, dtype):
            try:
                compare(operation, arguments)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(operation, dtype, str(error)[:600], flush=True)
            if device == "cuda" and dtype == torch.bfloat16:
                print(times(operation, arguments), flush=True)
    if device == "cuda":
        failed += whole_steps(device)
    print("equal" if not failed else f"{failed} differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
