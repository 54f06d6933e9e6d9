"""What `recipe serve` refuses, and how: without a token, from elsewhere, and whatever is no request."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import requests

from runner.server import guard
from runner.server.answers import Refused, hide_local_paths
from runner.server.app import application, routes
from runner.server.feed import Feed
from runner.server.page import PARTS
from runner.server.room import Room
from runner.server.tickets import Tickets
from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from tests.servers.rest import Rest
from tests.support import until
from tests.system.test_server import refused, workspace
from tests.tools import client

LATE = "2099-01-01T00:00:00Z"
OF_ITS_RUN = ("/v1/stream", "/v1/tickets")
"""What a token of one run may ask, for that run alone: test_live_streams."""


class Served(NamedTuple):
    rest: Rest
    run: str
    other: str  # the token of another run
    expired: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = workspace(tmp_path_factory.mktemp("refusing") / "space")
    with Rest(root) as rest:
        run, other = (rest.submit(not_before=LATE) for _ in range(2))
        token = rest.ask("POST", "/v1/tokens", {"scope": "admin", "run": other}).json()["token"]
        expired = rest.ask(
            "POST", "/v1/tokens", {"scope": "admin", "expires": "2020-01-01T00:00:00Z"}
        ).json()["token"]
        yield Served(rest, run, token, expired)


def stored(rest: Rest) -> tuple[list[str], str]:
    """What the server has stored."""
    return [run["id"] for run in rest.get("/v1/runs?limit=200")["runs"]], (
        rest.root / ".recipe" / "server" / "tokens.json"
    ).read_text()


def addresses(tmp_path: Path) -> list[tuple[str, str]]:
    """Every method and path that the application has, also those that its documentation leaves out."""
    room = Room(tmp_path, {}, tokens := Tokens(tmp_path, Locks(tmp_path)))
    app = routes(room, Feed(room), Tickets(tokens))
    listed = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    return sorted(
        listed
        | {
            ("GET", "/openapi.json"),
            ("GET", "/docs"),
            ("GET", "/redoc"),
            ("GET", "/none"),
            *(("GET", part) for part in PARTS),
        }
    )


def test_no_address_answers_without_a_token_of_its_own(served: Served, tmp_path: Path) -> None:
    before, walked = stored(served.rest), addresses(tmp_path)
    assert len(walked) > 25
    for method, path in walked:
        where = (
            path.replace("{run}", served.run)
            .replace("{name}", "say.o")
            .replace("{id}", "0" * 12)
            .replace("{job_id}", "none")
        )
        for accept in ("*/*", "text/event-stream"):
            for token in ("", "rcp_bad", served.expired, "é", served.rest.token[:-1]):
                found = served.rest.ask(
                    method,
                    where,
                    token=token and token.encode().decode("latin-1"),
                    headers={"Accept": accept},
                )
                if path in PARTS:
                    assert found.status_code == 200 and served.run not in found.text
                elif (path, token) == ("/health", ""):
                    assert found.json() == {"status": "ok"}
                else:
                    refused(found, 401, "unauthorized")
            if path in OF_ITS_RUN:
                continue
            found = served.rest.ask(method, where, token=served.other, headers={"Accept": accept})
            if path not in ("/health", "/openapi.json", "/v1/me", *PARTS):
                assert found.status_code in (403, 404), (method, path, found.text)
            assert served.run not in found.text
            assert not {"set-cookie", "access-control-allow-origin"} & {
                name.lower() for name in found.headers
            }
    assert stored(served.rest) == before


def test_a_token_does_what_its_scope_says_and_no_more(served: Served) -> None:
    read, operate = (
        served.rest.ask("POST", "/v1/tokens", {"scope": scope}).json()["token"]
        for scope in ("read", "operate")
    )
    for token, method, path, allowed in (
        (read, "GET", "/v1/runs", True),
        (read, "POST", f"/v1/runs/{served.run}/pause", False),
        (read, "POST", "/v1/runs", False),
        (operate, "POST", f"/v1/runs/{served.run}/pause", True),
        (operate, "GET", "/v1/tokens", False),
        (operate, "POST", "/v1/tokens", False),
    ):
        found = served.rest.ask(method, path, token=token)
        assert (found.status_code == 403) != allowed, (method, path, found.text)


def test_the_token_of_a_run_sees_that_run_alone(served: Served) -> None:
    there, none = (
        served.rest.ask("GET", f"/v1/runs/{run}", token=served.other)
        for run in (served.run, "20200101-000000-aaaaaa")
    )
    assert there.status_code == none.status_code == 404 and there.json() == none.json(), (
        "whether a run exists is not told"
    )
    refused(
        served.rest.ask("POST", f"/v1/runs/{served.run}/retry", token=served.other),
        403,
        "forbidden",
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:{port}"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1.evil.example:{port}"}, 403),
        ({"Origin": "http://localhost:{port}"}, 201),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({f"X-{n}": "" for n in range(70)}, 431),
    ],
    ids=lambda value: str(value)[:40],
)
def test_where_a_request_comes_from_and_what_it_says_it_is(
    served: Served, headers: dict[str, str], status: int
) -> None:
    port = str(urlsplit(served.rest.url).port)
    given = {
        "Content-Type": "application/json",
        **{name: value.replace("{port}", port) for name, value in headers.items()},
    }
    found = served.rest.ask("POST", "/v1/tokens", data=b'{"scope": "read"}', headers=given)
    assert found.status_code == status, found.text


HUGE = "x" * (1 << 20)
BAD: dict[str, tuple[str, bytes, int]] = {
    "an unknown field": ("/v1/runs", b'{"recipe": "hello", "prioritty": 1}', 422),
    "a wrong type": (
        "/v1/runs",
        b'{"recipe": 1, "inputs": [], "priority": "high", "labels": {"a": 1}, "not_before": "soon"}',
        422,
    ),
    "a float for an integer": ("/v1/runs", b'{"recipe": "hello", "priority": 1.5}', 422),
    "a time as a number": ("/v1/tokens", b'{"scope": "read", "expires": 0}', 422),
    "a time without a zone": (
        "/v1/runs",
        b'{"recipe": "hello", "not_before": "2030-01-01T00:00:00"}',
        422,
    ),
    "no recipe": ("/v1/runs", b"{}", 422),
    "no object": ("/v1/runs", b'["hello"]', 422),
    "no body": ("/v1/runs", b"", 422),
    "no JSON": ("/v1/runs", b'{"recipe": hello}', 400),
    "no text": ("/v1/runs", b'{"recipe": "\xff"}', 400),
    "no number": ("/v1/runs", b'{"recipe": "hello", "inputs": {"times": NaN}}', 400),
    "a number without end": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"times": ' + b"1" * 9999 + b"}}",
        400,
    ),
    "deep lists": ("/v1/runs", b"[" * 1_000_000, 400),
    "deep objects": ("/v1/runs", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    "fifty levels": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"word": ' + b"[" * 50 + b"]" * 50 + b"}}",
        400,
    ),
    "a NUL": ("/v1/runs", b'{"recipe": "hello", "inputs": {"word": "a\\u0000b"}}', 422),
    "half a character": ("/v1/runs", b'{"recipe": "hello", "user": "\\ud800"}', 422),
    "a huge text": (
        "/v1/runs",
        json.dumps({"recipe": "slow", "inputs": {"name": HUGE[:1_000_000]}}).encode(),
        422,
    ),
    "a huge name": (
        "/v1/runs",
        json.dumps({"recipe": "slow", "inputs": {"n" * 1_000_000: 1}}).encode(),
        422,
    ),
    "a huge body": ("/v1/runs", json.dumps({"recipe": HUGE}).encode(), 413),
    "an unknown recipe": ("/v1/runs", b'{"recipe": "slwo"}', 404),
    "a recipe by its path": ("/v1/runs", b'{"recipe": "./hidden.yaml"}', 404),
    "a recipe by a path upwards": ("/v1/plan", b'{"recipe": "../space/hidden.yaml"}', 404),
    "a recipe as text": ("/v1/plan", b'{"recipe": "recipe: x@1\\nsteps: {}"}', 404),
    "an unknown driver": ("/v1/runs", b'{"recipe": "hello", "driver": "lokal"}', 404),
    "an unknown preset": ("/v1/runs", b'{"recipe": "hello", "preset": "lowd"}', 422),
    "unknown inputs": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"wrod": 1, "times": "x", "kind": "z"}}',
        422,
    ),
    "the value of a secret": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"key": "hunter2hunter2"}}',
        422,
    ),
    "a path": ("/v1/runs", b'{"recipe": "hello", "inputs": {"data": "/etc/passwd"}}', 422),
    "a path of the home": ("/v1/runs", b'{"recipe": "hello", "inputs": {"data": "~/.netrc"}}', 422),
    "a path upwards": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"data": "data/../recipe.toml"}}',
        422,
    ),
    "a link that leads out": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"data": "data/out"}}',
        422,
    ),
    "a class behind a link that leads out": (
        "/v1/runs",
        b'{"recipe": "sft@1", "preset": "smoke", "inputs": {"callbacks": ["data/out.py:Mine"]}}',
        422,
    ),
    "an unknown scheme": (
        "/v1/runs",
        b'{"recipe": "hello", "inputs": {"data": "file:///etc/passwd"}}',
        422,
    ),
    "an unknown scope": ("/v1/tokens", b'{"scope": "root"}', 422),
    "the token of no run": ("/v1/tokens", b'{"scope": "read", "run": "../x"}', 404),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_body_is_refused_at_once_with_every_problem_and_nothing_is_stored(
    served: Served, what: str
) -> None:
    path, data, status = BAD[what]
    for name in ("out", "out.py"):
        out = served.rest.root / "data" / name
        if not out.is_symlink():
            out.symlink_to("/etc/passwd")
    before, took = stored(served.rest), []
    for _ in range(3):
        begun = time.perf_counter()
        found = served.rest.ask(
            "POST", path, data=data, headers={"Content-Type": "application/json"}
        )
        took.append(time.perf_counter() - begun)
        if took[-1] < 0.1:  # other processes of the machine may have been first
            break
    assert found.status_code == status, found.text
    assert (
        len(found.content) < 4000
        and str(served.rest.root) not in found.text
        and "hunter2" not in found.text
        and "root:" not in found.text
    )
    assert found.json()["error"]["message"] and min(took) < 0.1, took
    assert not any(
        words in found.text
        for words in ("Input should", "Field required", "Value error", "extract fields")
    )
    assert stored(served.rest) == before
    problems = found.json()["error"]["problems"]
    assert what not in ("a wrong type", "unknown inputs") or len(problems) >= 3, problems
    if what in ("an unknown field", "an unknown recipe"):
        assert "did you mean" in found.json()["error"]["fix"]


def wrong_bodies() -> dict[str, tuple[bytes, dict[str, str]]]:
    """What no address takes, and with which headers."""
    json_ = {"Content-Type": "application/json"}
    return {
        "an unknown field": (b'{"zzz": 1}', json_),
        "wrong types": (
            b'{"recipe": 1, "job_id": [], "scope": 3, "from": {}, "checkpoint_path": 1}',
            json_,
        ),
        "no object": (b"[1]", json_),
        "a million levels": (b"[" * 1_000_000, json_),
        "a NUL": (b'{"recipe": "a\\u0000", "job_id": "a\\u0000"}', json_),
        "a text of a million": (
            json.dumps({"recipe": HUGE[:1_000_000], "job_id": "x"}).encode(),
            json_,
        ),
        "a name of a million": (json.dumps({HUGE[:1_000_000]: 1}).encode(), json_),
        "another type": (b"{}", {"Content-Type": "text/plain"}),
        "another host": (b"{}", {**json_, "Host": "evil.example"}),
        "no origin": (b"{}", {**json_, "Origin": "null"}),
    }


def test_every_address_that_takes_a_body_refuses_what_is_none_and_stores_nothing(
    served: Served, tmp_path: Path
) -> None:
    before, took = stored(served.rest), []
    posts = [path for method, path in addresses(tmp_path) if method == "POST"]
    assert len(posts) > 10
    for path in posts:
        where = path.replace("{run}", served.run).replace("{job_id}", "none")
        for what, (data, headers) in wrong_bodies().items():
            begun = time.perf_counter()
            found = served.rest.ask("POST", where, data=data, headers=headers)
            took.append(time.perf_counter() - begun)
            assert 400 <= found.status_code < 500 and set(found.json()["error"]) == {
                "code",
                "message",
                "fix",
                "problems",
            }, (path, what, found.text)
            assert (
                what not in ("an unknown field", "wrong types") or found.json()["error"]["problems"]
            ), (path, what)
    assert stored(served.rest) == before and sorted(took)[len(took) // 2] < 0.1, (
        "nothing is surveyed for it"
    )


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limitt=1", 'did you mean "limit"?'),
        ("limit=1&limit=2", "twice"),
        ("limit=x", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("state=EXECUTING", "state"),
        ("user=%00", "NUL"),
        ("user=" + "x" * 20_000, "user"),
        ("label=x", "label"),
        ("after=" + "x" * 99, "after"),
    ],
    ids=lambda value: value[:20],
)
def test_a_parameter_that_cannot_be_meant_is_refused_by_its_name(
    served: Served, query: str, words: str
) -> None:
    error = served.rest.ask("GET", f"/v1/runs?{query}").json()["error"]
    assert (
        words in str(error)
        and len(str(error)) < 2000
        and error["problems" if "NUL" not in words else "message"]
    )


def test_a_token_is_read_from_its_header_alone_and_compared_with_each_that_is_known(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = served.rest.token
    for query in (f"token={secret}", f"access_token={secret}"):
        refused(served.rest.ask("GET", f"/v1/runs?{query}", token=""), 401, "unauthorized")
    for headers in (
        {"Cookie": f"token={secret}"},
        {"X-API-Key": secret},
        {"Authorization": f"Basic {secret}"},
        {"Authorization": secret},
    ):
        refused(served.rest.ask("GET", "/v1/runs", token="", headers=headers), 401, "unauthorized")
    tokens = Tokens(tmp_path, Locks(tmp_path))
    known, compared = [tokens.create("read")[1] for _ in range(3)], []
    monkeypatch.setattr(
        "runner.server.tokens.compare_digest",
        lambda a, b: compared.append((len(a), len(b))) or a == b,
    )
    for given in (known[0], known[2], "", "rcp_", "x" * 9999):
        compared.clear()
        assert (tokens.find(given) is not None) == (given in known)
        assert compared == [(64, 64)] * 3, "by digests, and by all of them"


def test_a_websocket_is_opened_only_where_there_is_a_stream(served: Served) -> None:
    shake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    refused(served.rest.ask("GET", "/v1/runs", token="", headers=shake), 401, "unauthorized")
    found = served.rest.ask("GET", "/v1/runs", headers=shake)
    assert "stream" in refused(found, 404, "not-found")["fix"]


@pytest.mark.parametrize("how", ["removed", "expired"])
def test_a_stream_ends_with_its_token(served: Served, how: str) -> None:
    late = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
    made = served.rest.ask(
        "POST",
        "/v1/tokens",
        {"scope": "read", "run": served.run, **({"expires": late} if how == "expired" else {})},
    ).json()
    headers = {"Authorization": f"Bearer {made['token']}", "Accept": "text/event-stream"}
    with requests.get(
        f"{served.rest.url}/v1/runs/{served.run}/events", headers=headers, stream=True, timeout=14
    ) as stream:
        pieces = stream.iter_content(None)
        assert next(pieces).startswith(b"id: 1\n")
        if how == "removed":
            assert served.rest.ask("DELETE", f"/v1/tokens/{made['id']}").status_code == 204
        (last,) = pieces
        assert last.startswith(b": the token was removed or has expired"), "nothing but that"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X-Long: " + b"x" * 100_000, 431),
        (b"Host: evil.example", 400),
        (b"Content-Length: 2\r\nContent-Length: 3", 400),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked", 415),
        (b"Content-Length: -1", 400),
        (b"Bad Header: x", 400),
    ],
    ids=lambda value: str(value)[2:30],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(
    served: Served, head: bytes, status: int
) -> None:
    where = urlsplit(served.rest.url)
    with socket.create_connection((where.hostname, where.port), 10) as connection:
        host, bearer = where.netloc.encode(), served.rest.token.encode()
        connection.sendall(
            b"GET /v1/runs HTTP/1.1\r\nHost: "
            + host
            + b"\r\nAuthorization: Bearer "
            + bearer
            + b"\r\n"
            + head
            + b"\r\n\r\n"
        )
        assert int(connection.recv(100).split(b" ")[1]) == status


def test_a_body_without_a_length_is_counted_while_it_comes(served: Served) -> None:
    found = served.rest.ask(
        "POST",
        "/v1/runs",
        data=(b" " * 100_000 for _ in range(20)),
        headers={"Content-Type": "application/json"},
    )
    refused(found, 413, "too-large")


def test_a_path_below_a_root_is_taken(served: Served) -> None:
    assert served.rest.submit(inputs={"data": "data/words.txt"}, not_before=LATE)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/../tokens",
        "/v1/runs/..%2ftokens",
        "/v1/runs/%2e%2e/tokens",
        "/v1/runs/{run}/logs%2F..",
        "/v1/runs/{run}/artifacts/..%2F..%2Frecipe.db",
        "/v1/runs/{run}/artifacts/%2e%2e%5crecipe.db",
        "/v1/recipes/..%2Fhidden",
        "/v1/recipes/.%2Fhidden.yaml",
        "/v1/recipes/hidden.yaml",
        "/v1/runs/%00",
        "/v1/runs/{run}%00",
        "//v1/runs",
        "/v1/runs/" + "a" * 4000,
    ],
)
def test_no_name_leads_out_of_where_it_belongs(served: Served, path: str) -> None:
    where = urlsplit(served.rest.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    connection.request(
        "GET",
        path.replace("{run}", served.run),
        headers={"Authorization": f"Bearer {served.rest.token}"},
    )
    found = connection.getresponse()
    text = found.read().decode()
    assert (
        found.status == 404
        and json.loads(text)["error"]["code"] == "not-found"
        and str(served.rest.root) not in text
    )
    connection.close()


def test_an_error_of_ours_tells_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path, {}, tokens := Tokens(tmp_path / "server", Locks(tmp_path)))
    secret = tokens.first()

    def broken(_: object) -> None:
        raise RuntimeError(f"{tmp_path} {secret}")

    app = application(room, {"here"})
    monkeypatch.setattr(Room, "borrow_workspace", broken)
    sent = asked(
        app,
        "GET",
        "/v1/runs",
        [(b"host", b"here"), (b"authorization", f"Bearer {secret}".encode())],
    )
    assert (
        sent[0]["status"] == 500
        and b"internal" in sent[1]["body"]
        and str(tmp_path).encode() not in sent[1]["body"]
    )


def asked(
    app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], receive: Any = None
) -> list[dict[str, Any]]:
    """What an application sends to a request, by ASGI itself."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def nothing() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
    }
    scope |= {
        "scheme": "http",
        "server": ("here", 1),
        "client": ("here", 2),
        "root_path": "",
        "asgi": {"version": "3.0"},
    }

    async def act() -> None:
        try:
            await app(scope, receive or nothing, send)
        except RuntimeError:
            assert sent, "it is logged by the server, once it was answered"

    asyncio.run(act())
    return sent


