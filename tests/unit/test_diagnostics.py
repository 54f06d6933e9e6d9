"""Problems are shown where they are, and a hostile file cannot speak to the terminal, to GitHub, or break the JSON."""

from __future__ import annotations

import json
import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from runner.errors import Location, Problem
from runner.interface.diagnostics import render

PROBLEM = Problem(
    "unknown-key",
    "unknown key `otputs`",
    Location("r.yaml", 3, 5, 6, "    otputs: x"),
    'did you mean "outputs"?',
)

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)
PROBLEMS = st.lists(
    st.builds(
        Problem,
        st.sampled_from(["a", "b-c"]),
        TEXT,
        st.none()
        | st.builds(
            Location, TEXT, st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), TEXT
        ),
        TEXT,
        st.sampled_from(["error", "warning", "note"]),
    ),
    max_size=4,
)


def test_a_problem_is_shown_with_its_line_a_caret_and_a_fix() -> None:
    assert render([PROBLEM], "text") == (
        "r.yaml:3:5: error: unknown key `otputs`\n"
        "      otputs: x\n"
        "      ^^^^^^\n"
        '  fix: did you mean "outputs"?\n'
        "1 error\n"
    )  # fmt: skip


def test_problems_are_in_the_order_of_their_places_and_counted() -> None:
    at = [
        Problem("c", f"at {line}", Location("r.yaml", line, 1), severity="warning")
        for line in (10, 9, 2)
    ]
    shown = render([*at, PROBLEM, PROBLEM], "text")
    assert re.findall(r"r.yaml:(\d+)", shown) == ["2", "3", "9", "10"]
    assert shown.endswith("1 error, 3 warnings\n")


def test_of_a_thousand_problems_people_see_thirty_errors_first_and_programs_all() -> None:
    many = [
        Problem("w", f"warning {n}", Location("r.yaml", n, 1, 1, "x"), severity="warning")
        for n in range(1, 501)
    ]
    many += [Problem("e", f"error {n}", Location("r.yaml", n, 1, 1, "x")) for n in range(501, 1001)]
    text = render(many, "text")
    assert text.count("r.yaml:") == 30 and "warning 1\n" not in text
    assert text.endswith(
        "… and 970 more; `recipe validate --format json` lists all\n500 errors, 500 warnings\n"
    )
    assert len(json.loads(render(many, "json"))) == 1000


def test_nothing_wrong_is_silence() -> None:
    assert render([], "text") == render([], "github") == ""
    assert json.loads(render([], "json")) == []


def test_the_caret_stands_below_what_it_means_after_tabs_and_wide_characters() -> None:
    for before in ("\t", "日本 ", "é: ", "e\u0301 ", "\x1b ", "a" * 300):
        text = f"{before}wrong here"
        _, source, caret, *_ = render(
            [Problem("c", "m", Location("r", 1, len(before) + 1, 5, text))], "text"
        ).splitlines()
        column = caret.index("^")
        cells = "".join(
            c
            * (
                0
                if unicodedata.combining(c)
                else 2
                if unicodedata.east_asian_width(c) in "WF"
                else 1
            )
            for c in source
        )
        assert cells[column : column + 5] == "wrong"
        assert caret.count("^") == 5


def test_a_long_line_is_cut_around_its_place() -> None:
    shown = render(
        [Problem("c", "m", Location("r", 1, 50_001, 3, "x" * 50_000 + "bad" + "y" * 50_000))],
        "text",
    )
    assert "bad" in shown and len(shown) < 600


def test_colours_are_ours_alone() -> None:
    assert "\x1b[" not in render([PROBLEM], "text")
    assert re.sub(r"\x1b\[[0-9;]*m", "", render([PROBLEM], "text", color=True)) == render(
        [PROBLEM], "text"
    )


@given(PROBLEMS)
def test_no_control_or_direction_character_reaches_a_terminal(problems: list[Problem]) -> None:
    shown = render(problems, "text")
    assert all(
        char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        for char in shown
    )


@given(PROBLEMS)
def test_a_github_annotation_is_one_line_that_reads_back(problems: list[Problem]) -> None:
    lines = render(problems, "github").split("\n")[:-1]
    assert len(lines) == len(set(problems))
    for line in lines:
        found = re.fullmatch(r"::(error|warning|notice) ([^:]*)::(.*)", line)
        assert found and not re.search(r"[\x00-\x08\x0a-\x1f\x7f]", line)
        assert all("=" in part for part in found[2].split(","))


def test_github_escapes_its_own_syntax() -> None:
    problem = Problem("c", "100%\n::error::x", Location("a,b:c.yaml", 1, 2, 3))
    assert (
        render([problem], "github")
        == "::error file=a%2Cb%3Ac.yaml,line=1,col=2,endColumn=5,title=c::100%25%0A::error::x\n"
    )


@given(PROBLEMS)
def test_json_says_what_the_problems_say(problems: list[Problem]) -> None:
    shown = json.loads(render(problems, "json"))
    assert sorted((p["code"], p["message"], p["fix"]) for p in shown) == sorted(
        (p.code, p.message, p.fix) for p in set(problems)
    )


def test_sarif_names_a_rule_for_every_result() -> None:
    log = json.loads(render([PROBLEM, Problem("b", "no place")], "sarif"))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    rules = run["tool"]["driver"]["rules"]
    assert (
        [rules[result["ruleIndex"]]["id"] for result in run["results"]]
        == [result["ruleId"] for result in run["results"]]
        == ["b", "unknown-key"]
    )
    assert run["results"][1]["locations"][0]["physicalLocation"]["region"] == {
        "startLine": 3,
        "startColumn": 5,
        "endColumn": 11,
    }
