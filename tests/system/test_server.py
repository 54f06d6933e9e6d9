"""`recipe serve`: recipes, plans and runs over HTTP, carried out by its worker."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from runner.api.submitting import QueueSettings, submit
from runner.errors import Infrastructure
from runner.execution.terms import Choice, Settings
from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.servers.rest import Rest
from tests.support import RECIPE, until

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
  say:
    run: 'echo {{ inputs.word }} > {{ outputs.o }}; echo said {{ inputs.word }}'
    env: {TIMES: "{{ inputs.times }}", DATA: "{{ inputs.data }}", KIND: "{{ inputs.kind }}"}
    secrets: [key]
    outputs: {o: said.txt}
    resources: {cpus: 1}
"""
SLOW = """\
recipe: slow@1
inputs: {name: {type: string}, key: {type: secret, env: SLOW_KEY}}
secrets: [key]
steps:
  wait:
    run: |
      echo begun $SLOW_KEY
      touch ROOT/begun-{{ inputs.name }}
      while [ ! -e ROOT/go-{{ inputs.name }} ]; do sleep 0.05; done
      echo over > {{ outputs.o }}
    outputs: {o: over.txt}
  after: {run: 'cp {{ steps.wait.o }} {{ outputs.p }}', outputs: {p: after.txt}}
"""
DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
CANARY = "canary-0123456789"
LEARN = """\
recipe: learn@1
inputs: {base: {type: model}, dataset: {type: dataset}, epochs: {type: integer, default: 1}}
steps: {learn: {run: [cp, "{{ inputs.dataset }}", "{{ outputs.model }}"], env: {BASE: "{{ inputs.base }}", EPOCHS: "{{ inputs.epochs }}"}, outputs: {model: model}}}
presets: {small: {epochs: 1}}
"""
TREE = """\
recipe: tree@1
steps:
  make:
    run: 'mkdir -p {{ outputs.d }}/a; echo b > {{ outputs.d }}/a/b.txt; echo c > "{{ outputs.d }}/n$(printf "\\377")"; for n in 1 2 3 4; do echo "{\\"step\\": $n, \\"loss\\": 1.5}" >> $RECIPE_METRICS; done'
    metrics: true
    outputs: {d: tree/}
"""
KEEP = """\
recipe: keep@1
steps:
  train:
    run: |
      for n in 1 2; do mkdir -p {{ state.saved }}/step-$n; echo weights > {{ state.saved }}/step-$n/w.bin; done
      echo '{"best_model_checkpoint": "/there/step-1"}' > {{ state.saved }}/step-2/trainer_state.json
      exit 3
    state: {saved: {checkpoint: "step-*"}}
"""
RENT = """\
recipe: rent@1
steps: {train: {run: 'while [ ! -e ROOT/go-rent ]; do sleep 0.05; done', resources: {gpus: 1}}}
"""


def workspace(root: Path) -> Path:
    """A workspace with two recipes that its server offers."""
    (root / "data").mkdir(parents=True)
    (root / "data" / "words.txt").write_text("words\n")
    (root / "hello.yaml").write_text(HELLO)
    (root / "hidden.yaml").write_text(HELLO.replace("hello@1", "hidden@1"))
    (root / "greet.yaml").write_text(DOCUMENT.split("```yaml\n")[1].split("```")[0])
    (root / "learn.yaml").write_text(LEARN)
    (root / "tree.yaml").write_text(TREE)
    (root / "keep.yaml").write_text(KEEP)
    (root / "rent.yaml").write_text(RENT.replace("ROOT", str(root)))
    (root / "slow.yaml").write_text(SLOW.replace("ROOT", str(root)))
    (root / "recipe.toml").write_text(
        '[recipes]\nallow = ["./hello.yaml", "slow.yaml", "tree.yaml", "greet.yaml", "learn.yaml", "keep.yaml", "rent.yaml"]\n[data]\nroots = ["data"]\nallow = ["https://data.example"]\n[drivers.loopback]\nprice = 1.2\ngpus = 1\nroot = "cloud"\n'
    )
    return root


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SLOW_KEY", CANARY)
        server = Rest(workspace(tmp_path_factory.mktemp("rest") / "space"), "--with-worker")
    with server:
        yield server
        assert server.end() == 0
    assert (
        CANARY not in server.said()
        and "Traceback" not in server.said()
        and server.token not in server.said()
    )


