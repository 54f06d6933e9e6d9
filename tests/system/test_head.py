"""Promise: the `head` of a stack is node 0 of a step, and what the driver gives are its workers; nothing is rented for it, and both ends count."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.base import Traits
from runner.errors import Invalid
from runner.hosts.head import StackHead
from runner.settings import Head
from runner.storage.workspace import Workspace
from tests.cloud import cloud, provider
from tests.fake_provider import Provider
from tests.fake_provider import provider as fake
from tests.rented import alive, ours, rents
from tests.servers.sshd import Sshd, free_port, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until

# Each worker says a word to the shepherd, which writes down what it heard.
PROGRAM = """
import os, socket, sys
role, first = sys.argv[1], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if role == "shepherd":
    with socket.create_server(("", first[1])) as listening:
        heard = sorted(listening.accept()[0].makefile().read() for _ in range(int(os.environ["NNODES"]) - 1))
    open(sys.argv[2], "w").write(" ".join([f"{role} at {first[1]}:", *heard]))
else:
    while True:
        try:
            with socket.create_connection(first) as dialled:
                dialled.sendall(f"{role} {os.environ['NODE_RANK']}".encode())
            break
        except ConnectionRefusedError:
            pass
"""
RUN = "python3 program.py {{ 'shepherd' if node.rank == 0 else 'worker' }} {{ outputs.o }}"
EVERY = (
    "lease-intended",
    "lease-asked",
    "lease-recorded",
    "lease-up",
    "release-intended",
    "release-asked",
    "release-proved",
)
GATED = "echo $NODE_RANK >> {root}/begun; until [ -e {root}/gate ]; do read -t 0.05 x <> <(:) || :; done"


def headed(
    space: Space, server: Sshd, port: int | None, workers: str = "loopback", **others: object
) -> None:
    """Add the stack `farm`: a head on that server, and workers of a driver."""
    key, path = server.settings()["identity"], space.root / "recipe.toml"
    head = {"driver": "ssh", "host": server.address, "address": "127.0.0.1", "port": port, **others}
    table = ", ".join(
        f"{name} = {json.dumps(value)}" for name, value in head.items() if value is not None
    )
    text = path.read_text() if path.exists() else ""
    text += f"\n[drivers.ssh]\nhost_key = {json.dumps(server.host_key)}\nidentity = '{key}'\nagent = false\n"
    path.write_text(text + f"\n[stacks.farm]\ndriver = '{workers}'\nhead = {{{table}}}\n")


def trains(space: Space, nodes: int = 2, more: str = "") -> None:
    space.write("program.py", PROGRAM)
    space.recipe(
        f"steps:\n  s: {{nodes: {nodes}, run: {json.dumps(RUN)}, code: [program.py], outputs: {{o: o}}{more}}}\n"
    )


@pytest.fixture
def farm(space: Space, sshd: Sshd) -> int:  # noqa: F811
    """A stack with rented workers; the port of its head."""
    port = free_port()
    cloud(space)
    headed(space, sshd, port)
    return port


def gated(space: Space, after: str = "echo made > o", nodes: int = 3, more: str = "") -> Path:
    space.recipe(
        f"steps: {{s: {{nodes: {nodes}, shell: bash, {more}outputs: {{o: o}}, run: {json.dumps(GATED.format(root=space.root) + '; ' + after)}}}}}"
    )
    return space.root / "gate"


def begun(space: Space) -> list[str]:
    path = space.root / "begun"
    return sorted(path.read_text().split()) if path.exists() else []


def test_the_head_is_node_0_and_each_other_node_is_rented(
    space: Space,
    farm: int,
    sshd: Sshd,  # noqa: F811
) -> None:
    trains(space, 3)
    code, out, said = space.command("plan", "--stack", "farm")
    assert code == 0, said
    assert (
        f"head: ssh {sshd.address}, reached by the other nodes at 127.0.0.1:{farm}; not part of the cost"
        in out
    )
    assert (
        "with 2 loopback machines as workers of s" in out
        and "rents for s: loopback " in out
        and "$1.200 an hour" in out
    )
    code, _, said = space.command("run", "--stack", "farm")
    assert code == 0, said
    assert space.read("o") == f"shepherd at {farm}: worker 1 worker 2"
    assert sorted(provider(space)) == ["created", "created", "destroyed", "destroyed"]
    assert (
        not [*(sshd.home / ".recipe-host/attempts").iterdir()]
        and not (sshd.home / ".recipe-host/leases").exists()
    )


def test_a_stack_says_what_its_head_is(space: Space, farm: int, sshd: Sshd) -> None:  # noqa: F811
    code, out, said = space.command("stack", "show", "farm")
    assert code == 0, said
    assert (
        f"head: ssh {sshd.address}, reached by" in out
        and "workers: loopback, one fewer than the step's nodes" in out
    )
    head = json.loads(space.command("stack", "show", "farm", "--json")[1])["head"]
    assert head == {"driver": "ssh", "host": sshd.address, "address": "127.0.0.1", "port": farm}
    code, out, _ = space.command("config")
    assert code == 0 and "stacks.farm.head" in out


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_node_that_fails_ends_the_others_whether_it_is_the_head_or_not(
    space: Space, farm: int, rank: int
) -> None:
    """The GPUs that the step asks for are its workers'."""
    script = f"if [ $NODE_RANK = {rank} ]; then echo {{{{ host.gpus }}}} GPUs: $CUDA_VISIBLE_DEVICES.; exit 7; fi; sleep 600"
    gated(space, script, nodes=2, more="resources: {gpus: 1}, ").touch()
    code, _, said = space.command("run", "--stack", "farm")
    assert code == 1 and "exit 7" in said and ("on node 1 (loopback" in said) is (rank == 1), said
    assert ("1 GPUs: 0." if rank else "0 GPUs: .") in said, said
    assert provider(space) == ["created", "destroyed"]


