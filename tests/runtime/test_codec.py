"""CO-1 to CO-5 of runtime/codec.py and IN-1, IN-2 of runtime/interface.py, without processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from runtime import Actor, codec, endpoint
from runtime.codec import OUT_OF_BAND, Payload
from runtime.interface import Interface
from tests.runtime.actors import Answer, Greeter, Plain, Scored, Unscored


def across(payload: Payload) -> Payload:
    """What a receiver gets: own, writable copies of everything."""
    return Payload(bytes(payload.body), [bytearray(b) for b in payload.buffers])


def loose(value: Any) -> Any:
    return codec.decode(codec.decoder_of(Any), across(codec.encode(codec.loosely(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**63),
        2**200,
        1.5,
        "text",
        b"bytes",
        b"x" * 5000,
        (1, 2),
        {1: "a"},
        {"a": (1, {2})},
        {3, 4},
        [1, [2]],
    ],
    ids=lambda v: type(v).__name__,
)
def test_loose_values_keep_their_python_types(value):
    back = loose(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("size", [0, 3, OUT_OF_BAND])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "datetime64[ns]", "uint8", "float16"])
def test_arrays_arrive_equal_and_writable(dtype, size):
    array = np.arange(size).astype(dtype).reshape(1, size)
    back = loose(array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(12).reshape(3, 4).T, np.float32(2.5), np.array(5), np.array(["a", "bc"]), np.array([1, "x"], object)],
)
def test_unusual_arrays_arrive_equal(array):
    back = loose(array)
    assert type(back) is type(array)
    assert np.array_equal(back, array)
    assert back.shape == array.shape


def test_large_arrays_are_referred_to_and_not_copied():
    array = np.arange(100_000)
    payload = codec.encode(codec.loosely({"deep": [array]}))
    assert len(payload.body) < 1000
    assert np.shares_memory(np.frombuffer(payload.buffers[0], array.dtype), array)


def test_tensors_arrive_equal_writable_and_without_gradient():
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.arange(6.0).reshape(2, 3).bfloat16(),
        torch.ones(5000, requires_grad=True),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.arange(20000).reshape(100, 200).T,
        torch.nn.Parameter(torch.ones(3)),
    ):
        for back in (loose(tensor), loose({"t": [tensor]})["t"][0]):
            assert back.dtype == tensor.dtype
            assert torch.equal(back, tensor.detach())
            assert not back.requires_grad or isinstance(back, torch.nn.Parameter)
            back.detach().zero_()


def test_records_with_arrays_and_tagged_unions_round_trip():
    kind = Interface.of(Greeter).endpoints["typed"]
    answer = Answer(
        token_ids=np.arange(3000, dtype=np.int32),
        logprobs=np.ones(3, np.float32),
        finish="stop",
        verdicts=[Scored(1.0), Unscored("late")],
        entry={"a": [1, None], "b": np.float64(2.0)},
    )
    (back,), _ = kind.decode_arguments(across(kind.encode_arguments((answer,), {})))
    assert isinstance(back, Answer)
    assert np.array_equal(back.token_ids, answer.token_ids)
    assert back.token_ids.dtype == np.int32
    assert back.logprobs.flags.writeable
    assert back.verdicts == answer.verdicts
    assert back.entry == {"a": [1, None], "b": 2.0}
    assert back.mask is None


def test_a_union_of_records_as_argument_and_result():
    kind = Interface.of(Greeter).endpoints["verdict"]
    for value in (Scored(0.5), Unscored("x")):
        assert kind.decode_arguments(across(kind.encode_arguments((value,), {})))[0] == (value,)
        assert kind.decode_result(across(kind.encode_result(value))) == value


def test_an_int_beyond_64_bits_inside_a_typed_record_survives():
    kind = Interface.of(Greeter).endpoints["typed"]
    answer = Answer(token_ids=np.zeros(1), logprobs=np.zeros(1), finish="stop", entry={"big": 2**100})
    (back,), _ = kind.decode_arguments(across(kind.encode_arguments((answer,), {})))
    assert back.entry == {"big": 2**100}


def test_wrong_type_names_the_parameter_and_the_path():
    kind = Interface.of(Greeter).endpoints["typed"]
    answer = Answer(token_ids=np.zeros(1), logprobs=np.zeros(1), finish="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"typed: wrong argument: .*never.*`answer\.finish`"):
        kind.decode_arguments(kind.encode_arguments((answer,), {}))


def test_all_kinds_of_parameters_bind_at_the_caller():
    kind = Interface.of(Greeter).endpoints["numbers"]

    def received(*args: Any, **kwargs: Any) -> Any:
        return kind.decode_arguments(across(kind.encode_arguments(args, kwargs)))

    assert received(1) == ((1, 0.5), {"flag": False})
    assert received(1, 2.0, 3, 4, flag=True, other="x") == ((1, 2.0, 3, 4), {"flag": True, "other": "x"})
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        received()


def test_dataclasses_and_unknown_classes_travel():
    back = loose(Plain("n", np.arange(10_000)))
    assert isinstance(back, Plain)
    assert np.array_equal(back.values, np.arange(10_000))


def test_unsendable_values_are_named_by_type():
    with pytest.raises(TypeError, match=r"a value of type generator can't be sent"):
        loose(i for i in range(3))


class Lazy(Actor):
    @endpoint
    def late(self, x: NotImported, y: list[int]) -> NotImported:  # type: ignore[name-defined]  # noqa: F821
        return x

    @endpoint
    def optional(self, x: int = None, raw: bytes = b"") -> None: ...  # type: ignore[assignment]  # noqa: RUF013


def test_annotations_that_can_not_be_resolved_count_as_any():
    types = Interface.of(Lazy).endpoints["late"].types
    assert types["x"] is Any
    assert types["return"] is Any
    assert types["y"] == list[int]


def test_a_default_outside_of_its_annotation_arrives():
    kind = Interface.of(Lazy).endpoints["optional"]
    assert kind.decode_arguments(across(kind.encode_arguments((), {})))[0] == (None, b"")
    large = os.urandom(OUT_OF_BAND)
    payload = kind.encode_arguments((1, large), {})
    assert len(payload.buffers) == 1
    assert kind.decode_arguments(across(payload))[0] == (1, large)


def test_import_runtime_loads_no_torch_and_no_numpy():
    code = (
        "import sys, runtime; runtime.Actor, runtime.this_host; "
        "print([m for m in ('torch', 'numpy', 'uvloop') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_importable_and_exactly_these():
    import runtime

    assert set(runtime.__all__) == {
        "Actor", "ActorError", "ActorMesh", "ConnectionRefused", "Context", "DeadlineExceeded", "Death",
        "EndpointHandle", "Failure", "HostMesh", "MailboxFull", "Oversize", "Owner", "PeerRefused", "Point", "ProcMesh",
        "ProcessDied", "RendezvousError", "SelfCall", "Shape", "StartError", "Stopped", "TaskGroup", "Tls",
        "TuttiError", "ValueMesh", "context", "current_rank", "current_size", "endpoint", "in_torchrun",
        "join", "join_main", "on_main_thread", "this_host", "torchrun_host",
    }  # fmt: skip
    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name
