"""The launcher as a person runs it: real processes, the start policy that ships, real signals. Cites LA-rules."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from algorithms.admission import Admission
from algorithms.assemble import make_prompts
from algorithms.job import Job, resolve_here
from algorithms.metrics import METRICS
from algorithms.resume import RunState
from roles import checkpoint
from roles.rollout_config import RolloutConfig, VllmConfig
from runtime.config import ConfigError, load
from runtime.journal import Journal, read_metrics, read_samples, read_trace
from runtime.launch import FAILED, REFUSED, ROLES, _Arguments, _check_torchrun, _last_recorded, _summary, main

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "recipes" / "start_policy"

# Eight prompts a step, so that samples.jsonl shows the position of every prompt of a step.
SMALL = (
    "grpo.prompts_per_step=8",
    "grpo.samples_per_prompt=4",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "evaluation.samples=2",
)


def command(*words: str, torchrun: int = 0) -> list[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    return [sys.executable, *start, "-m", "runtime.launch", *words]


def launch(*words: str, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words, torchrun=torchrun), cwd=ROOT, capture_output=True, text=True, timeout=240)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a job that is refused (LA-1); in this process, since none is started."""
    assert main(words) == REFUSED
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    return err


def default_job(folder: Path, *overrides: str) -> tuple[str, ...]:
    return (f"run_dir={folder}", *SMALL, *overrides)