def test_a_killed_run_finds_head_and_workers_again(space: Space, farm: int) -> None:
    """The port of the head is in use by the step itself."""
    gate = gated(space)
    worker = space.start("run", "--stack", "farm")
    until(lambda: len(begun(space)) == 3 or worker.poll() is not None)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    after = space.start("run", "--stack", "farm")
    gate.touch()
    _, said = after.communicate(timeout=60)
    assert after.returncode == 0, said
    assert begun(space) == ["0", "1", "2"] and sorted(provider(space)) == [
        "created",
        "created",
        "destroyed",
        "destroyed",
    ]


@pytest.mark.parametrize(
    "point",
    [
        "lease-asked:2",
        *(
            pytest.param(point, marks=pytest.mark.proof)
            for point in (*EVERY, *(f"{each}:2" for each in EVERY))
        ),
    ],
)
def test_a_kill_at_any_point_of_a_lease_leaves_what_the_next_run_uses_and_gives_back(
    space: Space,
    farm: int,
    sshd: Sshd,  # noqa: F811
    point: str,
) -> None:
    """Two workers and a head: each node begins once, and no third machine is ever rented."""
    gated(space).touch()
    assert (
        space.command("run", "--stack", "farm", env={"RECIPE_CRASH_AT": point})[0]
        == -signal.SIGKILL
    )
    code, _, said = space.command("run", "--stack", "farm")
    assert code == 0 and begun(space) == ["0", "1", "2"] and space.read("o") == "made\n", said
    assert sorted(provider(space)) == ["created", "created", "destroyed", "destroyed"]
    code, out, said = space.command("reap")
    assert (
        code == 0 and "no leases" in out and not [*(sshd.home / ".recipe-host/attempts").iterdir()]
    ), said


