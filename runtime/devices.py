"""Which GPUs and CPU cores a process may use; decided before it starts.

DE-1: processes that ask for a number of GPUs get them for themselves until their mesh is stopped. Asking for more than
      are free raises `NotEnoughGpus`. Naming GPUs by index shares them.
DE-2: one variable says it: `CUDA_VISIBLE_DEVICES`, on ROCm `HIP_VISIBLE_DEVICES` (several of ROCm's would filter one
      after the other). It lists the own GPUs first, so that they are devices 0 .. n-1, then those of the peers: direct
      copies and handles between GPUs need them to be visible.
DE-3: what the controller itself can't see isn't given to anybody.
DE-4: a process gets `cores // processes` neighbouring cores, those with the fewest processes so far; with fewer cores
      than processes nobody is bound.

Found without any GPU library, from what the drivers publish.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from runtime.errors import NotEnoughGpus

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_ALSO_ON_ROCM = ("ROCR_VISIBLE_DEVICES", _CUDA, "GPU_DEVICE_ORDINAL")
"""Filters of ROCm beside `HIP_VISIBLE_DEVICES`; a child must not inherit one that is applied already."""


class Gpus(msgspec.Struct, frozen=True):
    """The GPUs of this host, as the runtime of their maker names them."""

    names: tuple[str, ...] = ()
    """Index or UUID."""
    rocm: bool = False

    def environment(self, own: Sequence[int]) -> dict[str, str]:
        """What a process with these GPUs (positions in `names`) needs to be started with (DE-2)."""
        others = [i for i in range(len(self.names)) if i not in own]
        value = ",".join(self.names[i] for i in (*own, *others))
        return {_HIP: value} if self.rocm else {_CUDA: value}

    @property
    def unset(self) -> tuple[str, ...]:
        """Variables that such a process must not inherit: second filters (DE-2)."""
        return _ALSO_ON_ROCM if self.rocm else ()


def find_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """GPUs that a process with this environment would see (DE-3).

    Args:
        root: of the file system; another one for tests.
    """
    # Its number in /dev isn't the index of a GPU: a container may have only some of them.
    nvidia = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _entries(root / "dev"))
    if nvidia:
        return Gpus(_filtered(range(nvidia), environment.get(_CUDA)))
    nodes = _entries(root / "sys/class/kfd/kfd/topology/nodes")
    count = sum(_property(node / "properties", "simd_count") > 0 for node in nodes)
    chosen = next((environment[v] for v in (_HIP, *_ALSO_ON_ROCM) if v in environment), None)
    return Gpus(_filtered(range(count), chosen), rocm=True) if count else Gpus()


class GpuPool:
    """Hands out GPUs of one host (DE-1)."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self._taken: dict[int, str] = {}

    def take(self, mesh: str, processes: int, each: int) -> list[tuple[int, ...]]:
        """`each` GPUs for so many processes.

        Raises:
            NotEnoughGpus: fewer are free.
            ValueError: a negative number.
        """
        if each < 0:
            raise ValueError(f"spawn_procs({mesh!r}): expected gpus of 0 or more for each process, got {each}")
        free = [i for i in range(len(self.gpus.names)) if i not in self._taken]
        need = processes * each
        if need > len(free):
            holders = ", ".join(f"{name} has {n}" for name, n in Counter(self._taken.values()).items())
            holders = f" ({holders})" if holders else ""
            raise NotEnoughGpus(
                f"spawn_procs({mesh!r}): {processes} processes with {each} GPU(s) each need {need}; of the "
                f"{len(self.gpus.names)} that this host shows, {len(free)} are free{holders}. "
                "Ask for fewer, stop a mesh, or share by index: gpus=[[0], [0]]"
            )
        given = [tuple(free[i * each : (i + 1) * each]) for i in range(processes)]
        self._taken.update({gpu: mesh for own in given for gpu in own})
        return given

    def share(self, mesh: str, processes: int, chosen: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The GPUs that the user named for each process.

        Raises:
            ValueError: not one list a process.
            NotEnoughGpus: there is no such GPU.
        """
        if len(chosen) != processes:
            raise ValueError(
                f"spawn_procs({mesh!r}): expected gpus for {processes} processes, one list each, got {len(chosen)}"
            )
        for gpu in (g for own in chosen for g in own):
            if not 0 <= gpu < len(self.gpus.names):
                raise NotEnoughGpus(
                    f"spawn_procs({mesh!r}): no GPU {gpu}; this host shows {len(self.gpus.names)}, counted from 0"
                )
        return [tuple(own) for own in chosen]

    def give_back(self, gpus: Iterable[int]) -> None:
        """Their process is stopped."""
        for gpu in gpus:
            self._taken.pop(gpu, None)


class CorePool:
    """Shares the cores of one host (DE-4)."""

    def __init__(self, cores: Iterable[int]) -> None:
        self._load = dict.fromkeys(sorted(cores), 0)

    def take(self, processes: int) -> tuple[int, ...]:
        """The cores of one of so many processes; none when there are too few to share."""
        cores = list(self._load)
        width = len(cores) // max(processes, 1)
        if not width or width == len(cores):
            return ()
        starts = range(0, len(cores) - width + 1, width)
        best = min(starts, key=lambda at: sum(self._load[core] for core in cores[at : at + width]))
        own = tuple(cores[best : best + width])
        for core in own:
            self._load[core] += 1
        return own

    def give_back(self, cores: Iterable[int]) -> None:
        for core in cores:
            self._load[core] -= 1


def _filtered(found: Iterable[int], chosen: str | None) -> tuple[str, ...]:
    """What a filter of the user leaves: the runtimes stop at the first entry that they don't know."""
    names = [str(i) for i in found]
    if chosen is None:
        return tuple(names)
    kept: list[str] = []
    for entry in (e.strip() for e in chosen.split(",")):
        known = entry in names if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
        if not known:
            break
        kept.append(entry)
    return tuple(kept)


def _entries(folder: Path) -> list[Path]:
    return [folder / name for name in os.listdir(folder)] if folder.is_dir() else []


def _property(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
