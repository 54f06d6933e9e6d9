"""What a step kept and made can be found: its checkpoints, its outputs, the log of the attempt that made it; and a run can be named, found and forgotten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import Space, until
from tests.system.test_cli_why import Recipe, recipe

__all__ = ["recipe"]

TRAIN = """
inputs:
  max_steps: {type: integer, default: 3, continues: true}
  word: {type: string, default: one}
steps:
  train:
    run: |
      echo "from $(basename "{{ state.kept.latest | default('nothing') }}")"
      echo {{ inputs.max_steps }} > {{ outputs.model }}
      for n in 1 2 3; do echo '{}' > {{ state.kept }}/step-$n.json; done
      echo '{' > {{ state.kept }}/step-4.json
    state: {kept: {checkpoint: "step-*.json"}}
    outputs: {model: model.txt}
  word:
    matrix: {n: [1, 2]}
    run: echo {{ inputs.word }} {{ matrix.n }} | tee {{ outputs.o }}
    outputs: {o: "word{{ matrix.n }}.txt"}
"""
OTHER = "recipe: other@1\nsteps: {alone: {run: 'echo alone; exit 7', outputs: {o: alone.txt}}}\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """A recipe that ran twice, the second time with its training fresh; then one that failed."""
    space = Space(tmp_path_factory.mktemp("trained"))
    space.recipe(TRAIN)
    space.run()
    assert sorted(space.run({"word": "two"})) == ["word[n=1]", "word[n=2]"]
    return space


@pytest.fixture
def space(trained: Space) -> Space:
    """What `recipe` works in."""
    return trained


def within(space: Space, recipe: Recipe) -> Recipe:
    """The command line in another workspace."""
    return lambda *words: recipe(*words, "-C", str(space.root))


def test_checkpoints_are_listed_with_the_line_to_resume(space: Space, recipe: Recipe) -> None:
    said = recipe("checkpoints")
    rows = {
        line.split()[0]: line
        for line in said.out.splitlines()
        if line.split()[0].startswith("step-")
    }
    assert said.code == 0 and list(rows) == [
        "step-4.json",
        "step-3.json",
        "step-2.json",
        "step-1.json",
    ]
    assert "is incomplete JSON" in rows["step-4.json"] and rows["step-3.json"].endswith(
        "the next run resumes here"
    )
    assert (
        "to resume from the newest complete checkpoint: recipe run ./recipe.yaml word=two -R train"
        in said.out
    )
    told = json.loads(recipe("checkpoints", "train", "--json").out)
    assert [(each["number"], each["whole"], each["newest"]) for each in told[0]["checkpoints"]][
        :2
    ] == [(4, False, False), (3, True, True)]


def test_a_checkpoint_is_found_and_copied_out(space: Space, recipe: Recipe, tmp_path: Path) -> None:
    path = Path(recipe("checkpoints", "train", "--path").out.strip())
    assert path.name == "step-3.json" and path.read_text() == "{}\n"
    assert (
        Path(recipe("checkpoints", "./recipe.yaml", "--number", "2").out.strip()).name
        == "step-2.json"
    )
    target = tmp_path / "copy.json"
    assert (
        recipe("checkpoints", "train", "--export", str(target)).code == 0
        and target.read_text() == "{}\n"
    )
    said = recipe("checkpoints", "train", "--export", str(target))
    assert said.code == 2 and "already exists" in said.err
    said = recipe("checkpoints", "train", "--number", "9")
    assert (
        said.code == 3
        and "train has no checkpoint 9 here" in said.err
        and "available checkpoints: 4, 3, 2, 1" in said.err
    )
    assert "keeps no checkpoints" in recipe("checkpoints", "word").err


def test_a_training_resumes_from_an_earlier_checkpoint(tmp_path: Path, recipe: Recipe) -> None:
    space = Space(tmp_path / "space")
    recipe = within(space, recipe)
    space.recipe(TRAIN)
    space.run()
    assert (
        recipe("checkpoints", "train", "--number", "2", "--resume").out
        == "train resumes from step-2.json: recipe run ./recipe.yaml -R train\n"
    )
    rows = json.loads(recipe("checkpoints", "--json").out)[0]["checkpoints"]
    assert [(each["number"], each["aside"], each["newest"]) for each in rows] == [
        (4, True, False), (3, True, False), (2, False, True), (1, False, False)
    ]  # fmt: skip
    assert recipe("checkpoints", "train", "--number", "3", "--resume").code == 0, "it is taken back"
    assert Path(recipe("checkpoints", "train", "--path").out.strip()).name == "step-3.json"
    said = recipe("checkpoints", "train", "--number", "4", "--resume")
    assert said.code == 2 and "cannot resume from step-4.json" in said.err
    recipe("checkpoints", "train", "--number", "2", "--resume")
    assert recipe("run", "./recipe.yaml", "-R", "train").code == 0
    assert "from step-2" in recipe("logs", "train").out


def test_an_output_is_found_where_it_was_published_else_in_the_store(
    space: Space, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(space.root)
    assert (
        recipe("path", "train.model").out == "model.txt\n"
        and recipe("path", "word").out == "word1.txt\nword2.txt\n"
    )
    assert recipe("path", "word[n=2].o").out == "word2.txt\n"
    stored = Path(recipe("path", "word[n=1].o", "./recipe.yaml", "word=one").out.strip())
    assert stored.read_text() == "one 1\n" and ".recipe/objects" in str(stored)
    said = recipe("path", "train.modell")
    assert said.code == 3 and 'did you mean "train.model"?' in said.err
    (space.root / "none.yaml").write_text("recipe: none@1\nsteps: {s: {run: 'true'}}\n")
    said = recipe("path", "s", "./none.yaml")
    assert said.code == 3 and 'the step "s" of none@1 declares no outputs' in said.err
    said = recipe("path", "word.o", "./recipe.yaml", "word=three")
    assert (
        said.code == 2
        and "has not produced o with these inputs" in said.err
        and "recipe run --until" in said.err
    )


def test_the_log_of_a_fresh_step_is_that_of_the_attempt_that_made_it(
    space: Space, recipe: Recipe
) -> None:
    first, last = (
        row["id"] for row in reversed(json.loads(recipe("runs", "--recipe", "t@1", "--json").out))
    )
    said = recipe("logs", "train")
    assert (
        said.code == 0
        and said.out == "from nothing\n"
        and said.err.startswith(f"from run {first}, ")
        and said.err.endswith(" ago\n")
    )
    assert recipe("logs", "word[n=1]").out == "two 1\n"
    said = recipe("report", "--step", "train", "--json")
    assert json.loads(said.out)["id"] == first and f"from run {first}, " in said.err
    space.write("other.yaml", OTHER)
    assert recipe("run", str(space.root / "other.yaml"), "--name", "bad").code == 1
    said = recipe("logs", "word")
    assert (
        said.out.splitlines() == ["==> word[n=1] <==", "two 1", "==> word[n=2] <==", "two 2"]
        and f"from run {last}, " in said.err
    )
    said = recipe("logs", "nothing")
    assert said.code == 3 and 'no run "nothing"' in said.err


def test_a_run_can_be_named_found_and_forgotten(tmp_path: Path, recipe: Recipe) -> None:
    space = Space(tmp_path / "space")
    recipe = within(space, recipe)
    space.recipe(
        "inputs: {word: {type: string, default: a}}\nsteps: {say: {run: 'echo {{ inputs.word }} > {{ outputs.o }}', outputs: {o: o.txt}}}"
    )
    space.write("other.yaml", OTHER)
    run = ("run", "./recipe.yaml")
    assert (
        recipe(
            *run, "--name", "base", "--tag", "first", "--tag", "slow", "--note", "before the change"
        ).code
        == 0
    )
    assert recipe(*run, "word=b").code == 0 and recipe("run", "./other.yaml").code == 1
    assert (
        recipe("runs", "--tag", "slow")
        .out.splitlines()[1]
        .endswith("base #first #slow (before the change)")
    )
    (failed,) = json.loads(recipe("runs", "--failed", "--json").out)
    assert (
        failed["recipe"] == "other@1"
        and recipe("runs", "--recipe", "t", "--failed").err == "no matching run in this workspace\n"
    )
    (base,) = json.loads(recipe("runs", "--tag", "first", "--json").out)
    assert (
        base["name"] == "base"
        and base["tags"] == ["first", "slow"]
        and base["note"] == "before the change"
    )
    assert json.loads(recipe("report", "base", "--json").out)["id"] == base["id"]

    said = recipe("rm", "base")
    assert (
        said.code == 2
        and "pass `--yes`" in said.err
        and len(json.loads(recipe("runs", "--json").out)) == 3
    )
    assert (
        recipe("rm", failed["id"], "-n").code == 0
        and (space.root / ".recipe/runs" / failed["id"]).exists()
    )
    said = recipe("rm", "base", failed["id"], "--yes")
    assert said.code == 0 and said.out.splitlines()[-1].startswith("freed ")
    assert [row["given"] for row in json.loads(recipe("runs", "--json").out)] == [{"word": "b"}]
    assert not (space.root / ".recipe/runs" / failed["id"]).exists() and not list(
        (space.root / ".recipe/attempts").glob("failed-*")
    )
    assert " 0 ran, 1 fresh" in recipe(*run).err, "what it made stays"


def test_a_run_under_way_is_not_forgotten(tmp_path: Path, recipe: Recipe) -> None:
    space = Space(tmp_path / "space")
    recipe = within(space, recipe)
    os.mkfifo(gate := tmp_path / "gate")
    space.recipe(
        "inputs: {gate: {type: string}}\nsteps: {say: {run: 'cat \"{{ inputs.gate }}\" > {{ outputs.o }}', outputs: {o: o.txt}}}"
    )
    process = space.start("run", f"gate={gate}")
    until(lambda: "RUNNING" in recipe("report").out)
    said = recipe("rm", "last", "--yes")
    assert said.code == 4 and "is running" in said.err
    gate.write_text("")
    assert process.wait(20) == 0
