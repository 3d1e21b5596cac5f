"""A trainer mesh and a rollout mesh of toys, and what tests of a session say about them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import torch

from runtime import ActorMesh, HostMesh
from sync.session import Commit, SyncConfig, WeightSession
from tests.sync.ranks import SHAPES, ToyRollout, ToyTrainer, values

TRANSPORTS = ["shm", "gloo"]


@contextlib.asynccontextmanager
async def meshes(host: HostMesh) -> AsyncIterator[tuple[ActorMesh, ActorMesh]]:
    """A trainer mesh and a rollout mesh of two processes each."""
    trainers = await host.spawn_procs({"rank": 2}, name="trainer")
    rollouts = await host.spawn_procs({"rank": 2}, name="rollout")
    try:
        parts = [await trainers.slice(rank=r).spawn(f"trainer{r}", ToyTrainer, r, 2) for r in range(2)]
        trainer = ActorMesh("trainer", trainers.shape, [p.refs[0] for p in parts], parts[0].interface, parts[0]._node)
        yield trainer, await rollouts.spawn("rollout", ToyRollout)
    finally:
        await trainers.stop()
        await rollouts.stop()


def config(name: Any, **more: Any) -> SyncConfig:
    return SyncConfig(transport=name, bucket_bytes=512, deadline_s=more.pop("deadline_s", 20.0), **more)


async def assert_serving(rollout: ActorMesh, version: int, *, of: int | None = None, dtype: str = "float32") -> None:
    """Every rollout rank has this version in its counter and in every element of every tensor."""
    kind = getattr(torch, dtype)
    for served, weights in (await rollout.serving.call()).values():
        assert served == version
        for name in SHAPES:
            truth = torch.zeros(SHAPES[name]) if version < 0 else values(name, version if of is None else of)
            assert torch.equal(weights[name], truth.to(kind))
        assert torch.equal(weights["lm_head.weight"], weights["model.embed.weight"])


async def train_and_publish(trainer: ActorMesh, session: WeightSession, version: int) -> Commit:
    await trainer.train_to.call(version)
    return await session.publish(version)
