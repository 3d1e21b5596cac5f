"""What a model's own weight loaders do, recorded: which box of which checkpoint tensor goes to which box of which
parameter. torch only; `sync.layouts.vllm` applies it to vLLM.

Loaders slice, narrow, chunk and copy. They are driven once with tensors that have shapes and no memory: a view of one
still says where in the checkpoint tensor it lies, so every copy into a parameter is two boxes. Nothing is written.

LO-1: a recorded copy is exact: `Recorded.apply` leaves the bytes that loading the same tensors would, and leaves alone
      what loading fills with a constant.
LO-2: what a loader computes with (a sum, a concatenation, a logarithm) is named in `computed`, never guessed, and
      wanted whole.
LO-3: every element of every parameter is copied, filled with a constant, computed, or named in `untouched`.
LO-4: a checkpoint tensor of which this rank takes nothing (an expert of another rank) is not in the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sync.layout import Box, Entry, Layout, LayoutError

__all__ = ["Copy", "Recorded", "record"]


class Copy(msgspec.Struct, frozen=True):
    """One box of a checkpoint tensor and its place in a parameter."""

    name: str
    """Of the checkpoint tensor."""
    source: Box
    parameter: str
    target: Box
    order: tuple[int, ...] = ()
    """Dimensions of the source in the order of the target's; empty: as they are."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What loading one model does on one rank."""

    wanted: tuple[Entry, ...]
    """For each checkpoint tensor that this rank takes something of: the smallest box around that, all of it where it is
    computed with; in the dtype given to `record`."""
    copies: tuple[Copy, ...]
    shapes: dict[str, tuple[int, ...]]
    """Of every parameter and buffer; a loader may fill either, and `parameter` of a copy means both."""
    dtypes: dict[str, str]
    computed: dict[str, tuple[str, ...]] = {}
    """Parameter -> checkpoint tensors that its content is computed from: only the loader itself can make it (LO-2)."""
    filled: dict[str, tuple[Box, ...]] = {}
    """Boxes of parameters that the loaders fill with a constant, such as rows that pad a vocabulary."""
    untouched: tuple[str, ...] = ()
    """Parameters with elements that no tensor is loaded into."""
    aliases: dict[str, str] = {}
    """Name of a parameter -> the first name of the same memory: tied weights."""

    def layout(self, *, constant: Sequence[str] = ()) -> Layout:
        """What this rank wants of trainer ranks (W2).

        Args:
            constant: parameters that training never changes.

        Raises:
            LayoutError: a parameter is computed, or has elements that nothing is loaded into.
        """
        lost = [f"{p}: computed from {', '.join(names[:3])}" for p, names in sorted(self.computed.items())]
        lost += [f"{p}: not all of it is loaded" for p in self.untouched if p not in constant]
        if lost:
            raise LayoutError(
                f"parameters can't be filled in place: {'; '.join(lost[:10])} ({len(lost)} in all). Load them with the "
                f"model's own loaders, or name them as constant"
            )
        return Layout(self.wanted, constant=tuple(constant))

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, only: Any = None) -> None:
        """Copy what has come into parameters, in place, on the current stream.

        Args:
            parameters: live ones, by name, as the loaders fill them.
            weights: by name, each in the shape of its box in `wanted`.
            only: names of the parameters to fill; None: all.
        """
        boxes = {entry.name: entry.box for entry in self.wanted}
        for copy in self.copies:
            if only is not None and copy.parameter not in only:
                continue
            part = weights[copy.name][copy.source.slices_in(boxes[copy.name])]
            if copy.order:
                part = part.permute(copy.order)
            place = parameters[copy.parameter][tuple(map(slice, copy.target.lo, copy.target.hi))]
            place.copy_(part.reshape(place.shape))


