"""CO-1 to CO-6 of runtime/codec.py, RC-1, RC-2 of runtime/records.py, BL-1 of runtime/blame.py and IN-1 to IN-3 of
runtime/interface.py, without processes."""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import threading
from typing import Any, TypedDict

import msgspec
import numpy as np
import pytest

from runtime import Actor, codec, endpoint, records
from runtime.codec import OUT_OF_BAND, Payload
from runtime.errors import pack_error, unpack_error
from runtime.interface import EndpointType, Interface
from tests.runtime.actors import Answer, Greeter, OddError, Plain, Scored, Unscored


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


@pytest.mark.parametrize("allowed", [True, False])
def test_an_int_beyond_64_bits_inside_a_typed_record_survives(request, allowed):
    if not allowed:
        request.getfixturevalue("no_pickle")
    kind = Interface.of(Greeter).endpoints["typed"]
    answer = Answer(token_ids=np.zeros(1), logprobs=np.zeros(1), finish="stop", entry={"big": 2**100})
    (back,), _ = kind.decode_arguments(across(kind.encode_arguments((answer,), {})))
    assert back.entry == {"big": 2**100}


@pytest.mark.parametrize(
    ("endpoint_name", "arguments", "text"),
    [
        ("typed", (Answer(token_ids=np.zeros(1), logprobs=np.zeros(1), finish="never"),), "never.*`answer.finish`"),  # type: ignore[arg-type]
        ("typed", (Answer(token_ids=[1], logprobs=np.zeros(1), finish="stop"),), "ndarray.*list.*`answer.token_ids`"),  # type: ignore[arg-type]
        ("typed", (3,), "got `int` - at `answer`"),
        ("hello", (3,), "Expected `str`, got `int` - at `name`"),
        ("hello", (None,), "Expected `str`, got `None` - at `name`"),
        ("fail_on", (1.5, 1.0), "Expected `int`, got `float` - at `rank`"),
        ("numbers", (1, 2.0, 3, "x"), None),  # what *rest is annotated with is not checked
        ("fail_on", (np.int64(1), np.float32(1.0)), None),  # numpy numbers are numbers
    ],
)
def test_a_wrong_type_is_refused_by_the_caller_with_parameter_and_path(endpoint_name, arguments, text):
    kind = Interface.of(Greeter).endpoints[endpoint_name]
    if text is None:
        kind.decode_arguments(across(kind.encode_arguments(arguments, {})))
        return
    with pytest.raises(TypeError, match=f"{endpoint_name}: wrong argument: .*{text}"):
        kind.encode_arguments(arguments, {})


def test_checking_arguments_copies_no_array_and_unpickles_nothing():
    class Once:
        def __setstate__(self, state):
            raise AssertionError("unpickled")

    kind = Interface.of(Mixed).endpoints["both"]
    array = np.arange(100_000)
    payload = kind.encode_arguments((array, Once(), 1), {})
    assert np.shares_memory(np.frombuffer(payload.buffers[0], array.dtype), array)
    with pytest.raises(TypeError, match="Expected `int`, got `str` - at `number`"):
        kind.encode_arguments((array, Once(), "1"), {})


def test_a_wrong_element_of_a_large_list_is_found_by_the_caller():
    kind = Interface.of(Lazy).endpoints["late"]
    with pytest.raises(TypeError, match=r"Expected `int`, got `str` - at `y\[100000\]`"):
        kind.encode_arguments((None, [*[1] * 100_000, "x"]), {})
    kind.encode_arguments((None, [np.int64(1)] * 100_000), {})  # numpy numbers are numbers


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


class Config:
    def __init__(self) -> None:
        self.model = {"layers": [1, threading.Lock()]}


def with_a_lock() -> Any:
    lock = threading.Lock()
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Config(), r"value.model\['layers'\]\[1\] is a lock"),
        (Plain("n", threading.Lock()), "value.values is a lock"),  # type: ignore[arg-type]
        ({"a": [(i for i in range(3))]}, r"value\['a'\]\[0\] is a generator"),
        (with_a_lock(), r"value \(its variable lock\) is a lock"),
    ],
    ids=["attribute", "dataclass", "container", "closure"],
)
def test_a_value_that_can_not_be_sent_is_named_by_its_path(value, path):
    kind = Interface.of(Greeter).endpoints["echo"]
    with pytest.raises(TypeError, match=f"echo: argument 'value' can't be sent: {path}"):
        kind.encode_arguments((value,), {})
    with pytest.raises(TypeError, match=f"echo: its result can't be sent: {path.replace('value', 'result', 1)}"):
        kind.encode_result(value)


class Color(enum.Enum):
    RED = 1


PICKLED = codec.encode(codec.loosely((1, 2)))


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch):
    codec.allow_pickle(False)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("cloudpickle.Pickler.dump", refuse)
    yield
    codec.allow_pickle(True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        2**200,
        (1, (2, [3, {4}])),
        {1: "a", (2, 3): b"c"},
        frozenset({1}),
        Color.RED,
        Scored(1.0),
        np.float32(1.5),
        b"x" * 10_000,
        [bytearray(b"y")],
        Greeter,
    ],
    ids=repr,
)
def test_without_pickle_values_keep_their_python_types(no_pickle, value):
    back = loose(value)
    assert back == value
    assert type(back) is type(value)


