"""The small engine's forward pass in our C++, float32 on CPU (contract: roles/decoder.py).

DC-1: a row's logits have the same bits whatever other rows are computed with it.
DC-2: weights are read where the modules hold them: there is no copy to refresh after a write in place (DE-2).
DC-3: prompts are computed without padding, each token after those before it in the same slot.

Rows are shared out among torch's threads in whole tiles of 16; nobody waits for anybody within a step.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roles import native
from roles.decoder import CACHE_STEP, refuse_what_a_short_check_would_miss
from roles.fused_modules import epsilon_of, is_silu

_LANES = 16
"""Rows that one vector holds, at most: what threads are given begins at multiples of it."""
_SHARE = 2 * _LANES
"""Fewer rows than this are not worth a thread of their own."""

_ROW = np.dtype([("token", np.int32), ("slot", np.int32), ("position", np.int32), ("out", np.int32)])


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("input_norm", "query", "key", "value", "query_bias", "key_bias", "value_bias", "query_norm", "key_norm"),
            *("out", "post_norm", "gate", "up", "down"),
        )
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        *((name, ctypes.c_void_p) for name in ("embed", "norm", "head", "cos", "sin", "layer", "cache")),
        *((name, ctypes.c_int64) for name in ("slots", "length")),
    ]


class _Unlike(Exception):
    """Something that the C++ doesn't compute."""


