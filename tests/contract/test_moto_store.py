"""A bucket of S3 keeps the promises of a shared store: moto, and what can go wrong on the way to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import Infrastructure
from runner.retry import retry
from runner.settings import StoreSettings
from runner.storage.buckets import opening as buckets
from runner.storage.buckets.bucket import ATTEMPTS, Again, BucketUnreachable, StoreError, tries
from runner.storage.buckets.s3 import S3
from runner.storage.content.files import Content
from runner.storage.content.objects import Objects
from runner.storage.remote import layout as remote_layout
from runner.storage.remote.remote import Remote
from runner.storage.remote.session import MissingObject
from tests.bucket_keys import demand_all_or_a_refusal
from tests.contract.artifact_store_contract import *  # noqa: F403
from tests.contract.artifact_store_contract import file, key, name, names, noise, trace, tree
from tests.servers.httpfaults import Fault, HttpFaults, Request
from tests.servers.moto import Moto


class Bucket:
    """A bucket of an S3 server, past our code."""

    def __init__(self, server: Any) -> None:
        self.server, self.name = server, server.bucket()

    def bucket(self, endpoint: str = "") -> Bucket:
        return buckets.open(
            StoreSettings(
                "", f"s3://{self.name}/team/project", endpoint=endpoint or self.server.endpoint
            ),
            Path("/nowhere"),
        )

    def get(self, name: str) -> bytes:
        return bytes(
            self.server.s3.get_object(Bucket=self.name, Key=f"team/project/{name}")["Body"].read()
        )

    def put(self, name: str, data: bytes) -> None:
        self.server.s3.put_object(Bucket=self.name, Key=f"team/project/{name}", Body=data)

    def delete(self, name: str) -> None:
        self.server.s3.delete_object(Bucket=self.name, Key=f"team/project/{name}")

    def uploads(self) -> list[str]:
        return [
            found["Key"]
            for found in self.server.s3.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        ]


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


@pytest.fixture(autouse=True)
def login(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in moto.environ.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def raw(moto: Moto) -> Bucket:
    return Bucket(moto)


# -- what can go wrong on the way


@pytest.fixture
def proxy(moto: Moto) -> Iterator[HttpFaults]:
    with HttpFaults(moto.endpoint) as between:
        yield between


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it was waited between two tries; nobody waits."""
    slept: list[float] = []
    monkeypatch.setattr(retry, "__defaults__", (slept.append, *(retry.__defaults__ or ())[1:]))
    return slept


@pytest.fixture
def shaky(raw: Bucket, proxy: HttpFaults, naps: list[float]) -> Remote:
    return Remote(raw.bucket(proxy.endpoint))


PASSING = {
    "503": Fault(status=503),
    "429": Fault(status=429, code="TooManyRequests"),
    "500": Fault(status=500, code="InternalError"),
    "a reset": Fault(reset=True),
    "a lost answer": Fault(lost=True),
    "a cut answer": Fault(cut=7),
    "a flipped bit": Fault(flip=11),
    "a flipped bit of what is sent": Fault(flip_request=3),
    "another ETag": Fault(headers={"ETag": '"00000000000000000000000000000000"'}),
    "a slow answer": Fault(slow=0.05),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(
    shaky: Remote, proxy: HttpFaults, here: Objects, there: Objects, tmp_path: Path, fault: str
) -> None:
    """Every second request of each object goes wrong, sending and receiving."""
    contents = [
        file(here, tmp_path, noise("f", 50_000)),
        file(here, tmp_path, noise("l", 12 << 20)),
    ]
    contents.append(tree(here, tmp_path, {"a": b"1", "b": noise("b", 300_000)}))

    def spoil(request: Request) -> Fault | None:
        if (
            "flip" in fault
        ):  # what is damaged on the way is found when all of it is there, and had again once
            return PASSING[fault] if request.number == 0 and not _metadata(request) else None
        return PASSING[fault] if request.number % 2 == 0 else None

    proxy.spoil = spoil
    for content in contents:
        shaky.put(content, here)
    assert shaky.tell(trace(1, *contents), {}) == trace(1, *contents)
    assert set(shaky.lookup([key(1)])) == {key(1)}
    for content in contents:
        shaky.fetch(content, there)
        assert there.verify(content)


def _metadata(request: Request) -> bool:
    """Answers whose bytes nothing but their meaning vouches for: XML, and traces, of which a damaged one is none."""
    return (
        request.method == "POST"
        or "/objects/" not in request.path
        or request.path.endswith((".json", ".parts"))
    )


def test_waits_grow_and_are_never_alike(naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Again

    for chance in (0.0, 1.0):
        monkeypatch.setattr("random.random", lambda chance=chance: chance)
        with pytest.raises(Again):
            retry(fail, tries())
    assert naps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 0.2, 0.4, 0.8, 1.6, 3.2])


