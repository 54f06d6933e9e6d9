"""What a step prints for `metrics: {pattern}` is seen while it runs, as what is written to $RECIPE_METRICS is."""

from __future__ import annotations

import json

import runner
from tests.support import Space, until

RECIPE = """
steps:
  train:
    run: |
      echo "step 1 loss 0.9"; echo nothing; echo "step 2 loss 0.5"
      while [ ! -e "ROOT/go" ]; do sleep 0.05; done
      echo "step 3 loss 0.25"
    metrics: {pattern: 'step (?P<step>\\d+) loss (?P<loss>\\S+)'}
"""


def test_the_numbers_of_a_pattern_are_seen_while_the_step_runs(space: Space) -> None:
    space.recipe(RECIPE.replace("ROOT", str(space.root)))
    process = space.start("run")
    try:
        until(lambda: "EXECUTING" in space.command("runs")[1], seconds=40)
        [row] = json.loads(space.command("runs", "--json")[1])
        run = runner.run_of(row["id"], workspace=space.root)

        def values() -> list[dict[str, object]]:
            return [dict(point.values) for point in run.metrics()]

        until(lambda: len(values()) == 2, seconds=20)
        assert values() == [{"step": 1, "loss": 0.9}, {"step": 2, "loss": 0.5}]
        until(lambda: "0.5" in space.command("status")[1], seconds=20)
    finally:
        space.write("go", "")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert values()[-1] == {"step": 3, "loss": 0.25}
