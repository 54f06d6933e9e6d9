"""What is started over REST: like another run with changes, as a sweep, and as a command line that does the same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runner.interface.cli.main import main
from runner.server.recipes import list_available
from runner.server.room import ServedWorkspace
from runner.storage.workspace import Workspace
from tests.servers.rest import Rest
from tests.support import RECIPE

SAY = """\
recipe: say@1
summary: Say words in a row.
inputs:
  word: {type: string, default: "a b"}
  rate: {type: number, default: 0.5, exclusiveMinimum: 0}
  count: {type: integer, default: 2}
  loud: {type: boolean, default: false}
  tags: {type: list, items: string, default: []}
  names: {type: object, default: {}}
  kind: {type: choice, choices: [calm, loud], default: calm}
  from: {type: file, required: false}
presets: {many: {count: 9}}
steps:
  say:
    run: echo {{ inputs.word }} {{ inputs.rate }} {{ inputs.count }} {{ inputs.loud }} {{ inputs.tags | tojson }} {{ inputs.names | tojson }} {{ inputs.kind }} {{ inputs.from | default('') }} > {{ outputs.o }}
    outputs: {o: say.txt}
"""
TRAIN = """\
recipe: train@1
steps: {learn: {run: "true", resources: {gpus: 1}}}
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("starting") / "space"
    root.mkdir()
    (root / "say.yaml").write_text(SAY)
    (root / "hidden.yaml").write_text(
        SAY.replace("say@1", "hidden@1").replace("say.txt", "hidden.txt")
    )
    (root / "train.yaml").write_text(TRAIN)
    (root / "recipe.toml").write_text(
        '[recipes]\nallow = ["./say.yaml", "./train.yaml"]\n[drivers.loopback]\nprice = 1.2\ngpus = 1\nroot = "cloud"\n'
    )
    outside = root.parent / "words with blanks.txt"
    outside.write_text("words\n")
    assert main(["run", "-C", str(root), "./say.yaml", f"from={outside}", "rate=0.25"]) == 0
    assert main(["run", "-C", str(root), "./hidden.yaml"]) == 0
    assert main(["sweep", "-C", str(root), "./say.yaml", "rate=0.1,0.2", "count=3"]) == 0
    with Rest(root, "--with-worker") as server:
        yield server


def runs_of(rest: Rest, recipe: str) -> list[dict[str, Any]]:
    return list(rest.get(f"/v1/runs?recipe={recipe}")["runs"])


def planned(rest: Rest, **body: object) -> Any:
    found = rest.ask("POST", "/v1/plan", body)
    assert found.status_code == 200, found.text
    return found.json()


def problems(rest: Rest, **body: object) -> list[dict[str, str]]:
    found = rest.ask("POST", "/v1/plan", body)
    assert found.status_code == 422, found.text
    return list(found.json()["error"]["problems"])


def test_every_problem_names_its_input(rest: Rest) -> None:
    wrong = {"rate": -1, "count": "x", "kind": "c", "wrod": 1, "from": "/etc/passwd"}
    found = problems(rest, recipe="say", inputs=wrong)
    assert sorted(each["input"] for each in found) == ["count", "from", "kind", "rate", "wrod"]
    found = problems(rest, recipe="say", sweep={"rate": [0.1, -1], "kind": ["calm", "x"]})
    assert sorted(each["input"] for each in found) == ["kind", "rate"]
    found = problems(rest, recipe="say", sweep={"from": ["/etc/passwd"]})
    assert [(each["input"], each["code"]) for each in found] == [("from", "path-not-allowed")]
    assert problems(rest, recipe="sft")[0]["input"] in ("dataset", "base")


def test_a_request_names_a_recipe_or_a_run(rest: Rest) -> None:
    (run,) = runs_of(rest, "say@1")
    for body in ({}, {"recipe": "say", "like": run["id"]}):
        found = rest.ask("POST", "/v1/plan", body)
        assert found.status_code == 422 and "requires `recipe`" in found.text
    assert rest.ask("POST", "/v1/plan", {"like": "none"}).status_code == 404


def test_a_run_like_another_keeps_the_path_that_no_answer_shows(rest: Rest) -> None:
    (run,) = runs_of(rest, "say@1")
    assert run["inputs"]["from"] == "…/words with blanks.txt"
    same = planned(rest, like=run["id"])
    assert [step["answer"] for step in same["steps"]] == ["fresh"]
    body = {"like": run["id"], "inputs": {"rate": 0.75}}
    stored = rest.ask("POST", "/v1/runs", body, headers={"Idempotency-Key": "like"})
    assert stored.status_code == 201, stored.text
    again = rest.ask("POST", "/v1/runs", body, headers={"Idempotency-Key": "like"})
    assert (again.status_code, again.json()["id"]) == (200, stored.json()["id"])
    done = rest.until(stored.json()["id"], "COMPLETED")
    assert done["inputs"] == run["inputs"] | {"rate": 0.75}
    text = rest.ask("GET", f"/v1/runs/{done['id']}/artifacts/say.o").text
    assert " 0.75 " in text and text.endswith("/words with blanks.txt\n")


