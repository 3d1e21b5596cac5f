"""Cases over GPUs, one at a time on each, each a process of its own that writes `PROGRAM.CASE.log`."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Lanes:
    """Runs the cases of a program of this folder.

    Args:
        limits: by case, how many GPUs it takes, and its time limit in seconds.
    """

    def __init__(self, program: str, limits: Mapping[str, tuple[int, float]], out: Path, gpus: Sequence[str]) -> None:
        self._program, self._limits, self._out, self._gpus = program, limits, out, gpus
        self._told = threading.Lock()

    def run(self, cases: Sequence[str]) -> None:
        """All of them: those of one GPU first, then the others, one after the other, if there are GPUs enough."""
        alone: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            if self._limits[case][0] == 1:
                alone.put(case)
        lanes = [threading.Thread(target=self._lane, args=(gpu, alone)) for gpu in self._gpus]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        for case in cases:
            if self._limits[case][0] > 1 and len(self._gpus) >= self._limits[case][0]:
                self._one(case, self._gpus[: self._limits[case][0]])

    def _lane(self, gpu: str, cases: queue.SimpleQueue[str]) -> None:
        while True:
            try:
                case = cases.get_nowait()
            except queue.Empty:
                return
            self._one(case, [gpu])

    def _one(self, case: str, gpus: Sequence[str]) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.gpu.{self._program}", "--out", str(self._out), "--case", case]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        log = self._out / f"{self._program}.{case}.log"
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            try:
                code: int | str = process.wait(self._limits[case][1])
            except subprocess.TimeoutExpired:
                code = "too long"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with self._told:
            print(f"{case}: {code}, {time.perf_counter() - began:.0f} s", flush=True)
            if code:
                print(log.read_text()[-2500:], flush=True)
