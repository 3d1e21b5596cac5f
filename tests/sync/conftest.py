"""One host for the tests of a module: its fork server imports torch once; each test forks its own processes from it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
import torch  # noqa: F401  imported here, so that the fork server imports it too

from runtime import HostMesh, this_host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[HostMesh]:
    async with this_host() as mesh:
        procs = await mesh.spawn_procs({"rank": 1}, name="warm")  # the fork server is ready when the first process is
        await procs.stop()
        yield mesh