@contextlib.contextmanager
def running(*words: str, steps: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that has done some steps."""
    process = subprocess.Popen(
        command(*words),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test runner in the background of a shell ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 120
        while len(read_metrics(folder)) <= steps and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        assert len(read_metrics(folder)) > steps
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def positions(folder: Path) -> dict[int, set[int]]:
    """Step -> positions of the prompts that it trained."""
    found: dict[int, set[int]] = {}
    for row in read_samples(folder):
        found.setdefault(row["step"], set()).add(row["position"])
    return found


# --- before anything starts -------------------------------------------------------------------------------------------


def test_dry_run_prints_a_job_file_with_reasons_and_starts_nothing(tmp_path, capsys):
    result = launch("--dry-run", f"run_dir={tmp_path / 'runs'}", "steps=7")
    assert result.returncode == 0, result.stderr
    assert "prompts_per_step = 16  # derived: 32 scaled down for" in result.stdout
    assert "steps = 7  # from the command line" in result.stdout
    assert "# placement" in result.stdout
    assert not (tmp_path / "runs").exists()
    file = tmp_path / "job.toml"
    file.write_text(result.stdout)
    assert main(["--dry-run", str(file)]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert load(file, Job).steps == 7
    assert load(tmp_path / "again.toml", Job) == load(file, Job)  # a resolved job resolves to itself (JO-3)


def test_misspelt_key_ends_the_command_with_2_and_nothing_is_made_la1(tmp_path):
    result = launch(f"run_dir={tmp_path / 'runs'}", "trainer.lrr=1e-3")
    assert result.returncode == 2
    assert "trainer.lrr: unknown key; did you mean 'lr'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--log", "trainer=loud"],
            "log level of 'trainer': expected debug, info, warning, error, critical, got 'loud'",
        ),
        (["--log", "trainers=info"], f"no role is called 'trainers'; expected one of {', '.join(ROLES)}"),
        (["--resume", "nothing"], "--resume: nothing is no folder; give that of a run, such as runs/default"),
        (["--resume", "recipes"], "recipes has no complete checkpoint in recipes/checkpoints; start a new run"),
        (["recipes"], "recipes: a folder, expected a job file; to go on with a run say --resume FOLDER"),
        (
            ["some words"],
            "no job file, whose name would end in .toml, .yaml or .yml, and no override, which would be key=",
        ),
        (["a.toml", "b.toml"], "expected one job file at most, got a.toml, b.toml"),
        (["trackers.use=['wandbb']"], "did you mean 'wandb'?"),
    ],
)
def test_words_that_make_no_job_are_refused_with_what_to_say_instead_la1(capsys, monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    assert said in refused(capsys, *words, "--dry-run")


def test_contradictions_are_told_together_la1(tmp_path, capsys):
    wrong = ("sampling.top_p=0.9", "grpo.samples_per_prompt=1", "grpo.loss=grpoo")
    said = refused(capsys, f"run_dir={tmp_path / 'runs'}", *wrong)
    assert "3 problems" in said
    assert "sampling.top_p = 0.9" in said
    assert "grpo.samples_per_prompt = 1" in said
    assert "did you mean 'grpo'" in said
    assert not (tmp_path / "runs").exists()


def test_resume_names_the_run_that_has_a_checkpoint_when_the_newest_has_none_la1(tmp_path, capsys):
    for name in ("default", "default-2", "default-3"):
        (tmp_path / name).mkdir()
    said = refused(capsys, "--resume", f"run_dir={tmp_path}")
    assert f"{tmp_path / 'default-3'} has no complete checkpoint" in said
    with checkpoint.folder(checkpoint.step_folder(tmp_path / "default-2", 5)) as writing:
        (writing / "state.json").write_text("{}")
    said = refused(capsys, "--resume", f"run_dir={tmp_path}")
    assert f"the newest, has no complete checkpoint; for the one before: --resume {tmp_path / 'default-2'}" in said


@pytest.mark.parametrize("steps", [5, 4])
def test_a_run_that_has_done_its_steps_is_not_resumed_la1(tmp_path, capsys, steps):
    with checkpoint.folder(checkpoint.step_folder(tmp_path / "default", 5)) as writing:
        (writing / "state.json").write_text("{}")
    (tmp_path / "default" / "job.toml").write_text((ROOT / "recipes" / "default.toml").read_text())
    said = refused(capsys, f"run_dir={tmp_path}", f"steps={steps}", "--resume")
    assert f"{tmp_path / 'default'} has done 5 steps and steps = {steps}; raise it to go on" in said


def save(run: Path, source: Path) -> None:
    """What the controller keeps of a run of this job at its fifth step."""
    job = resolve_here(load(source, Job), source).job
    prompts, _ = make_prompts(job)
    nothing = Admission(prompts, groups_per_step=4, staleness=1).state()
    with checkpoint.folder(checkpoint.step_folder(run, 5)) as writing:
        checkpoint.write_state(writing, RunState(step=5, admission=nothing, prompts=prompts.state()))


def test_a_run_goes_on_by_the_settings_that_it_was_last_resumed_with(tmp_path, capsys):
    run = tmp_path / "default"
    job = (ROOT / "recipes" / "default.toml").read_text().replace('path = "start_policy"', f'path = "{POLICY}"')
    save(run, ROOT / "recipes" / "default.toml")
    (run / "job.toml").write_text(job.replace("steps = 100", "steps = 5"))
    (run / "job.2.toml").write_text(job.replace("steps = 100", "steps = 7"))
    assert main(["--resume", str(run), "--dry-run"]) == 0
    assert "steps = 7\n" in capsys.readouterr().out


@pytest.mark.parametrize("other", ["seed=3", "evaluation.prompts=9", "data.template='{question}?'"])
def test_a_checkpoint_of_another_prompt_stream_is_refused_before_anything_is_touched_la1(tmp_path, capsys, other):
    """The records behind the checkpoint and the settings of the run stay as they are."""
    with Journal.create(tmp_path, "default") as journal:
        for done in range(8):
            journal.metrics(done, {})
    shutil.copy(ROOT / "recipes" / "default.toml", journal.folder / "job.toml")
    (journal.folder / "start_policy").symlink_to(POLICY)
    save(journal.folder, journal.folder / "job.toml")
    before = {path.name for path in journal.folder.iterdir()}
    said = refused(capsys, f"run_dir={tmp_path}", other, "--resume")
    assert "the checkpoint was made with another prompt stream" in said
    assert len(read_metrics(journal.folder)) == 8
    assert {path.name for path in journal.folder.iterdir()} == before


def test_a_run_that_was_stopped_before_its_first_step_evaluates_again_when_it_goes_on(tmp_path):
    """It has a record of step 0, of which the page makes a new one."""
    for step, kept in ((0, []), (1, [0, 1])):
        with Journal.create(tmp_path, "run") as journal:
            for done in (0, 1):
                journal.metrics(done, {})
        saved = checkpoint.step_folder(journal.folder, step)
        with Journal.resume(journal.folder, _last_recorded(saved)) as resumed:
            assert [row["step"] for row in read_metrics(journal.folder)] == kept
            resumed.metrics(len(kept), {})


def test_what_follows_resume_and_is_no_run_belongs_to_the_job(tmp_path, capsys):
    assert f"no run called 'default' in '{tmp_path}'" in refused(capsys, "--resume", f"run_dir={tmp_path}")
    (tmp_path / "job.toml").write_text((ROOT / "recipes" / "default.toml").read_text().replace("default", "mine"))
    said = refused(capsys, f"run_dir={tmp_path}", "--resume", str(tmp_path / "job.toml"))
    assert f"no run called 'mine' in '{tmp_path}'" in said


def test_a_run_folder_that_can_not_be_made_is_told_without_a_traceback(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([f"run_dir={tmp_path / 'file'}"]) == FAILED
    err = capsys.readouterr().err
    assert f"error: {tmp_path / 'file'} can't be written: File exists; give the run another run_dir" in err
    assert "Traceback" not in err


def test_ctrl_c_before_there_is_a_run_ends_it_without_a_word(tmp_path):
    result = subprocess.run(
        command(f"run_dir={tmp_path / 'runs'}", "grpo.loss=tests.runtime.interrupted_import:loss"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
    assert not (tmp_path / "runs").exists()


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A synchronous run whose learning rate is 0, with a checkpoint after each step: folder and output."""
    folder = tmp_path_factory.mktemp("still")
    job = default_job(folder, "steps=5", "staleness=0", "trainer.lr=0", "checkpoint.every=1", "name=run")
    return folder / "run", launch(*job)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    """A run of two ranks on both sides that evaluates on a replica of its own."""
    folder = tmp_path_factory.mktemp("asynchronous")
    ranks = ("trainer.ranks=2", "rollout.ranks=2", "evaluation.ranks=1")
    return folder / "run", launch(*default_job(folder, "steps=5", *ranks, "name=run"))


def test_what_is_not_healthy_at_the_end_of_a_run_is_named(tmp_path):
    with Journal.create(tmp_path, "run") as journal:
        journal.metrics(0, {"eval/accuracy": 0.25})
        journal.metrics(1, {"reward/unscored_fraction": 0.4, "policy/entropy": 0.5, "policy/kl_k3": float("nan")})
        journal.metrics(2, {"eval/accuracy": 0.5, "reward/unscored_fraction": 0.3, "policy/kl_k3": float("nan")})
    lines = _summary(journal.folder, 2, 2)
    assert lines[:3] == [
        "2 of 2 steps done",
        "held-out accuracy 0.250 -> 0.500 (step 2)",
        "worth a look: reward/unscored_fraction is 0.3 fraction: healthy is 0; above 0.01 the verifier needs a look",
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("run", "staleness"), [("still", 0), ("asynchronous", 1)])
def test_a_run_leaves_what_it_promises_and_keeps_the_age_bound(request, run, staleness):
    folder, result = request.getfixturevalue(run)
    assert result.returncode == 0, result.stderr
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["version"] for row in rows[1:]] == [1, 2, 3, 4, 5]
    assert "eval/accuracy" in rows[0]
    assert "eval/accuracy" in rows[5]
    assert max(row["age/max"] for row in rows[1:]) == staleness
    assert rows[-1]["pipeline/issued"] == rows[-1]["pipeline/trained"] == 5 * 8
    assert checkpoint.latest(folder) == checkpoint.step_folder(folder, 5)
    assert (folder / "curves.png").stat().st_size > 10_000
    assert load(folder / "job.toml", Job).staleness == staleness
    assert {name for row in rows for name in row if not documented(name)} <= {"step", "time", "elapsed"}
    samples = read_samples(folder)
    assert {"prompt", "completion", "reward", "version", "age"} <= samples[0].keys()
    assert overlap(folder) == (staleness == 1)
    assert "5 of 5 steps done" in result.stdout


