"""RE-1 to RE-3 of runtime/rendezvous.py, under a real torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime import RendezvousError, in_torchrun, join_main, torchrun_host


def torchrun(plan: str, ranks: int) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "tests.runtime.torchrun_job",
            plan,
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def test_ranks_of_torchrun_become_workers_and_exit_with_0():
    done = torchrun("stop", 3)
    assert done.returncode == 0, done.stderr
    assert "places [('trainer', 0, 2), ('trainer', 1, 2)]" in done.stdout
    assert "needs 2 processes, but of the 3 ranks of torchrun 1 are free. Start with --nproc-per-node 4" in done.stdout


def test_a_rank_that_comes_after_the_controller_has_ended_exits_with_0_re2():
    done = torchrun("leave", 2)
    assert done.returncode == 0, done.stderr


def test_joined_ranks_fail_when_the_controller_dies():
    assert torchrun("die", 3).returncode != 0


def test_outside_of_torchrun_it_says_what_to_use():
    assert not in_torchrun()
    with pytest.raises(RendezvousError, match="Use this_host"):
        torchrun_host()
    with pytest.raises(RendezvousError, match="not started by torchrun"):
        join_main()
