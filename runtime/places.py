"""What each process of a mesh starts with: id, address, environment, GPUs, cores, threads.

PL-1: mistakes in what was asked for are errors before any process starts, and take nothing from others.
PL-2: GPUs and cores go back when the rank is stopped, once.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from runtime.auth import Trust
from runtime.devices import CorePool, GpuPool, find_gpus
from runtime.keeper import Rank
from runtime.messages import ProcessSpec
from runtime.restart import Restart
from runtime.settings import HostSettings
from runtime.sockets import parse_address, unix_address

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]
"""Variables of all ranks, or of each."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for the processes of a mesh; see `HostMesh.spawn_procs`."""

    name: str
    size: int
    env: Environment | None = None
    threads: int | None = None
    gpus: int | Sequence[Sequence[int]] = 0
    pin: bool | None = None
    restart: Restart | None = None


class Places:
    """The places for processes on one host."""

    def __init__(self, settings: HostSettings, trust: Trust, host: str, run_directory: Path) -> None:
        self.gpus = GpuPool(find_gpus(os.environ))
        self._cores = CorePool(os.sched_getaffinity(0))
        self._settings = settings
        self._trust = trust
        self._host = host
        self._run_directory = run_directory
        self._serial = itertools.count()

    def address(self, identity: str) -> str:
        """Where a process of this job listens: a socket in the run directory, or a TCP port that the kernel chooses."""
        if self._settings.listen is None:
            return unix_address(str(self._run_directory / identity))
        return str(parse_address(self._settings.listen)._replace(port=0, path=self._run_directory.name))

    def take(self, wanted: Wanted, controller: str, living: int) -> list[Rank]:
        """Ranks that are ready to be started.

        Args:
            living: how many processes run already.

        Raises:
            TypeError: a variable isn't text.
            NotEnoughGpus, ValueError: as `GpuPool`.
        """
        environments = [_environment(wanted.env, rank) for rank in range(wanted.size)]
        expected = self._settings.processes
        processes = max(living + wanted.size, expected or 0)
        exclusive = isinstance(wanted.gpus, int)
        devices = (
            self.gpus.take(wanted.name, wanted.size, wanted.gpus)
            if isinstance(wanted.gpus, int)
            else self.gpus.share(wanted.name, wanted.size, wanted.gpus)
        )
        pin = expected is not None if wanted.pin is None else wanted.pin
        common = self._common(wanted, controller, processes)
        serial = next(self._serial)
        ranks = []
        for number, (variables, own) in enumerate(zip(environments, devices, strict=True)):
            spec = msgspec.structs.replace(
                common,
                id=f"{serial}-{number}",
                rank=number,
                address=self.address(f"{serial}-{number}"),
                env={**(self.gpus.gpus.environment(own) if own else {}), **variables},
                unset=self.gpus.gpus.unset if own else (),
                cores=self._cores.take(processes) if pin else (),
            )
            rank = Rank(spec, wanted.restart)
            rank.gpus = own if exclusive else ()
            ranks.append(rank)
        return ranks

    def give_back(self, rank: Rank) -> None:
        """A rank was stopped."""
        self.gpus.give_back(rank.gpus)
        self._cores.give_back(rank.spec.cores)

    def _common(self, wanted: Wanted, controller: str, processes: int) -> ProcessSpec:
        """What the processes of a mesh have in common."""
        settings = self._settings
        return ProcessSpec(
            id="",
            name=wanted.name,
            rank=0,
            size=wanted.size,
            controller=controller,
            address="",
            host=self._host,
            trust=self._trust,
            threads=wanted.threads or max(1, len(os.sched_getaffinity(0)) // processes),
            abort_after=settings.abort_after,
            run_directory=str(self._run_directory),
            log_level=settings.log_level(wanted.name),
            sys_path=[os.path.abspath(p) for p in sys.path],
            working_directory=os.getcwd(),
            max_message_bytes=settings.max_message_bytes,
            parent=os.getpid(),
        )


def _environment(env: Environment | None, rank: int) -> dict[str, str]:
    chosen = env(rank) if callable(env) else env or {}
    for key, value in chosen.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"env of rank {rank}: expected text for {key!r}, got {value!r}. Write str(value)")
    return dict(chosen)
