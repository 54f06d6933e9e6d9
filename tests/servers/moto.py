"""A server that speaks S3 (moto), in a process of its own on a loopback port.  Knows nothing of the store that is tested with it.

    with Moto() as moto:
        moto.endpoint     # http://127.0.0.1:port
        moto.bucket()     # the name of a new bucket
        moto.environ      # AWS_* variables with which a client may enter
        moto.s3           # a plain boto3 client, to look and to break things with

`Moto(auth=True)` checks signatures as Amazon does; without, anybody may do anything.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any, Self

_count = itertools.count(1)
PROGRAM = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


class Moto:
    def __init__(self, *, auth: bool = False) -> None:
        self._auth = auth
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # Making a user, a key and its policy are the calls that go unchecked.
        environ = {**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "3"} if self._auth else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environ = {
            "AWS_ACCESS_KEY_ID": "testing-key-of-some-length",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        if self._auth:
            iam = self._client("iam")
            iam.create_user(UserName="t")
            key = iam.create_access_key(UserName="t")["AccessKey"]
            rights = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
            iam.put_user_policy(UserName="t", PolicyName="all", PolicyDocument=rights)
            self.environ = {
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            }
        self.environ |= {
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
        }
        self.environ["AWS_SHARED_CREDENTIALS_FILE"] = "/dev/null"
        self.s3 = self._client("s3")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def bucket(self) -> str:
        name = f"bucket-{os.getpid()}-{next(_count)}"
        self.s3.create_bucket(Bucket=name)
        return name

    def _client(self, service: str) -> Any:
        import boto3

        parsed_once()
        secrets = {
            "aws_access_key_id": self.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": self.environ["AWS_SECRET_ACCESS_KEY"],
        }
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1", **secrets)


def parsed_once() -> None:
    """Have the descriptions of Amazon's services read once, not by each client of this process: it takes longer than what a client is asked here."""
    from botocore.loaders import JSONFileLoader

    if not isinstance(vars(JSONFileLoader)["load_file"], staticmethod):
        JSONFileLoader.load_file = staticmethod(functools.cache(JSONFileLoader().load_file))


def answers(url: str, *, seconds: float = 20.0) -> bool:
    """Wait until somebody speaks HTTP there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.05)
    return False
