"""Values to bytes and back: msgpack for what is typed, out-of-band buffers for arrays, pickle for the rest.

CO-1: a value annotated with a type that msgspec knows is encoded as msgpack and checked against the type on arrival.
CO-2: an un-annotated, `Any` or unsupported value keeps its Python types exactly: it is pickled (cloudpickle), unless it
      is None, bool, int, float or str, which msgpack keeps as they are.
CO-3: numpy arrays, torch tensors (CPU) and bytes of at least `OUT_OF_BAND` bytes never enter the msgpack body; the
      payload refers to their memory, so it must not change before the payload is sent. (`bytes` inside a Struct or list
      are copied into the body once.)
CO-4: decoded arrays and tensors are writable and own their memory.
CO-5: a tensor arrives on the CPU, without gradient history.
CO-6: after `allow_pickle(False)` this process neither writes nor reads a pickle: what CO-2 would pickle is written as
      containers and records (`records.py`) or refused.
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

from runtime import records

if TYPE_CHECKING:
    import numpy as np

OUT_OF_BAND = 4096
"""Smaller arrays are copied into the body: a buffer of its own would cost more."""

CHECK_BY_DECODING = 64 * 1024
"""Bytes of a body up to which `check` decodes it. Beyond that, fields of records are checked by the receiver only."""

_ARRAY, _TENSOR, _BYTES, _PICKLE, _SCALAR, _WHOLE = 1, 2, 3, 4, 5, 6
_NUMERIC = frozenset("biufcmM")
_PLAIN = (type(None), bool, float, str)

msgpack = msgspec.msgpack
_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder().decode


class Payload:
    """A body and its out-of-band buffers."""

    __slots__ = ("body", "buffers", "nbytes", "originals")

    def __init__(
        self,
        body: bytes | memoryview,
        buffers: Sequence[memoryview | bytearray] = (),
        originals: Sequence[Any] = (),
    ) -> None:
        self.body = body
        self.buffers = buffers
        self.originals = originals
        """What msgspec did not encode itself, in order; for `check`."""
        self.nbytes = len(body) + sum(map(len, buffers)) if buffers else len(body)


NO_VALUES = Payload(_encode([]))
"""An empty list."""


class _Encoding(threading.local):
    """Buffers of the value that this thread encodes or decodes at the moment."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.originals: Any = None


_now = _Encoding()


class _Whole:
    """A value that is encoded as if no part of it had a type."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Pickled:
    """Wrapper of a value that is to be pickled (CO-2)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_pickle_is_allowed = True


def allow_pickle(allowed: bool) -> None:
    """Whether this process may use pickle at all (CO-6). Set once at its start, the same in all processes of a job."""
    global _pickle_is_allowed
    _pickle_is_allowed = allowed


def pickle_is_allowed() -> bool:
    """What `allow_pickle` was told; true by default."""
    return _pickle_is_allowed


def loosely(value: Any) -> Any:
    """A value ready for a place without a type (CO-2)."""
    cls = type(value)
    if cls in _PLAIN or (cls is int and -(2**63) <= value < 2**63):
        return value
    return Pickled(value)


def typed_bytes(value: Any) -> Any:
    """A value ready for a place annotated as bytes: large ones go out of band."""
    return Pickled(value) if isinstance(value, bytes | bytearray | memoryview) and len(value) >= OUT_OF_BAND else value


def encode(value: Any, *, remember: bool = False) -> Payload:
    """Encode a value whose loose parts are wrapped by `loosely`.

    Args:
        remember: keep in the payload what `check` needs.

    Raises:
        TypeError: a part can't be pickled; the message names its type.
    """
    cls = type(value)
    if cls in _PLAIN or (cls is int and -(2**63) <= value < 2**63):
        return Payload(_encode(value))
    buffers: list[memoryview] = []
    originals: list[Any] | None = [] if remember else None
    before = _now.buffers, _now.originals
    _now.buffers, _now.originals = buffers, originals
    try:
        body = _value_encoder.encode(value)
    except OverflowError:  # an int beyond 64 bits, which only pickle can carry
        buffers.clear()
        if originals is not None:
            originals.clear()
        body = _value_encoder.encode(_Whole(_unwrap(value)))
    finally:
        _now.buffers, _now.originals = before
    return Payload(body, buffers, originals or ())


def decode(decoder: msgpack.Decoder[Any], payload: Payload) -> Any:
    """Decode with a decoder made by `decoder_of`.

    Raises:
        msgspec.ValidationError: the value does not fit the type; the message has the path.
    """
    body = payload.body
    if body[0] in _EXTENSION_TAGS:  # pickled as a whole, whatever the type says
        decoder = _any_decoder
    if not payload.buffers:
        return decoder.decode(body)
    before, _now.buffers = _now.buffers, list(payload.buffers)
    try:
        return decoder.decode(body)
    finally:
        _now.buffers = before


