"""RS-2 and RS-5 with real processes: whoever is killed while a checkpoint is written, the one before is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roles import checkpoint
from roles.packing import pack
from roles.trainer_fsdp import TorchTrainer
from runtime import ActorError, this_host
from tests.algorithms.killed_save import CONFIG, begun
from tests.roles.trainer_help import random_samples, save_tiny_model

pytestmark = pytest.mark.timeout(120)


def check_first_checkpoint(folder: Path) -> None:
    """It is the latest, its weights load, and the next write removes what is left of the other one."""
    path = checkpoint.step_folder(folder, 1)
    assert checkpoint.latest(folder) == path
    assert not checkpoint.step_folder(folder, 2).exists()
    batch = pack(random_samples(6), world=1, token_budget=60)[0]
    trainer = TorchTrainer(CONFIG, str(folder / "model"))
    before = trainer.logprobs(batch, 1.0)[0][0]
    trainer.load(str(path / "trainer"))
    assert trainer.version == 1
    assert not np.allclose(before, trainer.logprobs(batch, 1.0)[0][0], atol=1e-3)
    checkpoint.prune(folder, keep=2)
    assert [one.name for one in (folder / "checkpoints").iterdir()] == [path.name]


def test_a_killed_controller_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.algorithms.killed_save", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
    check_first_checkpoint(tmp_path)


async def test_a_killed_rank_leaves_the_checkpoint_before_and_is_told(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    async with this_host() as host:
        checkpoints = await begun(host, tmp_path)
        os.kill(host._meshes["trainer"].pids[0], signal.SIGKILL)
        with pytest.raises(ActorError, match="SIGKILL"):
            await checkpoints.finish()
        await checkpoints.finish()
    check_first_checkpoint(tmp_path)
