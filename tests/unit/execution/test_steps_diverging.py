"""A loss that is no number is told once, and may end its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from tests.unit.execution.fakes import SimulatedRun, StartedJob

RECIPE = 'steps: {a: {run: "true", metrics: true%s}}'


async def diverges(job: StartedJob) -> Exit:
    job.report('{"step": 1, "loss": NaN}\n')
    import asyncio

    for _ in range(50):
        if job.stopping.is_set():
            return Exit(None, reason="stopped")
        await asyncio.sleep(0.1)
        job.report('{"step": 2, "loss": NaN}\n')
    return Exit(0)


async def diverges_at_the_end(job: StartedJob) -> Exit:
    job.report('{"step": 1, "loss": NaN}\n')
    return Exit(0)


@pytest.mark.parametrize("program", [diverges, diverges_at_the_end])
@pytest.mark.parametrize("stops", [True, False])
def test_a_loss_that_is_no_number_is_told_once(
    tmp_path: Path, program: object, stops: bool
) -> None:
    recipe = RECIPE % (", on_nan: stop" if stops else "")
    run = SimulatedRun(tmp_path, recipe, {"a": program})  # type: ignore[dict-item]
    report = run.run()
    assert report.state == ("FAILED" if stops else "COMPLETED")
    then = "the step is stopped (`on_nan: stop`)" if stops else "the step continues"
    assert len([words for words in run.heard.words if words.endswith(then)]) == 1
    assert [event.reason for event in run.steps].count("nan") == (2 if stops else 1)
    assert run.agents[""].stopped == (["a"] if stops and program is diverges else [])
    assert run.last_of("a").data["warnings"]
