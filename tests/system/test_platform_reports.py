"""What a training platform hears of its jobs: the requests of fixtures/server, byte for byte where they are data, and nothing without an address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from runner.errors import CannotRun
from runner.reports.delivery import deliver
from runner.reports.sealing import seal, unseal
from runner.storage.records.letters import moment, point_of
from runner.storage.records.runs import RunRow, StepRow
from runner.storage.workspace import Workspace
from tests.contract.store_contract import Move
from tests.servers import platform_examples
from tests.servers.platform_examples import Heard
from tests.servers.platforms import TOKEN, Platform, wrong
from tests.servers.receiver import Got, Receiver
from tests.servers.rest import Rest
from tests.support import Space, until

FIXTURES = Path(__file__).parents[2] / "fixtures" / "server"
BEGAN = 1_795_000_000.0
TOLD = '{"step": 60, "total": 60, "values": {"loss": 1.25}}'
TRAINED = """\
recipe: trained@1
inputs: {max_steps: {type: integer, default: 3}}
steps:
  train:
    run: 'for n in 1 2 3; do echo "{\\"step\\": $n, \\"loss\\": 0.$n, \\"lr\\": 0.001, \\"memory_gb\\": 7.5}" >> $RECIPE_METRICS; echo at $n; done; echo {{ inputs.max_steps }} > {{ outputs.o }}'
    metrics: true
    outputs: {o: out.txt}
