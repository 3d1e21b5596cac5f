"""Finished groups as bytes, for checkpoints and kept runs. Arrays come back read-only, of the same dtype and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roles.types import Group

__all__ = ["pack_groups", "unpack_groups"]


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(f"a file of groups can't hold {type(value).__name__}")  # what msgspec expects of a hook


def _unpack(_type: type, value: Any) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODER = msgspec.msgpack.Decoder(list[Group], dec_hook=_unpack)


def pack_groups(groups: Sequence[Group]) -> bytes:
    return _ENCODER.encode(list(groups))


def unpack_groups(data: bytes) -> list[Group]:
    """Raises msgspec.DecodeError (ValidationError) for anything else."""
    return _DECODER.decode(data)
