"""How a policy is spread over the ranks of the torch back end: FSDP2 shards, HSDP, replicas.

SH-1: gradients are summed, not averaged, in all strategies (FS-2).
SH-2: a rank's part of a parameter is rows, `Shard(0)`; in HSDP equal rows are on one rank of each replica.
SH-3: where a rank holds all rows there is nothing to gather, and FSDP2 would only cost the host its hooks: weights and
      their copies are `roles.masters`, and gradients are summed over replicas once an update.
SH-4: an expert in a module of its own has a gradient on all ranks that share its rows, whoever has tokens for it: else
      they would make different collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roles.policy_torch import keep_attention_out_of_graphs
from roles.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Strategy = Literal["fsdp2", "ddp"]

BUCKET_ELEMENTS = 2**23
"""Gradients of replicas are summed in flat buckets of about this size (32 MiB): few collectives for many tensors."""


def strategy_of(config: TrainerConfig, world: int, device: torch.device) -> Strategy:
    """One rank needs neither. FSDP2's mixed precision keeps the residual stream in bf16, where autocast computes it in
    float32, so a GPU takes it for bf16 all the same."""
    if not dist.is_initialized():
        return "ddp"
    if config.tensor_parallel > 1:
        return "fsdp2"
    if config.strategy == "auto":
        return "fsdp2" if device.type == "cuda" and (world > 1 or config.dtype == "bfloat16") else "ddp"
    return config.strategy


def mesh_of(config: TrainerConfig, device: torch.device, world: int) -> DeviceMesh:
    """Replicas x shards x tensor-parallel ranks; dimensions of one are left out, but for the shards."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replica": config.replicas, "shard": shards_of(config, world), "tensor": config.tensor_parallel}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def shards_of(config: TrainerConfig, world: int) -> int:
    """Ranks over which the rows of a parameter are spread."""
    return world // (config.replicas * config.tensor_parallel)


def shard(
    policy: nn.Module,
    blocks: Sequence[nn.Module],
    config: TrainerConfig,
    mesh: DeviceMesh,
    *,
    offload: bool,
) -> None:
    """FSDP2 per block and around the rest, over the replicas and shards of the mesh (HSDP)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        mesh = mesh[tuple(name for name in names if name != "tensor")]
    several = mesh["shard"].size() > 1
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    memory = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in blocks if mesh.size() > 1 else ():
        if any(isinstance(module, nn.ModuleList) for module in block.modules()):
            block.register_forward_hook(_with_every_weight)
    for module in (*blocks, policy):
        gathers = several and module is not policy  # the rest is needed again at once, in backward
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=memory, reshard_after_forward=gathers)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum (SH-1)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum


def _with_every_weight(block: nn.Module, _inputs: Any, output: Any) -> Any:
    """The result of a block, in whose graph all of its trained weights are: 0 with a gradient of 0 (SH-4)."""
    empty = [weight.reshape(-1)[:0] for weight in block.parameters() if weight.requires_grad]
    nothing = torch.cat(empty).sum() if empty else 0
    if isinstance(output, tuple):
        return output[0] + nothing, *output[1:]
    return output + nothing


def drop_gathered(policy: nn.Module) -> None:
    """After a forward pass that no backward pass follows: the rows on the ranks are the only weights again."""
    from torch.distributed.fsdp import FSDPModule

    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward for any number of positions. Attention stays outside: it is a kernel already."""
    keep_attention_out_of_graphs()
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


def local_rows(tensor: Tensor) -> Tensor:
    """The rows on this rank as a plain tensor that shares memory with `tensor`."""
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def sum_over_ranks(grads: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of replicas, added up in place. What a rank has no gradient of, such as an expert that none of its
    tokens was routed to, it adds zeros to if another one has: all make the same collectives, and the same update.

    Args:
        params: all that are trained, in one order on all ranks.
    """
    device = next(iter(params.values())).device
    known = torch.tensor([name in grads for name in params], dtype=torch.int32, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    summed = {
        name: grads[name] if name in grads else torch.zeros_like(param)
        for (name, param), anywhere in zip(params.items(), known.tolist(), strict=True)
        if anywhere
    }
    bucket: list[Tensor] = []
    size = 0
    for index, grad in enumerate(summed.values()):
        bucket.append(grad)
        size += grad.numel()
        if size >= BUCKET_ELEMENTS or index == len(summed) - 1:
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
            bucket, size = [], 0
    return summed
