"""What a host makes of a bucket's answers: the bytes that were promised, or words without the address."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.agent import objects, pulling, sparse
from runner.agent.pulling import PullState
from runner.agent.request import AgentRequest, Over
from runner.storage import signed
from tests.support import old_python

DATA = bytes(range(256)) * 4096
OLD = old_python()
OPENS = "?X-Amz-Signature=canary0123456789abcdef0123456789"


class Bucket(http.server.BaseHTTPRequestHandler):
    """Answers as the path says."""

    asked: list[str] = []  # noqa: RUF012
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, start = (
            self.path.partition("?")[0].strip("/"),
            int((self.headers.get("Range") or "bytes=0-")[6:-1]),
        )
        self.asked.append(f"{kind} {start}")
        first = self.asked.count(f"{kind} {start}") == 1
        if kind in ("403", "302") or (kind == "503" and first):
            self.send_response(int(kind))
            self.send_header("Location", "file:///etc/passwd")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        whole = kind.startswith("whole")  # a server that knows no ranges
        data = DATA if whole else DATA[start:]
        self.send_response(206 if start and not whole else 200)
        self.send_header("ETag", '"2"' if kind == "etag" else '"1"')
        if start and not whole:
            self.send_header(
                "Content-Range",
                f"bytes {0 if kind == 'elsewhere' else start}-{len(DATA) - 1}/{len(DATA)}",
            )
        if kind != "endless":
            self.send_header(
                "Content-Length", str(len(data) + {"longer": 1, "shorter": -1}.get(kind, 0))
            )
        self.end_headers()
        if (
            kind in ("cut", "whole-cut", "elsewhere")
            and start == 0
            and (first or kind == "whole-cut")
        ):
            data = data[: 300_000 if first or kind != "whole-cut" else len(data)]
            self.close_connection = True
        elif kind == "always-cut":
            data, self.close_connection = b"", True
        while True:
            self.wfile.write(data)
            if kind != "endless":
                return None

    def log_message(self, *_: object) -> None:
        pass


class Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that has enough is no error."""


@pytest.fixture
def server() -> Iterator[str]:
    Bucket.asked.clear()
    found = Quiet(("127.0.0.1", 0), Bucket)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def had(top: Path, address: str, path: str = "", size: int = len(DATA)) -> PullState:
    pulling = PullState(str(top), [(path, size, '"1"', f"{address}{OPENS}")], 1)
    pulling.work()
    assert pulling.working == 0 and pulling.failed is None
    assert "canary" not in pulling.problem and "127.0.0.1" not in pulling.problem
    return pulling


def lines(pulling: PullState) -> list[tuple[object, ...]]:
    return [line for line in pulling.fresh_lines() if line[0] == "file"]


WHOLE = ("file", "", hashlib.sha256(DATA).hexdigest())


@pytest.mark.parametrize(
    ("kind", "asked"), [("plain", 1), ("503", 2), ("cut", 2), ("whole-cut", 2)]
)
def test_what_was_promised_comes_whole_and_a_connection_that_breaks_costs_what_was_under_way(
    tmp_path: Path, server: str, kind: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling = had(tmp_path / "it", f"{server}/{kind}")
    assert not pulling.problem and lines(pulling) == [WHOLE]
    assert (tmp_path / "it").read_bytes() == DATA and len(Bucket.asked) == asked
    assert kind != "cut" or Bucket.asked == ["cut 0", "cut 300000"]
    assert list(pulling.fresh_lines()) == [("bytes", len(DATA))]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("403", "the bucket returned HTTP status 403"),
        ("302", "the bucket returned HTTP status 302"),
        (
            "longer",
            f"the object has {len(DATA) + 1} bytes in the bucket, but {len(DATA)} were expected",
        ),
        (
            "shorter",
            f"the object has {len(DATA) - 1} bytes in the bucket, but {len(DATA)} were expected",
        ),
        ("endless", f"the bucket sent more than the expected {len(DATA)} bytes"),
        ("etag", "the object changed in the meantime"),
        ("elsewhere", "the bucket sent an unexpected response"),
        ("always-cut", "the bucket sent less data than expected"),
    ],
)
def test_what_was_not_promised_is_refused_in_words_that_show_no_address(
    tmp_path: Path, server: str, kind: str, words: str
) -> None:
    pulling = had(tmp_path / "it", f"{server}/{kind}")
    assert pulling.problem == words and not lines(pulling)
    assert (tmp_path / "it").stat().st_size <= len(DATA)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://127.0.0.1:1/x",
        "http://name.invalid/x",
        "http://[/x",
    ],
)
def test_what_is_no_server_is_refused(tmp_path: Path, address: str) -> None:
    assert had(tmp_path / "it", address).problem


