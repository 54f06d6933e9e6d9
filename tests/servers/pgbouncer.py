"""A private PgBouncer before a database of a private PostgreSQL: `with PgBouncer(database_url, "transaction") as pooler: pooler.url` ."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.support import until
from tests.tools import needs


class PgBouncer:
    def __init__(self, database: str, mode: str) -> None:
        program = needs("pgbouncer")
        self._folder = Path(tempfile.mkdtemp(prefix="pgb", dir="/tmp"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        there = urlsplit(database)
        name = there.path.strip("/")
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n{name} = host={there.hostname} port={there.port} user={there.username}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\ndefault_pool_size = 5\n"
        )
        self._command = [program, "-q", str(settings)]
        self.url = f"postgresql://{there.username}@127.0.0.1:{self._port}/{name}"

    def __enter__(self) -> Self:
        more = {}
        if os.geteuid() == 0:  # it refuses root
            shutil.chown(self._folder, "postgres")
            self._folder.chmod(0o755)
            more = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._process = subprocess.Popen(
            self._command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **more,
        )  # type: ignore[call-overload]
        until(self._answers, seconds=30)
        return self

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port)).close()
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
