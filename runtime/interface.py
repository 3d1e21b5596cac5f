"""What a caller must know of an actor class: its endpoints, their parameters and types. Travels with every handle.

IN-1: both sides encode and decode by the same types: the ones that the process which spawned the actor resolved. So an
      annotation may be a name that only that process can resolve (a class of `__main__`, a `TYPE_CHECKING` import:
      `Any`).
IN-2: arguments are bound and checked at the caller: a wrong number, name or type is a TypeError there, before anything
      is sent.
IN-3: a value that can't be sent is a TypeError that names the endpoint, the argument (or result) and the path of the
      part to blame.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from runtime import codec, records
from runtime.actor import SERIAL, concurrency_of, endpoints_of, runs_on_loop
from runtime.blame import blame
from runtime.codec import Payload

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class EndpointType:
    """Signature of one endpoint, and how its values are encoded."""

    def __init__(
        self,
        name: str,
        concurrency: int,
        is_async: bool,
        streams: bool,
        signature: inspect.Signature,
        types: dict[str, Any],
    ) -> None:
        self.name = name
        self.concurrency = concurrency
        self.is_async = is_async
        self.streams = streams
        """A generator: yields many values rather than return one."""
        self.signature = signature
        """Without self and without annotations."""
        self.types = types
        """Resolved types of the parameters and of `return` (a generator: of a value); `Any` where there is none or it
        can't be resolved."""

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("name", "concurrency", "is_async", "streams", "signature", "types")}

    def prepare(self) -> None:
        """Make now what is otherwise made at the first call."""
        _ = self._parameters, self._arguments_decoder, self._checks, self._wrap_result, self._result_decoder

    @property
    def serial(self) -> bool:
        """Whether it shares the serial lane of the actor."""
        return self.concurrency == SERIAL

    def alone_in(self, key: str) -> str:
        """How a call chain names the lane of the actor `key` that this endpoint has to itself while it runs; empty
        where several calls may run."""
        if self.serial:
            return key
        return f"{self.name} of {key}" if self.concurrency == 1 else ""

    def encode_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        """
        Raises:
            TypeError: the arguments don't fit the signature, or one can't be sent.
        """
        wrappers, only_positional = self._parameters
        if not wrappers and not args and not kwargs:
            return codec.NO_VALUES
        if not kwargs and only_positional and len(args) == len(wrappers):
            values = list(args)
        else:
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}{self.signature}: {error}") from None
            bound.apply_defaults()
            values = list(bound.arguments.values())
        try:
            encoded = [wrap(v) for wrap, v in zip(wrappers, values, strict=True)]
            payload = codec.encode(encoded, remember=self._is_typed)
        except TypeError as error:
            raise self._unsendable(values, error) from error.__cause__
        if self._is_typed:
            self._check(values, payload)
        return payload

    def _check(self, values: list[Any], payload: Payload) -> None:
        """
        Raises:
            TypeError: an argument has another type than annotated (IN-2).
        """
        kind, checker = self._checks
        try:
            codec.check(kind, checker, values, payload)
        except msgspec.ValidationError as error:
            raise self._wrong(error) from None

    def _unsendable(self, values: list[Any], error: TypeError) -> TypeError:
        wrappers, _ = self._parameters
        for name, wrap, value in zip(self.signature.parameters, wrappers, values, strict=True):
            if not codec.can_be_sent(wrap(value)):
                return TypeError(f"{self.name}: argument {name!r} can't be sent: {_to_blame(value, name, error)}")
        return error

    def decode_arguments(self, payload: Payload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """
        Raises:
            TypeError: an argument has another type than annotated.
        """
        try:
            values = codec.decode(self._arguments_decoder, payload)
        except msgspec.ValidationError as error:
            raise self._wrong(error) from None
        if self._only_positional:
            return values, {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, value in zip(self.signature.parameters.values(), values, strict=True):
            if parameter.kind in _POSITIONAL:
                args.append(value)
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            else:
                kwargs[parameter.name] = value
        return tuple(args), kwargs

    def encode_result(self, value: Any) -> Payload:
        """
        Raises:
            TypeError: the value can't be sent.
        """
        try:
            return codec.encode(self._wrap_result(value))
        except TypeError as error:
            raise TypeError(
                f"{self.name}: its result can't be sent: {_to_blame(value, 'result', error)}"
            ) from error.__cause__

    def decode_result(self, payload: Payload) -> Any:
        """
        Raises:
            TypeError: the value has another type than annotated.
        """
        try:
            return codec.decode(self._result_decoder, payload)
        except msgspec.ValidationError as error:
            raise TypeError(f"{self.name}: the result does not fit its annotation: {error}") from None

    @functools.cached_property
    def _parameters(self) -> tuple[list[Callable[[Any], Any]], bool]:
        parameters = self.signature.parameters.values()
        return [_wrapper(self._sent_as(p)) for p in parameters], all(p.kind in _POSITIONAL for p in parameters)

    @functools.cached_property
    def _only_positional(self) -> bool:
        return self._parameters[1]

    @functools.cached_property
    def _arguments_type(self) -> Any:
        kinds = tuple(_decoded_as(self._sent_as(p)) for p in self.signature.parameters.values())
        return tuple.__class_getitem__(kinds)

    @functools.cached_property
    def _arguments_decoder(self) -> Any:
        return codec.decoder_of(self._arguments_type)

    @functools.cached_property
    def _is_typed(self) -> bool:
        return any(kind is not Any for kind in typing.get_args(self._arguments_type))

    @functools.cached_property
    def _checks(self) -> tuple[Any, Any]:
        return self._arguments_type, codec.checker_of(self._arguments_type)

    @functools.cached_property
    def _wrap_result(self) -> Callable[[Any], Any]:
        return _wrapper(self.types["return"])

    @functools.cached_property
    def _result_decoder(self) -> Any:
        return codec.decoder_of(_decoded_as(self.types["return"]))

    def _sent_as(self, parameter: inspect.Parameter) -> Any:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            return Any
        kind = self.types[parameter.name]
        if parameter.default is not inspect.Parameter.empty and kind is not Any and kind is not bytes:
            # A default needs not be of the annotated type; it arrives as it is.
            return kind if _fits(parameter.default, kind) else Any
        return kind

    def _wrong(self, error: msgspec.ValidationError) -> TypeError:
        """msgspec says `$[1].x`; say the name of the parameter."""
        text = str(error)
        for index, name in enumerate(self.signature.parameters):
            text = text.replace(f"`$[{index}]", f"`{name}")
        return TypeError(f"{self.name}: wrong argument: {text}")


class Interface:
    """The endpoints of an actor class."""

    def __init__(self, module: str, class_name: str, endpoints: dict[str, EndpointType]) -> None:
        self.module = module
        self.class_name = class_name
        self.endpoints = endpoints
        self._packed: bytes | None = None

    def importable_name(self) -> str:
        """`module:class`.

        Raises:
            TypeError: another process can't import the class.
        """
        return records.name_of(self.module, self.class_name)

    @classmethod
    def of(cls, actor: type) -> Interface:
        """Read a class, resolving its annotations when it is read first (IN-1)."""
        known = _read_classes.get(actor)
        if known is None:
            known = _read_classes[actor] = cls._read(actor)
        return known

    def packed(self) -> bytes:
        """What `unpack_interface` reads."""
        if self._packed is None:
            self._packed = codec.dumps(self)
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    @classmethod
    def _read(cls, actor: type) -> Interface:
        endpoints = {name: _read(name, function) for name, function in endpoints_of(actor).items()}
        return cls(actor.__module__, actor.__qualname__, endpoints)


_read_classes: weakref.WeakKeyDictionary[type, Interface] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=1024)
def unpack_interface(packed: bytes) -> Interface:
    """The interface of a class that another process read; one object for all actors of the class."""
    interface = codec.loads(packed)
    if not isinstance(interface, Interface):
        raise TypeError(f"expected an Interface, got {type(interface).__qualname__}")
    return interface


def _read(name: str, function: Callable[..., Any]) -> EndpointType:
    signature = inspect.signature(function)
    rest = list(signature.parameters.values())[1:]  # without self
    types = {p.name: _resolve(p.annotation, function) for p in rest}
    streams = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
    types["return"] = _resolve(signature.return_annotation, function, of_items=streams)
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in rest])
    concurrency = concurrency_of(function)
    assert concurrency is not None
    return EndpointType(name, concurrency, runs_on_loop(function), streams, bare, types)


