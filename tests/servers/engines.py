"""Engines that run containers, and images of a static busybox, for tests.  Knows nothing of what is tested with them.

    @EACH                        # with Podman and with Docker; without it, the first
    def test(machine): ...       # .kind .image .bare, and how it has to be called here: .flags .args .environ

Skipped, saying why, where an engine cannot run a container.  The fixtures are imported by name: `machine` and `daemon`.
"""

from __future__ import annotations

import asyncio
import functools
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runner.hosts import containers
from runner.hosts.engines import Engine
from runner.hosts.link.client import connect_local
from tests.support import until
from tests.tools import needs

PLAIN: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
BARE_CGROUPS = (
    ("--runtime", "runc", "--cgroup-manager", "cgroupfs"),
    ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
)
"""What Podman needs on a machine without systemd, with cgroups of both versions and without the right to raise limits."""


@dataclass
class Machine:
    """An engine that works here, how it has to be called, and its images."""

    kind: str
    flags: tuple[str, ...]
    args: tuple[str, ...]
    environ: dict[str, str]
    image: str  # busybox under its usual names, with an entry point and a variable
    bare: str  # /bin/busybox alone: no shell

    @functools.cached_property
    def engine(self) -> Engine:
        async def detected() -> Engine:
            host = connect_local(Path(tempfile.mkdtemp()))
            try:
                return await containers.detect(
                    host, engine=self.kind, flags=self.flags, args=self.args, environ=self.environ
                )
            finally:
                await host.aclose()

        return asyncio.run(detected())

    def cli(self, *words: str) -> str:
        return subprocess.run(
            [self.kind, *self.flags, *words],
            env=self.environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout


def root_of(names: Sequence[str]) -> bytes:
    """A root file system, as a tar: busybox, also under these names."""
    needs("static busybox")
    busybox = needs("busybox")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder in ("bin", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        entry = tarfile.TarInfo("bin/busybox")
        entry.mode, entry.size = 0o755, os.stat(busybox).st_size
        tar.addfile(entry, io.BytesIO(Path(busybox).read_bytes()))
        for name in names:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return data.getvalue()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables by which Docker's client finds a daemon: the one that runs, or one of our own."""
    needs("docker")
    if (
        subprocess.run(
            ["docker", "info", "--format", "{{.ID}}"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        yield dict(os.environ)
        return
    if shutil.which("dockerd") is None or os.getuid() != 0:
        pytest.skip("no Docker daemon runs here, and there is none to start")
    place = tmp_path_factory.mktemp("dockerd")
    address = f"unix://{place}/socket"
    limits = [
        word for name in ("nofile", "nproc") for word in ("--default-ulimit", f"{name}=1024:1024")
    ]
    argv = [
        "dockerd",
        "--host",
        address,
        "--data-root",
        f"{place}/data",
        "--exec-root",
        f"{place}/exec",
        "--pidfile",
        f"{place}/pid",
    ]
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(
            [*argv, "--bridge", "none", "--iptables=false", "--ip6tables=false", *limits],
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: (place / "socket").exists() or process.poll() is not None, seconds=30)
        if process.poll() is not None:
            pytest.skip(
                f"no Docker daemon runs here, and one does not start: {(place / 'log').read_text()[-300:]}"
            )
        yield {**os.environ, "DOCKER_HOST": address}
    finally:
        process.terminate()
        process.wait(30)
        subprocess.run(["umount", f"{place}/exec/netns/default"], capture_output=True, check=False)
        shutil.rmtree(place, ignore_errors=True)


EACH = pytest.mark.parametrize("machine", ["podman", "docker"], indirect=True)
"""With both engines; a test without it is about what we do around them, and takes the first."""


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    kind = getattr(request, "param", "podman")
    needs(kind)
    environ = request.getfixturevalue("daemon") if kind == "docker" else dict(os.environ)
    names = [f"local/recipe-{name}:{os.getpid()}" for name in ("full", "bare")]
    applets = (
        "sh",
        "cat",
        "echo",
        "env",
        "id",
        "kill",
        "ls",
        "mkdir",
        "mkfifo",
        "sleep",
        "touch",
        "true",
    )
    imported = Machine(kind, (), (), environ, *names)
    try:
        for name, root in zip(names, (root_of(applets), root_of(())), strict=True):
            changes = ["--change", "ENV FROM_IMAGE=yes", "--change", 'ENTRYPOINT ["/bin/false"]']
            subprocess.run(
                [kind, "import", *changes, "-", name],
                input=root,
                env=environ,
                check=True,
                capture_output=True,
            )
        said = ""
        for flags, args in (
            (PLAIN, BARE_CGROUPS) if kind == "podman" else (PLAIN, ((), BARE_CGROUPS[1]))
        ):
            argv = [
                kind,
                *flags,
                "run",
                "--rm",
                "--network",
                "host",
                "--entrypoint",
                "",
                *args,
                names[0],
                "/bin/true",
            ]
            tried = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
            if tried.returncode == 0:
                yield replace(imported, flags=flags, args=args)
                return
            said = tried.stderr
        pytest.skip(f"{kind} cannot run a container here: {said.strip()[-300:]}")
    finally:
        subprocess.run(
            [kind, "rmi", "--force", *names], env=environ, capture_output=True, check=False
        )
