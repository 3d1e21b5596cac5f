"""ER-1 to ER-3 of runtime/errors.py, without processes."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from runtime.errors import ActorError, Death, ProcessDied, pack_error, unpack_error
from tests.runtime.actors import OddError


def cross(error: BaseException) -> ActorError:
    try:
        raise error
    except BaseException as raised:
        return unpack_error(pack_error(raised), "trainer", 1, "host-a", "step")


def test_rebuilt_error_is_of_the_users_class_and_ours():
    error = cross(ValueError("bad", 3))
    assert isinstance(error, ValueError)
    assert isinstance(error, ActorError)
    assert error.args == ("bad", 3)
    assert (error.mesh, error.role, error.rank, error.host, error.endpoint) == (
        "trainer",
        "trainer",
        1,
        "host-a",
        "step",
    )


def test_first_line_names_mesh_rank_host_endpoint_class_and_text():
    first = str(cross(ValueError("bad word"))).splitlines()[0]
    assert first == "trainer rank 1 on host-a, step raised ValueError: bad word"


def test_class_with_odd_init_is_rebuilt_with_its_attributes():
    error = cross(OddError(7, "seven"))
    assert isinstance(error, OddError)
    assert (error.code, error.detail) == (7, "seven")


def test_frozen_dataclass_exception_is_rebuilt():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    error = cross(Frozen(4))
    assert isinstance(error, Frozen)
    assert error.code == 4
    assert error.rank == 1


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        KeyError("k"),
        ModuleNotFoundError("no m", name="m"),
        TimeoutError("late"),
        ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    ],
    ids=lambda e: type(e).__name__,
)
def test_builtin_classes_are_rebuilt(error):
    rebuilt = cross(error)
    assert isinstance(rebuilt, type(error))
    assert rebuilt.text == str(error)
    assert type(error).__name__ in str(rebuilt)


def test_os_error_keeps_errno_and_filename():
    error = cross(FileNotFoundError(2, "No such file", "/x"))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, "/x")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), GeneratorExit()])
def test_errors_that_would_end_the_caller_keep_only_text(error):
    rebuilt = cross(error)
    assert type(rebuilt) is ActorError
    assert rebuilt.exception_type == type(error).__name__


def test_unpicklable_attribute_is_left_out_and_the_rest_survives():
    error = ValueError("text")
    error.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    error.code = 5  # type: ignore[attr-defined]
    rebuilt = cross(error)
    assert isinstance(rebuilt, ValueError)
    assert vars(rebuilt)["code"] == 5
    assert not hasattr(rebuilt, "lock")


def test_broken_str_does_not_hide_the_error():
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Broken" in str(cross(Broken()))


def test_second_hop_keeps_the_users_class():
    error = cross(cross(OddError(7, "seven")))
    assert isinstance(error, OddError)
    assert error.exception_type.endswith("OddError")


def test_rebuilt_error_pickles():
    error = pickle.loads(pickle.dumps(cross(OddError(7, "seven"))))
    assert isinstance(error, OddError)
    assert isinstance(error, ActorError)
    assert error.rank == 1


def test_process_died_tells_signal_memory_and_last_lines():
    death = Death(signal=9, oom="the kernel killed 1 process", stderr_tail=("a", "b"), peak_memory=3 * 2**20)
    error = ProcessDied("rollout", 2, "h", "generate", death)
    assert str(error).splitlines() == [
        "rollout rank 2 on h, generate: process killed by SIGKILL, peak memory 3 MiB; the kernel killed 1 process",
        "Last lines of its stderr:",
        "  a",
        "  b",
    ]
    assert (error.signal, error.exit_code) == (9, None)


def test_relayed_process_death_is_still_a_process_death():
    error = cross(ProcessDied("rollout", 2, "h", "generate", Death(exit_code=7)))
    assert isinstance(error, ProcessDied)
    assert error.exit_code == 7
    assert error.rank == 1
    assert "rollout rank 2" in str(error)
