"""How a run stands is one answer: of the command line, Python and REST, here and at a server, in webhooks, and for a training platform."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pytest

import runner
from runner.api.values import Status
from runner.interface.cli.main import main
from tests.cloud import cloud
from tests.servers.receiver import Receiver
from tests.servers.rest import Rest
from tests.support import Space, until

HEAD: Final = "recipe: {name}@1\nsummary: A training between two steps.\n"
TRAINS: Final = (
    HEAD
    + """\
inputs: {{max_steps: {{type: integer, default: 10}}}}
steps:
  data: {{run: 'echo {name} > {{{{ outputs.o }}}}', outputs: {{o: {name}-data.txt}}}}
  train:
    run: |
      told=$(for n in 1 2 3 4 5 6; do echo "{{\\"step\\": $n, \\"max_steps\\": {{{{ inputs.max_steps }}}}, \\"loss\\": 0.5}}"; done)
      echo "$told" >> $RECIPE_METRICS
      echo '{{"warning": "two rows were cut"}}' >> $RECIPE_METRICS
      echo epoch 1
      {end}
      echo 1 > {{{{ outputs.o }}}}
    deps: [{name}-data.txt]
    metrics: true
    outputs: {{o: {name}-model.txt}}
  evaluate:
    run: 'echo "{{\\"step\\": 1, \\"perplexity\\": 8.5}}" >> $RECIPE_METRICS; echo 1 > {{{{ outputs.o }}}}'
    needs: [train]
    metrics: true
    outputs: {{o: {name}-quality.txt}}
"""
)
RENTS: Final = (
    HEAD
    + """\
steps:
  train: {{run: 'echo 1 > {{{{ outputs.o }}}}', resources: {{gpus: 1}}, outputs: {{o: {name}.txt}}}}