def test_a_body_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    tokens = Tokens(tmp_path / "server", Locks(tmp_path))
    headers = [(b"host", b"here"), (b"authorization", f"Bearer {tokens.first()}".encode())]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"9")]

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    sent = asked(
        application(Room(tmp_path, {}, tokens), {"here"}), "POST", "/v1/runs", headers, never
    )
    assert sent[0]["status"] == 408


def test_a_request_whose_head_does_not_come_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    from runner.server import serving

    monkeypatch.setattr(serving, "PATIENCE", 0.2)

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def act() -> list[bytes]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(
                uvicorn.Config(answers, http=serving.Patient, lifespan="off", log_level="error")
            )
            serving_task = asyncio.create_task(server._serve([listener]))
            got = []
            for whole, half in (
                (b"", b""),
                (b"", b"GET / HTTP/1.1\r\nHost: here\r\n"),
                (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"GET / HTTP/1.1\r\n"),
            ):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(whole)
                if whole:
                    got.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(half)
                try:
                    got.append(await asyncio.wait_for(reader.read(), 5))
                except ConnectionError:
                    got.append(b"")
                writer.close()
            server.should_exit = True
            await serving_task
            return got

    empty, half, first, second = asyncio.run(act())
    assert empty == half == second == b"" and first.startswith(b"HTTP/1.1 204")