def test_what_does_not_pass_is_given_up_soon(
    shaky: Remote, proxy: HttpFaults, naps: list[float], here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, b"x")
    proxy.spoil = lambda request: Fault(status=503) if request.method == "PUT" else None
    with pytest.raises(BucketUnreachable, match="SlowDown"):
        shaky.put(content, here)
    assert len(naps) == ATTEMPTS - 1


def test_a_body_that_breaks_off_goes_on_where_it_did(
    shaky: Remote, proxy: HttpFaults, here: Objects, there: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, noise("r", 4 << 20))
    shaky.put(content, here)
    proxy.calm()
    proxy.spoil = lambda request: (
        Fault(cut=3 << 20)
        if request.method == "GET" and request.number == 0 and "/objects/" in request.path
        else None
    )
    shaky.fetch(content, there)
    asked = [
        r.headers.get("Range")
        for r in proxy.requests
        if r.method == "GET" and "/objects/" in r.path
    ]
    assert asked[0] == f"bytes=0-{(4 << 20) - 1}"
    assert len(asked) == 2
    begun = int(str(asked[1]).removeprefix("bytes=").partition("-")[0])
    assert begun > 2 << 20, "at most what was under way is sent twice"


def test_a_lost_answer_to_the_first_trace_does_not_make_us_lose(
    shaky: Remote, proxy: HttpFaults
) -> None:
    content = Content("f:" + "0" * 64)
    proxy.spoil = lambda request: (
        Fault(lost=True) if request.method == "PUT" and request.number == 0 else None
    )
    assert shaky.tell(trace(1, content), {}) == trace(1, content)
    assert [r.method for r in proxy.requests if "/traces/" in r.path][:2] == ["PUT", "PUT"]


def test_an_object_that_is_always_damaged_on_the_way_is_gone(
    shaky: Remote, proxy: HttpFaults, here: Objects, there: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, noise("z", 5000))
    shaky.put(content, here)
    proxy.spoil = lambda request: (
        Fault(flip=100) if request.method == "GET" and "/objects/" in request.path else None
    )
    with pytest.raises(MissingObject, match="does not match its digest"):
        shaky.fetch(content, there)
    assert not there.has(content)


def test_what_arrives_as_other_bytes_is_sent_again(
    raw: Bucket, shaky: Remote, proxy: HttpFaults, here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, noise("q", 5000))
    proxy.spoil = lambda request: (
        Fault(flip_request=100) if request.method == "PUT" and request.number == 0 else None
    )
    shaky.put(content, here)
    assert raw.get(name(content)) == noise("q", 5000)


def test_a_server_that_says_nothing_is_not_waited_for(shaky: Remote, proxy: HttpFaults) -> None:
    release = threading.Event()
    proxy.spoil = lambda request: Fault(hold=release)
    try:
        with pytest.raises(BucketUnreachable, match="no response"):
            shaky.lookup([key(1)], patience=0.3)
        assert (
            not release.is_set() and len(proxy.requests) <= 1
        )  # none where the patience was over before the request was there
    finally:
        release.set()


def test_a_server_that_is_not_there_is_reported_soon(raw: Bucket) -> None:
    begun = time.monotonic()
    with pytest.raises(BucketUnreachable, match=r"127\.0\.0\.1:9") as caught:
        Remote(raw.bucket("http://127.0.0.1:9")).lookup([key(1)], patience=600)
    assert time.monotonic() - begun < 60
    assert caught.value.exit_code == 5
    assert "network" in caught.value.fix


# -- uploads in parts