def refused(found: Any, status: int, code: str) -> dict[str, Any]:
    """The error that a request was refused with."""
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"code", "message", "fix", "problems"} and error["code"] == code, error
    return dict(error)


def test_a_server_is_ready_soon_and_stores_only_a_digest_of_its_token(rest: Rest) -> None:
    assert rest.seconds < 4.5, "1.5 s on an idle machine"
    file = rest.root / ".recipe" / "server" / "tokens.json"
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and rest.token not in file.read_text()
        and len(rest.token) > 40
    )


def test_health_is_answered_without_a_token_and_tells_nothing(rest: Rest) -> None:
    assert rest.ask("GET", "/health", token="").json() == {"status": "ok"}
    found = rest.get("/health")
    assert found["version"] and set(found) == {"status", "version", "gpu", "active_jobs"}
    assert set(found["gpu"]) == {"available", "name", "cuda_version", "device_count", "memory"}


def test_recipes_are_those_of_the_library_and_those_that_are_allowed(rest: Rest) -> None:
    ids = [each["id"] for each in rest.get("/v1/recipes")["recipes"]]
    assert {"hello@1", "slow@1", "sft@1"} <= set(ids) and "hidden@1" not in ids
    found = rest.get("/v1/recipes/hello")
    assert (
        found["id"] == "hello@1"
        and found["presets"] == {"loud": {"word": "HELLO"}}
        and found["outputs"] == ["say.o"]
    )
    assert found["inputs"]["properties"]["word"] == {
        "type": "string",
        "description": "What to say.",
        "maxLength": 40,
        "default": "hello",
    }
    assert (
        found["inputs"]["properties"]["kind"] == {"enum": ["a", "b"], "default": "a"}
        and "key" not in found["inputs"]["properties"]
    )
    assert rest.get("/v1/recipes/sft@1")["inputs"]["required"]
    error = refused(rest.ask("GET", "/v1/recipes/helo"), 404, "not-found")
    assert error["fix"].startswith('did you mean "hello')
    refused(rest.ask("GET", "/v1/recipes/hidden"), 404, "not-found")


def test_a_run_ends_at_the_limit_that_its_request_has(rest: Rest) -> None:
    run = rest.submit("slow", inputs={"name": "limited"}, limits={"time": 0.5, "cost": 3})
    assert "limits.time" in str(rest.until(run, "FAILED")) + str(rest.get(f"/v1/runs/{run}/events"))
    for limits in ({"time": 0}, {"time": -1}, {"hours": 1}, {"cost": "3"}, 5):
        refused(rest.ask("POST", "/v1/runs", {"recipe": "hello", "limits": limits}), 422, "invalid")


def test_a_plan_says_what_would_run_and_why(rest: Rest) -> None:
    found = rest.ask("POST", "/v1/plan", {"recipe": "slow", "inputs": {"name": "plan"}}).json()
    assert [(step["id"], step["answer"], step["needs"]) for step in found["steps"]] == [
        ("wait", "run", []),
        ("after", "maybe", ["wait"]),
    ]
    error = refused(
        rest.ask(
            "POST", "/v1/plan", {"recipe": "hello", "inputs": {"times": 0, "kind": "c", "wrod": 1}}
        ),
        422,
        "invalid",
    )
    assert len(error["problems"]) == 3 and any(
        '"word"' in problem["fix"] for problem in error["problems"]
    )


def test_a_run_that_is_stored_is_carried_out_and_shows_its_outputs(rest: Rest) -> None:
    run = rest.submit(inputs={"word": "once"}, user="ann", labels={})
    found = rest.until(run, "COMPLETED")
    assert (found["recipe"], found["word"], found["user"], found["inputs"]["word"]) == (
        "hello@1",
        "COMPLETED",
        "ann",
        "once",
    )
    assert found["progress"] == {"step": 1, "total": 1, "percent": 100.0, "eta": 0.0} and found[
        "created"
    ].endswith("Z")
    assert [(output["name"], output["bytes"], output["folder"]) for output in found["outputs"]] == [
        ("say.o", 5, False)
    ]
    again = rest.until(rest.submit(inputs={"word": "once"}), "COMPLETED")
    assert again["id"] != run and again["outputs"] == found["outputs"], (
        "what was fresh is listed, too"
    )


