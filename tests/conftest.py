"""Fixtures named as things; no example of a property has to be quick on a machine that others use, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import Space

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def space(tmp_path: Path) -> Space:
    """An empty workspace."""
    return Space(tmp_path / "space")
