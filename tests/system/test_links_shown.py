"""The addresses of trackers that a step prints are kept with its run, masked, and shown wherever the run is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from runner.interface.cli.main import main
from tests.servers.receiver import Receiver
from tests.servers.rest import Rest
from tests.support import Space, until

Said: TypeAlias = Callable[..., str]

TRAIN = """\
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
print("wandb: 🚀 View run at https://wandb.ai/ann/recipe/runs/r1?apiKey=1234", file=sys.stderr, flush=True)
print(f"recipe-link: curves https://curves.example/{os.environ['TOKEN']}", flush=True)
pathlib.Path(sys.argv[2]).touch()
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.01)
(out / "wandb" / "offline-run-1-r1").mkdir(parents=True)
(out / "wandb" / "offline-run-1-r1" / "run.wandb").write_text("x")
(out / "events.out.tfevents.1.host").write_text("x")
print(f"wandb: wandb sync {out.resolve()}/wandb/offline-run-1-r1", file=sys.stderr)
sys.exit(int(sys.argv[4]))
"""
BODY = """\
recipe: train@1
summary: A training that has trackers.
inputs: {token: {type: secret, env: TOKEN}, code: {type: integer, default: 0}, begun: {type: string}, go: {type: string}}
steps:
  train:
    run: [python3, train.py, "{{ outputs.board }}", "{{ inputs.begun }}", "{{ inputs.go }}", "{{ inputs.code }}"]
    code: [train.py]
    secrets: [token]
    outputs: {board: board/}
"""
SECRET = "canary-0123456789"
SAID = [("W&B", "https://wandb.ai/ann/recipe/runs/r1"), ("curves", "https://curves.example/***")]
LEFT = [("W&B offline", "train.board/wandb/offline-run-1-r1"), ("TensorBoard", "train.board")]


def pairs(found: list[dict[str, str]]) -> list[tuple[str, str]]:
    assert {each["step"] for each in found} == {"train"}
    return sorted((each["name"], each["to"]) for each in found)


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.setenv("TOKEN", SECRET)
    space = Space(tmp_path / "space")
    space.recipe(BODY)
    space.write("train.py", TRAIN)
    return space


@pytest.fixture
def said(space: Space, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints."""

    def printed(verb: str, *words: str) -> str:
        capsys.readouterr()
        main([verb, "-C", str(space.root), *words])
        return capsys.readouterr().out

    return printed


def test_a_run_is_shown_with_the_links_of_its_steps_while_it_runs_and_after(
    space: Space, tmp_path: Path, said: Said
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    with Receiver() as receiver:
        space.write(
            "recipe.toml",
            f'[recipes]\nallow = ["./recipe.yaml"]\n[[webhooks]]\nurl = "{receiver.url}/"\nevents = ["run.completed"]\n',
        )
        with Rest(space.root, "--with-worker") as rest:
            run = rest.submit("train", inputs={"begun": str(begun), "go": str(go)})
            until(begun.exists)
            until(lambda: len(rest.get(f"/v1/runs/{run}")["links"]) == 2)
            assert pairs(rest.get(f"/v1/runs/{run}")["links"]) == sorted(SAID), (
                "it can be watched while it trains"
            )
            (going,) = json.loads(said("status", "--json"))["running"]
            assert pairs(going["links"]) == sorted(
                SAID
            ) and "train: W&B https://wandb.ai/ann/recipe/runs/r1\n" in said("status")
            go.touch()
            rest.until(run, "COMPLETED")
            assert pairs(rest.get(f"/v1/runs/{run}")["links"]) == sorted(SAID + LEFT)
            until(lambda: len(receiver.got) > 0)
    assert pairs(receiver.got[0].json["data"]["links"]) == sorted(SAID + LEFT)
    assert pairs(json.loads(said("show", run, "--json"))["links"]) == pairs(
        json.loads(said("report", run, "--json"))["links"]
    )
    for words in (("show", run), ("report", run)):
        assert "TensorBoard: train.board  (train)\n" in said(*words), words
    page = said("report", run, "--html", "-o", "-")
    assert (
        '<a href="https://wandb.ai/ann/recipe/runs/r1" rel="noopener noreferrer">' in page
        and "<code>train.board</code>" in page
    )
    assert SECRET not in page and not [
        path
        for path in space.root.rglob("*")
        if path.is_file() and SECRET in path.read_text("latin-1")
    ]


def test_a_step_that_failed_has_what_it_said_and_nothing_of_what_is_gone(
    space: Space, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "go").touch()
    said("run", "./recipe.yaml", "code=3", f"begun={tmp_path}/begun", f"go={tmp_path}/go")
    assert pairs(json.loads(said("report", "--json"))["links"]) == sorted(SAID)


@pytest.mark.proof
@pytest.mark.skipif(
    "RECIPE_TRACKERS" not in os.environ,
    reason="RECIPE_TRACKERS names no Python that has wandb and trackio",
)
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_the_trackers_themselves_are_understood(
    space: Space, said: Said, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    """As they print today: wandb without a network, trackio on this machine."""
    monkeypatch.setenv("TRACKIO_DIR", str(space.root / "trackio"))
    python, words = (
        os.environ["RECIPE_TRACKERS"],
        'dir=sys.argv[1], mode="offline"' if tracker == "wandb" else "",
    )
    space.recipe(
        f'steps: {{train: {{run: ["{python}", t.py, "{{{{ outputs.board }}}}"], code: [t.py], pass_env: [TRACKIO_DIR], outputs: {{board: board/}}}}}}'
    )
    program = [
        f"import pathlib, sys, {tracker}",
        'open(sys.argv[1] + "/note", "w").close()',
        f'{tracker}.init(project="recipe", {words})',
    ]
    space.write(
        "t.py",
        "\n".join(
            [
                *program,
                f'{tracker}.log({{"loss": 1.0}})',
                f"{tracker}.finish()",
                "",
                "for path in pathlib.Path(sys.argv[1]).rglob('*'):",
                "    path.is_symlink() and path.unlink()\n",
            ]
        ),
    )
    space.run()
    (link,) = json.loads(said("report", "--json"))["links"]
    assert link["to"].startswith(
        "train.board/wandb/offline-run-"
        if tracker == "wandb"
        else 'trackio show --project "recipe"'
    )
