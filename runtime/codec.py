"""Values to bytes and back: msgpack for what is typed, out-of-band buffers for arrays, pickle for the rest.

CO-1: a value annotated with a type that msgspec knows is encoded as msgpack and checked against the type on arrival.
CO-2: an un-annotated, `Any` or unsupported value keeps its Python types exactly: it is pickled (cloudpickle), unless it
      is None, bool, int, float or str, which msgpack keeps as they are.
CO-3: numpy arrays, torch tensors (CPU) and bytes of at least `OUT_OF_BAND` bytes never enter the msgpack body; the
      payload refers to their memory, so it must not change before the payload is sent. (`bytes` inside a Struct or list
      are copied into the body once.)
CO-4: decoded arrays and tensors are writable and own their memory.
CO-5: a tensor arrives on the CPU, without gradient history.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

if TYPE_CHECKING:
    import numpy as np

OUT_OF_BAND = 4096
"""Smaller arrays are copied into the body: a buffer of its own would cost more."""

_ARRAY, _TENSOR, _BYTES, _PICKLE = 1, 2, 3, 4
_NUMERIC = frozenset("biufcmM")
_PLAIN = (type(None), bool, float, str)

msgpack = msgspec.msgpack
_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder().decode


class Payload:
    """A body and its out-of-band buffers."""

    __slots__ = ("body", "buffers", "nbytes")

    def __init__(self, body: bytes | memoryview, buffers: Sequence[memoryview | bytearray] = ()) -> None:
        self.body = body
        self.buffers = buffers
        self.nbytes = len(body) + sum(len(b) for b in buffers)


class _Encoding(threading.local):
    """Buffers of the value that this thread encodes or decodes at the moment."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []


_now = _Encoding()


class Pickled:
    """Wrapper of a value that is to be pickled (CO-2)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def loosely(value: Any) -> Any:
    """A value ready for a place without a type (CO-2)."""
    cls = type(value)
    if cls in _PLAIN or (cls is int and -(2**63) <= value < 2**63):
        return value
    return Pickled(value)


def typed_bytes(value: Any) -> Any:
    """A value ready for a place annotated as bytes: large ones go out of band."""
    return Pickled(value) if isinstance(value, bytes | bytearray | memoryview) and len(value) >= OUT_OF_BAND else value


def encode(value: Any) -> Payload:
    """Encode a value whose loose parts are wrapped by `loosely`.

    Raises:
        TypeError: a part can't be pickled; the message names its type.
    """
    buffers: list[memoryview] = []
    before, _now.buffers = _now.buffers, buffers
    try:
        body = _value_encoder.encode(value)
    except OverflowError:  # an int beyond 64 bits, which only pickle can carry
        buffers.clear()
        body = _value_encoder.encode(Pickled(_unwrap(value)))
    finally:
        _now.buffers = before
    return Payload(body, buffers)


def decode(decoder: msgpack.Decoder[Any], payload: Payload) -> Any:
    """Decode with a decoder made by `decoder_of`.

    Raises:
        msgspec.ValidationError: the value does not fit the type; the message has the path.
    """
    before, _now.buffers = _now.buffers, list(payload.buffers)
    try:
        if payload.body[0] in _EXTENSION_TAGS:  # pickled as a whole, whatever the type says
            return _any_decoder.decode(payload.body)
        return decoder.decode(payload.body)
    finally:
        _now.buffers = before


def decoder_of(type_: Any) -> msgpack.Decoder[Any]:
    """A decoder of the type that understands our extensions.

    Raises:
        TypeError: msgspec does not support the type.
    """
    return msgpack.Decoder(type_, dec_hook=_convert, ext_hook=_read_extension)


def supported(type_: Any) -> bool:
    """Whether values of the annotation are sent as typed msgpack (CO-1) rather than pickled (CO-2)."""
    if type_ is Any or type_ is object:
        return False
    try:
        decoder_of(type_)
    except TypeError:
        return False
    return True


def _unwrap(value: Any) -> Any:
    if isinstance(value, Pickled):
        return value.value
    if isinstance(value, list):
        return [_unwrap(v) for v in value]
    return value


def _write_extension(value: Any) -> Any:
    """What msgspec can't encode itself."""
    exact = isinstance(value, Pickled)
    if exact:
        value = value.value
        if type(value) is bytes or type(value) is bytearray:
            return _extension(_BYTES, memoryview(value), type(value).__name__, (len(value),))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if type(value) is numpy.ndarray and value.dtype.kind in _NUMERIC and value.dtype.isnative:
            return _write_array(value)
        if not exact and isinstance(value, numpy.number | numpy.bool_):
            return value.item()
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and _is_plain(value, torch):
        raw = _tensor_bytes(value, torch)
        return _extension(_TENSOR, raw, str(value.dtype)[6:], value.shape)
    return msgpack.Ext(_PICKLE, _pickle(value))


