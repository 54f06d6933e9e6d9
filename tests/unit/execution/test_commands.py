"""The command of an attempt: what its environment, limits and place make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Command
from runner.execution.steps import commands
from runner.execution.steps.commands import CommandBuilder, Seat
from runner.hosts.variables import SANDBOX_HOME
from runner.language.step_options import StepOptions
from runner.planning.step import MetricsSpec, ResourceSpec, SecretSpec, StateSpec, StepSpec

SPEC = StepSpec("r@1", "s", {}, run="echo hi", env={"OWN": "1"}, pass_env=["WANTED"])


class Directory:
    """An attempt directory that notes what is done with it, in order."""

    def __init__(self, path: str = "/attempts/a") -> None:
        self.path, self.done = path, list[str]()
        self.overlays = None
        self.folder = Of(remove_unused=lambda: self.done.append("ready"))

    def prepare_outputs(self, _outputs: object) -> None:
        self.done.append("outputs")

    def add_bytes(self, _data: bytes, path: str) -> None:
        self.done.append(path)


class World:
    """One step, on as many hosts as `nodes` says."""

    def __init__(self, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.image, self.sandbox, self.expected = "", "", dict[str, float]()
        self.secrets, self.directory = list[str](), Directory()
        self.asked: list[Any] = []
        monkeypatch.setattr(commands, "training_length", lambda _survey, _id: 90.0)
        masker = Of(learn=lambda secrets: self.secrets.extend(each.name for each in secrets))
        self.commits = Of(run="run-1", masker=masker, expected=self.expected)
        environments = Of(
            container_image=lambda _spec, _place: self.image,
            sandbox=lambda _spec: self.sandbox,
            containers_of=lambda _place: Of(wrap=self._wrap),
        )
        ws: Any = Of(own=Path("/nowhere"), environ=environ)
        steps: Any = Of(survey=None, plan=Of(recipe="r@1"), made={})
        monkeypatch.setattr(commands.judging, "scope_of", lambda *_: {"inputs": {}})
        self.builder = CommandBuilder(ws, steps, self.commits, environments)  # type: ignore[arg-type]

    def _wrap(self, command: Command, *asked: object, **more: object) -> Command:
        self.asked = [*asked, more]
        return command

    def build(
        self, spec: StepSpec = SPEC, *, rank: int = 0, nodes: int = 1, devices: Sequence[Any] = ()
    ) -> tuple[Command, bytes | None]:
        capacity = Of(share=lambda _rank, found: found, template_host=lambda gpus: {"gpus": gpus})
        place: Any = Of(
            name="h", port=0, elsewhere="", own_disk=False, python="/usr/bin/python3",
            address="10.0.0.1", login={}, capacity=capacity,
            paths=lambda d: Of(cwd=d.path, script=f"{d.path}.sh", log=f"{d.path}.log", metrics=f"{d.path}.metrics"),
            env=lambda own: {"PATH": "/bin", "HOME": "/home/u", "HF_HOME": "/data/hf", "SEEN": ",".join(sorted(own))},
            find_mounts=lambda *_: [],
        )  # fmt: skip
        members = [place, *(Of(address=f"10.0.0.{n + 2}") for n in range(nodes - 1))]
        attempt: Any = Of(
            id="s", key="k1", number=0, spec=spec, node=Of(outputs=[]), devices=devices,
            place=Of(members=members, capacity=capacity), task=Of(states=[]),
        )  # fmt: skip
        seat = Seat(rank, place, self.directory, "/envs/x/bin/python", "a")  # type: ignore[arg-type]
        return self.builder.build(attempt, seat, {})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    environ = {"WANTED": "w", "UNWANTED": "u", "KEY": "k" * 20, "CHECKPOINT_INTERVAL_STEPS": "5"}
    return World(environ, monkeypatch)


def test_a_script_is_beside_the_directory_and_the_last_word(world: World) -> None:
    command, script = world.build()
    assert command.argv == ("/bin/sh", "-eu", "/attempts/a.sh") and script == b"echo hi"
    assert (command.cwd, command.log) == ("/attempts/a", "/attempts/a.log")
    assert world.build(SPEC._replace(run=["true"]))[1] is None


def test_templates_know_the_step_the_run_and_the_node(world: World) -> None:
    words = [
        "{{ step.id }}",
        "{{ step.key }}",
        "{{ run.id }}",
        "{{ run.recipe }}",
        "{{ node.rank }}",
        "{{ nodes.count }}",
        "{{ host.gpus }}",
    ]
    spec = SPEC._replace(run=["p", *words], nodes=2, resources=ResourceSpec(gpus=4))
    command, _ = world.build(spec, rank=1, nodes=2)
    assert command.argv == ("p", "s", "k1", "run-1", "r@1", "1", "2", "4")


def test_outputs_and_files_are_there_before_the_directory_is_ready(world: World) -> None:
    world.build(SPEC._replace(files={"f.txt": "text"}))
    assert world.directory.done == ["outputs", "f.txt", "ready"]


def test_a_step_gets_its_own_variables_those_it_asks_for_and_no_other(world: World) -> None:
    env = world.build()[0].env
    assert (env["OWN"], env["WANTED"], env["RECIPE_STEP"], env["RECIPE_RUN"]) == (
        *("1", "w", "s", "run-1"),
    )
    assert env["SEEN"] == "OWN,WANTED" and "UNWANTED" not in env
    assert (env["NODE_RANK"], env["NNODES"]) == ("0", "1") and "MASTER_ADDR" not in env


def test_programs_of_its_environment_come_first_but_not_in_an_image(world: World) -> None:
    assert world.build()[0].env["PATH"] == "/envs/x/bin:/bin"
    world.image = "an/image"
    assert "/envs/x/bin" not in world.build()[0].env.get("PATH", "")


def test_secrets_are_apart_from_the_environment(world: World) -> None:
    command, _ = world.build(SPEC._replace(secrets=[SecretSpec("k", "TOKEN", "KEY", True)]))
    assert command.secrets == {"TOKEN": "k" * 20} and "TOKEN" not in command.env


def test_a_training_is_told_where_it_reports_and_how_often_it_saves(world: World) -> None:
    assert not {"RECIPE_METRICS", "RECIPE_CONTROL"} & world.build()[0].env.keys()
    env = world.build(SPEC._replace(metrics=MetricsSpec(None, None)))[0].env
    assert env["RECIPE_METRICS"] == "/attempts/a.metrics" and env["RECIPE_TOTAL_STEPS"] == "90"
    assert env["CHECKPOINT_INTERVAL_STEPS"] == "5" and "RECIPE_CONTROL" not in env
    state = StateSpec("run", "state/run", None, None, None)
    assert (
        world.build(SPEC._replace(state=[state]))[0]
        .env["RECIPE_CONTROL"]
        .startswith("/attempts/a/")
    )


def test_nodes_know_each_other_and_only_the_first_is_asked_for_output(world: World) -> None:
    spec = SPEC._replace(nodes=2, options=StepOptions(timeout=9.0, idle_timeout=3.0))
    first, second = (world.build(spec, rank=rank, nodes=2)[0] for rank in (0, 1))
    assert (first.timeout, first.idle_timeout, second.timeout, second.idle_timeout) == (
        *(9.0, 3.0, 9.0, None),
    )
    assert second.env["NODE_RANK"] == "1" and second.env["NNODES"] == "2"
    assert second.env["MASTER_ADDR"] == "10.0.0.1"
    assert second.env["RECIPE_NODES"] == "10.0.0.1,10.0.0.2"


@pytest.mark.parametrize(("seconds", "outlives"), [(None, True), (59.0, False), (60.0, True)])
def test_a_step_that_may_take_long_outlives_its_agent(
    world: World, seconds: float | None, outlives: bool
) -> None:
    if seconds is not None:
        world.expected["s"] = seconds
    assert world.build()[0].outlives is outlives


def test_devices_are_locked_and_named(world: World) -> None:
    from drivers.devices import Device

    spec = SPEC._replace(resources=ResourceSpec(gpus=1))
    card = Device("0", "GPU-a", "0")
    command, _ = world.build(spec, devices=[card])
    assert command.locks == (card.lock,) and command.env["CUDA_VISIBLE_DEVICES"]
    assert "CUDA_VISIBLE_DEVICES" not in world.build()[0].env


def test_a_container_is_given_its_devices_and_no_network_if_the_step_says_so(world: World) -> None:
    world.image, world.sandbox = "an/image", "closed"
    world.build(SPEC._replace(resources=ResourceSpec(gpus=0)))
    assert world.asked == ["an/image", [], (), {"needed": False, "network": False}]
    world.sandbox = "network"
    world.build()
    assert world.asked[2:] == [None, {"needed": False, "network": True}]


def test_a_sandbox_begins_the_command_and_hides_the_folders_of_the_login(world: World) -> None:
    assert world.build()[0].env["HF_HOME"] == "/data/hf"
    world.sandbox = "closed"
    command, _ = world.build()
    assert command.argv[-3:] == ("/bin/sh", "-eu", "/attempts/a.sh")
    assert "closed" in command.argv and "/envs/x/bin/python" in command.argv
    assert command.env["HOME"] == SANDBOX_HOME and "HF_HOME" not in command.env
