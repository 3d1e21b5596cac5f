"""The two processes of `benchmarks.gpu.rollout`: one has weights on its GPU and sends them, one is a vLLM replica."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roles.types import Completion
from runtime import Actor, ActorMesh, endpoint, this_host
from sync.layout import Entry, Layout
from sync.ports import Part, ReceiverPort, SenderPort
from sync.session import SyncConfig, WeightSession

if TYPE_CHECKING:
    from torch import Tensor

    from roles.rollout_config import RolloutConfig


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(folder: str, seed: int) -> Any:
    """A random transformers model in bfloat16 values, computed in float32: the same numbers in each process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """In bfloat16, by the names of checkpoints."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to(torch.bfloat16)
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(part.chunk(2, 0) for part in tensor):
                base = name.removesuffix("gate_up_proj")
                found[f"{base}{e}.gate_proj.weight"], found[f"{base}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": part for e, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


class Weights(SenderPort, Actor):
    """Several sets of weights of one model, on its GPU.

    Args:
        seeds: of random models; none: numbers without a model, which is quicker for a large one.
    """

    def __init__(self, folder: str, dtype: str, seeds: tuple[int, ...]) -> None:
        import torch

        from roles.model_folder import layout_of

        kind = getattr(torch, dtype)
        self.sets: list[Mapping[str, Tensor]] = [
            {n: t.to(kind) for n, t in tensors_of(model_of(folder, seed)).items()} for seed in seeds
        ]
        if not seeds:
            entries = layout_of(folder, dtype).entries
            self.sets = [{e.name: torch.randn(e.shape, dtype=kind, device=device()).mul_(0.02) for e in entries}]
        self.now = self.sets[0]
        self.layout = Layout(tuple(Entry.whole(n, t.shape, dtype) for n, t in self.now.items()))
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.now[name]

    @endpoint
    def choose(self, number: int) -> None:
        self.now = self.sets[number % len(self.sets)]


class Replica(ReceiverPort, Actor):
    """vLLM behind our engine, with the requests of the benchmark."""

    def __init__(self, folder: str, config: RolloutConfig, prompts: list[list[int]]) -> None:
        from roles.engine_vllm import VllmEngine

        self.prompts = prompts
        self.engine: Any = VllmEngine(folder, config)
        self.weight_sink: Any = self.engine
        self.number = 0
        self.first_seed = 0
        """0: each request of this process has a seed of its own. Else that of the first of a batch."""
        self.opened = False

    async def __cleanup__(self, error: BaseException | None = None) -> None:
        await self.engine.close()

    async def weight_parts(self) -> Sequence[Part]:
        self.open()
        return await super().weight_parts()

    async def apply_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.engine.swap(weights, version)

    def open(self) -> None:
        if not self.opened:
            self.opened = True
            self.engine.open(self.tasks, lambda error: print("failed:", error, flush=True))

    @endpoint(concurrency=4)
    async def all(
        self, tokens: int, requests: int, seeded: bool, temperature: float = 1.0
    ) -> tuple[float, list[Completion]]:
        """Seconds, and completions of the first requests in order."""
        from roles.engine import Request
        from roles.types import Sampling

        self.open()
        self.engine._seeded = seeded
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: dict[int, Completion] = {}
        first = self.number
        self.number += requests
        seeds = self.first_seed or first

        def ended(finished: Any) -> None:
            found[finished.request_id - first] = finished.completion
            if len(found) == requests:
                done.set_result(None)

        sampling = Sampling(max_tokens=tokens, ignore_eos=True, temperature=temperature)
        began = time.perf_counter()
        for i, ids in enumerate(self.prompts[:requests]):
            request = Request(id=first + i, prompt_ids=tuple(ids), seeds=(seeds + i,), sampling=sampling)
            self.engine.submit(request, ended)
        await done
        return time.perf_counter() - began, [found[i] for i in range(requests)]

    @endpoint(concurrency=4)
    async def facts(self) -> dict[str, Any]:
        """Of the last swap."""
        facts = (await self.engine._workers("tutti_facts"))[0]
        return {
            "pause_host_ms": 1000 * facts.pop("host_seconds"),
            "pause_device_ms": 1000 * facts.pop("device_seconds"),
            "share_host_ms": 1000 * facts.pop("share_host_seconds"),
            **facts,
        }

    @endpoint(concurrency=4)
    async def seed(self, first: int) -> None:
        self.first_seed = first

    @endpoint(concurrency=4)
    async def drafts(self) -> list[int]:
        """Tokens drafted, and those that were kept, since start."""
        await self.engine.probe()
        return list(self.engine.drafts)

    @endpoint(concurrency=4)
    async def call_ms(self) -> float:
        """Median round trip of a call of the workers that does nothing: between two steps where some are made."""
        times = []
        for _ in range(20):
            began = time.perf_counter()
            await self.engine._workers("tutti_probe")
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)

    @endpoint(concurrency=4)
    async def score_ms(self) -> float:
        began = time.perf_counter()
        await self.engine.score([ids[:32] for ids in self.prompts[:4]])
        return 1000 * (time.perf_counter() - began)

    @endpoint(concurrency=4)
    async def widen(self) -> None:
        await self.engine._llm.collective_rpc(_widen)


def _widen(worker: Any) -> None:
    from roles.vllm_head import widen_heads

    widen_heads(worker.model_runner.model)


class Pair:
    """Both processes and the session between them."""

    def __init__(self, weights: ActorMesh, replica: ActorMesh, session: WeightSession) -> None:
        self.weights, self.replica, self.session = weights, replica, session

    async def publish(self, version: int) -> dict[str, Any]:
        """What a publication took, from the call to the last swap, and what the swap says of itself."""
        await self.weights.choose.call_one(version - 1)
        commit = await self.session.publish(version)
        return {
            "version": version,
            "transport": commit.transport,
            "bytes": commit.bytes,
            "publish_ms": 1000 * commit.seconds,
            "pack_ms": 1000 * commit.pack_seconds,
            "stage_ms": 1000 * commit.stage_seconds,
            "apply_ms": 1000 * commit.pause_seconds,
            **await self.replica.facts.call_one(),
        }

    async def all(
        self, tokens: int, requests: int, *, seeded: bool = True, temperature: float = 1.0
    ) -> tuple[float, list[Completion]]:
        found: tuple[float, list[Completion]] = await self.replica.all.call_one(tokens, requests, seeded, temperature)
        return found


@contextlib.asynccontextmanager
async def pair(
    folder: str, config: RolloutConfig, prompts: list[list[int]], seeds: tuple[int, ...]
) -> AsyncIterator[Pair]:
    """Weights on the last GPU that there is, vLLM on the first ones."""
    import torch

    from roles.vllm_compat import environment_of

    paths = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])  # vLLM's processes too
    count = torch.cuda.device_count()
    mine, theirs = [list(range(config.vllm.tensor_parallel))] if count else 0, [[count - 1]] if count else 0
    began = time.perf_counter()
    async with this_host() as host:
        first = await host.spawn_procs(
            1, name="rollout", env={**environment_of(config), "PYTHONPATH": paths}, start="fresh", gpus=mine
        )
        second = await host.spawn_procs(1, name="trainer", start="fresh", gpus=theirs)
        replica, weights = await asyncio.gather(
            first.spawn("rollout", Replica, folder, config, prompts),
            second.spawn("trainer", Weights, folder, config.dtype, seeds),
        )
        print(f"both up after {time.perf_counter() - began:.0f} s", flush=True)
        async with WeightSession(weights, replica, SyncConfig(deadline_s=60.0)) as session:
            print(session.explain(), flush=True)
            yield Pair(weights, replica, session)