def test_answers_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    text = hide_local_paths(
        f"{tmp_path}/a/b.yaml:1:2 and /etc/recipe/x.toml and ~/.config/y, see GET /v1/runs/x and hf://org/name or https://a/b/c",
        tmp_path,
    )
    assert (
        text
        == "a/b.yaml:1:2 and …/x.toml and …/y, see GET /v1/runs/x and hf://org/name or https://a/b/c"
    )
    assert str(Refused(400, "x", "y")) == "y"


def test_two_thousand_connections_are_held_and_the_next_is_refused(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2500:
        pytest.skip("this process may not open 2,500 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500), hard))
    where = urlsplit(served.rest.url)
    with contextlib.ExitStack() as held:
        served.rest.http.close()
        for _ in range(1980):
            held.enter_context(socket.create_connection((str(where.hostname), where.port or 0), 10))
        assert served.rest.get("/v1/runs?limit=1")["runs"], "beside 1,980 that say nothing"
        for _ in range(30):
            held.enter_context(socket.create_connection((str(where.hostname), where.port or 0), 10))
        late = requests.get(f"{served.rest.url}/health", timeout=10)
        assert late.status_code == 503
        held_kb = int(
            Path(f"/proc/{served.rest.process.pid}/status")
            .read_text()
            .split("VmRSS:")[1]
            .split()[0]
        )
        assert held_kb < 300_000
    until(lambda: requests.get(f"{served.rest.url}/health", timeout=10).status_code == 200)


def test_the_server_speaks_https_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        f"{tmp_path}/key.pem",
    ]
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", f"{tmp_path}/chain.pem", "-days", "2", *name],
        check=True,
        capture_output=True,
    )
    (tmp_path / "space").mkdir()
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("REQUESTS_CA_BUNDLE", f"{tmp_path}/chain.pem")
        with Rest(
            tmp_path / "space",
            "--certificate",
            f"{tmp_path}/chain.pem",
            "--key",
            f"{tmp_path}/key.pem",
        ) as rest:
            assert rest.url.startswith("https://127.0.0.1:") and rest.get("/v1/runs") == {
                "runs": [],
                "next": None,
            }
            with pytest.raises(requests.exceptions.SSLError):
                requests.get(f"{rest.url}/health", timeout=10, verify=certifi())
            with pytest.raises(requests.exceptions.ConnectionError):
                requests.get(f"http{rest.url[5:]}/health", timeout=10)


