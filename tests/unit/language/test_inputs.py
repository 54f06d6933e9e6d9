"""Values bind to inputs by their types: text as on a command line, values as they are, templates in the order they need, all problems at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import Invalid
from runner.language import document, inputs, library, parse
from runner.language.recipe import Recipe
from runner.language.values import Tree

TEXT = """
recipe: demo@1
inputs:
  steps_asked: {type: integer, default: 1000, minimum: 1, continues: true}
  lr: {type: number, default: 1e-4, exclusiveMinimum: 0}
  name: {type: string, required: false, maxLength: 8, pattern: "^[a-z]*$"}
  fast: {type: boolean, default: false}
  precision: {type: choice, default: bf16, choices: [bf16, "no", 8]}
  seeds: {type: list, items: integer, default: [1], maxItems: 3, uniqueItems: true, minimum: 0}
  extra: {type: object, default: {}}
  any: {type: list, default: []}
  base: {type: model, default: "org/model@main"}
  data: {type: dataset, default: "./data"}
  file: {type: file, default: x.csv}
  saves: {type: integer, default: "{{ inputs.evals // 2 }}"}
  evals: {type: integer, default: "{{ inputs.steps_asked // 10 }}"}
  grid: {type: number, default: 0.3, multipleOf: 0.1}
  hf_token: {type: secret, env: HF_TOKEN}
  opt: {type: secret, env: OPT, required: false}
presets:
  smoke: {steps_asked: 40, data: "{{ fixtures }}/emoji"}
  loud: {name: "s{{ inputs.precision }}"}
steps:
  s: {run: [echo]}
