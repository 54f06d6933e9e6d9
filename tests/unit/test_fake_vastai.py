"""Promise: the fake Vast.ai has the provider's known quirks, and its replies have the form of the provider's own documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.fake_accounts import VastaiAccount
from tests.tools import published_schemas


def test_a_create_that_errs_may_have_made_an_instance() -> None:
    account = VastaiAccount()
    offer = account.offers(type="bid")[0]
    reply = account.rent(offer["id"], price=offer["min_bid"] / 2)
    assert (
        reply.status == 400
        and isinstance(reply.body, dict)
        and reply.body["error"] == "invalid_price"
    )
    machine = str(reply.body["new_contract"])
    found = account.show(machine)
    assert (
        found
        and (found["cur_state"], found["intended_status"], found["next_state"]) == ("stopped",) * 3
    )
    account.wait(3600)
    assert account.billed(machine) > 0, "its disk is billed"


def test_an_outbid_instance_is_stopped_in_all_three_words_and_its_disk_is_billed() -> None:
    account = VastaiAccount("preempted=60,boot=5")
    offer = account.offers(type="bid")[0]
    body = account.data(account.rent(offer["id"], price=offer["min_bid"] * 1.1))
    account.wait(3600)
    found = account.show(str(body["new_contract"]))
    assert found and (
        found["cur_state"],
        found["intended_status"],
        found["next_state"],
        found["actual_status"],
    ) == ("stopped",) * 3 + ("exited",)
    before = account.billed()
    account.wait(3600)
    assert account.billed() - before == pytest.approx(
        sum(machine.rates["disk"] for machine in account.world.account.alive())
    )


def test_an_instance_comes_up_by_steps() -> None:
    account = VastaiAccount()
    machine = account.create("a")
    assert machine
    seen = []
    for seconds in (0, 5, 60):
        account.wait(seconds)
        found = account.show(machine)
        assert found
        seen.append((found["actual_status"], bool(found["ports"])))
    assert seen == [(None, False), ("loading", False), ("running", True)]
    assert found["public_ipaddr"].endswith("\n"), "it carries white space"
    assert [
        entry.what
        for entry in account.world.account.settle()
        if entry.event == "billed" and entry.at - account.world.account.ledger[0].at <= 40
    ] == ["disk"]


def test_an_instance_that_is_gone_is_null_and_the_old_listing_is_gone() -> None:
    account = VastaiAccount()
    assert account.show("12345") is None
    assert account.call("GET", "/api/v0/instances/").status == 410
    assert account.call("DELETE", "/api/v0/instances/12345/", {}).body == {
        "success": False, "error": "no_such_instance", "msg": "Instance 12345 not found."
    }  # fmt: skip


def test_too_many_requests_are_refused_in_plain_text_too() -> None:
    account = VastaiAccount("pace=1")
    account.offers()
    bodies = [account.call("POST", "/api/v0/bundles/", {}) for _ in range(4)]
    assert {reply.status for reply in bodies} == {429}
    assert {type(reply.body) for reply in bodies} == {str, dict}
    account.wait(5)
    assert account.offers()


def test_the_daily_quota_of_searches_ends_at_midnight() -> None:
    account = VastaiAccount("quota=2")
    account.offers()
    account.offers()
    reply = account.call("POST", "/api/v0/bundles/", {})
    assert (
        reply.status == 429
        and isinstance(reply.body, dict)
        and reply.body["error"] == "search_quota_exceeded"
    )
    account.wait(float(reply.headers["x-ratelimit-reset"]) - account.now)
    assert account.offers()


def test_logs_are_not_ready_at_once() -> None:
    account = VastaiAccount("boot=1")
    machine = account.create("a")
    account.wait(5)
    address = account.data(account.call("PUT", f"/api/v0/instances/request_logs/{machine}/", {}))[
        "result_url"
    ]
    path = re.sub(r"^http://[^/]+", "", address)
    assert account.call("GET", path, key=False).status == 403
    account.wait(1)
    assert "running" in str(account.call("GET", path, key=False).body)


def test_a_page_that_begins_at_a_number_of_rows_loses_one_when_a_row_vanishes() -> None:
    for faults, lost in (("", 0), ("restless=1", 1)):
        account = VastaiAccount(faults)
        made = [account.create(f"job-{number}") for number in range(6)]
        pages = account.pages(2)
        seen = [row["id"] for row in next(pages)]
        account.destroy(str(made[0]))
        seen += [row["id"] for page in pages for row in page]
        assert len(made) - len(seen) == lost


def test_prices_move_between_search_and_create_and_fewer_gpus_come_than_were_sold() -> None:
    account = VastaiAccount("dearer@create=1,fewer=1")
    offer = account.offers(num_gpus={"eq": 4})[0]
    found = account.show(str(account.data(account.rent(offer["id"]))["new_contract"]))
    assert found and found["dph_base"] > offer["dph_base"] * 1.05 and found["num_gpus"] == 3


def test_an_offer_is_rented_once_and_a_stopped_instance_may_wait_for_its_gpus() -> None:
    account = VastaiAccount("boot=5")
    offer = account.offers()[0]["id"]
    first = str(account.data(account.rent(offer))["new_contract"])
    assert account.rent(offer).status in (400, 404, 410)
    account.wait(10)
    account.pause(first, running=False)
    second = str(account.data(account.rent(offer))["new_contract"])
    account.pause(first, running=True)
    account.wait(600)
    one, other = account.show(first), account.show(second)
    assert (
        one
        and other
        and (one["actual_status"], other["actual_status"]) == ("scheduling", "running")
    )


def test_filters_compare_numbers_that_were_sent_as_text_and_find_countries() -> None:
    account = VastaiAccount()
    assert {offer["num_gpus"] for offer in account.offers(num_gpus={"eq": "2"})} == {2}
    assert {
        offer["geolocation"][-2:] for offer in account.offers(geolocation={"in": ["US", "SE"]})
    } == {"US", "SE"}
    assert all(
        offer["reliability2"] >= 0.97 for offer in account.offers(reliability2={"gte": 0.97})
    )
    assert account.call("POST", "/api/v0/bundles/", {"num_gpus": {"like": 2}}).status == 400
    assert any(offer["verification"] != "verified" for offer in account.offers(verified={}))


def test_the_least_rental_period_is_kept() -> None:
    account = VastaiAccount("reserved=3600")
    machine = account.create("a")
    assert machine and account.destroy(machine).status == 400
    account.wait(3600)
    assert account.destroy(machine).status == 200


def schemas(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """method, path -> the operation, of Vast.ai's OpenAPI documents, with what they refer to in place."""
    found = {}
    for path in (folder / "vast_openapi_yaml").glob("*.yaml"):
        document = yaml.safe_load(path.read_text("utf-8"))
        if isinstance(document, dict):
            for address, methods in document.get("paths", {}).items():
                for method, operation in methods.items():
                    if isinstance(operation, dict) and "responses" in operation:
                        found[method.upper(), address.rstrip("/")] = filled(
                            operation["responses"], document
                        )
    return found