def certifi() -> str:
    """The certificates of the public network."""
    from requests.certs import where

    return str(where())


def test_an_address_is_one_of_a_host_or_bucket_that_is_allowed(served: Served) -> None:
    before = stored(served.rest)
    for address in (
        "https://elsewhere.example/x",
        "s3://bucket/x",
        "gs://bucket/x",
        "https://127.0.0.1/x",
        "https://2130706433/x",
        "https://data.example@elsewhere.example/",
    ):
        for path in ("/v1/runs", "/v1/plan"):
            error = refused(
                served.rest.ask(
                    "POST",
                    path,
                    {"recipe": "learn", "inputs": {"base": "hf://acme/tiny", "dataset": address}},
                ),
                422,
                "invalid",
            )
            assert [each["code"] for each in error["problems"]] == [
                "address-not-allowed"
            ] and "`allow` under [data]" in error["fix"]
    assert stored(served.rest) == before


def test_what_opens_an_address_is_not_stored_without_a_key_and_a_pack_is_one_of_the_store(
    served: Served,
) -> None:
    before = stored(served.rest)
    signed = {
        "recipe": "learn",
        "inputs": {
            "base": "hf://acme/tiny",
            "dataset": "https://data.example/x?X-Signature=canary0123456789",
        },
    }
    error = refused(served.rest.ask("POST", "/v1/runs", signed), 422, "refused")
    assert (
        "s3://, gs://, hf://" in error["fix"]
        and "RECIPE_KEY_FILE" in error["fix"]
        and "canary" not in str(error)
    )
    packed = {
        "recipe": "learn",
        "inputs": {"base": "hf://acme/tiny", "dataset": "pack:" + "0" * 64},
    }
    error = refused(served.rest.ask("POST", "/v1/runs", packed), 422, "invalid")
    assert [each["code"] for each in error["problems"]] == [
        "no-such-pack"
    ] and "no shared store is set" in error["message"]
    assert stored(served.rest) == before


