"""A step on several nodes is one attempt: it begins on all of them or on none, ends as a whole, and its results are node 0's."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from threading import Thread

import pytest

import runner
from drivers.base import Argv, Command, Job, Lease
from drivers.loopback import Loopback, _end_all
from runner.errors import RecipeError
from runner.execution.terms import Settings
from runner.hosts.place import group
from runner.hosts.place.host_task import HostTask
from runner.hosts.place.remote import RemotePlace
from tests.servers.sshd import Sshd, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until

LOOPBACK = Settings(driver="loopback")


@pytest.fixture
def space(tmp_path: Path) -> Space:
    space = Space(tmp_path / "work")
    hosts(space)
    return space


def hosts(space: Space, count: int = 2, more: str = "") -> None:
    space.write("recipe.toml", f"[drivers.loopback]\nhosts = {count}\n{more}\n")


def test_each_node_knows_the_others_and_the_outputs_are_those_of_node_0(space: Space) -> None:
    space.recipe(
        """
steps:
  train:
    nodes: 2
    deps: [data.txt]
    run: |
      echo "I am {{ node.rank }} of {{ nodes.count }} at {{ nodes.addresses | join(' ') }}"
      test "$NODE_RANK" = {{ node.rank }}
      { cat data.txt; env | grep -E '^(MASTER|NODE|NNODES|RECIPE_NODES)' | sort; pwd; } > {{ outputs.o }}
      echo "{\\"rank\\": $NODE_RANK}" >> "$RECIPE_METRICS"
    metrics: true
    outputs: {o: out.txt}
"""
    )
    space.write("data.txt", "data\n")
    assert space.run(settings=LOOPBACK) == ["train"]
    said = space.read("out.txt").splitlines()
    values = dict(line.split("=", 1) for line in said[1:-1])
    assert said[0] == "data" and "/host-1/" in said[-1]
    assert 1024 < int(values.pop("MASTER_PORT")) < 65536
    assert values == {
        "MASTER_ADDR": "127.0.0.1",
        "NNODES": "2",
        "NODE_RANK": "0",
        "RECIPE_NODES": "127.0.0.1,127.0.0.1",
    }
    assert [
        event.data.get("metrics")
        for event in space.events
        if event.id == "train" and event.after == "DONE"
    ] == [{"rank": 0}]
    assert space.run(settings=LOOPBACK) == []
    assert space.command("logs", "train")[1] == "I am 0 of 2 at 127.0.0.1 127.0.0.1\n"
    assert (
        space.command("logs", "train", "--node", "1")[1] == "I am 1 of 2 at 127.0.0.1 127.0.0.1\n"
    )
    for host in ("host-1", "host-2"):
        assert not [*(space.root / f".recipe/loopback/{host}/.recipe-host/attempts").iterdir()]
    assert not [
        path.name for path in (space.root / ".recipe/attempts").iterdir() if "." in path.name
    ]


def test_the_node_that_fails_first_tells_why_and_the_others_are_ended(space: Space) -> None:
    space.recipe(
        f"""
steps:
  train:
    nodes: 2
    run: |
      if [ $NODE_RANK = 1 ]; then until [ -e {space.root}/waits ]; do :; done; echo no such layer; exit 7; fi
      trap 'echo ended; exit 9' TERM
      touch {space.root}/waits
      while :; do read -t 0.05 x <> <(:) || :; done
    shell: bash
    outputs: {{o: out.txt}}