def record(model: nn.Module, tensors: Iterable[Entry]) -> Recorded:
    """Drive `model.load_weights` with tensors without memory.

    Args:
        model: as it is built, before its weights are made ready for kernels; on any device: nothing is written.
        tensors: the checkpoint, whole, in the order of the file; dtypes are those that will be given to `apply`.

    Raises:
        LayoutError: the loaders want to know values, or refuse a tensor; its name is in the text.
    """
    checkpoint = list(tensors)
    recorder = _Recorder(model)

    def given() -> Iterator[tuple[str, Tensor]]:
        for entry in checkpoint:
            recorder.current = entry.name
            yield entry.name, recorder.source(entry)

    try:
        with torch.no_grad(), recorder:
            model.load_weights(given())  # type: ignore[operator]
    except LayoutError:
        raise
    except Exception as error:  # whatever a loader of somebody else's model raises
        raise LayoutError(
            f"{recorder.current}: {type(model).__name__}.load_weights refused it: {type(error).__name__}: {error}"
        ) from error
    return recorder.recorded(checkpoint)


class _Recorder(TorchDispatchMode):
    """Sees every operation of the loaders."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = ""
        """The checkpoint tensor that is being loaded."""
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        self._aliases: dict[str, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for name, parameter in named:
            first = self._parameters.setdefault(_memory(parameter), (name, parameter.detach()))[0]
            if first != name:
                self._aliases[name] = first
        self._sources: dict[int, tuple[str, tuple[int, ...], torch.dtype | None]] = {}
        """Memory of a checkpoint tensor -> name, shape, and the dtype that its values have been rounded to."""
        self._kept: list[Tensor] = []
        """Sources stay alive, so that no address is used twice."""
        self._mixtures: dict[int, set[str]] = {}
        self._item: Tensor | None = None
        self._copies: list[Copy] = []
        self._filled: dict[str, list[Box]] = {}
        self._computed: dict[str, set[str]] = {}

    def source(self, entry: Entry) -> Tensor:
        """A checkpoint tensor without memory."""
        return self._new(entry.name, entry.shape, getattr(torch, entry.dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], Tensor) else None
        writes = func._schema.name.endswith("_") and target is not None and _memory(target) in self._parameters
        if writes:
            assert target is not None
            self._written(func, target, args)
            return target
        inputs = [a for a in _flat((args, kwargs)) if isinstance(a, Tensor)]
        known = [t for t in inputs if _memory(t) in self._sources]
        if not known and not any(_memory(t) in self._mixtures for t in inputs):
            return func(*args, **kwargs)
        if known and func is torch.ops.aten._local_scalar_dense.default:
            self._item = target
            return float("nan")  # to be found again in what is filled with it
        if known and func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return self._cast(known[0], kwargs.get("dtype"))
        if any(t.device.type == "meta" for t in inputs) and "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        found = func(*args, **kwargs)
        names = {self._sources[_memory(t)][0] for t in known}.union(
            *(self._mixtures.get(_memory(t), ()) for t in inputs)
        )
        for made in (t for t in _flat(found) if isinstance(t, Tensor)):
            if _memory(made) not in self._sources and _memory(made) not in self._parameters:
                self._mixtures.setdefault(_memory(made), set()).update(names)
                self._kept.append(made)
        return found

    def _written(self, func: Any, target: Tensor, args: Any) -> None:
        name, parameter = self._parameters[_memory(target)]
        place = _box(target, parameter.shape, parameter.stride(), int(parameter.storage_offset()))
        value = args[1] if len(args) > 1 else None
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            source = self._item if value != value else None
        else:
            source = value if func is torch.ops.aten.copy_.default and isinstance(value, Tensor) else None
            if source is None:
                self._computed.setdefault(name, set()).add(self.current)
                return
            if source.shape != target.shape:
                source = source.expand(target.shape)
        item, self._item = self._item, None
        if item is not None and source is not item:  # the loader has looked at a value
            self._computed.setdefault(name, set()).add(self._sources[_memory(item)][0])
            return
        if source is None or _memory(source) not in (self._sources.keys() | self._mixtures.keys()):
            if place is not None:
                self._filled.setdefault(name, []).append(place[0])
            return
        if _memory(source) in self._mixtures:
            self._computed.setdefault(name, set()).update(self._mixtures[_memory(source)])
            return
        origin, shape, rounded = self._sources[_memory(source)]
        taken = _box(source, shape, _strides(shape), 0)
        exact = rounded in (None, parameter.dtype)
        copy = None if place is None or taken is None or not exact else _copy(origin, taken, name, place)
        if copy is None:
            self._computed.setdefault(name, set()).add(origin)
        else:
            self._copies.append(copy)

    def recorded(self, checkpoint: Sequence[Entry]) -> Recorded:
        """All that was seen."""
        around: dict[str, Box] = {}
        for copy in self._copies:
            box = around.get(copy.name, copy.source)
            lo, hi = map(min, box.lo, copy.source.lo), map(max, box.hi, copy.source.hi)
            around[copy.name] = Box(tuple(lo), tuple(hi))
        whole = {name for names in self._computed.values() for name in names}
        around |= {entry.name: entry.box for entry in checkpoint if entry.name in whole}
        parameters = dict(self._parameters.values())
        return Recorded(
            wanted=tuple(msgspec.structs.replace(e, box=around[e.name]) for e in checkpoint if e.name in around),
            copies=tuple(self._copies),
            shapes={name: tuple(p.shape) for name, p in parameters.items()},
            dtypes={name: str(p.dtype).removeprefix("torch.") for name, p in parameters.items()},
            computed={name: tuple(sorted(names)) for name, names in self._computed.items()},
            filled={name: tuple(boxes) for name, boxes in self._filled.items()},
            untouched=tuple(name for name, p in parameters.items() if self._is_lacking(name, p)),
            aliases=self._aliases,
        )

    def _is_lacking(self, name: str, parameter: Tensor) -> bool:
        """LO-3. Few buffers are loaded."""
        if name in self._computed or name in self._buffers:
            return False
        left = [] if not parameter.numel() else [Box.whole(parameter.shape)]
        written = [c.target for c in self._copies if c.parameter == name] + self._filled.get(name, [])
        for box in written:
            left = [rest for part in left for rest in (part.minus(box) if box.lo or not part.lo else [part])]
            if not parameter.ndim:
                left = []
        return bool(left)

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rounded: torch.dtype | None = None) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._sources[_memory(made)] = name, tuple(shape), rounded
        self._kept.append(made)
        return made

    def _cast(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The same elements in another dtype: their place in the checkpoint is kept."""
        name, shape, rounded = self._sources[_memory(tensor)]
        dtype = dtype or tensor.dtype
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            rounded = dtype
        whole = self._new(name, shape, dtype, rounded)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


