"""Weights of a rank that holds all rows of them: float32, with copies in the compute type while an update is computed.

    between updates     parameters of the modules = masters, float32
    hold()              parameters of the modules = copies, made at once        forward, backward, forward, backward ...
    release()           parameters of the modules = masters; the copies' memory is free

MA-1: whoever reads a parameter outside of forward and backward passes reads the master. Copies live from the first
      micro-batch of an update to its last: weights are cast once an update, not once a micro-batch.
MA-2: gradients are added up in float32 where they arise (`roles.sums`); no parameter keeps a gradient of its own.
MA-3: what a block is given comes in the compute type, as it does with FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roles.sums import GradientSum, sum_of


class Masters:
    """Of one module, on its device already.

    Args:
        blocks: parts of the module to which MA-3 applies.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parameters = list(module.parameters())
        self._masters = [parameter.detach() for parameter in self._parameters]
        self._held = False
        self._sums: list[GradientSum] = []
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.gradient_sum = GradientSum(parameter)  # type: ignore[attr-defined]
                self._sums.append(parameter.gradient_sum)  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(self._take)
        for block in blocks if dtype != torch.float32 else ():
            block.register_forward_pre_hook(self._cast, with_kwargs=True)

    @torch.no_grad()
    def hold(self) -> None:
        """Before a forward pass; nothing if the copies are there."""
        if self._held or self._dtype == torch.float32:
            return
        copies = [torch.empty_like(master, dtype=self._dtype) for master in self._masters]
        torch._foreach_copy_(copies, self._masters)
        for parameter, copy in zip(self._parameters, copies, strict=True):
            parameter.data = copy
        self._held = True

    def release(self) -> None:
        """After the last backward pass, or after an error in one."""
        if self._held:
            self._held = False
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.data = master

    def gradients(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Of the parameters that have one, by name."""
        sums = {name: sum_of(parameter) for name, parameter in trained.items()}
        return {name: one.total for name, one in sums.items() if one is not None and one.total is not None}

    def forget(self) -> None:
        """No gradients."""
        for one in self._sums:
            one.total = None

    def _take(self, parameter: Tensor) -> None:
        """What autograd has for a parameter (MA-2)."""
        into = sum_of(parameter)
        if into is not None and parameter.grad is not None:
            into.add(parameter.grad)
            parameter.grad = None

    def _cast(self, _block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(self._casts(args)), dict(zip(named, self._casts(named.values()), strict=True))

    def _casts(self, values: Iterable[Any]) -> list[Any]:
        return [
            tuple(self._casts(value))
            if type(value) is tuple
            else value.to(self._dtype)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != self._dtype
            else value
            for value in values
        ]
