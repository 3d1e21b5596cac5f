"""One launch of a job as a process of its own, watched from outside: what the acceptance programs have in common.

    job -> `python -m runtime.launch` -> metrics.jsonl -> Run     while a thread looks at GPUs and at /proc

LD-1: a run ends within its seconds: SIGTERM first, which lets the step under way be saved, then SIGKILL of its session.
LD-2: what is reported comes from the records of the run; what it can't know of itself (memory, descriptors and GPUs of
      all its processes) is looked at from outside.
LD-3: a number of a run leaves its first steps out (`WARM`): they pay for compilation and memory. Rates are of the steps
      that no evaluation ran beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.table import Row

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smollm2_reasoning_gym.toml"
WARM = 4
"""Steps left out at the start."""
LOOK_SECONDS = 0.2
PAGE = os.sysconf("SC_PAGE_SIZE")

CACHE_BYTES = 6 << 30
"""Of an engine's cache. Engines that start side by side must not measure each other's memory."""
ON_GPU = [
    "trainer.dtype=bfloat16",
    "trainer.token_budget=24576",  # two micro-batches of about 20 thousand tokens, as TRL makes: 20 GB of activations
    "rollout.engine=vllm",
    "rollout.dtype=bfloat16",
    "rollout.max_running=512",
    "rollout.vllm.memory=0.15",
    # One batch runs and the next one waits: side by side both end late. Steps of all that run have graphs.
    f"rollout.vllm.arguments={{max_cudagraph_capture_size=512, kv_cache_memory_bytes={CACHE_BYTES}}}",
    "rollout.prove_every=10",
    "grpo.prompts_per_step=64",
    "reward.workers=4",
    "evaluation.in_flight=64",
    "checkpoint.every=0",
]
"""Settings of every run of SmolLM2: 64 prompts x 8 samples a step, one GPU each for trainer and engine."""
TINY = [
    "rollout.engine=vllm",
    "rollout.max_running=32",
    "grpo.prompts_per_step=4",
    "grpo.samples_per_prompt=4",
    "sampling.max_tokens=24",
    "evaluation.prompts=8",
    "evaluation.samples=2",
    "checkpoint.every=0",
    "data.max_prompt_tokens=64",
]
"""The same on CPU, for a dry run of the programs."""


@dataclass
class Look:
    """All processes of a run at one moment."""

    time: float
    """Epoch seconds, as in the records."""
    resident: int
    """Bytes, summed; shared pages count in each process."""
    controller: int
    """Bytes of the controller alone."""
    descriptors: int
    gpu_memory: list[int]
    gpu_busy: list[int]
    """Percent of the last moment in which a kernel ran, by GPU."""


@dataclass
class Run:
    """One launch."""

    name: str
    folder: Path | None = None
    code: int | None = None
    """Exit code; None when it had to be killed."""
    seconds: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    log: Path | None = None
    error: str = ""
    """What ended it early, where that is known."""

    def values(self, key: str, skip: int = WARM) -> list[float]:
        return [float(r[key]) for r in self.steps[skip:] if r.get(key) is not None]

    def mean(self, key: str, skip: int = WARM) -> float | None:
        found = self.values(key, skip)
        return statistics.fmean(found) if found else None

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "time/step" in record]

    def clock(self) -> list[float]:
        """Seconds of the loop at the end of each step. Waiting for evaluations is not counted."""
        total, ends = 0.0, []
        for record in self.steps:
            total += record["time/step"] - record.get("time/evaluate", 0.0)
            ends.append(total)
        return ends

    def curve(self, key: str = "eval/accuracy") -> list[tuple[int, float, float]]:
        """(step, seconds, value) of every record that has it; the start is step 0."""
        ends = dict(zip([int(r["step"]) for r in self.steps], self.clock(), strict=True))
        return [(int(r["step"]), ends.get(int(r["step"]), 0.0), r[key]) for r in self.records if key in r]

    def exact(self) -> bool:
        """Whether every step keeps the books: issued = trained + dropped + buffered + in flight, one version a step."""
        return all(
            r["pipeline/issued"]
            == r["pipeline/trained"] + r["pipeline/dropped"] + r["pipeline/buffered"] + r["pipeline/in_flight"]
            and r["version"] - r["step"] == self.steps[0]["version"] - self.steps[0]["step"]
            for r in self.steps
        )

    def as_facts(self) -> dict[str, Any]:
        """What is kept of a run: numbers, curves, and a few looks."""
        step = self.mean("time/step")
        work = statistics.fmean(found) if (found := self.undisturbed()) else None
        samples = self._samples()
        stepping = self._while_stepping()
        return {
            "name": self.name,
            "code": self.code,
            "error": self.error or ("" if self.code == 0 else last_error(self.log)),
            "seconds": round(self.seconds, 1),
            "steps": len(self.steps),
            "start_s": round(self.records[0]["elapsed"] - self.clock()[0], 1) if self.steps else None,
            "step_s": step,
            "work_s": work,
            "samples_per_s": samples / work if work else None,
            "tokens_per_s": self._tokens() / work if work else None,
            "accuracy": [[s, round(t, 2), a] for s, t, a in self.curve()],
            "greedy": [[s, round(t, 2), a] for s, t, a in self.curve("eval/greedy")],
            "reward": [[s, round(t, 2), a] for s, t, a in self.curve("reward/mean")],
            "idle_trainer": self.mean("idle/trainer_fraction"),
            "idle_rollout": self.mean("idle/rollout_fraction"),
            "gpu_busy": [
                statistics.fmean(look.gpu_busy[i] for look in stepping) for i in range(len(stepping[0].gpu_busy))
            ]
            if stepping
            else [],
            "pause_ms": _times(1000, self._median("sync/pause_seconds")),
            "sync_ms": _times(1000, self._median("sync/seconds")),
            "sync_bytes": self.mean("sync/bytes"),
            "age_mean": self.mean("age/mean"),
            "age_max": max(self.values("age/max", 0), default=None),
            "kl_k1": self.mean("mismatch/kl_k1"),
            "kl_k3": self.mean("mismatch/kl_k3"),
            "gap": self.mean("mismatch/logprob_gap_mean"),
            "ess": self.mean("mismatch/ess_raw"),
            "ess_truncated": self.mean("mismatch/ess_truncated"),
            "truncated": self.mean("mismatch/truncated_fraction"),
            "length": self.mean("length/mean"),
            "dropped": self.steps[-1]["pipeline/dropped"] if self.steps else None,
            "exact": self.exact() if self.steps else None,
            "parts_s": {p: self.mean(f"time/{p}") for p in ("wait", "train", "publish", "evaluate")},
            "looks": [
                [round(k.time - stepping[0].time, 1), k.resident, k.controller, k.descriptors, *k.gpu_memory]
                for k in stepping[:: max(1, len(stepping) // 100)]
            ],
        }

    def undisturbed(self) -> list[float]:
        """Seconds of the steps after the first `WARM` that no evaluation ran beside."""
        ends, found, evaluating = self.clock(), [], 0.0
        for i, (record, began, ended) in enumerate(zip(self.steps, [0.0, *ends], ends, strict=False)):
            if i >= WARM and evaluating <= 0:
                found.append(ended - began)
            evaluating = max(evaluating - (ended - began), record.get("eval/seconds", 0.0))
        return found

    def _samples(self) -> int:
        """Of one step."""
        if self.folder is None:
            return 0
        grpo = tomllib.loads((self.folder / "job.toml").read_text())["grpo"]
        return int(grpo["prompts_per_step"]) * int(grpo["samples_per_prompt"])

    def _tokens(self) -> float:
        return statistics.fmean(r["rate/tokens_per_second"] * r["time/step"] for r in self.steps[WARM:])

    def _median(self, key: str) -> float | None:
        found = self.values(key)
        return statistics.median(found) if found else None

    def _while_stepping(self) -> list[Look]:
        """The looks between the first counted step and the last."""
        if len(self.steps) <= WARM:
            return []
        began, ended = self.steps[WARM]["time"], self.steps[-1]["time"]
        return [look for look in self.looks if began <= look.time <= ended]


def failed_rows(facts: dict[str, Any]) -> list[Row]:
    """A row that says so, of a run that did not end well; what it has measured until then is true all the same."""
    if not facts.get("error") and facts["code"] == 0:
        return []
    ended = "it had to be killed" if facts["code"] is None else f"exit code {facts['code']}"
    error = (facts.get("error") or ended).split(". ")[0][:200]
    return [Row(name=f"{facts['name']}: failed after {facts['steps']} steps", note=error)]


def measured(facts: dict[str, Any]) -> bool:
    """Whether it did steps beyond those that are left out (LD-3)."""
    return facts.get("step_s") is not None


def shown(value: float | None, form: str, factor: float = 1.0) -> str:
    """A number in a note, "-" where there is none (BT-2)."""
    return "-" if value is None else format(factor * value, form)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


# --- from outside -----------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """The process and all that it started, directly or not."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, more = [], [pid]
    while more:
        found += more
        more = [child for child, parent in parents.items() if parent in more]
    return found


