"""VT-1 to VT-5, VP-1 to VP-3, without vLLM: its sending half and the engines' are a few lines here, over a small engine
that really serves. With vLLM itself: tests/engines/test_vllm_transfer.py."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from roles import vllm_compat
from roles.engine_torch import TorchEngine
from roles.rollout import RolloutConfig, RolloutRank
from roles.stepping import Stepper
from roles.types import Sampling
from roles.vllm_transfer import VllmTransfer, transfer_problems
from roles.vllm_transfer_ports import Source, TransferSender, TransferSpec, as_plain
from roles.whole_weights import WholeWeights
from runtime import Actor, context, endpoint
from runtime.testing import local_host
from sync.config import SyncConfig
from sync.layout import Box, Entry, Layout, LayoutError
from sync.ports import SenderPort
from sync.transport import SyncError
from tests.roles.engines import forced_logprobs, weights_of
from tests.roles.tiny import save_tiny_policy, tiny_model

LONG, SHORT = Sampling(max_tokens=1500, ignore_eos=True), Sampling(max_tokens=5, ignore_eos=True)


MAKING = threading.Lock()
"""Tokenizers and models are not made in two threads at once: ranks have processes elsewhere."""


class Wire:
    """What both halves share: what is on its way, and the faults of a test."""

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}
        self.complete = threading.Event()
        self.destroyed = threading.Event()
        self.joined: list[int] = []
        self.fails: set[int] = set()
        """Rollout ranks that fail half-way."""
        self.hangs: set[int] = set()
        self.read: list[tuple[str, torch.dtype]] = []


WIRE = Wire()


class Half:
    """Stands for vLLM's sending half: a broadcast that waits for its engines for ever."""

    def __init__(self, spec: TransferSpec, client: Any, source: Source) -> None:
        client.init_weight_transfer_engine({"world_size": spec.world})
        self._client, self._source = client, source
        self.model_update_group: Any = SimpleNamespace(destroy=WIRE.destroyed.set)
        WIRE.destroyed.clear()

    def send_weights(self) -> None:
        WIRE.complete.clear()
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as beside:
            taking = beside.submit(
                self._client.update_weights, {"names": [one.name for one in self._source.metadata()]}
            )
            WIRE.sent = dict(self._source)
            WIRE.complete.set()
            while WIRE.hangs and not WIRE.destroyed.wait(0.01):
                pass
            taking.result()
        self._client.finish_weight_update()


class Engine(Stepper):
    """The small one, by vLLM's way."""

    weight_transfer, num_workers = "nccl", 2

    def __init__(self, number: int) -> None:
        super().__init__(TorchEngine(tiny_model(0), max_running=8))
        self._number = number

    def weight_layout(self) -> Layout:
        names = super().weight_layout()
        return Layout(tuple(e for e in names.entries if e.name not in names.constant and e.name not in names.derived))

    async def join(self, info: Mapping[str, Any]) -> None:
        WIRE.joined.append(info["rank_offset"])

    async def receive(self, info: Mapping[str, Any], version: int) -> None:
        while not WIRE.complete.is_set() or self._number in WIRE.hangs:
            await asyncio.sleep(0.001)
        if self._number in WIRE.fails:
            raise ValueError("a broken card")
        assert list(WIRE.sent) == info["names"]
        weights = dict(WIRE.sent)
        for copy, name in super().weight_layout().derived.items():
            weights[copy] = weights[name]
        await self.swap(weights, version)


class Rank(RolloutRank):
    def __init__(self, config: RolloutConfig, policy: str) -> None:
        with MAKING:
            super().__init__(config, policy, engine=Engine(context().rank))

    @endpoint
    def fenced(self) -> str:
        return self.weights_fenced


