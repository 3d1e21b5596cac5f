"""Checkpoints on disk: folders that are whole or not there, and shards that any number of ranks can read.

    <run>/checkpoints/step-000025/        what `latest` finds; renamed into place when everything is on disk
        manifest.json                     every file with its size, written last
        state.json                        the controller's part: step, version, prompts, what was outstanding
        trainer/rank-00000-of-00002.safetensors ...
    <run>/checkpoints/.step-000050.tmp/   a write under way, or what an interrupted one left; never read

CK-1: a folder appears under its name in one rename, after all files and folders in it were flushed to disk. An
      interruption at any moment leaves the last complete checkpoint as the latest one.
CK-2: `latest` also checks the manifest, so that a folder copied in part is passed over.
CK-3: shards carry their box in the full tensor; they are read box by box, never gathered, and the reading side may have
      other ranks and another layout than the writing side.
CK-4: tensors are stored as they are in memory: what is loaded is bit-identical.
CK-5: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from runtime.errors import TuttiError
from sync.layout import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(TuttiError, ValueError):
    """A checkpoint can't be read (incomplete, of another model, of another format), or can't be written."""


# --- folders ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder(path: str | Path) -> Iterator[Path]:
    """Write a folder that appears whole, or not at all (CK-1).

    Yields a temporary folder beside `path`; leaving flushes it and renames it. An exception removes it and passes on.

    Raises:
        FileExistsError: `path` is there already; a checkpoint is never overwritten.
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"checkpoint {target} is there already; choose another folder or remove it")
    temporary = target.parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(temporary)): file.stat().st_size for file in files}
        (temporary / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1))
        for file in [*files, temporary / MANIFEST]:
            _flush(file)
        for directory in (temporary, *(d for d in temporary.rglob("*") if d.is_dir())):
            _flush(directory)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(target.parent)


def step_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step belongs: `<run>/checkpoints/step-000025`."""
    return Path(run) / "checkpoints" / f"step-{step:06d}"


def complete(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    named = [path for path in (Path(run) / "checkpoints").glob("step-*") if path.name[len("step-") :].isdecimal()]
    return sorted(filter(is_complete, named), key=lambda path: int(path.name.removeprefix("step-")))


def latest(run: str | Path) -> Path | None:
    """The newest complete checkpoint of a run; None when there is none."""
    return next(reversed(complete(run)), None)


def is_complete(path: str | Path) -> bool:
    """Whether every file that the manifest names is there in its size (CK-2)."""
    try:
        sizes: dict[str, int] = json.loads((Path(path) / MANIFEST).read_text())["files"]
        return all((Path(path) / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def prune(run: str | Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints and leftovers of interrupted writes; returns those removed.

    Call it between writes. Removal takes the name away first, so that it can't leave half a checkpoint either.

    Raises:
        ValueError: `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint: keep = {keep}, expected at least 1; set [checkpoint] keep")
    old = complete(run)[:-keep]
    for path in old:
        path.rename(path.parent / f".{path.name}.tmp")
    for leftover in (Path(run) / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover)
    return old


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the controller's part --------------------------------------------------------------------------------------------


def write_state(path: str | Path, state: Mapping[str, Any] | msgspec.Struct) -> None:
    """Put the controller's state into a checkpoint under way: anything that msgspec writes as JSON."""
    (Path(path) / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))


def read_state(path: str | Path, type: Any = dict[str, Any]) -> Any:
    """The controller's state, decoded as `type` (a Struct, or a dict by default).

    Raises:
        CheckpointError: it is missing or not of this type; the text has the path inside the state.
    """
    file = Path(path) / STATE
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {path}: no {STATE}; give a folder such as runs/<name>/checkpoints/step-000025"
        ) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"checkpoint {file}: {error}; it was written by another version, start a new run"
        ) from error


# --- the ranks' part --------------------------------------------------------------------------------------------------


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor of this shape."""

    box: Box
    shape: tuple[int, ...]


class RankHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank's file says about itself and its tensors."""

    format: int = 1
    rank: int
    world: int
    version: int
    steps: int = -1
    """Steps behind the weights, where that is not their version: see `Trainer.load`."""
    updates: int
    """Optimizer updates behind the moments; Adam's bias correction counts them."""
    backend: str = "fsdp"
    """Which back end wrote it: their files differ."""
    model: str = ""
    """Sizes of the model, where its tensors don't tell them."""
    shards: dict[str, Shard]
    """By the name of the tensor in the file: that of the full tensor, with `#1`, `#2` for a second or third box."""
    data_rank: int = -1
    """Whose data the rank computes on, where that is not its own number: ranks that share a model draw alike."""
    python_random: list[Any]
    numpy_random: list[Any]

    @property
    def draws_for(self) -> int:
        """Whose data its random numbers are for."""
        return self.rank if self.data_rank < 0 else self.data_rank

    @property
    def steps_done(self) -> int:
        """Steps behind the weights."""
        return self.version if self.steps < 0 else self.steps


