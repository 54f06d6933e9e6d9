"""`recipe serve`: recipes, plans and runs over HTTP, carried out by its worker."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from tests.servers.rest import Rest
from tests.support import until

HELLO = """\
recipe: hello@1
summary: Say hello.
inputs:
  word: {type: string, default: hello, maxLength: 40, doc: What to say.}
  times: {type: integer, default: 1, minimum: 1}
  data: {type: file, required: false, default: null}
  kind: {type: choice, choices: [a, b], default: a}
  key: {type: secret, env: HELLO_KEY, required: false}
presets:
  loud: {word: HELLO}
steps:
  say: {run: 'echo {{ inputs.word }} > {{ outputs.o }}; echo said {{ inputs.word }}', outputs: {o: said.txt}, resources: {cpus: 1}}
"""
SLOW = """\
recipe: slow@1
inputs: {name: {type: string}}
steps:
  wait:
    run: |
      echo begun
      touch ROOT/begun-{{ inputs.name }}
      while [ ! -e ROOT/go-{{ inputs.name }} ]; do sleep 0.05; done
      echo over > {{ outputs.o }}
    outputs: {o: over.txt}
  after: {run: 'cp {{ steps.wait.o }} {{ outputs.p }}', outputs: {p: after.txt}}
"""


def workspace(root: Path) -> Path:
    """A workspace with two recipes that its server offers."""
    (root / "data").mkdir(parents=True)
    (root / "data" / "words.txt").write_text("words\n")
    (root / "hello.yaml").write_text(HELLO)
    (root / "hidden.yaml").write_text(HELLO.replace("hello@1", "hidden@1"))
    (root / "slow.yaml").write_text(SLOW.replace("ROOT", str(root)))
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./hello.yaml", "slow.yaml"]\n[data]\nroots = ["data"]\n')
    return root


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with Rest(workspace(tmp_path_factory.mktemp("rest") / "space"), "--with-worker") as server:
        yield server


def refused(found: Any, status: int, code: str) -> dict[str, Any]:
    """The error that a request was refused with."""
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"code", "message", "fix", "problems"} and error["code"] == code, error
    return dict(error)


def test_a_server_is_ready_soon_and_shows_its_first_token_once(rest: Rest) -> None:
    assert rest.seconds < 4.5, "1.5 s on an idle machine"
    file = rest.root / ".recipe" / "server" / "tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and rest.token not in file.read_text() and len(rest.token) > 40
    with Rest(rest.root) as second:
        assert second.token == ""
        assert second.ask("GET", "/v1/runs", token=rest.token).status_code == 200


def test_health_is_answered_without_a_token_and_tells_nothing(rest: Rest) -> None:
    assert rest.ask("GET", "/health", token="").json() == {"status": "ok"}
    assert rest.get("/health")["version"]


def test_recipes_are_those_of_the_library_and_those_that_are_allowed(rest: Rest) -> None:
    ids = [each["id"] for each in rest.get("/v1/recipes")["recipes"]]
    assert {"hello@1", "slow@1", "sft@1"} <= set(ids) and "hidden@1" not in ids
    found = rest.get("/v1/recipes/hello")
    assert found["id"] == "hello@1" and found["presets"] == {"loud": {"word": "HELLO"}} and found["outputs"] == ["say.o"]
    assert found["inputs"]["properties"]["word"] == {"type": "string", "description": "What to say.", "maxLength": 40, "default": "hello"}
    assert found["inputs"]["properties"]["kind"] == {"enum": ["a", "b"], "default": "a"} and "key" not in found["inputs"]["properties"]
    assert rest.get("/v1/recipes/sft@1")["inputs"]["required"]
    error = refused(rest.ask("GET", "/v1/recipes/helo"), 404, "not-found")
    assert error["fix"].startswith('did you mean "hello')
    refused(rest.ask("GET", "/v1/recipes/hidden"), 404, "not-found")


def test_a_plan_says_what_would_run_and_why(rest: Rest) -> None:
    found = rest.ask("POST", "/v1/plan", {"recipe": "slow", "inputs": {"name": "plan"}}).json()
    assert [(step["id"], step["answer"], step["needs"]) for step in found["steps"]] == [("wait", "run", []), ("after", "maybe", ["wait"])]
    error = refused(rest.ask("POST", "/v1/plan", {"recipe": "hello", "inputs": {"times": 0, "kind": "c", "wrod": 1}}), 422, "invalid")
    assert len(error["problems"]) == 3 and any('"word"' in problem["fix"] for problem in error["problems"])


def test_a_run_that_is_stored_is_carried_out_and_shows_its_outputs(rest: Rest) -> None:
    run = rest.submit(inputs={"word": "once"}, user="ann", labels={})
    found = rest.until(run, "COMPLETED")
    assert (found["recipe"], found["word"], found["user"], found["inputs"]["word"]) == ("hello@1", "COMPLETED", "ann", "once")
    assert found["progress"] == {"step": 1, "total": 1, "percent": 100.0, "eta": 0.0} and found["created"].endswith("Z")
    assert [(output["name"], output["bytes"], output["folder"]) for output in found["outputs"]] == [("say.o", 5, False)]
    again = rest.until(rest.submit(inputs={"word": "once"}), "COMPLETED")
    assert again["id"] != run and again["outputs"] == found["outputs"], "what was fresh is listed, too"


def test_a_key_makes_a_request_the_same_run(rest: Rest) -> None:
    body = {"recipe": "hello", "inputs": {"word": "key"}, "not_before": "2099-01-01T00:00:00Z"}
    answers = [rest.ask("POST", "/v1/runs", body, headers={"Idempotency-Key": "k1"}) for _ in range(2)]
    assert [each.status_code for each in answers] == [201, 200] and answers[0].json()["id"] == answers[1].json()["id"]
    assert answers[0].json()["not_before"] == "2099-01-01T00:00:00.000Z"
    refused(rest.ask("POST", "/v1/runs", {**body, "priority": 1}, headers={"Idempotency-Key": "k1"}), 409, "key-in-use")


def test_a_list_has_a_cursor_until_its_end(rest: Rest) -> None:
    known = [rest.submit(inputs={"word": "page"}, not_before="2099-01-01T00:00:00Z", user="pages") for _ in range(3)]
    found, after = [], ""
    while after is not None:
        page = rest.get(f"/v1/runs?user=pages&state=QUEUED&limit=2&after={after}")
        found, after = found + [run["id"] for run in page["runs"]], page["next"]
    assert sorted(found) == sorted(known) and found == sorted(found, reverse=True)


def test_the_worker_ends_with_its_server_also_when_that_is_killed(tmp_path: Path) -> None:
    def workers() -> list[str]:
        told = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in os.listdir("/proc") if pid.isdigit() and Path(f"/proc/{pid}/cmdline").exists()]
        return [line.decode() for line in told if str(tmp_path / "space").encode() in line and b"worker" in line]

    server = Rest(workspace(tmp_path / "space"), "--with-worker")
    until(workers)
    server.process.kill()
    server.process.wait()
    until(lambda: not workers())
    with Rest(tmp_path / "space", "--with-worker") as server:
        until(workers)
        begun = time.monotonic()
        assert server.end() == 0 and not workers() and time.monotonic() - begun < 20


def test_a_token_that_expired_or_was_removed_is_none(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "server", Locks(tmp_path))
    secret = tokens.first()
    assert tokens.of(secret) is not None and tokens.first() == ""
    old, expired = tokens.make("read", expires=time.time() - 1)
    assert tokens.of(expired) is None and tokens.of("") is None and Tokens(tmp_path / "server", Locks(tmp_path)).of(secret) is not None
    assert tokens.remove(old.id) and not tokens.remove(old.id)


def test_only_what_is_encrypted_leaves_the_machine(tmp_path: Path) -> None:
    from runner.errors import Invalid
    from runner.server.serving import Listening, serve

    with pytest.raises(Invalid, match="unencrypted"):
        serve(tmp_path, Listening("0.0.0.0", 0), lambda *_: None, with_worker=False, new_token=False)
    assert list(tmp_path.iterdir()) == []
