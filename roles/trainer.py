"""The trainer: what a back end must do on each rank, the actor around it, and the handle that a loop holds.

    Trainer (controller)  --RankBatch-->  TrainerRank (actor, one per rank)  -->  TrainerBackend (trainer_fsdp, ...)

TR-1: gradients and sums are added over micro-batches and ranks; denominators are global (A4). A step on n ranks is the
      step of one process up to float rounding.
TR-2: the version rises by one per step, in the same call that changes the weights, on all ranks or on none. A step that
      fails after one of its updates was made has risen it too. It never goes back where rollouts have seen it: who
      loads old weights beside them gives them a new number. The schedule of the learning rate counts steps, not
      versions.
TR-3: a loss or gradient that is not finite is found out together, before the weights of that update are touched. The
      update is left out on every rank and told in `StepResult.skipped`; after `max_skipped` in a row one more raises.
TR-4: a batch is packed for the data-parallel ranks; ranks that share one model get the same data.
TR-5: the handle compares what the ranks return; replicas that differ stop the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from roles import checkpoint, packing
from roles.objective import ObjectiveSpec
from roles.trainer_config import TrainerConfig, check_model, learning_rate
from roles.types import RankBatch, StepResult, TrainSample
from roles.vllm_transfer_ports import TransferSender
from runtime import Actor, ActorError, TuttiError, endpoint
from sync.ports import SenderPort, WeightSource

if TYPE_CHECKING:
    from runtime import ActorMesh, HostMesh, Owner

__all__ = [
    "ExportDtype",
    "NonFiniteError",
    "Trainer",
    "TrainerBackend",
    "TrainerConfig",
    "TrainerRank",
    "learning_rate",
]

ExportDtype = Literal["bfloat16", "float32"]

ASK_SECONDS = 10.0
"""For ranks to tell their version: they do, whatever their main threads do."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite. The weights are as before the update that the text names."""


class TrainerBackend(WeightSource, Protocol):
    """One rank of a trainer. Calls are made on all ranks in the same order; any of them may be a collective.

    A back end lives on its process's main thread and in the process's default torch.distributed group, if there is one.
    """

    @property
    def version(self) -> int:
        """Of these weights: 0 for the start model, one more with each step, or as `load` was told."""
        ...

    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        """One optimizer update per list of micro-batches. Raises NonFiniteError (TR-3)."""
        ...

    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        """Per update and micro-batch [B, L] float32 under the current weights; 0 outside the mask. Of a critic: values.

        Of ranks that share a model, the one that `Trainer.logprobs` reads has them; others may return nothing.
        """
        ...

    def save(self, folder: str, background: bool = False) -> None:
        """Write this rank's part of model, optimizer, RNG and version into an existing folder.

        Args:
            background: return as soon as what is to be written is a copy in CPU memory; `finish_save` waits for it.
        """
        ...

    @property
    def save_ended(self) -> bool:
        """Whether this rank has nothing left to write, so that `finish_save` returns at once."""
        ...

    def finish_save(self) -> None:
        """Wait until a save in the background is on disk. Raises what went wrong with it."""
        ...

    def load(self, folder: str, version: int | None = None) -> None:
        """Continue from what `save` wrote, also when it was written by another number of ranks or layout.

        Args:
            version: that the weights get; None: the one that they had.
        """
        ...

    def export(self, folder: str, dtype: ExportDtype) -> None:
        """Write the whole model as a Hugging Face folder (rank 0; the others help to gather)."""
        ...


class TrainerRank(TransferSender, SenderPort, Actor):
    """One rank as an actor. All its endpoints run on the main thread, where collectives and CUDA belong."""

    def __init__(self, config: TrainerConfig, model_path: str) -> None:
        self.backend: TrainerBackend = _backend(config, model_path)
        self.weight_source = self.backend

    @endpoint
    def train_step(self, batch: RankBatch, objective: ObjectiveSpec, temperature: float) -> StepResult:
        return self.backend.train_step(batch, objective, temperature)

    @endpoint(concurrency=2)
    async def version(self) -> int:
        return self.backend.version

    @endpoint
    def logprobs(self, batch: RankBatch, temperature: float) -> list[list[np.ndarray]]:
        return self.backend.logprobs(batch, temperature)

    @endpoint
    def save(self, folder: str, background: bool = False) -> int:
        self.backend.save(folder, background)
        return self.backend.version

    @endpoint
    def save_ended(self) -> bool:
        return self.backend.save_ended

    @endpoint
    def finish_save(self) -> int:
        self.backend.finish_save()
        return self.backend.version

    @endpoint
    def load(self, folder: str, version: int | None = None) -> int:
        self.backend.load(folder, version)
        return self.backend.version

    @endpoint
    def export(self, folder: str, dtype: ExportDtype) -> int:
        self.backend.export(folder, dtype)
        return self.backend.version


