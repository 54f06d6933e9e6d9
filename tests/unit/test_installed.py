"""Claims about what the preflight takes to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.advice.facts.packages import Installed


def test_of_two_releases_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version in (("first", "1.12.0"), ("second", "1.16.0")):
        folder = tmp_path / place / f"twice-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    assert Installed()["twice"] == [1, 12, 0]