class Trainer(TransferSender, SenderPort, Actor):
    """One rank with the weights of a model; `train` takes those of another."""

    def __init__(self) -> None:
        self.weight_source = self
        self.train_now(0)

    def train_now(self, seed: int) -> None:
        self.weights = weights_of(tiny_model(seed))

    @endpoint
    def train(self, seed: int) -> None:
        self.train_now(seed)

    def weight_layout(self) -> Layout:
        return Layout(tuple(Entry.whole(n, t.shape, str(t.dtype)[6:]) for n, t in self.weights.items()))

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[name]


class Both:
    def __init__(self, trainer: Any, rollout: Any, transfer: VllmTransfer) -> None:
        self.trainer, self.rollout, self.transfer = trainer, rollout, transfer

    async def publish(self, version: int) -> Any:
        await self.trainer.train.call_one(version)
        return await self.transfer.publish(version)

    async def fenced(self) -> list[str]:
        found: list[str] = (await self.rollout.fenced.call()).values()
        return found

    async def assert_serves(self, version: int, rank: int = 0) -> None:
        (found,) = await self.rollout.slice(rank=rank).generate.call_one((1, 2), SHORT, (3,))
        assert found.versions.tolist() == [version] * 5
        expected = forced_logprobs(tiny_model(version), [1, 2], found.token_ids)
        assert abs(found.logprobs - expected).max() < 1e-4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    fresh = Wire()
    monkeypatch.setattr(sys.modules[__name__], "WIRE", fresh)
    monkeypatch.setattr(vllm_compat, "weight_sender", Half)
    return fresh


@asynccontextmanager
async def both(policy: str, deadline_s: float = 20, **config: Any) -> AsyncIterator[Both]:
    async with local_host() as host:
        procs = await host.spawn_procs({"rank": 2}, name="rollout")
        rollout = await procs.spawn("rollout", Rank, RolloutConfig(max_running=8, **config), policy)
        trainer = await (await host.spawn_procs(1, name="trainer")).spawn("trainer", Trainer)
        transfer = VllmTransfer(trainer, rollout, "nccl", SyncConfig(deadline_s=deadline_s))
        yield Both(trainer, rollout, transfer)
        await transfer.close()


@pytest.mark.parametrize("update", ["keep", "drain", "resume"])
async def test_versions_come_to_all_while_they_serve(policy: str, wire: Wire, update: Any) -> None:
    async with both(policy, update=update) as sides:
        commit = await sides.publish(0)
        assert (commit.transport, commit.stage_seconds) == ("nccl", 0.0)
        assert commit.bytes == sum(t.nbytes for t in weights_of(tiny_model(0)).values())
        running = asyncio.ensure_future(sides.rollout.slice(rank=1).generate.call_one((1, 2), LONG, (1,)))
        while (await sides.rollout.slice(rank=1).stats.call_one()).tokens < 10:
            await asyncio.sleep(0.001)
        await sides.publish(1)
        (completion,) = await running
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert set(completion.versions.tolist()) == ({0} if update == "drain" else {0, 1})
        for rank in (0, 1):
            await sides.assert_serves(1, rank)
        assert sorted(wire.joined) == [1, 3]  # once, behind the sender and each other's two workers
        assert await sides.transfer.publish(1) == await sides.transfer.publish(1)


async def test_an_engine_that_fails_half_way_fences_all_and_the_next_version_heals_them_vt1_vt2_vt4(
    policy: str, wire: Wire
) -> None:
    async with both(policy) as sides:
        await sides.publish(0)
        wire.fails = {1}
        with pytest.raises(
            SyncError, match=r"version 1 was not published: .*a broken card.*that had begun don't serve"
        ):
            await sides.publish(1)
        assert "version 1 was being written over" in (await sides.fenced())[1]
        assert wire.destroyed.is_set()
        wire.fails = set()
        await sides.publish(1)
        assert await sides.fenced() == ["", ""]
        await sides.assert_serves(1, 1)
        assert sorted(wire.joined) == [1, 1, 3, 3]