def test_what_a_run_is_like_has_to_be_offered(rest: Rest) -> None:
    (run,) = runs_of(rest, "hidden@1")
    found = rest.ask("POST", "/v1/runs", {"like": run["id"], "inputs": {"count": 1}})
    assert (found.status_code, found.json()["error"]["code"]) == (409, "not-offered")


def test_a_change_may_not_be_a_path_that_is_not_allowed(rest: Rest) -> None:
    (run,) = [each for each in runs_of(rest, "say@1") if each["inputs"]["rate"] == 0.25]
    found = problems(rest, like=run["id"], inputs={"from": "/etc/passwd"})
    assert [each["code"] for each in found] == ["path-not-allowed"]


def test_a_change_of_an_object_takes_the_parts_that_were_set_before(rest: Rest) -> None:
    run = rest.submit("say", inputs={"names.a": 1, "names.b": 2, "word": "parts"})
    rest.until(run, "COMPLETED")
    assert planned(rest, like=run)["inputs"]["names"] == {"a": 1, "b": 2}
    changed = planned(rest, like=run, inputs={"names": {"c": 3}})
    assert changed["inputs"]["names"] == {"c": 3} and changed["inputs"]["word"] == "parts"


def test_an_input_has_one_value_or_several(rest: Rest) -> None:
    found = problems(rest, recipe="say", inputs={"rate": 0.5}, sweep={"rate": [0.1, 0.2]})
    assert [(each["code"], each["input"]) for each in found] == [("clash", "rate")]
    found = problems(rest, recipe="say", sweep={"wrod": ["a", "b"]})
    assert [(each["code"], each["input"]) for each in found] == [("unknown-input", "wrod")]
    found = problems(rest, recipe="say", sweep={"count": list(range(40)), "rate": [*range(1, 41)]})
    assert [each["code"] for each in found] == ["too-many-steps"]


def test_a_sweep_says_what_it_tries_and_is_started_again_with_changes(rest: Rest) -> None:
    (run,) = runs_of(rest, "say-sweep@1")
    detail = rest.get(f"/v1/runs/{run['id']}")
    assert detail["sweep"] == {"recipe": "say@1", "axes": {"rate": [0.1, 0.2]}}
    assert detail["inputs"] == {"count": 3}
    again = planned(rest, like=run["id"])
    assert again["instances"] == 2
    assert {step["answer"] for step in again["steps"]} == {"fresh"}
    more = planned(rest, like=run["id"], inputs={"count": 4}, sweep={"rate": [0.1, 0.2, 0.3]})
    assert more["instances"] == 3 and more["inputs"] == {"count": 4}
    one = planned(rest, like=run["id"], inputs={"rate": 0.1})
    assert (one["instances"], one["recipe"]) == (1, "say@1")


def test_a_sweep_is_stored_and_a_plan_of_one_leaves_no_file(rest: Rest) -> None:
    folder = rest.root / ".recipe" / "sweeps"
    before = sorted(folder.iterdir())
    body: dict[str, Any] = {"recipe": "say", "inputs": {"word": "a, b"}}
    body["sweep"] = {"rate": [0.5, 1], "kind": ["calm", "loud"]}
    assert planned(rest, **body)["instances"] == 4
    assert sorted(folder.iterdir()) == before
    run = rest.ask("POST", "/v1/runs", body).json()["id"]
    done = rest.until(run, "COMPLETED")
    assert len(done["steps"]) == 4 and done["inputs"] == {"word": "a, b"}
    assert done["sweep"]["axes"] == body["sweep"]


WORDS: list[dict[str, Any]] = [
    {"inputs": {"word": 'it\'s $HOME; `x` \\ "q" *', "rate": 1e-05, "loud": True}},
    {"inputs": {"tags": ["a b", "c,d", "é'"], "names": {"a": {"b": [1, None]}}}, "preset": "many"},
    {"inputs": {"word": "-n", "kind": "loud", "count": -3}},
    {"sweep": {"rate": [0.1, 1e-3], "word": ["x,y", "z"]}, "inputs": {"count": 7}},
    {"sweep": {"tags": [["a"], ["b", "c"]], "loud": [True, False]}},
]