def write_rank(path: str | Path, header: RankHeader, tensors: Mapping[str, Tensor]) -> None:
    """Write one rank's file into a checkpoint under way. Names of `tensors` without a shard are private to the rank.

    Raises:
        CheckpointError: the disk refuses it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = Path(path) / f"rank-{header.rank:05d}-of-{header.world:05d}.safetensors"
    contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    try:
        save_file(contiguous, file, metadata={"tutti": msgspec.json.encode(header).decode()})
        _flush(file)  # here, where it blocks only this rank; the controller's flush then has nothing to wait for
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {file} can't be written: {error}; make room, or choose another run_dir"
        ) from error


class Shards:
    """The rank files of one checkpoint, opened for reading by rows."""

    def __init__(self, path: str | Path, *, backend: str) -> None:
        """Open all rank files. Raises CheckpointError when one is missing, or of another format or back end."""
        from safetensors import safe_open

        self.path = Path(path)
        files = sorted(self.path.glob("rank-*-of-*.safetensors"))
        if not files:
            raise CheckpointError(f"checkpoint {path}: no rank-*.safetensors in it; give the folder that save wrote")
        self._files: list[Any] = [safe_open(file, framework="pt") for file in files]
        self.headers: list[RankHeader] = []
        for file, opened in zip(files, self._files, strict=True):
            try:
                header = msgspec.json.decode((opened.metadata() or {}).get("tutti", ""), type=RankHeader)
            except msgspec.DecodeError as error:
                raise CheckpointError(f"checkpoint {file}: {error}; it was written by another version") from error
            self.headers.append(header)
        written = self.headers[0].backend
        if written != backend:
            raise CheckpointError(
                f"checkpoint {path}: written by [trainer] backend = {written!r}, this run has {backend!r}; set it to "
                f"{written!r}, or start from a model that was exported"
            )
        world = self.headers[0].world
        if [h.rank for h in self.headers] != list(range(world)) or len({h.version for h in self.headers}) != 1:
            raise CheckpointError(
                f"checkpoint {path}: expected {world} rank files of one version, got "
                f"{[(h.rank, h.version) for h in self.headers]} (rank, version); it is incomplete, use an older one"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def private(self, rank: int, name: str) -> Tensor:
        """A tensor that belongs to one rank alone."""
        tensor: Tensor = self._files[rank].get_tensor(name)
        return tensor

    @cached_property
    def _where(self) -> dict[str, list[tuple[Any, str, Shard]]]:
        """Files and boxes of each tensor."""
        found: dict[str, list[tuple[Any, str, Shard]]] = {}
        for header, file in zip(self.headers, self._files, strict=True):
            for key, shard in header.shards.items():
                found.setdefault(key.partition("#")[0], []).append((file, key, shard))
        return found

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Whether all of a tensor can be read, before anything is: every rank finds the same.

        Raises:
            CheckpointError: the tensor is missing, has another shape or type, or parts of it are missing.
        """
        self._check(name, Box.whole(shape), shape, dtype)

    def read(self, name: str, box: Box, shape: tuple[int, ...], into: Tensor) -> None:
        """Fill `into` with a box of a tensor, from whichever files have parts of it (CK-3).

        Raises:
            CheckpointError: the tensor is missing, has another shape or type, or parts of it are missing.
        """
        self._check(name, box, shape, into.dtype)
        for file, key, shard in self._where.get(name, ()):
            common = shard.box.intersect(box)
            if common is not None:
                held = file.get_slice(key)[common.slices_in(shard.box)] if shape else file.get_tensor(key)
                into[common.slices_in(box)] = held

    def _check(self, name: str, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        missing = box.numel
        for file, key, shard in self._where.get(name, ()):
            if shard.shape != shape:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} is {list(shard.shape)}, expected {list(shape)}; it is of another "
                    "model, check [model] path"
                )
            common = shard.box.intersect(box)
            if common is None:
                continue
            held = (file.get_slice(key)[:1] if shape else file.get_tensor(key)).dtype
            if held != dtype:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} is {held}, expected {dtype}; it is of another model, check "
                    "[model] path"
                )
            missing -= common.numel
        if missing:
            raise CheckpointError(
                f"checkpoint {self.path}: {missing} of {box.numel} elements of {name} are in no rank file; it is of "
                "another model, check [model] path"
            )


def random_states() -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    """The states of random, numpy.random and torch, as JSON, JSON and tensors."""
    import torch

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    version, internal, gauss_next = random.getstate()
    return (
        [version, list(internal), gauss_next],
        [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        tensors,
    )


def restore_random_states(shards: Shards, data_rank: int) -> None:
    """Put back what `random_states` gave when a rank with this data was saved: the last of them, since of pipeline
    stages the last one computes losses. What the writer had no rank for stays as it is."""
    import torch

    header = next((header for header in reversed(shards.headers) if header.draws_for == data_rank), None)
    if header is None:
        return
    rank = header.rank
    version, internal, gauss_next = header.python_random
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = header.numpy_random
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(shards.private(rank, "random.torch"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(shards.private(rank, "random.cuda"))