Place = tuple[Box, tuple[int, ...]]
"""A box, and for each dimension of the view that is longer than 1 the dimension of the box that it runs along."""


def _box(view: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Place | None:
    """Where a view lies in a tensor; None if that is no box."""
    rest = int(view.storage_offset()) - offset
    lo = [0] * len(shape)
    for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[d] > 1 and strides[d]:
            lo[d], rest = divmod(rest, strides[d])
    hi = [a + 1 for a in lo]
    if rest or any(a >= n for a, n in zip(lo, shape, strict=True) if n):
        return None if view.numel() else (Box(tuple(lo), tuple(lo)), ())
    along: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        d = next((i for i, n in enumerate(shape) if n > 1 and strides[i] == stride and hi[i] == lo[i] + 1), -1)
        if d < 0:
            return None
        along.append(d)
        while size > shape[d] - lo[d]:  # the view runs on into the dimension before
            if lo[d] or size % shape[d] or d == 0 or strides[d - 1] != strides[d] * shape[d]:
                return None
            hi[d], size, d = shape[d], size // shape[d], d - 1
        hi[d] = lo[d] + size
    return Box(tuple(lo), tuple(hi)), tuple(along)


def _copy(name: str, taken: Place, parameter: str, place: Place) -> Copy | None:
    """None where the order of elements differs in a way that no order of dimensions tells."""
    (source, from_), (target, to) = taken, place
    if list(to) != sorted(to):
        return None
    if list(from_) == sorted(from_):
        return Copy(name, source, parameter, target)
    if len(from_) != len(set(from_)) or sum(n > 1 for n in source.shape) != len(from_):
        return None
    rest = [d for d in range(len(source.lo)) if d not in from_]
    return Copy(name, source, parameter, target, (*rest, *from_))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(1, size)
    return tuple(reversed(found))


def _memory(tensor: Tensor) -> int:
    """Names a piece of memory, also one of no bytes."""
    return int(tensor.untyped_storage()._cdata)


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    elif isinstance(tree, dict):
        yield from _flat(list(tree.values()))
    else:
        yield tree