_value_encoder = msgpack.Encoder(enc_hook=_write_extension)


def _extension(code: int, raw: memoryview, kind: str, shape: Sequence[int]) -> msgpack.Ext:
    """An array, tensor or bytes: a reference to an out-of-band buffer, or a small one inline."""
    if len(raw) < OUT_OF_BAND:
        return msgpack.Ext(code, _join([None, kind, shape], raw))
    _now.buffers.append(raw)
    return msgpack.Ext(code, _join([len(_now.buffers) - 1, kind, shape], b""))


def _join(header: Any, rest: bytes | memoryview) -> bytes:
    encoded = _encode(header)
    return b"".join((len(encoded).to_bytes(2, "little"), encoded, rest))


def _write_array(array: np.ndarray) -> msgpack.Ext:
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    raw = memoryview(contiguous.reshape(-1).view("u1").data)
    return _extension(_ARRAY, raw, array.dtype.str, array.shape)


def _is_plain(tensor: Any, torch: Any) -> bool:
    return bool(tensor.layout == torch.strided and not tensor.is_quantized)


def _tensor_bytes(tensor: Any, torch: Any) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle with buffers and tensors out of band."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, torch):
            raw = pickle.PickleBuffer(_tensor_bytes(obj, torch))
            return _build_tensor, (raw, str(obj.dtype)[6:], tuple(obj.shape))
        return super().reducer_override(obj)


def _pickle(value: Any) -> bytes:
    """Header [first buffer, number of buffers], then the pickle."""
    buffers = _now.buffers
    first = len(buffers)

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=keep_in_band).dump(value)
    except Exception as error:  # __reduce__ of user code may raise anything; say which value it was
        raise TypeError(f"a value of type {type(value).__qualname__} can't be sent: {error}") from error
    return _join([first, len(buffers) - first], stream.getbuffer())


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _PICKLE:
        (first, count), rest = _split(data)
        return pickle.loads(rest, buffers=_now.buffers[first : first + count])
    (index, kind, shape), rest = _split(data)
    buffer = bytearray(rest) if index is None else _now.buffers[index]
    if code == _ARRAY:
        import numpy as np

        return np.frombuffer(buffer, dtype=kind).reshape(shape)
    if code == _TENSOR:
        return _build_tensor(buffer, kind, shape)
    if code == _BYTES:
        return bytes(buffer) if kind == "bytes" else bytearray(buffer)
    raise ValueError(f"message: unknown extension {code}; the other side runs another version of this package")


def _split(data: memoryview) -> tuple[Any, memoryview]:
    """The header that `_join` put in front, and what follows it."""
    end = 2 + int.from_bytes(data[:2], "little")
    return _decode(data[2:end]), data[end:]


_any_decoder = msgpack.Decoder(ext_hook=_read_extension)
_EXTENSION_TAGS = frozenset((0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))


def _build_tensor(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    raw = memoryview(buffer)
    kind = getattr(torch, dtype)
    if not len(raw):
        return torch.empty(tuple(shape), dtype=kind)
    if raw.readonly:
        raw = memoryview(bytearray(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(tuple(shape))


def _convert(type_: type, value: Any) -> Any:
    """For types that msgspec doesn't know: the value is already built, or is a number for a numpy scalar."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(type_, type) and issubclass(type_, numpy.generic):
        return type_(value)
    return value