def named(pid: int, prefix: str) -> list[int]:
    """Descendants whose name (as in ps) begins with `prefix`: ranks are called `trainer 0`, `rollout 0`, vLLM's engine
    `VLLM::EngineCore`."""
    found = []
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(one) / "comm").read_text().startswith(prefix):
                found.append(one)
    return found


class Gpus:
    """Memory in use and how busy, of every GPU; empty where there is none."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def memory(self) -> list[int]:
        """Bytes."""
        return [self._asked(lambda handle: self._nvml.nvmlDeviceGetMemoryInfo(handle).used, h) for h in self._handles]

    def busy(self) -> list[int]:
        """Percent of the last moment in which a kernel ran."""
        return [
            self._asked(lambda handle: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu, h) for h in self._handles
        ]

    def holders(self) -> list[dict[str, float]]:
        """GiB by process, of every GPU: for who looks at a failure."""
        found = []
        for handle in self._handles:
            by_process: dict[str, float] = {}
            with contextlib.suppress(self._nvml.NVMLError):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    name = "?"
                    with contextlib.suppress(OSError):
                        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    by_process[f"{name} {process.pid}"] = round((process.usedGpuMemory or 0) / 2**30, 2)
            found.append(by_process)
        return found

    def _asked(self, ask: Callable[[Any], int], handle: Any) -> int:
        """The answer; 0 where the driver has none."""
        try:
            return int(ask(handle))
        except self._nvml.NVMLError:
            return 0


def look_at(pid: int, gpus: Gpus, apart: Collection[int] = ()) -> Look:
    """A process and all that it started, but for those of `apart` and what they started."""
    resident = controller = descriptors = 0
    left_out = {one for root in apart for one in descendants(root)}
    for one in (one for one in descendants(pid) if one not in left_out):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            size = int((Path("/proc") / str(one) / "statm").read_text().split()[1]) * PAGE
            resident += size
            controller = size if one == pid else controller
            descriptors += len(os.listdir(f"/proc/{one}/fd"))
    return Look(time.time(), resident, controller, descriptors, gpus.memory(), gpus.busy())


# --- the launch -------------------------------------------------------------------------------------------------------


class Launch:
    """A running job. Use as a context manager: leaving it ends the job at once if it still runs."""

    def __init__(self, name: str, overrides: Sequence[str], out: Path, *, job: Path = RECIPE, more: Sequence[str] = ()):
        self.run = Run(name, log=out / f"{name}.log")
        self.runs = out / "runs"
        self.began = time.monotonic()
        self.gpus = Gpus()
        command = [sys.executable, "-m", "runtime.launch", *([] if more else [str(job)])]
        command += [*more, f"name={name}", f"run_dir={self.runs}", *overrides]
        environment = dict(os.environ)
        environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
        environment.setdefault("PYTHONWARNINGS", "ignore")
        assert self.run.log is not None
        out.mkdir(parents=True, exist_ok=True)
        self._log = self.run.log.open("ab")
        self._before = set(self.runs.glob(f"{name}*"))
        self._resumed = Path(more[1]) if more else None
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Launch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.process.poll() is None:
            kill_all(self.process.pid)
        self.process.wait()
        self._log.close()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError):
                self.run.looks.append(look_at(self.process.pid, self.gpus))

    @property
    def folder(self) -> Path | None:
        new = self._resumed or next(iter(set(self.runs.glob(f"{self.run.name}*")) - self._before), None)
        return new

    def records(self) -> list[dict[str, Any]]:
        """What the run has written by now."""
        file = None if self.folder is None else self.folder / "metrics.jsonl"
        if file is None or not file.exists():
            return []
        lines = file.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def wait_for(self, ready: Callable[[list[dict[str, Any]]], bool], seconds: float) -> bool:
        """Until the records are as wanted; False when the run ended or the seconds passed first."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if ready(self.records()):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return False

    def finish(self, seconds: float) -> Run:
        """Wait for the end, and at most so long (LD-1)."""
        run = self.run
        try:
            run.code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.code = self.process.wait(15)
        run.seconds = time.monotonic() - self.began
        run.folder, run.records = self.folder, self.records()
        return run


