"""A secret is given to its step, and appears nowhere else: in no file below `.recipe`, no shared store, and nothing that is printed."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.secrets import encoded_forms, escaped_forms
from tests.servers.receiver import Receiver
from tests.support import RECIPE as COMMAND
from tests.support import Space

TOKEN = 'it\'s "pâté" & more/than+enough<1>'
RAW = b"caf\xe9-token-\xff-of-bytes"
PRINTS = """
import base64, html, json, os, shlex, sys
from urllib.parse import quote, quote_plus

def show(raw, text):
    out = sys.stdout.buffer
    shell, page, link = shlex.quote(text), html.escape(text), quote(text, errors="surrogateescape")
    forms = [text, repr(text), repr(raw), link, quote_plus(text, errors="surrogateescape"), quote(link), json.dumps(text), json.dumps(json.dumps(text))]
    forms += [json.dumps(text, ensure_ascii=False), shell, page, json.dumps(page), raw.hex(), raw.hex().upper()]
    for form in forms:
        out.write(b"form: " + os.fsencode(form) + b"\\n")
    for lead in (b"", b"a", b"bc", b"user:"):
        out.write(base64.encodebytes(lead + raw * 5) + b"\\n" + base64.urlsafe_b64encode(lead + raw) + b"\\n")
    out.flush()
    if "RECIPE_METRICS" in os.environ:
        with open(os.environ["RECIPE_METRICS"], "w", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps({text: 1, "deep": {link: text}}) + "\\n")

for name in ("TOKEN", "RAW"):
    show(os.environb[name.encode()], os.environ[name])
open("out.txt", "w").write("made")
sys.exit(int(sys.argv[1]))
"""
RECIPE = """
inputs:
  token: {type: secret, env: TOKEN}
  raw: {type: secret, env: RAW, required: false}
  code: {type: integer, default: 0}
steps:
  print:
    run: [python3, show.py, "{{ inputs.code }}"]
    deps: [show.py]
    secrets: [token, raw]
    metrics: true
    outputs: {out: out.txt}