"""
RECIPE = parse.recipe(document.parse(TEXT, "demo.yaml"))


def recipe(declared: str) -> Recipe:
    return parse.recipe(
        document.parse(
            f"recipe: r@1\ninputs:\n  x: {declared}\nsteps: {{s: {{run: [echo]}}}}\n", "r.yaml"
        )
    )


def bind(preset: str | None = None, /, **given: object) -> dict[str, Tree]:
    return inputs.bind(RECIPE, given, preset=preset)


def problems(
    preset: str | None = None, environment: Mapping[str, str] | None = None, /, **given: object
) -> list[str]:
    with pytest.raises(Invalid) as caught:
        inputs.bind(RECIPE, given, preset=preset, environment=environment)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "value",
    [
        "hooks.py",
        "hooks.txt:Told",
        "hooks.py:",
        "hooks.py:a b",
        "https://a.example/hooks.py?key=1.py:Told",
    ],
)
def test_what_stands_in_a_python_file_is_named_behind_it(value: str) -> None:
    spec = recipe("{type: list, items: file, member: true}").inputs["x"]
    assert inputs.convert(spec, "src/a.py:Told, s3://b/c.py:made") == [
        "src/a.py:Told",
        "s3://b/c.py:made",
    ]
    with pytest.raises(
        inputs.BadValue,
        match=r"must be FILE.py:NAME, a Python file and a class or function in it, not .* \(item 1\)",
    ):
        inputs.convert(spec, [value])


def test_defaults_are_values() -> None:
    values = bind()
    assert (
        values["steps_asked"] == 1000
        and values["lr"] == 1e-4
        and values["name"] is None
        and values["seeds"] == [1]
    )
    assert "hf_token" not in values and "opt" not in values
    assert list(values) == [name for name in RECIPE.inputs if name not in ("hf_token", "opt")]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps_asked", "20", 20),
        ("steps_asked", "1e3", 1000),
        ("steps_asked", 7.0, 7),
        ("lr", "1e-5", 1e-05),
        ("lr", "3", 3),
        ("lr", 3.0, 3),
        ("fast", "true", True),
        ("fast", False, False),
        ("precision", "no", "no"),
        ("precision", "8", 8),
        ("precision", 8, 8),
        ("seeds", "1,2", [1, 2]),
        ("seeds", " [3, 2]", [3, 2]),
        ("seeds", "", []),
        ("seeds", (4, "5"), [4, 5]),
        ("any", '["a", {"b": null}]', ["a", {"b": None}]),
        ("extra", '{"a": [1, 2.5]}', {"a": [1, 2.5]}),
        ("extra", {"a": None}, {"a": None}),
        ("name", "abc", "abc"),
        ("name", None, None),
        ("base", "./org/model", "./org/model"),
        ("base", "a/b", "hf://a/b"),
        ("base", "hf://a/b@v1", "hf://a/b@v1"),
        ("data", "hf://a/b@v1", "hf://datasets/a/b@v1"),
        ("data", "hf://datasets/a/b", "hf://datasets/a/b"),
        ("data", "raw/images", "raw/images"),
        ("data", "s3://bucket/x", "s3://bucket/x"),
        ("file", Path("a/b.csv"), "a/b.csv"),
    ],
)
def test_a_value_has_the_type_of_its_input(name: str, text: object, value: object) -> None:
    bound = bind(**{name: text})[name]
    assert bound == value and type(bound) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("steps_asked", "many", '"steps_asked" must be a whole number, not "many"'),
        (
            "steps_asked",
            "1.5",
            '"steps_asked" must be a whole number, not "1.5" (use a whole number)',
        ),
        ("steps_asked", True, '"steps_asked" must be a whole number, not true'),
        ("steps_asked", "0", '"steps_asked" must be at least 1, not 0'),
        (
            "steps_asked",
            "9" * 5000,
            '"steps_asked" must be a whole number, not "' + "9" * 57 + '..."',
        ),
        (
            "steps_asked",
            None,
            '"steps_asked" must have a value, not null (to allow null, set `required: false` in the recipe)',
        ),
        ("lr", "0", '"lr" must be more than 0, not 0'),
        ("lr", "nan", '"lr" must be a number, not "nan"'),
        ("lr", float("inf"), '"lr" must be a number, not inf'),
        ("lr", "1e999", '"lr" must be a number, not "1e999"'),
        ("fast", "yes", '"fast" must be true or false, not "yes" (write true or false)'),
        ("fast", 1, '"fast" must be true or false, not 1 (write true or false)'),
        (
            "precision",
            "bf61",
            '"precision" must be bf16, no or 8, not "bf61" (did you mean "bf16"?)',
        ),
        ("precision", False, '"precision" must be bf16, no or 8, not false'),
        ("seeds", "1,x", '"seeds" must be a whole number, not "x" (item 2)'),
        ("seeds", "1,1", '"seeds" lists 1 twice (remove the duplicate)'),
        ("seeds", "1,2,3,4", '"seeds" must have at most 3 items, not 4'),
        ("seeds", "-1", '"seeds" must be at least 0, not -1'),
        (
            "extra",
            "{",
            '"extra" must be a mapping in JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)',
        ),
        ("extra", "[1]", '"extra" must be a mapping, not a list (write JSON, such as {"a": 1})'),
        (
            "extra",
            '{"a": NaN}',
            '"extra" must be a mapping in JSON: JSON has no number NaN',
        ),
        ("any", [object], '"any" has a part that JSON cannot store: a type (item 1)'),
        ("name", "ABC", '"name" must match the pattern "^[a-z]*$", unlike "ABC"'),
        ("name", "a" * 9, '"name" must have at most 8 characters, not 9'),
        ("name", 5, '"name" must be text, not 5 (quote it: "5")'),
        ("grid", "0.35", '"grid" must be a multiple of 0.1, not 0.35'),
        (
            "base",
            "ftp://x/y",
            '"base" has the unknown scheme "ftp://" (use a path, or an address that starts with hf://, s3://, gs:// or https://)',
        ),
        ("base", "hf://x", '"base" must be hf://org/name or hf://org/name@revision, not "hf://x"'),
        ("data", "s3://", '"data" is an incomplete address or has spaces: "s3://"'),
        ("data", "", '"data" must be the address of a dataset, not ""'),
        (
            "hf_token",
            "hunter2",
            'the secret "hf_token" cannot be set as an input value (set the environment variable HF_TOKEN instead)',
        ),
        ("step_asked", "3", 'demo@1 has no input "step_asked" (did you mean "steps_asked"?)'),
    ],
)
def test_a_wrong_value_is_reported_in_a_sentence(name: str, text: object, message: str) -> None:
    assert problems(**{name: text}) == [f"error: {message}"]


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("smok", {}, lr="x", fast="x", nope="1")) == 5


def test_a_deep_list_is_refused_and_not_a_crash() -> None:
    assert "must be a list in JSON" in problems(any="[" * 100_000)[0]


def test_a_missing_input_is_named_where_it_is_declared() -> None:
    with pytest.raises(Invalid) as caught:
        inputs.bind(recipe("{type: string, doc: What to say}"), {})
    [problem] = caught.value.problems
    assert str(problem) == 'r.yaml:3:3: error: the input "x" has no value (x=…  What to say)'


def test_an_input_whose_name_is_misspelt_is_not_missing_too() -> None:
    declared = "{type: string}\n  data: {type: dataset}"
    with pytest.raises(Invalid) as caught:
        inputs.bind(recipe(declared), {"x": "y", "dta": "a"})
    assert list(map(str, caught.value.problems)) == [
        'error: r@1 has no input "dta" (did you mean "data"?)'
    ]
    with pytest.raises(Invalid) as caught:
        inputs.bind(recipe(declared), {"x": "y", "other": "a"})
    assert len(caught.value.problems) == 2


def test_a_preset_is_below_what_is_given_and_above_defaults() -> None:
    values = inputs.bind(RECIPE, {"lr": "1"}, preset="smoke")
    assert (values["lr"], values["steps_asked"], values["fast"]) == (1, 40, False)
    assert values["data"] == f"{library.fixtures()}/emoji"
    origins = inputs.provenance(RECIPE, {"lr": "1"}, preset="smoke")
    assert (origins["lr"], origins["steps_asked"], origins["fast"]) == (
        "given",
        "preset smoke",
        "default",
    )


def test_templates_are_made_in_the_order_they_need() -> None:
    assert (bind()["evals"], bind()["saves"]) == (100, 50)
    assert (bind(steps_asked=10)["evals"], bind(evals=8)["saves"]) == (1, 4)


def test_a_problem_of_a_preset_stands_in_the_preset() -> None:
    assert problems("loud") == [
        'demo.yaml:22:16: error: "name" must match the pattern "^[a-z]*$", unlike "sbf16"'
    ]


def test_given_text_is_never_a_template() -> None:
    assert inputs.bind(recipe("{type: string}"), {"x": "{{ inputs.y }}"}) == {"x": "{{ inputs.y }}"}


def test_a_required_secret_must_be_set_where_somebody_asks() -> None:
    assert bind() and inputs.bind(RECIPE, {}, environment={"HF_TOKEN": "hunter2"})
    told = problems(None, {})
    assert told == [
        'demo.yaml:18:3: error: the secret "hf_token" is not set '
        "(export HF_TOKEN=…; a secret comes from the environment, never from the command line)"
    ]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"HF_TOKEN": ""},
            'the secret "hf_token" is empty: HF_TOKEN is set, but to an empty text (export HF_TOKEN=…;',
        ),
        (
            {"HF_TOKEN": "abcde"},
            'the secret "hf_token" is too short: HF_TOKEN has 5 characters, but masking in logs requires at least 6 (export',
        ),
        (
            {"HF_TOKEN": "hunter2", "OPT": "no"},
            'the secret "opt" is too short: OPT has 2 characters, but masking in logs requires at least 6 (',
        ),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_with_the_reason(
    environment: dict[str, str], problem: str
) -> None:
    assert problem in "\n".join(problems(None, environment))


def test_a_secret_is_handed_on_by_name() -> None:
    assert "hf_token" not in bind(hf_token="{{ inputs.my_token }}")


def test_a_circle_through_a_preset_is_printed() -> None:
    text = """