@pytest.mark.proof
@pytest.mark.parametrize("point", ["", *EVERY])
def test_machines_of_a_marketplace_work_for_a_head(
    space: Space,
    market: Provider,
    sshd: Sshd,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """Killed mid-step, or at a point of its lease, and run again: one machine at a time, none is left, and each node began once."""
    rents(space, market, monkeypatch, verified=False, reliability=0)
    headed(space, sshd, free_port(), "vastai")
    gate, before = gated(space, nodes=2), ours(market).count("created")
    if point:
        gate.touch()
    worker = space.start("run", "--stack", "farm", "--yes", env={"RECIPE_CRASH_AT": point})
    until(lambda: (not point and len(begun(space)) == 2) or worker.poll() is not None, seconds=60)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    after = space.start("run", "--stack", "farm", "--yes")
    gate.touch()
    _, said = after.communicate(timeout=120)
    assert after.returncode == 0, said
    assert (
        begun(space) == ["0", "1"]
        and ours(market).count("created") == before + 1
        and not alive(market)
    )


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with fake("vastai", "--hosts", "real", "--clock", "real", "--faults", "boot=0.3") as found:
        yield found


@pytest.mark.proof
def test_hosts_that_cost_nothing_work_for_a_head_and_one_that_restarts_is_taken_again(
    space: Space,
    sshd: Sshd,  # noqa: F811
) -> None:
    headed(space, sshd, free_port())
    path = space.root / "recipe.toml"
    path.write_text(path.read_text() + "extra = {hosts = 2}\n")
    gate = gated(space)
    worker = space.start("run", "--stack", "farm")
    until(lambda: len(begun(space)) == 3 or worker.poll() is not None)
    sshd.reboot()
    until(lambda: len(begun(space)) == 6 or worker.poll() is not None)
    gate.touch()
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0 and "s: retry 1" in said, said
    assert space.read("o") == "made\n"


# -- what is refused


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ({"address": None}, "stacks.farm.head has no address", "Address of the head"),
        ({"port": None}, "stacks.farm.head has no port", "MASTER_PORT"),
        ({"port": 70000}, "stacks.farm.head.port is out of range: 70000", "from 1 to 65535"),
        (
            {"driver": "vastai"},
            'stacks.farm.head.driver has an invalid value "vastai"',
            "the head is an existing server",
        ),
    ],
)
def test_a_head_that_cannot_be_is_refused_in_a_sentence(
    space: Space,
    sshd: Sshd,  # noqa: F811
    change: dict[str, object],
    said: str,
    fix: str,
) -> None:
    headed(space, sshd, **{"port": 4000, **change})  # type: ignore[arg-type]
    trains(space)
    code, _, told = space.command("run", "--stack", "farm")
    assert code == 3 and said in told and fix in told, told


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "nodes = 1",
            "stacks.farm.nodes applies only to steps with `accelerate`, which do not use a head",
        ),
        ("keep = 'stopped'", "stacks.farm cannot have both `keep`"),
    ],
)
def test_a_setting_that_fights_a_head_is_refused(
    space: Space, farm: int, more: str, said: str
) -> None:
    path = space.root / "recipe.toml"
    path.write_text(path.read_text() + more + "\n")
    trains(space)
    code, _, told = space.command("run", "--stack", "farm")
    assert code == 3 and said in told and ("remove " in told or "choose " in told), told


@pytest.mark.parametrize(
    ("step", "words", "said"),
    [
        (
            "nodes: 1, run: 'true'",
            (),
            "the stack farm has a head, but no step of t@1 runs on several nodes",
        ),
        (
            "nodes: 2, accelerate: {script: t.py, processes: 1}, code: [t.py]",
            (),
            "would start as many `accelerate` processes on the head as on its workers",
        ),
        (
            "accelerate: {script: t.py, processes: 1}, code: [t.py]",
            ("--nodes", "2"),
            "would start as many `accelerate` processes on the head as on its workers",
        ),
        (
            "nodes: 2, run: 'true'",
            ("--keep-alive",),
            "--keep-alive requires a stack with a persistent machine",
        ),
    ],
)
def test_what_does_not_go_with_a_head_is_refused_before_anything_is_rented(
    space: Space, farm: int, step: str, words: tuple[str, ...], said: str
) -> None:
    space.write("t.py", "")
    space.recipe(f"steps: {{s: {{{step}, outputs: {{o: o}}}}}}")
    code, _, told = space.command("run", "--stack", "farm", *words)
    assert code == 3 and said in told, told
    assert provider(space) == []


def test_a_port_that_is_in_use_or_a_head_that_cannot_be_reached_is_reported_before_anything_is_rented(
    space: Space,
    farm: int,
    sshd: Sshd,  # noqa: F811
) -> None:
    trains(space)
    with socket.create_server(("", farm)):
        code, _, said = space.command("run", "--stack", "farm")
    assert (
        code == 5
        and f"cannot listen on port {farm} of ssh {sshd.address}" in said
        and "Address already in use" in said
    ), said
    assert (
        "stop the program that uses this port, or set another `port` in the `head` of the stack"
        in said
    )
    sshd.stop()
    code, _, said = space.command("run", "--stack", "farm")
    assert (
        code == 5
        and f"cannot use the head {sshd.address}" in said
        and "recipe doctor --driver ssh" in said
    ), said
    assert provider(space) == []


def test_a_driver_that_gives_all_nodes_together_takes_no_head(space: Space) -> None:
    with (
        Workspace.open(space.root) as ws,
        pytest.raises(
            Invalid,
            match="the stack has a head, but its driver allocates all nodes of a step together",
        ),
    ):
        asyncio.run(
            StackHead(ws, Head("ssh", "me@nowhere", "nowhere", 4000)).open(
                Traits(allocates=True), unused=True
            )
        )


def test_more_workers_than_may_be_rented_at_once_are_refused(space: Space, farm: int) -> None:
    path = space.root / "recipe.toml"
    path.write_text(path.read_text() + "\n[limits]\nmachines = 1\n")
    trains(space, 3)
    code, _, said = space.command("run", "--stack", "farm")
    assert (
        code == 2
        and "s requires 2 machines in addition to the head, but at most 1 may be rented at once"
        in said
    ), said