"""
    )
    assert space.attempt(settings=LOOPBACK) == ["train"]
    assert space.summary is not None
    (failure,) = space.summary.failed
    assert failure.reason == "exit 7 on node 1 (loopback host-2)"
    assert failure.tail == b"no such layer\n" and Path(failure.log).read_text() == "no such layer\n"
    assert space.command("logs", "train")[1] == "ended\n"


def test_a_node_that_prints_nothing_is_not_idle_while_the_first_prints(space: Space) -> None:
    script = "[ $NODE_RANK = 1 ] || for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done; [ $NODE_RANK = 0 ] || sleep 1.6"
    space.recipe(f"steps: {{s: {{nodes: 2, idle_timeout: 1s, run: '{script}'}}}}")
    assert space.run(settings=LOOPBACK) == ["s"]


def test_nodes_that_cannot_reach_each_other_are_reported_before_the_command_begins(
    space: Space,
) -> None:
    hosts(space, more="addresses = ['127.0.0.1', '192.0.2.1']")
    space.recipe(f"steps: {{train: {{nodes: 2, run: touch {space.root}/begun}}}}")
    assert space.attempt(settings=LOOPBACK) == ["train"]
    assert space.summary is not None
    (failure,) = space.summary.failed
    assert failure.reason.startswith("node 0 cannot reach 192.0.2.1:")
    assert not (space.root / "begun").exists()


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [
        ("nodes: 0", 3, "nodes"),
        ("nodes: -2", 3, "nodes"),
        (
            "nodes: '{{ inputs.n - 3 }}'",
            3,
            "`nodes` must be a whole number, 1 or greater, not -1",
        ),
        (
            "nodes: '{{ inputs.n / 4 }}'",
            3,
            "`nodes` must be a whole number, 1 or greater, not 0.5",
        ),
        (
            "nodes: '{{ inputs.n }}', where: local",
            3,
            "s requests 2 nodes, but `where: local` is one node",
        ),
        ("nodes: 3", 2, "s requires 3 nodes, but loopback has 2 free host(s)"),
        ("nodes: 9", 3, "s requests 9 nodes, but `[limits] max_nodes` is 8"),
        (
            "nodes: 2, resources: {cpus: 10000}",
            2,
            "s requires 10,000 processors, but its largest host has",
        ),
    ],
)
def test_a_number_of_nodes_that_cannot_be_is_refused_in_a_sentence(
    space: Space, step: str, code: int, words: str
) -> None:
    with (space.root / "recipe.toml").open("a") as settings:
        settings.write("\n[limits]\nmax_nodes = 8\n")
    space.recipe(
        f"inputs: {{n: {{type: integer, default: 2}}}}\nsteps: {{s: {{run: 'true', {step}}}}}"
    )
    with pytest.raises(RecipeError) as refused:
        space.attempt(settings=LOOPBACK)
    assert refused.value.exit_code == code and words in str(refused.value)


def test_what_a_step_asks_for_counts_for_each_of_its_nodes(space: Space) -> None:
    """Two nodes of one seat each leave no seat for the other step, so that they never run at once."""
    hosts(space, 3)
    body = f"run: 'mkdir {space.root}/alone.$NODE_RANK && rmdir {space.root}/alone.$NODE_RANK', resources: {{pools: {{seat: 1}}}}"
    space.recipe(f"steps: {{a: {{nodes: 2, {body}}}, b: {{{body}}}}}")
    assert sorted(space.run(settings=Settings(driver="loopback", pools={"seat": 2.0}))) == [
        "a",
        "b",
    ]
    moves = [
        (event.id, event.after)
        for event in space.events
        if event.subject == "step" and event.after in ("RUNNING", "DONE")
    ]
    assert [id for id, _ in moves] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_nodes_that_do_not_all_begin_are_all_stopped_and_the_attempt_is_lost(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, slow = RemotePlace.start, [True]

    async def begin(place: RemotePlace, task: HostTask, command: Command) -> Job:
        if slow and task.name.endswith(".1"):
            slow.clear()
            monkeypatch.setattr(group, "BEGIN", 60.0)
            await asyncio.Event().wait()
        return await whole(place, task, command)

    monkeypatch.setattr(RemotePlace, "start", begin)
    monkeypatch.setattr(group, "BEGIN", 0.3)
    once = f"[ -e {space.root}/first ] || {{ touch {space.root}/first; sleep 60; }}"
    space.recipe(f"steps: {{s: {{nodes: 2, run: '{once}'}}}}")
    assert space.run(settings=LOOPBACK) == ["s", "s"]
    (lost,) = (
        event for event in space.events if event.before == "RUNNING" and event.after == "QUEUED"
    )
    assert lost.reason == "lost" and "not all nodes had started after" in str(lost.data["detail"])


def test_a_step_on_two_nodes_runs_over_ssh(space: Space, sshd: Sshd) -> None:  # noqa: F811
    """Two folders of one server are two servers as far as a step can see."""
    user, port = sshd.address.split("@")[0], sshd.address.rpartition(":")[2]
    settings = sshd.settings()
    there = [
        {"host": sshd.address, "root": "one"},
        {"host": f"{user}@localhost:{port}", "root": "two", "address": "127.0.0.1"},
    ]
    tables = ", ".join(
        "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in each.items()) + "}"
        for each in there
    )
    lines = [
        f"hosts = [{tables}]",
        f"host_key = {json.dumps(sshd.host_key)}",
        f"identity = '{settings['identity']}'",
        "agent = false",
    ]
    space.write("recipe.toml", "[drivers.ssh]\n" + "\n".join(lines) + "\n")
    space.recipe(
        "steps: {s: {nodes: 2, run: 'echo $RECIPE_NODES; pwd > {{ outputs.o }}', outputs: {o: o.txt}}}"
    )
    assert space.run(settings=Settings(driver="ssh")) == ["s"]
    assert space.read("o.txt").startswith(f"{sshd.home}/one/attempts/")
    assert space.command("logs", "s", "--node", "1")[1] == "127.0.0.1,127.0.0.1\n"


# -- hosts and workers that go


def begun(space: Space) -> list[str]:
    path = space.root / "begun"
    return sorted(path.read_text().split()) if path.exists() else []


def gated(space: Space) -> Path:
    """A step whose nodes tell that they began, and end when a file is there."""
    space.recipe(
        f"steps: {{s: {{nodes: 2, shell: bash, outputs: {{o: o.txt}}, run: "
        f"'echo $NODE_RANK >> {space.root}/begun; until [ -e {space.root}/gate ]; do read -t 0.05 x <> <(:) || :; done; echo made > o.txt'}}}}"
    )
    return space.root / "gate"


@pytest.mark.parametrize("when", ["while it runs", "while it is given what it needs"])
def test_a_host_that_is_lost_ends_all_nodes_and_the_step_begins_again(
    space: Space, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    whole, gate = Loopback._carry, gated(space)
    staged = space.root / ".recipe" / "attempts"
    asked: list[tuple[Loopback, Lease]] = []

    async def carry(
        driver: Loopback, lease: Lease, argv: Argv, stdin: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        if lease.data["host"] == "host-2":
            asked.append((driver, lease))
        async for data in whole(driver, lease, argv, stdin):
            yield data

    def lose() -> None:
        runs = when == "while it runs"
        until(
            lambda: (
                len(begun(space)) == 2
                if runs
                else staged.exists() and any(path.suffix == ".1" for path in staged.iterdir())
            ),
            seconds=30,
        )
        driver, lease = asked[0]
        driver._lose(lease)
        gate.touch()

    Thread(target=lose).start()
    told: list[str] = []
    monkeypatch.setattr(Loopback, "_carry", carry)
    monkeypatch.setattr(runner._Calls, "say", lambda _listener, text: told.append(text))
    assert space.run(settings=LOOPBACK) == ["s", "s"]
    assert begun(space) in (
        [["0", "0", "1", "1"]]
        if when == "while it runs"
        else [["0", "1"], ["0", "0", "1"], ["0", "0", "1", "1"]]
    )
    assert [words for words in told if "lost host" in words] == [
        "lost host loopback host-2: host-2 no longer exists or was stopped, or its lease was released"
    ]
    assert [
        event.reason
        for event in space.events
        if event.before == "RUNNING" and event.after == "QUEUED"
    ] == ["lost"]
    assert space.read("o.txt") == "made\n"


def test_what_a_node_ends_with_because_the_host_of_another_restarted_is_no_failure(
    space: Space,
) -> None:
    """It is told later that the other is gone than that this one has failed."""
    space.recipe(
        f"steps: {{s: {{nodes: 2, shell: bash, retries: 0, outputs: {{o: o.txt}}, run: 'echo $NODE_RANK >> {space.root}/begun; until [ -e {space.root}/gate ];"
        f" do [ $NODE_RANK = 0 ] || ! rm {space.root}/dead 2> /dev/null || exit 7; read -t 0.05 x <> <(:) || :; done; echo made > o.txt'}}}}"
    )
    worker = space.start("run", "--driver", "loopback")
    until(lambda: len(begun(space)) == 2 or worker.poll() is not None)
    _end_all(space.root / ".recipe/loopback/host-1")
    (space.root / "dead").touch()
    until(lambda: len(begun(space)) == 4 or worker.poll() is not None)
    (space.root / "gate").touch()
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0 and space.read("o.txt") == "made\n", said


@pytest.mark.parametrize("missing", [False, True], ids=["all alive", "one missing"])
def test_nodes_whose_worker_was_killed_are_found_again_and_all_or_none_goes_on(
    space: Space, missing: bool
) -> None:
    gate = gated(space)
    worker = space.start("run", "--driver", "loopback")
    until(lambda: len(begun(space)) == 2)
    worker.kill()
    worker.communicate()
    if missing:
        _end_all(space.root / ".recipe/loopback/host-2")
    after = space.start("run", "--driver", "loopback")
    if missing:
        until(lambda: len(begun(space)) == 4 or after.poll() is not None)
    gate.touch()
    _, said = after.communicate(timeout=60)
    assert after.returncode == 0, said
    assert begun(space) == (["0", "0", "1", "1"] if missing else ["0", "1"])
    assert space.read("o.txt") == "made\n"
    for host in ("host-1", "host-2"):
        assert not [*(space.root / f".recipe/loopback/{host}/.recipe-host/attempts").iterdir()]


@pytest.mark.parametrize(
    "point",
    [
        "attempt-carried:2",
        *(pytest.param(point, marks=pytest.mark.proof) for point in ("job-started", "job-over")),
    ],
)
def test_a_worker_that_is_killed_anywhere_is_followed_by_one_that_ends_the_step(
    space: Space, point: str
) -> None:
    gated(space).touch()
    assert (
        space.command("run", "--driver", "loopback", env={"RECIPE_CRASH_AT": point})[0]
        == -signal.SIGKILL
    )
    space.run(settings=LOOPBACK)
    assert space.read("o.txt") == "made\n"
    assert begun(space) in (
        ["0", "1"],
        ["0", "0", "1"],
    )  # of nodes that had not all begun, those that had begin again


def test_places_that_were_taken_for_a_run_that_was_never_submitted_are_free(space: Space) -> None:
    space.recipe("steps: {s: {nodes: 2, run: 'echo made > o.txt', outputs: {o: o.txt}}}")
    assert (
        space.command("run", "--driver", "loopback", env={"RECIPE_CRASH_AT": "lease-up:2"})[0]
        == -signal.SIGKILL
    )
    assert len(asyncio.run(Loopback(space.root / ".recipe/loopback", hosts=2).leases())) == 2
    assert space.run(settings=LOOPBACK) == ["s"]


# -- state


def test_the_state_is_what_all_nodes_wrote_and_each_goes_on_from_the_whole(space: Space) -> None:
    space.write(
        "train.sh",
        f"""\
