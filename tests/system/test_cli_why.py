"""What `why`, `status` and `graph` say is true: of a fresh step, of every kind of change, and of what was edited or is made no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.interface.cli.main import main
from tests.support import Space


class Said(NamedTuple):
    code: int
    out: str
    err: str


Recipe = Callable[..., Said]

LETTERS = """
inputs:
  word: {type: string, default: hello}
  set: {type: dataset, default: ./set}
steps:
  make:
    run: |
      cat data.txt {{ inputs.set }}/* > {{ outputs.text }}
      echo {{ inputs.word }} >> {{ outputs.text }}
    deps: [data.txt]
    outputs: {text: text.txt}
  count:
    run: "wc -c < {{ steps.make.text }} > {{ outputs.n }}"
    outputs: {n: out/count.txt}
"""


@pytest.fixture
def recipe(space: Space, capfd: pytest.CaptureFixture[str]) -> Recipe:
    """The command line, in this process."""

    def say(*words: str) -> Said:
        capfd.readouterr()
        try:
            code = main(["-C", str(space.root), *words])
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return say


@pytest.fixture
def letters(space: Space) -> Space:
    """A recipe of two steps that was run once."""
    space.recipe(LETTERS)
    space.write("data.txt", "data\n")
    for name in ("a", "b"):
        space.write(f"set/{name}", f"{name}\n")
    space.run()
    return space


def test_a_fresh_step_is_reported_with_its_key_and_who_made_it(
    letters: Space, recipe: Recipe
) -> None:
    said = recipe("why", "make")
    run = json.loads(recipe("runs", "--json").out)[0]["id"]
    assert (
        said.code == 0
        and "make is up to date" in said.out
        and f"created by run {run}" in said.out
        and letters.key("make")[:16] in said.out
    )


def test_every_change_is_reported_with_both_values(letters: Space, recipe: Recipe) -> None:
    letters.write("data.txt", "other\n")
    letters.write("set/b", "B\n")
    letters.write("set/c", "c\n")
    letters.recipe(LETTERS.replace("echo {{", "echo -n {{"))
    out = recipe("why", "make", "word=bye").out
    assert (
        "make would run" in out
        and "inputs.word: hello -> bye" in out
        and "file data.txt: f:" in out
    )
    assert (
        "~ b" in out and "+ c" in out and " a\n" not in out
    )  # which files of the dataset changed, and not the one that did not
    assert (
        "- echo {{ inputs.word }} >> {{ outputs.text }}" in out
        and "+ echo -n {{ inputs.word }} >> {{ outputs.text }}" in out
    )
    changes = json.loads(recipe("why", "make", "word=bye", "--json").out)["steps"][0]["changes"]
    assert {"part": "inputs.word", "before": "hello", "after": "bye"} in changes
    assert [change["files"] for change in changes if "files" in change] == [{"b": "~", "c": "+"}]


def test_a_step_that_waits_is_reported_with_what_runs_first(letters: Space, recipe: Recipe) -> None:
    out = recipe("why", "count", "word=bye").out
    assert "count may run" in out and "make would run first:\n    inputs.word: hello -> bye" in out


def test_the_last_runs_inputs_are_asked_about_when_none_are_given(
    letters: Space, recipe: Recipe
) -> None:
    letters.run({"word": "bye"})
    assert recipe("status").code == 0 and "word=bye" in recipe("status").out
    assert (
        recipe("status", "./recipe.yaml").code == 1
    )  # with the defaults the published files are earlier versions
    assert "inputs.word: hello -> bye" in recipe("why", "make", "--vs", "last~1").out
    assert "make is up to date" in recipe("why", "make").out


def test_a_step_that_failed_says_so(space: Space, recipe: Recipe) -> None:
    space.recipe("steps: {a: {run: 'exit 3', outputs: {o: o.txt}}}")
    assert "no earlier run in this workspace" in recipe("why", "a").out
    space.attempt()
    assert "its last attempt failed (exit)" in recipe("why", "a").out


def test_looking_makes_nothing_where_nothing_was_run(space: Space, recipe: Recipe) -> None:
    space.recipe("steps: {a: {run: 'true', outputs: {o: o.txt}}}")
    assert [recipe(verb).code for verb in ("status", "graph", "runs")] == [1, 0, 0] and recipe(
        "why", "a"
    ).code == 0
    assert [path.name for path in space.root.iterdir()] == ["recipe.yaml"]
    assert recipe("logs").code == 3 and recipe("diff", "a", "b").code == 3


def test_a_step_that_selects_says_whom(space: Space, recipe: Recipe) -> None:
    space.recipe("""
steps:
  train:
    matrix: {lr: [1, 2]}
    run: |
      echo {{ matrix.lr }} > {{ outputs.m }}
      echo "{\\"loss\\": {{ matrix.lr }}}" > $RECIPE_METRICS
    metrics: true
    outputs: {m: "m/{{ matrix.lr }}"}
  winner: {select: train, min: loss}
outputs: {m: "{{ steps.winner.m }}"}
""")
    assert (
        "winner may run\n  depends on the outputs of train[lr=1], train[lr=2]"
        in recipe("why", "winner").out
    )
    space.run()
    assert recipe("why", "winner").out.splitlines()[1:] == [
        "winner is up to date",
        "  train[lr=1] has the lowest loss, 1",
    ]
    assert (
        recipe("why", "train").out.count("is up to date") == 2
        and recipe("adopt", "winner").code == 2
    )
    assert "it did not run in" in recipe("why", "winner", "--vs", "last").out


def test_a_step_that_selects_inside_a_recipe_says_whom_in_every_command(
    space: Space, recipe: Recipe
) -> None:
    space.recipe(
        "recipe: sub@1\nsummary: A test\ninputs: {rank: {type: integer}}\nsteps:\n"
        "  train: {run: 'echo {\\\"loss\\\": {{ inputs.rank }}} > $RECIPE_METRICS; touch m', metrics: true, outputs: {m: m}}\n",
        name="sub.yaml",
    )
    sweep = "steps:\n  s: {matrix: {rank: [4, 8]}, uses: ./sub.yaml, with: {rank: '{{ matrix.rank }}'}}\n  best: {select: %s, min: loss}\n"
    space.recipe(sweep % "s/train")
    assert recipe("validate").code == 0
    assert "depends on the outputs of s[rank=4]/train, s[rank=8]/train" in recipe("plan").out
    assert recipe("graph").out.splitlines()[1:] == [
        "best  maybe",
        "├─ s[rank=4]/train  run",
        "└─ s[rank=8]/train  run",
    ]
    space.run()
    assert recipe("why", "best").out.splitlines()[1:] == [
        "best is up to date",
        "  s[rank=4]/train has the lowest loss, 4",
    ]
    space.recipe(sweep % "s")
    said = recipe("validate")
    assert (
        said.code == 3
        and '"s" is a recipe, sub@1: which of its steps?' in said.out + said.err
        and "select: s/train" in said.out + said.err
    )


def test_an_unknown_step_is_met_with_what_was_meant(letters: Space, recipe: Recipe) -> None:
    said = recipe("why", "mke")
    assert said.code == 3 and 'did you mean "make"?' in said.err and said.out == ""
    said = recipe("why", "make", "--vs", "nope")
    assert said.code == 3 and "no run " in said.err


def test_status_tells_edited_and_stale_files_and_answers_like_make(
    letters: Space, recipe: Recipe
) -> None:
    assert recipe("status") == Said(0, "t@1 (./recipe.yaml): everything is fresh (2 fresh)\n", "")
    letters.recipe(LETTERS.replace("out/count.txt", "out/n.txt"))
    letters.write("text.txt", "mine")
    said = recipe("status", "--json")
    told = json.loads(said.out)["recipes"][0]
    assert said.code == 1 and told["edited"] == ["text.txt"] and told["stale"] == ["out/count.txt"]
    assert {step["id"]: step["answer"] for step in told["steps"]} == {
        "make": "restore",
        "count": "run",
    }
    assert recipe("status", "-q") == Said(1, "", "")


def test_a_temporary_output_does_not_keep_a_step_from_being_fresh(
    space: Space, recipe: Recipe
) -> None:
    space.recipe(
        "steps: {a: {run: 'echo 1 > t; echo 2 > k', outputs: {t: {path: t, temporary: true}, k: k}}}"
    )
    space.run()
    assert recipe("status").code == 0 and not (space.root / "t").exists()


def test_a_file_that_is_named_twice_is_there_once(space: Space) -> None:
    space.write("raw/1.txt", "1")
    space.recipe(
        "steps: {a: {run: 'cat raw/*.txt > o', deps: [raw/1.txt, 'raw/*.txt', raw/1.txt], outputs: {o: o}}}"
    )
    assert space.run() == ["a"] and space.read("o") == "1"


FAN = """
inputs: {n: {type: list, items: integer, default: [1, 2]}}
steps:
  one: {run: "touch {{ outputs.o }}", outputs: {o: one.txt}}
  many:
    matrix: {i: "{{ inputs.n }}"}
    run: "cat {{ steps.one.o }} > {{ outputs.o }}"
    outputs: {o: "many/{{ matrix.i }}"}
  all: {run: "cat {{ steps.one.o }} {{ steps.many.o }} > {{ outputs.o }}", outputs: {o: all.txt}}
"""


def test_a_graph_is_drawn_with_answers_and_shared_steps_once(space: Space, recipe: Recipe) -> None:
    space.recipe(FAN)
    lines = recipe("graph").out.splitlines()
    assert (
        lines[1:3] == ["all  maybe", "├─ one  run"]
        and sum("many[i=" in line for line in lines) == 2
    )
    found = json.loads(recipe("graph", "--format", "json").out)[0]
    assert {node["id"]: node["answer"] for node in found["nodes"]} == {
        "one": "run",
        "many[i=1]": "maybe",
        "many[i=2]": "maybe",
        "all": "maybe",
    }
    assert (
        ["one", "all"] in found["edges"]
        and ["many[i=2]", "all"] in found["edges"]
        and len(found["edges"]) == 5
    )
    many = recipe("graph", f"n={list(range(11))}").out
    assert "many[…]  11 instances: 11 maybe" in many and "many[i=" not in many
    assert (
        "s0 --> s1" in recipe("graph", "--format", "mermaid").out
        and '"one" -> "all";' in recipe("graph", "--format", "dot").out
    )


def test_a_deep_chain_is_cut_and_a_diamond_of_many_is_not_drawn_twice(
    space: Space, recipe: Recipe
) -> None:
    steps = {"s0": {"run": "touch a0 b0", "outputs": {"a": "a0", "b": "b0"}}}
    for n in range(1, 120):
        mentioned = f"cat {{{{ steps.s{n - 1}.a }}}} {{{{ steps.s{n - 1}.b }}}}"
        steps[f"s{n}"] = {
            "run": f"{mentioned}; touch a{n} b{n}",
            "outputs": {"a": f"a{n}", "b": f"b{n}"},
        }
    space.recipe({"steps": steps})
    out = recipe("graph").out
    assert len(out.splitlines()) == 102 and out.rstrip().endswith("…")


def test_help_has_an_example_for_every_verb(recipe: Recipe, space: Path) -> None:
    for verb in ("why", "status", "graph", "runs", "logs", "diff", "adopt", "clean", "gc"):
        said = recipe(verb, "--help")
        assert said.code == 0 and f"  recipe {verb}" in said.out


def test_a_plan_shows_commands_and_files_as_far_as_they_are_known(
    space: Space, recipe: Recipe
) -> None:
    space.recipe("""
inputs: {n: {type: integer, default: 3}}
steps:
  a:
    run: cat conf.json list.txt > {{ outputs.o }}; echo '{"loss":1}' > m.json
    files: {conf.json: {n: "{{ inputs.n }}"}, list.txt: "of {{ inputs.n }}\\n"}
    outputs: {o: o}
    metrics: {file: m.json}
  b: {run: [echo, "{{ steps.a.metrics.loss }}"], files: {late.txt: "{{ steps.a.metrics.loss }}"}}
""")
    said = recipe("plan", "-p")
    assert said.code == 0, said.err
    shown = [line.strip() for line in said.out.splitlines()]
    at = shown.index("> conf.json")
    assert shown[at + 1 : at + 4] == ["{", '"n": 3', "}"]
    assert shown[shown.index("> list.txt") + 1] == "of 3"
    assert "$ echo '{{ steps.a.metrics.loss }}'" in shown
    assert shown[shown.index("> late.txt") + 1] == "{{ steps.a.metrics.loss }}"
    assert "b: $ echo '{{ steps.a.metrics.loss }}'" in recipe("run", "-p").err
    space.recipe({"steps": {"a": {"run": "true", "files": {"long.txt": "x\n" * 30}}}})
    assert recipe("plan", "-p").out.splitlines()[-2].strip() == "… 10 more lines"
