"""A step with an `image`, run by `recipe run`: the same wherever its container is, and no container outlives its step."""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil
import pytest

from tests.servers.engines import Machine, daemon, machine  # noqa: F401  # fixtures
from tests.servers.sshd import Sshd, sshd  # noqa: F401  # a fixture
from tests.support import Space, until

TOKEN = "a-value-that-nobody-may-see"
BOTH = pytest.mark.parametrize("driver", ["local", "loopback"])


class Yard:
    """A workspace whose steps run in containers."""

    def __init__(self, space: Space, engine: Machine, **env: str) -> None:
        self.space, self.machine = space, engine
        self.env = {**engine.environ, "HOME": str(space.root.parent), **env}
        self.settings("local")

    def settings(self, driver: str, *lines: str) -> None:
        words = (
            f"engine_args = {list(self.machine.flags)}",
            f"container_args = {list(self.machine.args)}",
            *lines,
        )
        self.space.write("recipe.toml", f"[drivers.{driver}]\n" + "\n".join(words) + "\n")

    def recipe(self, steps: dict[str, object], **more: object) -> None:
        self.space.recipe({"image": self.machine.image, **more, "steps": steps})

    def run(self, driver: str, *words: str, code: int = 0, more: str = "") -> str:
        self.settings(driver, more)
        found, out, err = self.space.command("run", "--driver", driver, *words, env=self.env)
        assert found == code, out + err
        assert "Traceback" not in err
        return err

    def left(self) -> list[str]:
        """Containers that were begun for this workspace, wherever its attempts are."""
        found = self.machine.cli("ps", "--all", "--format", "json")
        listed = (
            json.loads(found)
            if found.lstrip().startswith("[")
            else [json.loads(line) for line in found.splitlines()]
        )
        return [
            str(each)
            for each in listed or []
            if str(self.space.root.parent) in str(each.get("Labels"))
        ]

    def ready(self) -> bool:
        """Whether a step has said so.  What it prints comes home as it runs."""
        return any(
            "ready" in path.read_text()
            for path in (self.space.root / ".recipe").glob("attempts/*.log")
        )


@pytest.fixture
def yard(space: Space, machine: Machine) -> Yard:  # noqa: F811
    return Yard(space, machine)


WAITS: dict[str, object] = {
    "s": {"run": "echo ready; while :; do sleep 0.05; done", "outputs": {"o": "o"}}
}


@BOTH
def test_a_step_sees_its_inputs_and_what_it_makes_is_ours(yard: Yard, driver: str) -> None:
    yard.space.write("data/large", "x" * 200_000)
    yard.space.write("data/small", "y")
    script = "cat data/large data/small > o; ls / > root; echo $FROM_IMAGE > env; echo 1 > tree/one; id -u > who"
    yard.recipe(
        {
            "s": {
                "run": script,
                "deps": ["data/"],
                "outputs": {"o": "o", "root": "root", "env": "env", "tree": "tree/", "who": "who"},
            }
        }
    )
    yard.run(driver)
    assert yard.space.read("o") == "x" * 200_000 + "y"
    assert yard.space.read("env") == "yes\n"  # of the image
    assert yard.space.read("who").strip() == str(os.getuid())
    assert "usr" not in yard.space.read("root").split()  # this machine has one
    for name in ("o", "tree/one"):
        found = (yard.space.root / name).stat()
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    assert yard.left() == []


@BOTH
def test_metrics_and_state_come_out_of_a_container(yard: Yard, driver: str) -> None:
    script = """
echo '{"step": 1, "loss": 0.5}' >> $RECIPE_METRICS
if [ -e ckpt/step-1/n ]; then cat ckpt/step-1/n > o; else mkdir -p ckpt/step-1; echo kept > ckpt/step-1/n; exit 3; fi
"""
    state = {"ckpt": {"path": "ckpt/", "checkpoint": "step-*"}}
    yard.recipe(
        {
            "train": {"run": script, "outputs": {"o": "o"}, "metrics": True, "state": state},
            "tell": {"run": "echo {{ steps.train.metrics.loss }} > p", "outputs": {"p": "p"}},
        }
    )
    assert "exit 3" in yard.run(driver, code=1)
    yard.run(driver)
    assert (yard.space.read("o"), yard.space.read("p")) == ("kept\n", "0.5\n")


