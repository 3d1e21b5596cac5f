"""What the acceptance programs make of a run: benchmarks/gpu/launched.py and the tables beside it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from algorithms.series import differences
from benchmarks.gpu import acceptance, kill, moe, programs, shapes, smollm2, sweep, trl_grpo
from benchmarks.gpu.launched import WARM, Look, Run, descendants, kill_all, read_facts, saying
from tests.waiting import until


def record(step: int, **more: Any) -> dict[str, Any]:
    books = {"issued": 10 * step, "trained": 8 * step, "dropped": step, "buffered": 0, "in_flight": step}
    return {
        "step": step,
        "time": 1000.0 + step,
        "elapsed": 20.0 + step,
        "version": float(step),
        "time/step": 1.0,
        "time/evaluate": 0.25 if step % 2 == 0 else 0.0,
        "rate/tokens_per_second": 100.0,
        "reward/mean": step / 20,
        "sync/pause_seconds": 0.01,
        **{f"pipeline/{key}": float(value) for key, value in books.items()},
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "job.toml").write_text("[grpo]\nprompts_per_step = 64  # given\nsamples_per_prompt = 8\n")
    steps = [record(step) for step in range(1, 13)]
    steps[-1]["eval/accuracy"] = 0.75
    looks = [Look(999.0 + i, 2**30, 2**20, 50, [5, 7], [20 * i, 0]) for i in range(16)]
    return Run("s1", tmp_path, 0, 33.0, [{"step": 0, "elapsed": 20.0, "eval/accuracy": 0.25}, *steps], looks)


def test_a_run_is_timed_without_its_first_steps_and_without_waits_for_evaluations_ld3(run: Run) -> None:
    facts = run.as_facts()
    assert run.clock()[:3] == [1.0, 1.75, 2.75]
    assert facts["work_s"] == pytest.approx(0.875)
    assert facts["samples_per_s"] == pytest.approx(512 / 0.875)
    assert facts["tokens_per_s"] == pytest.approx(100 / 0.875)
    assert facts["pause_ms"] == pytest.approx(10)
    assert facts["accuracy"] == [[0, 0.0, 0.25], [12, 10.5, 0.75]]
    assert len(facts["looks"]) == 12 - WARM  # from the first counted step to the last
    assert facts["gpu_busy"] == pytest.approx([20 * 9.5, 0])


def test_steps_beside_an_evaluation_are_not_timed_ld3(run: Run) -> None:
    run.records[8] |= {"eval/seconds": 1.5}  # of step 8: step 9 runs beside it
    run.records[9]["time/step"] = 3.0
    assert run.undisturbed() == pytest.approx([1, 0.75, 1, 0.75, 0.75, 1, 0.75])


def test_books_that_do_not_add_up_are_told(run: Run) -> None:
    assert run.exact()
    run.records[5]["pipeline/dropped"] += 1
    assert not run.exact()


def test_time_to_accuracy_is_where_the_mean_of_the_last_batches_gets_there(run: Run) -> None:
    facts = run.as_facts()
    assert smollm2.time_to(facts, 0.35) == (9, 8.0)  # (5 + 6 + 7 + 8 + 9) / 5 / 20
    assert smollm2.time_to(facts, 0.9) is None


def test_growth_is_of_the_last_quarter_over_the_second() -> None:
    assert smollm2.growth([[0.0, 10.0]] * 40, 1) == 1.0
    assert smollm2.growth([[0.0, float(i)] for i in range(8)], 1) == pytest.approx(6 / 2.5)
    assert smollm2.growth([[0.0, 10.0]] * 4, 1) is None


def test_every_program_has_a_table_of_what_it_wrote_also_of_failures(run: Run, tmp_path: Path) -> None:
    theirs = run.as_facts() | {"name": "trl server", "samples_per_s": 100.0, "work_s": 5.12}
    failed = Run("s4", code=1).as_facts()
    killed = {"name": "engine", "recovery_s": 20.0, "memory_returned_s": 0.4, "memory_after": 2**30}
    books = {"name": "books", "exact": True}
    for module, found in (
        (smollm2, [run.as_facts(), failed]),
        (trl_grpo, [theirs]),
        (moe, [MOE | {"name": f"{n} ep", "kl_k3": k} for n, k in KL.items()]),
        (kill, [killed, books]),
    ):
        with saying(tmp_path, module.FILE) as say:
            for facts in [found[0] | {"steps": 0, "code": 9, "accuracy": []}, *found]:
                say(facts)
    rows = {row.name: row for table in acceptance.tables(tmp_path).values() for row in table}
    assert rows["s1: rise of held-out accuracy"].met
    assert rows["s4: failed after 0 steps"].note == "exit code 1"
    assert rows["S = 1 against trl server: trained samples"].ratio == pytest.approx(512 / 0.875 / 100)
    assert rows["S = 1 against trl server: trained samples"].met
    assert rows["KL with replay, of the one without"].ours == pytest.approx(0.1)
    assert rows["soak of 12 steps: accounting exact"].met
    assert rows["accounting exact over all kills"].met
    assert len(read_facts(tmp_path, smollm2.FILE)) == 2  # the last of each name


def test_a_failed_run_shows_what_it_has_measured_and_nothing_that_it_has_not(run: Run, tmp_path: Path) -> None:
    whole, error = run.as_facts(), "OutOfMemoryError: trainer rank 0 ran out. Tried to allocate"
    run.records, run.code, run.error = run.records[:4], None, error
    short = run.as_facts()
    half = whole | {"name": "fp8", "code": None, "error": "WeightsDiffer: version 60"}
    names = [row.name for row in smollm2.rows([short, half])]
    assert [n for n in names if n.startswith("s1")] == ["s1: failed after 3 steps"]
    assert {"fp8: failed after 12 steps", "fp8: trained tokens"} <= set(names)
    assert smollm2.rows([short])[0].note == "OutOfMemoryError: trainer rank 0 ran out"
    assert [row.name for row in shapes.rows([short])] == ["s1: failed after 3 steps"]
    assert [row.name for row in moe.rows([short])] == ["s1: failed after 3 steps"]
    theirs = trl_grpo.rows([whole | {"name": "trl server"}], [short])
    assert [row.name for row in theirs] == ["trl server: held-out accuracy at the end"]
    assert kill.rows([{"name": "start", "error": "exit code 1: no memory"}])[0].note == "exit code 1: no memory"


def test_the_reason_of_a_launch_is_the_last_error_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "kill.log").write_text("starting\nerror: first\nerror: trainer rank 0: out of memory\n\nTrace\n  x\n")
    assert Run("kill", code=1, log=tmp_path / "kill.log").as_facts()["error"] == "trainer rank 0: out of memory"
    assert Run("kill", code=0, log=tmp_path / "kill.log").as_facts()["error"] == ""


KL = {"replay": 1e-4, "plain": 1e-3}
MOE = {"code": 0, "steps": 9, "step_s": 1, "gap": 0, "ess": 1}


def options_of(out: Path, *words: str) -> Any:
    parser = sweep.parser_of()
    options = parser.parse_args(["--out", str(out), *words])
    sweep.check(parser, options)
    return options


def test_a_plan_says_what_fits_sw4(tmp_path: Path) -> None:
    until = str(time.time() + 500)
    options = options_of(tmp_path, "--until", until, "--cases", "s1", "kill+fp8+fp8_plain", "s2", "--steps", "60")
    plan = list(sweep.plan_of(options))
    assert plan[0].startswith("start of everything: 120 s, then 3")
    assert plan[1].startswith("s1: 228 s, then 1")
    assert "kill+fp8+fp8_plain: 200 s, does not fit into 1" in plan[2]  # as long as the longest of them
    assert plan[3].startswith("s2: 74 s, then ")


def test_what_a_sweep_has_not_ended_is_left_ac1(tmp_path: Path) -> None:
    with saying(tmp_path, acceptance.TOLD) as tell:
        tell({"started": {}})
        tell({"case": "s1", "ended": 0})
        tell({"case": "fp8", "ended": "oops"})
        tell({"passed": ["s2"]})
    lines = acceptance.told(tmp_path)
    assert acceptance.left_of(["s1", "s0", "kill+fp8", "s2"], lines) == ["s0", "kill"]
    assert acceptance.started(lines) == 1


def test_every_case_has_roles_or_a_program(tmp_path: Path) -> None:
    names = {name for order in acceptance.ORDER.values() for group in order for name in group.split("+")}
    assert names == {*smollm2.CASES, *programs.PROGRAMS}
    words = ["--tiny", "--set", "rollout.engine=torch", "--cases", *acceptance.ORDER["ep"]]
    options = options_of(tmp_path, *words)
    assert {sweep.kinds_of(case) for case in smollm2.CASES} == {
        ("fsdp", "plain"),
        ("fsdp", "fp8"),
        ("megatron", "plain"),
    }
    first, *others = (sweep.resolved_of(case, options).job for case in smollm2.CASES)
    assert first.model.path == options.model
    assert [differences(first, job) for job in others] == [[]] * len(others)  # without GPUs all are alike


async def test_a_program_that_takes_too_long_is_ended_with_what_it_started_pg1(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    found = await until(lambda: descendants(process.pid), lambda found: len(found) == 2)
    assert await programs.ended(process, 0.1) == "too long"
    await until(lambda: not any(kill.alive(pid) for pid in found))


def test_what_a_process_has_left_behind_is_ended_with_the_rest_ac2() -> None:
    orphan = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid)"
    code = (
        "import os, subprocess, sys; from benchmarks.gpu.launched import adopt_orphans, kill_descendants;"
        f"adopt_orphans(); pid = int(subprocess.run([sys.executable, '-c', {orphan!r}], stdout=-1).stdout);"
        "os.kill(pid, 0); kill_descendants(); os.waitpid(pid, 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_is_ended_with_all_that_it_started() -> None:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1).pid, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert set(descendants(parent.pid)) == {parent.pid, child}
        kill_all(parent.pid)
        parent.wait()
    while os.path.exists(f"/proc/{child}") and kill.alive(child):
        pass
