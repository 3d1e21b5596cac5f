"""AdamW (arXiv:1711.05101) over the plain local tensors of a rank, with its moments on the device or in CPU memory.

AW-1: weights and moments are float32; the update is torch's fused one, the same function with and without offload, so
      that both give the same bits.
AW-2: offloaded moments are in CPU memory and travel through the update (`roles.moments`).
AW-3: weight decay is decoupled, scaled by the learning rate, and applies to matrices only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from roles.moments import Piece, Travelling
from roles.trainer_config import TrainerConfig

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
        self._resident: dict[str, tuple[Tensor, Tensor]] = {}
        self._travelling = Travelling(self.params) if offload else None

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], rate: float) -> None:
        """Update the parameters that have a gradient; the first update makes their moments."""
        self.reserve(grads)
        for pieces in self._in_turn(grads):
            for decayed in (True, False):
                chosen = [piece for piece in pieces if (self.params[piece.name].ndim >= 2) == decayed]
                if chosen:
                    self._update(chosen, grads, rate, self.config.weight_decay if decayed else 0.0)
        self.updates += 1

    def prefetch(self, room: int) -> None:
        """Let offloaded moments come in before the step that needs them: up to `room` bytes of them."""
        if self._travelling is not None:
            self._travelling.prefetch(room)

    def skip(self) -> None:
        """There is no step after all: what was fetched for it goes."""
        if self._travelling is not None:
            self._travelling.drop()

    def reserve(self, names: Iterable[str]) -> None:
        """Make moments of zero for the parameters that have none."""
        if self._travelling is not None:
            self._travelling.reserve(names)
            return
        for name in names:
            if name not in self._resident:
                param = self.params[name]
                self._resident[name] = (torch.zeros_like(param), torch.zeros_like(param))

    def moments(self, name: str) -> dict[str, Tensor]:
        """exp_avg and exp_avg_sq of a parameter, a copy in CPU memory; empty where there are none."""
        if self._travelling is None:
            return {p: m.to("cpu", copy=True) for p, m in zip(MOMENTS, self._resident.get(name, ()), strict=False)}
        return dict(zip(MOMENTS, self._travelling.read(name), strict=True)) if name in self._travelling else {}

    def set_moments(self, name: str, moments: Mapping[str, Tensor]) -> None:
        """Set the moments of a parameter for which place was reserved."""
        pair = tuple(moments[part] for part in MOMENTS)
        if self._travelling is not None:
            self._travelling.write(name, *pair)
            return
        for own, given in zip(self._resident[name], pair, strict=True):
            own.copy_(given)

    def forget(self) -> None:
        """As before the first update."""
        self._resident.clear()
        self._travelling = Travelling(self.params) if self._travelling is not None else None
        self.updates = 0

    def _in_turn(self, names: Iterable[str]) -> Iterator[list[Piece]]:
        """The pieces of these parameters: all at once, or as they come in."""
        if self._travelling is None:
            yield [Piece(name, 0, self.params[name].numel(), *self._resident[name]) for name in names]
            return
        wanted = set(names)
        for pieces in self._travelling.in_turn():
            yield [piece for piece in pieces if piece.name in wanted]

    def _update(self, pieces: list[Piece], grads: Mapping[str, Tensor], rate: float, weight_decay: float) -> None:
        steps = torch.full((len(pieces),), float(self.updates), device=pieces[0].exp_avg.device)
        adamw(
            [self.params[p.name].view(-1)[p.start : p.stop] for p in pieces],
            [grads[p.name].reshape(-1)[p.start : p.stop] for p in pieces],
            [p.exp_avg.view(-1) for p in pieces],
            [p.exp_avg_sq.view(-1) for p in pieces],
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