def test_what_was_made_in_a_container_is_fresh_wherever_one_looks(yard: Yard) -> None:
    yard.recipe({"s": {"run": "echo 1 > o", "outputs": {"o": "o"}}})
    yard.run("loopback")
    assert "everything is fresh" in yard.run("local")


@BOTH
def test_a_secret_reaches_a_container_and_no_list_of_processes(yard: Yard, driver: str) -> None:
    yard.env["TOKEN"] = TOKEN
    yard.space.recipe(
        {
            "image": yard.machine.image,
            "inputs": {"token": {"type": "secret", "env": "TOKEN"}},
            "steps": {
                "s": {
                    "run": 'echo "${#TOKEN} $TOKEN" > o; echo ready; while [ -e o ]; do sleep 0.05; done',
                    "outputs": {"o": "o"},
                    "secrets": ["token"],
                }
            },
        }
    )
    yard.settings(driver)
    worker = yard.space.start("run", "--driver", driver, env=yard.env)
    until(yard.ready)
    words = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert [line for line in words if TOKEN in line] == []
    made = [path for path in (yard.space.root / ".recipe").rglob("o") if "attempts" in path.parts]
    assert [path.read_text() for path in made] == [f"{len(TOKEN)} {TOKEN}\n"]
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert yard.left() == []


@BOTH
def test_a_run_that_is_stopped_leaves_no_container(yard: Yard, driver: str) -> None:
    yard.recipe(WAITS)
    yard.settings(driver)
    worker = yard.space.start("run", "--driver", driver, env=yard.env)
    until(yard.ready)
    assert len(yard.left()) == 1
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 130, said
    assert yard.left() == []


@BOTH
def test_a_container_goes_on_while_its_worker_is_dead_and_is_found_again(
    yard: Yard, driver: str
) -> None:
    yard.recipe(
        {
            "s": {
                "run": "echo ready; touch here; while [ -e here ]; do sleep 0.05; done; echo 1 > o",
                "outputs": {"o": "o"},
            }
        }
    )
    yard.settings(driver)
    worker = yard.space.start("run", "--driver", driver, env=yard.env)
    until(yard.ready)
    worker.kill()
    worker.communicate()
    assert len(yard.left()) == 1
    after = yard.space.start("run", "--driver", driver, env=yard.env)
    next((yard.space.root / ".recipe").rglob("attempts/*/here")).unlink()
    _, said = after.communicate(timeout=60)
    assert after.returncode == 0, said
    assert yard.space.read("o") == "1\n"
    log = next((yard.space.root / ".recipe/runs").glob("*/s.1.log")).read_text()
    assert log.count("ready") == 1
    assert yard.left() == []


@BOTH
def test_an_image_that_is_nowhere_is_one_clear_error(yard: Yard, driver: str) -> None:
    yard.recipe({"s": {"run": "echo 1 > o", "outputs": {"o": "o"}}}, image="localhost:1/none:9")
    said = yard.run(driver, code=2)
    assert "cannot pull the image localhost:1/none:9" in said


@BOTH
def test_python_current_ignores_the_image(yard: Yard, driver: str) -> None:
    yard.recipe({"s": {"run": "ls / > o", "outputs": {"o": "o"}}}, image="localhost:1/none:9")
    yard.run(
        driver,
        "--python",
        "current",
        more=f"python = '{sys.executable}'" if driver == "loopback" else "",
    )
    assert "usr" in yard.space.read("o").split()


def test_a_container_on_a_server(space: Space, machine: Machine, sshd: Sshd) -> None:  # noqa: F811
    yard = Yard(space, machine)
    settings = sshd.settings()
    lines = [
        f"hosts = {settings['hosts']!r}",
        f"known_hosts = '{settings['known_hosts']}'",
        f"identity = '{settings['identity']}'",
        "agent = false",
    ]
    yard.settings("ssh", *lines)
    space.write("data/large", "x" * 200_000)
    yard.recipe(
        {
            "s": {
                "run": "cat data/large > o; echo $FROM_IMAGE > env",
                "deps": ["data/"],
                "outputs": {"o": "o", "env": "env"},
            }
        }
    )
    code, out, err = space.command("run", "--driver", "ssh", env=yard.env)
    assert code == 0, out + err
    assert (space.read("o"), space.read("env")) == ("x" * 200_000, "yes\n")
    yard.recipe(WAITS)
    worker = space.start("run", "--driver", "ssh", env=yard.env)
    until(yard.ready)
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 130, said
    assert yard.left() == []
