"""The cache of compiled plans, with plans of another version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.planning.plan import Plan
from runner.planning.step import StepSpec
from runner.storage.workspace import Workspace
from runner.survey import plan_cache
from runner.survey.request import Request

RECIPE = """recipe: one@1
steps:
  train: {run: "echo 1 > made.txt", outputs: {made: made.txt}}
"""


def _compile(root: Path) -> Plan:
    with Workspace.open(root) as ws:
        return plan_cache.compile_request(ws, root / "one.yaml", Request("one.yaml"), {})


def _plans(root: Path) -> list[Path]:
    return sorted((root / ".recipe" / "plans").glob("*.json"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(RECIPE)
    _compile(tmp_path)
    assert len(_plans(tmp_path)) == 1
    return tmp_path


def test_a_plan_whose_steps_have_other_fields_is_compiled_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = _plans(root)
    fields = (*StepSpec._fields, "added")
    other = NamedTuple("StepSpec", [(name, object) for name in fields])  # type: ignore[misc]
    monkeypatch.setattr("runner.planning.step.StepSpec", other)
    _compile(root)
    assert len(_plans(root)) == 2 and old in _plans(root)


def _drop_field(nodes: list[list[object]]) -> None:
    del nodes[0][5:]


def _add_fields(nodes: list[list[object]]) -> None:
    nodes[0] += [0] * 9


@pytest.mark.parametrize("change", [_drop_field, _add_fields])
def test_a_damaged_plan_is_compiled_again(
    root: Path, change: Callable[[list[list[object]]], None]
) -> None:
    (path,) = _plans(root)
    note, head, rest = path.read_text().split("\n", 2)
    parts = json.loads(head)
    change(parts[3])
    path.chmod(0o644)
    path.write_text("\n".join((note, json.dumps(parts), rest)))
    assert [spec.options for spec in _compile(root).specs()]
    assert [node.id for node in _compile(root).nodes] == ["train"]
