"""Which experts each token used: captured from the routers of a transformers model, kept by row until it ends.

RT-1: `take` holds one line for each token of the forward pass just made, in its order, for each mixture-of-experts
      layer in the order of the layers.
RT-2: a row keeps the lines of the pass that computed each of its positions; a position that was never computed (the
      newest token) has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class RouteCapture:
    """Hooks on the routers of a model.

    Args:
        layers: decoder layers; those whose `mlp` has a router called `gate` are recorded.

    Raises:
        ValueError: there are none, or a router gives no expert indices.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        routers = [layer.mlp.gate for layer in layers if isinstance(getattr(layer.mlp, "gate", None), nn.Module)]
        if not routers:
            raise ValueError(
                "rollout.record_routes: the model has no mixture-of-experts layer whose router this engine knows; "
                "turn it off"
            )
        self._latest: list[Tensor] = [torch.empty(0)] * len(routers)
        for index, router in enumerate(routers):
            router.register_forward_hook(self._hook(index))

    def take(self) -> Tensor:
        """[N, L, K] of the latest pass, uint8 or int32."""
        return torch.stack(self._latest, dim=1)

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _arguments: Any, output: Any) -> None:
            if not (isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()):
                raise ValueError(
                    f"rollout.record_routes: {type(module).__name__} gives no expert indices; turn record_routes off, "
                    "or use another rollout engine"
                )
            num_experts = output[0].shape[-1]
            self._latest[index] = output[2].to(torch.uint8 if num_experts <= 256 else torch.int32)

        return hook


class RouteStore:
    """The routes of the running rows, by slot and position."""

    def __init__(self, num_slots: int) -> None:
        self._lines: Tensor | None = None  # [slots, positions, L, K]
        self._num_slots = num_slots

    def put(self, slots: Tensor, positions: Tensor, lines: Tensor) -> None:
        """lines: [N, L, K] of the tokens at `positions` [N] of `slots` [N]."""
        slots, positions = slots.to(lines.device), positions.to(lines.device)
        needed = int(positions.max()) + 1
        old = self._lines
        if old is None or old.shape[1] < needed:
            length = max(needed, 64, 2 * (0 if old is None else old.shape[1]))
            self._lines = lines.new_zeros((self._num_slots, length, *lines.shape[1:]))
            if old is not None:
                self._lines[:, : old.shape[1]] = old
        assert self._lines is not None
        self._lines[slots, positions] = lines

    def put_prompts(self, first: int, owner: Tensor, lines: Tensor) -> None:
        """lines: [P, S, L, K] of whole prompts; row r at slot `first + r` has prompt `owner[r]`."""
        width = lines.shape[1]
        slots = torch.arange(first, first + len(owner)).repeat_interleave(width)
        self.put(slots, torch.arange(width).repeat(len(owner)), lines[owner].flatten(0, 1))

    def take(self, slot: int, length: int) -> np.ndarray:
        """[length, L, K] of a row that ends, uint8 or uint16."""
        assert self._lines is not None
        lines = self._lines[slot, :length].cpu().numpy()
        return lines.copy() if lines.dtype == np.uint8 else lines.astype(np.uint16)

    def move(self, source: Tensor, target: Tensor) -> None:
        if self._lines is not None:
            self._lines[target] = self._lines[source]
