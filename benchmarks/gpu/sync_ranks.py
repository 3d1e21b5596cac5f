"""Who takes part in the measurements of `benchmarks.gpu.sync`: a trainer and a rollout with random weights in the
shapes of Qwen3, a bare broadcast, and the file of rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import Row
from runtime import Actor, endpoint
from sync.explain import quantised
from sync.formats import Scaling
from sync.layout import Entry, Layout
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.ports import ReceiverPort, SenderPort

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}


def layouts(size: str, wire: str, held: str = "bfloat16") -> tuple[Layout, Layout]:
    """Of the trainer, which holds weights in this dtype, and of the rollout."""
    model = ModelShape.of(SIZES[size])
    trainer = Layout(tuple(Entry.whole(w.name, w.shape, held) for w in model.weights()))
    rollout = served(model, Serving(), 0)
    if wire == "fp8":
        matrices = [w.name for w in model.weights() if w.role == "matrix"]
        rollout = quantised(rollout, matrices, "float8_e4m3fn", Scaling("block", "weight_scale_inv"))
    return trainer, rollout


class Trainer(SenderPort, Actor):
    """Random weights on GPU 0."""

    def __init__(self, size: str, held: str = "bfloat16") -> None:
        torch.cuda.set_device(0)
        self.layout, _ = layouts(size, "bf16", held)
        dtype = getattr(torch, held)
        self.weights = {e.name: torch.randn(e.shape, device="cuda").to(dtype) for e in self.layout.entries}
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


class Rollout(ReceiverPort, Actor):
    """Weights on one GPU: keeps what it is given and hands back what it had."""

    def __init__(self, size: str, wire: str, gpu: int = -1) -> None:
        last = gpu % torch.cuda.device_count()
        torch.cuda.set_device(last)
        self.weight_device = f"cuda:{last}"
        _, self.layout = layouts(size, wire)
        self.weights: Mapping[str, Tensor] = {
            e.name: torch.zeros(e.box.shape, dtype=getattr(torch, e.dtype), device="cuda")
            for e in self.layout.entries
            if e.name not in self.layout.derived
        }
        self.rows = {n: torch.randn(64, n, device="cuda").to(torch.bfloat16) for n in (1024, 2048, 3072, 4096, 12288)}
        self._out = torch.empty(64 * 151936, dtype=torch.bfloat16, device="cuda")
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        self.weights, before = dict(weights), self.weights
        return before

    @endpoint
    def decode(self, seconds: float, how: str) -> tuple[int, float]:
        """Products of 64 rows with every matrix in service; how many passes in how many seconds.

        Args:
            how: `launches`, one by one, or `graph`, as engines do it.
        """
        replay = self._graph().replay if how == "graph" else self._pass
        stream = torch.cuda.current_stream()
        began, passes = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            replay()
            stream.synchronize()  # not the device: that would wait for what arrives beside it
            passes += 1
        return passes, time.perf_counter() - began

    def _pass(self) -> None:
        for weight in self.weights.values():
            if weight.ndim == 2 and weight.dtype == torch.bfloat16 and weight.shape[1] in self.rows:
                torch.matmul(self.rows[weight.shape[1]], weight.t(), out=self._out[: 64 * weight.shape[0]].view(64, -1))

    def _graph(self) -> torch.cuda.CUDAGraph:
        """Of a pass over the weights in service: there are two sets of them, which take turns."""
        place = next(iter(self.weights.values())).data_ptr()
        if place not in self._graphs:
            self._pass()
            torch.cuda.synchronize()
            self._graphs[place] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._pass()
        return self._graphs[place]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def used(self) -> float:
        """GB in use on this GPU."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9


class RingRollout(Rollout):
    """A rollout whose weights may be written over while it stands still."""

    def live_weights(self) -> Mapping[str, Tensor]:
        return dict(self.weights)

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:  # type: ignore[override]
        """They are whole again."""


class Raw(Actor):
    """A bare broadcast of as many bytes."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(min(rank, torch.cuda.device_count() - 1))
        self.piece = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    @endpoint
    def broadcast(self, num_bytes: int, rounds: int) -> float:
        """Best time of all bytes, in seconds."""
        best = float("inf")
        for _ in range(rounds + 2):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                dist.broadcast(self.piece[: min(len(self.piece), num_bytes - start)], src=0)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def copy(self, num_bytes: int, rounds: int) -> float:
        """Best time of copying as many bytes inside this GPU, in seconds."""
        other = torch.empty_like(self.piece)
        best = float("inf")
        for _ in range(rounds + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                size = min(len(self.piece), num_bytes - start)
                other[:size].copy_(self.piece[:size])
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def gpus(self) -> int:
        return torch.cuda.device_count()


class Report:
    """Rows as they come, also into a file: a later case finds what an earlier one has measured."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **fields: Any) -> None:
        row = Row(**fields)
        print(json.dumps(row.as_dict()), flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_dict()) + "\n")

    @property
    def rows(self) -> list[Row]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [Row(**{k: v for k, v in json.loads(line).items() if k not in ("ratio", "met")}) for line in lines]

    def seconds(self, name: str) -> float | None:
        """What a row says, if it is there."""
        return next((row.ours for row in self.rows if row.name == name), None)


def bytes_of(size: str) -> int:
    return sum(entry.num_bytes for entry in layouts(size, "bf16")[0].entries)