def test_without_pickle_records_with_arrays_travel_also_in_places_without_a_type(no_pickle):
    back = loose([Plain("n", np.arange(10_000)), Answer(token_ids=np.arange(3), logprobs=np.zeros(0), finish="stop")])
    assert np.array_equal(back[0].values, np.arange(10_000))
    assert np.array_equal(back[1].token_ids, np.arange(3))


def test_without_pickle_the_rest_is_refused_by_both_sides(no_pickle):
    kind = Interface.of(Greeter).endpoints["echo"]
    with pytest.raises(TypeError, match=r"value.model\['layers'\]\[1\] is a lock .*does not allow pickle"):
        kind.encode_arguments((Config(),), {})
    with pytest.raises(TypeError, match="Define it at the top of a module"):
        kind.encode_arguments((type("Local", (), {"__module__": "__main__"}),), {})
    with pytest.raises(ValueError, match="holds a pickle, which this job does not allow"):
        codec.decode(codec.decoder_of(Any), across(PICKLED))
    for name in ("tests.runtime.test_codec:Colour", "no_such_module:Color", "subprocess:Popen", "os:getcwd"):
        named = codec.encode(msgspec.msgpack.Ext(records.RECORD, msgspec.msgpack.encode([name, {}])))
        with pytest.raises(ValueError, match="message: "):
            codec.decode(codec.decoder_of(Any), named)


def test_without_pickle_errors_keep_class_arguments_and_attributes(no_pickle):
    error = OddError(7, "seven")
    back = unpack_error(pack_error(error), "m", 0, "h", "e")
    assert isinstance(back, OddError)
    assert (back.code, back.detail, back.args) == (7, "seven", ("code 7",))
    assert isinstance(unpack_error(pack_error(FileNotFoundError(2, "gone", "/x")), "m", 0, "h", "e"), FileNotFoundError)


class Tokens(TypedDict):
    ids: list[int]


class Kinds(Actor):
    @endpoint
    def take(self, color: Color, plain: Plain, tokens: Tokens, either: int | Scored | None) -> Plain: ...  # type: ignore[empty-body]


def test_enums_dataclasses_typed_dicts_and_unions_arrive_as_what_they_are_and_are_checked():
    kind = Interface.of(Kinds).endpoints["take"]
    assert kind.types["plain"] is Plain
    good = (Color.RED, Plain("n", np.arange(3)), {"ids": [1]}, Scored(1.0))
    color, plain, tokens, either = kind.decode_arguments(across(kind.encode_arguments(good, {})))[0]
    assert (color, tokens, either) == (Color.RED, {"ids": [1]}, Scored(1.0))
    assert type(plain) is Plain
    assert np.array_equal(plain.values, np.arange(3))
    for position, bad, path in (
        (0, "blue", "color"),
        (1, Plain("n", [1]), r"plain\.values"),  # type: ignore[arg-type]
        (2, {"ids": ["x"]}, r"tokens\.?\['?ids'?\]|tokens.*ids"),
        (3, "x", "either"),
    ):
        values = list(good)
        values[position] = bad
        with pytest.raises(TypeError, match=f"take: wrong argument: .*`{path}"):
            kind.encode_arguments(tuple(values), {})


def test_a_tensor_as_annotated_argument_is_checked_and_not_copied():
    torch = pytest.importorskip("torch")

    signature = inspect.Signature([inspect.Parameter("batch", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    kind = EndpointType("take", 1, False, False, signature, {"batch": torch.Tensor, "return": None})
    batch = torch.arange(10_000.0)
    payload = kind.encode_arguments((batch,), {})
    assert np.shares_memory(np.frombuffer(payload.buffers[0], np.float32), batch.numpy())
    (back,), _ = kind.decode_arguments(across(payload))
    assert torch.equal(back, batch)
    with pytest.raises(TypeError, match=r"Expected `Tensor`|Expected `torch.Tensor`"):
        kind.encode_arguments((np.zeros(3),), {})


class Mixed(Actor):
    @endpoint
    def both(self, array: np.ndarray, anything: Any, number: int) -> None: ...


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

    expected = """
        Actor ActorError ActorMesh Channel ConnectionRefused Context DeadlineExceeded Death EndpointHandle Failure
        HostMesh MailboxFull NotEnoughGpus OutOfRange Oversize OwnedProcs Owner PeerRefused Point Port PortReceiver
        ProcMesh ProcessDied RendezvousError Restart SelfCall Shape ShapeError StartError Stopped Stream TaskGroup
        Tls TuttiError UnknownActor UnknownDimension ValueMesh blocking context current_rank current_size endpoint
        in_torchrun join join_main lookup on_main_thread spawn_procs this_host torchrun_host wait
    """
    assert runtime.__all__ == sorted(expected.split())
    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name


@pytest.mark.parametrize("room", ["runtime", "sync", "algorithms"])
def test_no_public_name_is_that_of_a_module(room):
    """Python puts a module that is imported in the place of that name: what users get would hang on who came first."""
    package = importlib.import_module(room)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