BODIES = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "fixtures" / "server").iterdir()
}


def test_the_bodies_of_platforms_are_taken_as_they_are(served: Served) -> None:
    ask = served.rest.ask
    for n, name in enumerate(("execute", "execute_by_method", "execute_camel_case"), 1):
        for _ in range(2):  # the same job again is the same job
            found = ask("POST", "/api/training/execute", BODIES[name])
            assert (found.status_code, found.json()) == (
                202,
                {"job_id": f"job-{n}", "status": "queued", "ignored": []},
            ), found.text
    refused(
        ask("POST", "/api/training/execute", {**BODIES["execute"], "user_id": "bob"}),
        409,
        "key-in-use",
    )
    run = served.rest.get(f"/v1/runs/{served.rest.get('/api/training/status/job-1')['run']}")
    assert run["user"] == "ann" and run["inputs"] == {
        "base": "hf://acme/tiny",
        "dataset": "https://data.example/train.jsonl",
        "epochs": 2,
    }
    assert (
        BODIES["execute"]["job_token"].encode()
        not in (served.rest.root / ".recipe" / "recipe.db").read_bytes()
    )
    for verb, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        found = ask("POST", f"/api/training/{verb}/job-1", BODIES[verb])
        assert (found.status_code, found.json()) == (202, {"job_id": "job-1", "status": state}), (
            found.text
        )
    refused(ask("POST", "/api/training/cancel/job-1", {}), 409, "final")
    refused(ask("GET", "/api/training/status/none"), 404, "not-found")
    found = ask("POST", "/api/training/deploy/runpod", BODIES["deploy_runpod"])
    assert (found.status_code, found.json()["job_id"]) == (202, "job-4"), found.text
    remote = {**BODIES["deploy_runpod"], "driver": "local"}
    refused(ask("POST", "/api/training/deploy/runpod", remote), 422, "invalid")
    assert (
        served.rest.get(f"/v1/runs/{served.rest.get('/api/training/status/job-4')['run']}")[
            "driver"
        ]
        == "runpod"
    )
    assert ask("POST", "/api/training/pause/job-4", {}).status_code == 202
    refused(
        ask("POST", "/api/training/resume/job-4", BODIES["resume_from_checkpoint"]),
        422,
        "no-such-checkpoint",
    )
    assert sorted(
        job["job_id"]
        for job in served.rest.get("/api/training/jobs")["jobs"]
        if job["job_id"].startswith("job-")
    ) == [
        "job-1",
        "job-2",
        "job-3",
        "job-4",
    ]