recipe: r@1
inputs:
  a: {type: string, default: x}
  b: {type: string, default: "{{ inputs.a }}"}
presets: {p: {a: "{{ inputs.b }}"}}
steps: {s: {run: [echo]}}
"""
    made = parse.recipe(document.parse(text, "r.yaml"))
    with pytest.raises(Invalid) as caught:
        inputs.bind(made, {}, preset="p")
    [problem] = caught.value.problems
    assert problem.message in (
        "the inputs depend on each other: a -> b -> a",
        "the inputs depend on each other: b -> a -> b",
    )
    assert inputs.bind(made, {"b": "y"}, preset="p") == {"a": "y", "b": "y"}


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "(a|a)*b", "(x+x+)+y", r"^(([a-z])+.)+[A-Z]([a-z])+$"]
)
def test_a_pattern_cannot_hang(pattern: str) -> None:
    made = recipe(f"{{type: string, pattern: '{pattern}'}}")
    begun = time.process_time()
    with pytest.raises(Invalid):
        inputs.bind(made, {"x": "aaaaxxxx" * 4000 + "!"})
    assert time.process_time() - begun < 1.5


@given(st.integers(-(10**15), 10**15))
def test_a_whole_number_is_one_value_however_written(number: int) -> None:
    made = recipe("{type: number}")
    spellings: list[object] = [number, float(number), str(number), f"{number}.0", f"{number}e0"]
    for spelling in spellings:
        value = inputs.bind(made, {"x": spelling})["x"]
        assert value == number and type(value) is int


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_its_text(number: float) -> None:
    made = recipe("{type: number}")
    assert inputs.bind(made, {"x": repr(number)}) == inputs.bind(made, {"x": number})


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))
trees = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(trees)
def test_plain_values_pass_unchanged(value: object) -> None:
    assert inputs.bind(recipe("{type: list}"), {"x": [value]}) == {"x": [value]}


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("./a", "path"),
        ("/a", "path"),
        ("~/a", "path"),
        ("a/b", "path"),
        ("hf://a/b", "hf"),
        ("s3://b", "s3"),
        ("gs://b", "gs"),
        ("https://x/y", "https"),
    ],
)
def test_an_address_has_a_kind(address: str, kind: str) -> None:
    assert inputs.kind_of(address) == kind
