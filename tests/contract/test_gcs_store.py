"""A bucket of Google Cloud Storage keeps the promises of a shared store: fake-gcs-server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.settings import StoreSettings
from runner.storage.buckets import opening as buckets
from runner.storage.buckets.bucket import BucketUnreachable, StoreError
from runner.storage.content.objects import Objects
from runner.storage.remote.remote import Remote
from tests.contract.artifact_store_contract import *  # noqa: F403
from tests.contract.artifact_store_contract import file, key
from tests.servers.fakegcs import FakeGcs


class Bucket:
    def __init__(self, server: FakeGcs) -> None:
        self.server, self.name = server, server.bucket()

    def bucket(self) -> Bucket:
        return buckets.open(
            StoreSettings("", f"gs://{self.name}/team/project", endpoint=self.server.endpoint),
            Path("/nowhere"),
        )

    def get(self, name: str) -> bytes:
        return self.server.get(self.name, f"team/project/{name}")

    def put(self, name: str, data: bytes) -> None:
        self.server.put(self.name, f"team/project/{name}", data)

    def delete(self, name: str) -> None:
        self.server.delete(self.name, f"team/project/{name}")


@pytest.fixture(scope="module")
def gcs() -> Iterator[FakeGcs]:
    with FakeGcs() as server:
        yield server


@pytest.fixture
def raw(gcs: FakeGcs) -> Bucket:
    return Bucket(gcs)


@pytest.mark.parametrize("size", [100, 300_000, 6 << 20])
def test_bytes_that_look_like_a_border_of_a_message_arrive(
    raw: Bucket, here: Objects, there: Objects, tmp_path: Path, size: int
) -> None:
    content = file(here, tmp_path, (b"\r\n--==0==--\r\n" * size)[:size])
    Remote(raw.bucket()).put(content, here)
    Remote(raw.bucket()).fetch(content, there)
    assert there.verify(content)


def test_a_bucket_that_is_not_there_is_reported(gcs: FakeGcs) -> None:
    with pytest.raises(StoreError, match="the bucket does not exist") as caught:
        Remote(
            buckets.open(
                StoreSettings("", "gs://no-such-bucket/x", endpoint=gcs.endpoint), Path("/")
            )
        ).lookup([key(1)])
    assert (caught.value.exit_code, "create the" in caught.value.fix) == (5, True)


def test_a_server_that_is_not_there_is_not_waited_for() -> None:
    remote = Remote(
        buckets.open(StoreSettings("", "gs://bucket/x", endpoint="http://127.0.0.1:9"), Path("/"))
    )
    with pytest.raises(BucketUnreachable) as caught:
        remote.lookup([key(1)], patience=1.0)
    assert caught.value.exit_code == 5
