"""Promise: every verb and every flag says what it is for, in `--help` and in docs/cli.md, and the two cannot drift apart."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from docs.cli_page import markdown, refreshed
from runner import errors
from runner.interface.cli.flags import GLOBAL
from runner.interface.cli.verbs import GROUPS, VERBS, overview, parser_of
from tests.shelf import RECIPES, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
LIBRARY = {name.split("@")[0]: recipe for name, recipe in RECIPES.items()}
MANUAL = (ROOT / "docs" / "cli.md").read_text("utf-8")


def test_the_manual_is_what_the_parsers_say() -> None:
    assert refreshed(MANUAL) == MANUAL, "write it anew: python -m docs.generate"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_flag_has_help_that_stands_in_the_manual(verb: str) -> None:
    parts = {part.partition("\n")[0]: part for part in MANUAL.split("\n### ")}
    section = parts[f"recipe {verb}"] + parts["Global options"]
    section += "".join(
        parts[f"recipe {other}"] for other in re.findall(r"options of \[recipe (\w+)\]", section)
    )
    assert f"  {verb} " in overview()
    parser, _ = parser_of(verb)
    for action in parser._actions:
        assert action.help, (verb, action.dest)
        if action.help == argparse.SUPPRESS:
            continue
        for option in action.option_strings:
            assert re.search(rf"`{re.escape(option)}[ `]", section), (verb, option)


def test_a_verb_line_fits_the_terminal_and_starts_with_a_capital() -> None:
    for verb, (_, says) in VERBS.items():
        assert len(says) <= 60 and says[0].isupper() and not says.endswith("."), verb


def test_the_overview_shows_each_verb_once_below_its_task() -> None:
    shown = overview()
    lines = shown.splitlines()
    for title, verbs in GROUPS.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(verbs)]] == list(verbs)
    assert sum(map(len, GROUPS.values())) == len(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_groups_flags_by_subject_and_ends_with_the_global_ones(verb: str) -> None:
    parser, _ = parser_of(verb)
    groups = [group for group in parser._action_groups if group._group_actions]
    assert groups[-1].title == GLOBAL
    assert sorted(action.dest for action in groups[-1]._group_actions) == [
        "help",
        "quiet",
        "verbose",
        "workspace",
    ]
    assert max(len(group._group_actions) for group in groups) <= 9, "one subject, one group"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_flag_names_the_thing_and_reads_alone(verb: str) -> None:
    """A capital, no full stop, and no clause in place of a noun: "Owner of the run", not "for whom it is"."""
    parser, _ = parser_of(verb)
    clauses = r"\b(what(ever)?|who(m|ever)|ours?|we|carr(y|ied) out|is over|by itself|taken away)\b"
    for action in parser._actions:
        says = str(action.help)
        if says == argparse.SUPPRESS:
            continue
        assert says[0].isupper() or says[0] == "`", (verb, action.dest, says)
        assert not says.endswith("."), (verb, action.dest, says)
        assert not re.search(clauses, says.lower()), (verb, action.dest, says)


def test_a_wrong_flag_is_answered_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parser, _ = parser_of("run")
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args(["--no-such-flag"])
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_flag_means_the_same_with_every_verb() -> None:
    kinds: dict[str, set[tuple[object, bool]]] = {}
    for verb in VERBS:
        for action in parser_of(verb)[0]._actions:
            for option in action.option_strings:
                if option.startswith("--") and option != "--format":
                    kinds.setdefault(option, set()).add(
                        (action.nargs == 0, isinstance(action, argparse._StoreTrueAction))
                    )
    assert [option for option, kind in kinds.items() if len(kind) > 1] == []


def test_every_exit_code_is_documented() -> None:
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RecipeError)
    } | {
        0,
        1,
        130,
    }  # 1: a step failed, which is no error of ours
    assert codes == {
        int(code)
        for code in re.findall(
            r"^\| (\d+) \|", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.MULTILINE
        )
    }


def test_a_verb_without_a_section_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = markdown()
    monkeypatch.setitem(VERBS, "frobnicate", ("doctor", "nothing anybody wants"))
    assert markdown() != before
    assert refreshed(MANUAL) != MANUAL


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_target_or_extra_that_does_not_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
    )
    assert set(re.findall(r"(?:`|^)make ([a-z]+)\b", text, re.MULTILINE)) <= targets
    assert {
        extra
        for words in re.findall(r"pip install '[\w.]+\[([\w,]+)\]", text)
        for extra in words.split(",")
    } <= extras


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_with_a_recipe_of_the_library_gives_the_inputs_that_it_must_have(
    page: Path,
) -> None:
    """As typed, but for what `…` stands for: an input that the recipe has, and each one without a default, unless a preset or a file gives it."""
    wrong = []
    for verb, name, rest in re.findall(
        r"recipe (run|plan|check|offers|pull|submit) ([a-z0-9-]+(?:@\d+)?) ([^`#\n|&>]*)",
        page.read_text("utf-8"),
    ):
        recipe = LIBRARY.get(name.split("@")[0])
        given = {
            word.partition("=")[0].partition(".")[0]
            for word in re.sub(r"--(?:where|pool) \S+", "", rest).split()
            if re.match(r"[a-z_]+[\w.]*=", word)
        }
        if recipe is None or "…" in rest:
            continue
        inputs = recipe["inputs"]
        must = {
            key
            for key, says in inputs.items()
            if "default" not in says and says.get("required", True) and says["type"] != "secret"
        }
        if given - inputs.keys() or (must - given and not re.search(r"--preset|-i ", rest)):
            wrong.append((verb, name, rest, sorted(given - inputs.keys()), sorted(must - given)))
    assert wrong == []
