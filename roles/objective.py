"""The border between a trainer rank and a loss: what an objective is given, what it returns, how a name becomes one.

OB-1: roles never import algorithms; a loss reaches a rank as the text `module:function` plus options, resolved there.
OB-2: the returned loss is already divided by the *global* denominators, so that adding it over micro-batches and ranks
      gives the loss of the whole batch (A4). `sums` add up the same way; `maxima` are combined by max.
OB-3: the objective never sees which rank or micro-batch it runs on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch after the forward pass. [B, L] tensors are about predicting the token in that column."""

    logprobs: Tensor
    """[B, L] float32 under the current weights, with gradient; 0 outside the mask."""
    old_logprobs: Tensor
    """[B, L] float32 under the weights at the start of the step (proximal policy), no gradient."""
    rollout_logprobs: Tensor
    """[B, L] float32 under the sampling distribution of the rollout (mu), no gradient."""
    advantages: Tensor
    """[B, L] float32."""
    mask: Tensor
    """[B, L] bool: the trained tokens. Values outside may be anything; select with `where` (A6)."""
    entropy: Tensor
    """[B, L] float32, entropy in nats of the predicted distribution; no gradient unless the objective asks for it."""
    num_tokens: int
    """Trained tokens of this update over all micro-batches of all ranks (A4)."""
    num_sequences: int
    """Sequences with a trained token of this update, likewise."""
    ages: Tensor | None = None
    """[B, L] int32: the version trained on minus the version that sampled the token. None: 0 everywhere."""
    reference_logprobs: Tensor | None = None
    """[B, L] float32 under a frozen reference policy, no gradient; None when the samples came without."""
    values: Tensor | None = None
    """[B, L] float32, with gradient: of a critic that is trained, the state before each token. Its logprobs are 0."""
    old_values: Tensor | None = None
    """[B, L] float32, when the samples were drawn; None when the samples came without."""
    returns: Tensor | None = None
    """[B, L] float32, what a critic shall learn to predict; likewise."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    loss: Tensor
    """Scalar with gradient, divided by the global denominators (OB-2)."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient, added over micro-batches and ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)


class ObjectiveSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A loss by name, as it travels to the ranks."""

    function: str
    """`module:function`, importable on the rank."""
    options: dict[str, Any] = {}

    def resolve(self) -> Callable[[LossInputs], LossOutput]:
        """Import the function and bind the options.

        Raises:
            ValueError: the text is not `module:function`, or the module has no such callable.
        """
        module_name, colon, name = self.function.partition(":")
        if not colon or not module_name or not name:
            raise ValueError(f"objective {self.function!r}: expected 'module:function', such as 'my_losses:my_loss'")
        function = getattr(importlib.import_module(module_name), name, None)
        if not callable(function):
            raise ValueError(f"objective {self.function!r}: module {module_name!r} has no function {name!r}")
        return lambda inputs: function(inputs, **self.options)
