"""`recipe stack export NAME --pulumi` writes a program that makes what the driver would order, and holds no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from drivers.base import Order
from drivers.gcp import Gcp
from drivers.gcp_prices import T4
from runner.interface.cli.main import main
from tests.support import Space
from tests.system.test_stacks import stack

MINE = """\
driver = "gcp"
gpu = "T4"
zone = "us-central1-a"
market = "spot"
keep = "stopped"
auto_stop = "4h"
store = "results"
extra = {project = "team"}
[stores.results]
url = "gs://my-results/prefix"
push = true
"""


class Anything(types.ModuleType):
    """Stands in for pulumi and pulumi_gcp: what is called is noted as (name, arguments)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *words: Any, **given: Any) -> Any:
        made = Anything(self.__name__)
        made.given = given  # type: ignore[attr-defined]
        MADE.append((self.__name__.rpartition(".")[2], words, given))
        return made

    def __getitem__(self, n: int) -> Any:
        return self


MADE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


def plain(value: Any) -> Any:
    """An argument without the stand-ins around it."""
    if isinstance(value, Anything):
        return {name: plain(inner) for name, inner in value.__dict__.get("given", {}).items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def made(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The resources that a program makes, by their kind."""
    MADE.clear()
    for name in ("pulumi", "pulumi_gcp"):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    exec(compile(text, "__main__.py", "exec"), {})
    return {
        kind: {name: plain(value) for name, value in given.items()}
        for kind, _, given in MADE
        if kind in ("Instance", "Firewall", "Bucket")
    }


Told: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def export(space: Space, capsys: pytest.CaptureFixture[str]) -> Told:
    """The command: its exit code, and what it prints on both streams."""

    def ran(*words: str) -> tuple[int, str, str]:
        code = main(["stack", "-C", str(space.root), "export", "tiny", *words])
        return code, *capsys.readouterr()

    return ran


def test_the_program_makes_what_the_driver_would_order(
    space: Space, export: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(space.root.parent / "config"))
    driver = Gcp(installation=str(space.root.parent / "config" / "recipe" / "installation"))
    offer = min(
        driver._list_offers({"us-central1-a": {T4}}, ["spot"], 50), key=lambda each: each.price
    )
    order: Any = driver._body(
        Order(offer, "0" * 16, datetime.now(UTC) + timedelta(hours=4), keep=True)
    )
    stack(space, MINE)
    text = export("--pulumi")[1]
    found = made(text, monkeypatch)
    machine, rule, bucket = found["Instance"], found["Firewall"], found["Bucket"]
    assert (
        order["machineType"].endswith(f"/{machine['machine_type']}")
        and machine["zone"] == "us-central1-a"
        and machine["project"] == "team"
    )
    disk, ordered = machine["boot_disk"]["initialize_params"], order["disks"][0]["initializeParams"]
    assert (disk["image"], str(disk["size"]), disk["type"]) == (
        ordered["sourceImage"],
        ordered["diskSizeGb"],
        ordered["diskType"].rpartition("/")[2],
    )
    (attached,) = order["guestAccelerators"]
    assert machine["guest_accelerators"] == [
        {
            "type": attached["acceleratorType"].rpartition("/")[2],
            "count": attached["acceleratorCount"],
        }
    ]
    asked, said = order["scheduling"], machine["scheduling"]
    assert (said["on_host_maintenance"], said["automatic_restart"]) == (
        asked["onHostMaintenance"],
        asked["automaticRestart"],
    )
    assert (said["provisioning_model"], said["instance_termination_action"]) == (
        asked["provisioningModel"],
        asked["instanceTerminationAction"],
    )
    assert (
        said["preemptible"] is True
        and abs(said["max_run_duration"]["seconds"] - int(asked["maxRunDuration"]["seconds"])) < 60
    )
    items = {item["key"]: item["value"] for item in order["metadata"]["items"]}
    assert machine["metadata"].keys() == items.keys() - {"recipe-key", "startup-script"}
    assert machine["labels"] == {"recipe-stack": "tiny", "managed-by": "pulumi"}, (
        "no mark of ours: `recipe reap` ends what bears that"
    )
    assert rule["target_tags"] == machine["tags"] and rule["allows"] == [
        {"protocol": "tcp", "ports": ["22"]}
    ]
    assert (
        bucket["name"] == "my-results"
        and bucket["location"] == "US-CENTRAL1"
        and bucket["labels"] == machine["labels"]
    )
    secret = (space.root.parent / "config" / "recipe" / "installation").read_text().strip()
    assert "PRIVATE KEY" not in text and secret not in text and "ssh-ed25519 " not in text


def test_what_is_rented_for_a_run_is_deleted_at_its_time_and_has_no_bucket(
    space: Space, export: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack(
        space,
        "driver = 'gcp'\nmachine = 'g2-standard-8'\nzone = 'us-east1-b'\nextra = {term = 6, network = 'global/networks/mine', port = 2222}",
    )
    found = made(export("--pulumi")[1], monkeypatch)
    scheduling = found["Instance"]["scheduling"]
    assert scheduling["instance_termination_action"] == "DELETE" and scheduling[
        "max_run_duration"
    ] == {"seconds": 21600}
    assert (
        found["Instance"]["machine_type"] == "g2-standard-8"
        and not found["Instance"]["guest_accelerators"]
        and "Bucket" not in found
    )
    assert (
        found["Firewall"]["network"] == "mine"
        and found["Firewall"]["allows"][0]["ports"] == ["2222"]
        and "project" not in found["Instance"]
    )


def test_a_stack_of_several_nodes_makes_as_many_machines_that_reach_each_other(
    space: Space, export: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack(space, "driver = 'gcp'\nmachine = 'a2-highgpu-1g'\nzone = 'us-central1-a'\nnodes = 4")
    text = export("--pulumi")[1]
    made(text, monkeypatch)
    machines = [given for kind, _, given in MADE if kind == "Instance"]
    assert [each["name"] for each in machines] == [f"recipe-stack-tiny-{n}" for n in range(4)]
    assert {each["zone"] for each in machines} == {"us-central1-a"}
    inside = [given for kind, _, given in MADE if kind == "Firewall" and "source_tags" in given]
    assert [each["target_tags"] for each in inside] == [machines[0]["tags"]]
    (table,) = [words[0] for kind, words, _ in MADE if kind == "apply"]
    known = tomllib.loads(table([("192.0.2.7", "10.0.0.2"), ("192.0.2.8", "10.0.0.3")]))
    assert known["drivers"]["ssh"]["hosts"] == [
        {"host": "recipe@192.0.2.7", "address": "10.0.0.2"},
        {"host": "recipe@192.0.2.8", "address": "10.0.0.3"},
    ]
    assert "pulumi stack output settings >>recipe.toml" in text


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (
            "driver = 'loopback'",
            ("--pulumi",),
            "cannot export a stack of the driver loopback as a Pulumi program",
        ),
        ("driver = 'gcp'\ngpu = 'L4'", ("--pulumi",), "the stack has none"),
        (
            "driver = 'gcp'\ngpu = 'B200'\nzone = 'us-central1-a'",
            ("--pulumi",),
            "no machine in the list prices of",
        ),
        ("driver = 'gcp'\nzone = 'us-central1-a'", (), "requires --pulumi"),
    ],
)
def test_a_stack_that_is_no_one_machine_of_google_is_refused_in_a_sentence(
    space: Space, export: Told, text: str, words: tuple[str, ...], said: str
) -> None:
    stack(space, text)
    code, out, told = export(*words)
    assert code in (2, 3) and not out and said in told and "fix:" in told, (code, told)


MOCKS = """\
import json, runpy, sys, pulumi

class Mocks(pulumi.runtime.Mocks):
    def __init__(self): self.made = {}
    def call(self, args): return {}
    def new_resource(self, args):
        self.made[args.typ] = dict(args.inputs)
        there = dict(args.inputs)
        for nic in there.get("networkInterfaces", []):
            nic["accessConfigs"] = [{"natIp": "192.0.2.7"}]
        return [args.name, there]

mocks = Mocks()
pulumi.runtime.set_mocks(mocks, project="recipe", stack="test", preview=False)
pulumi.runtime.set_all_config({"recipe:sshKey": "ssh-ed25519 AAAA me"})
exports = {}
pulumi.export = lambda name, value: exports.__setitem__(name, value)

@pulumi.runtime.test
def go():
    runpy.run_path(sys.argv[1])
    return pulumi.Output.all(**exports).apply(lambda found: print(json.dumps({"made": mocks.made, "exports": found})))

go()
"""


@pytest.mark.proof
@pytest.mark.skipif(
    "RECIPE_PULUMI" not in os.environ,
    reason="RECIPE_PULUMI names no Python that has pulumi and pulumi-gcp (292 MB)",
)
def test_pulumi_itself_takes_the_program(space: Space, export: Told, tmp_path: Path) -> None:
    """With the mocks of pulumi: the names and types of every argument are those of pulumi-gcp."""
    stack(space, MINE)
    (tmp_path / "__main__.py").write_text(export("--pulumi")[1])
    done = subprocess.run(
        [os.environ["RECIPE_PULUMI"], "-c", MOCKS, str(tmp_path / "__main__.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    machine = told["made"]["gcp:compute/instance:Instance"]
    assert machine["machineType"] == "n1-standard-8" and machine["guestAccelerators"] == [
        {"type": "nvidia-tesla-t4", "count": 1}
    ]
    assert machine["metadata"]["ssh-keys"] == "recipe:ssh-ed25519 AAAA me" and machine[
        "scheduling"
    ]["maxRunDuration"] == {"seconds": 14400}
    assert told["made"].keys() == {
        "gcp:compute/instance:Instance",
        "gcp:compute/firewall:Firewall",
        "gcp:storage/bucket:Bucket",
    }
    assert (
        told["exports"]["host"] == "recipe@192.0.2.7" and told["exports"]["zone"] == "us-central1-a"
    )