class CpuDecoder:
    """A `roles.decoder.Decoder`; made by `of`."""

    def __init__(self, library: ctypes.CDLL, model: Any, num_slots: int) -> None:
        config, base = model.config, model.base_model
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        refuse_what_a_short_check_would_miss(model)
        self._library = library
        self._rotary: nn.Module = base.rotary_emb
        attention = base.layers[0].self_attn
        self._kept: list[Tensor] = []  # whose memory the structs point to
        self._epsilons: set[float] = set()
        self._dim, self._heads = int(attention.head_dim), int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._hidden, self._inner = int(config.hidden_size), int(config.intermediate_size)
        self._layers = (_Layer * len(base.layers))(*(self._layer(layer) for layer in base.layers))
        table = self.vocab_size, self._hidden
        self._struct = _Model(
            layers=len(self._layers),
            hidden=self._hidden,
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            inner=self._inner,
            vocab=self.vocab_size,
            scale=float(attention.scaling),
            embed=self._plain(model.get_input_embeddings(), nn.Embedding, table),
            norm=self._norm(base.norm, self._hidden),
            head=self._plain(model.get_output_embeddings(), nn.Linear, table),
            layer=ctypes.addressof(self._layers),
        )
        if len(self._epsilons) != 1 or self._dim % 2 or self._heads % self._kv_heads:
            raise _Unlike
        (self._struct.epsilon,) = self._epsilons
        self._cache = torch.empty((len(self._layers), 2, num_slots, self._kv_heads, 0, self._dim))
        self._cos = self._sin = torch.empty(0)
        self._workers = ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1), thread_name_prefix="decode")
        self._threads = torch.get_num_threads()
        with torch.inference_mode():
            self.reserve(CACHE_STEP)

    @classmethod
    def of(cls, model: Any, num_slots: int) -> CpuDecoder | None:
        """None where it can't: another device or dtype, modules that it doesn't know, no compiler."""
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or (library := native.library()) is None:
            return None
        try:
            return cls(library, model, num_slots)
        except (_Unlike, AttributeError):
            return None

    def reserve(self, length: int) -> None:
        old = self._cache.shape[4]
        if length <= old:
            return
        length = -(-max(length, 2 * old) // CACHE_STEP) * CACHE_STEP
        length += CACHE_STEP * (length // CACHE_STEP % 2 == 0)  # an odd number: rows don't fall on the same cache lines
        grown = self._cache.new_zeros((*self._cache.shape[:4], length, self._dim))
        grown[..., :old, :] = self._cache  # blocks of keys stand one after another, as positions do
        self._use(grown)
        cos, sin = self._rotary(grown.new_empty(1), torch.arange(length)[None])
        half = self._dim // 2
        if cos.shape[-1] != self._dim or not torch.equal(cos[..., :half], cos[..., half:]):
            raise _Unlike
        self._cos, self._sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self._struct.cos, self._struct.sin = self._cos.data_ptr(), self._sin.data_ptr()

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        old, new = np.array(source, np.int64), np.array(target, np.int64)
        self._library.tutti_copy(
            ctypes.byref(self._struct), _pointer(old), _pointer(new), ctypes.c_int64(len(old)), ctypes.c_int64(length)
        )

    def prefill(self, prompts: Sequence[Sequence[int]], owners: Sequence[int], first_slot: int) -> Tensor:
        width = max(len(prompt) for prompt in prompts)
        self.reserve(width)
        slots: dict[int, int] = {}  # of the first sample of each prompt
        for row, owner in enumerate(owners):
            slots.setdefault(owner, first_slot + row)
        hidden = self._read(prompts, [slots[index] for index in range(len(prompts))])
        source = [slots[owner] for owner in owners]
        others = [(old, first_slot + row) for row, old in enumerate(source) if old != first_slot + row]
        if others:
            self.move([old for old, _ in others], [new for _, new in others], width)
        return self._logits(hidden)

    def decode(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        self.reserve(longest + 1)
        count = len(token_ids)
        rows = np.empty(count, _ROW)
        rows["token"], rows["position"] = token_ids.numpy(), positions.numpy()
        rows["slot"] = np.arange(count)
        hidden, logits = torch.empty(count, self._hidden), self._room(count)

        def part(begin: int, end: int) -> None:
            mine = rows[begin:end]
            mine["out"] = np.arange(end - begin)
            self._run_hidden(mine, hidden[begin:end])
            self._run_logits(hidden[begin:end], logits[:, begin:])

        self._share(part, _parts(count, self._threads))
        return logits.t()[:count]

    def score(self, token_ids: Tensor) -> Tensor:
        sequences = token_ids.tolist()
        self.reserve(token_ids.shape[1])
        rows = self._cache
        self._use(rows.new_zeros((*rows.shape[:2], len(sequences), *rows.shape[3:])))  # they are no rows
        try:
            hidden = self._read(sequences, range(len(sequences)), all_tokens=True)
        finally:
            self._use(rows)
        return self._logits(hidden).reshape(*token_ids.shape, -1)

    def _use(self, cache: Tensor) -> None:
        self._cache = cache
        self._struct.cache, self._struct.slots, self._struct.length = cache.data_ptr(), cache.shape[2], cache.shape[4]

    def _read(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], *, all_tokens: bool = False) -> Tensor:
        """[P, hidden] after the last token of each prompt, or after every token of all ([T, hidden])."""
        lengths = np.array([len(prompt) for prompt in prompts])
        ends = lengths.cumsum()
        rows = np.empty(ends[-1], _ROW)
        rows["token"] = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
        rows["slot"] = np.repeat(np.asarray(slots, np.int32), lengths)
        rows["position"] = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        rows["out"] = np.arange(ends[-1]) if all_tokens else -1
        if not all_tokens:
            rows["out"][ends - 1] = np.arange(len(prompts))
        hidden = torch.empty(int(ends[-1]) if all_tokens else len(prompts), self._hidden)
        cuts = [0, *(int(ends[i * len(prompts) // self._threads - 1]) for i in range(1, self._threads)), int(ends[-1])]
        parts = [(begin, end) for begin, end in itertools.pairwise(cuts) if begin < end]
        if len(prompts) < self._threads or len(rows) < _SHARE:
            parts = [(0, len(rows))]
        self._share(lambda begin, end: self._run_hidden(rows[begin:end], hidden), parts)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._room(len(hidden))
        self._share(lambda a, b: self._run_logits(hidden[a:b], logits[:, a:]), _parts(len(hidden), self._threads))
        return logits.t()[: len(hidden)]

    def _room(self, rows: int) -> Tensor:
        """[V, rows], rounded up to whole vectors."""
        return torch.empty(self.vocab_size, -(-rows // _LANES) * _LANES)

    def _run_hidden(self, rows: np.ndarray, hidden: Tensor) -> None:
        self._library.tutti_hidden(
            ctypes.byref(self._struct), _pointer(rows), ctypes.c_int64(len(rows)), ctypes.c_void_p(hidden.data_ptr())
        )

    def _run_logits(self, hidden: Tensor, logits: Tensor) -> None:
        self._library.tutti_logits(
            ctypes.byref(self._struct),
            ctypes.c_void_p(hidden.data_ptr()),
            ctypes.c_int64(len(hidden)),
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(logits.stride(0)),
        )

    def _share(self, work: Any, parts: list[tuple[int, int]]) -> None:
        others = [self._workers.submit(work, *part) for part in parts[1:]]
        try:
            work(*parts[0])
        finally:  # also after Ctrl+C: what they read and write must outlive them
            wait(others)
        for other in others:
            other.result()

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if not is_silu(mlp.act_fn):
            raise _Unlike
        hidden, queries, keys = self._hidden, self._heads * self._dim, self._kv_heads * self._dim
        inputs = {
            "query": (attention.q_proj, queries),
            "key": (attention.k_proj, keys),
            "value": (attention.v_proj, keys),
        }
        outputs = {
            "out": (attention.o_proj, (hidden, queries)),
            "gate": (mlp.gate_proj, (self._inner, hidden)),
            "up": (mlp.up_proj, (self._inner, hidden)),
            "down": (mlp.down_proj, (hidden, self._inner)),
        }
        norms = {
            "input_norm": (layer.input_layernorm, hidden),
            "post_norm": (layer.post_attention_layernorm, hidden),
        }
        if hasattr(attention, "q_norm"):
            norms |= {"query_norm": (attention.q_norm, self._dim), "key_norm": (attention.k_norm, self._dim)}
        entries = dict[str, int | None]()
        for name, (module, size) in inputs.items():
            entries[name] = self._plain(module, nn.Linear, (size, hidden), True)
            entries[f"{name}_bias"] = self._pointer_to(module.bias, (size,))
        entries |= {name: self._plain(module, nn.Linear, shape) for name, (module, shape) in outputs.items()}
        entries |= {name: self._norm(module, size) for name, (module, size) in norms.items()}
        return _Layer(**entries)

    def _norm(self, module: Any, size: int) -> int | None:
        epsilon = epsilon_of(module)
        if epsilon is None:
            raise _Unlike
        self._epsilons.add(epsilon)
        return self._pointer_to(module.weight, (size,))

    def _plain(self, module: Any, kind: type[nn.Module], shape: tuple[int, int], biased: bool = False) -> int | None:
        """The weight of a module that is nothing more than that."""
        if type(module) is not kind or (getattr(module, "bias", None) is not None and not biased):
            raise _Unlike
        return self._pointer_to(module.get_parameter("weight"), shape)

    def _pointer_to(self, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        if tensor is None:
            return None
        # Nothing there looks at sizes again: another shape than the config's would be read beyond its end.
        if tensor.shape != shape or tensor.device.type != "cpu":
            raise _Unlike
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise _Unlike
        self._kept.append(tensor)
        return tensor.data_ptr()


def _parts(rows: int, threads: int) -> list[tuple[int, int]]:
    """Even shares that begin at multiples of _LANES."""
    threads = max(1, min(threads, rows // _SHARE + (rows % _SHARE > 0)))
    size = -(-rows // (threads * _LANES)) * _LANES
    return [(begin, min(rows, begin + size)) for begin in range(0, rows, size)]


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
