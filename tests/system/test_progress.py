"""How far a run is, as its fronts say: by the numbers of its training, and never 100 % of one that failed."""

from __future__ import annotations

import json

import pytest

import runner
from tests.servers.rest import Rest
from tests.support import Space, until

RECIPE = """\
recipe: learns@1
summary: Trains up to a gate.
steps:
  data: {{run: 'echo 1 > {{{{ outputs.o }}}}', outputs: {{o: data.txt}}}}
  train:
    run: |
      cat {{{{ steps.data.o }}}} > {{{{ outputs.o }}}}
      echo '{{"step": 60, "max_steps": 100}}' >> $RECIPE_METRICS
      while [ -e {root}/gate ]; do sleep 0.05; done
      exit 1
    metrics: true
    outputs: {{o: model.txt}}
"""


def test_a_run_is_as_far_as_its_training_and_one_that_failed_is_not_at_100_percent(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.write("gate", "")
    space.write("learns.yaml", RECIPE.format(root=space.root))
    space.write("recipe.toml", '[recipes]\nallow = ["learns.yaml"]\n')
    with Rest(space.root, "--with-worker") as rest:
        monkeypatch.setenv("RECIPE_TOKEN", rest.token)
        job = {"job_id": "j", "user_id": "ann", "recipe": "learns"}
        assert rest.ask("POST", "/api/training/execute", job).status_code == 202
        run = rest.get("/api/training/status/j")["run"]
        # One step of two is done, and 60 of 100 of the other.
        until(lambda: rest.get(f"/v1/runs/{run}")["progress"]["percent"] == 80.0)
        assert rest.get("/api/training/status/j")["progress"] == 80.0
        for to in (None, rest.url):
            status = runner.run_of(run, to=to, workspace=space.root).status()
            assert (status.progress.step, status.progress.percent) == (1, 80.0)
        assert "80%" in space.command("show", run)[1]
        (space.root / "gate").unlink()
        found = rest.until(run, "FAILED")["progress"]
        assert found == {"step": 2, "total": 2, "percent": 50.0, "eta": 0.0}
        assert rest.get("/api/training/status/j")["progress"] == 50.0
        shown = json.loads(space.command("show", run, "--json")[1])
        assert shown["progress"]["percent"] == 50.0
