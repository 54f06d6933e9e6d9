"""`recipe pack` of an address: what is in a bucket, behind https or on the Hub has the name that its copy here has."""

from __future__ import annotations

import hashlib
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.storage.content.files import scan
from tests.servers.moto import Moto
from tests.support import Space

FILES = {
    "train/0.jsonl": b'{"a": 1}\n' * 100,
    "train/1.jsonl": b"x" * 100_000,
    "README.md": b"data",
}
COMMIT = "ab" * 20


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The same data as a directory."""
    for name, data in FILES.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(data)
    return tmp_path / "here"


def test_an_input_in_the_bucket_of_a_store_is_asked_for_as_the_store_is(
    tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*moto.environ, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(variable, raising=False)
    ours = moto.environ
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id = {ours['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {ours['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / "config").write_text("[profile work]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    bucket = moto.bucket()
    moto.s3.put_object(Bucket=bucket, Key="data/rows.csv", Body=b"rows")
    space = Space(tmp_path / "space")
    space.write(
        "recipe.toml",
        f'[stores.team]\nurl = "s3://{bucket}/project"\nendpoint = "{moto.endpoint}"\nprofile = "work"\n',
    )
    space.recipe(
        f'steps: {{s: {{run: "cp {{{{ inputs.data }}}} o", outputs: {{o: o}}}}}}\ninputs: {{data: {{default: "s3://{bucket}/data/rows.csv", type: file}}}}'
    )
    space.run()
    assert space.read("o") == "rows"
    assert space.run() == []


class Site(http.server.BaseHTTPRequestHandler):
    """Files of a server by their paths; of the Hub's interface as much as a snapshot takes."""

    asked: list[str]
    files: dict[str, bytes]

    def do_GET(self) -> None:
        self.asked.append(
            f"{self.command} {self.path}"
            + (" from its first byte" if "Range" in self.headers else "")
        )
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            tree = [
                {"type": "file", "path": name, "oid": "0" * 40, "size": len(data)}
                for name, data in FILES.items()
            ]
            self.answer(
                json.dumps(
                    tree
                    if "/tree/" in path
                    else {"id": "org/name", "sha": COMMIT, "siblings": siblings}
                ).encode()
            )
        elif path.startswith(f"/datasets/org/name/resolve/{COMMIT}/"):
            self.answer(FILES.get(path.removeprefix(f"/datasets/org/name/resolve/{COMMIT}/")))
        else:
            self.answer(self.files.get(path))

    do_HEAD = do_GET

    def answer(self, data: bytes | None) -> None:
        self.send_response(404 if data is None else 200)
        if data is not None:
            self.send_header("ETag", f'"{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header(
            "Content-Type",
            "application/json" if self.path.startswith("/api/") else "application/octet-stream",
        )
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


