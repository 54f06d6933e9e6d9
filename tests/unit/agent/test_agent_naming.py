"""An object of a host gets its name from one question at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from runner.agent import attempts, objects, trees
from runner.agent.files import FOLDERS
from runner.agent.request import AgentRequest

FILE = f"{0:064x}"
TREE = f"{FILE}.t"


def _place_files(request: AgentRequest) -> None:
    objects.place_files(request, [FILE])


def _place_tree(request: AgentRequest) -> None:
    objects.place_tree(request, TREE, trees.stamp([("a", "f")], []), False)


def _keep(request: AgentRequest) -> None:
    attempts.keep(request, "attempts/one", [("a", FILE, False)])


@pytest.mark.parametrize(
    ("ask", "name"), [(_place_files, FILE), (_place_tree, TREE), (_keep, FILE)]
)
def test_a_question_that_is_asked_twice_at_once_is_over_when_the_object_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[AgentRequest], None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (*FOLDERS, "partial/us", f"partial/us/{TREE}", "attempts/one"):
        os.makedirs(folder, exist_ok=True)
    for path in (f"partial/us/{FILE}", f"partial/us/{TREE}/a", "attempts/one/a"):
        Path(path).touch()
    request = AgentRequest(str(tmp_path), "boot")
    request.partial = "partial/us"
    fork = multiprocessing.get_context("fork")
    usable = fork.SimpleQueue()

    def again() -> None:
        with suppress(objects.ObjectGone):
            ask(request)
        usable.put(objects.is_verified(request, name))

    other, seal = fork.Process(target=again), objects.seal

    def slowly(*given: str) -> None:
        monkeypatch.setattr(objects, "seal", seal)
        other.start()
        other.join(0.2)
        seal(request, name)

    monkeypatch.setattr(objects, "seal", slowly)
    ask(request)
    other.join()
    assert usable.get()
