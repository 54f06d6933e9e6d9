"""Which Python of a host our program runs on, where there are several, or none that does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers import calls
from drivers.base import Argv, Denied
from runner.hosts.link import stream
from tests.support import old_python

POSES = """\
#!{python}
import sys
sys.version_info, sys.implementation.name = {version}, "{name}"
given = sys.argv.index("-c")
code, sys.argv = sys.argv[given + 1], sys.argv[given + 1 :]
exec(code)
"""
"""A Python that says that it is another."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with an old Python, one that is not CPython, and this one where a test links it."""
    (tmp_path / "bin").mkdir()
    for python, version, name in (
        ("ancient", (3, 8, 20), "cpython"),
        ("other", (3, 9, 16), "pypy"),
    ):
        (tmp_path / "bin" / python).write_text(
            POSES.format(python=sys.executable, version=version, name=name)
        )
        (tmp_path / "bin" / python).chmod(0o755)
    monkeypatch.setattr(stream, "PYTHONS", ("none", "ancient", "other", "good"))

    def call(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        return calls.call(argv, stdin, {"PATH": str(tmp_path / "bin")})

    return SimpleNamespace(python="", call=call, bin=tmp_path / "bin", root=str(tmp_path / "root"))


def begun(host: Any) -> str:
    """The root that our program says it serves there."""

    async def story() -> str:
        opened = await stream.Stream.open(host, host.root, "files")
        await opened.leave()
        return opened.root

    return asyncio.run(story())


def test_a_host_without_a_python_that_does_is_refused_with_what_to_do(host: Any) -> None:
    with pytest.raises(
        Denied,
        match=r"no CPython 3\.9 or later on the host: install Python on the host, set `python`",
    ):
        begun(host)


def test_a_python_that_was_unpacked_below_the_root_does_where_there_is_no_other(host: Any) -> None:
    folder = Path(host.root, "python", "bin")
    folder.mkdir(parents=True)
    os.symlink(old_python() or sys.executable, folder / "python3")
    assert begun(host) == host.root


@pytest.mark.parametrize("named", ["", "none", "ancient", "other", "good"])
def test_the_first_python_that_does_is_taken_after_the_one_that_is_named(
    host: Any, named: str
) -> None:
    host.python = named
    os.symlink(old_python() or sys.executable, host.bin / "good")
    assert begun(host) == host.root
