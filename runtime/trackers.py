"""Trackers: TensorBoard, Weights & Biases and MLflow get the metrics of a run as the run folder gets them.

TK-1: a tracker gets the line of every step once, in the order of steps, from one thread of its own: neither the run nor
      another tracker waits for a network.
TK-2: what is wrong before the run (package missing, no login, no server) is refused by name; what goes wrong later is
      told once, and the run goes on without that tracker. metrics.jsonl has every line in any case.
TK-3: at most BACKLOG lines wait for a tracker; those that find no place are left out and counted, told at the end.
TK-4: `close` waits for what waits, FINISH_SECONDS at most, and leaves no process of a tracker's library behind.

Adding one is one class with `open`, `metrics` and `close`, and one line of TRACKERS. Their libraries are imported where
they are used, and only by runs that use them.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Literal, Protocol

import msgspec

from runtime.errors import TuttiError

BACKLOG = 1000
"""Lines that may wait for one tracker (TK-3)."""

FINISH_SECONDS = 30.0
"""How long the end of a run waits for a tracker."""

Name = Literal["tensorboard", "wandb", "mlflow"]


class TrackerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    use: list[Name] = []
    """Which trackers get the metrics. Logins and servers come from where their own tools look: WANDB_API_KEY,
    WANDB_MODE=offline, MLFLOW_TRACKING_URI."""
    project: str = "tutti"
    """Project of wandb, experiment of MLflow. TensorBoard writes to `tensorboard/` in the run folder."""


class TrackerError(TuttiError):
    """A tracker can't be used; the text says which and what to change."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What trackers are told about a run."""

    folder: Path
    """The run folder; its name is the name of the run."""
    project: str
    settings: Mapping[str, Any]
    """The resolved job, as nested tables."""


class Tracker(Protocol):
    """One tracker of one run. All calls come from one thread, `open` first."""

    def open(self, run: Run) -> None:
        """Raises TrackerError: it can't be used."""

    def metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """One line: finite numbers, and the epoch seconds of its moment."""

    def close(self) -> None:
        """Finish and let go of everything."""


def check_trackers(config: TrackerConfig) -> None:
    """What can be known before a run exists.

    Raises:
        ValueError: the package of a tracker isn't installed, or a tracker is named twice.
    """
    for name in config.use:
        found = find_spec(name)
        if found is None or found.origin is None:  # without an origin it is a folder of that name, not the package
            raise ValueError(
                f'trackers.use: {name} is not installed; run pip install "tutti[trackers]", or leave it out'
            )
    if len(set(config.use)) < len(config.use):
        raise ValueError(f"trackers.use = {config.use}: one of them is named twice")


class Trackers:
    """The trackers of one run; a context manager. Give `metrics` to the journal to follow."""

    def __init__(self, names: Sequence[Name], run: Run, tell: Callable[[str], None]) -> None:
        """Open them all, at the same time.

        Args:
            tell: gets a line for the user; called in the thread that calls this object.

        Raises:
            TrackerError: one can't be used.
        """
        self._tell = tell
        self._lanes = [_Lane(name, TRACKERS[name]()) for name in names]
        for lane in self._lanes:
            lane.start(run)
        failed = [lane for lane in self._lanes if lane.ended() and lane.failure]
        if failed:
            for lane in failed:
                lane.told = True
            self.close()
            raise TrackerError("; ".join(f"tracker {lane.name}: {lane.failure}" for lane in failed))

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl. Never waits."""
        values = dict(_numbers(row))
        for lane in self._lanes:
            lane.metrics(row["step"], row["time"], values)
            self._tell_failure(lane)

    def close(self) -> None:
        """Wait for what waits, and finish (TK-4)."""
        for lane in self._lanes:
            lane.finish()
        deadline = time.monotonic() + FINISH_SECONDS
        for lane in self._lanes:
            if not lane.ended(max(0.0, deadline - time.monotonic())):
                self._tell(f"tracker {lane.name}: not finished after {FINISH_SECONDS:.0f} s, left as it is")
            self._tell_failure(lane)
            if lane.num_left_out:
                self._tell(f"tracker {lane.name}: {lane.num_left_out} lines found no place and were left out")

    def _tell_failure(self, lane: _Lane) -> None:
        if lane.failure and not lane.told:
            lane.told = True
            self._tell(f"tracker {lane.name}: {lane.failure}; the run goes on without it")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Lane:
    """One tracker, its thread and what waits for it. The thread's first exception, whatever a library that talks to a
    network raises, ends the use of that tracker and nothing else (TK-2)."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.num_left_out = 0
        self.told = False
        self.failure = ""
        """Why the tracker is out of use; empty while it is in use."""
        self._tracker = tracker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"tracker {name}")
        self._places = BoundedSemaphore(BACKLOG)
        self._opened = False

    def start(self, run: Run) -> None:
        self._last = self._submit(self._open, run)

    def metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if self.failure:
            return
        if self._places.acquire(blocking=False):
            self._last = self._submit(self._metrics, step, seconds, values)
        else:
            self.num_left_out += 1

    def finish(self) -> None:
        self._last = self._submit(self._close)
        self._thread.shutdown(wait=False)

    def ended(self, timeout: float | None = None) -> bool:
        """Wait for what was asked for last."""
        return bool(wait([self._last], timeout).done)

    def _submit(self, action: Callable[..., None], *args: Any) -> Future[None]:
        future = self._thread.submit(action, *args)
        future.add_done_callback(self._note)  # called by the thread, before it goes on to the next
        return future

    def _note(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None and not self.failure:
            self.failure = str(error) if isinstance(error, TrackerError) else f"{type(error).__name__}: {error}"

    def _open(self, run: Run) -> None:
        self._tracker.open(run)
        self._opened = True

    def _metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._places.release()
        if not self.failure:
            self._tracker.metrics(step, seconds, values)

    def _close(self) -> None:
        if self._opened:
            self._tracker.close()


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if key not in ("step", "time") and isinstance(value, (int, float)) and math.isfinite(value):
            yield key, float(value)


# --- the trackers -----------------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def open(self, run: Run) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))

    def metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in values.items()])
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; a resumed run of ours goes on in the same run there."""

    def open(self, run: Run) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            wandb.teardown()
            raise TrackerError("no login; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline")
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=_kept_id(run.folder / "wandb.id", lambda: uuid.uuid4().hex[:12]),
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            settings=quiet,
        )

    def metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # ends its service process


class MLflow:
    """A run of MLflow; a resumed run of ours goes on in the same run there."""

    def open(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)

        def new() -> str:
            made = self._client.create_run(experiment, run_name=run.folder.name)
            params = [Param(key, value) for key, value in _flat(run.settings)]
            for start in range(0, len(params), 100):  # the most that one request may hold
                self._client.log_batch(made.info.run_id, params=params[start : start + 100])
            return str(made.info.run_id)

        self._id = _kept_id(run.folder / "mlflow.id", new)

    def metrics(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        moment = int(1000 * seconds)
        self._client.log_batch(self._id, metrics=[Metric(key, value, moment, step) for key, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[Name, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def _kept_id(file: Path, new: Callable[[], str]) -> str:
    """The id that an earlier launch of this run wrote down, else a new one, written down."""
    if not file.exists():
        file.write_text(new(), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)
