"""Where text is wanted, a number is what its file says."""

from pathlib import Path

import pytest

from runner.errors import Invalid, Problem
from runner.language import document, inputs, parse
from runner.language.recipe import Recipe
from runner.survey.values_files import read_values

STEPS = "steps: {s: {run: [echo, hello]}}"


def recipe(text: str) -> Recipe:
    return parse.recipe(document.parse(f"recipe: r@1\n{text}\n", "r.yaml"))


def problems(text: str) -> list[Problem]:
    with pytest.raises(Invalid) as caught:
        recipe(text)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "written",
    ["3.10", "01234", "0755", "1e10", "1e-5", "0x1F", "0o17", "+5", "5.", ".5", "1.50", "007.50"],
)
def test_env_and_arguments_are_what_the_file_says(written: str) -> None:
    found = recipe(
        f"env: {{A: &v {written}, B: *v}}\n"
        f"presets: {{p: {{env: {{C: {written}}}}}}}\n"
        f"steps:\n  s: {{run: [echo, {written}, [-x, {written}]], env: {{D: {written}}}}}\n"
        f"  t: {{accelerate: {{script: t.py, args: {{lr: {written}, flag: true}}}}}}"
    )
    assert found.env == {"A": written, "B": written}
    assert found.presets["p"].env == {"C": written}
    assert found.steps["s"].run == ["echo", written, ["-x", written]]
    assert found.steps["s"].env == {"D": written}
    assert found.steps["t"].accelerate == {
        "script": "t.py",
        "args": {"lr": written, "flag": True},
    }


def test_a_number_whose_own_text_is_written_keeps_its_type() -> None:
    """Keys are made of these values: they stay as they are."""
    found = recipe("env: {A: 4, B: 2.0, C: 0.5, D: true, E: null, F: -3}\n" + STEPS)
    assert found.env == {"A": 4, "B": 2.0, "C": 0.5, "D": True, "E": None, "F": -3}
    assert [type(value) for value in found.env.values()][:3] == [int, float, float]


TEXTS = """inputs:
  one: {type: string, default: 3.10}
  many: {type: list, items: string, default: [3.10, 08, 4, a]}
  choice: {type: choice, choices: ["3.9", "3.10"], default: 3.10}
  rate: {type: number, default: 0.10}
  any: {type: list, default: [0.10]}
presets: {p: {one: 010, many: [1e5, 3.9], choice: 3.9}}
"""


def test_inputs_of_text_take_what_the_file_says() -> None:
    found = recipe(TEXTS + STEPS)
    assert inputs.bind(found, {}) == {
        "one": "3.10",
        "many": ["3.10", "08", "4", "a"],
        "choice": "3.10",
        "rate": 0.1,
        "any": [0.1],
    }
    assert inputs.bind(found, {}, preset="p") | {"rate": 0, "any": 0} == {
        "one": "010",
        "many": ["1e5", "3.9"],
        "choice": "3.9",
        "rate": 0,
        "any": 0,
    }


def test_a_file_of_values_gives_text_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "v.yaml"
    file.write_text("one: 0x10\nmany: [3.10, 1e3, 7]\nchoice: 3.10\nrate: 1e-5\nany: [3.10, 1e0]\n")
    given, _ = read_values([("v.yaml", file)])
    bound = inputs.bind(recipe(TEXTS + STEPS), given)
    assert bound == {
        "one": "0x10",
        "many": ["3.10", "1e3", "7"],
        "choice": "3.10",
        "rate": 1e-5,
        "any": [3.1, 1.0],
    }
    assert [type(value) for value in [bound["rate"], *bound["any"]]] == [float] * 3  # type: ignore[misc]


@pytest.mark.parametrize("written", ["3.10", "01234", "0755", "0.50", "-08", "1.00", "01.5"])
@pytest.mark.parametrize("place", ["[{}]", "[{{a: [{}]}}]"])
def test_an_axis_refuses_a_number_that_is_another_text(written: str, place: str) -> None:
    axis = place.format(written)
    [found] = problems(f"steps: {{s: {{run: [echo, x], matrix: {{v: {axis}}}}}}}")
    assert found.code == "ambiguous-number" and f'quote it: "{written}"' in found.fix
    assert found.where is not None and found.where.text[found.where.column - 1 :].startswith(
        written
    )


@pytest.mark.parametrize("written", ["1e-3", "1e10", "2.0", "10.0", "0", "0.0", "0.5", ".5", "10"])
def test_an_axis_takes_a_number_of_another_form(written: str) -> None:
    [value] = (
        recipe(f"steps: {{s: {{run: [echo, x], matrix: {{v: [{written}]}}}}}}")
        .steps["s"]
        .matrix["v"]
    )  # type: ignore[index]
    assert value == float(written) and not isinstance(value, str)


def test_choices_refuse_a_number_that_is_another_text() -> None:
    [found] = problems(f"inputs: {{v: {{type: choice, choices: [3.9, 3.10]}}}}\n{STEPS}")
    assert found.code == "ambiguous-number" and '"3.10"' in found.fix


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("image: 3.10\n" + STEPS, '"3.10"'),
        ("image: True\n" + STEPS, '"True"'),
        ("steps: {s: {run: 0755}}", '"0755"'),
        ("steps: {s: {run: [a], deps: [01]}}", '"01"'),
        (f"inputs: {{s: {{type: string, default: True}}}}\n{STEPS}", '"True"'),
        (f"inputs: {{1.10: {{type: string}}}}\n{STEPS}", '"1.10"'),
    ],
)
def test_a_fix_quotes_what_the_file_says(text: str, quoted: str) -> None:
    assert [found.fix for found in problems(text) if quoted in found.fix]