def test_a_key_makes_a_request_the_same_run(rest: Rest) -> None:
    body = {"recipe": "hello", "inputs": {"word": "key"}, "not_before": "2099-01-01T00:00:00Z"}
    answers = [
        rest.ask("POST", "/v1/runs", body, headers={"Idempotency-Key": "k1"}) for _ in range(2)
    ]
    assert [each.status_code for each in answers] == [201, 200] and answers[0].json()[
        "id"
    ] == answers[1].json()["id"]
    assert answers[0].json()["not_before"] == "2099-01-01T00:00:00.000Z"
    refused(
        rest.ask("POST", "/v1/runs", {**body, "priority": 1}, headers={"Idempotency-Key": "k1"}),
        409,
        "key-in-use",
    )


def test_a_list_has_a_cursor_until_its_end(rest: Rest) -> None:
    known = [
        rest.submit(inputs={"word": "page"}, not_before="2099-01-01T00:00:00Z", user="pages")
        for _ in range(3)
    ]
    found, after = [], ""
    while after is not None:
        page = rest.get(f"/v1/runs?user=pages&state=QUEUED&limit=2&after={after}")
        found, after = found + [run["id"] for run in page["runs"]], page["next"]
    assert found == known[::-1], "those of one second, too, in the order in which they were created"


def test_a_server_that_is_killed_takes_its_worker_with_it_and_its_token_is_shown_once(
    tmp_path: Path,
) -> None:
    def workers() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append(path.read_bytes().decode())
        return [line for line in found if str(tmp_path / "space") in line and "worker" in line]

    server = Rest(workspace(tmp_path / "space"), "--with-worker")
    until(workers)
    server.process.kill()
    server.process.wait()
    until(lambda: not workers())
    with Rest(tmp_path / "space") as second:
        assert (
            second.token == ""
            and second.ask("GET", "/v1/runs", token=server.token).status_code == 200
        )


def test_a_token_that_expired_or_was_removed_is_none(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "server", Locks(tmp_path))
    secret = tokens.first()
    assert tokens.find(secret) is not None and tokens.first() == ""
    old, expired = tokens.create("read", expires=time.time() - 1)
    assert (
        tokens.find(expired) is None
        and tokens.find("") is None
        and Tokens(tmp_path / "server", Locks(tmp_path)).find(secret) is not None
    )
    assert tokens.remove(old.id) and not tokens.remove(old.id)


def test_a_token_that_the_disk_does_not_take_is_not_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(tmp_path / "server", Locks(tmp_path))
    first, _ = tokens.create("read")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(Infrastructure, match="the disk is full"):
        patched.setattr(os, "fsync", full)
        tokens.create("read")
    second, _ = tokens.create("read")
    assert [token.id for token in tokens.all()] == [first.id, second.id]


def test_only_what_is_encrypted_leaves_the_machine(tmp_path: Path) -> None:
    from runner.errors import Invalid
    from runner.server.serving import ServerAddress, serve

    with pytest.raises(Invalid, match="unencrypted"):
        serve(
            tmp_path,
            ServerAddress("0.0.0.0", 0),
            lambda *_: None,
            with_worker=False,
            new_token=False,
        )
    assert list(tmp_path.iterdir()) == []


# -- what runs do -------------------------------------------------------------------------------------------------------------------------------------


def begun(rest: Rest, name: str) -> str:
    """A run whose first step is under way until there is a file `go-NAME`."""
    run = rest.submit("slow", inputs={"name": name})
    until((rest.root / f"begun-{name}").exists)
    return run


def go(rest: Rest, name: str) -> None:
    (rest.root / f"go-{name}").touch()


def streamed(answer: Any) -> list[tuple[int, dict[str, Any]]]:
    """The events of a stream, with their ids."""
    found = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((int(lines["id"]), json.loads(lines["data"])))
    return found


