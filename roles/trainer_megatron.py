"""The megatron-core back end of the trainer: tensor, pipeline (also interleaved), expert, context and data parallelism.

MT-1: gradients are summed over micro-batches and data-parallel ranks, with global denominators (A4); the optimizer is
      megatron's distributed one, with float32 master weights, and its norm is that of the whole gradient.
MT-2: weights and routes are addressed in the names and the layer count of the whole model, whatever stage has them
      (`sync.layouts.megatron`).
MT-3: rows are padded to a multiple of the ranks that share one (tensor- and context-parallel) by a sequence of its own
      that trains nothing.
MT-4: a loss or gradient that is not finite is found out on all ranks before the optimizer moves (TR-3).
MT-5: checkpoints are megatron's (dist_checkpointing), in a form that any layout reads; version and RNG lie beside them
      in our rank files. Of a model with adapters those are all that is written (`roles.megatron_lora`).

Assumed: the process's default torch.distributed group is exactly the trainer's ranks.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from roles import checkpoint, hf_folder, kernels, measures, megatron_checkpoint
from roles.measures import Background, Skips, StepMeasures, Sums, gather
from roles.megatron_forward import MegatronForward
from roles.megatron_lora import MegatronLora
from roles.megatron_model import build, transformer_config
from roles.megatron_replay import RouteReplay
from roles.objective import ObjectiveSpec
from roles.trainer import ExportDtype, TrainerConfig, learning_rate
from roles.trainer_config import check_model, megatron_parallel
from roles.types import MicroBatch, RankBatch, StepResult
from sync.layout import Layout
from sync.layouts import megatron as megatron_layout
from sync.layouts.held import Live
from sync.layouts.model import ModelShape


class MegatronTrainer:
    """A `roles.trainer.TrainerBackend` on one rank. Build it on all ranks at once."""

    def __init__(self, config: TrainerConfig, model_path: str) -> None:
        """Make the groups, build this rank's part of the model and load it.

        Raises:
            ValueError: the layout doesn't fit the model, or there is no GPU.
            OSError: the model can't be read.
        """
        check_model(config, model_path)
        self.config = config
        self.model_path = model_path
        self.version = self.steps = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = measures.device_of(config)
        _check_device()
        kernels.use(config.kernels)
        _make_groups(config, self.device)
        measures.seed_everything(config.seed + config.data_rank(self.rank))  # megatron has seeded all GPUs alike
        hugging = json.loads((Path(model_path) / "config.json").read_text())
        self._critic = config.head == "value"
        self.shape = msgspec.structs.replace(ModelShape.of(hugging), critic=self._critic)
        self._settings = transformer_config(hugging, self.shape, config, self.device)
        bare = build(hugging, self.shape, self._settings, config)
        if self.device.type == "cuda":
            bare = [chunk.cuda() for chunk in bare]
        parallel = megatron_parallel(config)
        self._held = megatron_layout.held(self.shape, parallel, parallel.rank(self.rank, self.world))
        self._bare = bare
        self._memory = [Live(chunk) for chunk in bare]
        hf_folder.read_into(model_path, self._held, self._memory, new="score." if self._critic else "")
        replay = RouteReplay(bare, self.shape) if self.shape.experts is not None else None
        self._lora = MegatronLora(config, self.shape, self._held, bare) if config.lora_rank else None
        sharded = self._lora is None  # megatron's optimizer has a share of each gradient, adapters need them whole
        self.chunks: list[nn.Module] = [
            chunk if config.frozen else _wrap(self._settings, chunk, sharded=sharded) for chunk in bare
        ]
        self._forward = MegatronForward(config, self.shape, self.chunks, replay, self.device)
        self._optimizer: Any = None if config.frozen or self._lora is not None else _optimizer(config, self.chunks)
        self._updates = 0
        self._skips = Skips(config.max_skipped)
        self._background = Background()
        self._room = measures.Room(self.device)
        self._unfinished: list[Any] = []

    @property
    def is_last_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

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
        rate = learning_rate(self.config, self.steps)
        version, steps = self.version + 1, self.steps + 1
        old = [None, *(self._scores(micros, temperature) for micros in batch.updates[1:])]
        for update, micros in enumerate(batch.updates):
            if not micros:  # an update without a trained token has none on any rank
                continue
            made = Sums()

            def loss(scores: Tensor, index: int, update: int = update, made: Sums = made) -> tuple[Tensor, Tensor, Any]:
                proximal = old[update]
                micro = batch.updates[update][index]
                known = None if proximal is None else proximal[index]
                inputs = measures.loss_inputs(
                    batch, update, micro, scores[0], scores[1], old=known, critic=self._critic
                )
                total, output = measures.micro_loss(function, inputs, scores)
                made.add(output)
                return total, torch.zeros((), dtype=torch.int, device=scores.device), {}

            self._room.make(micros)
            self._forward.run(micros, temperature, loss, entropy_gradient=bool(objective.options.get("entropy_weight")))
            norm, found = self._apply(f"step {version}, update {update}", made.losses, rate)
            measured.add(made, norm, found, counts=self._speaks)
            if found is None:
                self.version, self.steps = version, steps  # whatever becomes of later updates (TR-2)
        self.version, self.steps = version, steps
        return measured.result(version, rate)

    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        """See `TrainerBackend`: on the last stage; the other stages return nothing."""
        return [[scores.cpu().numpy() for scores in self._scores(micros, temperature)] for micros in batch.updates]

    @property
    def _speaks(self) -> bool:
        """Of the ranks that share a model, one tells what its micro-batches measured."""
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        return self.is_last_stage and first

    @torch.no_grad()
    def _scores(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """[B, L] logprobs of each micro-batch on the last stage; nothing elsewhere."""
        if not micros:
            return []

        def keep(scores: Tensor, index: int) -> Tensor:
            return measures.in_columns(torch.tensor(micros[index].mask, device=scores.device), scores[0])

        return list(self._forward.run(micros, temperature, keep, forward_only=True))

    def _apply(self, update: str, losses: Sequence[Tensor], rate: float) -> tuple[float, str | None]:
        """Check and step. Returns the norm before clipping, and why the update was left out."""
        grads: dict[str, Tensor] = {name: cast(Any, param).main_grad for name, param in self._trained()}
        nothing = torch.ones((), dtype=torch.bool, device=self.device)  # of a stage without adapters
        own = torch.stack([nothing, *(grad.isfinite().all() for grad in grads.values())]).all()
        finite = torch.stack([own, *(loss.isfinite() for loss in losses)]).all().to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite:
            bad_losses = [f"micro-batch {i}: {float(loss)}" for i, loss in enumerate(losses) if not loss.isfinite()]
            bad_grads = [name for name, grad in grads.items() if not grad.isfinite().all()]
            return math.nan, self._left_out(update, bad_losses, bad_grads)
        norm = self._move(rate)
        if self._lora is not None and not math.isfinite(norm):
            return norm, self._left_out(update, [], [])
        self._updates += 1
        self._skips.made()
        return norm, None

    def _left_out(self, update: str, bad_losses: Sequence[str], bad_grads: Sequence[str]) -> str:
        found = measures.describe_non_finite(gather((bad_losses, bad_grads)))
        return self._skips.left_out(update, found)

    def _move(self, rate: float) -> float:
        """Clip and update. Returns the norm before clipping."""
        if self._lora is not None:
            return self._lora.step(rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By name, each name once: chunks of a stage name their layers alike."""
        for number, chunk in enumerate(self._bare):
            where = f" of chunk {number}" if len(self.chunks) > 1 else ""
            yield from ((name + where, p) for name, p in chunk.named_parameters() if p.requires_grad)

    # --- weights, see sync.ports.WeightSource -------------------------------------------------------------------------

    def weight_layout(self) -> Layout:
        """The boxes that this rank holds, in Hugging Face names; with `lora_send = "adapter"` adapters in PEFT's."""
        return self._held.layout if self._adapters is None else self._adapters.layout()

    def weight(self, name: str) -> list[Tensor]:
        """This rank's boxes of a name, in the compute type, as they are now: live memory, valid until the next step."""
        return self._held.views(name, self._memory) if self._adapters is None else self._adapters.weight(name)

    @property
    def _adapters(self) -> MegatronLora | None:
        """What is sent in place of the weights."""
        return self._lora if self.config.lora_send == "adapter" else None

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str, background: bool = False) -> None:
        """Write this rank's part, see `TrainerBackend`."""
        python_random, numpy_random, tensors = checkpoint.random_states()
        shards: dict[str, checkpoint.Shard] = {}
        if self._lora is not None:
            shards, adapters = self._lora.to_save(copy=background)
            tensors |= adapters
        header = checkpoint.RankHeader(
            rank=self.rank,
            world=self.world,
            version=self.version,
            steps=self.steps,
            updates=self._updates,
            backend="megatron",
            model=self._model(),
            shards=shards,
            data_rank=self.config.data_rank(self.rank),
            python_random=python_random,
            numpy_random=numpy_random,
        )
        write = functools.partial(checkpoint.write_rank, folder, header, tensors)
        if self._lora is not None and background:
            self._background.start(write)
            return
        write()
        if self._lora is not None:
            return
        target = Path(folder) / "megatron"
        if self.rank == 0:
            target.mkdir()
        dist.barrier()
        state = megatron_checkpoint.state(self._bare, self._optimizer, self._updates, loading=False)
        if not background:
            megatron_checkpoint.write(state, target)
            return
        writing, self._unfinished = megatron_checkpoint.begin_write(state, target)
        if self.device.type == "cuda":
            self._background.start(writing)
        else:  # weights in CPU memory are their own copy: they are written before they can move
            writing()

    @property
    def save_ended(self) -> bool:
        """Whether a save in the background is on disk, see `TrainerBackend`."""
        return self._background.ended

    def finish_save(self) -> None:
        """Wait for a save in the background, see `TrainerBackend`. Its last lines are collectives, so they run here."""
        self._background.finish()
        unfinished, self._unfinished = self._unfinished, []
        for finish in unfinished:
            finish()

    def load(self, folder: str, version: int | None = None) -> None:
        """Continue from a saved folder, see `TrainerBackend`. Ranks that the writer did not have keep their RNG.

        Raises:
            CheckpointError: it is incomplete, of another model, or of another back end.
        """
        shards = checkpoint.Shards(folder, backend="megatron")
        if (other := shards.headers[0].model) != (own := self._model()):
            raise checkpoint.CheckpointError(
                f"checkpoint {folder}: it is of another model, check [model] path: expected {own}, got {other}"
            )
        updates = shards.headers[0].updates
        if self._lora is not None:
            self._lora.load(shards, updates)
        else:
            state = megatron_checkpoint.state(self._bare, self._optimizer, updates, loading=True)
            megatron_checkpoint.read_into(Path(folder) / "megatron", state, self._bare, self._optimizer, updates)
        self._skips.made()
        self.steps, self._updates = shards.headers[0].steps_done, updates
        self.version = shards.headers[0].version if version is None else version
        checkpoint.restore_random_states(shards, self.config.data_rank(self.rank))

    def _model(self) -> str:
        """What a checkpoint must agree on, whatever the layout."""
        shape = str(msgspec.structs.replace(self.shape, dtype=""))
        return shape if self._lora is None else f"{shape}, {self._lora}"

    def export(self, folder: str, dtype: ExportDtype) -> None:
        """Write the whole model in Hugging Face format, see `TrainerBackend`. Adapters are merged, and also written in
        PEFT's format beside it, in `adapter/`."""
        hf_folder.export(folder, self._held, self._memory, dtype=dtype, start_path=self.model_path, critic=self._critic)
        if self._lora is not None:
            self._lora.export(Path(folder) / "adapter", self.model_path)


