"""Adapters of a model that is spread over megatron ranks, trained through the weights that they are merged into.

    W = W0 + s B A       dA = s B^T dW       dB = s dW A^T       s = alpha / r, on any box of W

ML-1: the model computes with merged weights in its own type. They are made anew from the weights that were read, never
      by adding differences: an adapter gives the same weights whatever was before it.
ML-2: A and B are float32, whole on each rank that holds a box of their weight, and the same bits there: each box counts
      once, on one of the ranks that have it, and all of them step with the sum.
ML-3: what has no adapter has no gradient and stays as it was read, bit for bit.
ML-4: a checkpoint has A, B and their moments whole, once: any layout reads it.

Assumed: the boxes of a weight on any two ranks are equal or disjoint (`sync.layouts.megatron`), and gradients of copies
are summed already when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roles import checkpoint, lora
from roles.adamw import MOMENTS, AdamW
from roles.measures import gather
from roles.trainer_config import TrainerConfig, adapted_weights
from sync.layout import Box, Entry, Layout
from sync.layouts.held import Held, Live
from sync.layouts.model import ModelShape


class MegatronLora:
    """The adapters of one rank. Build it on all ranks at once, on chunks that are loaded and not yet wrapped.

    Args:
        chunks: all of their parameters are frozen but those that hold boxes of adapted weights.
    """

    def __init__(self, config: TrainerConfig, shape: ModelShape, held: Held, chunks: Sequence[nn.Module]) -> None:
        self.config = config
        self.scale = config.lora_alpha / config.lora_rank
        self._held, self._chunks = held, chunks
        self._memory = [Live(chunk) for chunk in chunks]
        self._shapes = adapted_weights(config, shape)
        self._boxes = _boxes(held, self._shapes)
        self._base = {name: [view.clone() for view in self._merged(name)] for name in self._boxes}
        self.params: dict[str, Tensor] = {}
        """A and B of this rank's weights: `<layer>.lora_A`, `<layer>.lora_B`."""
        device = next(chunks[0].parameters()).device
        for name in self._boxes:
            pair = lora.drawn(config, name.removesuffix(".weight"), *self._shapes[name])
            self.params |= {half: tensor.to(device) for half, tensor in zip(_pair(name), pair, strict=True)}
        self._optimizer = AdamW(self.params, config, offload=config.offload_optimizer and device.type == "cuda")
        everywhere = gather(self._boxes)
        self._holders = {
            name: tuple(rank for rank, there in enumerate(everywhere) if name in there) for name in self._shapes
        }
        self._counted = {name: _counted(name, everywhere) for name in self._boxes}
        self._groups = {ranks: dist.new_group(ranks) for ranks in sorted(set(self._holders.values())) if len(ranks) > 1}
        self._freeze()

    def _freeze(self) -> None:
        for chunk in self._chunks:
            chunk.requires_grad_(False)
            if (embedding := getattr(chunk, "embedding", None)) is not None:
                # What is recomputed or sent to the next stage must have a gradient, though nothing before it learns.
                embedding.register_forward_hook(lambda _module, _args, out: out.requires_grad_())
        for part in self._held.parts:
            if part.entry.name in self._boxes:
                self._chunks[part.chunk].get_parameter(part.param).requires_grad_(True)

    def __str__(self) -> str:
        """What a checkpoint must agree on."""
        return f"adapters of rank {self.config.lora_rank} on {', '.join(sorted(self.config.lora_targets))}"

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Update A and B by the gradients of the weights, and merge them. A collective.

        Returns:
            The norm of their gradient over all ranks before clipping; nothing has moved when it is not finite.
        """
        grads = self._gradients()
        norm = self._norm(grads)
        if not math.isfinite(norm):
            return norm
        if 0 < self.config.grad_clip < norm:
            torch._foreach_mul_(list(grads.values()), self.config.grad_clip / (norm + 1e-6))
        if grads:
            self._optimizer.step(grads, rate)
        self.merge()
        return norm

    def _gradients(self) -> dict[str, Tensor]:
        """Of A and B, the same bits on every rank that has them (ML-2)."""
        grads = {name: torch.zeros_like(param) for name, param in self.params.items()}
        memory = [_main_grads(chunk) for chunk in self._chunks]
        for name, counted in self._counted.items():
            (a, b), (grad_a, grad_b) = ([by[half] for half in _pair(name)] for by in (self.params, grads))
            views = self._held.views(name, memory)
            for at in counted:
                rows, columns = self._inside(name, self._boxes[name][at])
                grad_a[:, columns].addmm_(b[rows].T, views[at], alpha=self.scale)
                grad_b[rows].addmm_(views[at], a[:, columns].T, alpha=self.scale)
        for ranks, group in self._groups.items():
            mine = [grads[half] for name in self._boxes if self._holders[name] == ranks for half in _pair(name)]
            if mine:
                _sum(mine, group)
        return grads

    def _norm(self, grads: dict[str, Tensor]) -> float:
        own = [grads[half] for name in self._first() for half in _pair(name)]
        square = nn.utils.get_total_norm(own).double() ** 2
        total = square.to(next(self._chunks[0].parameters()).device)
        dist.all_reduce(total)
        return math.sqrt(float(total))

    @torch.no_grad()
    def merge(self) -> None:
        """Make the boxes of all adapted weights anew (ML-1)."""
        for name, boxes in self._boxes.items():
            a, b = (self.params[half] for half in _pair(name))
            for box, base, into in zip(boxes, self._base[name], self._merged(name), strict=True):
                rows, columns = self._inside(name, box)
                into.copy_(torch.addmm(base.float(), b[rows], a[:, columns], alpha=self.scale))

    def _merged(self, name: str) -> list[Tensor]:
        return self._held.views(name, self._memory)

    def _inside(self, name: str, box: Box) -> tuple[slice, ...]:
        return box.slices_in(Box.whole(self._shapes[name]))

    def _first(self) -> list[str]:
        """Adapted weights whose first holder this rank is: it speaks for all of them."""
        return [name for name in self._boxes if self._holders[name][0] == dist.get_rank()]

    # --- to rollouts, alone -------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """The adapters of this rank in PEFT's names."""
        return Layout(tuple(Entry.whole(lora.peft_name(name), p.shape, "float32") for name, p in self.params.items()))

    def weight(self, name: str) -> list[Tensor]:
        return [self.params[name.removeprefix(lora.PEFT_PREFIX).removesuffix(".weight")]]

    # --- on disk ------------------------------------------------------------------------------------------------------

    def to_save(self, *, copy: bool) -> tuple[dict[str, checkpoint.Shard], dict[str, Tensor]]:
        """What this rank writes, with the boxes (ML-4).

        Args:
            copy: the weights go on moving while it is written.
        """
        tensors: dict[str, Tensor] = {}
        for half in (half for name in self._first() for half in _pair(name)):
            kinds = {"weight": self.params[half].to("cpu", copy=copy), **self._optimizer.moments(half)}
            tensors |= {f"{kind}/{half}": tensor for kind, tensor in kinds.items()}
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        return {key: checkpoint.Shard(box=Box.whole(s), shape=s) for key, s in shapes.items()}, tensors

    def load(self, shards: checkpoint.Shards, updates: int) -> None:
        """Continue from what all ranks of any layout wrote."""
        self._optimizer.forget()
        self._optimizer.updates = updates
        if updates:
            self._optimizer.reserve(self.params)
        for name, param in self.params.items():
            moments = {kind: torch.empty(param.shape) for kind in MOMENTS} if updates else {}
            for kind, tensor in {"weight": param, **moments}.items():
                shards.read(f"{kind}/{name}", Box.whole(param.shape), tuple(param.shape), tensor)
            if moments:
                self._optimizer.set_moments(name, moments)
        self.merge()

    def export(self, folder: Path, base: str) -> None:
        """Write all adapters as a folder that PEFT loads (rank 0; the others send theirs)."""
        whole: dict[str, Tensor] = {}
        for name, holders in self._holders.items():
            for half, shape in zip(_pair(name), self._shapes_of_pair(name), strict=True):
                tensor = self._on_first_rank(half, shape, holders[0])
                if tensor is not None:
                    whole[half] = tensor.cpu()
        if dist.get_rank() == 0:
            lora.export(whole, folder, base, self.config)

    def _shapes_of_pair(self, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
        rows, columns = self._shapes[name]
        return (self.config.lora_rank, columns), (rows, self.config.lora_rank)

    def _on_first_rank(self, half: str, shape: tuple[int, int], holder: int) -> Tensor | None:
        rank = dist.get_rank()
        if holder == 0:
            return self.params[half] if rank == 0 else None
        if rank == 0:
            arrived = torch.empty(shape, device=next(self._chunks[0].parameters()).device)
            dist.recv(arrived, holder)
            return arrived
        if rank == holder:
            dist.send(self.params[half], 0)
        return None


def _pair(name: str) -> tuple[str, str]:
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A", f"{layer}.lora_B"


def _boxes(held: Held, names: dict[str, tuple[int, int]]) -> dict[str, list[Box]]:
    """This rank's boxes of these weights, in the order of `held`."""
    found: dict[str, list[Box]] = {}
    for part in held.parts:
        if part.entry.name in names:
            found.setdefault(part.entry.name, []).append(part.entry.box)
    return found


def _counted(name: str, everywhere: Sequence[dict[str, list[Box]]]) -> list[int]:
    """Which of this rank's boxes of a weight count here: copies take turns, so that each does a part of the work."""
    holders: dict[Box, list[int]] = {}
    for rank, there in enumerate(everywhere):
        for box in there.get(name, ()):
            if not box.is_empty:
                holders.setdefault(box, []).append(rank)
    turn = sum(name.encode())  # weights with one box must not all count on the same rank
    counts = {box: ranks[(turn + at) % len(ranks)] for at, (box, ranks) in enumerate(holders.items())}
    rank = dist.get_rank()
    return [at for at, box in enumerate(everywhere[rank][name]) if counts.get(box) == rank]


def _main_grads(chunk: nn.Module) -> dict[str, Tensor]:
    """The summed float32 gradients of megatron's buffers."""
    params: dict[str, Any] = dict(chunk.named_parameters())
    return {name: param.main_grad for name, param in params.items() if param.requires_grad}


def _sum(tensors: list[Tensor], group: Any) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
