"""A step that runs out of memory is tried again with less of what its recipe names, and its result is the one that was asked for."""

from __future__ import annotations

import os
import signal

import pytest

from runner.execution.steps.adjusting import divide_value
from runner.storage.records.store import Store
from tests.support import Space, until

RECIPE = """
recipe: train@1
inputs:
  micro_batch: {{type: integer, default: 12, minimum: 1}}
  fits: {{type: integer, default: 4, key: false}}
steps:
  train:
    run: |
      echo {{{{ inputs.micro_batch }}}} >> {root}/tried
      while [ -e {root}/slow ] && [ {{{{ inputs.micro_batch }}}} -le 6 ]; do sleep 0.02; done
      [ {{{{ inputs.micro_batch }}}} -le {{{{ inputs.fits }}}} ] || {{ echo 'CUDA out of memory'; exit 1; }}
      echo model > model
    outputs: {{model: model}}
    retries: {{oom: {{micro_batch: "/2"}}}}
  use: {{run: "cat {{{{ steps.train.model }}}} > used", outputs: {{used: used}}}}
"""


@pytest.fixture
def trained(space: Space) -> Space:
    space.recipe(RECIPE.format(root=space.root))
    return space


def tried(space: Space) -> list[str]:
    return (space.root / "tried").read_text().split()


def test_a_step_that_runs_out_of_memory_is_halved_until_it_fits_and_never_again(
    trained: Space,
) -> None:
    code, _, said = trained.command("run")
    assert (
        code == 0
        and tried(trained) == ["12", "6", "3"]
        and "train ran out of memory; retrying with micro_batch 3" in said
    ), said
    code, _, said = trained.command("run")
    assert code == 0 and len(tried(trained)) == 3
    _, told, _ = trained.command("why", "train")
    assert "stands_for" in told and "the step ran with micro_batch 3" in told
    assert trained.command("run", "micro_batch=3")[0] == 0 and len(tried(trained)) == 3


def test_a_step_that_cannot_be_smaller_fails_for_want_of_memory(trained: Space) -> None:
    code, _, said = trained.command("run", "fits=0")
    assert code == 1 and tried(trained) == ["12", "6", "3", "1"] and "out of memory" in said, said


def test_a_worker_that_takes_over_begins_with_what_the_one_before_it_had_come_to(
    trained: Space,
) -> None:
    trained.write("slow", "")
    worker = trained.start("run")
    until(
        lambda: (
            (trained.root / "tried").exists()
            and tried(trained) == ["12", "6"]
            and _failed(trained) == 1
        )
    )
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate(timeout=30)
    (trained.root / "slow").unlink()
    code, _, said = trained.command("run")
    assert code == 0 and tried(trained) == ["12", "6", "3"], said


def _failed(space: Space) -> int:
    with Store.open(space.root / ".recipe") as store:
        (row,) = store.runs.latest()
        return sum(each.reason == "oom" for each in store.runs.attempts(row.id))


@pytest.mark.parametrize(
    ("value", "by", "less"),
    [
        (12, 2, 6),
        (6, 2, 3),
        (3, 2, 1),
        (5, 2, 1),
        (9, 2, 3),
        (1, 2, None),
        (8, 4, 2),
        ("8", 2, None),
    ],
)
def test_what_is_divided_stays_a_divisor_of_what_it_was(
    value: object, by: int, less: int | None
) -> None:
    assert divide_value(value, by) == less


def test_an_input_that_is_not_there_is_refused_with_the_one_that_is_near(trained: Space) -> None:
    trained.recipe(
        RECIPE.format(root=trained.root).replace("oom: {micro_batch", "oom: {micro_bach")
    )
    code, _, said = trained.command("check")
    assert code == 3 and 'there is no input "micro_bach"' in said and "micro_batch" in said, said