def _check_device() -> None:
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            "[trainer] backend = 'megatron' computes on GPUs alone, and torch sees none; use backend = 'fsdp'"
        ) from error


def _make_groups(config: TrainerConfig, device: torch.device) -> None:
    for name in ("megatron", "megatron.core"):
        logging.getLogger(name).setLevel(logging.ERROR)  # quiet by default (R11)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.pipeline_chunks if config.pipeline_chunks > 1 else None,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor_parallel,
        context_parallel_size=config.context_parallel,
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def _wrap(settings: Any, chunk: nn.Module, *, sharded: bool) -> nn.Module:
    settings.finalize_model_grads_func = _finalize
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped: nn.Module = DistributedDataParallel(settings, how, chunk)
    return wrapped


def _finalize(model: list[nn.Module], _num_tokens: Tensor | None = None, **options: Any) -> None:
    """Sum the gradients; the loss is divided already, so there is nothing to divide by (MT-1)."""
    finalize_model_grads(model, None, **options)


def _optimizer(config: TrainerConfig, chunks: list[nn.Module]) -> Any:
    offload: dict[str, Any] = {}
    if config.offload_optimizer:
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.grad_clip,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        use_distributed_optimizer=True,
        **offload,
    )
    return get_megatron_optimizer(settings, chunks)
