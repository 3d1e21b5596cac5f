"""The trainer: what a back end must do on each rank, the actor around it, and the handle that a loop holds.

    Trainer (controller)  --RankBatch-->  TrainerRank (actor, one per rank)  -->  TrainerBackend (trainer_fsdp, ...)

TR-1: gradients and sums are added over micro-batches and ranks; denominators are global (A4). A step on n ranks is the
      step of one process up to float rounding.
TR-2: the version rises by one per step, in the same call that changes the weights, on all ranks or on none.
TR-3: a loss or gradient that is not finite raises on every rank, before the weights of that update are touched.
TR-4: `learning_rate` is a function of the version alone, so that a resumed run can't advance a schedule twice.
TR-5: the handle compares what the ranks return; replicas that differ stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from roles import checkpoint, packing
from roles.objective import ObjectiveSpec
from roles.types import RankBatch, StepResult, TrainSample
from runtime import Actor, endpoint
from sync.ports import SenderPort, WeightSource

if TYPE_CHECKING:
    from runtime import ActorMesh, HostMesh, Owner

ExportDtype = Literal["bfloat16", "float32"]


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[trainer]` table of a job."""

    ranks: int = 1
    """Processes. On GPU one each; on CPU they share the cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where torch sees a GPU (ROCm too), else cpu."""
    strategy: Literal["auto", "fsdp2", "ddp"] = "auto"
    """`fsdp2` shards weights, gradients and optimizer over the ranks; `ddp` keeps a whole copy on each and sums the
    gradients. `auto`: fsdp2 on GPU, ddp on CPU, where memory is shared and small models gain nothing from sharding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products. Master weights, gradients' sums, softmax and optimizer are float32 always."""
    lr: float = 1e-6
    """Peak learning rate of AdamW. 0 leaves every weight bit-identical."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, scaled by the learning rate; on matrices only, not on norms and biases."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient over all ranks; it is scaled down to this. 0: no clipping."""
    warmup_steps: int = 0
    """The learning rate rises linearly over this many steps; the first of them already has a share of it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at `total_steps`."""
    total_steps: int = 0
    """Where `linear` and `cosine` reach 0, in steps counted from the start of the run. Must be 0 for `constant`."""
    token_budget: int = 4096
    """Most padded tokens of one micro-batch (rows x longest row). Bounds activation memory."""
    updates_per_step: int = 1
    """Optimizer updates from one batch. With more than one, logprobs under the weights at the start of the step are
    computed once more before the first update."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the decoder blocks and compute them again in the backward pass: less memory, a third more
    work."""
    threads: int = 0
    """Of torch in each process. 0: derived from the cores of the host and whether generation runs at the same time."""
    seed: int = 0
    """Of torch, numpy and random on the ranks, for objectives that draw. Rank r gets seed + r. 0: that of the job."""

    def __post_init__(self) -> None:
        for name in ("ranks", "token_budget", "updates_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"[trainer] {name} = {getattr(self, name)}: expected at least 1")
        for name in ("lr", "weight_decay", "grad_clip", "warmup_steps", "total_steps", "threads"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"[trainer] {name} = {value}: expected a finite number, at least 0")
        if not all(0 <= beta < 1 for beta in self.betas) or self.eps <= 0:
            raise ValueError(
                f"[trainer] betas = {list(self.betas)}, eps = {self.eps}: expected betas in [0, 1) and eps above 0"
            )
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"[trainer] schedule = {self.schedule!r} needs total_steps above warmup_steps ({self.warmup_steps}), "
                f"got {self.total_steps}; set total_steps to the steps of the run, or schedule = 'constant'"
            )
        if self.schedule == "constant" and self.total_steps:
            raise ValueError(
                f"[trainer] total_steps = {self.total_steps} has no meaning with schedule = 'constant'; "
                "remove it or set schedule = 'linear' or 'cosine'"
            )