def _backend(config: TrainerConfig, model_path: str) -> TrainerBackend:
    if config.backend == "megatron":
        from roles.trainer_megatron import MegatronTrainer

        return MegatronTrainer(config, model_path)
    from roles.trainer_fsdp import TorchTrainer

    return TorchTrainer(config, model_path)


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
        self.moving = asyncio.Lock()
        """Held while they and their number change, and by whoever sends them beside the loop: the number that it says
        is then that of the weights which the ranks read."""
        self._writing: contextlib.ExitStack | None = None
        self._saving = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        host: HostMesh,
        config: TrainerConfig,
        model_path: str,
        *,
        name: str = "trainer",
        owner: Owner | None = None,
        gpus: Sequence[Sequence[int]] = (),
    ) -> Trainer:
        """Start the processes, their torch.distributed group and the actors, which load the model.

        Args:
            name: role in messages and logs; a second trainer on a host (a reference, a critic) needs its own.
            owner: is told first when a rank dies (R5).
            gpus: of each rank, one index of this host's GPUs. Left out on a machine with GPUs: that of its number.

        Raises:
            NotEnoughGpus: a rank would have none.
            ValueError: the layout doesn't fit the model (before any process starts).
            ActorError: a rank could not load the model; it is an OSError or ValueError too.
        """
        check_model(config, model_path)
        device = _resolve_device(config.device)
        config = msgspec.structs.replace(config, device=device)
        procs = await host.spawn_procs(
            {"rank": config.ranks},
            name=name,
            threads=config.threads or None,
            owner=owner,
            gpus=0 if device == "cpu" else gpus or [[rank] for rank in range(config.ranks)],
        )
        await procs.init_process_group("nccl" if device == "cuda" else "gloo")
        mesh = await procs.spawn(name, TrainerRank, config, model_path)
        return cls(config, mesh)

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult:
        """Pack, train on all ranks, compare their answers.

        Args:
            temperature: of sampling; logits are divided by it, as the rollout did.

        Raises:
            ValueError: a sample is malformed, or there is nothing to train (see `packing.plan`).
            NonFiniteError: a loss or gradient was not finite, `max_skipped` + 1 times in a row (TR-3).
            RuntimeError: ranks disagree (TR-5).
        """
        _check_temperature(temperature)
        batches = packing.fill(samples, self._plan(samples, self.config.updates_per_step))
        calls = [(batch, objective, temperature) for batch in self._to_ranks(batches)]
        async with self.moving:
            try:
                answers: list[StepResult] = (await self.mesh.train_step.scatter(calls)).values()
            except ActorError:
                await self._ask_version()
                raise
            result = _agreed(answers, "train_step")
            self.version = result.version
        return result

    async def _ask_version(self) -> None:
        """After a step that failed: updates before the error may have moved the weights (TR-2)."""
        with contextlib.suppress(TuttiError):  # of a rank that is gone nobody will send weights
            self.version = max((await self.mesh.version.options(timeout=ASK_SECONDS).call()).values())

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
        """Logprobs of the completion tokens under the current weights: one [C] float32 array per sample, in order.

        Of a critic (`head = "value"`): the value of the state before each token.
        """
        _check_temperature(temperature)
        plan = self._plan(samples, 1)
        calls = [(batch, temperature) for batch in self._to_ranks(packing.fill(samples, plan))]
        answers = (await self.mesh.logprobs.scatter(calls)).values()
        size, last_stage = self.config.row_ranks, self.config.pipeline_parallel - 1
        first = last_stage * size * self.config.data_parallel  # the last stage has them, one rank of each model will do
        return packing.unpack(samples, plan, answers[first::size])

    async def save(self, path: str | Path) -> None:
        """Write model, optimizer, RNG and version of all ranks into a new folder that appears whole (CK-1).

        Raises:
            FileExistsError: the folder is there already.
        """
        await self.begin_save(path)
        await self.finish_save()

    async def begin_save(self, path: str | Path) -> None:
        """Start a save that goes on while training does: returns when all ranks hold a copy of what is to be written.

        `finish_save` makes the folder appear; until then it is not there. One save at a time: a second one waits.
        """
        async with self._saving:
            await self._finish()
            with contextlib.ExitStack() as stack:
                temporary = stack.enter_context(checkpoint.folder(path))
                _agreed((await self.mesh.save.call(str(temporary), True)).values(), "save")
                self._writing = stack.pop_all()

    async def save_ended(self) -> bool:
        """Whether `finish_save` would return at once. A short call to the ranks, to be made between two steps."""
        return self._writing is None or all((await self.mesh.save_ended.call()).values())

    async def finish_save(self) -> None:
        """Wait for the save under way, if any, and make its folder appear (CK-1)."""
        async with self._saving:
            await self._finish()

    async def _finish(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with writing:
            await self.mesh.finish_save.call()

    async def load(self, path: str | Path, version: int | None = None) -> None:
        """Continue from a saved folder, also one written by another number of ranks. Optimizer, schedule and random
        numbers are then as they were.

        Args:
            version: number that the weights get, for a rollout that has served later ones and never goes back:
                `trainer.version + 1`, or of another trainer's rollout `rollout.version + 1`. None: the one they had.

        Raises:
            CheckpointError: it is incomplete, or of another model.
        """
        async with self.moving:
            self.version = _agreed((await self.mesh.load.call(str(path), version)).values(), "load")

    async def export(self, path: str | Path, dtype: ExportDtype = "bfloat16") -> None:
        """Write the model as a new Hugging Face folder, with the tokenizer of the start model."""
        with checkpoint.folder(path) as temporary:
            await self.mesh.export.call(str(temporary), dtype)

    def _plan(self, samples: Sequence[TrainSample], updates: int) -> packing.Plan:
        return packing.plan(
            samples,
            world=self.config.data_parallel,
            token_budget=self.config.token_budget,
            updates=updates,
            multiple=self.config.micro_batch_multiple,
        )

    def _to_ranks(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """The batch of every rank (TR-4)."""
        return [batches[self.config.data_rank(rank)] for rank in range(self.config.ranks)]


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
