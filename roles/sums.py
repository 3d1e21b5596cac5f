"""Float32 sums of products of a lower type.

SU-1: a product is added in float32, not rounded to the type of its factors between where the device can do that at the
      speed of its factors' type.
SU-2: a weight that has a `GradientSum` gets its gradient there; autograd is given none. What knows nothing of it leaves
      its gradient to autograd, which hands it over.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total float32; never rounded between, on any device."""
    if a.dtype == torch.float32 or not _multiplies_into_float32(a):
        total.addmm_(a.float(), b.float())
    elif _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=torch.float32))


def _multiplies_into_float32(a: Tensor) -> bool:
    """Neither the CPU nor ROCm does."""
    return a.is_cuda and torch.version.hip is None


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Versions of torch differ in what a product may be added to: asked by one whose result is known."""
    ones, small = torch.ones(16, 16, device=device, dtype=dtype), 2**-10  # which a lower type loses beside 16
    total = torch.full((16, 16), small, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16 + small).all())


class GradientSum:
    """The gradient of one weight, over micro-batches."""

    def __init__(self, weight: Tensor) -> None:
        self._shape, self._device = weight.shape, weight.device
        self.total: Tensor | None = None
        """None: nothing has come yet."""

    def begun(self) -> Tensor:
        """What to add to."""
        if self.total is None:
            self.total = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return self.total

    def add_product(self, a: Tensor, b: Tensor) -> None:
        if a.dtype != torch.float32 and not _multiplies_into_float32(a):
            self.add(a @ b)  # rounded once, as autograd would: a float32 product costs several times as much there
        elif self.total is not None:
            add_product(self.total, a, b)
        else:
            self.total = a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)

    def add(self, gradient: Tensor) -> None:
        if self.total is None:
            self.total = gradient.to(torch.float32, copy=True)
        else:
            self.total.add_(gradient)


def sum_of(weight: Any) -> GradientSum | None:
    """Where the gradient of this weight is to go; None: to autograd."""
    return getattr(weight, "gradient_sum", None)
