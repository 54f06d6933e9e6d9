"""Steps of a matrix over paths are shown and accepted by the paths themselves; files on disk keep escaped names."""

from __future__ import annotations

import json

import pytest

from tests.support import Space

OVER_FILES = {
    "steps": {
        "tokenize": {
            "matrix": {"file": ["corpus/de-1.txt", "corpus/en-1.txt"], "size": [3]},
            "run": "echo read {{ matrix.file }}; wc -w < {{ matrix.file }} > {{ outputs.n }}",
            "deps": ["corpus/*"],
            "outputs": {"n": "n/{{ matrix.file }}"},
        },
        "sum": {"needs": ["tokenize"], "run": "exit 3"},
    }
}
NAME = "tokenize[file=corpus/de-1.txt,size=3]"
STORED = "tokenize[file=corpus%2Fde-1.txt,size=3]"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """A workspace in which both instances ran."""
    space = Space(tmp_path_factory.mktemp("names"))
    space.write("corpus/de-1.txt", "eins zwei")
    space.write("corpus/en-1.txt", "one")
    space.recipe(OVER_FILES)
    assert f"{NAME}\n" in space.command("plan")[1] and "%2F" not in space.command("plan")[1]
    code, _, err = space.command("run", "-v")
    assert code == 1 and NAME in err and f" {STORED}" not in err
    return space


@pytest.mark.parametrize(
    "words", [("why",), ("logs",), ("run", "--only"), ("report", "--step"), ("adopt",)]
)
@pytest.mark.parametrize("name", [NAME, STORED])
def test_a_step_is_meant_by_either_form_of_its_name(
    ran: Space, words: tuple[str, ...], name: str
) -> None:
    code, out, err = ran.command(*words, name)
    assert code == 0, err
    assert STORED not in out + err


def test_a_log_is_that_of_the_step_that_was_named(ran: Space) -> None:
    assert ran.command("logs", NAME) == (0, "read corpus/de-1.txt\n", "")
    assert ran.command("logs", f"last/{NAME}")[1] == "read corpus/de-1.txt\n"
    assert len(list(ran.root.glob(f".recipe/runs/*/{STORED.replace('[', '[[]', 1)}.1.log"))) == 1


def test_a_name_that_is_nearly_right_is_corrected_in_the_form_that_people_type(ran: Space) -> None:
    code, _, err = ran.command("why", "tokenize[file=corpus/de-2.txt,size=3]")
    assert code == 3 and f'did you mean "{NAME}"?' in err


@pytest.mark.parametrize("words", [("graph",), ("report", "last~0")])
def test_every_view_names_a_step_as_people_type_it(ran: Space, words: tuple[str, ...]) -> None:
    code, out, err = ran.command(*words)
    assert code == 0 and NAME in out and STORED not in out, err


def test_what_differs_and_what_is_not_fresh_is_named_as_people_type_it(ran: Space) -> None:
    ran.write("corpus/de-1.txt", "drei vier fuenf")
    assert NAME in ran.command("status")[1]
    ran.command("run")
    out = ran.command("diff", "last~1", "last")[1]
    assert NAME in out and STORED not in out


def test_programs_get_the_stored_id(ran: Space) -> None:
    assert STORED in [step["id"] for step in json.loads(ran.command("plan", "--json")[1])["steps"]]