def test_a_run_is_followed_while_it_is_carried_out(rest: Rest) -> None:
    run = begun(rest, "follow")
    with ThreadPoolExecutor() as pool:
        log = pool.submit(rest.ask, "GET", f"/v1/runs/{run}/logs?step=wait&follow=true&offset=2")
        stream = pool.submit(
            rest.ask,
            "GET",
            f"/v1/runs/{run}/events?after=1",
            headers={"Accept": "text/event-stream"},
        )
        assert rest.ask("GET", f"/v1/runs/{run}/logs").text == "begun ***\n", (
            "a log that is being written is masked"
        )
        assert [
            worker["runs"] for worker in rest.get("/v1/workers")["workers"] if worker["alive"]
        ] == [[run]]
        assert rest.get(f"/v1/runs/{run}")["word"] == "EXECUTING"
        go(rest, "follow")
        told = streamed(stream.result())
        assert log.result().text == "gun ***\n"
    known = rest.get(f"/v1/runs/{run}/events")
    assert [event["seq"] for event in known["events"]] == list(range(1, known["next"] + 1))
    assert [event for _, event in told] == known["events"][1:] and [seq for seq, _ in told] == list(
        range(2, known["next"] + 1)
    )
    last = {"Accept": "text/event-stream", "Last-Event-ID": str(known["next"] - 1)}
    assert [
        seq for seq, _ in streamed(rest.ask("GET", f"/v1/runs/{run}/events", headers=last))
    ] == [known["next"]]
    refused(rest.ask("GET", f"/v1/runs/{run}/logs?step=none"), 404, "no-log")
    for part in ("", "/events", "/logs", "/metrics", "/artifacts"):
        text = rest.ask("GET", f"/v1/runs/{run}{part}").text
        assert CANARY not in text and str(rest.root) not in text, part


def test_the_bytes_of_logs_and_artifacts_are_given_by_range(rest: Rest) -> None:
    run = rest.submit(inputs={"word": "bytes"})
    rest.until(run, "COMPLETED")
    for path, whole in (
        (f"/v1/runs/{run}/logs?step=say", b"said bytes\n"),
        (f"/v1/runs/{run}/artifacts/say.o", b"bytes\n"),
    ):
        found = rest.ask("GET", path)
        assert (
            found.content == whole
            and found.headers["Content-Length"] == str(len(whole))
            and found.headers["Accept-Ranges"] == "bytes"
        )
        assert found.headers["X-Content-Type-Options"] == "nosniff" and found.headers[
            "Content-Disposition"
        ].startswith("attachment")
        part = rest.ask("GET", path, headers={"Range": "bytes=1-3"})
        assert (part.status_code, part.content, part.headers["Content-Range"]) == (
            206,
            whole[1:4],
            f"bytes 1-3/{len(whole)}",
        )
        assert rest.ask("GET", path, headers={"Range": "bytes=-2"}).content == whole[-2:]
        refused(rest.ask("GET", path, headers={"Range": "bytes=0-0,2-2"}), 416, "bad-range")
        refused(rest.ask("GET", path, headers={"Range": "bytes=99-"}), 416, "bad-range")
    (listed,) = rest.get(f"/v1/runs/{run}/artifacts")["artifacts"]
    assert listed["name"] == "say.o" and listed["stored"] and listed["files"] == []
    refused(rest.ask("GET", f"/v1/runs/{run}/artifacts/say.none"), 404, "not-found")


