"""Promise: a machine of the fake Vast.ai executes its boot script, lets in the keys that were attached, and ends with all that runs on it."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivers.devices import parse_cards
from drivers.machine import facts, parse_resources, question
from tests.fake_provider import Provider, provider
from tests.tools import needs


def api(running: Provider, method: str, path: str, body: object = None) -> Any:
    request = urllib.request.Request(
        running.url + path, json.dumps(body or {}).encode(), method=method
    )
    request.add_header("Authorization", f"Bearer {running.exports['VAST_API_KEY']}")
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.loads(reply.read())


def until(true: Callable[[], Any]) -> Any:
    """What becomes true within twenty seconds."""
    for _ in range(400):
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError("it never came true")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rented_machine_boots_lets_in_and_dies(tmp_path: Path) -> None:
    needs("ssh"), needs("ssh-keygen")
    key, own = tmp_path / "key", tmp_path / "own"
    for path in (key, own):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    with provider("vastai", "--hosts", "real", "--faults", "boot=0,swept=3600") as running:
        offer = api(running, "POST", "/api/v0/bundles/", {})["offers"][0]
        script = f"mkdir -p ~/.ssh\necho '{own.with_suffix('.pub').read_text().strip()}' >> ~/.ssh/authorized_keys\nsetsid sleep 4321 &\necho $! > ~/daemon\n"
        machine = api(
            running,
            "PUT",
            f"/api/v0/asks/{offer['id']}/",
            {"image": "x", "runtype": "ssh_direct", "onstart": script, "env": {"COLOUR": "red"}},
        )["new_contract"]
        api(
            running,
            "POST",
            f"/api/v0/instances/{machine}/ssh/",
            {"ssh_key": key.with_suffix(".pub").read_text()},
        )
        row = until(
            lambda: (
                (found := api(running, "GET", f"/api/v0/instances/{machine}/")["instances"])[
                    "ports"
                ]
                and found
            )
        )
        port, address = row["ports"]["22/tcp"][0]["HostPort"], row["public_ipaddr"].strip()

        def login(
            identity: Path, command: str, data: bytes = b""
        ) -> subprocess.CompletedProcess[bytes]:
            words = f"-F none -oIdentitiesOnly=yes -oStrictHostKeyChecking=no -oUserKnownHostsFile={tmp_path}/known -oBatchMode=yes -p {port}".split()
            command_line = ["ssh", *words, "-i", identity, f"root@{address}", command]
            return subprocess.run(command_line, input=data, capture_output=True, timeout=60)

        until(lambda: login(key, "true").returncode == 0)
        done = login(
            key,
            "echo $COLOUR $CONTAINER_ID; cat; echo to stderr >&2; exit 7",
            bytes(range(256)) * 4096,
        )
        assert done.stdout == f"red {machine}\n".encode() + bytes(range(256)) * 4096
        assert done.stderr.endswith(b"to stderr\n") and done.returncode == 7
        seen = parse_resources(facts(login(key, shlex.join(question("~"))).stdout))
        assert (seen.gpus, seen.gpu, seen.gpu_memory) == (
            offer["num_gpus"],
            f"NVIDIA {offer['gpu_name']}",
            offer["gpu_ram"] << 20,
        )
        assert len(parse_cards(login(key, "nvidia-smi -L").stdout.decode())) == offer["num_gpus"]
        daemon = int(until(lambda: login(own, "cat ~/daemon").stdout))
        assert alive(daemon)
        running.wait(3601)
        until(lambda: login(own, "true").returncode == 255)
        assert login(key, "true").returncode == 0, "a key that was attached by the API stays"
        api(running, "DELETE", f"/api/v0/instances/{machine}/")
        until(lambda: login(key, "true").returncode == 255)
        until(lambda: not alive(daemon))
        with pytest.raises(urllib.error.HTTPError):
            running.ask(f"/api/v0/instances/{machine}/?api_key=guessed")