"""


def forms() -> set[bytes]:
    """All that must not be found anywhere."""
    found = set(encoded_forms(TOKEN.encode()) | encoded_forms(RAW))
    found |= {
        form.encode("utf-8", "surrogateescape")
        for form in escaped_forms(TOKEN, 2)
        | escaped_forms(RAW.decode("utf-8", "surrogateescape"), 1)
    }
    return found | {
        b"caf\xef\xbf\xbd-token-",
        b"token-\\udcff",
        b"more/than",
        b"more%2Fthan",
        b"-of-bytes",
    }


def leaks(data: bytes) -> list[bytes]:
    flat = data.replace(b"\n", b"").replace(b"\r", b"")
    return [form for form in FORMS if form in flat]


FORMS = forms()


@pytest.fixture
def space(tmp_path: Path) -> Space:
    space = Space(tmp_path / "space")
    space.recipe(RECIPE)
    space.write("show.py", PRINTS)
    (tmp_path / "store").mkdir()
    space.write(
        "recipe.toml", f'store = "team"\n[stores.team]\nurl = "{tmp_path}/store"\npush = true\n'
    )
    return space


def call(space: Space, *words: str) -> tuple[int, bytes]:
    environ = {**os.environ, "TOKEN": TOKEN, "RAW": RAW.decode("utf-8", "surrogateescape")}
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=space.root,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_secret_is_in_nothing_that_is_stored_or_shown(space: Space, tmp_path: Path) -> None:
    said = {}
    with Receiver() as receiver:
        with (space.root / "recipe.toml").open("a") as settings:
            settings.write(f'[[webhooks]]\nurl = "{receiver.url}/"\nevents = ["*"]\n')
        for words in (
            "run ./recipe.yaml code=3",
            "run ./recipe.yaml --json --jobs 3",
            "logs print",
            "why print",
            "report last",
            "runs --json",
        ):
            status, out = call(space, *words.split())
            assert leaks(out) == [] and b"Traceback" not in out, (words, out)
            assert status == (1 if "code=3" in words else 0), out
            said[words] = out
    assert (
        len(receiver.got) > 3 and [each.json for each in receiver.got if leaks(each.body)] == []
    ), "webhooks are told of the failure, masked"
    assert said["logs print"].count(b"form: ") == 28 and said["logs print"].count(b"***") >= 28 + 40
    looked = {
        path: path.read_bytes()
        for folder in (tmp_path / "store", space.root)
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert {path: found for path, data in looked.items() if (found := leaks(data))} == {}
    assert any(b"***" in data for path, data in looked.items() if "traces" in path.parts), (
        "its metrics are in the shared store"
    )
    assert not [path for path, data in looked.items() if b"--jobs" in data], (
        "the command line is stored"
    )


# -- addresses that a query opens --------------------------------------------------------------------------------------------------------------------


class Signed(http.server.BaseHTTPRequestHandler):
    """Gives out a file to those whose query has the signature of the day."""

    signature = ""
    data = b""
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        known = f"X-Signature={self.signature}" in self.path
        self.send_response(200 if known else 403)
        self.send_header("ETag", f'"{len(self.data)}"')
        self.send_header("Content-Length", str(len(self.data) if known else 0))
        self.end_headers()
        if known and self.command == "GET":
            self.wfile.write(self.data)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Signed], str]]:
    """A server with one file, and the address of that."""
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        str(tmp_path / "key.pem"),
    ]
    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", str(certificate), "-days", "2", *name],
        check=True,
        capture_output=True,
    )
    site = type("Site", (Signed,), {"signature": "", "data": b"rows\n"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    yield site, f"https://127.0.0.1:{server.server_port}/set/rows.csv"
    server.shutdown()
    server.server_close()


@pytest.fixture
def copying(tmp_path: Path) -> Space:
    space = Space(tmp_path / "space")
    space.recipe(
        'inputs: {data: {type: dataset}}\nsteps: {s: {run: "cp {{ inputs.data }} o; cat o", outputs: {o: o}}}'
    )
    return space


def test_the_query_of_an_address_is_stored_nowhere_and_is_no_part_of_what_it_names(
    copying: Space, signed: tuple[type[Signed], str]
) -> None:
    site, address = signed
    space, secrets = (
        copying,
        ["1f0e2d3c4b5a69788796a5b4c3d2e1f0", "00112233445566778899aabbccddeeff"],
    )
    said = []
    for number, signature in enumerate(secrets):
        site.signature = signature
        code, out, err = space.command(
            "run", "./recipe.yaml", f"data={address}?X-Expires=60&X-Signature={signature}"
        )
        assert code == 0, err
        assert ("1 ran" in err, "everything is fresh" in err) == (number == 0, number == 1), err
        said.append(out + err)
    site.asked = 0
    for words in (f"run ./recipe.yaml data={address}", "why s", "runs --json"):
        code, out, err = space.command(*words.split())
        assert code == 0, err
        said.append(out + err)
    assert site.asked == 0 and space.read("o") == "rows\n"
    assert json.loads(space.read("recipe.lock")).keys() == {address}
    found = "".join(said).encode() + b"".join(
        path.read_bytes() for path in space.root.rglob("*") if path.is_file()
    )
    assert not [word for word in [*secrets, "X-Signature", "X-Expires"] if word.encode() in found]


def test_an_address_that_is_not_opened_is_reported_without_its_query(
    copying: Space, signed: tuple[type[Signed], str]
) -> None:
    site, address = signed
    site.signature = "1f0e2d3c4b5a69788796a5b4c3d2e1f0"
    code, out, err = copying.command(
        "run", "./recipe.yaml", f"data={address}?X-Signature=0000000000000000000000"
    )
    assert (
        code == 2
        and address in out + err
        and "0000000000000000000000" not in out + err
        and "Traceback" not in err
    ), err


def test_an_address_that_is_streamed_has_no_query(copying: Space) -> None:
    copying.recipe(
        'inputs: {data: {type: dataset, stream: true}}\nsteps: {s: {run: ["echo", "{{ inputs.data }}"]}}'
    )
    (problem,) = copying.problems({"data": "https://host/rows?signature=1"})
    assert problem.code == "streamed-secret" and "signature" not in str(problem)
