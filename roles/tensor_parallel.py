"""Tensor parallelism of the torch back end: transformers' own plan of a model, carried out by torch's DTensor.

TP-1: of a `colwise` layer a rank holds rows of the weight, of a `rowwise` one columns. Between the two it computes with
      its own heads and neurons; everything else is whole on each rank, and computed on each alike.
TP-2: a whole parameter that sees the heads of its rank alone (norms of queries and keys) has a part of its gradient
      there: the parts are summed before anybody looks at it.
TP-3: embedding and head are split by rows where the vocabulary divides: logits of a whole row exist on no rank.
TP-4: split parameters are parts of the gradient's norm, whole ones are counted once.

Ranks of a group are neighbours and get the same data.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from roles.logprob import VocabShard

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PARTIAL = "replicated_with_grad_allreduce"
"""transformers' name of TP-2."""


class TensorParallel:
    """The split of one model over a group of ranks.

    Args:
        model: of transformers, whole on every rank, on the device of the mesh; it is split in place.
        mesh: the ranks of the group, one dimension.

    Raises:
        ValueError: transformers has no plan for the model, or one with parts that torch has no style for.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        # that gathering a whole weight takes two collectives is no news for whoever exports it (R11)
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        hf = cast(Any, model)
        plan: Mapping[str, str] = hf.config.get_text_config().base_model_tp_plan or {}
        base = hf.base_model
        styles = styles_of(base, plan, hf.get_input_embeddings())
        known = {*STYLES, PARTIAL}
        for name, style in styles.items():
            if style not in known:
                raise ValueError(
                    f"[trainer] tensor_parallel: {type(model).__name__} wants {style!r} for {name}, which backend = "
                    "'fsdp' does not have; set it to 1, or use backend = 'megatron'"
                )
        if not styles:
            raise ValueError(
                f"[trainer] tensor_parallel: transformers has no plan for {type(model).__name__}; set it to 1"
            )
        parallelize_module(
            base, mesh, {name: STYLES[style]() for name, style in styles.items() if style in STYLES}, src_data_rank=None
        )
        whole_norms = {id(p) for n, s in styles.items() if s == PARTIAL for p in base.get_submodule(n).parameters()}
        self._split_vocabulary(hf)
        named = dict(model.named_parameters())
        self.partial = [name for name, param in named.items() if id(param) in whole_norms]
        """Parameters whose gradients are to be summed (TP-2)."""
        self.split = {name for name, param in named.items() if isinstance(param, DTensor)}

    def _split_vocabulary(self, hf: Any) -> None:
        embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        if type(embedding) is not nn.Embedding or embedding.weight.shape[0] % self.size:
            return
        tied = head is not None and head.weight is embedding.weight
        parallelize_module(embedding, self.mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
        if tied:
            head.weight = embedding.weight
        elif head is not None:
            rows = distribute_tensor(head.weight.detach(), self.mesh, [Shard(0)], src_data_rank=None)
            head.weight = nn.Parameter(rows, requires_grad=head.weight.requires_grad)
            if head.bias is not None:
                bias = distribute_tensor(head.bias.detach(), self.mesh, [Shard(0)], src_data_rank=None)
                head.bias = nn.Parameter(bias, requires_grad=head.bias.requires_grad)

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """What `roles.logprob` takes: hidden states whose gradient is summed over the group, and this rank's rows."""
        if not isinstance(weight, DTensor):
            return hidden, weight, bias, None
        count = weight.shape[0] // self.size
        whole: Any = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        summed = whole.to_local(grad_placements=[Partial()])
        rows = bias.to_local() if isinstance(bias, DTensor) else bias
        shard = VocabShard(group=self.group, start=self.rank * count, count=count)
        return summed, weight.to_local(), rows, shard

    def sum_partial(self, grads: Mapping[str, Tensor]) -> None:
        """Add up what this rank's heads left (TP-2), in place, in one collective."""
        parts = [grads[name] for name in self.partial if name in grads and grads[name].numel()]
        if not parts:
            return
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self.group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))

    def square(self, grads: Mapping[str, Tensor]) -> Tensor:
        """This rank's share of the squared norm: what all ranks' shares add up to is the whole (TP-4)."""
        split = [grad for name, grad in grads.items() if name in self.split]
        whole = [grad for name, grad in grads.items() if name not in self.split]
        return _square(split) + _square(whole) / self.size

    def writes(self, name: str) -> bool:
        """Whether this rank's part of a parameter goes into a checkpoint: one copy of those that are whole."""
        return self.rank == 0 or name in self.split


def styles_of(base: nn.Module, plan: Mapping[str, str], embedding: nn.Module) -> dict[str, str]:
    """The plan's entries of a model's modules, without the embedding, which some versions of transformers name: the
    vocabulary is split here (TP-3)."""
    named = {name: _style(plan, name) for name, module in base.named_modules() if module is not embedding}
    return {name: style for name, style in named.items() if style}


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """The plan's entry for a module; layers are written as `*`."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def _square(grads: Iterable[Tensor]) -> Tensor:
    parts = list(grads)
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return nn.utils.get_total_norm(parts).double() ** 2
