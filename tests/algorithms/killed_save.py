"""A run of one real trainer rank that is killed while a checkpoint is written: the program of `test_killed_save.py`.

    python -m tests.algorithms.killed_save FOLDER

Saves step 1, trains a step, begins to save step 2, says so, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from algorithms.admission import Admission
from algorithms.resume import Checkpoints
from algorithms.simulated import CountedPrompts
from roles.trainer import Trainer, TrainerConfig
from runtime import HostMesh, this_host
from tests.roles.trainer_help import clipped, random_samples, spec

CONFIG = TrainerConfig(lr=1e-2, token_budget=60, device="cpu", threads=1)


async def begun(host: HostMesh, folder: Path) -> Checkpoints:
    trainer = await Trainer.start(host, CONFIG, str(folder / "model"))
    prompts = CountedPrompts()
    admission = Admission(prompts, groups_per_step=2, staleness=0)
    checkpoints = Checkpoints(run=folder, every=1, keep=2, trainer=trainer, admission=admission, prompts=prompts)
    await trainer.train_step(random_samples(6), spec(clipped))
    await checkpoints.save(1)
    await trainer.train_step(random_samples(6, 1), spec(clipped))
    await checkpoints.begin(2)
    return checkpoints


async def main() -> None:
    async with this_host() as host:
        await begun(host, Path(sys.argv[1]))
        print("begun", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
