"""Promise: the fake RunPod has the provider's known quirks, and its replies have the form of the provider's own document."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from drivers.fakes.faults import parse
from drivers.fakes.world import Request
from tests.fake_accounts import RunpodAccount
from tests.tools import published_schemas


def test_no_capacity_and_a_wrong_body_are_distinguished_by_their_status_alone() -> None:
    account = RunpodAccount("taken=1")
    none, wrong = account.rent("a", account.gpu()), account.rent("a", account.gpu(), colour="red")
    assert (none.status, wrong.status) == (400, 422)
    assert isinstance(none.body, dict) and isinstance(wrong.body, dict)
    assert none.body.keys() == {"title", "status", "detail"} and wrong.body["errors"] == [
        "colour: is not known"
    ]
    assert none.kind == "application/problem+json"


def test_a_balance_below_an_hour_of_the_pod_rents_nothing() -> None:
    account = RunpodAccount("balance=0.05")
    assert account.rent("a", account.gpu()).status == 402 and account.listing() == []


def test_an_action_that_is_not_legal_now_is_refused() -> None:
    account = RunpodAccount("boot=5")
    pod = account.create("a")
    assert pod and account.pause(pod, running=True).status == 409
    account.wait(10)
    assert account.show(pod)["actions"] == ["stop", "restart", "terminate"]
    assert account.pause(pod, running=False).status == 200
    assert account.show(pod)["actions"] == ["start", "terminate"] and account.show(pod)["cost"] == 0


def test_the_port_of_ssh_comes_after_running_and_is_another_after_a_restart() -> None:
    account = RunpodAccount("boot=5")
    pod = account.create("a")
    assert pod
    account.wait(6)
    assert (
        account.show(pod)["status"] == "RUNNING"
        and account.show(pod)["ssh"]["direct"] is None
        and account.show(pod)["ssh"]["proxy"]
    )
    account.wait(10)
    first = account.show(pod)["ssh"]["direct"]["port"]
    assert account.call("POST", f"/v2/pods/{pod}/action", {"action": "restart"}).status == 200
    assert account.show(pod)["ssh"]["direct"] is None
    account.wait(60)
    assert account.show(pod)["ssh"]["direct"]["port"] != first


def test_a_log_goes_on_after_the_last_line_that_was_read() -> None:
    account = RunpodAccount("boot=5")
    pod = account.create("a")
    account.wait(10)

    def lines(headers: dict[str, str]) -> list[str]:
        reply = account.world.handle(
            Request("GET", f"/v2/pods/{pod}/logs", "", {"authorization": "Bearer k", **headers}),
            account.now,
        )
        assert reply.kind == "text/event-stream"
        return str(reply.body).split("\n\n")[:-1]

    whole = lines({})
    assert [json.loads(line.split("data: ")[1])["line"] for line in whole] == [
        "pulling pytorch/pytorch",
        "start container",
        "ready",
    ]
    assert lines({"last-event-id": whole[0].split("\n")[0].removeprefix("id: ")}) == whole[1:]


def test_a_pod_that_starts_again_may_have_no_gpus() -> None:
    account = RunpodAccount("boot=5")
    pod = account.create("a")
    assert pod
    account.wait(10)
    account.pause(pod, running=False)
    account.world.faults += parse("fewer=1")
    account.pause(pod, running=True)
    account.wait(60)
    shown = account.show(pod)
    assert shown["status"] == "RUNNING" and "gpu" not in shown and shown["runtime"]["gpus"] == []


def test_who_asks_too_often_learns_when_to_ask_again() -> None:
    account = RunpodAccount("pace=1")
    account.listing()
    reply = account.call("GET", "/v2/pods")
    assert (
        reply.status == 429
        and reply.headers["retry-after"] == "1"
        and "r=0" in reply.headers["ratelimit"]
    )


def test_the_volume_of_a_stopped_pod_costs_twice_what_it_costs_a_running_one() -> None:
    account = RunpodAccount("boot=5")
    made = account.data(
        account.rent(
            "a", account.gpu(), disk=10, mounts={"persistent": {"size": 100, "path": "/workspace"}}
        )
    )
    account.wait(10)
    pod = account.world.account.machines[made["id"]]
    running = pod.rates["disk"]
    account.pause(made["id"], running=False)
    assert running == pytest.approx(110 * 0.1 / 720) and pod.rates == {
        "disk": pytest.approx(100 * 0.2 / 720)
    }


def test_putting_keys_replaces_all_of_them() -> None:
    account = RunpodAccount()
    for key in ("ssh-ed25519 AAAA one", "ssh-ed25519 BBBB two"):
        assert account.call("PUT", "/v2/account/ssh-keys", {"keys": [key]}).status == 200
    assert account.data(account.call("GET", "/v2/account/ssh-keys")) == {
        "keys": ["ssh-ed25519 BBBB two"]
    }
    assert account.call("PUT", "/v2/account/ssh-keys", {"keys": ["no key"]}).status == 422


def test_an_empty_account_loses_pods_without_a_network_volume() -> None:
    account = RunpodAccount("boot=5")
    bare = account.create("a")
    kept = account.data(
        account.rent(
            "b", account.gpu(), mounts={"network": [{"volumeId": "v", "path": "/workspace"}]}
        )
    )["id"]
    account.world.account.credit = 0.01
    account.wait(7200)
    assert bare not in account.listing() and account.show(kept)["status"] == "EXITED"


def test_every_reply_has_the_form_of_the_providers_document() -> None:
    document = json.loads(
        (published_schemas() / "runpod_v2_openapi_2026-08-20.json").read_text("utf-8")
    )
    account = RunpodAccount("boot=5")
    for steps in ("", "stop", "start", "restart", "terminate"):
        if not steps:
            pod = account.create("a")
            account.rent(
                "c",
                account.gpu(),
                mounts={"persistent": {"size": 20, "path": "/w"}},
                env={"A": "b"},
                dataCenterIds=["EU-RO-1"],
            )
            account.call(
                "POST",
                "/v2/pods",
                {"name": "cpu", "image": "x", "cpu": {"id": "cpu3c", "vcpuCount": 4}},
            )
        else:
            account.call("POST", f"/v2/pods/{pod}/action", {"action": steps})
        for path in (
            f"/v2/pods/{pod}",
            "/v2/pods",
            "/v2/billing/pods",
            "/v2/catalog/gpus",
            "/v2/catalog/gpus/NVIDIA H200",
            "/v2/catalog/datacenters",
        ):
            account.call("GET", path)
            account.wait(15)
    account.call("GET", "/v2/catalog/gpus", include="AVAILABILITY")
    account.call("PATCH", f"/v2/pods/{account.listing()[0]}", {"name": "other", "locked": True})
    account.call("PUT", "/v2/account/ssh-keys", {"keys": ["ssh-ed25519 AAAA x"]})
    account.call("GET", "/v2/account/ssh-keys")
    account.call("POST", "/v2/pods", {})
    account.call("GET", "/v2/pods", key=False)
    for method, path, reply in account.replies:
        jsonschema.validate(
            reply.body, shape(document, method, path, reply.status), jsonschema.Draft202012Validator
        ) if reply.status != 204 else None
    assert {reply.status for _, _, reply in account.replies} >= {200, 201, 204, 401, 404, 422}


def shape(document: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    """The JSON Schema of a reply, with the components that it refers to."""
    operation = next(
        methods[method.lower()]
        for name, methods in document["paths"].items()
        if method.lower() in methods and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", name), path)
    )
    answer = operation["responses"].get(str(status), operation["responses"]["default"])
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    [content] = answer["content"].values()
    return {**content["schema"], "components": document["components"]}