def _resolve(annotation: Any, function: Callable[..., Any], *, of_items: bool = False) -> Any:
    """The type of an annotation; Any when it can't be resolved or msgspec can't check it. `of_items`: the T of
    `AsyncIterator[T]` and its kin."""
    if annotation is inspect.Signature.empty:
        return Any
    if isinstance(annotation, str):
        module = sys.modules.get(function.__module__)
        scope = {**(vars(module) if module else {}), **getattr(function, "__globals__", {})}
        try:
            annotation = eval(
                annotation, scope
            )  # the text of an annotation in user code, as typing.get_type_hints does
        except (NameError, AttributeError, TypeError, SyntaxError):
            return Any
    if of_items:
        annotation = (*typing.get_args(annotation), Any)[0]
    if annotation is None:
        return None
    return annotation if codec.supported(annotation) else Any


def _wrapper(kind: Any) -> Callable[[Any], Any]:
    if kind is Any:
        return codec.loosely
    return codec.typed_bytes if kind is bytes else _as_it_is


def _decoded_as(kind: Any) -> Any:
    return Any if kind is bytes else kind


def _to_blame(value: Any, name: str, error: TypeError) -> str:
    path, part = blame(value, name, lambda child: codec.can_be_sent(codec.loosely(child)))
    reason = str(error.__cause__ or error)
    return f"{path} is a {type(part).__qualname__} ({reason})"


def _as_it_is(value: Any) -> Any:
    return value


def _fits(default: Any, kind: Any) -> bool:
    try:
        codec.decode(codec.decoder_of(kind), codec.encode(default))
    except (TypeError, msgspec.ValidationError):
        return False
    return True