"""
)
STANDINGS: Final = ("training", "cancelled", "failed", "no-machine", "restored")
EXPECTED: Final[Mapping[str, tuple[str, int, int, float]]] = {
    "training": ("EXECUTING", 1, 3, 58.3),
    "cancelled": ("CANCELLED", 3, 3, 58.3),
    "failed": ("FAILED", 3, 3, 58.3),
    "no-machine": ("FAILED_PROVISIONING", 1, 1, 0.0),
    "restored": ("COMPLETED", 3, 3, 100.0),
}
"""The word of each, and its progress: steps that are over, of how many, percent.  The training counts as ten of the other steps."""


class View(NamedTuple):
    """What a front says of a run."""

    word: str
    step: int
    total: int | None
    percent: float | None
    failed: object


class Stood(NamedTuple):
    """A run that stands in some way, and the server that has it."""

    how: str
    run: str
    rest: Rest
    hooks: list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stood]]:
    """Gives the run that stands in a way; they are made in the order of `STANDINGS`."""
    space = Space(tmp_path_factory.mktemp("views") / "space")
    with pytest.MonkeyPatch.context() as environ, Receiver() as receiver:
        environ.setenv("RECIPE_LEDGER", str(space.root.with_name("ledger.db")))
        cloud(space, faults={"no_capacity": 99})
        gate = space.root / "gate"
        ends = {
            "trains": f"while [ -e {gate} ]; do sleep 0.02; done",
            "breaks": "echo no rows >&2; exit 3",
        }
        for name, end in ends.items():
            space.write(f"{name}.yaml", TRAINS.format(name=name, end=end))
        space.write("made.yaml", TRAINS.format(name="made", end="true"))
        space.write("rents.yaml", RENTS.format(name="rents"))
        with (space.root / "recipe.toml").open("a") as settings:
            allow = [f"{name}.yaml" for name in (*ends, "made", "rents")]
            settings.write(f"[recipes]\nallow = {allow}\n")
            settings.write(f'[[webhooks]]\nurl = "{receiver.url}"\nevents = ["run.*"]\n')
        space.file = "made.yaml"
        space.run()
        for made in space.root.glob("made-*.txt"):
            made.unlink()
        gate.touch()
        with Rest(space.root, "--with-worker") as rest:
            environ.setenv("RECIPE_TOKEN", rest.token)
            made, known = _made(rest, receiver), dict[str, Stood]()

            def stood(how: str) -> Stood:
                while how not in known:
                    each = next(made)
                    known[each.how] = each
                return known[how]

            yield stood
            gate.unlink(missing_ok=True)


def _made(rest: Rest, receiver: Receiver) -> Iterator[Stood]:
    """Runs, one after the other, as `STANDINGS` has them."""

    def hooks(run: str) -> list[Mapping[str, Any]]:
        return [each.json for each in receiver.got if each.json["data"]["run"] == run]

    def ended(how: str, run: str, state: str) -> Stood:
        rest.until(run, state)
        until(lambda: any(each["data"]["state"] == state for each in hooks(run)))
        return Stood(how, run, rest, hooks(run))

    run = rest.submit("trains", key="job:training")
    until(lambda: (rest.get(f"/v1/runs/{run}")["training"] or {}).get("step") == 6)
    yield Stood("training", run, rest, [])
    assert rest.ask("POST", f"/v1/runs/{run}/cancel").status_code == 202
    yield ended("cancelled", run, "CANCELLED")
    yield ended("failed", rest.submit("breaks", key="job:failed"), "FAILED")
    run = rest.submit("rents", driver="loopback", key="job:no-machine")
    yield ended("no-machine", run, "FAILED")
    yield ended("restored", rest.submit("made", key="job:restored"), "COMPLETED")


def _of_json(found: Mapping[str, Any], word: str = "word") -> View:
    step, total, percent = (found["progress"][name] for name in ("step", "total", "percent"))
    return View(found[word], step, total, percent, found.get("failed"))


def _of_python(found: Status) -> View:
    failed = found.failed._asdict() if found.failed is not None else None
    return View(found.word, *found.progress[:3], failed)


@pytest.mark.parametrize("how", STANDINGS)
def test_every_front_says_the_same_of_a_run(
    standing: Callable[[str], Stood], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    stood = standing(how)
    run, rest, root = stood.run, stood.rest, stood.rest.root

    def command(*words: str) -> Any:
        capsys.readouterr()
        assert main(["-C", str(root), *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = rest.get(f"/v1/runs/{run}")
    told = _of_json(found)
    assert told[:4] == EXPECTED[how]
    said = {
        "show": _of_json(command("show", run)),
        "show --to": _of_json(command("show", run, "--to", rest.url)),
        "python": _of_python(runner.run_of(run, workspace=root).status()),
        "python at a server": _of_python(runner.run_of(run, to=rest.url).status()),
    }
    fronts = (
        ("GET /v1/runs", "word", rest.get("/v1/runs")["runs"]),
        ("runs", "state", command("runs")),
        ("runs --to", "state", command("runs", "--to", rest.url)),
    )
    for front, word, listed in fronts:
        (ours,) = [each for each in listed if each["id"] == run]
        said[front] = _of_json(ours, word)._replace(failed=told.failed)
    if stood.hooks:
        data = stood.hooks[-1]["data"]
        hook = View(
            told.word, *(data["progress"][name] for name in ("step", "total", "percent")), None
        )
        said["webhook"] = hook._replace(failed=data.get("failed"))
    assert said == dict.fromkeys(said, told)
    of_job = "training" if how == "cancelled" else how
    job = rest.get(f"/api/training/status/{of_job}")
    assert (job["word"], job["progress"]) == (told.word, told.percent)
    if how != "no-machine":
        assert (job["current_step"], job["total_steps"]) == (6, 10)
        assert found["training"]["of"] == "train" and found["training"]["values"] == {"loss": 0.5}
    if how in ("training", "cancelled", "failed"):
        assert found["warnings"] == ["train: two rows were cut"]
    failed = found["failed"]
    if failed is not None:
        assert (found["failure"], found["reason"]) == (failed["kind"], failed["words"])
        assert stood.hooks[-1]["data"]["error"] == f"{failed['step']}: {failed['words']}"
    if how == "failed":
        assert job["error_message"] == failed["words"] == "exit 3: no rows"
        assert (failed["step"], failed["exit"], failed["lines"]) == (
            "train",
            3,
            ["epoch 1", "no rows"],
        )
    elif how == "no-machine":
        assert (failed["kind"], failed["step"]) == ("provisioning", "train") and failed["words"]
    else:
        assert failed is None
