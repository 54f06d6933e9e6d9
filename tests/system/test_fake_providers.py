"""Promise: a provider's own client cannot tell the fake from the provider, and the ledger agrees with what it did."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_provider import Client, Provider, provider
from tests.tools import client, published_schemas

RECIPE = [sys.executable, "-m", "runner.interface.cli.main", "fake-provider"]


@pytest.fixture(scope="module")
def vastai() -> Iterator[Provider]:
    with provider("vastai", "--faults", "boot=30") as running:
        yield running


def test_the_vastai_command_line_rents_and_destroys(vastai: Provider, tmp_path: Path) -> None:
    cli = Client(
        client("vastai"),
        "vastai.cli.main:main",
        ["vastai", "--url", vastai.url, "--api-key", "k", "--raw"],
        tmp_path,
        {},
    )
    [(found, text)] = cli.run(
        ["search", "offers", "num_gpus=1 gpu_name=RTX_4090 reliability>0.9", "-o", "dph"]
    )
    offers = json.loads(text)
    assert (
        found == 0
        and {offer["gpu_name"] for offer in offers} == {"RTX 4090"}
        and {offer["num_gpus"] for offer in offers} == {1}
    )
    assert [offer["dph_total"] for offer in offers] == sorted(
        offer["dph_total"] for offer in offers
    )
    before = len(vastai.events())
    [(made, text)] = cli.run(
        [
            "create",
            "instance",
            str(offers[0]["id"]),
            "--image",
            "pytorch/pytorch",
            "--disk",
            "20",
            "--label",
            "recipe-x",
            "--ssh",
            "--direct",
        ]
    )
    assert made == 0, text
    machine = str(json.loads(text)["new_contract"])
    vastai.wait(60)
    listed, destroyed = cli.run(["show", "instances"], ["destroy", "instance", "-y", machine])
    assert [(row["id"], row["actual_status"], row["label"]) for row in json.loads(listed[1])] == [
        (int(machine), "running", "recipe-x")
    ]
    assert destroyed[0] == 0
    assert vastai.events()[before:] == ["created", "started", "destroyed"]
    assert {entry["machine"] for entry in vastai.ledger() if entry["event"] == "billed"} >= {
        machine
    }


VAST = """
import json, sys, urllib.request
from vastai.api import billing, instances, keys, offers
from vastai.api.client import VastClient
client = VastClient("k", sys.argv[1])

def wait(seconds):
    urllib.request.urlopen(sys.argv[1] + "/_clock", json.dumps({"advance": seconds}).encode()).close()

offer = offers.search_offers(client, {"num_gpus": {"eq": 1}}, limit=1)[0]["id"]
made = instances.create_instance(client, offer, "pytorch/pytorch", 20, label="sdk", ssh=True, direct=True)["new_contract"]
seen = []
for step in (None, instances.stop_instance, instances.start_instance):
    if step:
        assert step(client, made)["success"]
    wait(60)
    seen.append(instances.show_instance(client, made)["actual_status"])