if [ -z "$1" ]; then
  mkdir ckpt/step-1
  echo $NODE_RANK > ckpt/step-1/same
  echo "of $NODE_RANK" > ckpt/step-1/of-$NODE_RANK
  touch {space.root}/wrote-$NODE_RANK
  until [ -e {space.root}/wrote-0 ] && [ -e {space.root}/wrote-1 ]; do :; done
  exit 5
fi
cat $1/same $1/of-0 $1/of-1 | tee out.txt
""",
    )
    space.recipe(
        """
steps:
  train:
    nodes: 2
    run: sh train.sh "{{ state.c.latest or '' }}"
    deps: [train.sh]
    state: {c: {path: ckpt, checkpoint: step-*}}
    retries: 1
    outputs: {o: out.txt}
"""
    )
    code, _, err = space.command("run", "--driver", "loopback")
    assert code == 0, err
    assert "step-1 differs between node 1 and node 0 in same; keeping the copy of node 0" in err
    assert space.read("out.txt") == "0\nof 0\nof 1\n"
    assert space.command("logs", "train", "--node", "1")[1] == "0\nof 0\nof 1\n"


@pytest.mark.proof
def test_a_host_in_the_place_of_a_lost_one_is_given_the_whole_state(space: Space) -> None:
    first = "mkdir ckpt/step-1; echo of $NODE_RANK > ckpt/step-1/of-$NODE_RANK; until [ -e never ]; do read -t 0.05 x <> <(:) || :; done"
    space.recipe(
        f"""
