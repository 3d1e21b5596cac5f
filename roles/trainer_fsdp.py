"""The torch back end of the trainer: any Hugging Face causal model, one process, replicas, or FSDP2 shards.

FS-1: master weights, summed gradients and optimizer are float32; only matrix products use `[trainer] dtype`.
FS-2: gradients are *summed* over micro-batches and ranks, never averaged: the loss has global denominators (A4).
FS-3: the gradient's norm is that of the whole gradient over all ranks; it is clipped once, after the last micro-batch.
FS-4: with one update per step the weights at the start of the step are the current ones, so `old_logprobs` are the
      detached logprobs of the same forward pass and cost nothing. With more updates those of the second and later
      updates are computed once, before the first one.
FS-5: every rank enters every collective, whatever its micro-batches hold: padding micro-batches run forward and
      backward with a loss of zero, and a loss that is not finite is found out together (TR-3).
FS-6: the optimizer works on the local rows as plain tensors: no DTensor arithmetic, one code path for all strategies.

Assumed: the process's default torch.distributed group, if initialised, is exactly the trainer's ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roles import checkpoint
from roles.objective import LossInputs, LossOutput, ObjectiveSpec
from roles.policy_torch import (
    checkpoint_activations,
    decoder_blocks,
    export_policy,
    fuse_norms,
    load_policy,
)
from roles.trainer import ExportDtype, NonFiniteError, TrainerConfig, learning_rate
from roles.types import MicroBatch, RankBatch, StepResult
from sync.layout import Entry, Layout

BUCKET_ELEMENTS = 2**23
"""Gradients of replicas are summed in flat buckets of about this size (32 MiB): few collectives for many tensors."""

T = TypeVar("T")


class TorchTrainer:
    """A `roles.trainer.TrainerBackend` on one rank. Build it on all ranks at once: sharding is a collective."""

    def __init__(self, config: TrainerConfig, model_path: str) -> None:
        """Load the start model and place it.

        Raises:
            OSError, ValueError: the model can't be read or trained, see `roles.policy_torch.load_policy`.
        """
        self.config = config
        self.model_path = model_path
        self.version = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.device = _device(config, self.rank)
        self.strategy = _strategy(config, self.world, self.device)
        self._updates = 0
        _seed(config.seed + self.rank)
        self.policy = load_policy(model_path)
        if config.dtype == "float32":
            fuse_norms(self.policy.model)
        if config.activation_checkpointing:
            checkpoint_activations(decoder_blocks(self.policy.model))
        self.policy.to(self.device)
        if self.strategy == "fsdp2":
            _shard(self.policy, decoder_blocks(self.policy.model), config, self.device, self.world)
        self._params: dict[str, nn.Parameter] = dict(self.policy.model.named_parameters())
        self._local = {name: _local(param) for name, param in self._params.items()}
        self._layout = Layout(tuple(_entry(name, param) for name, param in self._params.items()))
        self._optimizer = _optimizer(config, self._local)

    # --- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        """One step, see `TrainerBackend`; the result is equal on all ranks.

        The entropy carries a gradient when the objective has a non-zero option `entropy_weight`.
        """
        started = time.perf_counter()
        function = objective.resolve()
        entropy_gradient = bool(objective.options.get("entropy_weight"))
        rate = learning_rate(self.config, self.version)
        old = [None, *([self._forward(m, temperature) for m in micros] for micros in batch.updates[1:])]
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        norms = []
        for update, micros in enumerate(batch.updates):
            losses = []
            for index, micro in enumerate(micros):
                inputs = self._inputs(batch, update, micro, temperature, entropy_gradient)
                proximal = old[update]
                if proximal is not None:
                    inputs = dataclasses.replace(inputs, old_logprobs=proximal[index])
                losses.append(_backward(function, inputs, sums, maxima))
            if micros:  # an update without a trained token has none on any rank
                norms.append(self._apply(update, losses, rate))
        self.version += 1
        own = (_floats(sums), _floats(maxima), time.perf_counter() - started)
        everywhere = self._gather(own)
        return StepResult(
            version=self.version,
            sums=_merge((sums_ for sums_, _, _ in everywhere), lambda a, b: a + b),
            maxima=_merge((maxima_ for _, maxima_, _ in everywhere), max),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rate,
            seconds=max(seconds for _, _, seconds in everywhere),
        )

    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        """Per update and micro-batch [B, L] float32 under the current weights, see `TrainerBackend`."""
        return [[self._forward(m, temperature).cpu().numpy() for m in micros] for micros in batch.updates]

    def _inputs(
        self, batch: RankBatch, update: int, micro: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> LossInputs:
        mask, reference = self._tensor(micro.mask), micro.reference_logprobs
        with self._casts():
            logprobs, entropy = self.policy(self._tensor(micro.token_ids), mask, temperature, entropy_gradient)
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=self._tensor(micro.rollout_logprobs),
            advantages=self._tensor(micro.advantages),
            mask=mask,
            entropy=entropy,
            ages=self._tensor(micro.ages),
            reference_logprobs=None if reference is None else self._tensor(reference),
            num_tokens=batch.num_tokens[update],
            num_sequences=batch.num_sequences[update],
        )

    @torch.no_grad()
    def _forward(self, micro: MicroBatch, temperature: float) -> Tensor:
        with self._casts():
            logprobs, _ = self.policy(self._tensor(micro.token_ids), self._tensor(micro.mask), temperature)
        return cast(Tensor, logprobs)

    def _apply(self, update: int, losses: Sequence[Tensor], rate: float) -> float:
        """Sum gradients, check, clip, step. Returns the norm before clipping."""
        if self.strategy == "ddp" and self.world > 1:
            _sum_over_ranks([p.grad for p in self._params.values() if p.grad is not None])
        grads = {name: _local(param.grad) for name, param in self._params.items() if param.grad is not None}
        norm = nn.utils.get_total_norm(list(grads.values())).double()
        facts = torch.stack([torch.stack(list(losses)).double().sum(), norm**2])
        if self.world > 1:
            dist.all_reduce(facts)
        loss, square = (float(fact) for fact in facts)
        norm_everywhere = math.sqrt(square if self.strategy == "fsdp2" else square / self.world)
        if not (np.isfinite(loss) and np.isfinite(norm_everywhere)):
            self._raise_non_finite(update, losses, grads)
        if 0 < self.config.grad_clip < norm_everywhere:
            torch._foreach_mul_(list(grads.values()), self.config.grad_clip / (norm_everywhere + 1e-6))
        for name, local in self._local.items():
            local.grad = grads.get(name)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._updates += 1
        self._forget_gradients()
        return norm_everywhere

    def _raise_non_finite(self, update: int, losses: Sequence[Tensor], grads: dict[str, Tensor]) -> None:
        """Tell which rank, micro-batch and parameter. All ranks are here, because the facts were shared."""
        bad_losses = [f"micro-batch {i}: {float(loss)}" for i, loss in enumerate(losses) if not loss.isfinite()]
        bad_grads = [name for name, grad in grads.items() if not grad.isfinite().all()]
        self._forget_gradients()
        found = []
        for rank, (theirs_losses, theirs_grads) in enumerate(self._gather((bad_losses, bad_grads))):
            found += [f"the loss of rank {rank}, {text}" for text in theirs_losses[:2]]
            found += [f"the gradient of {name} on rank {rank}" for name in theirs_grads[:2]]
        raise NonFiniteError(
            f"trainer: step {self.version + 1}, update {update}: expected finite numbers, got "
            f"{'; '.join(found) or 'a gradient norm beyond float64'}. Weights and optimizer are as before this update. "
            "Lower [trainer] lr, or look at the advantages and logprobs of this batch in samples.jsonl"
        )

    def _forget_gradients(self) -> None:
        for name, param in self._params.items():
            param.grad = None
            self._local[name].grad = None

    # --- weights, see sync.ports.WeightSource -------------------------------------------------------------------------

    def weight_layout(self) -> Layout:
        """The rows of each parameter that this rank holds, in Hugging Face names; a tied head is not listed twice."""
        return self._layout

    def weight(self, name: str) -> Tensor:
        """The local rows of a parameter, float32, as they are now: live memory, valid until the next step."""
        return self._local[name]

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Write this rank's file, see `TrainerBackend`. Replicas are equal, so rank 0 writes for all of them."""
        python_random, numpy_random, tensors = checkpoint.random_states()
        shards = {}
        for name, local in self._local.items() if self.strategy == "fsdp2" or self.rank == 0 else ():
            start, rows = _rows(self._layout.by_name[name])
            moments = self._optimizer.state.get(local, {})
            parts = {"weight": local, **{key: moments[key] for key in ("exp_avg", "exp_avg_sq") if moments}}
            for part, tensor in parts.items():
                shards[f"{part}/{name}"] = checkpoint.Shard(start=start, stop=start + len(_as_rows(local)), rows=rows)
                tensors[f"{part}/{name}"] = _as_rows(tensor)
        header = checkpoint.RankHeader(
            rank=self.rank,
            world=self.world,
            version=self.version,
            updates=self._updates,
            shards=shards,
            python_random=python_random,
            numpy_random=numpy_random,
        )
        checkpoint.write_rank(folder, header, tensors)

    def load(self, folder: str) -> None:
        """Continue from a saved folder, see `TrainerBackend`. Ranks that the writer did not have keep their RNG.

        Raises:
            CheckpointError: it is incomplete, or of another model.
        """
        shards = checkpoint.Shards(folder)
        updates = shards.headers[0].updates
        for name, local in self._local.items():
            start, _ = _rows(self._layout.by_name[name])
            shards.read_rows(f"weight/{name}", start, _as_rows(local))
            if not updates:
                self._optimizer.state.pop(local, None)
                continue
            state: dict[str, Tensor] = {"step": torch.tensor(float(updates), device=self.device)}
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = torch.empty_like(local)
                shards.read_rows(f"{part}/{name}", start, _as_rows(state[part]))
            self._optimizer.state[local] = state
        self.version, self._updates = shards.headers[0].version, updates
        if self.rank < len(shards.headers):
            checkpoint.restore_random_states(shards, self.rank)

    def export(self, folder: str, dtype: ExportDtype) -> None:
        """Write the whole model in Hugging Face format, see `TrainerBackend`."""
        state = {}
        for name, param in self._params.items():
            full = param.detach()
            whole: Tensor = cast(Any, full).full_tensor() if self.strategy == "fsdp2" else full
            if self.rank == 0:
                state[name] = whole.to("cpu", getattr(torch, dtype))
        if self.rank == 0:
            export_policy(self.policy, state, folder, dtype=dtype, start_path=self.model_path)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self.device)  # copies: what came over the wire is read-only

    def _casts(self) -> contextlib.AbstractContextManager[Any]:
        """Lower precision of matrix products; FSDP2 casts by itself."""
        if self.config.dtype == "float32" or self.strategy == "fsdp2":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.config.dtype))

    def _gather(self, value: T) -> list[T]:
        """The value of every rank, by rank, on every rank."""
        if self.world == 1:
            return [value]
        everywhere: list[Any] = [None] * self.world
        dist.all_gather_object(everywhere, value)
        return everywhere


