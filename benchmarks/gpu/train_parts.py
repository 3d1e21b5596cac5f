"""Parts of a training step on one GPU, each against another form of it: attention, norms, the head's softmax, the
optimizer's moments in CPU memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.train_common import DEVICE, GPU, milliseconds, say


def compare(name: str, ours: Any, theirs: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """Two forms of one operation, forward and backward: relative differences of results and gradients, and times."""
    slope = torch.randn_like(theirs(*inputs))

    def run(form: Any) -> list[torch.Tensor]:
        out = form(*inputs)
        return [out, *torch.autograd.grad(out, inputs, slope)]

    gaps = [
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(run(ours), run(theirs), strict=True)
    ]
    spent = [milliseconds(lambda form=form: run(form), 10) for form in (ours, theirs)]  # type: ignore[misc]
    say(case=name, ours_ms=spent[0], peer_ms=spent[1], relative_gaps=gaps)


def random_inputs(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)


def case_kernels() -> None:
    """Triton and flash against the torch forms."""
    from roles import kernels, kernels_flash, kernels_torch, kernels_triton, kernels_triton_layer

    say(case="doctor", rows=kernels.report())
    torch.manual_seed(0)
    for width in (128, 4096):
        compare(
            f"rms_norm 8192 x {width}, forward and backward",
            lambda x, w: kernels_triton_layer.rms_norm(x, w, 1e-6),
            lambda x, w: kernels_torch.rms_norm(x, w, 1e-6),
            random_inputs((8192, width), (width,)),
        )
    x, kind = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16), torch.float8_e4m3fn
    ours, theirs = kernels_triton.quantize_rows(x, kind), kernels_torch.quantize_rows(x, kind)
    say(
        case="quantize_rows 8192 x 4096 to float8_e4m3fn",
        ours_ms=milliseconds(lambda: kernels_triton.quantize_rows(x, kind)),
        peer_ms=milliseconds(lambda: kernels_torch.quantize_rows(x, kind)),
        equal_values=float((ours[0].view(torch.uint8) == theirs[0].view(torch.uint8)).float().mean()),
        equal_scales=bool(torch.allclose(ours[1], theirs[1], rtol=1e-6)),
    )
    packed = kernels.Packed([4096, 2048, 1024, 700, 324], torch.device("cuda"))
    for width, value_width in ((128, 128), (192, 128)):
        for window in (None, 512):
            name = f"attention, 8192 packed positions, widths {width} and {value_width}, window {window}"
            try:
                compare(
                    name,
                    functools.partial(kernels_flash.attention, packed=packed, window=window),
                    functools.partial(kernels_torch.attention, packed=packed, window=window),
                    random_inputs((8192, 32, width), (8192, 8, width), (8192, 8, value_width)),
                )
            except RuntimeError as error:
                say(case=name, error=str(error)[:300])


def case_logprobs() -> None:
    """Peak memory and time of logprob and entropy of 4096 and 8192 positions over 151,936 tokens, by torch's and
    Triton's forms of the softmax, against full logits."""
    from roles import kernels
    from roles.logprob import chosen_logprobs

    for positions in (4096, 8192) if GPU else (64,):
        tokens, width = (151936, 4096) if GPU else (999, 64)
        hidden, weight = random_inputs((positions, width), (tokens, width))
        with torch.no_grad():
            weight /= width**0.5
        targets = torch.randint(0, tokens, (positions,), device=DEVICE)

        def ours(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> torch.Tensor:
            return chosen_logprobs(hidden, weight, targets)[0]

        def full(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> torch.Tensor:
            return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)

        facts: dict[str, Any] = {"case": f"logprobs of {positions} positions, {tokens} tokens, forward and backward"}
        results: dict[str, list[torch.Tensor]] = {}
        for name, form in (("peer", full), ("torch", ours), ("triton", ours)):
            try:
                if name != "peer":
                    kernels.use({"softmax_fold": name, "softmax_slope": name})
                run = functools.partial(_forward_and_backward, form, (hidden, weight))
                run()
                if GPU:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    results[name] = run()
                    facts[f"{name}_GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
                facts[f"{name}_ms"] = milliseconds(run, 5)
            except RuntimeError as error:
                facts[f"{name}_error"] = str(error)[:300]
        for name in ("torch", "triton"):
            if name in results:
                pairs = zip(results[name], results["peer"], strict=True)
                facts[f"{name}_relative_gaps"] = [
                    float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs
                ]
        best = "triton" if "triton_ms" in facts else "torch"
        if f"{best}_GiB" in facts:
            facts |= {"ours_GiB": facts[f"{best}_GiB"], "ours_ms": facts[f"{best}_ms"]}
        say(**facts)


def _forward_and_backward(form: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = form()
    return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]


def case_checks() -> None:
    """Right values before fast ones: offloaded moments against resident ones, cuDNN's attention against torch's."""
    from roles import kernels, kernels_cudnn, kernels_torch
    from roles.adamw import AdamW
    from roles.moments import Travelling
    from roles.trainer_config import TrainerConfig

    torch.manual_seed(0)
    shapes = [(3000, 4096), (4096,), (1 << 23,), (512, 512)]
    config = TrainerConfig(lr=1e-2, weight_decay=0.1)
    start = {str(i): torch.randn(shape, device=DEVICE) for i, shape in enumerate(shapes)}
    both = [AdamW({name: p.clone() for name, p in start.items()}, config, offload=offload) for offload in (False, True)]
    both[1]._travelling = Travelling(both[1].params, bucket=1 << 20)
    for step in range(6):
        grads = {name: torch.randn_like(p) for name, p in start.items()}
        both[1].prefetch(step * (8 << 20))
        work = torch.randn(4096, 4096, device=DEVICE) @ torch.randn(
            4096, 4096, device=DEVICE
        )  # something to run ahead of
        for one in both:
            one.step(grads, 1e-2)
        del work
    equal = [torch.equal(both[0].params[name], both[1].params[name]) for name in start]
    moments = [
        torch.equal(both[0].moments(name)[part], both[1].moments(name)[part])
        for name in start
        for part in both[0].moments(name)
    ]
    say(case="offloaded moments", equal_weights=all(equal), equal_moments=all(moments))
    packed = kernels.Packed([2600, 2600, 2049, 700, 243], torch.device(DEVICE))
    inputs = random_inputs((packed.total, 32, 128), (packed.total, 8, 128), (packed.total, 8, 128))
    form = kernels_cudnn.attention if GPU else kernels_torch.attention
    compare(
        "attention of 2600, 2600, 2049, 700, 243: cuDNN and flash, against torch",
        functools.partial(form, packed=packed),
        functools.partial(kernels_torch.attention, packed=packed),
        inputs,
    )


def case_attention() -> None:
    """Forward and backward over rows of 8192 positions by what torch has: flash over packed rows, and padded forms."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from roles import kernels, kernels_flash, kernels_torch

    size = 8192 if GPU else 64
    for lengths in ([size], [size // 2] * 2, [size // 2, size // 4, size // 8, size // 16, size // 16]):
        packed = kernels.Packed(lengths, torch.device(DEVICE))
        inputs = random_inputs((size, 32, 128), (size, 8, 128), (size, 8, 128))
        flops = 3.5 * 2 * 2 * 32 * 128 * sum(length**2 for length in lengths) / 2
        for name, form, only in (
            ("flash, packed", kernels_flash.attention, None),
            ("padded, flash", kernels_torch.attention, SDPBackend.FLASH_ATTENTION),
            ("padded, cuDNN", kernels_torch.attention, SDPBackend.CUDNN_ATTENTION),
        ):
            slope = torch.randn_like(inputs[0])

            def run(form: Any = form, packed: Any = packed, inputs: Any = inputs, slope: Any = slope) -> None:
                torch.autograd.grad(form(*inputs, packed), inputs, slope)

            try:
                with sdpa_kernel(only) if only is not None else contextlib.nullcontext():
                    spent = milliseconds(run, 10)
                say(case=f"attention of {lengths}, {name}", ms=spent, tflops=flops / spent / 1e9)
            except (RuntimeError, ImportError) as error:
                say(case=f"attention of {lengths}, {name}", error=str(error)[:200])
