"""Fixtures of the tests of the runtime."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_is_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the guides: readers see `this_host()` without settings, and that other tests have imported torch is no reason
    to wait until the fork server has it too."""
    monkeypatch.setattr("runtime.mesh.default_preload", list)
