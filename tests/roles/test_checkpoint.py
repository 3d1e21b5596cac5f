"""Checkpoint folders and shards: CK-1 to CK-4 of `roles.checkpoint`."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from roles import checkpoint
from roles.checkpoint import CheckpointError, RankHeader, Shard, Shards
from sync.layout import Box
from tests.runtime.test_journal import no_file_longer_than


class State(msgspec.Struct):
    step: int
    outstanding: list[int]


def write(run: Path, step: int) -> Path:
    path = checkpoint.step_folder(run, step)
    with checkpoint.folder(path) as temporary:
        (temporary / "trainer").mkdir()
        (temporary / "trainer" / "weights").write_bytes(b"x" * step)
        checkpoint.write_state(temporary, State(step=step, outstanding=[3, 5]))
    return path


def test_folder_appears_whole_with_its_state(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.read_state(path, State) == State(step=7, outstanding=[3, 5])
    assert checkpoint.read_state(path)["step"] == 7
    assert [p.name for p in path.parent.iterdir()] == ["step-000007"]


def test_error_while_writing_leaves_nothing_and_passes_on(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def fail() -> None:
        with checkpoint.folder(checkpoint.step_folder(tmp_path, 2)) as temporary:
            (temporary / "half").write_text("a")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_killed_write_is_never_picked_up_and_is_cleaned_by_prune(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    program = (
        "import os, signal, sys\nfrom roles import checkpoint\n"
        "with checkpoint.folder(checkpoint.step_folder(sys.argv[1], 2)) as temporary:\n"
        "    (temporary / 'half').write_text('a')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=os.getcwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / ".step-000002.tmp" / "half").exists()
    assert checkpoint.latest(tmp_path) == first
    checkpoint.prune(tmp_path, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_folder_copied_in_part_is_passed_over(tmp_path: Path) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    (second / "trainer" / "weights").write_bytes(b"x")
    assert checkpoint.latest(tmp_path) == first
    (first / "trainer" / "weights").unlink()
    assert checkpoint.latest(tmp_path) is None


def test_prune_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 1):
        write(tmp_path, step)
    removed = checkpoint.prune(tmp_path, keep=2)
    assert [p.name for p in removed] == ["step-000001"]
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000002", "step-000010"]
    with pytest.raises(ValueError, match="set \\[checkpoint\\] keep"):
        checkpoint.prune(tmp_path, keep=0)


def test_folders_that_somebody_put_beside_them_are_no_checkpoints(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    shutil.copytree(first, first.with_name("step-000001-keep"))
    shutil.copytree(first, first.with_name("step-best"))
    second = write(tmp_path, 2)
    assert checkpoint.complete(tmp_path) == [first, second]
    checkpoint.prune(tmp_path, keep=1)
    assert checkpoint.complete(tmp_path) == [second]
    assert first.with_name("step-000001-keep").exists()


def test_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(FileExistsError, match="step-000001 is there already"):
        write(tmp_path, 1)


def test_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_unreadable_state_names_file_and_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no state\.json"):
        checkpoint.read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"step": 1, "outstanding": ["x"]}')
    with pytest.raises(CheckpointError, match=r"outstanding\[0\]"):
        checkpoint.read_state(tmp_path, State)


def write_shards(path: Path, full: torch.Tensor, cuts: list[int]) -> None:
    """Rows cut at these places, one file a part."""
    world = len(cuts) - 1
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        header = RankHeader(
            rank=rank,
            world=world,
            version=4,
            updates=9,
            shards={"weight/w": Shard(box=Box((start, 0), (stop, 2)), shape=tuple(full.shape))},
            python_random=[],
            numpy_random=[],
        )
        checkpoint.write_rank(path, header, {"weight/w": full[start:stop]})


@pytest.mark.parametrize("wanted", [(0, 7), (0, 3), (2, 6), (5, 7), (4, 4)])
def test_rows_are_read_from_whichever_files_have_them(tmp_path: Path, wanted: tuple[int, int]) -> None:
    # 7 rows written by three ranks as 0:3, 3:6, 6:7.
    full = torch.randn(7, 2)
    write_shards(tmp_path, full, [0, 3, 6, 7])
    shards = Shards(tmp_path, backend="fsdp")
    start, stop = wanted
    rows = torch.empty(stop - start, 2)
    shards.read("weight/w", Box((start, 0), (stop, 2)), (7, 2), rows)
    assert torch.equal(rows, full[start:stop])
    assert "weight/w" in shards
    assert "weight/x" not in shards


def test_foreign_or_incomplete_shards_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, torch.randn(7, 2), [0, 3, 6, 7])
    shards = Shards(tmp_path, backend="fsdp")
    with pytest.raises(CheckpointError, match=r"of another model, check \[model\] path"):
        shards.read("weight/w", Box.whole((7, 3)), (7, 3), torch.empty(7, 3))
    with pytest.raises(CheckpointError, match=r"float32, expected torch.float64; it is of another model"):
        shards.read("weight/w", Box.whole((7, 2)), (7, 2), torch.empty(7, 2, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="14 of 14 elements of weight/x are in no rank file"):
        shards.read("weight/x", Box.whole((7, 2)), (7, 2), torch.empty(7, 2))
    (tmp_path / "rank-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected 3 rank files of one version"):
        Shards(tmp_path, backend="fsdp")
    with pytest.raises(CheckpointError, match="no rank-"):
        Shards(tmp_path / "trainer", backend="fsdp")


def test_what_the_disk_refuses_is_told(tmp_path: Path) -> None:
    header = RankHeader(rank=0, world=1, version=1, updates=0, shards={}, python_random=[], numpy_random=[])
    with (
        no_file_longer_than(1000),
        pytest.raises(
            CheckpointError, match=r"rank-00000-of-00001.safetensors can't be written: .*; make room, or choose"
        ),
    ):
        checkpoint.write_rank(tmp_path, header, {"weight": torch.zeros(1000)})


def test_random_states_come_back(tmp_path: Path) -> None:
    python_random, numpy_random, tensors = checkpoint.random_states()
    header = RankHeader(
        rank=0, world=1, version=0, updates=0, shards={}, python_random=python_random, numpy_random=numpy_random
    )
    checkpoint.write_rank(tmp_path, header, tensors)
    expected = (random.random(), np.random.rand(), float(torch.rand(())))
    checkpoint.restore_random_states(Shards(tmp_path, backend="fsdp"), 0)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_random_states_go_to_those_who_compute_on_the_same_data(tmp_path: Path) -> None:
    """Written by two pairs of ranks that share a model each."""
    drawn = []
    for rank, data_rank in enumerate((0, 0, 1, 1)):
        torch.manual_seed(data_rank)
        python_random, numpy_random, tensors = checkpoint.random_states()
        header = RankHeader(
            rank=rank,
            world=4,
            version=0,
            updates=0,
            shards={},
            data_rank=data_rank,
            python_random=python_random,
            numpy_random=numpy_random,
        )
        checkpoint.write_rank(tmp_path, header, tensors)
        drawn.append(float(torch.rand(())))
    shards = Shards(tmp_path, backend="fsdp")
    for data_rank in (0, 1, 2):
        torch.manual_seed(9)
        kept = float(torch.rand(()))
        torch.manual_seed(9)
        checkpoint.restore_random_states(shards, data_rank)
        assert float(torch.rand(())) == [drawn[0], drawn[2], kept][data_rank]
