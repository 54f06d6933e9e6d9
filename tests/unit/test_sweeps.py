"""`recipe sweep` as text: which inputs are axes, what they hold, and every mistake at once."""

from __future__ import annotations

from typing import Any

import pytest

from runner.api import sweeps
from runner.errors import Invalid
from runner.language import document, parse

TEXT = """
recipe: demo@2
summary: A demo
inputs:
  lr: {type: number, default: 0.1, exclusiveMinimum: 0}
  rank: {type: integer, default: 8}
  base: {type: model, default: org/one}
  betas: {type: list, items: number, default: [0.9, 0.99]}
  extra: {type: object, default: {a: 1, b: 2}}
  data: {type: dataset}
  token: {type: secret, env: TOKEN, required: false}
presets:
  smoke: {rank: 1}
limits: {cost: 5 USD, time: 1h}
steps:
  train:
    run: [echo, "{{ inputs.lr }}", "{{ inputs.rank }}", "{{ inputs.base }}", "{{ inputs.betas }}", "{{ inputs.extra.a }}", "{{ inputs.data }}"]
    secrets: [token]
    outputs: {model: m.txt}
    metrics: {pattern: "loss (?P<loss>[0-9.]+) (?P<accuracy>[0-9.]+)"}
outputs: {model: "{{ steps.train.model }}"}
"""
DEMO = parse.recipe(document.parse(TEXT, "demo.yaml"))


def drafted(**how: Any) -> sweeps.Sweep:
    given = how.pop("given", {"lr": "0.1,0.2", "rank": "4,8,16", "data": "d"})
    return sweeps.draft(DEMO, "../demo.yaml", given, **how)


def written(sweep: sweeps.Sweep) -> Any:
    return document.parse(sweep.text, "sweep.yaml").value


def problems(**how: Any) -> list[str]:
    with pytest.raises(Invalid) as caught:
        drafted(**how)
    return [str(problem) for problem in caught.value.problems]


def test_inputs_with_several_values_are_axes_and_the_others_are_handed_on() -> None:
    sweep = drafted()
    recipe = written(sweep)
    assert sweep.instances == 6 and sweep.fixed == {"data": "d"}
    assert recipe["recipe"] == "demo-sweep@2"
    assert recipe["steps"]["demo"]["matrix"] == {"lr": [0.1, 0.2], "rank": [4, 8, 16]}
    assert recipe["steps"]["demo"]["with"] == {
        "data": "{{ inputs.data }}", "token": "{{ inputs.token }}", "lr": "{{ matrix.lr }}", "rank": "{{ matrix.rank }}",
    }  # fmt: skip
    assert recipe["inputs"] == {
        "data": {"type": "dataset"},
        "token": {"type": "secret", "env": "TOKEN", "required": False},
    }
    assert recipe["outputs"] == {"model": "{{ steps.demo.model }}"} and recipe["limits"] == {
        "cost": "5 USD"
    }
    parse.recipe(document.parse(sweep.text, "sweep.yaml"))


def test_a_list_or_an_object_is_an_axis_when_there_are_several() -> None:
    given = {
        "betas": "[0.9,0.99],[0.8,0.9]",
        "data": "d",
        "base": "a/b,c/d",
        "extra": '{"a":1},{"a":2}',
    }
    assert written(drafted(given=given))["steps"]["demo"]["matrix"] == {
        "betas": [[0.9, 0.99], [0.8, 0.9]], "base": ["hf://a/b", "hf://c/d"], "extra": [{"a": 1}, {"a": 2}],
    }  # fmt: skip
    assert drafted(given={"betas": "1,2", "lr": "1,2", "data": "d"}).fixed == {
        "betas": "1,2",
        "data": "d",
    }


def test_part_of_an_object_is_handed_on_with_the_rest_of_it() -> None:
    assert drafted(given={"lr": "1,2", "data": "d", "extra.a": "5"}).fixed == {
        "data": "d",
        "extra": {"a": 5, "b": 2},
    }


