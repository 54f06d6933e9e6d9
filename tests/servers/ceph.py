"""A real S3 server: Ceph's radosgw over one monitor, one manager and one OSD in memory, on loopback ports.  Takes about 13 seconds to start.

    with Ceph(tmp_path) as ceph:
        ceph.endpoint, ceph.bucket(), ceph.environ, ceph.s3      # as of tests.servers.moto

It checks signatures.  Needs the packages radosgw, ceph-mon, ceph-osd, ceph-mgr and ceph-common: `available()` says whether they are there.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any, Self

from .moto import answers, parsed_once
from .sshd import free_port

_count = itertools.count(1)
PROGRAMS = ("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
KEY, SECRET = "ACCESSKEYID012345678", "SECRETKEY0123456789abcdef"


class Ceph:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def bucket(self) -> str:
        name = f"bucket-{os.getpid()}-{next(_count)}"
        self.s3.create_bucket(Bucket=name)
        return name

    def _start(self) -> None:
        place = self._place
        for folder in ("mon", "osd", "mgr", "run", "log", "rgw"):
            (place / folder).mkdir(parents=True)
        fsid, osd, monitor = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        port = next(
            port for port in iter(free_port, None) if port != monitor
        )  # it is taken seconds from now
        self.endpoint = f"http://127.0.0.1:{port}"
        self._conf = place / "ceph.conf"
        self._conf.write_text(CONF.format(fsid=fsid, place=place, monitor=monitor, port=port))
        self._do(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v1:127.0.0.1:{monitor}]",
            str(place / "monmap"),
        )
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(place / "monmap"))
        self._serve("ceph-mon", "-i", "a")
        self._serve("ceph-mgr", "-i", "x")
        self._do("ceph", "-s")  # waits for the monitor
        self._do("ceph", "osd", "new", osd)
        (place / "osd" / "type").write_text("memstore\n")
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._serve_osd()
        self._serve("radosgw", "-n", "client.rgw")
        assert answers(self.endpoint, seconds=180)
        self._do(
            "radosgw-admin",
            "user",
            "create",
            "--uid=t",
            "--display-name=t",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        nothing = {
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        self.environ = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            **nothing,
        }
        self.s3 = self._client()

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        parsed_once()
        plain = Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        secrets = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", config=plain, **secrets
        )

    def _serve_osd(self) -> None:
        """On a busy machine it may speak to the monitor before it knows the cluster's id, is told "wrong fsid", and gives up: begun again, it is well."""
        for _ in range(5):
            osd = self._serve("ceph-osd", "-i", "0")
            while osd.poll() is None:
                if b"1 up" in self._do("ceph", "osd", "stat"):  # takes most of a second to ask
                    return
        raise AssertionError("the OSD gives up, again and again")

    def _serve(self, *argv: str) -> subprocess.Popen[bytes]:
        """In the foreground, so that it ends with us and is ended by its process."""
        with (self._place / "log" / f"{argv[0]}.out").open("ab") as out:
            process = subprocess.Popen(
                [argv[0], "-c", str(self._conf), "-f", *argv[1:]],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        return process

    def _do(self, *argv: str) -> bytes:
        config = () if argv[0] == "monmaptool" else ("-c", str(self._conf))
        for _ in range(5):
            done = subprocess.run([argv[0], *config, *argv[1:]], capture_output=True, timeout=180)
            if (
                b"problem getting command descriptions" not in done.stderr
            ):  # on a busy machine the monitor may not know its commands yet
                break
        assert done.returncode == 0, (argv, done.stderr[-2000:])
        return done.stdout


CONF = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
cephx require signatures = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon osd full ratio = 0.99
mon warn on pool no redundancy = false
osd objectstore = memstore
memstore device bytes = 2147483648
osd crush chooseleaf type = 0
osd heartbeat grace = 60
ms bind msgr2 = false
public addr = 127.0.0.1
run dir = {place}/run
admin socket = {place}/run/$name.asok
log file = {place}/log/$name.log
pid file = {place}/run/$name.pid
mon data = {place}/mon
osd data = {place}/osd
mgr data = {place}/mgr
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {place}/rgw
rgw dns name = 127.0.0.1
"""