def filled(part: Any, document: Any) -> Any:
    """An OpenAPI 3.0 schema as JSON Schema: references put in place, `nullable` as a type."""
    if isinstance(part, list):
        return [filled(each, document) for each in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        target = document
        for word in part["$ref"][2:].split("/"):
            target = target.get(word, {})
        return filled(target, document)
    made = {
        name: filled(value, document)
        for name, value in part.items()
        if name not in ("example", "nullable")
    }
    if part.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def test_every_reply_has_the_form_of_the_providers_documents() -> None:
    published = schemas(published_schemas())
    account = VastaiAccount("boot=5")
    machine = account.create("recipe-1")
    account.wait(60)
    key = "ssh-ed25519 AAAA x"
    for method, path, body in (
        ("GET", "/api/v0/users/current/", None), ("POST", "/api/v0/ssh/", {"ssh_key": key}), ("GET", "/api/v0/ssh/", None), ("POST", "/api/v0/ssh/", {}),
        ("POST", f"/api/v0/instances/{machine}/ssh/", {"ssh_key": key}), ("GET", f"/api/v0/instances/{machine}/ssh/", None),
        ("PUT", f"/api/v0/instances/request_logs/{machine}", {}), ("PUT", f"/api/v0/instances/{machine}/", {"label": "x"}),
        ("PUT", f"/api/v0/instances/bid_price/{machine}/", {"price": 1}), ("GET", "/api/v0/charges/", None), ("POST", "/api/v0/bundles/", {}),
        ("PUT", "/api/v0/asks/5/", {"image": "x"}), ("PUT", f"/api/v0/asks/{account.offers()[0]['id']}/", {}), ("GET", "/api/v1/instances/", None),
        ("DELETE", "/api/v0/instances/5/", {}), ("DELETE", f"/api/v0/instances/{machine}/", {}),
    ):  # fmt: skip
        account.call(method, path, body)
    checked = 0
    for method, path, reply in account.replies:
        address = re.sub(r"/\d+(?=/|$)", "/{id}", path).rstrip("/")
        answers = published.get((method, address)) or published.get(
            (method, address.replace("{id}", "{instance_id}"))
        )
        assert answers, (method, address)
        schema = answers[str(reply.status)]["content"]["application/json"]["schema"]
        jsonschema.validate(reply.body, schema)
        checked += 1
    assert checked > 16
    row = account.world.account.machines[str(machine)]
    shape = published["GET", "/api/v1/instances"]["200"]["content"]["application/json"]["schema"][
        "properties"
    ]["instances"]["items"]
    jsonschema.validate(
        account.world.lists.show_instance(row), shape
    )  # the listing's row: the document of a single instance has two fields wrong
    assert (
        shape["properties"].keys() - {"credit_discount_max"}
        <= account.world.lists.show_instance(row).keys()
    ), "no field of a row is missing"
