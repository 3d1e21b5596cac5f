"""AdamW (arXiv:1711.05101) over the plain local tensors of a rank, with its moments on the device or in CPU memory.

AW-1: weights and moments are float32; the update is torch's fused one, the same function with and without offload, so
      that both give the same bits.
AW-2: offloaded moments are in pinned CPU memory. A step goes bucket by bucket: while one is updated, the next one's
      moments come in on a stream of their own and those of the one before go out on another.
AW-3: weight decay is decoupled, scaled by the learning rate, and applies to matrices only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from roles.trainer_config import TrainerConfig

BUCKET_ELEMENTS = 2**26
"""Parameters whose moments are on the device at a time when offloaded: 512 MiB of moments, two buckets in flight."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """The optimizer of one rank.

    Args:
        params: local float32 tensors by name, updated in place.
        offload: keep moments in CPU memory while no step runs (AW-2).
    """

    def __init__(self, params: Mapping[str, Tensor], config: TrainerConfig, *, offload: bool = False) -> None:
        self.params = dict(params)
        self.config = config
        self.updates = 0
        """Updates behind the moments; the bias correction counts them."""
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        device = next(iter(self.params.values())).device if self.params else torch.device("cpu")
        self._offload = offload and device.type == "cuda"
        self._arriving = torch.cuda.Stream() if self._offload else None
        self._leaving = torch.cuda.Stream() if self._offload else None

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], rate: float) -> None:
        """Update the parameters that have a gradient; the first update makes their moments."""
        for name in grads:
            if name not in self._moments:
                self._moments[name] = (self._new(self.params[name]), self._new(self.params[name]))
        for names, moments in self._buckets(list(grads)):
            for decayed in (True, False):
                chosen = [name for name in names if (self.params[name].ndim >= 2) == decayed]
                if chosen:
                    self._update(chosen, grads, moments, rate, self.config.weight_decay if decayed else 0.0)
        self.updates += 1

    def moments(self, name: str) -> dict[str, Tensor]:
        """exp_avg and exp_avg_sq of a parameter; empty before the first update."""
        if self._leaving is not None:
            self._leaving.synchronize()
        return dict(zip(MOMENTS, self._moments[name], strict=True)) if name in self._moments else {}

    def make_moments(self, name: str) -> dict[str, Tensor]:
        """New moments of a parameter, to be read into."""
        self._moments[name] = (self._new(self.params[name]), self._new(self.params[name]))
        return self.moments(name)

    def forget(self) -> None:
        """As before the first update."""
        self._moments.clear()
        self.updates = 0

    def _new(self, param: Tensor) -> Tensor:
        if not self._offload:
            return torch.zeros_like(param, memory_format=torch.preserve_format)
        return torch.zeros(param.shape, dtype=param.dtype, device="cpu", pin_memory=True)

    def _update(
        self,
        names: list[str],
        grads: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
        rate: float,
        weight_decay: float,
    ) -> None:
        device = self.params[names[0]].device
        steps = torch.full((len(names),), float(self.updates), device=device)
        adamw(
            [self.params[name] for name in names],
            [grads[name] for name in names],
            [moments[name][0] for name in names],
            [moments[name][1] for name in names],
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def _buckets(self, names: list[str]) -> Iterator[tuple[list[str], dict[str, tuple[Tensor, Tensor]]]]:
        """Runs of parameters with their moments on the device; what was changed there is kept (AW-2)."""
        if self._arriving is None or self._leaving is None:
            yield names, self._moments
            return
        runs = list(_runs(names, self.params))
        here = torch.cuda.current_stream()
        self._arriving.wait_stream(self._leaving)
        coming = self._bring(runs[0]) if runs else {}
        for index, run in enumerate(runs):
            here.wait_stream(self._arriving)
            moments = coming
            if index + 1 < len(runs):
                coming = self._bring(runs[index + 1])
            yield run, moments
            self._leaving.wait_stream(here)
            with torch.cuda.stream(self._leaving):
                for name, pair in moments.items():
                    for kept, moment in zip(self._moments[name], pair, strict=True):
                        kept.copy_(moment, non_blocking=True)
                        moment.record_stream(self._leaving)

    def _bring(self, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        found: dict[str, Any] = {}
        with torch.cuda.stream(self._arriving) if self._arriving is not None else contextlib.nullcontext():
            for name in names:
                device = self.params[name].device
                found[name] = tuple(moment.to(device, non_blocking=True) for moment in self._moments[name])
        for pair in found.values():
            for moment in pair:
                moment.record_stream(torch.cuda.current_stream())
        return found


def _runs(names: list[str], params: Mapping[str, Tensor]) -> Iterator[list[str]]:
    run: list[str] = []
    size = 0
    for name in names:
        if run and size + params[name].numel() > BUCKET_ELEMENTS:
            yield run
            run, size = [], 0
        run.append(name)
        size += params[name].numel()
    if run:
        yield run
