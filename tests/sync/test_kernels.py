"""KE-1 to KE-3, KF-1 to KF-4, KC-1 to KC-3, RP-1 by Triton's interpreter: the arithmetic and the addresses of the
kernels, on a host without a GPU. The compiled kernels run in `test_gpu`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.roles.megatron_on_cpu import SITE

HAS_TRITON = importlib.util.find_spec("triton") is not None or (SITE / "triton").exists()
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed here; `make unit` installs it")


CASES = ["copy-many", "block-bf16-ue8m0-e4m3fn", "channel-bf16-float32-e4m3fnuz", "packer", "packer-fp32"]
CASES += ["cast-fp32-bf16", "cast-fp32-fp16", "cast-bf16-fp32"]


@pytest.fixture(scope="module")
def said() -> str:
    """What all cases say, in one process: to load torch and Triton takes longer than most of them."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SITE)])
    run = subprocess.run(
        [sys.executable, "-m", "tests.sync.gpu_kernels", *CASES, "--here", "--cpu"],
        capture_output=True,
        text=True,
        timeout=350,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return f"status {run.returncode}: {run.stdout[-4000:]}{run.stderr[-2000:]}"


@pytest.mark.timeout(400)  # interpreted, which takes its time on a busy machine
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_its_definition_bit_for_bit(said: str, case: str) -> None:
    assert f"{case}: equal\n" in said, said