def test_more_draws_with_the_same_seed_hold_those_of_fewer() -> None:
    few, more = (written(drafted(draws=n, seed=3))["steps"]["demo"]["when"] for n in (2, 4))
    assert (
        few.removesuffix("] }}") in more
        and few != written(drafted(draws=2, seed=4))["steps"]["demo"]["when"]
    )
    assert (
        "when" not in written(drafted(draws=100))["steps"]["demo"]
        and drafted(draws=2).instances == 2
    )


def test_every_mistake_of_a_sweep_is_reported_at_once() -> None:
    found = "\n".join(
        problems(
            given={"lr": "0.1,-1,x", "rank": "4,,8", "learning": "1,2", "base": "a/b,a/b"},
            preset="smoky",
            metric="los",
        )
    )
    for words in (
        '"lr" must be more than 0, not -1',
        '"lr" must be a number, not "x"',
        '"rank" has an empty value in its list',
        '"base" has the same value twice',
        'demo@2 has no input "learning"',
        'demo@2 has no preset "smoky"',
        'the input "data" has no value',
        'no step of demo@2 reports the metric "los"',
        'did you mean "loss"',
    ):
        assert words in found, found


def test_a_sweep_has_axes_and_a_bounded_number_of_combinations() -> None:
    assert (
        "no input has several values (separate them by commas" in problems(given={"data": "d"})[0]
    )
    many = ",".join(map(str, range(1, 41)))
    assert (
        "the sweep has 1,600 combinations (40 × 40), more than 1,000"
        in problems(given={"data": "d", "lr": many, "rank": many})[0]
    )
    assert problems(given={"data": "d", "rank": ""}) == [
        'error: "rank" has no values (write rank=A,B)'
    ]


def test_a_range_is_looked_through_and_the_trials_are_read_back() -> None:
    given = {"lr": "1e-5..1e-2:log", "rank": "4..64", "base": "a/b,c/d", "data": "d"}
    where = sweeps.search_space(DEMO, given, metric="loss")
    assert where.axes == {
        "lr": sweeps.Range(1e-5, 1e-2, True, False),
        "rank": sweeps.Range(4, 64, False, True),
        "base": ["hf://a/b", "hf://c/d"],
    }
    assert where.fixed == {"data": "d"} and where.size == float("inf")
    points = [[1e-4, 8, "hf://a/b"], [0.002, 16, "hf://c/d"]]
    text = sweeps.write_search(DEMO, "../demo.yaml", where, points, None)
    assert sweeps.read_trials(document.parse(text, "sweep.yaml").value, where.axes) == points
    parse.recipe(document.parse(text, "sweep.yaml"))


def test_every_mistake_of_a_range_is_reported_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        sweeps.search_space(DEMO, {"lr": "-1..x", "rank": "9..4:log", "data": "d"}, metric="los")
    found = "\n".join(map(str, caught.value.problems))
    for words in (
        '"lr" has an invalid range: "-1..x" (use lr=LOW..HIGH',
        '"rank" has an empty range: 9 is not below 4',
        'reports the metric "los"',
    ):
        assert words in found, found
    with pytest.raises(Invalid, match="must be more than 0, not -1"):
        sweeps.search_space(DEMO, {"lr": "-1..1", "data": "d"}, metric="loss")
    assert problems(given={"lr": "0.1..1", "data": "d"}) == [
        'error: "lr" is a range, which requires a search (add `--tpe 30`, or list the values)'
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('"a,b",c', ["a,b", "c"]),
        (r"a\,b, c", ["a,b", "c"]),
        ('say "x",b', ['say "x"', "b"]),
        (r"C:\x,D:\y", ["C:\\x", "D:\\y"]),
        (r'"a\"b",c\\', ['a"b', "c\\\\"]),
        ("a,", ["a", ""]),
        ('"a,b"', ["a,b"]),
        ('"a"x,b', ['"a"x', "b"]),
    ],
)
def test_a_value_of_a_sweep_may_have_a_comma(text: str, values: list[str]) -> None:
    assert sweeps._parts(text) == values