def launch(name: str, overrides: Sequence[str], out: Path, seconds: float, *, job: Path = RECIPE) -> Run:
    """One job from start to end."""
    with Launch(name, overrides, out, job=job) as running:
        return running.finish(seconds)


def run_case(
    say: Callable[[dict[str, Any]], None],
    name: str,
    overrides: Sequence[str],
    out: Path,
    seconds: float,
    label: str = "",
) -> None:
    """A launch of which the facts are said, under `label` if it has one, and the end of the log where it failed."""
    facts = launch(name, overrides, out, seconds).as_facts()
    say(facts | {"name": label or name})
    print(f"{name}: exit code {facts['code']}, {facts['seconds']:.0f} s", flush=True)
    if facts["code"]:
        print(last_lines(out / f"{name}.log"), flush=True)


def last_error(log: Path | None) -> str:
    """The line of a log that says what ended a job; empty where none does."""
    lines = log.read_text(errors="replace").splitlines() if log is not None and log.exists() else []
    return next((line[7:600] for line in reversed(lines) if line.startswith("error: ")), "")


def last_lines(file: Path, count: int = 12) -> str:
    """The end of a log, for who looks at a failure; lines of progress bars and reloads left out."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    kept = [line[:300] for line in lines if "%|" not in line and "layerwise" not in line]
    return "\n".join(f"    {line}" for line in kept[-count:])


def end_well() -> None:
    """SIGTERM ends this program by an exception, so that what it started is ended as well."""

    def leave(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all that it started."""
    kill_each(descendants(pid))


def kill_each(pids: Iterable[int]) -> None:
    """SIGKILL to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """From now on what descends from this process stays so, also when its parent ends first."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def kill_descendants() -> None:
    """SIGKILL to all that this process has started, and to what they have left behind (`adopt_orphans`)."""
    kill_each(pid for pid in descendants(os.getpid()) if pid != os.getpid())


@contextlib.contextmanager
def saying(out: Path, file: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes facts as lines of JSON, at once."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / file).open("a") as lines:

        def say(facts: dict[str, Any]) -> None:
            lines.write(json.dumps(facts) + "\n")
            lines.flush()

        yield say


def read_facts(out: Path, file: str) -> list[dict[str, Any]]:
    """What `saying` has written; of facts with one name the last."""
    path = out / file
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({facts["name"]: facts for facts in found}.values())
