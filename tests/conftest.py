"""Fixtures named as things; no example of a property has to be quick on a machine that others use, too.  What must not be skipped fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from tests import tools
from tests.servers.postgres import server, url  # noqa: F401  (fixtures)
from tests.support import Space

pytest_plugins = ["tests.retry"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

settings.register_profile("shared", deadline=None)
settings.register_profile("check", deadline=None, max_examples=20)
settings.load_profile("shared")

os.environ["VIRTUAL_ENV"] = (
    sys.prefix
)  # steps run the Python, and find the packages, that the tests run in

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # begun behind a shell's &: what we start would never hear of an interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    """An empty workspace, and a ledger of its own."""
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    return Space(tmp_path / "space")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every disk is empty but for a tenth: what a test says of disks is not to hang on how full the one of its machine is."""
    real = os.statvfs

    def statvfs(path: int | str | os.PathLike[str]) -> os.statvfs_result:
        real(path)  # raises for what is not there
        return os.statvfs_result(
            (4096, 4096, 10**9, 9 * 10**8, 9 * 10**8, 10**8, 10**8, 10**8, 0, 255)
        )

    monkeypatch.setattr(os, "statvfs", statvfs)


def pytest_configure(config: pytest.Config) -> None:
    """Each worker of xdist begins to collect elsewhere: the `assert`s of a file are rewritten by one, and the others find that done."""
    worker = getattr(config, "workerinput", None)
    if worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = [*files[begin:], *files[:begin]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """And all agree on the order."""
    items.sort(key=lambda item: item.path)


def _demand(report: Report) -> Report:
    """A skip that is not allowed here becomes a failure."""
    if (
        report.skipped
        and isinstance(report.longrepr, tuple)
        and not tools.allowed(report.longrepr[2])
    ):
        report.outcome = "failed"
        report.longrepr = f"everything has to run here (RECIPE_TEST_ALL): {report.longrepr[2]}\ninstall it, as .ci/run does"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _demand((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _demand((yield))
