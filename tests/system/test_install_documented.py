"""docs/install.md: its units and its Containerfile are such that systemd and podman read them, and name what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from runner.interface.cli.verbs import parser_of
from runner.paths import shipped

DOCS = shipped() / "docs"
PAGE = (DOCS / "install.md").read_text("utf-8")
CONTAINER = (DOCS / "Containerfile").read_text("utf-8")
BLOCKS = re.findall(r'^```ini title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)


def test_systemd_reads_the_units_of_the_page(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    units = {name: text for name, text in BLOCKS if name.endswith(".service")}
    assert set(units) == {"recipe-server.service", "recipe-worker.service"}
    for name, text in units.items():  # neither the user nor the program is there
        (tmp_path / name).write_text(
            text.replace("User=recipe", "User=root").replace("/usr/local/bin/recipe", "/bin/true")
        )
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Unknown" not in done.stderr, done.stderr


def test_each_command_of_a_unit_is_one_that_recipe_understands() -> None:
    lines = [
        line.partition("=")[2]
        for _, text in BLOCKS
        for line in text.splitlines()
        if line.startswith("ExecStart=/")
    ]
    assert len(lines) == 3
    for line in lines:
        program, verb, *words = line.split()
        assert program.endswith("/recipe")
        parser_of(verb)[0].parse_args(words)


def test_the_end_of_a_worker_fits_into_the_time_that_systemd_gives_it() -> None:
    from runner.interface.cli.worker import END_WITHIN

    for stop in (
        re.search(r"TimeoutStopSec=(\d+)", PAGE),
        re.search(r"--stop-timeout (\d+)", PAGE),
    ):
        assert stop is not None and int(stop[1]) > END_WITHIN + 2
    assert "KillMode=process" in PAGE


def test_the_extras_of_page_and_containerfile_are_there() -> None:
    known = tomllib.loads((shipped() / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    named = {
        extra
        for words in re.findall(r"(?:\.|checkout|/src)\[([a-z0-9,]+)\]", PAGE + CONTAINER)
        for extra in words.split(",")
    }
    assert {"server", "postgres", "ssh"} <= named <= set(known)


def test_podman_reads_the_containerfile_up_to_its_image() -> None:
    """No image can be had here, so only that it is read: what it does in the image is not tried."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    words = ["podman", "build", "--pull=never", "-f", str(DOCS / "Containerfile"), str(DOCS)]
    said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (
        said.returncode == 0
        or "image not known" in said.stderr
        or "python:3.12-slim" in said.stderr
    ), said.stderr
