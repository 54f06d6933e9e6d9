"""A private PostgreSQL on a loopback port: `with Postgres() as server: server.url()` is the address of a new, empty schema.  It refuses root, so it has its own user."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

_count = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """One server for all tests that ask for it; each has a schema of its own."""
    with Postgres() as one:
        yield one


@pytest.fixture
def url(server: Postgres) -> str:
    return server.url()


class Postgres:
    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [
            Path(shutil.which("initdb") or "")
        ]
        if not found[-1].name:
            pytest.skip("initdb is not installed")
        self._bin = found[-1].parent
        self._folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres")
        self._do(
            "initdb",
            "-D",
            str(self._folder / "data"),
            "-A",
            "trust",
            "-U",
            "tester",
            "--locale=C",
            "--encoding=UTF8",
            "--no-sync",
            "--no-instructions",
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        settings = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._do(
            "pg_ctl",
            "-D",
            str(self._folder / "data"),
            "-w",
            "-l",
            str(self._folder / "log"),
            "-o",
            settings,
            "start",
        )

    def stop(self) -> None:
        self._do("pg_ctl", "-D", str(self._folder / "data"), "stop", "-m", "immediate")

    def url(self) -> str:
        """The address of a schema that nothing is in."""
        import psycopg

        name = f"s{next(_count)}"
        base = f"postgresql://tester@127.0.0.1:{self._port}/postgres"
        with psycopg.connect(base, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {name}".encode())
        return f"{base}?options=-csearch_path%3D{name}"

    def _do(self, program: str, *words: str) -> None:
        who = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        more = (
            {"user": who, "group": pwd.getpwnam(who).pw_gid, "extra_groups": []}
            if os.geteuid() == 0
            else {}
        )
        subprocess.run(
            [self._bin / program, *words],
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            **more,
        )  # type: ignore[call-overload]
