"""What a rank of the torch back end offers to weight transfer, and where its rows lie in the full tensors.

WT-1: names are those of the Hugging Face checkpoint. Experts that transformers holds as one stacked tensor are offered
      both ways, stacked and one by one, as views of the same memory: engines differ in what they want.
WT-2: buffers that training may change or an engine must have (router bias) are offered beside the parameters.
WT-3: with adapters either the merged weights are offered under the model's names, or the adapters alone under PEFT's.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from roles.lora import Lora, is_adapter
from sync.layout import Layout
from sync.layouts import dtensor
from sync.layouts.held import Held, Part

STACKED = (".gate_up_proj", ".down_proj")
"""Ends of the names of stacked experts (3-d parameters)."""

SENT_BUFFERS = ("e_score_correction_bias",)


class Weights:
    """Views of the local memory of a model by Hugging Face name and box.

    Args:
        local: the local rows of each parameter.
        lora: the adapters of the model, if it has any.
    """

    def __init__(
        self, model: nn.Module, local: Mapping[str, Tensor], lora: Lora | None, send: Literal["merged", "adapter"]
    ) -> None:
        self._params = dict(model.named_parameters())
        self._lora = lora
        self._send = send
        buffers = {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] in SENT_BUFFERS}
        self._memory = {**local, **buffers}
        offered = {name: p for name, p in {**self._params, **buffers}.items() if not is_adapter(name)}
        if lora is not None and send == "adapter":
            offered = {lora.peft_name(name): p for name, p in self._params.items() if is_adapter(name)}
            self._memory = {lora.peft_name(name): part for name, part in local.items() if is_adapter(name)}
        experts = {name: p for name, p in offered.items() if p.ndim == 3 and name.endswith(STACKED)}
        self._held = Held(
            (*dtensor.held(offered.items()).parts, *dtensor.held(experts.items(), split_experts=True).parts)
        )
        self._merged: dict[str, Tensor] = {}
        self.changed()

    @property
    def layout(self) -> Layout:
        return self._held.layout

    def views(self, name: str) -> list[Tensor]:
        """The boxes of a name, in the order of the layout."""
        return self._held.views(name, [ChainMap(self._merged, self._memory)])

    def parts(self, name: str) -> list[Part]:
        """The boxes of a parameter, in the model's own names, and where they lie in its local memory."""
        return self._parts[name]

    @cached_property
    def _parts(self) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for part in dtensor.held(self._params.items()).parts:
            found.setdefault(part.entry.name, []).append(part)
        return found

    @torch.no_grad()
    def changed(self) -> None:
        """The weights have moved: merge the adapters anew. A collective where the adapters are sharded."""
        if self._lora is None or self._send == "adapter":
            return
        for name in self._params:
            pair = self._lora.parameters_of(name)
            if pair is None:
                continue
            a, b = self._params[pair[0]].detach(), self._memory[pair[1]]
            whole = a.full_tensor() if hasattr(a, "full_tensor") else a
            self._merged[name] = self._lora.merged(self._memory[name], whole, b)