def _backward(
    function: Callable[[LossInputs], LossOutput],
    inputs: LossInputs,
    sums: dict[str, Tensor],
    maxima: dict[str, Tensor],
) -> Tensor:
    """Run the objective and its backward pass, add what it measured; returns the detached loss."""
    # A sum over nothing: 0 with a gradient of 0, never NaN. It joins the graph of a loss that uses no logprob.
    nothing = inputs.logprobs.reshape(-1)[:0].sum()
    if not inputs.mask.any():
        nothing.backward()
        return nothing.detach()
    output = function(inputs)
    (output.loss + nothing).backward()
    for key, value in output.sums.items():
        sums[key] = sums[key] + value.detach() if key in sums else value.detach()
    for key, value in output.maxima.items():
        maxima[key] = torch.maximum(maxima[key], value.detach()) if key in maxima else value.detach()
    return output.loss.detach()


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    if not values:
        return {}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _merge(everywhere: Iterable[dict[str, float]], join: Callable[[float, float], float]) -> dict[str, float]:
    """In the order of ranks, so that every rank rounds alike."""
    merged: dict[str, float] = {}
    for values in everywhere:
        for key, value in values.items():
            merged[key] = join(merged[key], value) if key in merged else value
    return merged


def _sum_over_ranks(grads: Sequence[Tensor]) -> None:
    bucket: list[Tensor] = []
    size = 0
    for index, grad in enumerate(grads):
        bucket.append(grad)
        size += grad.numel()
        if size >= BUCKET_ELEMENTS or index == len(grads) - 1:
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
            bucket, size = [], 0


