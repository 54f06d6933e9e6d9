"""A plan that a request asks for has a process of its own: it may take some time, some memory, and no more than a few are computed at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.errors import CannotRun, Invalid, Problem
from runner.server import planner as planning
from runner.server.answers import Refused
from runner.server.market import CachedOffers
from runner.server.planner import Planner
from runner.server.recipes import AskedPlan, PlanView, check_request, plan_request
from runner.server.room import ServedWorkspace


def process_of(ws: ServedWorkspace) -> int:
    return os.getpid()


def never_ends(ws: ServedWorkspace) -> None:
    while True:
        pass


def never_wakes(ws: ServedWorkspace) -> None:
    time.sleep(1000)


def takes_memory(ws: ServedWorkspace) -> None:
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))


def nests(ws: ServedWorkspace) -> None:
    nests(ws)


def dies(ws: ServedWorkspace) -> None:
    os._exit(7)


def refuses(ws: ServedWorkspace) -> None:
    raise Invalid([Problem("odd", "this is odd", None, "make it even"), Problem("b", "and this")])


def cannot(ws: ServedWorkspace) -> None:
    raise CannotRun("it cannot", fix="help it")


def breaks(ws: ServedWorkspace) -> None:
    raise ZeroDivisionError("an error of ours")


def call(tmp_path: Path, function: Callable[[ServedWorkspace], Any], **limits: Any) -> Any:
    return asyncio.run(Planner(**limits).call(function, ServedWorkspace(tmp_path, {})))


def refusal(tmp_path: Path, function: Callable[[ServedWorkspace], Any], **limits: Any) -> Refused:
    with pytest.raises(Refused) as found:
        call(tmp_path, function, **limits)
    return found.value


def test_a_plan_is_computed_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert call(tmp_path, process_of) not in (os.getpid(), call(tmp_path, process_of))


@pytest.mark.parametrize("function", [never_ends, never_wakes])
def test_a_plan_that_takes_too_long_is_refused(
    tmp_path: Path, function: Callable[[ServedWorkspace], Any]
) -> None:
    error = refusal(tmp_path, function, seconds=1.0)
    assert (error.status, error.code) == (422, "plan-too-large")
    assert "1 s" in error.message


def test_a_plan_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, takes_memory, memory=1 << 28)
    assert (error.status, error.code) == (422, "plan-too-large")
    assert "0.3 GB of memory" in error.message


@pytest.mark.parametrize("function", [nests, dies])
def test_a_plan_whose_process_cannot_go_on_is_refused(
    tmp_path: Path, function: Callable[[ServedWorkspace], Any]
) -> None:
    assert refusal(tmp_path, function).code == "plan-too-large"


def test_what_is_wrong_with_a_request_comes_back_as_it_is(tmp_path: Path) -> None:
    error = refusal(tmp_path, refuses)
    assert (error.status, error.code, error.message) == (422, "invalid", "2 problems")
    assert [(each.code, each.fix) for each in error.problems] == [
        ("odd", "make it even"),
        ("b", ""),
    ]
    error = refusal(tmp_path, cannot)
    assert (error.status, error.message, error.fix) == (422, "it cannot", "help it")


def test_an_error_of_ours_is_no_refusal(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: an error of ours"):
        call(tmp_path, breaks)


def test_more_plans_than_may_wait_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "WAITING", 3)

    async def ask_for_five() -> list[object]:
        planner, ws = Planner(), ServedWorkspace(tmp_path, {})
        calls = (planner.call(process_of, ws) for _ in range(5))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(ask_for_five())
    refused = [each for each in found if isinstance(each, Refused)]
    assert [(each.status, each.code) for each in refused] == [(503, "too-many-plans")] * 2
    assert refused[0].headers["retry-after"] == "5"
    assert len({each for each in found if isinstance(each, int)}) == 3


def allowed(root: Path, body: str) -> ServedWorkspace:
    root.mkdir()
    (root / "mine.yaml").write_text(f"recipe: mine@1\n{body}")
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./mine.yaml"]\n')
    return ServedWorkspace(root, os.environ)


def plan(ws: ServedWorkspace, asked: AskedPlan) -> PlanView:
    return plan_request(ws, CachedOffers(), check_request(ws, asked), asked)[0]


LATE = """\
inputs: {layers: {type: list, items: integer, default: [1, 2]}, unread: {type: integer, default: 1}}
steps:
  train: {run: 'echo 1 > "{{ outputs.o }}"', outputs: {o: model.bin}}
  report: {run: [echo, "REPORT", "{{ steps.train.o }}"]}
"""


def test_a_plan_over_rest_refuses_what_no_attempt_can_render(tmp_path: Path) -> None:
    ws = allowed(tmp_path / "space", LATE.replace("REPORT", "--layers={{ inputs.layers }}"))
    with pytest.raises(Invalid) as found:
        plan(ws, AskedPlan(recipe="mine"))
    assert "a list cannot be inserted into text" in found.value.problems[0].message


def test_a_plan_over_rest_refuses_a_value_for_an_input_that_nothing_reads(tmp_path: Path) -> None:
    body = LATE.replace("REPORT", "{{ inputs.layers[0] }}")
    ws = allowed(tmp_path / "space", body)
    assert [step.id for step in plan(ws, AskedPlan(recipe="mine")).steps] == ["train", "report"]
    with pytest.raises(Invalid) as found:
        plan(ws, AskedPlan(recipe="mine", inputs={"unread": 2}))
    assert '"unread"' in found.value.problems[0].message