def test_files_of_an_artifact_that_is_a_folder_are_given_out_by_name(rest: Rest) -> None:
    run = rest.submit("tree")
    rest.until(run, "COMPLETED")
    (listed,) = rest.get(f"/v1/runs/{run}/artifacts")["artifacts"]
    content = f"f:{hashlib.sha256(b'b' + bytes([10])).hexdigest()}"
    assert (
        listed["files"][:1]
        == [{"path": "a/b.txt", "bytes": 2, "content": content, "type": "text/plain", "step": None}]
        and listed["bytes"] == 4
    )
    path = f"/v1/runs/{run}/artifacts/make.d"
    assert rest.ask("GET", f"{path}?path=a/b.txt").content == b"b\n"
    assert [file["path"] for file in listed["files"][1:]] == [
        "n\N{REPLACEMENT CHARACTER}"
    ]  # a name that is no UTF-8, as JSON can have it
    assert rest.ask("GET", f"{path}?path=n%EF%BF%BD").content == b"c\n"
    for wrong in ("", "?path=a", "?path=../a/b.txt", "?path=/etc/passwd"):
        refused(rest.ask("GET", path + wrong), 404, "not-found")
    lines = [
        json.loads(line) for line in rest.ask("GET", f"/v1/runs/{run}/metrics").text.splitlines()
    ]
    assert [(line["step"], line["n"], line["values"]) for line in lines] == [
        ("make", n, {"step": n, "loss": 1.5}) for n in (1, 2, 3, 4)
    ]
    lines = rest.ask("GET", f"/v1/runs/{run}/metrics?after=1&every=2&step=make").text.splitlines()
    assert [json.loads(line)["n"] for line in lines] == [2, 4]
    (rest.root / ".recipe/runs" / run / "make.1.host").write_text(
        '{"gpu_utilization_percent": 87.0}\n'
    )  # what the agent writes after 5 seconds
    (line,) = rest.ask("GET", f"/v1/runs/{run}/metrics?of=machine").text.splitlines()
    assert json.loads(line) == {
        "step": "make",
        "attempt": 1,
        "n": 1,
        "values": {"gpu_utilization_percent": 87.0},
    }


def test_a_run_that_waits_is_cancelled_paused_and_resumed_at_once(rest: Rest) -> None:
    late = {"inputs": {"word": "late"}, "not_before": "2099-01-01T00:00:00Z"}
    run = rest.submit(**late)
    for verb, state in (
        ("pause", "PAUSED"),
        ("resume", "QUEUED"),
        ("pause", "PAUSED"),
        ("cancel", "CANCELLED"),
    ):
        found = rest.ask("POST", f"/v1/runs/{run}/{verb}")
        assert found.status_code == 202 and found.json()["event"]["after"] == state, found.text
        assert rest.get(f"/v1/runs/{run}")["state"] == state
    for verb in ("cancel", "pause", "resume"):
        refused(rest.ask("POST", f"/v1/runs/{run}/{verb}"), 409, "final")
    refused(rest.ask("POST", f"/v1/runs/{rest.submit(**late)}/resume"), 409, "not-paused")


def test_runs_and_tokens_are_listed_though_one_is_for_a_time_that_the_calendar_does_not_have(
    rest: Rest,
) -> None:
    late = "9999-12-31T23:59:59-12:00"
    run = rest.ask(
        "POST", "/v1/runs", {"recipe": "hello", "inputs": {"word": "late"}, "not_before": late}
    )
    assert run.status_code == 201 and run.json()["not_before"] == "9999-12-31T23:59:59.000Z"
    assert run.json()["id"] in [row["id"] for row in rest.get("/v1/runs")["runs"]]
    assert (
        rest.ask("POST", "/v1/tokens", {"scope": "read", "expires": late}).status_code == 201
        and rest.get("/v1/tokens")["tokens"]
    )
    assert rest.ask("POST", f"/v1/runs/{run.json()['id']}/cancel").status_code == 202


def test_runs_are_listed_though_a_word_that_was_typed_for_one_is_no_utf_8(rest: Rest) -> None:
    with Workspace.open(rest.root) as ws:
        typed = Request("./hello.yaml", {"word": os.fsdecode(b"caf\xe9")})
        run = submit(ws, typed, Choice(), Settings(), QueueSettings()).id
    row = next(row for row in rest.get("/v1/runs")["runs"] if row["id"] == run)
    assert row["inputs"]["word"] == "caf\N{REPLACEMENT CHARACTER}"
    assert (
        rest.until(run, "COMPLETED", "FAILED")
        and rest.get(f"/v1/runs/{run}")["id"] == run
        and rest.get(f"/v1/runs/{run}/events")["events"]
    )


