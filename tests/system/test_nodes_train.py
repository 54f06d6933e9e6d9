"""The same training on one node with two processes and on two nodes with one each, one of which is killed on the way: the same bits.

`make test` has the parts: a step on two nodes (test_nodes, test_slurm_runs), the kill of a node (test_nodes_killed), and that two processes learn and resume
to the same bits (test_text_train).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import pytest

from tests.servers.slurm import Slurm
from tests.support import Space, until

ROOT = Path(__file__).resolve().parents[2]
ALL = bool(os.environ.get("RECIPE_NODES_ALL"))
"""Try all trainers: minutes."""
STEPS = 4
ENV = {"OMP_NUM_THREADS": "1"}  # as many threads in each process, on however many nodes they are

pytestmark = [pytest.mark.xdist_group("sft"), pytest.mark.proof]


class Nodes(NamedTuple):
    """Two hosts of a driver: what their folders are below the workspace, and the driver's settings."""

    driver: str
    first: str
    second: str
    settings: str


LOOPBACK = Nodes(
    "loopback",
    ".recipe/loopback/host-1/.recipe-host",
    ".recipe/loopback/host-2/.recipe-host",
    "hosts = 2",
)
SLURM = Nodes("slurm", "there/n1", "there/n2", "")
"""One allocation of two nodes, where Slurm is installed."""


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    if request.param is LOOPBACK:
        yield LOOPBACK
        return
    with Slurm() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        yield SLURM
        assert cluster.jobs() == []


def workspace(root: Path, recipe: str, processes: int, nodes: Nodes = LOOPBACK) -> Space:
    """A recipe of the library with so many processes on a node, whose checkpoints come home every second."""
    space = Space(root)
    shutil.copytree(
        ROOT / "recipes" / "trainers",
        root / "trainers",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    assert "every: 5m" in text and "    accelerate:\n" in text
    space.write(
        "recipe.yaml",
        text.replace("every: 5m", "every: 1s").replace(
            "    accelerate:\n", f"    accelerate:\n      processes: {processes}\n"
        ),
    )
    there = f"root = '{root}/there'\n" if nodes is SLURM else ""
    space.write(
        "recipe.toml",
        f"[drivers.{nodes.driver}]\npython = '{sys.executable}'\n{nodes.settings}\n{there}",
    )
    return space


def asked(recipe: str) -> tuple[str, ...]:
    more = ("eval_every=0",) if recipe == "sft@1" else ()
    return (
        "run",
        "--preset",
        "smoke",
        "--python",
        "current",
        "--until",
        "train",
        f"max_steps={STEPS}",
        "save_every=2",
        *more,
    )


def learned(space: Space) -> dict[str, bytes]:
    """The weights that step `train` made, as they are stored."""
    found = (path for path in (space.root / ".recipe" / "objects").glob("*/*.t/*.safetensors"))
    return {path.name: path.read_bytes() for path in found if "base" not in path.name}


def ran(space: Space, *words: str) -> None:
    process = space.start(*words, env=ENV)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said


def killed(space: Space, nodes: Nodes, *words: str) -> None:
    """The same; when both nodes have saved, time stands still there until that has come home, and one node is killed."""
    worker = space.start(*words, "-v", env=ENV)
    home, second = space.root / ".recipe" / "states", f"{space.root}/{nodes.second}/attempts/"
    try:
        until(
            lambda: (
                list(space.root.glob(f"{nodes.first}/states/*/*/*-*[0-9]"))
                or worker.poll() is not None
            ),
            seconds=200,
        )
        assert worker.poll() is None, worker.communicate()
        for process in trainers(space.root):
            process.send_signal(signal.SIGSTOP)
        until(lambda: list(home.glob("*/*/*/*-*[0-9]")) or worker.poll() is not None, seconds=60)
        for process in trainers(space.root):
            process.send_signal(
                signal.SIGKILL if process.cwd().startswith(second) else signal.SIGCONT
            )
        _, said = worker.communicate(timeout=300)
    finally:
        worker.kill()
    assert worker.returncode == 0, said
    assert "resumes from " in said, said


def trainers(folder: Path) -> list[psutil.Process]:
    """Every process that was started in an attempt below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(f"{folder}/") and "/attempts/" in process.cwd():
                found.append(process)
        except psutil.Error:
            continue
    return found


HERE = SLURM if shutil.which("slurmctld", path=f"{os.defpath}:/usr/sbin") else LOOPBACK
CASES = [pytest.param("sft@1", HERE)]
if ALL:
    CASES += [
        pytest.param(recipe, LOOPBACK) for recipe in ("sft@1", "cpt@1", "dpo@1", "flux-lora@1")
    ]


@pytest.mark.parametrize(
    ("recipe", "nodes"),
    CASES,
    indirect=["nodes"],
    ids=lambda value: value.driver if isinstance(value, Nodes) else None,
)
def test_two_nodes_learn_the_very_bits_that_two_processes_learn(
    recipe: str, nodes: Nodes, tmp_path: Path
) -> None:
    one = workspace(tmp_path / "one", recipe, 2)
    ran(one, *asked(recipe))
    two = workspace(tmp_path / "two", recipe, 1, nodes)
    killed(two, nodes, *asked(recipe), "--nodes", "2", "--driver", nodes.driver)
    assert learned(two) == learned(one) != {}
