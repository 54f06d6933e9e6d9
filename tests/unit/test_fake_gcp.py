"""Promise: the fake Compute Engine has the provider's known quirks, and its replies have the form of Google's discovery document."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import jsonschema
import pytest

from drivers.fakes.world import Request
from tests.fake_accounts import GcpAccount
from tests.tools import client

ID = str(UUID(int=7))


def test_a_zone_without_room_says_so_in_the_operation_and_names_zones_that_have_some() -> None:
    account = GcpAccount("taken@create=once")
    reply = account.insert(account.instance("a"))
    assert reply.status == 200
    account.wait(10)
    operation = account.operation(reply)
    [error] = operation["error"]["errors"]
    assert operation["status"] == "DONE" and error["code"].startswith(
        "ZONE_RESOURCE_POOL_EXHAUSTED"
    )
    zone = error["errorDetails"][0]["errorInfo"]["metadatas"]["zonesAvailable"].split(",")[0]
    assert zone.startswith("us-central1-") and zone != account.zone
    assert account.show("a") == {} and account.insert(account.instance("a"), zone).status == 200


def test_the_same_request_id_is_the_same_operation_also_after_a_lost_reply() -> None:
    account = GcpAccount("lost@create=once")
    assert account.insert(account.instance("a"), requestId=ID).lost
    again = account.insert(account.instance("a"), requestId=ID)
    assert again.status == 200 and account.listing() == ["a"]
    assert (
        account.data(again)["name"]
        == account.data(account.insert(account.instance("a"), requestId=ID))["name"]
    )
    assert account.insert(account.instance("a")).status == 409
    assert account.insert(account.instance("b"), requestId="no-uuid").status == 400


def test_a_wait_may_return_before_the_operation_is_done() -> None:
    account = GcpAccount()
    reply = account.insert(account.instance("a"))
    account.wait(2)
    assert account.operation(reply)["status"] == "RUNNING" and account.replies[-1][2].hold == 2
    account.wait(2)
    assert account.operation(reply)["status"] == "DONE" and "error" not in account.operation(reply)


def test_metadata_is_set_with_the_fingerprint_that_was_read_last() -> None:
    account = GcpAccount()
    account.create("a")
    metadata = account.show("a")["metadata"]
    body = {"fingerprint": metadata["fingerprint"], "items": [{"key": "k", "value": "v"}]}
    assert account.of("a", "setMetadata", body=body).status == 200
    assert account.of("a", "setMetadata", body=body).status == 412
    assert account.show("a")["metadata"]["items"] == body["items"]


def test_a_listing_that_does_not_reach_a_zone_names_it() -> None:
    account = GcpAccount("unreachable=1")
    account.create("a")
    body = account.data(account.call("GET", f"{account.project}/aggregated/instances"))
    assert (
        body["unreachables"] == [f"zones/{account.zone}"]
        and f"zones/{account.zone}" not in body["items"]
    )
    account.world.faults.clear()
    assert account.listing() == ["a"]


def test_terminated_is_stopped_and_billed_and_what_was_deleted_is_not_found() -> None:
    account = GcpAccount("boot=5")
    account.create("a")
    account.wait(10)
    account.pause("a", running=False)
    account.wait(10)
    assert account.show("a")["status"] == "TERMINATED"
    before = account.billed()
    account.wait(3600)
    assert account.billed() - before == pytest.approx(50 * 0.1 / 720)
    account.destroy("a")
    account.wait(10)
    assert account.of("a", method="GET").status == 404


def test_a_preemption_has_a_notice_and_is_distinguished_from_a_stop_by_its_operation() -> None:
    account = GcpAccount("boot=5")
    account.insert(
        account.gpu_instance("a", provisioningModel="SPOT", instanceTerminationAction="STOP")
    )
    account.wait(10)
    metadata = f"/_machine/{account.show('a')['id']}/computeMetadata/v1/instance"

    def noticed() -> object:
        query = "wait_for_change=true"
        return account.world.handle(
            Request("GET", f"{metadata}/preempted", query, {"metadata-flavor": "Google"}),
            account.now,
        ).body

    assert noticed() == "FALSE"
    account.of("a", "simulateMaintenanceEvent")
    assert noticed() == "TRUE"
    account.wait(29)
    assert account.show("a")["status"] == "RUNNING", "thirty seconds are left to save"
    account.wait(1)
    assert account.show("a")["status"] == "TERMINATED" and "preempted" in account.events()
    path = f"{account.project}/zones/{account.zone}/operations"
    found = account.data(
        account.call("GET", path, filter='operationType="compute.instances.preempted"')
    )["items"]
    assert [row["targetLink"].rpartition("/")[2] for row in found] == ["a"]


@pytest.mark.parametrize(("action", "left"), [("DELETE", []), ("STOP", ["a"])])
def test_the_provider_ends_what_has_run_for_long_enough(action: str, left: list[str]) -> None:
    account = GcpAccount("boot=5")
    account.insert(
        account.gpu_instance(
            "a", maxRunDuration={"seconds": "3600"}, instanceTerminationAction=action
        )
    )
    account.wait(5 + 3599)
    assert account.show("a")["status"] == "RUNNING"
    account.wait(2)
    assert account.listing() == left
    assert account.world.account.alive() == [] or account.show("a")["status"] == "TERMINATED"


def test_a_quota_is_asked_before_and_kept() -> None:
    account = GcpAccount("quota=1")
    assert account.insert(account.gpu_instance("a")).status == 200
    refused = account.insert(account.gpu_instance("b"))
    assert (
        refused.status == 403
        and isinstance(refused.body, dict)
        and refused.body["error"]["errors"][0]["reason"] == "quotaExceeded"
    )
    quotas = account.data(account.call("GET", f"{account.project}/regions/us-central1"))["quotas"]
    assert {row["metric"]: (row["usage"], row["limit"]) for row in quotas}["NVIDIA_L4_GPUS"] == (
        1.0,
        1.0,
    )
    assert account.insert(account.gpu_instance("c", provisioningModel="SPOT")).status == 200, (
        "spot has a quota of its own"
    )


def test_a_new_project_has_no_quota_for_any_gpu() -> None:
    account = GcpAccount("quota=0")
    [quota] = account.data(account.call("GET", account.project))["quotas"]
    assert quota == {"metric": "GPUS_ALL_REGIONS", "limit": 0.0, "usage": 0.0}
    assert account.insert(account.gpu_instance("a")).status == 403


def test_an_instance_attests_its_host_key_where_its_metadata_lets_it() -> None:
    account = GcpAccount("boot=5")
    allowed = {"items": [{"key": "enable-guest-attributes", "value": "TRUE"}]}
    account.insert(account.instance("a", metadata=allowed))
    account.insert(account.instance("b"))
    for name, status in (("a", 200), ("b", 403)):
        where = f"/_machine/{account.show(name)['id']}/computeMetadata/v1/instance/guest-attributes/hostkeys/ssh-ed25519"
        assert (
            account.world.handle(
                Request("PUT", where, "", {"metadata-flavor": "Google"}, b"AAAA"), account.now
            ).status
            == status
        )
    path = f"{account.project}/zones/{account.zone}/instances/a/getGuestAttributes"
    found = account.data(account.call("GET", path, queryPath="hostkeys/"))
    assert found["queryValue"]["items"] == [
        {"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}
    ]
    assert account.call("GET", path.replace("/a/", "/b/"), queryPath="hostkeys/").status == 404


def test_a_filter_finds_a_label_and_one_that_cannot_be_read_is_refused() -> None:
    account = GcpAccount()
    account.insert(account.instance("a", labels={"recipe": "x"}))
    account.insert(account.instance("b", labels={"recipe": "y"}))
    account.create("c")
    assert [row["name"] for page in account.pages(filter="labels.recipe=x") for row in page] == [
        "a"
    ]
    assert [row["name"] for page in account.pages(filter="labels.recipe:*") for row in page] == [
        "a",
        "b",
    ]
    assert (
        account.call("GET", f"{account.project}/aggregated/instances", filter="what?").status == 400
    )


def test_what_a_gpu_needs_is_checked() -> None:
    account = GcpAccount()
    kinds = f"zones/{account.zone}/machineTypes/g2-standard-4"
    assert account.insert(account.instance("a", machineType=kinds)).status == 400
    assert account.insert(account.instance("A")).status == 400
    assert account.insert(account.gpu_instance("a", maxRunDuration={"seconds": "60"})).status == 400


def test_every_reply_has_the_form_of_the_discovery_document() -> None:
    [path] = (
        client("gcp")
        .parents[1]
        .glob("lib/python*/site-packages/googleapiclient/discovery_cache/documents/compute.v1.json")
    )
    document = json.loads(path.read_text("utf-8"))
    account = GcpAccount("boot=5,taken@start=once")
    account.insert(
        account.gpu_instance("a", provisioningModel="SPOT", instanceTerminationAction="STOP"),
        requestId=ID,
    )
    for seconds, action in (
        (1, ""),
        (20, "stop"),
        (20, "start"),
        (10, "simulateMaintenanceEvent"),
        (20, "setMetadata"),
        (5, "setLabels"),
    ):
        account.wait(seconds)
        shown = account.show("a")
        body = {
            "fingerprint": shown["metadata"]["fingerprint"],
            "items": [],
            "labelFingerprint": shown["labelFingerprint"],
            "labels": {"a": "b"},
        }
        if action:
            account.operation(account.of("a", action, body=body))
            account.wait(10)
            account.call("GET", f"{account.project}/zones/{account.zone}/operations")
    account.listing()
    for path_of in ("acceleratorTypes", "machineTypes", "instances", "instances/a/serialPort"):
        account.call("GET", f"{account.project}/zones/{account.zone}/{path_of}")
    account.call("GET", f"{account.project}/regions/us-central1")
    account.call("GET", account.project)
    account.call("GET", f"{account.project}/aggregated/acceleratorTypes")
    account.world.account.machines[account.show("a")["id"]].attributes[
        "hostkeys", "ssh-ed25519"
    ] = "AAAA"
    account.call(
        "GET",
        f"{account.project}/zones/{account.zone}/instances/a/getGuestAttributes",
        queryPath="hostkeys/",
    )
    account.call(
        "POST",
        f"{account.project}/global/firewalls",
        {"name": "ssh", "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}]},
    )
    account.call("GET", f"{account.project}/global/firewalls/ssh")
    account.destroy("a")
    assert all(reply.status == 200 for _, _, reply in account.replies)
    schemas = {name: strict(schema) for name, schema in document["schemas"].items()}
    kinds = methods(document["resources"])
    checked = set()
    for method, address, reply in account.replies:
        name = next(
            kind
            for verb, pattern, kind in kinds
            if verb == method and pattern.fullmatch(address.removeprefix("/compute/v1/"))
        )
        jsonschema.validate(
            reply.body,
            {"$ref": f"#/schemas/{name}", "schemas": schemas},
            jsonschema.Draft202012Validator,
        )
        checked.add(name)
    assert checked >= {
        "Operation",
        "Instance",
        "InstanceAggregatedList",
        "OperationList",
        "Region",
        "Firewall",
        "MachineTypeList",
        "SerialPortOutput",
        "Project",
        "GuestAttributes",
        "AcceleratorTypeAggregatedList",
    }


def methods(resources: dict[str, Any]) -> list[tuple[str, re.Pattern[str], str]]:
    """HTTP method, path and schema of the reply of each method."""
    return [
        (
            method["httpMethod"],
            re.compile(re.sub(r"\{\w+\}", "[^/]+", method["path"])),
            method["response"]["$ref"],
        )
        for resource in resources.values()
        for method in resource.get("methods", {}).values()
        if "response" in method
    ]


def strict(part: Any) -> Any:
    """A schema of a discovery document as JSON Schema; a field that it does not know is an error."""
    if isinstance(part, list):
        return [strict(each) for each in part]
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("$ref"), str):
        return {"$ref": f"#/schemas/{part['$ref']}"}
    made = {
        name: strict(part[name])
        for name in ("type", "items", "enum", "additionalProperties")
        if name in part
    }
    if "properties" in part:
        made |= {
            "properties": {name: strict(value) for name, value in part["properties"].items()},
            "additionalProperties": False,
        }
    return made
