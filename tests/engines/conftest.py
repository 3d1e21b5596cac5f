"""A real vLLM on CPU for the tests of this folder: started once, kept to the end.

`make engines` runs them in an environment that has vLLM, and says so by TUTTI_ENGINES=required: then skipping is a
failure. Elsewhere they are skipped, with the reason. AsyncLLM belongs to the loop that it was made in, so all tests
share one: each module says `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

HERE = Path(__file__).parent
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # vLLM's imports warn of things that are theirs to change.
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(180))  # engines take half a minute to start on an idle machine
            if not HAS_VLLM and not os.environ.get("TUTTI_ENGINES"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; `make engines` runs these"))


if HAS_VLLM or os.environ.get("TUTTI_ENGINES"):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    from roles.rollout import RolloutConfig, RolloutRank
    from tests.engines.models import save_policy

    @pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
    async def one_loop() -> None:
        """The loop of all tests is there before the first one looks at what it leaves behind."""
        await asyncio.to_thread(int)  # the pool's thread lives as long as the loop

    @pytest.fixture(scope="session")
    def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
        """Mixture of experts with a tied head: what is hardest to reload."""
        return save_policy(tmp_path_factory.mktemp("moe"), "Qwen3Moe")

    @pytest_asyncio.fixture(scope="session", loop_scope="session")
    async def shared(policy: str) -> AsyncIterator[RolloutRank]:
        """The replica that is kept; use `rank`."""
        config = RolloutConfig(engine="vllm", max_running=8, max_len=512, record_routes=True)
        rank = RolloutRank(config, policy)
        await rank.weight_parts()  # open from here on
        yield rank
        await rank.__cleanup__()
        await rank.tasks.close()

    @pytest.fixture
    def rank(shared: RolloutRank) -> Iterator[RolloutRank]:
        """A replica with the weights that the test before left; its way to take new ones is `keep`."""
        config = shared._config
        yield shared
        shared._config = config
        assert shared._calls.requests == {}
        assert shared._engine.num_running == 0
