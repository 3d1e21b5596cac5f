"""Where the seconds of a training step go: by phase, from events on the device, and by kind of kernel, from a trace.

Phases overlap with copies, which run beside them; kernels are summed per kind, so copies that are hidden count too.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import torch

KINDS = (
    ("copies from CPU", r"memcpy htod"),
    ("copies to CPU", r"memcpy dtoh"),
    ("attention", r"flash|fmha|attn|attention"),
    ("matrix products", r"gemm|nvjet|xmma|cutlass|cublas|splitk"),
    ("softmax of the head", r"^_fold|^_slope"),
    ("update", r"adam|multi_tensor|lpnorm"),
    ("collectives", r"nccl"),
    ("compiled", r"^triton"),
    ("copies on the device", r"memcpy|memset|copy|cat"),
)


class Phases:
    """Events around functions of a trainer, on the current stream."""

    def __init__(self) -> None:
        self._spans: dict[str, list[list[Any]]] = collections.defaultdict(list)
        self.on = False

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        real: Callable[..., Any] = getattr(owner, attribute)

        def watched(*args: Any, **named: Any) -> Any:
            if not self.on or not torch.cuda.is_available():
                return real(*args, **named)
            span: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            span[0].record()
            out = real(*args, **named)
            span[1].record()
            self._spans[name].append(span)
            return out

        setattr(owner, attribute, staticmethod(watched) if isinstance(owner, type) else watched)

    def seconds(self) -> dict[str, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {name: sum(a.elapsed_time(b) for a, b in spans) / 1000 for name, spans in self._spans.items()}


def by_kind(step: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of one step per kind of kernel, and the longest kernels that belong to none."""
    cuda = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        if cuda:
            torch.cuda.synchronize()
    kinds, others = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    for event in profile.events() or ():
        spent = event.device_time_total if cuda else event.self_cpu_time_total
        if not spent or (cuda and event.device_type != torch.autograd.DeviceType.CUDA):
            continue
        kind = next((kind for kind, words in KINDS if re.search(words, event.name, re.IGNORECASE)), "other")
        kinds[kind] += spent / 1e6
        if kind in ("other", "compiled", "copies on the device"):
            others[event.name[:80]] += spent / 1e6
    longest = sorted(others.items(), key=lambda item: -item[1])[:10]
    return {"kinds_s": {k: round(v, 4) for k, v in kinds.items()}, "longest_s": {k: round(v, 4) for k, v in longest}}