def test_what_came_before_is_gone_on_with_and_what_is_too_long_is_not_believed(
    tmp_path: Path, server: str
) -> None:
    (tmp_path / "it").write_bytes(DATA[:1000])
    assert lines(had(tmp_path / "it", f"{server}/plain")) == [WHOLE] and Bucket.asked == [
        "plain 1000"
    ]
    assert lines(had(tmp_path / "it", f"{server}/plain")) == [WHOLE] and Bucket.asked == [
        "plain 1000"
    ], "nobody is asked for what is there"
    (tmp_path / "it").write_bytes(DATA * 2)
    assert lines(had(tmp_path / "it", f"{server}/plain")) == [WHOLE]


def test_a_part_of_an_earlier_boot_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "a").write_text("zeros, after a power cut")
    pulling._delete_stale(str(tmp_path), "1")
    assert not (tmp_path / "it").exists()
    (tmp_path / "it").write_text("of this boot")
    pulling._delete_stale(str(tmp_path), "1")
    assert (tmp_path / "it").exists()


class Asked(AgentRequest):
    """A question, without the streams."""

    def __init__(self, partial: Path) -> None:
        self.root, self.boot, self.partial = str(partial), "1", str(partial)
        self.said: list[list[object]] = []
        self.here = True

    def emit(self, data: bytes | memoryview) -> None:
        self.said.append(json.loads(bytes(data)))

    def flush(self) -> None: ...

    def check(self) -> None:
        if not self.here:
            raise Over


