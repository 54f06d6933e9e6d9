"""What differs between two runs, commands and trees is said in few words, and everything that differs is said."""

from __future__ import annotations

from collections.abc import Mapping

from runner.api.differences import (
    ASPECTS,
    Difference,
    StepRecord,
    aspect_of,
    compare_steps,
    with_changed_files,
)
from runner.interface.differences import lines
from runner.planning.fingerprint import Change

TREES = {
    "t:" + "1" * 64: {"a": "f:1", "b": "f:2"},
    "t:" + "2" * 64: {"a": "f:1", "b": "f:3", "c": "x:4"},
}


def image(**author: object) -> dict[str, object]:
    return {"author": {"reads": {}, **author}, "world": []}


def tree_lines(before: str, after: str, trees: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The lines below the first, which has both trees."""
    return [
        line.strip()
        for line in lines(with_changed_files(Change("o", before, after), trees.get))[1:]
    ]


def test_of_a_tree_the_files_that_differ_are_named() -> None:
    before, after = TREES
    assert tree_lines(before, after, TREES) == ["~ b", "+ c"] and tree_lines(
        after, before, TREES
    ) == ["~ b", "- c"]
    assert tree_lines(before, "t:" + "9" * 64, TREES) == [
        "the changed files are unknown, because the earlier version's file list is not stored"
    ]
    many = {"t:" + "3" * 64: {str(n): "f:1" for n in range(1000)}, **TREES}
    assert len(tree_lines(before, "t:" + "3" * 64, many)) == 10


def test_of_a_long_command_the_words_that_differ_are_shown() -> None:
    before = [
        "python",
        "train.py",
        "--learning-rate",
        "0.1",
        "--data",
        "{{ inputs.dataset }}",
        "--out",
        "{{ outputs.model }}",
    ]
    told = lines(Difference("argv", before, [*before[:3], "0.2", *before[4:], "--fast"]))
    assert told == ["argv changed:", "  - 0.1", "  + 0.2", "  + --fast"]


def test_a_short_value_is_shown_before_and_after() -> None:
    assert lines(Difference("inputs.lr", 0.1, 0.2)) == ["inputs.lr: 0.1 -> 0.2"]
    assert lines(Difference("loss", 2.0, 1.0)) == ["loss: 2 -> 1 (-50.0%)"]
    assert lines(Difference("env.X", None, "a b")) == ["env.X is new: a b"]
    assert lines(Difference("env.X", "", None)) == ['env.X was removed: ""']
    assert lines(Difference("script", "x\x1b[2J", "y")) == ['script: "x\\u001b[2J" -> y']


def test_every_part_has_its_aspect() -> None:
    parts = [
        "inputs.lr",
        "matrix.i",
        "file a",
        "model b",
        "code t.py",
        "argv",
        "script",
        "env.X",
        "lock l",
        "image",
        "outputs.o",
        "steps.a.metrics.loss",
    ]
    assert [aspect_of(part) for part in parts] == [
        *(
            "inputs",
            "inputs",
            "data",
            "data",
            "code",
            "command",
            "command",
            "env",
            "env",
            "env",
            "outputs",
            "inputs",
        )
    ]
    assert {aspect_of(part) for part in parts} <= set(ASPECTS)


def test_runs_are_compared_step_by_step() -> None:
    a = {
        "one": StepRecord("DONE", image(argv=["x"]), {"o": "f:1"}, {"loss": 1.0}, 1.0),
        "gone": StepRecord("DONE"),
    }
    b = {
        "one": StepRecord("DONE", image(argv=["y"]), {"o": "f:2"}, {"loss": 2.0}, 1.2),
        "new": StepRecord("FAILED"),
    }
    told = {step.id: step for step in compare_steps(a, b)}
    assert list(told) == ["one", "new", "gone"] and (told["new"].only, told["gone"].only) == (
        "B",
        "A",
    )
    assert {
        name: [change.part for change in changes] for name, changes in told["one"].changes.items()
    } == {
        "command": ["argv"],
        "outputs": ["o"],
        "metrics": ["loss"],
    }  # a fifth of a second is no difference in time
    assert compare_steps(a, a)[0].changes == {}
    slower = {"one": StepRecord("DONE", image(argv=["x"]), {"o": "f:1"}, {"loss": 1.0}, 60.0)}
    assert list(compare_steps(a, slower)[0].changes) == ["time"]
    failed = {"one": StepRecord("FAILED", image(argv=["x"]))}
    assert (
        compare_steps(a, failed)[0].changes == {}
    )  # what it did not make says nothing; that it failed, its state does