steps:
  train:
    nodes: 2
    shell: bash
    run: if [ -z "{{{{ state.c.latest or '' }}}}" ]; then {first}; fi; cat ckpt/step-1/of-0 ckpt/step-1/of-1 | tee out.txt
    state: {{c: {{path: ckpt, checkpoint: step-*, every: 1s}}}}
    outputs: {{o: out.txt}}
"""
    )
    worker = space.start("run", "--driver", "loopback")
    until(
        lambda: (
            len([*space.root.glob(".recipe/states/*/*/c/step-1/of-*")]) == 2
            or worker.poll() is not None
        )
    )
    driver = Loopback(space.root / ".recipe/loopback", hosts=2)
    driver._lose(
        next(lease for lease in asyncio.run(driver.leases()) if lease.data["host"] == "host-2")
    )
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0 and "resumes from step-1" in said, said
    assert space.read("out.txt") == "of 0\nof 1\n"
    assert space.command("logs", "train", "--node", "1")[1] == "of 0\nof 1\n"


# -- `--nodes`


def test_the_option_nodes_is_for_accelerate_steps_that_say_none_and_in_no_key(space: Space) -> None:
    space.write("train.py", "")
    body = "accelerate: {script: train.py, processes: 1}, code: [train.py]"
    space.recipe(
        f"steps: {{a: {{{body}, outputs: {{o: a}}}}, b: {{{body}, nodes: 1, outputs: {{o: b}}}},"
        f" c: {{{body}, where: local, outputs: {{o: c}}}}, d: {{run: 'true'}}}}"
    )
    assert space.keys(nodes=2) == space.keys()
    assert {spec.step: spec.node_count for spec in space.plan(nodes=2).plan.specs()} == {
        "a": 2,
        "b": 1,
        "c": 1,
        "d": 1,
    }
    code, out, _ = space.command("plan", "--nodes", "2")
    assert code == 0 and out.count("on 2 nodes") == 1
    assert space.command("plan", "--nodes", "0")[0] == 3
    code, _, err = space.command("run", "--nodes", "2", "--until", "a")
    assert code == 2 and "a requires 2 nodes, but the driver local has one" in err


def test_an_interrupt_stops_all_nodes(space: Space) -> None:
    space.recipe(
        f'steps: {{s: {{nodes: 2, shell: bash, run: \'trap "echo $NODE_RANK >> {space.root}/told; exit 1" TERM; echo $NODE_RANK >> {space.root}/begun;'
        " while :; do read -t 0.05 x <> <(:) || :; done'}}"
    )
    worker = space.start("run", "--driver", "loopback")
    until(lambda: len(begun(space)) == 2)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert sorted(space.read("told").split()) == ["0", "1"]
    for host in ("host-1", "host-2"):
        assert not [*(space.root / f".recipe/loopback/{host}/.recipe-host/attempts").iterdir()]