async def test_an_engine_that_hangs_is_left_at_the_deadline_and_the_trainer_is_freed_vt3_vp1(
    policy: str, wire: Wire
) -> None:
    async with both(policy, deadline_s=0.5) as sides:
        await sides.publish(0)
        wire.hangs = {0}
        with pytest.raises(SyncError, match=r"version 1 was not published: .*deadline of 0\.5 s.*rank 0"):
            await sides.publish(1)
        assert "version 1 was being written over" in (await sides.fenced())[0]
        wire.hangs = set()
        await sides.publish(2)  # the trainer's main thread is free
        await sides.assert_serves(2)


async def test_a_publication_that_is_given_up_leaves_nobody_waiting(policy: str, wire: Wire) -> None:
    async with both(policy) as sides:
        await sides.publish(0)
        wire.hangs = {0, 1}
        publishing = asyncio.ensure_future(sides.publish(1))
        while not wire.complete.is_set() or not all(await sides.fenced()):
            await asyncio.sleep(0.005)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        wire.hangs = set()
        assert all(await sides.fenced())
        await sides.publish(1)
        await sides.assert_serves(1)


async def test_a_trainer_that_can_not_send_fences_nobody(policy: str) -> None:
    async with both(policy) as sides:
        await sides.publish(0)
        await sides.trainer.transfer_stop.call_one()  # as if its communicator were gone
        with pytest.raises(SyncError, match="version 1 was not published"):
            await sides.publish(1)
        assert await sides.fenced() == ["", ""]
        await sides.assert_serves(0)
        await sides.publish(1)
        await sides.assert_serves(1)


async def test_what_the_trainer_lacks_is_named_before_anything_moves_vt5(policy: str, wire: Wire) -> None:
    async with both(policy) as sides:
        with pytest.MonkeyPatch.context() as patch:
            whole = Trainer.weight_layout
            patch.setattr(Trainer, "weight_layout", lambda self: Layout(whole(self).entries[1:]))
            with pytest.raises(LayoutError, match=r"model\.embed_tokens\.weight: wanted as .*no trainer rank has it"):
                await sides.transfer.open()
        assert wire.joined == []


async def test_another_set_of_ranks_is_reached_in_the_same_way(policy: str, wire: Wire) -> None:
    async with both(policy) as sides:
        await sides.publish(0)
        await sides.trainer.train.call_one(1)
        await sides.transfer.close()
        alone = sides.transfer.over(sides.rollout.slice(rank=1))
        await alone.publish(1)
        await alone.close()
        await sides.assert_serves(0, 0)
        await sides.assert_serves(1, 1)
        await sides.transfer.publish(1)
        await sides.assert_serves(1, 0)


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_tensors_come_whole_in_the_wanted_type_and_order() -> None:
    held = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    parts = (Entry("a", Box((0, 0), (1, 3)), (2, 3), "float32"), Entry("a", Box((1, 0), (2, 3)), (2, 3), "float32"))
    layout = Layout((*parts, Entry.whole("b", (2,), "float32")))
    weights = WholeWeights(layout, lambda name: [held["a"][:1], held["a"][1:]] if name == "a" else [held["b"]])
    wanted = (Entry.whole("b", (2,), "float32"), Entry.whole("a", (2, 3), "bfloat16"))
    weights.check(wanted)
    source = Source(weights, wanted)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        ("b", torch.float32, (2,)),
        ("a", torch.bfloat16, (2, 3)),
    ]
    found = dict(source)
    assert list(found) == ["b", "a"]
    assert torch.equal(found["a"], held["a"].bfloat16())
    found["b"].zero_()
    assert held["b"].tolist() == [1.0, 1.0]  # nobody's memory (WH-3)
    with pytest.raises(LayoutError, match=r"a: wanted as .*trainer ranks have \[2, 3\]"):
        weights.check([Entry.whole("a", (3, 2), "float32")])
    half = WholeWeights(Layout(parts[:1]), lambda name: [held["a"][:1]])
    with pytest.raises(LayoutError, match="a: trainer ranks have 3 of its 6 elements"):
        half.check([Entry.whole("a", (2, 3), "float32")])


