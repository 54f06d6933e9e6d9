"""What `recipe serve` reads for others: the hosts and buckets that are named, and nothing that these lead to."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.errors import CannotRun
from runner.storage import sources
from runner.storage.reach import Reach, is_public
from runner.storage.workspace import Workspace

NAMED = Reach(
    (
        "https://data.example",
        "https://other.example:8443",
        "https://*.parts.example",
        "s3://bucket",
        "https://10.0.0.5",
    )
)
ANY = Reach(("https://*",))


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("https://data.example/a?b=c", True), ("https://DATA.example:443/a", True), ("https://data.example:8443/a", False), ("https://other.example:8443/", True),
        ("https://data.example.evil.example/a", False), ("https://data.example@evil.example/a", False), ("https://evil.example#@data.example", False),
        ("https://a.parts.example/x", True), ("https://parts.example/x", False), ("https://aparts.example/x", False), ("http://data.example/a", False),
        ("s3://bucket/key", True), ("s3://bucket2/key", False), ("gs://bucket/key", False), ("https://10.0.0.5/a", True), ("https://10.0.0.6/a", False),
        ("https://[", False), ("https://data.example:99999/", False), ("file:///etc/passwd", False), ("", False),
    ],
)  # fmt: skip
def test_only_what_is_named_is_read(address: str, may: bool) -> None:
    assert NAMED.allows(address) is may


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "192.168.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]",
             "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost", "localhost.", "a.localhost", "224.0.0.1"],
)  # fmt: skip
def test_a_star_stands_for_no_machine_of_a_private_network(host: str) -> None:
    assert not ANY.allows(f"https://{host}/x")
    assert (
        ANY.allows("https://data.example/x")
        and ANY.allows("https://93.184.216.34/x")
        and is_public("2606:2800:220:1::1")
    )


class Site(http.server.BaseHTTPRequestHandler):
    """Has one file; `/away` leads to another name of the same machine.

    `/rows/unversioned` is the file without an ETag, and `/none` an empty one without a version.
    """

    port = 0

    def do_GET(self) -> None:
        if self.path == "/none":
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        away = self.path == "/away"
        self.send_response(302 if away else 200)
        self.send_header(
            "Location", f"https://localhost:{self.port}/rows"
        ) if away else self.send_header(*self.version())
        self.send_header("Content-Length", "0" if away else "5")
        self.end_headers()
        if not away and self.command == "GET":
            self.wfile.write(b"rows\n")

    def version(self) -> tuple[str, str]:
        return ("X-Other", "1") if self.path == "/rows/unversioned" else ("ETag", '"1"')

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("site")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/certificate.pem", f"{folder}/key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Site.port = server.server_port
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SSL_CERT_FILE", f"{folder}/certificate.pem")
        yield server.server_port
    server.shutdown()
    server.server_close()


def test_a_named_host_leads_to_no_other(tmp_path: Path, site: int) -> None:
    here = f"https://127.0.0.1:{site}"
    (tmp_path / "recipe.toml").write_text(f'[data]\nallow = ["{here}"]\n')
    with Workspace.open(tmp_path) as ws:
        identity = sources.ask_identity(ws, "https", f"{here}/rows")
        assert sources.fetch(ws, "https", f"{here}/rows", identity, ()).read_bytes() == b"rows\n"
        with pytest.raises(
            CannotRun, match="redirects to localhost, which is not in `allow` under"
        ):
            sources.ask_identity(ws, "https", f"{here}/away")


def test_a_file_without_a_version_is_refused_unless_it_is_empty(tmp_path: Path, site: int) -> None:
    here = f"https://127.0.0.1:{site}"
    (tmp_path / "recipe.toml").write_text(f'[data]\nallow = ["{here}"]\n')
    with Workspace.open(tmp_path) as ws:
        with pytest.raises(CannotRun, match="/rows/unversioned has no version") as error:
            sources.ask_identity(ws, "https", f"{here}/rows/unversioned")
        assert "use the path of the copy" in error.value.fix
        assert sources.ask_identity(ws, "https", f"{here}/none").startswith("etag:")


def test_a_name_that_stands_for_this_machine_is_not_read_where_a_star_allows_it(
    tmp_path: Path, site: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: real(
            "127.0.0.1" if host == "rebound.example" else host, *rest, **more
        ),
    )
    (tmp_path / "recipe.toml").write_text(f'[data]\nallow = ["https://*:{site}"]\n')
    with (
        Workspace.open(tmp_path) as ws,
        pytest.raises(CannotRun, match="has a private address"),
    ):
        sources.ask_identity(ws, "https", f"https://rebound.example:{site}/rows")