def test_a_request_that_has_nothing_to_say_needs_no_body(rest: Rest) -> None:
    run = rest.submit(not_before="2099-01-01T00:00:00Z")
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d ''` sends
    for verb, headers in (("pause", {}), ("resume", form), ("cancel", {}), ("retry", {})):
        found = rest.ask("POST", f"/v1/runs/{run}/{verb}", headers=headers)
        assert found.status_code == 202, (verb, found.text)


def test_the_worker_of_a_run_pauses_it_resumes_it_and_cancels_it(rest: Rest) -> None:
    run = begun(rest, "asked")
    found = rest.ask("POST", f"/v1/runs/{run}/pause")
    assert found.status_code == 202 and (
        found.json()["event"]["subject"],
        found.json()["event"]["after"],
    ) == ("request", "pause")
    assert rest.until(run, "PAUSED")["state"] == "PAUSED"
    (rest.root / "begun-asked").unlink()
    until(lambda: rest.ask("POST", f"/v1/runs/{run}/resume").status_code == 202)
    until((rest.root / "begun-asked").exists)
    assert rest.ask("POST", f"/v1/runs/{run}/cancel").status_code == 202
    rest.until(run, "CANCELLED")
    go(rest, "asked")
    unknown = rest.ask("POST", f"/v1/runs/{run}/retry", {"from": "weit"})
    assert unknown.status_code == 404 and 'no step "weit"' in unknown.json()["error"]["message"]
    again = rest.ask("POST", f"/v1/runs/{run}/retry", {"from": "wait"})
    assert again.status_code == 202 and again.json()["run"] != run
    assert rest.until(again.json()["run"], "COMPLETED")["recipe"] == "slow@1"


def test_a_token_is_made_used_and_removed(rest: Rest) -> None:
    run, other = (
        rest.submit(not_before="2099-01-01T00:00:00Z", inputs={"word": word})
        for word in ("mine", "other")
    )
    made = rest.ask("POST", "/v1/tokens", {"scope": "read", "run": run, "name": "pod"})
    assert made.status_code == 201 and made.headers["Cache-Control"] == "no-store"
    secret, id = made.json()["token"], made.json()["id"]
    assert rest.ask("GET", f"/v1/runs/{run}", token=secret).status_code == 200
    refused(rest.ask("GET", f"/v1/runs/{other}", token=secret), 404, "not-found")
    refused(rest.ask("POST", f"/v1/runs/{run}/cancel", token=secret), 403, "forbidden")
    refused(rest.ask("GET", "/v1/runs", token=secret), 403, "forbidden")
    assert secret not in rest.ask("GET", "/v1/tokens").text and id in [
        token["id"] for token in rest.get("/v1/tokens")["tokens"]
    ]
    assert rest.ask("DELETE", f"/v1/tokens/{id}").status_code == 204
    refused(rest.ask("GET", f"/v1/runs/{run}", token=secret), 401, "unauthorized")
    refused(rest.ask("DELETE", f"/v1/tokens/{id}"), 404, "not-found")


def test_figures_are_what_prometheus_reads(rest: Rest) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    rest.until(rest.submit(), "COMPLETED")
    rest.submit(not_before="2099-01-01T00:00:00Z")
    families = {
        family.name: family
        for family in text_string_to_metric_families(rest.ask("GET", "/metrics").text)
    }
    (queued,) = [
        sample.value
        for sample in families["recipe_open_runs"].samples
        if sample.labels == {"state": "QUEUED"}
    ]
    assert (
        queued >= 1
        and {"recipe_workers", "recipe_machines", "recipe_month_cost_usd", "recipe_artifact_bytes"}
        | {"recipe_machines_usd_an_hour", "recipe_network_bytes_per_second"}
        <= families.keys()
    )
    stood = {each.labels["state"]: each.value for each in families["recipe_state_seconds"].samples}
    assert stood["QUEUED"] > 0.0
    sizes = {
        (each.labels["recipe"], each.labels["output"]): each.value
        for each in families["recipe_output_bytes"].samples
    }
    assert sizes["hello@1", "say.o"] > 0


def test_a_plan_names_the_machine_that_a_driver_would_rent(rest: Rest) -> None:
    found = rest.ask("POST", "/v1/plan", {"recipe": "rent", "driver": "loopback"}).json()
    (machine,) = found["machines"]
    assert (machine["step"], machine["driver"], machine["gpus"]) == ("train", "loopback", 1)
    assert machine["usd_an_hour"] == 1.2 and machine["failed"] == ""
    assert machine["usd"] == found["usd_of_machines"]
    assert rest.ask("POST", "/v1/plan", {"recipe": "rent"}).json()["machines"] == []
    refused(rest.ask("POST", "/v1/plan", {"recipe": "rent", "driver": "lopback"}), 404, "not-found")


def test_a_request_may_name_several_drivers_and_its_plan_says_to_which_its_data_may_go(
    rest: Rest,
) -> None:
    body = {"recipe": "rent", "driver": "any:loopback"}
    found = rest.ask("POST", "/v1/plan", body).json()
    assert found["goes_to"] == ["loopback"]
    assert [machine["driver"] for machine in found["machines"]] == ["loopback"]
    assert found["command"].endswith("--driver=any:loopback")
    (shelf,) = rest.get("/v1/offers?driver=any:loopback&gpus=1")["drivers"]
    assert (shelf["driver"], shelf["failed"]) == ("loopback", "") and shelf["offers"]
    run = rest.submit("rent", driver="any:loopback")
    assert rest.get(f"/v1/runs/{run}")["driver"] == "any:loopback"
    rest.ask("POST", f"/v1/runs/{run}/cancel")
    for driver, status in (("any:lopback", 404), ("any:ssh", 422), ("any", 422)):
        told = rest.ask("POST", "/v1/runs", {**body, "driver": driver})
        assert told.status_code == status, (driver, told.text)


def test_machines_that_are_rented_are_listed_with_their_price(rest: Rest) -> None:
    run = rest.submit("rent", driver="loopback")
    leases: list[Any] = []

    def ours() -> list[Any]:
        return [each for each in rest.get("/v1/leases")["leases"] if each["run"] == run]

    until(lambda: leases.extend(ours()) or leases)
    assert (leases[0]["provider"], leases[0]["used"], leases[0]["gpus"]) == (
        "loopback",
        "at-work",
        1,
    )
    assert leases[0]["usd_an_hour"] == 1.2 and leases[0]["state"] in ("ASKED", "COMING", "UP")
    assert 'recipe_machines_usd_an_hour{driver="loopback"' in rest.ask("GET", "/metrics").text
    go(rest, "rent")
    rest.until(run, "COMPLETED")


def test_a_run_shows_its_checkpoints_and_which_is_the_best(rest: Rest) -> None:
    run = rest.submit("keep")
    rest.until(run, "FAILED")
    found = rest.get(f"/v1/runs/{run}/checkpoints")
    assert found["unknown"] == []
    kept = [
        (each["name"], each["number"], each["newest"], each["best"], each["aside"])
        for each in found["checkpoints"]
    ]
    assert kept == [("step-2", 2, False, False, False), ("step-1", 1, True, True, False)]
    torn, whole = found["checkpoints"]
    assert not torn["whole"] and torn["why"] and whole["whole"] and whole["step"] == "train"
    refused(rest.ask("GET", "/v1/runs/none/checkpoints"), 404, "not-found")


def test_offers_are_those_of_the_drivers_that_price(rest: Rest) -> None:
    assert rest.ask("GET", "/v1/offers?driver=local").status_code == 404
    assert rest.ask("GET", "/v1/offers?driver=ssh").status_code == 404
    (shelf,) = rest.get("/v1/offers?driver=loopback")["drivers"]
    assert shelf["driver"] == "loopback" and [
        offer["usd_an_hour"] for offer in shelf["offers"]
    ] == [1.2]


def test_what_the_document_has_a_newcomer_type_works(rest: Rest) -> None:
    section = DOCUMENT.split("## Try it")[1].split("\n## ")[0]
    assert tomllib.loads(section.split("```toml\n")[1].split("```")[0]) == {
        "recipes": {"allow": ["./greet.yaml"]}
    }
    lines = [
        line.removeprefix("$ ")
        for line in section.split("```console\n")[1].split("```")[0].splitlines()
    ]
    lines[0] = lines[0].replace("http://127.0.0.1:8765", rest.url)
    done = subprocess.run(
        ["sh", "-ec", "\n".join(lines)],
        cwd=rest.root,
        env={**os.environ, "TOKEN": rest.token},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (
        (rest.root / "text.txt").read_text() == "hello Ann\n"
        and "\nhello Ann\n" in done.stdout
        and '"after":"COMPLETED"' in done.stdout
    )
    assert done.stdout.endswith('"problems":[]}}') and '"code":"final"' in done.stdout


def test_every_address_stands_in_the_document(rest: Rest) -> None:
    table = DOCUMENT.split("## Endpoints")[1].split("\n## ")[0]
    for path in rest.get("/openapi.json")["paths"]:
        assert (
            path.replace("/api/training", "") in table
            or path.replace("/v1/runs/{run}/", "") in table
            or path in table
        ), path


# -- what platforms call ------------------------------------------------------------------------------------------------------------------------------


def test_a_platform_sees_its_job_through(rest: Rest) -> None:
    assert (
        rest.ask(
            "POST",
            "/api/training/execute",
            {"job_id": "seen", "method": "hello", "config": {"word": "platform"}},
        ).status_code
        == 202
    )
    until(lambda: rest.get("/api/training/status/seen")["status"] == "completed")
    assert rest.get("/api/training/status/seen")["progress"] == 100.0
    assert rest.ask("GET", "/api/training/logs/seen").text == "said platform\n"
    assert {"job_id": "seen", "status": "completed"} in rest.get("/api/training/jobs")["jobs"]


def test_the_server_answers_while_plans_are_computed_that_have_no_end(
    tmp_path: Path,
) -> None:
    root = tmp_path / "space"
    root.mkdir()
    (root / "wide.yaml").write_text(
        "recipe: wide@1\ninputs: {l: {type: list, items: integer}}\n"
        "steps: {s: {matrix: {x: '{{ inputs.l }}', y: '{{ inputs.l }}'}, run: 'true {{ matrix.x }} {{ matrix.y }}'}}\n"
    )
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./wide.yaml"]\n')
    with Rest(root) as server:
        wide = {"recipe": "wide@1", "inputs": {"l": list(range(3000))}}
        ended: list[int] = []

        def plan() -> None:
            with contextlib.suppress(requests.RequestException):
                ended.append(
                    requests.post(
                        f"{server.url}/v1/plan",
                        json=wide,
                        headers={"Authorization": f"Bearer {server.token}"},
                        timeout=120,
                    ).status_code
                )

        plans = [threading.Thread(target=plan) for _ in range(8)]
        for each in plans:
            each.start()
        for _ in range(20):
            assert server.get("/health")["status"] == "ok"
        assert ended == [], "a plan of nine million steps was answered: nothing was shown"
        assert server.end() == 0, "the plans end with their server"
        for each in plans:
            each.join()
        assert 200 not in ended


def test_a_token_goes_to_no_file_that_others_can_read(tmp_path: Path) -> None:
    root, log = tmp_path / "space", tmp_path / "serve.log"
    root.mkdir()
    log.touch(mode=0o644)
    log.chmod(0o644)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*RECIPE, "serve", "--port", "0"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        until(lambda: "serving: " in log.read_text(), seconds=60)
        assert "token: " in log.read_text() and stat.S_IMODE(log.stat().st_mode) == 0o600
    finally:
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert "the token is written to a file; its mode is now 0600" in err


def test_a_page_begins_behind_a_run_that_is_deleted_too(rest: Rest) -> None:
    """The id of one begins with its second."""
    known = [rest.submit(not_before="2099-01-01T00:00:00Z", user="gone") for _ in range(2)]
    pages = [
        rest.get(f"/v1/runs?user=gone&after={after}")["runs"]
        for after in ("20200101-000000-aaaaaa", "20980101-000000-aaaaaa", known[1])
    ]
    assert [[each["id"] for each in page] for page in pages] == [[], known[::-1], known[:1]]
    refused(rest.ask("GET", "/v1/runs?after=1"), 422, "invalid")