def test_a_job_in_a_platforms_own_words_says_what_is_ignored(served: Served) -> None:
    ask = served.rest.ask
    body = BODIES["execute_hugging_face"]
    found = ask("POST", "/api/training/execute", body)
    assert found.status_code == 202, found.text
    ignored = [
        "execution_id: unknown field",
        "config.output_dir: results are published below OUTPUT_DIR",
    ]
    assert found.json() == {"job_id": "job-5", "status": "queued", "ignored": ignored}
    assert f"job job-5: ignored: {'; '.join(ignored)}" in served.rest.said()
    run = served.rest.get(f"/v1/runs/{served.rest.get('/api/training/status/job-5')['run']}")
    assert (run["preset"], run["driver"], run["priority"]) == ("small", "loopback", 5)
    assert run["inputs"]["epochs"] == 2
    ask("POST", "/api/training/cancel/job-5", {})
    same = {**body, "job_id": "job-6", "config": {"num_train_epochs": 2, "epochs": 3}}
    error = refused(ask("POST", "/api/training/execute", same), 422, "invalid")
    assert "num_train_epochs" in error["message"]
    typo = {**body, "job_id": "job-6", "config": {"epocs": 3}}
    assert "epochs" in refused(ask("POST", "/api/training/execute", typo), 422, "invalid")["fix"]
    for wrong in ({"gpus": -1}, {"memory": "2 parsec"}, {"colour": 1}):
        sent = {**body, "job_id": "job-6", "resources": wrong}
        refused(ask("POST", "/api/training/execute", sent), 422, "invalid")