def test_a_disk_without_room_is_told_before_anything_is_had(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, items = Asked(tmp_path), [("a", len(DATA), "", f"{server}/plain{OPENS}")]
    monkeypatch.setattr(objects, "free", lambda _request: 1000)
    pulling.pull(asked, "n", items, len(DATA))
    assert asked.said == [["full", 1000]] and not Bucket.asked
    (tmp_path / "n" / "it").mkdir()
    (tmp_path / "n" / "it" / "a").write_bytes(DATA[:-1000])
    pulling.pull(asked, "n", items, len(DATA))
    assert ["file", "a", WHOLE[2]] in asked.said and ["bytes", len(DATA)] in asked.said
    assert Bucket.asked == [f"plain {len(DATA) - 1000}"], "what is there needs no room"


def test_a_disk_that_fails_is_no_fault_of_the_bucket(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sparse, "write", full)
    with pytest.raises(OSError, match="No space left"):
        pulling.pull(
            Asked(tmp_path), "n", [("a", len(DATA), "", f"{server}/plain{OPENS}")], len(DATA)
        )


def test_it_ends_when_its_client_is_gone(tmp_path: Path, server: str) -> None:
    asked = Asked(tmp_path)
    asked.here = False
    with pytest.raises(Over):
        pulling.pull(asked, "n", [("a", 10**15, "", f"{server}/endless{OPENS}")], 0)


def test_a_client_that_is_gone_is_seen_while_an_answer_takes_long() -> None:
    code = "from agent import request\nr = request.AgentRequest.__new__(request.AgentRequest)\nr.check()\nprint('here', flush=True)\nwhile True: r.check()"
    folder = Path(pulling.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert (
        process.stdin is not None
        and process.stdout is not None
        and process.stdout.readline() == b"here\n"
    )
    process.stdin.close()
    assert process.wait(60) == 1


@pytest.mark.skipif(not OLD, reason="there is no Python 3.9 here")
def test_the_oldest_python_has_it_too(tmp_path: Path, server: str) -> None:
    code = f"from agent.pulling import PullState\np = PullState({str(tmp_path / 'it')!r}, [('', {len(DATA)}, '', '{server}/cut{OPENS}')], 1)\np.work()\nprint(p.problem)"
    folder = Path(pulling.__file__).parent.parent
    found = subprocess.run(
        [str(OLD), "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert found.stdout == "\n" and (tmp_path / "it").read_bytes() == DATA


@pytest.mark.parametrize(
    "name", ["a/../b", "/a", "a//b", "a/", "", "a\nb", "a\0", ".", "a\udc80", "x" * 256]
)
def test_names_that_no_disk_takes_are_not_signed_for(name: str) -> None:
    assert not signed._sound([signed.Item(name, 1, ""), signed.Item("good", 1, "")], folder=True)


def test_a_file_that_is_a_folder_too_is_not_signed_for() -> None:
    assert not signed._sound([signed.Item("a", 1, ""), signed.Item("a/b", 1, "")], folder=True)
    assert signed._sound([signed.Item("a.x", 1, ""), signed.Item("a/b", 1, "")], folder=True)


def test_of_signed_addresses_what_they_have_in_common_is_kept_from_being_shown_first() -> None:
    token, one, two = "t" * 31 + "%2B", "1" * 64, "2" * 64
    found = signed.opens(
        [
            f"http://h/a?X-Amz-Security-Token={token}&X-Amz-Expires=9&X-Amz-Signature={each}"
            for each in (one, two)
        ]
    )
    assert [each.reveal for each in found[:2]] in ([token, "t" * 31 + "+"], ["t" * 31 + "+", token])
    assert {each.reveal for each in found[2:]} == {one, two}


def test_a_signature_is_good_for_an_hour_and_for_what_its_bytes_take() -> None:
    def source(size: int) -> list[str]:
        items = [signed.Item("a", size, ""), signed.Item("b", 1, "")]
        return signed.SignedObjects(
            None, "s3://b/k", "", (), items, lambda path, seconds: f"{path} {seconds}"
        ).addresses(items)  # type: ignore[arg-type]

    assert source(1) == ["a 3600", "b 3600"]
    assert source(10**11) == ["a 13600", "b 13600"]
    assert source(10**14) == ["a 604800", "b 604800"]


def test_a_service_account_of_google_signs_and_another_login_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs
    from google.oauth2.credentials import Credentials

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "a@b.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.invalid/token",
    }
    store = gcsfs.GCSFileSystem(
        project="p", token={**account, "private_key": key.decode()}, skip_instance_cache=True
    )
    sign = signed._signer(store, "gs")
    assert sign is not None and not signed._public(store)
    address = sign("bucket/rows/a ü.bin", 3600)
    assert (
        address.startswith("https://storage.googleapis.com/bucket/rows/a%20%C3%BC.bin?")
        and "X-Goog-Expires=3600" in address
    )
    assert any(len(each.reveal) == 512 for each in signed.opens([address])), (
        "the signature is a secret"
    )
    person = gcsfs.GCSFileSystem(project="p", token=Credentials("token"), skip_instance_cache=True)  # type: ignore[no-untyped-call]
    assert signed._signer(person, "gs") is None and not signed._public(person)
    anybody = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)
    plain = signed._signer(anybody, "gs")
    assert plain is not None and signed._public(anybody) and "alt=media" in plain("bucket/a", 1)


def test_signatures_of_s3_are_of_the_version_that_every_region_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {
        "endpoint_url": "http://127.0.0.1:1",
        "client_kwargs": {"region_name": "eu-central-1"},
    }
    store = s3fs.S3FileSystem(key="k" * 20, secret="s" * 40, **options)
    sign = signed._signer(store, "s3")
    assert sign is not None and not signed._public(store)
    address = sign("bucket/a ü", 7)
    assert (
        "/bucket/a%20%C3%BC?X-Amz-Algorithm=AWS4-HMAC-SHA256&" in address
        and "eu-central-1" in address
        and "X-Amz-Expires=7&" in address
    )
    anybody = s3fs.S3FileSystem(anon=True, **options)
    plain = signed._signer(anybody, "s3")
    assert (
        plain is not None
        and signed._public(anybody)
        and plain("bucket/a", 7) == "http://127.0.0.1:1/bucket/a"
    )
