"""Recorded routes instead of a router's own choice, in transformers' mixture-of-experts models.

The rollout engine and the trainer compute in different orders and types, so that near ties between experts fall
differently; one such expert changes a logprob more than all rounding does. The trainer therefore uses the experts that
the engine used (arXiv:2510.11370), and only weights them by its own gate.

RR-1: MoE layers are counted over the whole model in the order of its blocks, dense layers left out.
RR-2: weights are computed from the live logits, so that the gate learns. How, is known for the families below and
      compared with what the router itself returns, at load: an unknown rule is refused, never guessed.
RR-3: recomputation of activations sees the same routes: they stay until the next micro-batch is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roles.kernels_torch import gate_scores, gate_weights

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(router, logits [T, E], ids [T, k]) -> weights [T, k]."""


class Replay:
    """The routers of a model, each of which takes its slice of `routes`."""

    def __init__(self, routers: list[tuple[str, nn.Module, Weigh | None]]) -> None:
        self.routes: Tensor | None = None
        """[T, MoE layers, k] int64 for the next forward pass; None: routers choose."""
        self._names = [name for name, _, _ in routers]
        for layer, (name, router, weigh) in enumerate(routers):
            router.register_forward_hook(functools.partial(self._replace, layer, name, weigh))

    @classmethod
    def of(cls, model: nn.Module) -> Replay | None:
        """Hook all routers of a model; None when it has none."""
        routers = [(name, module) for name, module in model.named_modules() if _is_router(module)]
        return cls([(name, router, _rule(router)) for name, router in routers]) if routers else None

    def _replace(
        self, layer: int, name: str, weigh: Weigh | None, router: nn.Module, _args: Any, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        if self.routes is None:
            return output
        logits, weights, chosen = output
        if weigh is None:
            raise ValueError(
                f"trainer: how {type(router).__name__} ({name}) weighs its experts is not known, so recorded routes "
                "can't be replayed; turn the recording of routes off in the rollout"
            )
        layers, k = self.routes.shape[1:]
        if layers != len(self._names) or k != chosen.shape[-1]:
            raise ValueError(
                f"trainer: routes are of {layers} MoE layers with {k} experts per token, the model has "
                f"{len(self._names)} with {chosen.shape[-1]}; rollout and trainer must load one model"
            )
        ids = self.routes[:, layer].to(chosen.device)
        return logits, weigh(router, logits, ids).to(weights.dtype), ids


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return name.endswith("router") and hasattr(module, "weight") and hasattr(module, "top_k")


def _softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Qwen3-MoE, OLMoE, Mixtral: softmax over all experts, then the chosen ones normalised or not."""
    normalise = bool(getattr(router, "norm_topk_prob", True))
    return gate_weights(gate_scores(logits, "softmax"), ids, normalise=normalise, scale=1.0)


def _sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3 and its kin, arXiv:2412.19437 (eq. 13 to 16)."""
    scores = gate_scores(logits, "sigmoid")
    return gate_weights(scores, ids, normalise=bool(router.norm_topk_prob), scale=float(router.routed_scaling_factor))


def _root_softplus(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V4."""
    return gate_weights(
        gate_scores(logits, "sqrtsoftplus"), ids, normalise=True, scale=float(router.routed_scaling_factor)
    )


def _of_chosen(_router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """gpt-oss: softmax over the logits of the chosen experts."""
    return logits.gather(1, ids).float().softmax(-1)


RULES: tuple[Weigh, ...] = (_softmax, _sigmoid, _root_softplus, _of_chosen)


def _rule(router: nn.Module) -> Weigh | None:
    """The rule that gives the router's own weights for its own choice, on made-up input (RR-2)."""
    weight: Tensor = router.weight  # type: ignore[assignment]
    steps = torch.linspace(-1, 1, 3 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    probe = (steps * 37).sin().reshape(3, -1)
    with torch.no_grad():
        try:
            logits, weights, chosen = router(probe)
        except (TypeError, ValueError):  # a router that needs more than hidden states, or returns something else
            return None
        for rule in RULES:
            try:
                ours = rule(router, logits, chosen)
            except (AttributeError, RuntimeError):  # a rule for routers with other settings or shapes
                continue
            if ours.shape == weights.shape and torch.allclose(ours.float(), weights.float(), rtol=1e-3, atol=1e-5):
                return rule
    return None
