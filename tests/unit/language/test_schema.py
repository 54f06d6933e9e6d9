"""The schema is described everywhere, needs no network, and its errors are told in our words, all at once, where they are."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from runner.language import document, schema, yaml_reader
from tests.support import calls

SCHEMA = schema.load()
STEP = Draft202012Validator(
    {
        "$defs": SCHEMA["$defs"],
        "type": "object",
        **{k: v for k, v in SCHEMA["properties"]["steps"].items()},
    },
    registry=Registry(),
)


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    """Every part of the schema that says which keys a mapping has."""
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            yield node
        for part in node.values():
            yield from mappings(part)
    elif isinstance(node, list):
        for part in node:
            yield from mappings(part)


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_every_key_is_described() -> None:
    described = [
        (key, len(value.get("description", "")))
        for node in mappings(SCHEMA)
        for key, value in node["properties"].items()
    ]
    assert len(described) > 100
    assert [key for key, length in described if length < 15] == []


def test_every_mapping_refuses_unknown_keys() -> None:
    for node in mappings(SCHEMA):
        assert (
            node["additionalProperties"] is False or node is SCHEMA["$defs"]["preset"]
        )  # a preset's other keys are inputs


def test_no_reference_leaves_the_schema() -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for part in node.values():
                yield from references(part)
        elif isinstance(node, list):
            for part in node:
                yield from references(part)

    assert all(reference.startswith("#/$defs/") for reference in references(SCHEMA))


words = st.sampled_from(["a", "b_1", "", "A", "x" * 65, "out/x.txt", "é", "a\n"])
loose = st.one_of(
    words,
    st.none(),
    st.integers(),
    st.booleans(),
    st.lists(st.one_of(words, st.integers(), st.none()), max_size=3),
    st.dictionaries(words, words, max_size=2),
)
steps = st.dictionaries(
    st.sampled_from(["run", "deps", "outputs", "needs", "code", "uses", "env", "shell"]),
    loose,
    max_size=4,
)


@given(words, st.one_of(steps, loose))
@settings(max_examples=400, deadline=None)
def test_what_the_fast_check_accepts_the_schema_accepts(id: str, step: object) -> None:
    if not schema._suspects({id: step}):
        assert not list(STEP.iter_errors({id: step}))


plain_steps = st.fixed_dictionaries(
    {"run": st.one_of(st.text(min_size=1), st.lists(st.text(), min_size=1))},
    optional={
        "deps": st.lists(st.text(min_size=1), max_size=2),
        "outputs": st.one_of(
            st.lists(st.text(min_size=1), max_size=2),
            st.dictionaries(st.sampled_from("abc"), st.text(min_size=1)),
        ),
        "needs": st.lists(st.sampled_from("abc"), unique=True),
    },
)


@given(plain_steps)
@settings(max_examples=60, deadline=None)
def test_the_commonest_step_takes_the_fast_way(step: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_step_validator", None)  # not even asked
        assert schema._suspects({"a": step}) == {}


@given(st.dictionaries(st.sampled_from("abcde"), st.one_of(plain_steps, steps), min_size=1))
@settings(max_examples=100, deadline=None)
def test_the_fast_way_hides_no_fault(some: dict[str, object]) -> None:
    value = {"recipe": "a@1", "steps": some}
    faults = schema.find_faults(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_suspects", dict)
        assert schema.find_faults(value) == faults


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["path", "run", "type", "a", "env"]), inner, max_size=3),
    ),
    max_leaves=6,
)
KEYS = sorted({key for node in mappings(SCHEMA) for key in node["properties"]})


@given(
    st.dictionaries(st.sampled_from(list(SCHEMA["properties"])), json_values, max_size=4),
    st.dictionaries(
        st.sampled_from(["a", "B"]), st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4)
    ),
    st.dictionaries(
        st.sampled_from(["a", "B"]), st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4)
    ),
)
@settings(max_examples=250, deadline=None)
def test_every_fault_has_words_of_its_own(
    top: dict[str, Any], some_inputs: dict[str, Any], some_steps: dict[str, Any]
) -> None:
    value = {"recipe": "a@1", **top, "inputs": some_inputs, "steps": some_steps}
    faults = schema.find_faults(value)
    assert bool(faults) == bool(list(schema._validator().iter_errors(value)))
    for fault in faults:
        assert (
            fault.message
            and "is not of type" not in fault.message
            and "is not valid under" not in fault.message
        )


def test_a_problem_stands_where_it_is() -> None:
    text = (
        "recipe: a@1\nsteps:\n  s:\n    run: [echo]\n    timout: 5m\n    retries: {failures: 1}\n"
    )
    problems = schema.check(document.parse(text, "r.yaml"))
    assert [(p.code, str(p.where), p.fix) for p in problems] == [
        ("unknown-key", "r.yaml:6:15", 'did you mean "failure"?'),
        ("unknown-key", "r.yaml:5:5", 'did you mean "timeout"?'),
    ]


def test_a_word_of_another_tool_is_translated() -> None:
    [fault] = schema.find_faults(
        {"recipe": "a@1", "steps": {"s": {"run": "x", "depends_on": ["a"]}}}
    )
    assert fault.fix == 'use "needs" instead'


def test_a_key_of_a_step_that_stands_too_far_out_is_sent_back_in() -> None:
    faults = schema.find_faults(
        {"recipe": "a@1", "steps": {"s": {"run": "x"}, "outputs": {"o": "x"}, "code": ["x.py"]}}
    )
    assert [fault.fix for fault in faults if len(fault.path) == 2] == [
        f'indent it further, if it is "{key}" of the step above' for key in ("code", "outputs")
    ]
    faults = schema.find_faults({"recipe": "a@1", "steps": None, "train": {"run": "x"}})
    assert [fault.fix for fault in faults] == [
        'indent the lines below "steps"',
        'a step belongs under "steps": indent "train"',
    ]


def test_where_a_step_runs_is_no_key_of_a_recipe_and_no_number_of_nodes() -> None:
    [fault] = schema.find_faults({"recipe": "a@1", "steps": {"s": {"run": "x", "host": "gpu1"}}})
    assert "recipe run --driver ssh --host" in fault.fix


def test_a_type_of_another_language_is_translated() -> None:
    faults = schema.find_faults(
        {
            "recipe": "a@1",
            "inputs": {"a": {"type": "float"}, "b": {"type": "folder"}},
            "steps": {"s": {"run": "x"}},
        }
    )
    assert [fault.fix for fault in faults] == ["write number", "write dataset"]


def test_a_thousand_simple_steps_cost_next_to_nothing() -> None:
    def steps(number: int) -> dict[str, Any]:
        return {
            f"n{n}": {"run": f"cksum < a > out/{n}", "deps": ["a"], "outputs": [f"out/{n}"]}
            for n in range(number)
        }

    schema.find_faults({})
    for number in (1000, 10000):
        value = {"recipe": "a@1", "steps": steps(number)}
        assert schema.find_faults(value) == []
        assert calls(lambda value=value: schema.find_faults(value)) < 20 * number


def test_a_file_of_nothing_but_mistakes_ends_soon() -> None:
    value = {"recipe": "a@1", "steps": {f"n{n}": {"rum": 1} for n in range(5000)}}
    assert len(schema.find_faults(value)) == 200
    assert calls(lambda: schema.find_faults(value)) < 200 * 5000


def test_nothing_is_fetched_for_a_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: asked.append(args))
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    (tmp_path / "s.json").write_text("{}")
    for address in ("http://127.0.0.1:9/s.json", (tmp_path / "s.json").as_uri()):
        with pytest.raises(Unresolvable):
            list(schema._validator().evolve(schema={"$ref": address}).iter_errors({}))
        value = {
            "recipe": "a@1",
            "inputs": {"a": {"type": "object", "default": {"$ref": address}, "$ref": address}},
            "steps": {"s": {"run": "x"}},
        }
        assert [fault.path for fault in schema.find_faults(value)] == [("inputs", "a", "$ref")]
    assert asked == []


def test_the_deepest_value_that_a_document_may_hold_is_checked() -> None:
    def under(frames: int) -> list[schema.Fault]:
        return (
            under(frames - 1)
            if frames
            else schema.find_faults(document.parse(text, "r.yaml").value)
        )

    deep = yaml_reader.MAX_DEPTH - 6
    text = (
        f"recipe: a@1\nsteps: {{s: {{run: [x], nodes: 0, files: {{a: {'[' * deep}{']' * deep}}}}}}}"
    )
    assert [fault.path for fault in under(100)] == [("steps", "s", "nodes")]
