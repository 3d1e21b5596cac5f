"""Trackers get what the run folder gets; what is wrong with one costs the run nothing. Real libraries, real files."""

import threading
from pathlib import Path

import pytest

from runtime import trackers
from runtime.journal import Journal
from runtime.trackers import Run, TrackerConfig, TrackerError, Trackers, check_trackers

SETTINGS = {"seed": 3, "trainer": {"lr": 1e-3}}


def journal_of(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path, "run")


def run_of(folder: Path) -> Run:
    return Run(folder=folder, project="sums", settings=SETTINGS)


def train(journal: Journal, names: list, steps: range, told: list[str]) -> None:
    """Some steps of a run that trackers follow."""
    with Trackers(names, run_of(journal.folder), told.append) as following:
        journal.follow(following.metrics)
        for step in steps:
            journal.metrics(step, {"eval/accuracy": step / 10, "note": "text", "loss": float("nan")})


def test_tensorboard_has_every_number_of_every_step(tmp_path):  # TK-1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told: list[str] = []
    with journal_of(tmp_path) as journal:
        train(journal, ["tensorboard"], range(1, 6), told)
    events = EventAccumulator(str(journal.folder / "tensorboard")).Reload()
    read = [(event.step, round(event.value, 3)) for event in events.Scalars("eval/accuracy")]
    assert read == [(step, step / 10) for step in range(1, 6)]
    assert set(events.Tags()["scalars"]) == {"eval/accuracy", "elapsed"}  # text and what isn't finite: not numbers
    assert told == []


def test_mlflow_has_every_number_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, monkeypatch):  # TK-1
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    told: list[str] = []
    with journal_of(tmp_path) as journal:
        train(journal, ["mlflow"], range(1, 4), told)
    with Journal.resume(journal.folder, 3) as resumed:
        train(resumed, ["mlflow"], range(4, 6), told)
    client = MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "sums"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/accuracy")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, step / 10) for step in range(1, 6)]
    assert run.data.params == {"seed": "3", "trainer.lr": "0.001"}
    assert told == []


def test_wandb_writes_its_file_and_leaves_no_process(tmp_path, monkeypatch):  # TK-4; the suite looks for processes
    monkeypatch.setenv("WANDB_MODE", "offline")
    told: list[str] = []
    with journal_of(tmp_path) as journal:
        train(journal, ["wandb"], range(1, 4), told)
    (record,) = journal.folder.glob("wandb/offline-run-*/*.wandb")
    assert b"eval/accuracy" in record.read_bytes()
    assert told == []


def test_wandb_without_a_login_is_refused_with_the_ways_out(tmp_path, monkeypatch):  # TK-2
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrackerError, match=r"tracker wandb: no login.*wandb login.*WANDB_API_KEY.*WANDB_MODE=offline"):
        Trackers(["wandb"], run_of(tmp_path), print)


def test_a_package_that_is_missing_is_refused_before_the_run(monkeypatch, tmp_path):  # TK-2
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'trackers.use: mlflow is not installed; run pip install "tutti\[trackers\]"'):
        check_trackers(TrackerConfig(use=["mlflow"]))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="named twice"):
        check_trackers(TrackerConfig(use=["wandb", "wandb"]))


def test_a_folder_that_is_called_like_a_package_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    config = TrackerConfig(use=["wandb_of_nobody"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="is not installed"):
        check_trackers(config)


class Failing:
    """A tracker whose server goes away."""

    def open(self, run: Run) -> None:
        self.lines = 0

    def metrics(self, step: int, seconds: float, values: object) -> None:
        self.lines += 1
        if self.lines == 2:
            raise OSError("server gone")
        assert self.lines < 2, "asked again after its failure"

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):  # TK-2
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Failing)
    told: list[str] = []
    with journal_of(tmp_path) as journal:
        train(journal, ["mlflow", "tensorboard"], range(1, 30), told)
    assert told == ["tracker mlflow: OSError: server gone; the run goes on without it"]
    assert len((journal.folder / "metrics.jsonl").read_bytes().splitlines()) == 29


def test_a_tracker_that_is_too_slow_holds_nothing_up_and_says_what_it_missed(tmp_path, monkeypatch):  # TK-3, TK-4
    gate = threading.Event()

    class Slow(Failing):
        def metrics(self, step: int, seconds: float, values: object) -> None:
            gate.wait()

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Slow)
    monkeypatch.setattr(trackers, "BACKLOG", 3)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.0)
    told: list[str] = []
    with journal_of(tmp_path) as journal:
        train(journal, ["mlflow"], range(1, 11), told)
    gate.set()
    assert told[0] == "tracker mlflow: not finished after 0 s, left as it is"
    assert told[1] in [f"tracker mlflow: {left} lines found no place and were left out" for left in (6, 7)]