def _device(config: TrainerConfig, rank: int) -> torch.device:
    """This rank's device: its own GPU when the process sees only that one, else the one of its rank."""
    available = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError("[trainer] device = 'cuda': torch sees no GPU; use 'auto' or 'cpu', or install torch for CUDA")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _strategy(config: TrainerConfig, world: int, device: torch.device) -> Literal["fsdp2", "ddp"]:
    """One rank needs neither and takes the path of replicas, of which it is the only one."""
    if world == 1:
        return "ddp"
    if config.strategy == "auto":
        return "fsdp2" if device.type == "cuda" else "ddp"
    return config.strategy


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _shard(
    policy: nn.Module, blocks: Sequence[nn.Module], config: TrainerConfig, device: torch.device, world: int
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (world,))
    compute = getattr(torch, config.dtype)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*blocks, policy):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum (FS-2)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum


def _local(tensor: Tensor) -> Tensor:
    """The rows on this rank as a plain tensor that shares memory with `tensor`."""
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _entry(name: str, param: Tensor) -> Entry:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtype = str(param.dtype).removeprefix("torch.")
    if not isinstance(param, DTensor):
        return Entry.whole(name, param.shape, dtype)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Entry.rows(name, param.shape, dtype, offset[0], offset[0] + shape[0])


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _rows(entry: Entry) -> tuple[int, int]:
    """First row of the box, and rows of the full tensor; a scalar is one row."""
    return (entry.box.lo[0], entry.shape[0]) if entry.shape else (0, 1)


def _optimizer(config: TrainerConfig, params: dict[str, Tensor]) -> torch.optim.AdamW:
    matrices = [p for p in params.values() if p.ndim >= 2]
    others = [p for p in params.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
