"""What all trainer back ends share around a step: inputs of the objective, sums over ranks, updates left out.

MS-1: sums are added and maxima combined over micro-batches and ranks in the order of ranks, so that every rank rounds
      alike and returns the same `StepResult`.
MS-2: an update that is left out adds nothing to the sums; it is told in `StepResult.skipped`, and the count of those in
      a row starts again with the next one that is made.
MS-3: a GPU has memory for the activations of the largest micro-batch trained so far, and not beside it for those that
      were the largest before: blocks that torch keeps of smaller ones fit none of a larger one, and are given back.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roles.objective import LossInputs, LossOutput
from roles.trainer import NonFiniteError
from roles.trainer_config import TrainerConfig
from roles.types import MicroBatch, RankBatch, StepResult

T = TypeVar("T")


def loss_inputs(
    batch: RankBatch,
    update: int,
    micro: MicroBatch,
    scores: Tensor,
    entropy: Tensor,
    *,
    old: Tensor | None,
    critic: bool = False,
) -> LossInputs:
    """Put what the model says of the chosen positions back into columns, beside what the rollout said.

    Args:
        scores: [K] logprobs with gradient, or values of a critic, in the order of the mask.
        entropy: [K].
        old: [B, L] logprobs at the start of the step; None: they are the current ones.
    """
    device = scores.device

    def on_device(array: np.ndarray) -> Tensor:
        return brought(array, device)

    mask = on_device(micro.mask)
    columns = in_columns(mask, scores)
    logprobs = torch.zeros_like(columns) if critic else columns
    reference, values, returns = micro.reference_logprobs, micro.values, micro.returns
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None or critic else old,
        rollout_logprobs=on_device(micro.rollout_logprobs),
        advantages=on_device(micro.advantages),
        mask=mask,
        entropy=in_columns(mask, entropy),
        ages=on_device(micro.ages),
        reference_logprobs=None if reference is None else on_device(reference),
        values=columns if critic else None,
        old_values=None if values is None else on_device(values),
        returns=None if returns is None else on_device(returns),
        num_tokens=batch.num_tokens[update],
        num_sequences=batch.num_sequences[update],
    )


def brought(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device: what came over the wire is read-only. The host does not wait for a GPU: it would have
    nothing to do while the next kernels are called."""
    copy = torch.tensor(array)
    return copy.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else copy


def in_columns(mask: Tensor, values: Tensor) -> Tensor:
    """[B, L] float32 with values [K] where the mask [B, L] is True, in its order, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values)


def micro_loss(
    function: Callable[[LossInputs], LossOutput], inputs: LossInputs, anchor: Tensor
) -> tuple[Tensor, LossOutput]:
    """The loss of one micro-batch, connected to the model whatever the objective does with its inputs.

    Args:
        anchor: what the model says of the trained positions; a sum over none of it joins the graph: 0 with a gradient
            of 0, never NaN, so that every rank makes the same backward pass.
    """
    nothing = anchor.reshape(-1)[:0].sum()
    if not anchor.numel():  # told by its shape: the host does not wait
        return nothing, LossOutput(loss=nothing)
    output = function(inputs)
    return output.loss + nothing, output


class Sums:
    """Sums and maxima of one update on this rank. They are added up on the host, in float64, when all are there: on a
    GPU each addition before would be a kernel of its own."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        """Of each micro-batch, detached."""
        self._said: list[tuple[bool, str, Tensor]] = []
        """Whether it is a maximum, its name, what a micro-batch said."""
        self._known: tuple[dict[str, float], dict[str, float]] | None = None

    def add(self, output: LossOutput) -> None:
        self.losses.append(output.loss.detach())
        self._said += [(False, key, value.detach()) for key, value in output.sums.items()]
        self._said += [(True, key, value.detach()) for key, value in output.maxima.items()]

    def floats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Waits for the device, once: what it is asked again it knows."""
        if self._known is None:
            numbers = _floats([value for _, _, value in self._said])
            sums, maxima = dict[str, float](), dict[str, float]()
            for (greatest, key, _), number in zip(self._said, numbers, strict=True):
                if greatest:
                    known = maxima.get(key, number)
                    maxima[key] = known if known >= number or math.isnan(known) else number
                else:
                    sums[key] = sums.get(key, 0.0) + number
            self._known = sums, maxima
        return self._known


