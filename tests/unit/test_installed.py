"""Claims about what the preflight takes to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.advice.facts.packages import InstalledPackages, find_folders


def test_of_two_releases_the_one_that_is_imported_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, version in (("first", "1.12.0"), ("second", "1.16.0")):
        folder = tmp_path / place / f"twice-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    assert InstalledPackages(sys.path)["twice"] == [1, 12, 0]


def test_the_packages_are_those_of_the_environment_that_steps_run_in(tmp_path: Path) -> None:
    place = tmp_path / "lib/python3.99/site-packages"
    (place / "own-2.0.dist-info").mkdir(parents=True)
    (place / "own-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own\nVersion: 2.0\n"
    )
    assert find_folders(f"{tmp_path}/bin/python") is None, "what another Python finds is not known"
    (tmp_path / "pyvenv.cfg").touch()
    assert find_folders(f"{tmp_path}/bin/python") == [str(place)] and InstalledPackages(
        [str(place)]
    )["own"] == [
        2,
        0,
    ]
    assert (
        InstalledPackages([str(place)])["pytest"] is None
        and find_folders(f"{sys.prefix}/bin/python") == sys.path
    )