def half(
    raw: Bucket, proxy: HttpFaults, content: Content, here: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that has sent two of three parts and vanishes: it does not take its upload back."""
    proxy.spoil = lambda request: (
        Fault(status=400, code="Odd") if request.method == "PUT" and request.number == 2 else None
    )
    with monkeypatch.context() as patch:
        patch.setattr(S3, "width", 1)
        kept = S3._ask
        patch.setattr(
            S3,
            "_ask",
            lambda self, method, **words: (
                None if method.startswith("abort") else kept(self, method, **words)
            ),
        )
        with pytest.raises(Infrastructure):
            Remote(raw.bucket(proxy.endpoint)).put(content, here)
    proxy.calm()


def test_what_a_killed_writer_sent_is_not_there_and_is_taken_up(
    raw: Bucket,
    proxy: HttpFaults,
    here: Objects,
    there: Objects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = file(here, tmp_path, noise("parts", 14 << 20))
    half(raw, proxy, content, here, monkeypatch)
    assert names(raw, "objects/") == []
    assert len(raw.uploads()) == 1
    assert Remote(raw.bucket()).holds([content]) == set()
    Remote(raw.bucket(proxy.endpoint)).put(content, here)
    assert len([r for r in proxy.requests if r.method == "PUT"]) == 1, (
        "two of three parts were there"
    )
    assert raw.uploads() == []
    Remote(raw.bucket()).fetch(content, there)
    assert there.verify(content)


def test_abandoned_uploads_are_ended_after_a_day(
    raw: Bucket, proxy: HttpFaults, here: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half(raw, proxy, file(here, tmp_path, noise("parts", 14 << 20)), here, monkeypatch)
    raw.server.s3.create_multipart_upload(Bucket=raw.name, Key="team/other-project/objects/x")
    assert (
        Remote(raw.bucket(), now=lambda: time.time() + 2 * 86_400)
        .collect(keep_days=30, dry=True)
        .uploads
        == 1
    )
    Remote(raw.bucket(), now=lambda: time.time() + 2 * 86_400).mark()
    assert raw.uploads() == ["team/other-project/objects/x"], "that of another project is not ours"


def test_an_upload_that_fails_is_taken_back(
    raw: Bucket, proxy: HttpFaults, naps: list[float], here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, noise("parts", 14 << 20))
    proxy.spoil = lambda request: (
        Fault(status=503) if request.method == "PUT" and request.number >= 1 else None
    )
    with pytest.raises(BucketUnreachable):
        Remote(raw.bucket(proxy.endpoint)).put(content, here)
    assert raw.uploads() == []
    assert names(raw, "objects/") == []


# -- who may


def test_a_bucket_that_is_not_there_is_reported(moto: Moto) -> None:
    with pytest.raises(StoreError, match="the bucket does not exist") as caught:
        Remote(
            buckets.open(
                StoreSettings("", "s3://no-such-bucket/x", endpoint=moto.endpoint), Path("/")
            )
        ).lookup([key(1)])
    assert (caught.value.exit_code, "create the" in caught.value.fix) == (5, True)


def test_no_credentials_are_reported(raw: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="no credentials") as caught:
        Remote(raw.bucket()).lookup([key(1)])
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix
    public = buckets.open(
        StoreSettings(
            "", f"s3://{raw.name}/team/project", endpoint=raw.server.endpoint, anonymous=True
        ),
        Path("/"),
    )
    assert Remote(public).lookup([key(1)]) == {}


def test_a_profile_that_is_not_there_is_reported(raw: Bucket) -> None:
    with pytest.raises(StoreError, match="profile") as caught:
        Remote(
            buckets.open(
                StoreSettings(
                    "", f"s3://{raw.name}", endpoint=raw.server.endpoint, profile="nobody"
                ),
                Path("/"),
            )
        ).check()
    assert "~/.aws/config" in caught.value.fix


def test_a_profile_brings_its_credentials(
    raw: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = abcdefghijklmnop\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    Remote(
        buckets.open(
            StoreSettings("", f"s3://{raw.name}", endpoint=raw.server.endpoint, profile="work"),
            Path("/"),
        )
    ).mark()


def test_a_wrong_secret_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with Moto(auth=True) as strict:
        for variable, value in strict.environ.items():
            monkeypatch.setenv(variable, value)
        raw = Bucket(strict)
        Remote(raw.bucket()).mark()
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(StoreError, match=r"refused \(SignatureDoesNotMatch") as caught:
            Remote(raw.bucket()).check()
        assert "wrong" not in str(caught.value)
        assert "aws" in caught.value.fix


def test_the_owner_of_the_bucket_is_demanded(raw: Bucket, proxy: HttpFaults) -> None:
    url = f"s3://{raw.name}/x"
    Remote(
        buckets.open(
            StoreSettings("", url, endpoint=proxy.endpoint, owner="123456789012"), Path("/")
        )
    ).lookup([key(1)])
    assert {r.headers.get("x-amz-expected-bucket-owner") for r in proxy.requests} == {
        "123456789012"
    }


def test_many_small_objects_travel_at_once(
    raw: Bucket, proxy: HttpFaults, here: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least sixteen requests are under way together."""
    monkeypatch.setattr(remote_layout, "SMALL", 0)
    content = tree(here, tmp_path, {f"{n}": noise(n, 1000) for n in range(30)})
    together, turn = threading.Event(), threading.Lock()
    waiting = 0

    def spoil(request: Request) -> None:
        nonlocal waiting
        if request.method == "PUT":
            with turn:
                waiting += 1
                if waiting == 16:
                    together.set()
            assert together.wait(60)

    proxy.spoil = spoil
    Remote(raw.bucket(proxy.endpoint)).put(content, here)
    assert together.is_set()


def test_a_bucket_is_made_once(moto: Moto) -> None:
    for region in ("", "eu-west-1"):
        there = buckets.open(
            StoreSettings(
                "", f"s3://made-{region or 'here'}/team", endpoint=moto.endpoint, region=region
            ),
            Path("/nowhere"),
        )
        assert there.make() and not there.make()
        assert there.create("marker", b"1") and there.read("marker") == b"1"


def test_of_any_keys_below_an_input_nothing_is_mixed_and_nothing_left_out_unsaid(
    moto: Moto, tmp_path: Path
) -> None:
    demand_all_or_a_refusal(tmp_path / "work", moto, moto.bucket(), range(30))


def test_a_name_that_the_server_does_not_take_is_an_error_of_ours(raw: Bucket) -> None:
    with pytest.raises(StoreError, match=r"put_object failed.*404"):
        raw.bucket().write("odd\nname", b"x")
