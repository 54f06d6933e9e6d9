"""A real S3 server, Ceph's, keeps the promises of a shared store.  Skipped where it is not installed; it takes about 13 seconds to start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.agent.pulling import PullState
from runner.settings import StoreSettings
from runner.storage.buckets import opening as buckets
from runner.storage.buckets.bucket import StoreError
from runner.storage.content.objects import Objects
from runner.storage.remote.remote import Remote
from runner.storage.signed import sign_objects
from runner.storage.sources import ask_identity
from runner.storage.workspace import Workspace
from tests.bucket_keys import demand_all_or_a_refusal
from tests.contract.artifact_store_contract import (  # noqa: F401
    clock,
    collector,
    file,
    here,
    key,
    noise,
    other,
    remote,
    small_parts,
    test_a_file_arrives_as_it_was,
    test_a_tree_arrives_as_it_was,
    test_of_many_at_once_one_is_first_and_all_agree,
    test_old_traces_go_and_then_what_they_needed,
    test_swapped_objects_are_found,
    test_the_first_trace_of_a_key_stays,
    test_two_who_put_the_same_at_once_both_succeed,
    test_what_is_there_is_not_sent_again,
    there,
)
from tests.contract.test_moto_store import Bucket
from tests.servers.ceph import PROGRAMS, Ceph
from tests.tools import needs


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    for program in PROGRAMS:
        needs(program)
    with Ceph(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(autouse=True)
def login(ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ceph.environ.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def raw(ceph: Ceph) -> Bucket:
    return Bucket(ceph)


def test_an_upload_that_may_be_under_way_is_left_alone(raw: Bucket) -> None:
    raw.server.s3.create_multipart_upload(Bucket=raw.name, Key="team/project/objects/ab/x")
    Remote(raw.bucket()).mark()
    assert len(raw.uploads()) == 1
    Remote(raw.bucket(), now=lambda: time.time() + 2 * 86_400).mark()
    assert raw.uploads() == []


def test_parts_that_were_sent_are_not_sent_again(
    raw: Bucket,
    here: Objects,  # noqa: F811
    there: Objects,  # noqa: F811
    tmp_path: Path,
) -> None:
    content = file(here, tmp_path, noise("parts", 14 << 20))
    s3, at = raw.server.s3, f"team/project/objects/{content[2:4]}/{content[2:]}"
    upload = s3.create_multipart_upload(Bucket=raw.name, Key=at)["UploadId"]
    s3.upload_part(
        Bucket=raw.name,
        Key=at,
        UploadId=upload,
        PartNumber=1,
        Body=noise("parts", 14 << 20)[: 5 << 20],
    )
    Remote(raw.bucket()).put(content, here)
    assert raw.uploads() == []
    Remote(raw.bucket()).fetch(content, there)
    assert there.verify(content)


@pytest.mark.parametrize(
    ("variable", "code"),
    [
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"),
    ],
)
def test_wrong_credentials_are_reported(
    raw: Bucket, monkeypatch: pytest.MonkeyPatch, variable: str, code: str
) -> None:
    monkeypatch.setenv(variable, "WRONGWRONGWRONGWRONG")
    with pytest.raises(StoreError, match=rf"refused \({code}") as caught:
        Remote(raw.bucket()).check()
    assert "WRONGWRONG" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_bucket_that_is_not_there_is_reported(ceph: Ceph) -> None:
    with pytest.raises(StoreError, match="the bucket does not exist"):
        Remote(
            buckets.open(
                StoreSettings("", "s3://no-such-bucket/x", endpoint=ceph.endpoint), Path("/")
            )
        ).lookup([key(1)])


def test_a_signed_address_opens_its_object_for_everybody_and_no_other(
    raw: Bucket, tmp_path: Path
) -> None:
    raw.put("rows/a.bin", b"a" * 100_000)
    raw.put("rows/deep/b ü.bin", b"b" * 100_000)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "recipe.toml").write_text(
        f'[stores.b]\nurl = "s3://{raw.name}/x"\nendpoint = "{raw.server.endpoint}"\n'
    )
    address = f"s3://{raw.name}/team/project/rows"
    with Workspace.open(tmp_path / "work") as ws:
        source = sign_objects(ws, address, ask_identity(ws, "s3", address), (), secret=True)
        assert source is not None and source.confirm()
        addresses = source.addresses(source.items)
    rows = [(*item, opened) for item, opened in zip(source.items, addresses, strict=True)]
    pulling = PullState(str(tmp_path / "it"), rows, 1)
    pulling.work()
    assert (
        not pulling.problem
        and (tmp_path / "it" / "deep" / "b ü.bin").read_bytes() == b"b" * 100_000
    )
    path, size, etag, opened = rows[0]
    for wrong in (
        opened.partition("?")[0],
        opened.replace("a.bin", "deep/b%20%C3%BC.bin"),
        opened[:-1] + ("0" if opened[-1] != "0" else "1"),
    ):
        pulling = PullState(str(tmp_path / "other"), [(path, size, etag, wrong)], 1)
        pulling.work()
        assert pulling.problem == "the bucket returned HTTP status 403"


def test_of_any_keys_below_an_input_nothing_is_mixed_and_nothing_left_out_unsaid(
    ceph: Ceph, tmp_path: Path
) -> None:
    demand_all_or_a_refusal(tmp_path / "work", ceph, ceph.bucket(), range(30))
