"""What a plain torch module wants or holds: every parameter whole, in its own names.

MD-1: as a receiver every parameter and every buffer is listed: a parameter known by several names (a tied head) is sent
      under the first and derived for the others; a buffer is constant unless it is named in `sent_buffers` (router
      bias, running statistics), which are sent like parameters (W2).
MD-2: as a sender a tied parameter is listed once, under its first name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sync.layout import Entry, Layout, LayoutError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["receiver_layout", "sender_layout"]


def sender_layout(module: nn.Module, *, sent_buffers: Collection[str] = ()) -> Layout:
    """What a rank that holds the whole module can send (MD-2)."""
    buffers = dict(module.named_buffers())
    _check_known(sent_buffers, buffers)
    named = [*module.named_parameters(), *((n, b) for n, b in buffers.items() if n in sent_buffers)]
    return Layout(tuple(_entry(name, tensor) for name, tensor in named))


def receiver_layout(module: nn.Module, *, sent_buffers: Collection[str] = ()) -> Layout:
    """What a rank that runs the whole module wants (MD-1).

    Raises:
        LayoutError: `sent_buffers` names a buffer that the module doesn't have.
    """
    first: dict[int, str] = {}
    entries: list[Entry] = []
    derived: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        entries.append(_entry(name, parameter))
        origin = first.setdefault(id(parameter), name)
        if origin != name:
            derived[name] = origin
    buffers = dict(module.named_buffers())
    _check_known(sent_buffers, buffers)
    entries += [_entry(name, buffer) for name, buffer in buffers.items()]
    constant = tuple(name for name in buffers if name not in sent_buffers)
    return Layout(tuple(entries), derived=derived, constant=constant)


def _entry(name: str, tensor: Tensor) -> Entry:
    return Entry.whole(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))


def _check_known(names: Collection[str], buffers: Collection[str]) -> None:
    unknown = sorted(set(names) - set(buffers))
    if unknown:
        raise LayoutError(f"{unknown[0]}: not a buffer of this module; it has {sorted(buffers)[:5]}")