class Served:
    """A `Site` on a port of its own, with or without TLS."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.site = type("Mine", (Site,), {"asked": [], "files": {}})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.site)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_name("key.pem"))
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = (
            f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.server.server_port}"
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    served = Served()
    yield (
        served,
        {
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        },
    )
    served.close()


def packed(space: Space, address: str, env: dict[str, str]) -> dict[str, object]:
    code, out, err = space.command("pack", address, "--json", env=env)
    assert code == 0, err
    return dict(json.loads(out))


def test_a_folder_of_a_bucket_has_the_name_of_its_copy_here(
    space: Space, moto: Moto, here: Path
) -> None:
    bucket = moto.bucket()
    for name, data in FILES.items():
        moto.s3.put_object(Bucket=bucket, Key=f"set/{name}", Body=data)
    env = {**moto.environ, "AWS_ENDPOINT_URL": moto.endpoint}
    told = packed(space, f"s3://{bucket}/set", env)
    assert told["id"] == space.command("pack", str(here), "-q")[1].strip()
    assert (told["files"], told["bytes"]) == (3, sum(map(len, FILES.values())))
    assert space.command("pack", f"s3://{bucket}/set", "--out", "packed", "-q", env=env)[:2] == (
        0,
        f"{told['id']}\n",
    )
    assert space.command("pack", str(here), "--verify", "packed")[0] == 0
    moto.s3.put_object(Bucket=bucket, Key="set/README.md", Body=b"else")
    code, out, _ = space.command("pack", f"s3://{bucket}/set", "--verify", "packed", env=env)
    assert (code, out.split()) == (1, ["changed", "README.md"])


def test_a_file_of_a_bucket_is_packed_as_it_is(space: Space, moto: Moto, here: Path) -> None:
    bucket = moto.bucket()
    moto.s3.put_object(Bucket=bucket, Key="one.jsonl", Body=FILES["train/1.jsonl"])
    told = packed(
        space, f"s3://{bucket}/one.jsonl", {**moto.environ, "AWS_ENDPOINT_URL": moto.endpoint}
    )
    assert told["id"] == scan(here / "train/1.jsonl")


def test_what_was_fetched_is_not_fetched_again_until_it_changes(
    space: Space, hub: tuple[Served, dict[str, str]], here: Path
) -> None:
    served, env = hub
    told = packed(space, "hf://org/name", env)
    assert (
        told["id"]
        == packed(space, "hf://datasets/org/name@main", env)["id"]
        == space.command("pack", str(here), "-q")[1].strip()
    )
    assert sum(
        "/resolve/" in asked and asked.startswith("GET") for asked in served.site.asked
    ) == len(FILES)
    served.close()
    assert (
        packed(space, f"hf://org/name@{COMMIT}", env | {"HF_HUB_OFFLINE": "1"})["id"] == told["id"]
    )


def test_a_dataset_of_the_hub_is_an_input_of_a_step_wherever_it_runs(
    space: Space, hub: tuple[Served, dict[str, str]]
) -> None:
    """The Hub's snapshot is links that lead out of it: what a step gets is files."""
    _, env = hub
    script = "cat {{ inputs.data }}/train/*.jsonl | cksum > o; find {{ inputs.data }}/ -type l >> o"
    data = {"type": "dataset", "default": "hf://org/name"}
    space.recipe({"inputs": {"data": data}, "steps": {"s": {"run": script, "outputs": {"o": "o"}}}})
    said = []
    for driver in ("local", "loopback"):
        code, _, err = space.command("run", "--force", "--driver", driver, env=env)
        assert code == 0, err
        said.append(space.read("o"))
    assert said[0] == said[1] and len(said[0].splitlines()) == 1


def test_a_file_behind_https_is_packed_and_its_server_must_be_believed(
    space: Space, tmp_path: Path, here: Path
) -> None:
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
    served = Served(certificate)
    try:
        served.site.files["/data/one.jsonl"] = FILES["train/1.jsonl"]
        address = f"{served.url}/data/one.jsonl"
        assert packed(space, address, {"SSL_CERT_FILE": str(certificate)})["id"] == scan(
            here / "train/1.jsonl"
        )
        assert served.site.asked.count("GET /data/one.jsonl") == 1
        code, out, err = space.command("pack", address)
        assert (code, out) == (2, "")
        assert "certificate" in err and "Traceback" not in err
        code, _, err = space.command(
            "pack", f"{served.url}/none", env={"SSL_CERT_FILE": str(certificate)}
        )
        assert code == 2 and f"{served.url}/none cannot be looked at: 404" in err
    finally:
        served.close()


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("s3://none-such/x", 2, "s3://none-such/x cannot be looked at: "),
        ("hf://org/none", 2, "hf://datasets/org/none cannot be looked at: "),
        ("https://127.0.0.1:1/x", 2, "https://127.0.0.1:1/x cannot be looked at: "),
        ("ftp://host/x", 3, 'has the unknown scheme "ftp://"'),
        ("s3://bucket/a::file:///etc/passwd", 3, "is an address within an address"),
        ("hf://org", 3, "must be hf://org/name"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_clear_line(
    space: Space,
    moto: Moto,
    hub: tuple[Served, dict[str, str]],
    address: str,
    code: int,
    words: str,
) -> None:
    env = {**moto.environ, "AWS_ENDPOINT_URL": moto.endpoint, **hub[1]}
    found, out, err = space.command("pack", address, env=env)
    assert (found, out) == (code, "")
    assert words in err and err.startswith("recipe: ") and len(err.splitlines()) <= 2, err
