"""What `nixl` makes of a read that fails, by a stand-in for the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sync.layout import Entry, Layout
from sync.plan import make_plan
from sync.transport import Link, TransportError
from sync.transports import nixl
from sync.transports.store import host_store


@pytest.mark.parametrize("states", [["ERR"], ["PROC", "ERR"]], ids=["at once", "later"])
def test_a_read_that_fails_is_not_taken_for_changed_bytes(monkeypatch: pytest.MonkeyPatch, states: list[str]) -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            self.states = iter(states + ["ERR"] * 9)

        def transfer(self, _: object) -> str:
            return next(self.states)

        def check_xfer_state(self, _: object) -> str:
            return next(self.states)

        def __getattr__(self, _: str) -> Callable[..., bytes]:
            return lambda *_: b"metadata"

    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    package = SimpleNamespace(nixl_agent=Broken, nixl_agent_config=lambda backends: None)
    monkeypatch.setitem(sys.modules, "nixl", package)
    plan = make_plan(
        [Layout((Entry.whole("w", (8,), "float32"),))], [Layout((Entry.whole("w", (8,), "float32"),))], bucket_bytes=64
    )
    link = Link(rank=0, num_senders=1, num_sinks=1, buckets=plan.buckets, slots=1, slot_bytes=64, deadline_s=5.0)
    store, address = host_store(link)
    agent = nixl._Agent(link, "rollout rank 0", "rollout rank 0", address, 64)
    with pytest.raises(TransportError, match=r"trainer rank 0 is gone, bucket 0 \(w\) was not read: ERR"):
        agent.read("trainer rank 0", 0, 0, 1, plan.buckets[0])
    del store