def test_a_job_without_an_id_gets_one(served: Served) -> None:
    body = {name: value for name, value in BODIES["execute"].items() if name != "job_id"}
    ids = [served.rest.ask("POST", "/api/training/execute", body).json()["job_id"] for _ in "ab"]
    assert len(set(ids)) == 2 and all(ids)
    for id in ids:
        assert served.rest.get(f"/api/training/status/{id}")["status"] == "queued"
        assert served.rest.ask("POST", f"/api/training/cancel/{id}", {}).status_code == 202


def test_the_bodies_of_v1_are_taken_as_they_are(served: Served) -> None:
    ask = served.rest.ask
    for name, path, status in (
        ("v1_plan", "/v1/plan", 200),
        ("v1_token", "/v1/tokens", 201),
        ("v1_token_of_a_run", "/v1/tokens", 201),
    ):
        assert ask("POST", path, BODIES[name]).status_code == status, name
    run, _ = (
        ask("POST", "/v1/runs", BODIES[name]).json()["id"] for name in ("v1_run_with_all", "v1_run")
    )
    for verb, body in (
        ("pause", "pause"),
        ("resume", "resume"),
        ("cancel", "cancel"),
        ("retry", "retry"),
        ("retry", "retry_from"),
    ):
        found = ask("POST", f"/v1/runs/{run}/{verb}", BODIES[f"v1_{body}"])
        assert found.status_code == 202 and found.json()["event"]["run"], found.text
    reports = {"metrics", "logs"} | {
        name for name in BODIES if name.startswith(("alert_", "status_"))
    }  # posted by tests of what is reported
    here = {
        "execute",
        "execute_by_method",
        "execute_camel_case",
        "execute_hugging_face",
        "pause",
        "resume",
        "cancel",
        "deploy_runpod",
        "resume_from_checkpoint",
    }
    assert {name for name in BODIES if not name.startswith("v1_")} == reports | here