def dumps(value: Any) -> bytes:
    """A value without a type, as one piece of bytes.

    Raises:
        TypeError: a part can't be sent.
    """
    payload = encode(loosely(value))
    return _encode([payload.body, *payload.buffers])


def loads(data: bytes) -> Any:
    """The reverse of `dumps`.

    Raises:
        ValueError: it holds a pickle, which is not allowed (CO-6), or names a class that isn't there.
    """
    body, *buffers = _decode(data)
    return decode(_any_decoder, Payload(body, [bytearray(buffer) for buffer in buffers]))


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


def can_be_sent(value: Any) -> bool:
    """Whether `encode` takes the value."""
    try:
        encode(value)
    except TypeError:
        return False
    return True


def check(type_: Any, decoder: msgpack.Decoder[Any], value: Any, payload: Payload) -> None:
    """Whether an encoded value fits a type, of which `checker_of` made the decoder: what the receiver would find.

    Raises:
        msgspec.ValidationError: it doesn't; the message has the path.
    """
    originals, payload.originals = payload.originals, ()
    whole = payload.body[0] in _EXTENSION_TAGS
    if whole or len(payload.body) > CHECK_BY_DECODING:
        try:
            msgspec.convert(value, type_, dec_hook=_keep)
            return
        except msgspec.ValidationError:
            if whole:
                raise
            # Encoding makes some things fit (a numpy number for an int): look at what came out.
    _now.originals = iter(originals)
    try:
        decoder.decode(payload.body)
    finally:
        _now.originals = None


def checker_of(type_: Any) -> msgpack.Decoder[Any]:
    """A decoder for `check`: arrays and pickled parts are not decoded, the originals stand for themselves."""
    return msgpack.Decoder(type_, dec_hook=_keep, ext_hook=_original)


def _original(code: int, data: memoryview) -> Any:
    return next(_now.originals)


def _keep(type_: type, value: Any) -> Any:
    """What msgspec doesn't know is compared with the type as it is."""
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, Pickled):
        return value.value
    if isinstance(value, list):
        return [_unwrap(v) for v in value]
    return value


def _write_extension(value: Any) -> Any:
    """What msgspec can't encode itself."""
    written = _write_other(value)
    if _now.originals is not None and type(written) is msgpack.Ext:
        _now.originals.append(value.value if isinstance(value, Pickled) else value)
    return written


def _write_other(value: Any) -> Any:
    if type(value) is _Whole:
        return msgpack.Ext(_WHOLE, _encode_part(loosely(value.value)))
    exact = isinstance(value, Pickled)
    if exact:
        value = value.value
        if type(value) is bytes or type(value) is bytearray:
            return _extension(_BYTES, memoryview(value), type(value).__name__, (len(value),))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if type(value) is numpy.ndarray and value.dtype.kind in _NUMERIC and value.dtype.isnative:
            return _write_array(value)
        if isinstance(value, numpy.number | numpy.bool_):
            if not exact:
                return value.item()
            return _extension(_SCALAR, memoryview(value.tobytes()), value.dtype.str, ())
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and _is_plain(value, torch):
        raw = _tensor_bytes(value, torch)
        return _extension(_TENSOR, raw, str(value.dtype)[6:], value.shape)
    if not _pickle_is_allowed:
        return records.write(value, loosely, _encode_part)
    return msgpack.Ext(_PICKLE, _pickle(value))


def _encode_part(value: Any) -> bytes:
    """The content of an extension: its buffers join those of the whole."""
    before, _now.originals = _now.originals, None  # the extension as a whole is what `check` meets
    try:
        return _value_encoder.encode(value)
    finally:
        _now.originals = before


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
    if code in records.CODES:
        return records.read(code, data, _any_decoder.decode)
    if code == _WHOLE:
        return _any_decoder.decode(data)
    if code == _PICKLE:
        if not _pickle_is_allowed:
            raise ValueError("message: it holds a pickle, which this job does not allow")
        (first, count), rest = _split(data)
        return pickle.loads(rest, buffers=_now.buffers[first : first + count])
    (index, kind, shape), rest = _split(data)
    buffer = bytearray(rest) if index is None else _now.buffers[index]
    if code in (_ARRAY, _SCALAR):
        import numpy as np

        array = np.frombuffer(buffer, dtype=kind).reshape(shape)
        return array if code == _ARRAY else array[()]
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
