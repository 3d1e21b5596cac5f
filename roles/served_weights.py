"""The weights that the small engine serves, as weight transfer sees them.

SV-1: `write` checks all tensors before it writes one, and writes in place: who reads the modules' parameters reads the
      new ones.
SV-2: the layout names every tensor of the model: parameters, tied ones derived, buffers constant.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sync.layout import Entry, Layout


class ServedWeights:
    """The parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.layout = _layout_of(model)

    def live(self) -> Mapping[str, Tensor]:
        """The tensors in service, to be written over."""
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def write(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Bring a version into place. What lies there already (`live`) stays as it is.

        Raises:
            ValueError: a tensor is missing, unknown or has another shape; nothing was changed.
        """
        unknown = weights.keys() - self._parameters.keys() - self.layout.derived.keys()
        missing = self._parameters.keys() - weights.keys()
        if unknown or missing:
            raise ValueError(
                f"swap to version {version}: expected the {len(self._parameters)} tensors of weight_layout(), missing "
                f"{sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}; trainer and rollout must load one model"
            )
        for name, parameter in self._parameters.items():
            if weights[name].shape != parameter.shape:
                raise ValueError(
                    f"swap to version {version}: {name}: expected shape {list(parameter.shape)}, got "
                    f"{list(weights[name].shape)}; trainer and rollout must load one model"
                )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if weights[name].data_ptr() != parameter.data_ptr():  # else it was written in place
                    parameter.copy_(weights[name])


def _layout_of(model: nn.Module) -> Layout:
    origin: dict[int, str] = {}
    entries: list[Entry] = []
    derived: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entries.append(Entry.whole(name, parameter.shape, _dtype_name(parameter)))
        first = origin.setdefault(id(parameter), name)
        if first != name:
            derived[name] = first
    buffers = list(model.named_buffers())
    entries += [Entry.whole(name, buffer.shape, _dtype_name(buffer)) for name, buffer in buffers]
    return Layout(tuple(entries), derived=derived, constant=tuple(name for name, _ in buffers))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
