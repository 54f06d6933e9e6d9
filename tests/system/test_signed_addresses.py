"""Inputs of a submitted run whose address is signed: who knows what opens it, for how long, and what is fetched."""

from __future__ import annotations

import hashlib
import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.api.submitting import QueueSettings, submit
from runner.errors import CannotRun
from runner.execution import queue
from runner.execution.terms import Choice, Settings
from runner.storage import bound, sources
from runner.storage.remote.states import LocalSource
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.support import Space
from tests.system.test_worker import row, submitted, work

SIGNATURE = "X-Signature=canary0123456789abcdef"
RECIPE = (
    "inputs: {data: {type: file}}\nsteps: {s: {run: 'cp {{ inputs.data }} o', outputs: {o: o}}}\n"
)


class Signed(http.server.BaseHTTPRequestHandler):
    """A bucket that opens one file for GET to a caller that has the signature.  `/endless` says no size, and has no end."""

    port = 0
    over = False
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        opens = self.command == "GET" and query == SIGNATURE and not Signed.over
        data = b"rows\n"
        part = opens and self.headers.get("Range") == "bytes=0-0"
        self.send_response(206 if part else 200 if opens else 403)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if path == "/endless" and not part:
            self.end_headers()
            while True:
                self.wfile.write(b"x" * (1 << 16))
        if part and path != "/endless":
            self.send_header(
                "Content-Range", f"bytes 0-0/{10**15 if path == '/huge' else len(data)}"
            )
        body = data[:1] if part else data if opens else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


class Quiet(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has enough is no error."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("signed")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        f"{folder}/key.pem",
    ]
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", f"{folder}/certificate.pem", "-days", "2", *name],
        check=True,
        capture_output=True,
    )
    server = Quiet(("127.0.0.1", 0), Signed)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/certificate.pem", f"{folder}/key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "key").write_bytes(b"k" * 32)
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SSL_CERT_FILE", f"{folder}/certificate.pem")
        environ.setenv("RECIPE_KEY_FILE", f"{folder}/key")
        yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def given(space: Space, site: str) -> str:
    """The address of the file, signed, for a recipe of the workspace."""
    space.recipe(RECIPE)
    space.write("recipe.toml", f'[data]\nallow = ["{site}"]\n')
    Signed.over, Signed.asked[:] = False, []
    return f"{site}/rows?{SIGNATURE}"


def stored(space: Space) -> bytes:
    """All that is stored in the workspace."""
    return b"".join(path.read_bytes() for path in space.root.rglob("*") if path.is_file())


def test_what_opens_an_address_is_stored_sealed_until_it_is_fetched(
    space: Space, given: str
) -> None:
    run = submitted(space, data=given)
    assert list(row(space, run).data["opens"]) == [
        given.partition("?")[0]
    ] and b"canary" not in stored(space)  # type: ignore[call-overload]
    assert row(space, run).inputs == {"data": given.partition("?")[0]}
    work(space)
    assert row(space, run).state == "COMPLETED" and space.read("o") == "rows\n"
    assert not row(space, run).data.get("opens") and b"canary" not in stored(space)
    assert not [each for each in Signed.asked if each.startswith("HEAD")], (
        "a signature is for GET alone"
    )
    assert Signed.asked.count("GET /rows") == 1