class StepMeasures:
    """What the updates of one step said, from its begin to its `StepResult` (MS-1, MS-2)."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._norms: list[float] = []
        self._skipped: list[str] = []
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, made: Sums, norm: float, skipped: str | None, *, counts: bool = True) -> None:
        """An update has ended.

        Args:
            skipped: why it was left out; None: it was made.
            counts: whether this rank tells its sums; of ranks that share a model only one does.
        """
        if skipped is not None:
            self._skipped.append(skipped)
            return
        self._norms.append(norm)
        if counts:
            sums, maxima = made.floats()
            self._sums = merge((self._sums, sums), operator.add)
            self._maxima = merge((self._maxima, maxima), max)

    def result(self, version: int, learning_rate: float) -> StepResult:
        """The same on every rank. A collective."""
        everywhere = gather((self._sums, self._maxima, time.perf_counter() - self._began))
        return StepResult(
            version=version,
            sums=merge((sums for sums, _, _ in everywhere), operator.add),
            maxima=merge((maxima for _, maxima, _ in everywhere), max),
            grad_norm=sum(self._norms) / len(self._norms) if self._norms else math.nan,
            learning_rate=learning_rate,
            skipped=self._skipped,
            seconds=max(seconds for _, _, seconds in everywhere),
        )


class Skips:
    """Counts updates that were left out in a row (MS-2)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_a_row = 0

    def made(self) -> None:
        self._in_a_row = 0

    def left_out(self, where: str, found: str) -> str:
        """Returns what to tell.

        Raises:
            NonFiniteError: it is one too many.
        """
        self._in_a_row += 1
        text = f"{where}: expected finite numbers, got {found}"
        if self._in_a_row <= self.limit:
            return text
        again = f" {self._in_a_row} updates in a row were so." if self._in_a_row > 1 else ""
        raise NonFiniteError(
            f"trainer: {text}.{again} Weights and optimizer are as before it. Lower [trainer] lr, or look at the "
            "advantages and logprobs of this batch in samples.jsonl"
        )


def describe_non_finite(everywhere: Sequence[tuple[Sequence[str], Sequence[str]]]) -> str:
    """Which losses and which gradients, by rank; the first two of each. `everywhere`: per rank what it found."""
    found = []
    for rank, (losses, gradients) in enumerate(everywhere):
        found += [f"the loss of rank {rank}, {text}" for text in losses[:2]]
        found += [f"the gradient of {name} on rank {rank}" for name in gradients[:2]]
    return "; ".join(found) or "a gradient norm beyond float64"


def merge(everywhere: Iterable[dict[str, float]], join: Callable[[float, float], float]) -> dict[str, float]:
    """In the order of ranks (MS-1)."""
    merged: dict[str, float] = {}
    for values in everywhere:
        for key, value in values.items():
            merged[key] = join(merged[key], value) if key in merged else value
    return merged


def gather(value: T) -> list[T]:
    """The value of every rank, by rank, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def device_of(config: TrainerConfig) -> torch.device:
    """This rank's device: the first GPU that its process sees is its own."""
    available = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError("[trainer] device = 'cuda': torch sees no GPU; use 'auto' or 'cpu', or install torch for CUDA")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def freed_memory(device: torch.device) -> int:
    """Bytes of the device that were in use at some time and are not now."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


class Room:
    """GPU memory for micro-batches of ever new sizes (MS-3). A new largest one is rare: packing evens them out."""

    def __init__(self, device: torch.device) -> None:
        self._give_back: Callable[[], None] = torch.cuda.empty_cache if device.type == "cuda" else _nothing
        self._most = (0, 0)

    def make(self, micros: Sequence[MicroBatch], *, padded: bool = False) -> None:
        """Call it before the activations of these micro-batches, with the memory of those before free.

        Args:
            padded: whether the model computes padding as well.
        """
        positions = max(micro.mask.size if padded else int(micro.lengths.sum()) for micro in micros)
        trained = max(int(micro.mask.sum()) for micro in micros)
        most = (max(positions, self._most[0]), max(trained, self._most[1]))
        if most != self._most:
            self._give_back()
            self._most = most


def _nothing() -> None:
    """The CPU's allocator keeps nothing."""


class Background:
    """At most one piece of work in a thread of its own, whose end and error somebody waits for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the piece before, then start this one. Nobody has asked how the piece before ended: it was given up,
        and its error is not one of this one."""
        if self._thread is not None:
            self._thread.join()
        self._error = None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised again by `finish`
                self._error = error

        self._thread = threading.Thread(target=run, name="save")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `finish` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait, and raise what the work raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def casts(config: TrainerConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Lower precision of matrix products for a model whose weights are float32."""
    if config.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.dtype))


def _floats(values: Sequence[Tensor]) -> list[float]:
    """Scalars of a few types, brought to the host together."""
    kinds = dict.fromkeys((value.dtype, value.device) for value in values)
    found = [0.0] * len(values)
    for kind in kinds:
        places = [place for place, value in enumerate(values) if (value.dtype, value.device) == kind]
        for place, number in zip(places, torch.stack([values[i] for i in places]).double().tolist(), strict=True):
            found[place] = number
    return found
