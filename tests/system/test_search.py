"""`recipe sweep --tpe`: trials in rounds, proposed from what is on record; a kill loses none, and a later call adds some."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support import Space

FIT = """
recipe: bowl@1
summary: A bowl
inputs:
  x: {type: number}
  data: {type: file}
steps:
  prep:
    run: 'cat "{{ inputs.data }}" > "{{ outputs.d }}"'
    outputs: {d: data.txt}
  fit:
    run: 'echo "{{ inputs.x }}" >> LEDGER; cat "{{ steps.prep.d }}" > "{{ outputs.m }}"; printf "{\\"loss\\": %s}\\n" "{{ (inputs.x - 3) * (inputs.x - 3) }}" >> "$RECIPE_METRICS"'
    outputs: {m: m.txt}
    metrics: true
"""
WORDS = ("sweep", "bowl.yaml", "data=./d.txt", "x=-10..10", "--min", "loss", "-j2", "--tpe")


def values(space: Space) -> list[str]:
    """What was tried, by the commands that ran."""
    return space.read("ledger").split()


def made(space: Space) -> Space:
    space.write("bowl.yaml", FIT.replace("LEDGER", str(space.root / "ledger")))
    space.write("d.txt", "data")
    return space


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Space, tuple[int, str, str], tuple[int, str, str]]]:
    """A search that is killed in its second round, is asked for again, and then for more."""
    space = made(Space(tmp_path_factory.mktemp("space")))
    assert space.command(*WORDS, "4", env={"RECIPE_CRASH_AT": "outputs-stored:4"})[0] == -9
    yield space, space.command(*WORDS, "4"), space.command(*WORDS, "6")


Killed = tuple[Space, tuple[int, str, str], tuple[int, str, str]]


def test_a_search_that_was_killed_goes_on_and_no_trial_runs_twice(killed: Killed) -> None:
    space, (code, out, said), _ = killed
    assert code == 0 and "4 results" in out, said
    assert len(values(space)) == len(set(values(space))) == 6


def test_a_later_call_for_more_runs_the_new_ones_only_and_marks_the_best_of_all(
    killed: Killed,
) -> None:
    space, _, (code, out, said) = killed
    assert code == 0 and len(re.findall(r"/fit  \d", said)) == 2, said
    title, head, first, *_ = out.strip().splitlines()
    assert title.startswith("bowl/fit of bowl-sweep@1: 6 results") and head.split()[:3] == [
        "trial",
        "x",
        "loss",
    ]
    best = min(values(space), key=lambda x: abs(float(x) - 3))
    assert first.split()[0] == "*" and first.split()[2] == best


def test_the_same_search_elsewhere_tries_the_same_values(killed: Killed, space: Space) -> None:
    assert made(space).command(*WORDS, "4")[0] == 0
    assert sorted(values(space)) == sorted(values(killed[0])[:4])


def test_what_is_the_same_in_all_trials_runs_once_and_all_is_fresh_in_the_end(
    killed: Killed,
) -> None:
    space, (_, _, said), (_, _, more) = killed
    assert not re.findall(r"/prep  \d", said + more)
    before = values(space)
    code, out, _ = space.command(*WORDS, "6")
    assert code == 0 and "6 results" in out and values(space) == before


def test_what_would_be_tried_next_is_shown_and_not_run(killed: Killed) -> None:
    space = killed[0]
    code, out, _ = space.command(*WORDS, "8", "-n")
    assert (
        code == 0
        and re.findall(r"^trial (\d): x=-?[\d.]+$", out, re.MULTILINE) == ["6", "7"]
        and len(values(space)) == 6
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--tpe", "0", "--min", "loss"), "must be at least 1"),
        (("--tpe", "4"), "--tpe requires --min or --max"),
        (("--tpe", "4", "--min", "loss", "--random", "2"), "not allowed with"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    space: Space, words: tuple[str, ...], what: str
) -> None:
    code, _, said = made(space).command("sweep", "bowl.yaml", "data=./d.txt", "x=-10..10", *words)
    assert code == 3 and what in said and not (space.root / "ledger").exists(), said


def test_a_search_for_a_metric_that_nothing_reports_ends_after_its_first_round(
    space: Space,
) -> None:
    code, _, said = made(space).command(*WORDS[:4], "--min", "los", "-j2", "--tpe", "8")
    assert (
        code == 3
        and 'no step reported the metric "los"' in said
        and 'did you mean "loss"' in said
        and len(values(space)) == 2
    ), said
