"""Fixtures named as things; no example of a property has to be quick on a machine that others use, too."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import Space

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun behind a shell's &: what we start would never hear of an interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def space(tmp_path: Path) -> Space:
    """An empty workspace."""
    return Space(tmp_path / "space")