def test_handles_go_over_the_wire_in_the_form_that_vllm_takes() -> None:
    handles = [{"GPU-1": (torch.Tensor, (2,), b"handle")}]
    plain = as_plain({"names": ["a"], "ipc_handles": handles, "ipc_handles_pickled": None, "tensor_sizes": None})
    assert plain.keys() == {"names", "ipc_handles_pickled"}
    assert pickle.loads(b64decode(plain["ipc_handles_pickled"])) == handles


def test_settings_that_it_can_not_keep_are_named() -> None:
    assert transfer_problems("nccl", SyncConfig(deadline_s=5, interface="eth0")) == []
    found = transfer_problems("nccl", SyncConfig(quorum=1, differences=True, shadow="full", transport="gloo"))
    assert [text.split()[0] for text in found] == ["sync.transport", "sync.quorum", "sync.differences", "sync.shadow"]
    assert "one broadcast reaches all replicas or none; leave one of the two out" in found[1]


# --- vLLM 0.25 --------------------------------------------------------------------------------------------------------


class Called:
    """A client that notes what the sending half says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.calls.append(("join", info))

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append(("take", info))


@pytest.mark.parametrize("way", ["nccl", "ipc"])
def test_version_0_25_is_called_as_later_ones_call_themselves(monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    """Its modules are not here: these have the functions of 0.25.1 that are called, with their arguments."""
    sent: list[Any] = []

    class Old:
        @staticmethod
        def trainer_init(info: dict[str, Any]) -> str:
            assert info == {"master_address": "here", "master_port": 7, "world_size": 3}
            return "communicator"

        @staticmethod
        def trainer_send_weights(iterator: Any, arguments: dict[str, Any]) -> None:
            sent.append((list(iterator), arguments))
            if "send_mode" in arguments:
                arguments["send_mode"](Update(["a"]))

    @dataclass
    class Update:
        names: list[str]

    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    parents: dict[str, Any] = {}
    for name in ("", ".distributed", ".distributed.weight_transfer", *OLD):
        module = parents[name] = ModuleType(f"vllm{name}")
        module.__path__ = []
        monkeypatch.setitem(sys.modules, f"vllm{name}", module)
    parents[".distributed.weight_transfer"].factory = parents[OLD[0]]
    parents[OLD[1]].NCCLWeightTransferEngine = parents[OLD[2]].IPCWeightTransferEngine = Old
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    client, source = Called(), Source(WholeWeights(Layout((ENTRY,)), lambda _: [torch.ones(2)]), (ENTRY,))
    spec = TransferSpec(way=way, wanted=(ENTRY,), address="here", port=7, world=3)
    half = REAL_SENDER(spec, client, source)  # type: ignore[arg-type]
    half.send_weights()
    ((tensors, arguments),) = sent
    assert [name for name, _ in tensors] == ["a"]
    if way == "ipc":
        assert client.calls == [("join", {}), ("take", {"names": ["a"]})]
        return
    packed = {"packed": True, "packed_buffer_size_bytes": vllm_compat.TRANSFER_PIECE_BYTES}
    assert arguments == {"group": "communicator", **packed}
    meeting = {"master_address": "here", "master_port": 7, "world_size": 3, "rank_offset": 1}
    update = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], **packed}
    assert client.calls == [("join", meeting), ("take", update)]


ENTRY = Entry.whole("a", (2,), "float32")
OLD = tuple(f".distributed.weight_transfer.{name}" for name in ("factory", "nccl_engine", "ipc_engine"))
REAL_SENDER = vllm_compat.weight_sender
"""Before tests put something in its place."""


def test_the_ipc_engine_of_0_25_is_imported_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "vllm" / "distributed" / "weight_transfer"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parent.parent):
        (each / "__init__.py").touch()
    (folder / "ipc_engine.py").write_text("import ray\nHERE = True\n")
    for name in [name for name in sys.modules if name == "ray" or name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert vllm_compat.ipc_engine().HERE
    assert "ray" not in sys.modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