@pytest.mark.slow
def test_the_document_of_the_api_is_exact(served: Served, tmp_path: Path) -> None:
    """Schemathesis sends what the document allows, and what it does not: each answer is one that the document has."""
    for run in served.rest.get("/v1/runs?limit=200")[
        "runs"
    ]:  # else it waits for streams that do not end
        served.rest.ask("POST", f"/v1/runs/{run['id']}/cancel")
    # PUT is one of six methods that are answered alike. Inputs are checked against a recipe, which
    # the API's document cannot describe; schemathesis finds the names of recipes in answers.
    (tmp_path / "schemathesis.toml").write_text(
        '[phases.coverage]\nunexpected-methods = ["PUT"]\n'
        + "".join(
            f'[[operations]]\ninclude-path = "{path}"\n'
            "checks.positive_data_acceptance.expected-statuses = "
            '["2xx", "401", "403", "404", "409", "422", "429", "5xx"]\n'
            for path in (
                "/v1/plan",
                "/v1/runs",
                "/api/training/execute",
                "/api/training/deploy/runpod",
            )
        )
    )
    program = client("schemathesis").with_name("st")
    words = [
        "run",
        f"{served.rest.url}/openapi.json",
        "-H",
        f"Authorization: Bearer {served.rest.token}",
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "4",
        "--checks",
        "all",
    ]
    words += [
        "--exclude-path",
        "/v1/stream",  # it has no end
        "--seed",
        "1",
        "--no-color",
        "--continue-on-failure",
        "--warnings",
        "off",
        "--request-timeout",
        "5",
    ]
    done = subprocess.run(
        [program, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in served.rest.said()
