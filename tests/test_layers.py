"""The walls between the rooms: who may import whom, and who may touch the world.  Each is tried in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import HOME, circles, circles_of_packages, faults, imports, modules, shapes

KNOWN = set(modules(HOME))


def test_the_walls_stand() -> None:
    assert faults(HOME) == []


def test_no_modules_import_each_other() -> None:
    assert circles(imports(HOME)) == []


def test_no_packages_of_a_room_import_each_other() -> None:
    assert circles_of_packages(imports(HOME)) == []


def test_classes_are_measured_by_their_methods_and_functions_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/a.py").write_text(
        "class A:\n    x = 1\n    def one(self): ...\n    async def two(self):\n        def inner(): ...\n        return 1\n"
    )
    classes, functions = shapes(tmp_path)
    assert classes == {"runner/a.py:1 A": 2}
    assert functions == {"runner/a.py:3 one": 1, "runner/a.py:4 two": 3, "runner/a.py:5 inner": 1}


def test_a_circle_is_found_also_in_functions_and_for_types(tmp_path: Path) -> None:
    for name, line in (
        ("a", "def f():\n    from .b import x"),
        ("b", "if TYPE_CHECKING:\n    from . import c"),
        ("c", "from runner.a import y"),
    ):
        (tmp_path / "runner").mkdir(exist_ok=True)
        (tmp_path / f"runner/{name}.py").write_text(line)
    assert circles(imports(tmp_path)) == [["runner.a", "runner.b", "runner.c"]]


def test_a_circle_of_packages_is_found_though_no_modules_are_in_one(tmp_path: Path) -> None:
    for name, line in (
        ("p/a", "from ..q.b import x"),
        ("p/c", ""),
        ("q/b", ""),
        ("q/d", "from ..p import c"),
    ):
        (tmp_path / "runner/hosts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"runner/hosts/{name}.py").write_text(line)
    assert circles(imports(tmp_path)) == []
    assert circles_of_packages(imports(tmp_path)) == [["runner.hosts.p", "runner.hosts.q"]]


@pytest.mark.parametrize(
    ("where", "line", "words"),
    [
        (
            "runner/agent/jobs.py",
            "from ..errors import RecipeError",
            "the agent imports runner.errors.RecipeError",
        ),
        ("runner/agent/jobs.py", "import drivers.base", "the agent imports drivers.base"),
        (
            "runner/errors.py",
            "from .language import units",
            "words imports runner.language.units, which is language",
        ),
        (
            "runner/settings.py",
            "from .storage.workspace import Workspace",
            "words imports runner.storage.workspace.Workspace, which is storage",
        ),
        (
            "runner/language/units.py",
            "from ..planning.plan import Plan",
            "language imports runner.planning.plan.Plan, which is planning",
        ),
        (
            "runner/language/units.py",
            "import runner.storage.records.store",
            "language imports runner.storage.records.store, which is storage",
        ),
        (
            "runner/planning/plan.py",
            "def f():\n    from ..execution import session",
            "planning imports runner.execution.session, which is execution",
        ),
        (
            "runner/planning/plan.py",
            "from ..advice import memory",
            "planning imports runner.advice.memory, which is advice",
        ),
        (
            "runner/storage/workspace.py",
            "from .. import interface",
            "storage imports runner.interface, which is interface",
        ),
        (
            "runner/storage/workspace.py",
            "from ..survey.survey import Survey",
            "storage imports runner.survey.survey.Survey, which is survey",
        ),
        (
            "runner/storage/workspace.py",
            "from ..hosts import pool",
            "storage imports runner.hosts.pool, which is hosts",
        ),
        (
            "runner/storage/workspace.py",
            "from .. import plan",
            "storage imports the front door: runner.plan",
        ),
        (
            "runner/hosts/pool.py",
            "from ..execution import session",
            "hosts imports runner.execution.session, which is execution",
        ),
        (
            "runner/hosts/pool.py",
            "from ..survey.survey import Survey",
            "hosts imports runner.survey.survey.Survey, which is survey",
        ),
        (
            "runner/hosts/pool.py",
            "from ..advice import memory",
            "hosts imports runner.advice.memory, which is advice",
        ),
        (
            "runner/hosts/pool.py",
            "from ..planning.plan import Plan",
            "hosts imports runner.planning.plan.Plan; a place knows no plan",
        ),
        (
            "runner/survey/survey.py",
            "import runner.interface.console",
            "survey imports runner.interface.console, which is interface",
        ),
        (
            "runner/survey/survey.py",
            "from drivers import local",
            "survey imports drivers.local; only hosts load a driver",
        ),
        (
            "runner/execution/session.py",
            "from ..advice import rules",
            "execution imports runner.advice.rules; only refusals asks for advice",
        ),
        (
            "runner/execution/session.py",
            "import drivers.local",
            "execution imports drivers.local; only hosts load a driver",
        ),
        (
            "drivers/base.py",
            "from runner.errors import RecipeError",
            "a driver imports runner.errors.RecipeError",
        ),
        ("drivers/local.py", "import runner", "a driver imports runner"),
        (
            "runner/interface/console.py",
            "from drivers import local",
            "interface imports drivers.local; only hosts load a driver",
        ),
        (
            "runner/interface/console.py",
            "from drivers.fakes.world import World",
            "interface imports drivers.fakes.world.World; only hosts load a driver",
        ),
        (
            "runner/interface/console.py",
            "from ..server import app",
            "interface imports runner.server.app, which is server",
        ),
        (
            "runner/execution/queue.py",
            "from ..server.room import Room",
            "execution imports runner.server.room.Room, which is server",
        ),
        (
            "runner/execution/queue.py",
            "from ..api.requests import cancel",
            "execution imports runner.api.requests.cancel, which is api",
        ),
        (
            "runner/api/requests.py",
            "from ..interface import views",
            "api imports runner.interface.views, which is interface",
        ),
        (
            "runner/api/requests.py",
            "from ..server import room",
            "api imports runner.server.room, which is server",
        ),
        (
            "runner/api/requests.py",
            "import argparse",
            "api imports argparse; only a front knows how it is asked",
        ),
        (
            "runner/api/requests.py",
            "from fastapi import APIRouter",
            "api imports fastapi.APIRouter; only a front knows how it is asked",
        ),
        (
            "runner/api/requests.py",
            "def f():\n    import httpx",
            "api imports httpx; only a front knows how it is asked",
        ),
        (
            "runner/server/runs.py",
            "from drivers import local",
            "server imports drivers.local; only hosts load a driver",
        ),
        ("runner/language/units.py", "import subprocess", "imports subprocess"),
        ("runner/language/units.py", "from urllib import request", "imports urllib.request"),
        ("runner/language/document.py", "def f(p):\n    return open(p)", "calls open()"),
        ("runner/language/parse.py", "def f(p):\n    return p.read_text()", "uses .read_text"),
        ("runner/planning/judge.py", "from time import time", "imports time"),
        ("runner/planning/judge.py", "import socket", "imports socket"),
        ("runner/planning/compile.py", "import os\nHOME = os.environ", "uses .environ"),
        (
            "runner/execution/session.py",
            "x = isinstance(place, RemotePlace)",
            "asks whether a host is this one",
        ),
        (
            "runner/execution/session.py",
            "x = place is self.host_pool.local_place",
            "asks whether a host is this one",
        ),
        (
            "runner/execution/session.py",
            "x = os.environ['HOME']",
            "reads os.environ, which the workspace hands in",
        ),
        (
            "runner/survey/survey.py",
            "x = os.getenv('HOME')",
            "reads os.environ, which the workspace hands in",
        ),
    ],
)
def test_a_broken_wall_is_found(tmp_path: Path, where: str, line: str, words: str) -> None:
    broken = tmp_path / where
    broken.parent.mkdir(parents=True)
    broken.write_text(f"{(HOME / where).read_text() if (HOME / where).exists() else ''}\n{line}\n")
    found = faults(tmp_path, KNOWN)
    assert found and all(fault.startswith(f"{where}:") for fault in found)
    assert words in [fault.split(": ", 1)[1] for fault in found]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("runner/agent/jobs.py", "from . import objects"),
        ("runner/storage/workspace.py", "from ..agent import trees"),
        ("runner/interface/console.py", "from drivers.base import Exit"),
        ("runner/interface/console.py", "from drivers import install_line"),
        ("runner/interface/console.py", "from drivers import fakes"),
        ("runner/hosts/pool.py", "from drivers import load"),
        ("runner/hosts/pool.py", "from ..planning.step import OutputSpec"),
        ("runner/planning/plan.py", "from ..language.template import references"),
        ("runner/storage/workspace.py", "import socket"),
        ("runner/execution/refusals.py", "from ..advice import preflight"),
        ("runner/interface/cli/serve.py", "from ...server.serving import serve"),
        ("runner/server/runs.py", "from ..interface import logs"),
        ("runner/interface/console.py", "x = isinstance(place, RemotePlace)"),
        ("runner/execution/session.py", "x = isinstance(error, DriverError) or error is None"),
    ],
)
def test_an_open_door_is_no_fault(tmp_path: Path, where: str, line: str) -> None:
    target = tmp_path / where
    target.parent.mkdir(parents=True)
    target.write_text(f"{line}\n")
    assert faults(tmp_path, KNOWN) == []