@pytest.mark.parametrize("body", WORDS, ids=map(str, range(len(WORDS))))
def test_the_command_starts_what_the_request_starts(rest: Rest, body: dict[str, Any]) -> None:
    command = planned(rest, recipe="say", **body)["command"]
    assert command.startswith(f"recipe {'sweep' if 'sweep' in body else 'run'} ./say.yaml")
    earlier = {run["id"] for run in rest.get("/v1/runs?limit=200")["runs"]}
    typed = subprocess.run(
        ["sh", "-c", command.replace("recipe ", f"{shlex.join(RECIPE)} ", 1)],
        cwd=rest.root,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert typed.returncode == 0, typed.stderr
    runs = rest.get("/v1/runs?limit=200")["runs"]
    by_command = next(run for run in runs if run["id"] not in earlier)
    done = rest.until(rest.submit("say", **body), "COMPLETED")
    assert done["id"] != by_command["id"] and done["recipe"] == by_command["recipe"]
    assert done["inputs"] == by_command["inputs"] and done["preset"] == by_command["preset"]
    assert all(step["fresh"] == step["instances"] for step in done["graph"]), "nothing differs"


def test_no_command_is_shown_where_no_words_say_it(rest: Rest) -> None:
    assert planned(rest, recipe="say", inputs={"word": "null"})["command"]
    assert planned(rest, recipe="say", resources={"cpus": 2})["command"] is None
    swept = planned(rest, recipe="say", inputs={"word": "a,b"}, sweep={"rate": [1, 2]})
    assert swept["command"] is None, "a command line would take the word for two"


def test_a_command_has_the_driver_and_a_limit_of_its_own(rest: Rest) -> None:
    plan = planned(rest, recipe="say", driver="loopback", limits={"cost": 2.5})
    assert shlex.split(plan["command"])[-2:] == ["--driver=loopback", "--max-cost=2.5"]
    assert main(["run", "-C", str(rest.root), "./say.yaml", "word=limited", "--max-cost=2.5"]) == 0
    run = rest.get("/v1/runs?limit=1")["runs"][0]
    with Workspace.open(rest.root) as ws:
        assert ws.store.runs.get(run["id"]).data["limits"] == {"cost": 2.5}
    timed = planned(rest, recipe="say", limits={"time": 60})
    assert timed["command"] is None, "no words of a command line limit the time"


def test_the_owner_is_offered_what_is_beside_the_settings(rest: Rest) -> None:
    def files(*, for_owner: bool) -> set[str]:
        room = ServedWorkspace(rest.root, os.environ, for_owner=for_owner)
        return {each.word for each in list_available(room) if each.word.startswith("./")}

    assert files(for_owner=False) == {"./say.yaml", "./train.yaml"}
    assert files(for_owner=True) == {"./say.yaml", "./train.yaml", "./hidden.yaml"}
    listed = {each["id"]: each for each in rest.get("/v1/recipes")["recipes"]}
    assert listed["say@1"]["file"] == "./say.yaml" and listed["say@1"]["used"]
    assert listed["sft@1"]["used"] is None and listed["sft@1"]["file"] == ""
    assert rest.get("/v1/recipes/sft@1")["secrets"]["hf_token"] == "HF_TOKEN"


def test_offers_for_a_run_are_asked_once_and_priced_for_its_plan(rest: Rest) -> None:
    body = {"recipe": "train"}
    begun = time.monotonic()
    (shelf,) = [each for each in offers(rest, **body) if each["driver"] == "loopback"]
    first = time.monotonic() - begun
    assert (shelf["step"], shelf["failed"]) == ("learn", "")
    assert [(each["rank"], each["usd_an_hour"]) for each in shelf["offers"]] == [(1, 1.2)]
    begun = time.monotonic()
    failed = {each["driver"] for each in offers(rest, **body) if each["failed"]}
    assert {"runpod", "vastai"} <= failed, "why one was not asked is said of each"
    (machine,) = planned(rest, driver="loopback", **body)["machines"]
    assert (machine["step"], machine["usd_an_hour"]) == ("learn", 1.2)
    print(json.dumps({"first": first, "again, and a plan": time.monotonic() - begun}))
    assert offers(rest, recipe="say") == [], "it rents nothing"
    assert rest.get("/v1/offers?driver=loopback&gpus=1")["drivers"][0]["offers"]


def offers(rest: Rest, **body: object) -> list[Any]:
    found = rest.ask("POST", "/v1/offers", body)
    assert found.status_code == 200, found.text
    return list(found.json()["drivers"])