instances.label_instance(client, made, "renamed")
seen.append(instances.show_instances(client, {"label": {"eq": "renamed"}})[0]["id"] == made)
seen.append(instances.destroy_instance(client, made)["success"])
seen.append(instances.show_instance(client, made))
print(json.dumps(seen))
"""


def test_vastais_own_library_stops_starts_and_labels(vastai: Provider, tmp_path: Path) -> None:
    done = subprocess.run(
        [client("vastai"), "-c", VAST, vastai.url],
        capture_output=True,
        text=True,
        timeout=200,
        env={"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["running", "exited", "running", True, True, None]


def test_the_vastai_command_line_shows_what_went_wrong_in_its_own_words(
    vastai: Provider, tmp_path: Path
) -> None:
    cli = Client(
        client("vastai"),
        "vastai.cli.main:main",
        ["vastai", "--url", vastai.url, "--api-key", "k", "--raw"],
        tmp_path,
        {},
    )
    none, gone = cli.run(
        ["create", "instance", "1", "--image", "x"], ["destroy", "instance", "-y", "77"]
    )
    assert "no_such_ask" in none[1] and "77 not found" in gone[1]


def test_faults_clock_and_ledger_are_open_while_it_runs(vastai: Provider) -> None:
    assert (
        json.loads(vastai.ask("/_faults", "throttled@search=once"))["faults"]
        == "throttled@search=once"
    )
    with pytest.raises(OSError, match="429"):
        vastai.ask("/api/v0/bundles/", "{}")
    assert json.loads(vastai.ask("/api/v0/bundles/", "{}"))["offers"]
    with pytest.raises(OSError, match="400"):
        vastai.ask("/_faults", "nosuch=1")
    now = json.loads(vastai.ask("/_clock"))["now"]
    vastai.wait(3600)
    assert json.loads(vastai.ask("/_clock"))["now"] == now + 3600
    vastai.ask("/_faults", "boot=30")


def test_a_lost_reply_is_a_connection_that_closes_without_a_byte(vastai: Provider) -> None:
    for fault in ("lost@search=once", "cut@search=once"):
        vastai.ask("/_faults", fault)
        with pytest.raises(ConnectionError):
            vastai.ask("/api/v0/bundles/", "{}")
        assert json.loads(vastai.ask("/api/v0/bundles/", "{}"))["offers"]
    vastai.ask("/_faults", "boot=30")


GOOGLE = """
import json, sys, urllib.request
from uuid import UUID
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as compute
url, zone = sys.argv[1], "us-central1-a"
options = {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": url}, "transport": "rest"}
instances, operations = compute.InstancesClient(**options), compute.ZoneOperationsClient(**options)

def insert(name, request):
    disk = compute.AttachedDisk(boot=True, auto_delete=True, initialize_params=compute.AttachedDiskInitializeParams(disk_size_gb=50))
    scheduling = compute.Scheduling(
        on_host_maintenance="TERMINATE", provisioning_model="SPOT", instance_termination_action="DELETE", max_run_duration=compute.Duration(seconds=3600)
    )
    body = compute.Instance(
        name=name, machine_type=f"zones/{zone}/machineTypes/g2-standard-4", disks=[disk], scheduling=scheduling, labels={"recipe": "x"},
        network_interfaces=[compute.NetworkInterface(network="global/networks/default")],
    )
    made = instances.insert_unary(
        compute.InsertInstanceRequest(project="fake", zone=zone, instance_resource=body, request_id=str(UUID(int=request)))
    )
    return finished(made.name)

def finished(name):
    while (found := operations.wait(project="fake", zone=zone, operation=name)).status != compute.Operation.Status.DONE:
        pass
    return found

def listed():
    request = compute.AggregatedListInstancesRequest(project="fake", filter="labels.recipe=x")
    return [(row.name, row.status) for _, scope in instances.aggregated_list(request) for row in scope.instances]

first, again = insert("a", 1), insert("a", 1)
print(json.dumps([first.name == again.name, [error.code for error in first.error.errors], listed()]))
row = instances.get(project="fake", zone=zone, instance="a")
print(json.dumps([row.network_interfaces[0].access_configs[0].nat_i_p, row.scheduling.max_run_duration.seconds, list(row.labels)]))
deleted = instances.delete_unary(project="fake", zone=zone, instance="a").name
urllib.request.urlopen(url + "/_clock", b'{"advance": 30}').close()
finished(deleted)
print(json.dumps([listed()]))
try:
    instances.get(project="fake", zone=zone, instance="a")
except Exception as error:
    print(json.dumps([type(error).__name__, error.errors[0]["reason"]]))
"""


def test_googles_own_client_inserts_waits_lists_and_deletes(tmp_path: Path) -> None:
    python = client("gcp")
    with provider("gcp", "--clock", "real", "--faults", "boot=1") as running:
        done = subprocess.run(
            [python, "-c", GOOGLE, running.url],
            capture_output=True,
            text=True,
            timeout=200,
            env={"HOME": str(tmp_path)},
        )
        events = running.events()
    assert done.returncode == 0, done.stderr
    made, row, gone, missing = map(json.loads, done.stdout.splitlines())
    assert made == [True, [], [["a", "RUNNING"]]]
    assert row == ["203.0.113.0", 3600, ["recipe"]]
    assert gone == [[]] and missing == ["NotFound", "notFound"]
    assert events == ["created", "started", "destroyed"]


PRIME = """
import json, os, urllib.request
from prime_cli.api.availability import AvailabilityClient
from prime_cli.api.pods import PodsClient
from prime_cli.api.wallet import WalletClient
from prime_cli.core import APIClient, APIError

api = APIClient()
pods = PodsClient(api)

def wait(seconds):
    urllib.request.urlopen(os.environ["PRIME_API_BASE_URL"] + "/_clock", json.dumps({"advance": seconds}).encode()).close()

offers = [offer for rows in AvailabilityClient(api).get().values() for offer in rows if offer.stock_status != "Unavailable"]
one, many = offers[0], offers[-1]
made = []
for offer in (one, many):
    pod = {"name": "recipe-x", "cloudId": offer.cloud_id, "gpuType": offer.gpu_type, "socket": offer.socket, "gpuCount": offer.gpu_count}
    made.append(pods.create({"pod": pod, "provider": {"type": offer.provider}, "team": None}).id)
before = [row.ssh_connection for row in pods.get_status(made)]
wait(60)
print(json.dumps([before, [(row.status, row.installation_progress, bool(row.ssh_connection)) for row in pods.get_status(made)], pods.list().total_count]))
wait(3600)
for name in made:
    pods.delete(name)
wallet, history = WalletClient(api).get(), pods.history()
paid = sum(row.total_billed_price for row in history.data)
print(json.dumps([pods.list().total_count, history.total_count, round(wallet.balance_usd + paid, 6), len(wallet.recent_billings)]))
try:
    pods.get(made[0])
except APIError as error:
    print(json.dumps([str(error)]))
"""


def test_primes_own_client_creates_waits_and_deletes(tmp_path: Path) -> None:
    """Prime publishes no schema: the models of its client are it."""
    python = client("prime")
    with provider("prime") as running:
        env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", **running.exports}
        done = subprocess.run(
            [python, "-c", PRIME], capture_output=True, text=True, timeout=200, env=env
        )
        assert done.returncode == 0, done.stderr
        made, after, missing = map(json.loads, done.stdout.splitlines())
        assert made == [[None, None], [["ACTIVE", 100, True]] * 2, 2]
        assert after == [0, 2, 100.0, 2] and "Pod not found" in missing[0]
        assert running.events() == [
            "created",
            "created",
            "started",
            "started",
            "destroyed",
            "destroyed",
        ]
        cli = Client(python, "prime_cli.main:run", ["prime"], tmp_path, running.exports)
        listed, offered = cli.run(
            ["pods", "list", "--output", "json"], ["availability", "list", "--output", "json"]
        )
        assert listed[0] == offered[0] == 0 and json.loads(offered[1])["gpu_resources"], offered


@pytest.mark.slow
def test_runpods_own_document_holds_for_whatever_is_sent(tmp_path: Path) -> None:
    """No official client speaks REST v2 for pods: the OpenAPI document and schemathesis stand in for it."""
    document = published_schemas() / "runpod_v2_openapi_2026-08-20.json"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    ours = "^/v2/(pods|catalog/gpus|catalog/datacenters$|account/ssh|billing/pods)"
    with provider("runpod") as running:
        command = [
            client("schemathesis").with_name("st"),
            "run",
            document,
            "--url",
            running.url,
            "-H",
            "Authorization: Bearer k",
            "--no-color",
        ]
        words = [
            "--include-path-regex",
            ours,
            "-n",
            "8",
            "--seed",
            "1",
            "--phases",
            "examples,fuzzing",
            "--checks",
            checks,
        ]
        done = subprocess.run(
            [*command, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin"},
        )
    assert done.returncode == 0, done.stdout
    assert "Selected: 13/" in done.stdout


def refused(*words: str, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [*RECIPE, *words], capture_output=True, text=True, timeout=60, env=env or None
    )
    return done.returncode, done.stderr


def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path) -> None:
    code, text = refused("vastia")
    assert code == 3 and "vastai" in text
    code, text = refused("vastai", "--faults", "lots=1")
    assert code == 3 and 'did you mean "lost"' in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = refused("vastai", "--port", port)
        assert code == 5 and port in text
    code, text = refused("vastai", "--port", "70000")
    assert code == 5 and "70000" in text


def test_without_the_extra_the_line_to_install_is_named(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')\n"
    )
    code, text = refused(
        "vastai", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}", PATH="/usr/bin:/bin"
    )
    assert code == 5 and "uvicorn" in text and "pip install" in text and "[fakes]'" in text