def test_what_opens_an_address_of_one_run_is_not_known_to_the_next(
    space: Space, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, worked = list[int](), queue._execute

    def noted(ws: Workspace, *rest: Any) -> bool:
        known.append(len(ws.addresses))
        return worked(ws, *rest)

    monkeypatch.setattr(queue, "_execute", noted)
    submitted(space, data=given)
    space.write("rows", "rows\n")
    submitted(space, data="rows")
    work(space)
    assert known == [1, 0]


def test_the_signature_is_no_part_of_what_was_asked_for(space: Space, given: str) -> None:
    with Workspace.open(space.root) as ws:
        first = submit(
            ws,
            Request("./recipe.yaml", {"data": given}),
            Choice(),
            Settings(),
            QueueSettings(idempotency="k"),
        )
    with Workspace.open(space.root) as ws:
        again = submit(
            ws,
            Request("./recipe.yaml", {"data": f"{given}2"}),
            Choice(),
            Settings(),
            QueueSettings(idempotency="k"),
        )
    assert first.id == again.id


def test_a_run_that_ends_before_it_fetches_keeps_nothing_that_opens(
    space: Space, given: str
) -> None:
    run = submitted(space, data=given)
    assert space.command("cancel", run)[0] == 0
    assert row(space, run).state == "CANCELLED" and "opens" not in row(space, run).data


def test_without_a_key_an_address_that_is_signed_is_refused_with_both_remedies(
    space: Space, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECIPE_KEY_FILE")
    with pytest.raises(CannotRun, match="requires a key file") as caught:
        submitted(space, data=given)
    assert (
        "s3://, gs://, hf://" in caught.value.fix
        and "RECIPE_KEY_FILE" in caught.value.fix
        and "canary" not in str(caught.value)
    )
    assert (
        space.command("runs", "--json")[1].strip() in ("", "[]")
        or "runs" not in space.command("runs", "--json")[1]
    )


def test_a_signature_that_is_over_fails_the_run_as_an_expired_input(
    space: Space, given: str
) -> None:
    run = submitted(space, data=given)
    Signed.over = True
    work(space)
    found = row(space, run)
    assert (
        found.state == "FAILED"
        and found.reason.startswith("expired input: ")
        and "403" in found.reason
        and "canary" not in found.reason
    )
    assert "opens" not in found.data


@pytest.mark.parametrize("name", ["huge", "endless"])
def test_an_input_is_no_larger_than_its_limit_whatever_its_server_says(
    space: Space, given: str, name: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.write("recipe.toml", f'[data]\nallow = ["{site}"]\n[limits]\ninput_gb = 0.001\n')
    address = f"{site}/{name}"
    with Workspace.open(space.root) as ws:
        ws.addresses[address] = f"{address}?{SIGNATURE}"
        identity = sources.ask_identity(ws, "https", address)
        with pytest.raises(
            CannotRun, match=r"has at least .* GB, but `\[limits\] input_gb` is 0.001"
        ):
            sources.fetch(ws, "https", address, identity, ())
        assert not [path for path in (ws.home / "cache").rglob("*") if path.is_file()]
        monkeypatch.setattr(bound, "LEFT", 10**18)
        with pytest.raises(CannotRun, match="the disk has only"):
            sources.fetch(ws, "https", address, identity, ())


def test_a_pack_is_an_input_by_the_name_of_its_content(space: Space, tmp_path: Path) -> None:
    space.recipe(RECIPE)
    space.write("recipe.toml", f'store = "team"\n[stores.team]\nurl = "{tmp_path}/store"\n')
    space.write("rows", "rows\n")
    (tmp_path / "store").mkdir()
    with Workspace.open(space.root) as ws:
        cache = ws.share(None, push=True)
        content = ws.cache.content_of(str(space.root / "rows"))
        assert cache is not None and content is not None
        cache.remote.mark()
        cache.remote.put(content, LocalSource({content: str(space.root / "rows")}))
    run, none = (
        submitted(space, data=f"pack:{content[2:]}"),
        submitted(space, data="pack:" + "0" * 64),
    )
    work(space)
    assert row(space, run).state == "COMPLETED" and space.read("o") == "rows\n"
    assert (
        row(space, none).state == "FAILED"
        and "is not in the shared store" in row(space, none).reason
    )


def test_a_run_that_a_server_took_reads_what_that_server_allows_wherever_it_is_carried_out(
    space: Space, given: str
) -> None:
    run = submitted(space, QueueSettings(reach=("https://elsewhere.example",)), data=given)
    work(space)
    assert (
        row(space, run).state == "FAILED"
        and "`allow` under [data] of the server" in row(space, run).reason
    )
    assert not Signed.asked