def learning_rate(config: TrainerConfig, version: int) -> float:
    """The rate of the step that makes version + 1 out of `version`. Reaches 0 at `total_steps` and stays there."""
    rise = min(1.0, (version + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant" or version < config.warmup_steps:
        return config.lr * rise
    done = min(1.0, (version - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite. The weights are as before the update that the text names."""


class TrainerBackend(WeightSource, Protocol):
    """One rank of a trainer. Calls are made on all ranks in the same order; any of them may be a collective.

    A back end lives on its process's main thread and in the process's default torch.distributed group, if there is one.
    """

    @property
    def version(self) -> int:
        """Steps behind these weights; 0 for the start model."""
        ...

    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        """One optimizer update per list of micro-batches. Raises NonFiniteError (TR-3)."""
        ...

    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        """Per update and micro-batch [B, L] float32 under the current weights; 0 outside the mask."""
        ...

    def save(self, folder: str) -> None:
        """Write this rank's part of model, optimizer, RNG and version into an existing folder."""
        ...

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote, also when it was written by another number of ranks."""
        ...

    def export(self, folder: str, dtype: ExportDtype) -> None:
        """Write the whole model as a Hugging Face folder (rank 0; the others help to gather)."""
        ...


class TrainerRank(SenderPort, Actor):
    """One rank as an actor. All its endpoints run on the main thread, where collectives and CUDA belong."""

    def __init__(self, config: TrainerConfig, model_path: str) -> None:
        from roles.trainer_fsdp import TorchTrainer

        self.backend: TrainerBackend = TorchTrainer(config, model_path)
        self.weight_source = self.backend

    @endpoint
    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        return self.backend.train_step(batch, objective, temperature)

    @endpoint
    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        return self.backend.logprobs(batch, temperature)

    @endpoint
    def save(self, folder: str) -> int:
        self.backend.save(folder)
        return self.backend.version

    @endpoint
    def load(self, folder: str) -> int:
        self.backend.load(folder)
        return self.backend.version

    @endpoint
    def export(self, folder: str, dtype: ExportDtype) -> int:
        self.backend.export(folder, dtype)
        return self.backend.version


class Trainer:
    """What a loop holds: the ranks as one thing. One call at a time; a second one waits in the mailboxes of the ranks.

    Use `Trainer.start`; the constructor is for meshes that exist already.
    """

    def __init__(self, config: TrainerConfig, mesh: ActorMesh, version: int = 0) -> None:
        self.config = config
        self.mesh = mesh
        """The TrainerRank actors, one per rank: what a WeightSession takes."""
        self.version = version
        """Of the weights on the ranks; rises with `train_step`, set by `load`."""

    @classmethod
    async def start(
        cls,
        host: HostMesh,
        config: TrainerConfig,
        model_path: str,
        *,
        owner: Owner | None = None,
    ) -> Trainer:
        """Start the processes, their torch.distributed group and the actors, which load the model.

        Args:
            owner: is told first when a rank dies (R5).

        Raises:
            ActorError: a rank could not load the model; it is an OSError or ValueError too.
        """
        device = _resolve_device(config.device)
        config = msgspec.structs.replace(config, device=device)
        procs = await host.spawn_procs(
            {"rank": config.ranks}, name="trainer", threads=config.threads or None, owner=owner
        )
        await procs.init_process_group("nccl" if device == "cuda" else "gloo")
        mesh = await procs.spawn("trainer", TrainerRank, config, model_path)
        return cls(config, mesh)

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult:
        """Pack, train on all ranks, compare their answers.

        Args:
            temperature: of sampling; logits are divided by it, as the rollout did.

        Raises:
            ValueError: a sample is malformed, or there is nothing to train (see `packing.plan`).
            NonFiniteError: a loss or gradient is not finite; the weights are as before that update.
            RuntimeError: ranks disagree (TR-5).
        """
        _check_temperature(temperature)
        plan = self._plan(samples, self.config.updates_per_step)
        calls = [(batch, objective, temperature) for batch in packing.fill(samples, plan)]
        result: StepResult = _agreed((await self.mesh.train_step.scatter(calls)).values(), "train_step")
        self.version = result.version
        return result

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
        """Logprobs of the completion tokens under the current weights: one [C] float32 array per sample, in order."""
        _check_temperature(temperature)
        plan = self._plan(samples, 1)
        calls = [(batch, temperature) for batch in packing.fill(samples, plan)]
        return packing.unpack(samples, plan, (await self.mesh.logprobs.scatter(calls)).values())

    async def save(self, path: str | Path) -> None:
        """Write model, optimizer, RNG and version of all ranks into a new folder that appears whole (CK-1).

        Raises:
            FileExistsError: the folder is there already.
        """
        with checkpoint.folder(path) as temporary:
            _agreed((await self.mesh.save.call(str(temporary))).values(), "save")

    async def load(self, path: str | Path) -> None:
        """Continue from a saved folder, also one written by another number of ranks.

        Raises:
            CheckpointError: it is incomplete, or of another model.
        """
        self.version = _agreed((await self.mesh.load.call(str(path))).values(), "load")

    async def export(self, path: str | Path, dtype: ExportDtype = "bfloat16") -> None:
        """Write the model as a new Hugging Face folder, with the tokenizer of the start model."""
        with checkpoint.folder(path) as temporary:
            await self.mesh.export.call(str(temporary), dtype)

    def _plan(self, samples: Sequence[TrainSample], updates: int) -> packing.Plan:
        return packing.plan(samples, world=self.config.ranks, token_budget=self.config.token_budget, updates=updates)


def _resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The controller needs to know it for the process group. Torch is imported only where a GPU may be."""
    if device != "auto":
        return device
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"trainer: temperature = {temperature}, expected a finite number above 0: greedy samples have no logprobs "
            "to learn from; set [sampling] temperature"
        )


T = TypeVar("T")


def _agreed(answers: list[T], call: str) -> T:
    """The common answer of all ranks (TR-5). Compared as bytes, so that NaN equals NaN."""
    encoded = [msgspec.msgpack.encode(answer) for answer in answers]
    others = [rank for rank, text in enumerate(encoded) if text != encoded[0]]
    if others:
        raise RuntimeError(
            f"trainer: {call} gave {answers[0]} on rank 0 and {answers[others[0]]} on rank {others[0]} "
            f"(ranks that differ: {others}); replicas have diverged, resume from the last checkpoint"
        )
    return answers[0]