"""


def example(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def platform(receiver: Receiver, **more: str) -> dict[str, str]:
    """The environment of a pod."""
    url = receiver.url
    of_job = {
        "JOB_ID": "job-1",
        "JOB_TOKEN": "token-of-the-job",
        "USER_ID": "ann",
        "MODEL_NAME": "acme/tiny",
    }
    return {
        "BACKEND_URL": url,
        "ALERT_API_URL": f"{url}/api/alerts/trigger",
        "INTERNAL_API_KEY": "internal",
        **of_job,
        **more,
    }


def ended(ws: Workspace, state: str) -> None:
    """Store a run that trained, and its end."""
    runs = ws.store.runs
    fence = runs.submit(RunRow("r1", "tool@1", "plan", {}, str(ws.root), created=BEGAN), "w").fence
    trained = StepRow("r1", "train", "DONE", numbers=TOLD)
    move = Move("run", "r1", "QUEUED", "ACTIVE")
    runs.group("r1", fence, [move], steps=[trained], run_state=("ACTIVE", ""))
    runs.group("r1", fence, [Move("run", "r1", "ACTIVE", state)], run_state=(state, ""))


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Heard]:
    """What the platforms heard of a run that ended each way."""
    root = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECIPE_LEDGER", str(root / "ledger.db"))
        return platform_examples.runs(root)


def test_the_bodies_of_a_real_run_are_the_examples(heard: dict[str, Heard]) -> None:
    found = platform_examples.examples(heard)
    assert found == {name: example(name) for name in found}, (
        "run python -m tests.servers.platform_examples"
    )


@pytest.mark.parametrize(
    "path",
    [
        path
        for kind in ("alert", "status", "metrics", "logs")
        for path in sorted(FIXTURES.glob(f"{kind}*.json"))
    ],
    ids=lambda path: path.stem,
)
def test_an_example_of_what_is_sent_is_what_the_schema_says(path: Path) -> None:
    kind = path.stem.partition("_")[0]
    body = json.loads(path.read_text())
    assert wrong(kind, body) == ""
    assert wrong(kind, body | {"more": 1}), "a strict platform takes nothing else"
    for name in body.keys() - {"model_name", "loss", "progress", "current_step", "total_steps"}:
        assert wrong(kind, {key: body[key] for key in body if key != name}), name


def test_platforms_that_take_nothing_but_their_contract_take_everything(
    heard: dict[str, Heard],
) -> None:
    for ends, (service, backend) in heard.items():
        assert (service.refused, backend.refused) == ([], []), ends
        assert service.bodies("alert") and service.points() and backend.bodies("logs"), ends


def test_the_numbers_of_a_job_are_those_of_its_training(heard: dict[str, Heard]) -> None:
    service, backend = heard["completed"]
    points = service.points()
    assert [(point["step"], point.get("train_loss")) for point in points] == [
        *((n, 1.25) for n in range(1, 61)),
        (60, None),
    ]
    assert points[-1]["perplexity"] == 4.48, "the evaluation counts its own steps"
    assert not any("gpu_memory_allocated_gb" in point for point in points), "it is main memory"
    lines = [
        (line["step"], line["message"]) for body in backend.bodies("logs") for line in body["logs"]
    ]
    assert lines == [("train", "epoch 1 of 2"), ("evaluate", "done")]
    first, last = service.bodies("alert")
    assert first["type"] == "job_started" and last["loss"] == 1.25
    _queued, began, ended = map(_milliseconds, backend.bodies("status"))
    assert 0 < last["duration"] <= ended - began - 300, "the evaluation took 300"


def _milliseconds(point: Mapping[str, str]) -> float:
    return 1000 * datetime.fromisoformat(point["timestamp"]).timestamp()


def test_a_status_goes_to_the_job_and_an_alert_has_the_key_of_the_backend(tmp_path: Path) -> None:
    with Receiver() as receiver, Workspace.open(tmp_path, environ=platform(receiver)) as ws:
        ended(ws, "COMPLETED")
        deliver(ws.root, ws.environ)
        statuses = by_path(receiver.got, "/status")
        alerts = by_path(receiver.got, "/api/alerts/trigger")
    assert {(each.method, each.path) for each in statuses} == {
        ("PATCH", "/api/training/local/job-1/status")
    }
    assert {each.headers["authorization"] for each in statuses} == {"Bearer token-of-the-job"}
    assert [each.json["status"] for each in statuses] == ["queued", "running", "completed"]
    assert [(each.method, each.headers["x-api-key"]) for each in alerts] == [
        ("POST", "internal")
    ] * 2


def by_path(got: list[Got], end: str) -> list[Got]:
    return [each for each in got if each.path.endswith(end)]


def test_metrics_go_the_one_way_that_is_set_with_the_fields_of_the_contract(tmp_path: Path) -> None:
    told: Mapping[str, object] = {
        "step": 30, "epoch": 0.5, "loss": 1.25, "eval_loss": 1.5, "lr": 0.0002, "grad_norm": 0.75, "samples_per_second": 44.5, "gpu_memory_allocated_gb": 7.5,
        "gpu_utilization_percent": 93.0, "perplexity": 4.48, "timestamp": BEGAN, "time_step": 0.3, "gpu": "A100",
    }  # fmt: skip
    point = point_of(told, 0.0)
    assert point is not None
    ways: list[tuple[dict[str, str], str, str]] = [
        ({}, "PUT", "/api/training/local/job-1/metrics"),
        ({"METRICS_API_URL": "/api/training/local/metrics"}, "POST", "/api/training/local/metrics"),
    ]
    for more, method, path in ways:
        with (
            Receiver() as receiver,
            Workspace.open(
                tmp_path,
                environ=platform(receiver, **{k: receiver.url + v for k, v in more.items()}),
            ) as ws,
        ):
            assert ws.letters is not None
            ws.store.runs.outbox.post(
                "r1", ws.letters.metrics(RunRow("r1", "tool@1", "", {}, ""), [point], "1")
            )
            deliver(ws.root, ws.environ)
            (got,) = receiver.got
        assert (got.method, got.path, got.headers["authorization"], got.json) == (
            method,
            path,
            "Bearer token-of-the-job",
            example("metrics"),
        )


def test_a_point_has_numbers_alone_and_a_step() -> None:
    assert (
        point_of({"step": 1, "loss": float("nan")}, 0.0) is None
        and point_of({"loss": 1.0}, 0.0) is None
    )
    assert point_of({"step": 1, "loss": 0.5, "note": "x", "grad_norm": True}, 0.0) == {
        "step": 1,
        "train_loss": 0.5,
        "timestamp": "1970-01-01T00:00:00.000Z",
    }


@pytest.mark.parametrize("when", [BEGAN, BEGAN * 1e3, BEGAN * 1e6, BEGAN * 1e9, int(BEGAN) * 1000])
def test_the_time_of_a_point_is_read_in_whatever_part_of_a_second_it_is_counted(
    when: float,
) -> None:
    point = point_of({"step": 1, "loss": 0.5, "timestamp": when}, 0.0)
    assert point is not None and point["timestamp"] == moment(BEGAN)


@pytest.mark.parametrize("when", [float("nan"), float("inf"), -1e300, 10**400, True, None, [1]])
def test_a_point_whose_time_is_none_has_that_of_its_arrival(when: object) -> None:
    point = point_of({"step": 1, "loss": 0.5, "timestamp": when}, BEGAN)
    assert point is not None and point["timestamp"] == moment(BEGAN)


@pytest.mark.parametrize("missing", ["JOB_ID", "USER_ID", "ALERT_API_URL"])
def test_without_an_address_a_job_or_a_user_there_is_no_alert(tmp_path: Path, missing: str) -> None:
    with Receiver() as receiver:
        environ = {name: value for name, value in platform(receiver).items() if name != missing}
        with Workspace.open(tmp_path, environ=environ) as ws:
            ended(ws, "COMPLETED")
            kinds = {each.receiver.split()[0] for each in ws.store.runs.outbox.list_letters()}
    assert kinds == (set() if missing == "JOB_ID" else {"status"})


def test_a_token_is_sealed_under_the_key_file_and_opens_with_no_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode() * 16)
    one, two = ({"RECIPE_KEY_FILE": str(tmp_path / name)} for name in ("one", "two"))
    sealed = seal("token", "of a job", one)
    assert (
        "token" not in sealed
        and sealed != seal("token", "of a job", one)
        and unseal(sealed, "of a job", one) == "token"
    )
    for purpose, environ in (("of a job", two), ("another", one), ("of a job", {})):
        with pytest.raises(CannotRun):
            unseal(sealed, purpose, environ)
    with pytest.raises(CannotRun):
        unseal(sealed[:-8] + "AAAAAAA=", "of a job", one)


def test_a_platforms_job_is_reported_with_its_own_token_which_is_nowhere_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "served"
    root.mkdir()
    (root / "trained.yaml").write_text(TRAINED)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./trained.yaml"]\n')
    key = tmp_path / "key"
    config = {"max_steps": 3, "logging_steps": 2, "output_dir": "/out"}
    job = {
        "job_id": "j7",
        "user_id": "bob",
        "recipe": "trained",
        "config": config,
        "job_token": TOKEN,
    }
    with Platform.backend() as receiver:
        monkeypatch.setenv("BACKEND_URL", receiver.url)
        monkeypatch.setenv("RECIPE_KEY_FILE", str(key))
        rest = Rest(root, "--with-worker")
        try:
            assert (
                rest.ask("POST", "/api/training/execute", job)
                .json()["error"]["fix"]
                .startswith("openssl rand")
            )
            key.write_bytes(b"k" * 32)
            assert [
                rest.ask("POST", "/api/training/execute", job).status_code for _ in range(2)
            ] == [202, 202]
            until(
                lambda: (
                    [each.json["status"] for each in by_path(receiver.got, "/status")][-1:]
                    == ["completed"]
                )
            )
            until(lambda: len(receiver.points()) == 2)
            private = {"recipe": "trained", "webhooks": [{"url": "https://127.0.0.1/x"}]}
            assert (
                rest.ask("POST", "/v1/runs", private)
                .json()["error"]["message"]
                .endswith("resolves to a private address")
            )
            public = {
                "recipe": "trained",
                "webhooks": [
                    {
                        "url": "https://8.8.8.8:9/x",
                        "secret": "whsec_" + "A" * 32,
                        "events": ["run.none"],
                    }
                ],
            }
            first = rest.ask("POST", "/v1/runs", public, headers={"Idempotency-Key": "k"})
            assert (
                first.status_code == 201
                and rest.ask(
                    "POST", "/v1/runs", public, headers={"Idempotency-Key": "k"}
                ).status_code
                == 200
            )
        finally:
            rest.process.terminate()
            rest.process.wait(40)
        stored = (root / ".recipe" / "recipe.db").read_bytes()
    assert receiver.refused == [] and all("/j7/" in each.path for each in receiver.got)
    assert [point["step"] for point in receiver.points()] == [2, 3], (
        "each second step, and the last"
    )
    assert TOKEN.encode() not in stored and b"AAAAAAAAAAAA" not in stored


@pytest.mark.parametrize("job", ["job-1", ""])
def test_the_log_is_json_with_an_event_for_each_state_of_a_run_away_from_here(
    tmp_path: Path, job: str
) -> None:
    space = Space(tmp_path)
    (tmp_path / "one.yaml").write_text(
        "recipe: one@1\nsteps: {a: {run: 'echo x > {{ outputs.o }}', outputs: {o: a.txt}, resources: {cpus: 1}}}\n"
    )
    (tmp_path / "recipe.toml").write_text("[drivers.loopback]\nprice = 0.1\n")
    env = {"RECIPE_LOG": f"info:{tmp_path}/log", "JOB_ID": job}
    code, _, said = space.command(
        "run", "./one.yaml", "-q", "-y", "--driver", "loopback", "--everything-there", env=env
    )
    assert code == 0, said
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [each for each in lines if "event" in each]
    assert {each["event"].rpartition(".")[0] for each in events} == {"training.remote"}
    words = [each["event"].rpartition(".")[2] for each in events]
    assert words == [
        "active", "asked", "coming", "up", "transferring_data", "executing", "fetching_results", "releasing", "gone", "completed",
    ]  # fmt: skip
    assert {each["job"] for each in events} == {job or each["run"] for each in events}
    assert {each["provider"] for each in events} == {"loopback"}
    (instance,) = {each["instanceId"] for each in events[2:]}
    assert instance and [each.get("step") for each in events[4:7]] == ["a"] * 3
    assert events[0].keys() == {
        "event", "at", "run", "job", "provider", "instanceId", "level", "logger",
    }  # fmt: skip


def test_a_token_that_no_header_can_have_is_not_in_what_is_stored_of_the_failure(
    tmp_path: Path,
) -> None:
    with (
        Receiver() as receiver,
        Workspace.open(
            tmp_path,
            environ=platform(
                receiver, JOB_TOKEN="canary\nof-the-job", INTERNAL_API_KEY="internal\n"
            ),
        ) as ws,
    ):
        ended(ws, "COMPLETED")
        deliver(ws.root, ws.environ)
        first = ws.store.runs.outbox.list_letters()[0]
        assert first.tries == 1 and first.reason and "canary" not in first.reason
        assert {each.headers["x-api-key"] for each in receiver.got} == {
            "internal"
        }  # the end of a line that a file left
