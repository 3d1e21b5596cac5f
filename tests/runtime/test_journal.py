"""`runtime.journal`: JO-1 to JO-8 by name."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.journal import (
    Journal,
    RunFolderInUse,
    latest_job,
    latest_run,
    read_metrics,
    read_samples,
    read_trace,
    runs_of,
)
from runtime.run_files import BUFFERED, RunFolderError


def bars(folder: Path) -> list[dict]:
    return [event for event in read_trace(folder) if event["ph"] == "X"]


def test_a_name_that_exists_gets_the_next_free_suffix(tmp_path: Path):  # JO-1
    names = []
    for _ in range(3):
        with Journal.create(tmp_path / "runs", "try") as journal:
            names.append(journal.folder.name)
    assert names == ["try", "try-2", "try-3"]
    (tmp_path / "runs" / "trying-9").mkdir()
    assert latest_run(tmp_path / "runs", "try") == tmp_path / "runs" / "try-3"
    assert [run.name for run in runs_of(tmp_path / "runs", "try")] == names
    assert latest_run(tmp_path / "runs", "other") is None


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="plain folder name"):
        Journal.create(tmp_path, name)


def test_a_folder_in_use_can_not_be_resumed(tmp_path: Path):  # JO-1
    with Journal.create(tmp_path, "try") as journal:
        with pytest.raises(RunFolderInUse, match="still alive; stop it first"):
            Journal.resume(journal.folder, 0)
    Journal.resume(journal.folder, 0).close()


def test_resuming_a_folder_that_is_not_there_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        Journal.resume(tmp_path / "nothing", 3)


def test_a_line_of_metrics_is_there_when_the_call_returns(tmp_path: Path):  # JO-2
    with Journal.create(tmp_path, "try") as journal:
        journal.metrics(1, {"reward/mean": np.float32(0.5), "tokens": 12, "note": "first", "kl": float("nan")})
        (row,) = read_metrics(journal.folder)
    assert (row["step"], row["reward/mean"], row["tokens"], row["note"], row["kl"]) == (1, 0.5, 12, "first", None)
    assert row["time"] > row["elapsed"] >= 0


def test_steps_go_up_and_lines_are_flat(tmp_path: Path):  # JO-3
    with Journal.create(tmp_path, "try") as journal:
        journal.metrics(3, {})
        with pytest.raises(ValueError, match="step 3 after those of step 3"):
            journal.metrics(3, {})
        with pytest.raises(TypeError, match="'lengths' is a list"):
            journal.metrics(4, {"lengths": [1, 2]})


def test_resume_cuts_what_lies_beyond_the_restored_step(tmp_path: Path):  # JO-3
    with Journal.create(tmp_path, "try") as journal:
        for step in range(1, 6):
            journal.samples(step, [{"text": f"of {step}"}])
            journal.metrics(step, {"reward": step})
    with (journal.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "rew')  # torn by a kill
    with Journal.resume(journal.folder, 3) as resumed:
        assert [row["step"] for row in read_metrics(resumed.folder)] == [1, 2, 3]
        resumed.samples(4, [{"text": "again"}])
        resumed.metrics(4, {"reward": 40})
    rows = read_metrics(journal.folder)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert rows[3]["elapsed"] >= rows[2]["elapsed"]
    assert [row["text"] for row in read_samples(journal.folder)] == ["of 1", "of 2", "of 3", "again"]


def test_settings_are_kept_beside_those_of_the_first_start(tmp_path: Path):  # JO-1
    with Journal.create(tmp_path, "try") as journal:
        assert latest_job(journal.folder) is None
        assert journal.write_job("seed = 1  # from the command line\n").name == "job.toml"
        assert journal.write_job("seed = 1\n").name == "job.toml"
        assert journal.write_job("seed = 2\n").name == "job.2.toml"
        assert journal.write_job("seed = 1\n").name == "job.3.toml"
        assert latest_job(journal.folder) == journal.folder / "job.3.toml"
        assert (journal.folder / "job.toml").read_text() == "seed = 1  # from the command line\n"


def test_a_few_samples_of_each_step_are_kept(tmp_path: Path):
    class Row(msgspec.Struct):
        prompt: str
        reward: float

    with Journal.create(tmp_path, "try", samples_per_step=2) as journal:
        journal.samples(1, [Row("a", 1.0)])
        journal.samples(1, [Row("b", 0.0), Row("c", 0.0)])
        journal.samples(2, [Row("d", 1.0)])
        assert read_samples(journal.folder) == []
        journal.metrics(2, {})
        assert [row["prompt"] for row in read_samples(journal.folder)] == ["a", "b", "d"]


def test_memory_stays_bounded_without_a_step(tmp_path: Path):  # JO-6
    with Journal.create(tmp_path, "try", samples_per_step=10**9) as journal:
        journal.samples(1, ({"n": n} for n in range(BUFFERED + 1)))
        for n in range(BUFFERED + 1):
            journal.add_span("trainer 0", "step", n, n + 1)
        assert len(read_samples(journal.folder)) == BUFFERED + 1
        assert BUFFERED - 10 < len(bars(journal.folder)) <= BUFFERED


def test_trace_names_a_process_per_role_and_a_thread_per_rank(tmp_path: Path):
    with Journal.create(tmp_path, "try") as journal:
        with journal.span("trainer 1", "train_step", step=3):
            journal.instant("controller", "commit", version=4)
        journal.counter("buffered", 3)
    events = read_trace(journal.folder)
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {
        ("process_name", "trainer"),
        ("thread_name", "trainer 1"),
        ("process_name", "controller"),
        ("thread_name", "controller"),
    }
    (bar,) = bars(journal.folder)
    assert bar["name"] == "train_step"
    assert bar["args"] == {"step": 3}
    assert bar["dur"] >= 0
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"value": 3}]


def test_a_span_that_ends_in_an_error_says_which(tmp_path: Path):
    with Journal.create(tmp_path, "try") as journal:
        with pytest.raises(KeyError), journal.span("trainer 0", "step"):
            raise KeyError("x")
    assert bars(journal.folder)[0]["args"] == {"error": "KeyError"}


def test_trace_is_valid_json_at_every_moment(tmp_path: Path):  # JO-4
    with Journal.create(tmp_path, "try") as journal:
        assert read_trace(journal.folder) == []
        for n in range(3):
            journal.add_span("rollout 0", "generate", n, n + 1)
            journal.flush()
            assert len(bars(journal.folder)) == n + 1
    with Journal.resume(journal.folder, 0) as resumed:
        assert len(bars(resumed.folder)) == 3
        resumed.add_span("trainer 0", "train_step", 8, 9)
        resumed.add_span("rollout 0", "generate", 9, 10)
    of_rollout = {(bar["pid"], bar["tid"]) for bar in bars(journal.folder) if bar["name"] == "generate"}
    assert len(of_rollout) == 1
    assert len(bars(journal.folder)) == 5


def test_a_damaged_trace_is_set_aside(tmp_path: Path):  # JO-4
    with Journal.create(tmp_path, "try") as journal:
        journal.add_span("rollout 0", "generate", 0, 1)
    (journal.folder / "trace.json").write_bytes(b"[\n{")
    with Journal.resume(journal.folder, 0):
        assert read_trace(journal.folder) == []
    assert (journal.folder / "trace.damaged.json").exists()


def test_a_killed_run_leaves_files_that_can_be_read_and_resumed(tmp_path: Path):  # JO-2, JO-4
    program = """
