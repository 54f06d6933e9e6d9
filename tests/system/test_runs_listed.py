"""What runs reported is in their list: of each trial, of results that were there, and of runs that go on, from an index and not from points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from runner.survey import summaries
from tests.servers.page_space import EVIL, seeded
from tests.servers.rest import Rest


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("listed") / "space"
    seeded(root)
    with Rest(root) as server:
        yield server


def of_recipe(rest: Rest, recipe: str) -> list[dict[str, Any]]:
    return list(rest.get(f"/v1/runs?recipe={recipe}")["runs"])


def test_a_run_has_the_last_and_the_extremes_of_its_metrics(rest: Rest) -> None:
    found = {(each["inputs"]["rate"], each["state"]): each for each in of_recipe(rest, "fit@1")}
    loss = found[0.5, "COMPLETED"]["metrics"]["val_loss"]
    assert (loss["max"], loss["n"], loss["better"], loss["step_of_best"]) == (3.5, 40, "min", 39)
    assert loss["last"] == loss["min"] < 0.53
    assert found[0.5, "COMPLETED"]["metrics"]["score"]["better"] == "max"
    assert found[9, "FAILED"]["metrics"]["val_loss"]["n"] == 40, "also of a step that failed"
    assert found[0.5, "COMPLETED"]["curve"]["values"][0] == 3.5


def test_a_run_that_restored_its_results_has_their_numbers_and_points(rest: Rest) -> None:
    first, again = sorted(
        (each for each in of_recipe(rest, "fit@1") if each["inputs"]["rate"] == 0.3),
        key=lambda each: each["created"],
    )
    assert first["metrics"] == again["metrics"] != {}
    lines = rest.ask("GET", f"/v1/runs/{again['id']}/metrics").text.splitlines()
    points = [json.loads(line) for line in lines]
    assert len(points) == 40 and {each["from"] for each in points} == {first["id"]}
    own = rest.ask("GET", f"/v1/runs/{first['id']}/metrics").text.splitlines()
    assert len(own) == 40 and all("from" not in json.loads(line) for line in own)


def test_a_sweep_has_its_trials_with_their_inputs(rest: Rest) -> None:
    (sweep,) = of_recipe(rest, "fit-sweep@1")
    rates = {each["inputs"]["rate"]: each for each in sweep["trials"]}
    assert list(rates) == [0.2, 0.4, 0.8] and {each["state"] for each in rates.values()} == {"DONE"}
    best = min(each["metrics"]["val_loss"]["min"] for each in rates.values())
    assert sweep["metrics"]["val_loss"]["min"] == best


def test_the_recipe_says_which_way_a_metric_is_better(rest: Rest) -> None:
    (pick,) = of_recipe(rest, "pick@1")
    err = pick["metrics"]["err"]
    assert (err["better"], err["step_of_best"], len(pick["trials"])) == ("max", 3, 2)
    assert rest.get("/v1/recipes/pick@1")["metrics"] == {"err": {"better": "max"}}


def test_points_are_read_once(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_recipe(rest, "fit@1")
    for path in (rest.root / ".recipe").rglob("*.metrics"):
        path.unlink()
    assert of_recipe(rest, "fit@1") == before
    bare = rest.get("/v1/runs?metrics=false")["runs"]
    assert {json.dumps([each["metrics"], each["trials"], each["curve"]]) for each in bare} == {
        "[{}, [], null]"
    }
    assert rest.ask("GET", "/v1/runs", stream=True).headers["content-encoding"] == "gzip"


def test_a_run_is_named_tagged_noted_and_put_away(rest: Rest) -> None:
    run = of_recipe(rest, "fit-sweep@1")[0]["id"]
    said = {"name": "sweep of <rates>", "tags": ["lr", EVIL.split()[0]], "note": EVIL}
    changed = rest.ask("PATCH", f"/v1/runs/{run}", said)
    assert changed.status_code == 200 and {name: changed.json()[name] for name in said} == said
    assert [each["id"] for each in rest.get("/v1/runs?tag=lr")["runs"]] == [run]
    rest.ask("PATCH", f"/v1/runs/{run}", {"archived": True, "note": None})
    (away,) = rest.get("/v1/runs?archived=true")["runs"]
    assert (away["id"], away["name"], away["note"]) == (run, "sweep of <rates>", "")
    assert run not in [each["id"] for each in rest.get("/v1/runs?archived=false")["runs"]]
    rest.ask("PATCH", f"/v1/runs/{run}", {"archived": False})
    assert rest.get("/v1/runs?archived=true")["runs"] == []
    for bad in ({"tags": ["a b"]}, {"name": "x" * 101}, {"colour": "red"}, {"archived": "yes"}):
        assert rest.ask("PATCH", f"/v1/runs/{run}", bad).status_code == 422, bad
    assert rest.ask("PATCH", "/v1/runs/none", said).status_code == 404
    token = rest.ask("POST", "/v1/tokens", {"scope": "read"}).json()["token"]
    assert rest.ask("PATCH", f"/v1/runs/{run}", said, token=token).status_code == 403


def test_summaries_of_several_attempts_are_one() -> None:
    first = summaries.summarize(
        [{"loss": 3.0, "step": 10}, {"loss": 1.0, "step": 20}, {"word": "a"}]
    )
    second = summaries.summarize([{"loss": 2.0, "step": 30}, {"loss": "nan"}])
    loss = summaries.merge_summaries([first, second])["loss"]
    assert loss._replace(curve=()) == ("nan", 1.0, 3.0, 20.0, 10.0, 3, ())
    assert summaries.merge_summaries([first])["word"] == ("a", None, None, None, None, 0, [])
    many = summaries.summarize({"loss": float(n)} for n in range(1000))["loss"]
    assert len(many.curve) == summaries.CURVE and list(many.curve) == sorted(many.curve)
