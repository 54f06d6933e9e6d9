"""`--retry N`: when at most N tests failed, each is tried up to twice more, alone; printed, counted, and shown with what failed at first.

Real servers and processes on a machine that others use, too, may fail once, and what made them fail may still be going on at the next try.  More than
N failures are not bad luck: none is tried again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from _pytest.terminal import TerminalReporter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--retry",
        type=int,
        default=0,
        metavar="N",
        help="try at most N failed tests up to twice more, alone",
    )


@pytest.hookimpl(trylast=True)  # after the workers of xdist are gone
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    most: int = config.getoption("retry")
    if (
        not most
        or hasattr(config, "workerinput")
        or exitstatus != pytest.ExitCode.TESTS_FAILED
        or not isinstance(reporter, TerminalReporter)
    ):
        return
    failed = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
    if not all(isinstance(report, pytest.TestReport) for report in failed):
        return  # a file that cannot be read
    names = list(dict.fromkeys(report.nodeid for report in failed))
    reporter.write_line("")
    if len(names) > most:
        reporter.write_line(
            f"retry: {len(names)} tests failed; at most {most} are tried again", red=True
        )
        return
    passed = {name for name in names if _again(name, config, reporter)}
    for kind in ("failed", "error"):
        reporter.stats[kind] = [
            report for report in reporter.stats.get(kind, ()) if report.nodeid not in passed
        ]
    counted = {
        report.nodeid for report in reporter.stats.get("passed", ())
    }  # one that failed in its teardown has passed
    for report in failed:
        if report.nodeid in passed:
            reporter.stats.setdefault("retried", []).append(report)
            if report.nodeid not in counted:
                counted.add(report.nodeid)
                reporter.stats.setdefault("passed", []).append(report)
    if len(passed) == len(names):
        session.exitstatus = pytest.ExitCode.OK


def _again(name: str, config: pytest.Config, reporter: TerminalReporter) -> bool:
    """Whether a test passes alone, in a pytest of its own, at one of two tries."""
    argv = [sys.executable, "-m", "pytest", "--retry", "0", "-m", "", name]
    for number in ("first", "second"):
        done = subprocess.run(
            argv,
            cwd=config.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        passed = done.returncode == 0
        reporter.write_line(
            f"retry: {name}: {'passed' if passed else 'failed'} at the {number} try",
            red=not passed,
            yellow=passed,
        )
        if passed:
            return True
    return False


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    for report in terminalreporter.stats.get("retried", ()):
        terminalreporter.write_sep(
            "_", f"{report.nodeid}: passed when tried again; at first", yellow=True
        )
        terminalreporter.write_line(report.longreprtext)
