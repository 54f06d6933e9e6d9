"""`recipe sweep`: what is the same runs once, a larger sweep runs what is new, and the table at its end marks the best."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import Space

TRAIN = """
recipe: mine@1
summary: A training
inputs:
  lr: {type: number}
  rank: {type: integer, default: 4}
  data: {type: file}
steps:
  prep:
    run: 'cat "{{ inputs.data }}" > "{{ outputs.d }}"'
    outputs: {d: data.txt}
  train:
    run: 'cat "{{ steps.prep.d }}" > "{{ outputs.model }}"; printf "{\\"loss\\": %s}\\n" "{{ inputs.lr * inputs.rank }}" >> "$RECIPE_METRICS"'
    outputs: {model: model.txt}
    metrics: true
outputs: {model: "{{ steps.train.model }}"}
"""


@pytest.fixture(scope="module")
def sweeps(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Space, list[tuple[int, str, str]]]]:
    """A sweep, a larger one, and one by chance."""
    space = Space(tmp_path_factory.mktemp("space"))
    space.write("configs/train.yaml", TRAIN)
    space.write("given/d.txt", "data")
    words = ("sweep", "configs/train.yaml", "data=given/d.txt", "--min", "loss")
    said = [
        space.command(*words, "lr=2,1", "rank=4,8"),
        space.command(*words, "lr=1,2,3", "rank=4,8"),
    ]
    yield (
        space,
        [
            *said,
            space.command(*words, "lr=1,2,3,4", "rank=4,8,16,32", "--random", "3", "--seed", "1"),
        ],
    )


Said = tuple[Space, list[tuple[int, str, str]]]


def test_a_sweep_ends_with_a_table_that_marks_the_best(sweeps: Said) -> None:
    _, [(code, out, said), *_] = sweeps
    assert code == 0, said
    title, head, *rows, last = out.partition("\n\n")[2].splitlines()
    assert title == "mine/train of mine-sweep@1: 4 results of 1 run" and head.split()[:3] == [
        "lr",
        "rank",
        "loss",
    ]
    assert rows[0].split()[:4] == ["*", "1", "4", "4"] and len(rows) == 4
    assert last.startswith("*: the lowest loss, mine[lr=1,rank=4]/train")


def test_what_is_the_same_in_all_instances_runs_once(sweeps: Said) -> None:
    _, [(_, _, said), *_] = sweeps
    assert len(re.findall(r"/prep  \d", said)) == 1 and len(re.findall(r"/train  \d", said)) == 4


def test_a_larger_sweep_runs_what_is_new_and_shows_all(sweeps: Said) -> None:
    _, [_, (code, out, said), _] = sweeps
    assert code == 0 and "6 results of 2 runs" in out
    assert sorted(re.findall(r"\[(lr=\d,rank=\d)\]/train  \d", said)) == [
        "lr=3,rank=4",
        "lr=3,rank=8",
    ]


def test_by_chance_only_so_many_are_tried(sweeps: Said) -> None:
    space, [_, _, (code, out, said)] = sweeps
    assert code == 0 and "3 results" in out, said
    models = {path.parent.name for path in (space.root / "sweeps").glob("*/model.txt")}
    assert len(models) <= 9 and "mine[lr=3,rank=8]" in models
    assert space.command("plan")[1].count("\nrun") == 0


def test_a_recipe_that_is_used_reads_files_of_the_workspace_and_its_own_by_their_paths(
    space: Space,
) -> None:
    space.write("train.yaml", TRAIN.replace("{{ inputs.data }}", "d.txt").replace("  prep:\n", "  prep:\n    deps: [d.txt]\n")
                .replace("{{ steps.prep.d }}", "data.txt").replace("  train:\n", "  train:\n    deps: [data.txt]\n").replace("  data: {type: file}\n", ""))  # fmt: skip
    space.write("d.txt", "data")
    assert space.command("run", "train.yaml", "lr=1")[0] == 0
    code, _, said = space.command("sweep", "train.yaml", "lr=1,2")
    assert code == 0 and "[lr=2]/train  0" in said and "[lr=1]/train  0" not in said, (
        said
    )  # what ran alone is fresh in a sweep
    space.write("d.txt", "other")
    out = space.command("sweep", "train.yaml", "lr=1,2", "-n")[1]
    assert "2 to run, 2 perhaps" in out, out


def test_a_metric_that_nothing_reported_is_named_with_what_was(sweeps: Said) -> None:
    space, _ = sweeps
    code, out, said = space.command(
        "sweep", "configs/train.yaml", "data=given/d.txt", "lr=1,2", "rank=4,8", "--max", "loss_of"
    )
    assert (
        code == 3
        and "of mine-sweep" not in out
        and 'no step reported the metric "loss_of"' in said
        and "loss" in said
    )


def test_steps_of_a_sweep_are_found_by_the_names_that_they_have_in_the_recipe(
    sweeps: Said,
) -> None:
    space, _ = sweeps
    code, out, _ = space.command("why", "train")
    assert code == 0 and "/train is up to date" in out
    code, out, _ = space.command("path", "train.model")
    assert code == 0 and all(line.endswith("model.txt") for line in out.splitlines())
    code, _, err = space.command("checkpoints", "train")
    assert "has no step" not in err
    code, out, _ = space.command("results", "mine", "--step", "train")
    assert code == 0 and "loss" in out
    code, out, _ = space.command("runs")
    assert code == 0 and "lr=" in out and "rank=4,8" in out
    code, _, err = space.command("why", "nothing")
    assert code == 3 and "has no step" in err


def test_steps_of_a_sweep_are_asked_for_by_the_names_that_people_know(sweeps: Said) -> None:
    space, _ = sweeps
    words = ("sweep", "configs/train.yaml", "data=given/d.txt", "lr=1,2", "rank=4,8")
    assert space.command(*words)[0] == 0
    code, out, said = space.command(*words, "-R", "train", "-n")
    assert code == 0 and out.count("forced") == 4, said
    assert "prep" in space.command(*words, "-R", "prep", "-n")[1].partition("forced")[0]
    for flag in ("--until", "--only"):
        assert space.command(*words, flag, "train")[0] == 0
    code, _, said = space.command(*words, "--only", "trian")
    assert code == 3 and "did you mean" in said and "train" in said