def documented(metric: str) -> bool:
    """Whether `docs/metrics.md` says what a number is."""
    general = re.sub(r"^eval/accuracy/\w+$", "eval/accuracy/<task>", re.sub(r"@\d+$", "@k", metric))
    return general in METRICS or f"`{general}`" in (ROOT / "docs" / "metrics.md").read_text()


def overlap(folder: Path) -> bool:
    """Whether generation ran during a training step, as the timeline shows it. Requests of the last 5 % of a step, and
    those that begin a little before its end, are not taken for overlap."""
    spans = [event for event in read_trace(folder) if event["ph"] == "X"]
    trained = [(s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "train"]
    generated = [(s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "generate"]
    return any(low < begun < high or low < ended < high for begun, ended in generated for low, high in trained)


@pytest.mark.timeout(300)
def test_lr_0_keeps_weights_and_logprobs_of_both_sides_together(still):
    folder, result = still
    assert result.returncode == 0, result.stderr
    rows = read_metrics(folder)[1:]
    assert max(row["mismatch/logprob_gap_max"] for row in rows) < 1e-4
    assert all(row["mismatch/truncated_fraction"] == 0 for row in rows)
    from safetensors import safe_open

    def weights(step: int) -> dict[str, Any]:
        (file,) = (checkpoint.step_folder(folder, step) / "trainer").glob("rank-*.safetensors")
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_tensor(name).tobytes() for name in opened.keys() if name.startswith("weight/")}

    assert weights(4) == weights(5)
    assert len(weights(5)) > 10


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_ctrl_c_once_saves_and_resume_continues_with_the_same_prompts_la2(tmp_path):
    job = default_job(tmp_path, "steps=8", "checkpoint.every=0", "trainer.warmup_steps=7", "trainer.lr=7e-4")
    with running(*job, "name=cut", steps=2, folder=tmp_path / "cut") as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "resume with" in stdout
    saved = checkpoint.latest(tmp_path / "cut")
    assert saved is not None
    done = len(read_metrics(tmp_path / "cut")) - 1
    assert saved == checkpoint.step_folder(tmp_path / "cut", done)
    resumed = launch("--resume", str(tmp_path / "cut"))
    assert resumed.returncode == 0, resumed.stderr
    rows = read_metrics(tmp_path / "cut")
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["version"] for row in rows[1:]] == list(range(1, 9))
    # As without the interruption: eight prompts a step, in their order, and a rate that has risen by 1e-4 a step.
    assert positions(tmp_path / "cut") == {step: set(range(8 * step - 8, 8 * step)) for step in range(1, 9)}
    rates = [row["train/learning_rate"] for row in rows[1:]]
    assert rates == pytest.approx([1e-4 * min(step, 7) for step in range(1, 9)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_killed_role_ends_the_job_naming_role_rank_and_signal_la3(tmp_path, role):
    """A rollout only when it may not be started anew."""
    job = default_job(tmp_path, "steps=500", "name=run", "rollout.max_restarts=0")
    with running(*job, steps=1, folder=tmp_path / "run") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process_of(role, children).pid, signal.SIGKILL)
        killed = time.monotonic()
        assert process.stderr is not None
        told = process.stderr.readline()
        seconds = time.monotonic() - killed
        stderr = told + process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert re.search(rf"{role}.*0", stderr)
    assert "SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert seconds < 10  # R4 asks for far less; this only tells a death that is seen from a time limit
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(300)
def test_killed_rollout_is_told_and_started_anew_and_the_run_goes_on(tmp_path):
    """Issued prompts are conserved (asserted after each step), and the new process serves the weights of the step."""
    with running(*default_job(tmp_path, "steps=8", "name=run"), steps=2, folder=tmp_path / "run") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        trainer, rollout = process_of("trainer", children), process_of("rollout", children)
        if len(os.sched_getaffinity(0)) > 1:  # R11: who computes at the same time has cores of its own
            assert not set(trainer.cpu_affinity()) & set(rollout.cpu_affinity())
        os.kill(rollout.pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert re.search(r"rollout rank 0 .*SIGKILL.*restart 1 of 3", stderr)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(9))
    assert max(row["age/max"] for row in rows[1:]) <= 1
    assert max(row["mismatch/kl_k3"] for row in rows[1:]) < 0.01


def process_of(role: str, children: list[psutil.Process]) -> psutil.Process:
    """Rank 0 of a role, by the name that it shows."""
    return next(child for child in children if Path(f"/proc/{child.pid}/comm").read_text() == f"{role} 0\n")


@pytest.mark.timeout(300)
def test_torchrun_ranks_become_trainer_and_rollout(tmp_path):
    result = launch(*default_job(tmp_path, "steps=2", "name=run"), torchrun=2)
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.timeout(300)
def test_torchrun_with_another_number_of_ranks_is_refused_la1(tmp_path):
    result = launch(f"run_dir={tmp_path / 'runs'}", torchrun=3)
    assert result.returncode != 0
    assert "need 2 ranks, torchrun started 3" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("started", "fits"), [(5, True), (8, True), (6, False)])
def test_torchrun_may_start_a_rank_for_each_gpu_of_a_replica_la1(monkeypatch, started, fits):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for name, value in (("WORLD_SIZE", started), ("RANK", 0), ("LOCAL_WORLD_SIZE", started), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    rollout = RolloutConfig(engine="vllm", ranks=1, vllm=VllmConfig(tensor_parallel=4))
    resolved: Any = SimpleNamespace(job=SimpleNamespace(trainer=SimpleNamespace(ranks=4), rollout=rollout))
    with (
        contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="need 5 or 8 ranks, torchrun started 6")
    ):
        _check_torchrun(resolved, "job.toml")


def test_processes_of_an_environment_have_a_log_level_too() -> None:
    levels = {"environment": "info", "evaluation_environment": "debug"}
    assert _Arguments(log=[f"{role}={level}" for role, level in levels.items()]).log_levels == levels
