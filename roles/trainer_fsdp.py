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
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roles import checkpoint, kernels, measures
from roles.adamw import MOMENTS, AdamW
from roles.fused_layers import fuse_layers, fuses_layers
from roles.lora import Lora, is_adapter
from roles.masters import Masters
from roles.measures import Background, Skips, StepMeasures, Sums, gather
from roles.objective import LossInputs, LossOutput, ObjectiveSpec
from roles.policy_torch import checkpoint_activations, decoder_blocks, export_policy, fuse_norms, load_policy
from roles.sharding import (
    Strategy,
    compile_blocks,
    drop_gathered,
    local_rows,
    mesh_of,
    shard,
    shards_of,
    strategy_of,
    sum_over_ranks,
)
from roles.tensor_parallel import TensorParallel
from roles.trainer import ExportDtype, TrainerConfig, learning_rate
from roles.types import MicroBatch, RankBatch, StepResult
from roles.weights_torch import Weights
from sync.layout import Layout
from sync.layouts.held import Part

FETCHED_PER_BLOCK = 3 * 2**28
"""Bytes of moments that come in during the backward pass of one block: what the bus moves in about 15 ms. When a block
ends FSDP2 waits for a small copy, which stands in the same queue: by then the queue should be empty."""


class TorchTrainer:
    """A `roles.trainer.TrainerBackend` on one rank. Build it on all ranks at once: sharding is a collective."""

    def __init__(self, config: TrainerConfig, model_path: str) -> None:
        """Load the start model and place it.

        Raises:
            OSError, ValueError: the model can't be read or trained, see `roles.policy_torch.load_policy`.
        """
        self.config = config
        self.model_path = model_path
        self.version = self.steps = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.device = measures.device_of(config)
        self.strategy: Strategy = strategy_of(config, self.world, self.device)
        kernels.use(config.kernels)
        measures.seed_everything(config.seed + config.data_rank(self.rank))
        self.policy = load_policy(model_path, head=config.head)
        self._lora = Lora(self.policy.model, config) if config.lora_rank else None
        self._place()
        self._params: dict[str, nn.Parameter] = dict(self.policy.model.named_parameters())
        self._trained = {name: p for name, p in self._params.items() if p.requires_grad and not config.frozen}
        self._local = {name: local_rows(param) for name, param in self._params.items()}
        offload = config.offload_optimizer and self.device.type == "cuda"
        self._optimizer = AdamW({name: self._local[name] for name in self._trained}, config, offload=offload)
        if offload:  # to pin it takes seconds for each 10 GB: now, while rollouts start, and not in the first step
            self._optimizer.reserve(self._trained)
        self._weights = Weights(self.policy.model, self._local, self._lora, config.lora_send)
        self._skips = Skips(config.max_skipped)
        self._background = Background()
        self._room = measures.Room(self.device)
        self._before_update = False
        """Whether the backward pass that runs is the last one before an update."""

    def _place(self) -> None:
        """Fused, compiled, checkpointed and sharded per block, in this order from the inside out."""
        blocks: list[nn.Module] = []
        config = self.config
        fuses = fuses_layers(config, self.device)
        if fuses or (config.dtype == "float32" and self.device.type == "cpu"):
            fuse_norms(self.policy.model, self.device)
        if config.activation_checkpointing or config.compile or config.offload_optimizer or self.strategy == "fsdp2":
            blocks = decoder_blocks(self.policy.model)
        if fuses and self.policy.packed and config.tensor_parallel == 1:
            fuse_layers(self.policy.model, blocks)
        if self.config.offload_optimizer:
            for block in blocks:
                block.register_full_backward_pre_hook(self._fetch_moments)
        if self.config.compile:
            compile_blocks(blocks)
        if self.config.activation_checkpointing:
            checkpoint_activations(blocks)
        offload = self.config.offload_weights and self.device.type == "cuda" and self.strategy == "fsdp2"
        if not offload:
            self.policy.to(self.device)
        alone = (
            self.strategy == "fsdp2" and shards_of(config, self.world) == config.tensor_parallel == 1 and not offload
        )
        self._masters = Masters(self.policy, blocks, getattr(torch, config.dtype)) if alone else None
        if self.strategy == "fsdp2" and not alone:
            mesh = mesh_of(config, self.device, self.world)
            if config.tensor_parallel > 1:
                self.policy.tensor_parallel = TensorParallel(self.policy.model, mesh["tensor"])
            shard(self.policy, blocks, config, mesh, offload=offload)
        if offload:
            for buffer in self.policy.buffers():
                buffer.data = buffer.data.to(self.device)

    # --- training -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        """One step, see `TrainerBackend`; the result is equal on all ranks.

        The entropy carries a gradient when the objective has a non-zero option `entropy_weight`.

        Raises:
            RuntimeError: this trainer is frozen.
        """
        if self.config.frozen:
            raise RuntimeError("trainer: [trainer] frozen = true, so there is nothing to train; set it to false")
        measured = StepMeasures()
        function = objective.resolve()
        entropy_gradient = bool(objective.options.get("entropy_weight"))
        rate = learning_rate(self.config, self.steps)
        version, steps = self.version + 1, self.steps + 1
        self._forget_what_failed()
        old = [None, *(self._forward(micros, temperature) for micros in batch.updates[1:])]
        for update, micros in enumerate(batch.updates):
            if not micros:  # an update without a trained token has none on any rank
                continue
            made = Sums()
            self._room.make(micros, padded=not self.policy.packed)
            self._hold()
            for index, micro in enumerate(micros):
                proximal = old[update]
                known = None if proximal is None else proximal[index]
                self._before_update = index == len(micros) - 1
                scores, entropy = self._score(micro, temperature, entropy_gradient)
                inputs = measures.loss_inputs(
                    batch, update, micro, scores, entropy, old=known, critic=self.policy.head == "value"
                )
                made.add(self._backward(function, inputs, scores))
            if self._masters is not None:
                self._masters.release()
            made.floats()  # before the update: reading them after it would wait for the moments to leave
            norm, found = self._apply(f"step {version}, update {update}", made.losses, rate)
            measured.add(made, norm, found, counts=self._speaks)
            if found is None:
                self._weights.changed()
                self.version, self.steps = version, steps  # whatever becomes of later updates (TR-2)
        self.version, self.steps = version, steps
        return measured.result(version, rate)

    @property
    def _speaks(self) -> bool:
        """Of the ranks that share a model, one tells what its micro-batches measured."""
        return self.rank % self.config.tensor_parallel == 0

    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        """Per update and micro-batch [B, L] float32 under the current weights, see `TrainerBackend`."""
        return [[columns.cpu().numpy() for columns in self._forward(m, temperature)] for m in batch.updates]

    def _score(self, micro: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        positions = self.policy.positions(micro, self.device)
        with contextlib.nullcontext() if self.strategy == "fsdp2" else measures.casts(self.config, self.device):
            scores, entropy = self.policy(positions, temperature, entropy_gradient)
        return scores, entropy

    @torch.no_grad()
    def _forward(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        found = []
        self._hold()
        for micro in micros:
            scores, _ = self._score(micro, temperature, False)
            found.append(measures.in_columns(torch.tensor(micro.mask, device=self.device), scores))
        self._release()
        return found

    def _hold(self) -> None:
        """Before forward passes: weights in the compute type, where they are not gathered block by block."""
        if self._masters is not None:
            self._masters.hold()

    def _release(self) -> None:
        """After them, or after an error: float32 is the only form of the weights again."""
        if self._masters is not None:
            self._masters.release()
        elif self.strategy == "fsdp2":
            drop_gathered(self.policy)

    def _backward(self, function: Callable[[LossInputs], LossOutput], inputs: LossInputs, scores: Tensor) -> LossOutput:
        loss, output = measures.micro_loss(function, inputs, scores)
        loss.backward()
        return output

    def _fetch_moments(self, *_of_the_block: Any) -> None:
        """Before the backward pass of a block, when all of the block behind it is done, FSDP2's copies too: into the
        memory that it has freed, never above what was in use before."""
        if self._before_update:
            self._optimizer.prefetch(min(measures.freed_memory(self.device), FETCHED_PER_BLOCK))

    def _apply(self, update: str, losses: Sequence[Tensor], rate: float) -> tuple[float, str | None]:
        """Sum gradients, check, clip, step. Returns the norm before clipping, and why the update was left out."""
        if self._masters is None:
            grads = {name: local_rows(param.grad) for name, param in self._trained.items() if param.grad is not None}
        else:
            grads = self._masters.gradients(self._trained)
        if self.world > 1 and (self.strategy == "ddp" or self._masters is not None):
            grads = sum_over_ranks(grads, {name: self._local[name] for name in self._trained})
        tensor_parallel = self.policy.tensor_parallel
        if tensor_parallel is None:
            square = nn.utils.get_total_norm(list(grads.values())).double() ** 2
        else:
            tensor_parallel.sum_partial(grads)
            square = tensor_parallel.square(grads)
        facts = torch.stack([torch.stack(list(losses)).double().sum(), square.to(self.device)])
        if self.world > 1:
            dist.all_reduce(facts)
        loss, total = (float(fact) for fact in facts)
        copies = self.config.replicas if self.strategy == "fsdp2" else self.world
        norm_everywhere = math.sqrt(total / copies)
        if not (np.isfinite(loss) and np.isfinite(norm_everywhere)):
            return norm_everywhere, self._left_out(update, losses, grads)
        if 0 < self.config.grad_clip < norm_everywhere:
            torch._foreach_mul_(list(grads.values()), self.config.grad_clip / (norm_everywhere + 1e-6))
        self._optimizer.step(grads, rate)
        self._skips.made()
        self._forget_gradients()
        return norm_everywhere, None

    def _left_out(self, update: str, losses: Sequence[Tensor], grads: dict[str, Tensor]) -> str:
        """Tell which rank, micro-batch and parameter. All ranks are here, because the facts were shared."""
        bad_losses = [f"micro-batch {i}: {float(loss)}" for i, loss in enumerate(losses) if not loss.isfinite()]
        bad_grads = [name for name, grad in grads.items() if not grad.isfinite().all()]
        self._forget_gradients()
        self._optimizer.skip()
        found = measures.describe_non_finite(gather((bad_losses, bad_grads)))
        return self._skips.left_out(update, found)

    def _forget_gradients(self) -> None:
        for param in self._trained.values():
            param.grad = None
        if self._masters is not None:
            self._masters.forget()

    def _forget_what_failed(self) -> None:
        """A step that an error has ended leaves gradients of its micro-batches, and perhaps gathered weights."""
        self.policy.zero_grad()  # of weights that are gathered: they stand in the place of the rows
        self._release()
        self._forget_gradients()

    # --- weights, see sync.ports.WeightSource -------------------------------------------------------------------------

    def weight_layout(self) -> Layout:
        """The boxes of each parameter that this rank holds, in Hugging Face names; a tied head is not listed twice."""
        return self._weights.layout

    def weight(self, name: str) -> list[Tensor]:
        """This rank's boxes of a parameter, float32, as they are now: live memory, valid until the next step."""
        return self._weights.views(name)

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str, background: bool = False) -> None:
        """Write this rank's file, see `TrainerBackend`. Of replicas, which are equal, the first writes for all."""
        python_random, numpy_random, tensors = checkpoint.random_states()
        copies = self.config.replicas if self.strategy == "fsdp2" else self.world
        writes = self.rank < self.world // copies  # the first replica of each shard
        shards = {}
        split = self.policy.tensor_parallel
        for name in self._trained if writes else ():
            if split is not None and not split.writes(name):
                continue
            weight = self._local[name].to("cpu", copy=background)
            for kind, tensor in {"weight": weight, **self._optimizer.moments(name)}.items():
                for number, part in enumerate(self._weights.parts(name)):
                    key = f"{kind}/{name}#{number}" if number else f"{kind}/{name}"
                    shards[key] = checkpoint.Shard(box=part.entry.box, shape=part.entry.shape)
                    tensors[key] = _inside(tensor, part)
        header = checkpoint.RankHeader(
            rank=self.rank,
            world=self.world,
            version=self.version,
            steps=self.steps,
            updates=self._optimizer.updates,
            shards=shards,
            data_rank=self.config.data_rank(self.rank),
            python_random=python_random,
            numpy_random=numpy_random,
        )
        if not background:
            checkpoint.write_rank(folder, header, tensors)
            return
        self._background.start(lambda: checkpoint.write_rank(folder, header, tensors))

    @property
    def save_ended(self) -> bool:
        """Whether a save in the background is on disk, see `TrainerBackend`."""
        return self._background.ended

    def finish_save(self) -> None:
        """Wait for a save in the background, see `TrainerBackend`."""
        self._background.finish()

    def load(self, folder: str, version: int | None = None) -> None:
        """Continue from a saved folder, see `TrainerBackend`. Ranks that the writer did not have keep their RNG.

        Raises:
            CheckpointError: it is incomplete, of another model, or of another back end. Nothing has changed then.
        """
        shards = checkpoint.Shards(folder, backend="fsdp")
        updates = shards.headers[0].updates
        known = [name for name in self._trained if updates and f"exp_avg/{name}" in shards]
        for name in self._trained:
            for kind in ("weight", *(MOMENTS if name in known else ())):
                shards.check(f"{kind}/{name}", tuple(self._params[name].shape), torch.float32)
        self._forget_what_failed()
        self._optimizer.forget()
        self._optimizer.updates = updates
        self._optimizer.reserve(known)
        for name in self._trained:
            local = self._local[name]
            moments = {kind: torch.empty(local.shape) for kind in MOMENTS} if name in known else {}
            for kind, tensor in {"weight": local, **moments}.items():
                for part in self._weights.parts(name):
                    shards.read(f"{kind}/{name}", part.entry.box, part.entry.shape, _inside(tensor, part))
            if moments:
                self._optimizer.set_moments(name, moments)
        self._skips.made()
        self.steps = shards.headers[0].steps_done
        self.version = shards.headers[0].version if version is None else version
        self._weights.changed()
        checkpoint.restore_random_states(shards, self.config.data_rank(self.rank))

    def export(self, folder: str, dtype: ExportDtype) -> None:
        """Write the whole model in Hugging Face format, see `TrainerBackend`. Adapters are merged, and also written in
        PEFT's format beside it, in `adapter/`."""
        state: dict[str, Tensor] = {}
        self._release()
        for name, param in self._params.items():
            full = param.detach()
            whole: Tensor = cast(Any, full).full_tensor() if hasattr(full, "full_tensor") else full
            if self.rank == 0:
                state[name] = whole.to("cpu", copy=True)
        if self.rank != 0:
            return
        adapters = {name: state.pop(name) for name in list(state) if is_adapter(name)}
        if self._lora is not None:
            for name in state:
                if (pair := self._lora.parameters_of(name)) is not None:
                    state[name] = self._lora.merged(state[name], *(adapters[one] for one in pair))
            self._lora.export(adapters, Path(folder) / "adapter", self.model_path)
        state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
        stored = self.policy.model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in self.policy.model.named_buffers() if name in stored}
        export_policy(self.policy, state, folder, dtype=dtype, start_path=self.model_path)


def _inside(local: Tensor, part: Part) -> Tensor:
    """The memory of a box in what this rank holds of its parameter."""
    return local[tuple(slice(start, stop) for start, stop in part.index)]