import sys
from runtime.journal import Journal
journal = Journal.create(sys.argv[1], "try")
for step in range(1, 10**9):
    for n in range(5):
        journal.add_span("trainer 0", "part", step + n / 5, step + (n + 1) / 5)
    journal.metrics(step, {"reward": step})
    if step == 20:
        print("ready", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd())
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    steps = [row["step"] for row in read_metrics(tmp_path / "try")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20
    assert len(bars(tmp_path / "try")) >= 5 * (len(steps) - 1)
    with Journal.resume(tmp_path / "try", 10) as resumed:
        resumed.metrics(11, {})
    assert len(read_metrics(tmp_path / "try")) == 11


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_bars_of_one_row_follow_or_contain_each_other(tmp_path_factory: pytest.TempPathFactory, spans):  # JO-5
    with Journal.create(tmp_path_factory.mktemp("lanes"), "try") as journal:
        for start, length in sorted(spans, key=sum):  # bars come in the order of their ends
            journal.add_span("rollout 0", "generate", start, start + length)
    rows: dict[int, list[tuple[int, int]]] = {}
    for bar in bars(journal.folder):
        rows.setdefault(bar["tid"], []).append((bar["ts"], bar["ts"] + bar["dur"]))
    for row in rows.values():
        for a, b in row:
            for c, d in row:
                apart, inside = b <= c or d <= a, (a <= c and d <= b) or (c <= a and b <= d)
                assert apart or inside, row


def test_a_closed_journal_refuses_to_write(tmp_path: Path):
    journal = Journal.create(tmp_path, "try")
    journal.close()
    journal.close()
    with pytest.raises(RuntimeError, match="is closed"):
        journal.metrics(1, {})


@contextlib.contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """A disk that is full, as far as this process can tell: a write beyond the limit is cut, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_leaves_whole_files(tmp_path: Path):  # JO-7, JO-4
    with Journal.create(tmp_path, "try") as journal:
        journal.metrics(1, {"tokens": 1})
        journal.instant("trainer 0", "first")
        journal.flush()
        before = read_trace(journal.folder)
        with no_file_longer_than((journal.folder / "trace.json").stat().st_size + 10):
            journal.instant("trainer 0", "second")
            with pytest.raises(
                RunFolderError, match=r"trace.json can't be written: File too large; give the run another"
            ):
                journal.flush()
        assert read_trace(journal.folder) == before
        with no_file_longer_than((journal.folder / "metrics.jsonl").stat().st_size + 10):
            with pytest.raises(RunFolderError, match=r"metrics.jsonl can't be written"):
                journal.metrics(2, {"tokens": 2})
        assert [row["step"] for row in read_metrics(journal.folder)] == [1]
        journal.metrics(2, {"tokens": 2})  # there is room again
    assert [row["step"] for row in read_metrics(journal.folder)] == [1, 2]


def test_what_ended_the_run_is_not_hidden_by_a_full_disk(tmp_path: Path):  # JO-7
    journal = Journal.create(tmp_path, "try")
    with no_file_longer_than(0), pytest.raises(LookupError, match="the reason"), journal:
        journal.instant("trainer 0", "waits for a flush")
        raise LookupError("the reason")


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path):  # JO-7
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunFolderError, match=r"file/runs can't be written: Not a directory; give the run another run_dir"
    ):
        Journal.create(tmp_path / "file" / "runs", "try")


def test_a_line_that_waited_when_the_run_was_killed_is_there_after_a_resume(tmp_path: Path):  # JO-8
    killed = Journal.create(tmp_path, "try")
    killed.metrics(1, {"tokens": 1})
    for step in (2, 3, 4):
        killed.hold(step, {"tokens": step})
    os.close(killed._metrics.fd)  # as a kill does: nothing is closed in order
    with Journal.resume(killed.folder, 3) as journal:
        assert [(row["step"], row["tokens"]) for row in read_metrics(journal.folder)] == [(1, 1), (2, 2), (3, 3)]
        with pytest.raises(ValueError, match="steps go up"):
            journal.metrics(3, {})
        journal.metrics(4, {"tokens": 40})
    assert [row["tokens"] for row in read_metrics(journal.folder)] == [1, 2, 3, 40]
    assert not (journal.folder / "held.jsonl").exists()


def test_a_line_that_waited_and_was_written_is_not_written_again(tmp_path: Path):  # JO-8
    with Journal.create(tmp_path, "try") as journal:
        journal.hold(1, {"tokens": 1})
        journal.hold(2, {"tokens": 2})
        journal.metrics(1, {"tokens": 1, "eval": 0.5})
        journal.close()  # killed between the two lines
    with Journal.resume(journal.folder, 2) as journal:
        pass
    assert [(row["step"], row.get("eval")) for row in read_metrics(journal.folder)] == [(1, 0.5), (2, None)]


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with Journal.create(tmp_path, "try") as journal:
        journal.metrics(1, {})
    assert len(read_metrics(journal.folder)) == 1


def test_a_name_with_wildcards_is_found_as_it_is(tmp_path: Path):  # JO-1
    for name in ("lr[1]", "lr[1]", "lr1", "*", "**"):
        Journal.create(tmp_path, name).close()
    assert [run.name for run in runs_of(tmp_path, "lr[1]")] == ["lr[1]", "lr[1]-2"]
    assert [run.name for run in runs_of(tmp_path, "*")] == ["*"]
    assert [run.name for run in runs_of(tmp_path, "**")] == ["**"]
    assert runs_of(tmp_path / "nowhere", "try") == []


def test_settings_that_find_no_place_on_disk_leave_those_before(tmp_path: Path):  # JO-7
    with Journal.create(tmp_path, "try") as journal:
        journal.write_job("seed = 1\n")
        with no_file_longer_than(9), pytest.raises(RunFolderError, match="make room there"):
            journal.write_job("seed = 2\nsteps = 3\n")
        assert latest_job(journal.folder) == journal.folder / "job.toml"
        assert journal.write_job("seed = 2\nsteps = 3\n").name == "job.2.toml"
        assert sorted(path.name for path in journal.folder.glob("*toml*")) == ["job.2.toml", "job.toml"]


@pytest.mark.parametrize("end", [b'"thread_name"', b'"rollout 0"}},\n'])
def test_a_torn_trace_is_set_aside_and_its_tracks_are_named_again(tmp_path: Path, end: bytes):  # JO-4
    with Journal.create(tmp_path, "try") as journal:
        journal.add_span("rollout 0", "generate", 0, 1)
    trace = journal.folder / "trace.json"
    whole = trace.read_bytes()
    trace.write_bytes(whole[: whole.index(end) + len(end)])
    with Journal.resume(journal.folder, 0) as resumed:
        resumed.add_span("rollout 0", "generate", 1, 2)
    named = [event["args"]["name"] for event in read_trace(journal.folder) if event["name"].endswith("_name")]
    assert named == ["rollout", "rollout 0"]
    assert (journal.folder / "trace.damaged.json").exists()


def test_followers_get_the_lines_that_waited_when_the_run_was_killed(tmp_path: Path):  # JO-8, TK-1
    killed = Journal.create(tmp_path, "try")
    killed.metrics(1, {})
    killed.hold(2, {"tokens": 2})
    os.close(killed._metrics.fd)
    rows: list[dict] = []
    with Journal.resume(killed.folder, 2) as journal:
        journal.follow(rows.append)
        journal.metrics(3, {"tokens": 3})
    assert [(row["step"], row["tokens"]) for row in rows] == [(2, 2), (3, 3)]
