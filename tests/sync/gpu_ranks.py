"""A trainer and a rollout of plain tensors, on two GPUs of one host or both on its only one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime import Actor, endpoint
from sync.layout import Entry, Layout
from sync.ports import ReceiverPort, SenderPort

SHAPES = {"embed.weight": (1000, 512), "layers.0.up.weight": (768, 512), "layers.0.norm.weight": (513,)}


def values(name: str, version: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * version + len(name))
    return torch.randn(SHAPES[name], generator=generator).to(torch.bfloat16)


class GpuTrainer(SenderPort, Actor):
    """All weights in bfloat16 on the first GPU."""

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self.weights = {name: values(name, 0).cuda() for name in SHAPES}
        self.layout = Layout(tuple(Entry.whole(name, shape, "bfloat16") for name, shape in SHAPES.items()))
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    @endpoint
    def train_to(self, version: int) -> None:
        for name, tensor in self.weights.items():
            tensor.copy_(values(name, version))

    @endpoint
    def poison(self) -> None:
        self.weights["layers.0.up.weight"][5, 7] = float("nan")

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class GpuRollout(ReceiverPort, Actor):
    """Weights on the last GPU; keeps what it is given and hands back what it had."""

    def __init__(self, layout: Layout, gpu: int = -1) -> None:
        last = gpu % torch.cuda.device_count()
        torch.cuda.set_device(last)
        self.weight_device = f"cuda:{last}"
        self.layout = layout
        self.weights: Mapping[str, Tensor] = {
            e.name: torch.zeros(e.box.shape, dtype=getattr(torch, e.dtype), device="cuda") for e in layout.entries
        }
        self.version = -1
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        self.weights, before = dict(weights), self.weights
        self.version = version
        return before

    @endpoint
    def serving(self) -> tuple[int, dict[str, Tensor]]:
        return self.version, {name: tensor.cpu() for name, tensor in self.weights.items()}

    @endpoint
    def used(self) -> int:
        """Bytes of the GPU in use, by anybody."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


class WrittenOver(GpuRollout):
    """Stands still and has its weights written over, on the trainer's GPU."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, 0)

    def live_weights(self) -> Mapping[str, Tensor]:
        return dict(self.weights)

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:  # type: ignore[override]
        assert all(weights[name] is tensor for name, tensor in self.weights.items())
        self.version = version
