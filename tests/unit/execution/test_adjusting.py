"""A step that ran out of memory is tried with smaller inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from runner.execution.steps.adjusting import count_out_of_memory, divide_value
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob, writes

RECIPE = """
inputs: {micro_batch: {type: integer, default: 12}, other: {type: integer, default: 3}}
steps:
  train:
    run: [echo, "{{ inputs.micro_batch }}"]
    outputs: {o: a.txt}
    retries: {oom: {micro_batch: "/2"}}
"""


@pytest.mark.parametrize(
    ("value", "by", "smaller"),
    [
        (12, 2, 6),
        (9, 2, 3),
        (2, 2, 1),
        (7, 2, 1),
        (12, 5, 2),
        (1, 2, None),
        (0, 2, None),
        (True, 2, None),
        ("12", 2, None),
        (3.0, 2, None),
    ],
)
def test_a_value_is_divided_into_a_whole_number(
    value: object, by: int, smaller: int | None
) -> None:
    assert divide_value(value, by) == smaller


def _fits(most: int) -> Program:
    async def program(job: StartedJob) -> Exit:
        if int(job.command.argv[-1]) > most:
            return Exit(1, reason="oom")
        return await writes(a="1")(job)

    return program


def test_a_step_is_tried_with_smaller_inputs_until_it_fits(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"train": _fits(3)})
    assert run.run().state == "COMPLETED" and run.states_of("train").count("RUNNING") == 3
    words = "train ran out of memory; retrying with micro_batch 6"
    assert words in run.heard.words
    again = SimulatedRun(tmp_path, RECIPE, {"train": _fits(3)})
    assert again.run().state == "COMPLETED" and not again.started
    with Workspace.open(tmp_path) as ws:
        rows = ws.store.runs.attempts(run.run_id)
    assert count_out_of_memory(rows) == {"train": 2}


def test_a_step_that_can_be_no_smaller_has_failed(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"train": _fits(0)})
    (failure,) = run.run().failures
    assert failure.kind == "oom" and run.states_of("train").count("RUNNING") == 4
