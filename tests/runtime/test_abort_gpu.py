"""AB-1 and AB-2 of runtime/abort.py where they matter: ranks in a collective of NCCL. The same steps run with gloo on
any machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from runtime import Actor, endpoint, this_host
from tests.waiting import until

SECONDS = 30
"""For each step, the first use of a GPU included."""


class Summer(Actor):
    def __init__(self, device: str, entered: str) -> None:
        self.device = f"{device}:0" if device == "cuda" else device
        self.entered = Path(entered)

    @endpoint
    def sum(self, failing: int = -1) -> float:
        import torch.distributed as dist

        if dist.get_rank() == failing:
            end = time.monotonic() + SECONDS / 2
            while not self.entered.exists() and time.monotonic() < end:  # who has not begun is just told not to
                time.sleep(0.01)
            raise ValueError(f"no data on rank {failing}")
        if failing >= 0:
            self.entered.touch()
        value = torch.ones(1000, device=self.device)
        dist.all_reduce(value)
        return float(value[0])  # waits for the device

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)], ids=["gloo", "nccl"]
)
async def test_ranks_in_a_collective_are_freed_and_can_meet_again(backend, device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lines: list[str] = []
    async with this_host(abort_after=0.5, preload=[], sink=lines.append) as host:
        async with asyncio.timeout(2 * SECONDS):
            procs = await host.spawn_procs(2, name="trainer", gpus=1 if device == "cuda" else 0)
            await procs.init_process_group(backend)
            summer = await procs.spawn("summer", Summer, device, str(tmp_path / "entered"))
            assert (await summer.sum.call()).values() == [2.0] * 2
        pids = (await summer.pid.call()).values()
        # Rank 0 enters the collective, rank 1 never comes: its error surfaces at once, and rank 0 is freed.
        async with asyncio.timeout(SECONDS):
            with pytest.raises(ValueError, match="no data on rank 1"):
                await summer.sum.call(1)
            assert (await summer.pid.call()).values() == pids
            await until(lambda: any(f"{backend} groups aborted" in line for line in lines))
        # No process had to die for it, and a new group works.
        async with asyncio.timeout(2 * SECONDS):
            await procs.init_process_group(backend)
            assert (await summer.sum.call()).values() == [2.0] * 2
            assert (await summer.pid.call()).values() == pids
    assert not set(pids) & _on_gpus()


def _on_gpus() -> set[int]:
    """Processes that hold memory of an NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return set()
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    return {int(word) for word in told.split() if word.isdecimal()}
