"""Recorded routes in megatron's MoE layers: forward, recomputation, any stage.

MR-1: a layer takes its column of the routes by its number in the whole model, dense layers left out; pipeline stage and
      model chunk don't matter.
MR-2: under sequence and context parallelism a rank's router sees a run of the positions; it takes the same run of the
      routes. Runs go by context-parallel rank, and within it by tensor-parallel rank.
MR-3: activations are recomputed in the order in which micro-batches went forward: first in, first out. A forward pass
      whose activations will be recomputed runs without gradients, its recomputation with them; that tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from roles import megatron_context
from sync.layouts.model import ModelShape


class _Replay(RouterReplay):
    """One router's routes, which knows whether it is asked by a forward pass or by its recomputation (MR-3)."""

    recomputed = False

    def get_replay_topk(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if self.router_replay_action is not None:
            again = self.recomputed and torch.is_grad_enabled()
            action = RouterReplayAction.REPLAY_BACKWARD if again else RouterReplayAction.REPLAY_FORWARD
            self.set_router_replay_action(action)
        chosen: tuple[Tensor, Tensor] = super().get_replay_topk(*arguments, **named)
        return chosen


class RouteReplay:
    """The routers of a rank.

    Args:
        chunks: its model chunks.
    """

    def __init__(self, chunks: Sequence[nn.Module], shape: ModelShape) -> None:
        self._shape = shape
        self._layers = sum(shape.is_sparse(layer) for layer in range(shape.layers))
        self._of: dict[nn.Module, list[tuple[int, Any]]] = {}
        RouterReplay.clear_global_router_replay_instances()
        for chunk in chunks:
            routers = [module for module in chunk.modules() if getattr(module, "router_replay", None) is not None]
            for router in routers:
                router.router_replay = _Replay()
            self._of[chunk] = [(self._index(router), router) for router in routers]

    def _index(self, router: Any) -> int:
        """Which MoE layer of the whole model (MR-1); megatron counts layers from 1."""
        layer = int(router.layer_number) - 1
        return sum(self._shape.is_sparse(before) for before in range(layer))

    def set(self, chunk: nn.Module, routes: Tensor | None, *, recomputed: bool) -> None:
        """Give the routers of a chunk the routes [T, MoE layers, k] of the micro-batch that goes forward next.

        Raises:
            ValueError: the routes are of another model.
        """
        for index, router in self._of[chunk]:
            replay = router.router_replay
            if routes is None:
                replay.clear_router_replay_action()
                continue
            layers, k = routes.shape[1:]
            if layers != self._layers or k != router.topk:
                raise ValueError(
                    f"trainer: routes are of {layers} MoE layers with {k} experts per token, the model has "
                    f"{self._layers} with {router.topk}; rollout and trainer must load one model"
                )
            split, at = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            size, rank = split * megatron_context.ranks(), parallel_state.get_context_parallel_rank() * split + at
            run = len(routes) // size
            replay.recomputed = recomputed
            replay.set_target_indices(routes[rank * run : (rank + 1) * run, index].contiguous())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear(self) -> None:
        """Forget the routes of an update that is over."""
        for routers in self._of.values():
            for _, router in routers:
                router.router_replay.clear_indices()
                router.router_replay.clear_router_replay_action()
