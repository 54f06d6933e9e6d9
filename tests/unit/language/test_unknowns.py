"""Promise: an expression over unknown values says nothing that is wrong for any of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.language.shell import script
from runner.language.template import TemplateError, argv, evaluate
from runner.language.unknowns import (
    A_BOOLEAN,
    A_TEXT,
    AN_INTEGER,
    ANYTHING,
    FRACTION,
    INTEGER,
    LIST,
    NULL,
    TEXT,
    TEXTS,
    Unknown,
    holds_unknown,
    kinds_of,
    of_input,
    unknown,
)

INTEGERS = st.integers(-2, 3)
WORDS = st.sampled_from(["", "x", "7", "-a", "a/b.c"])
SCALARS = st.none() | st.booleans() | INTEGERS | st.sampled_from([0.5, 1.5]) | WORDS
VALUES: dict[str, tuple[Unknown, st.SearchStrategy[object]]] = {
    "i": (AN_INTEGER, INTEGERS),
    "r": (of_input("number"), INTEGERS | st.sampled_from([0.5, -1.5])),
    "t": (A_TEXT, WORDS),
    "b": (A_BOOLEAN, st.booleans()),
    "n": (of_input("integer", required=False), st.none() | INTEGERS),
    "l": (of_input("list", "integer"), st.lists(INTEGERS, max_size=2)),
    "w": (TEXTS, st.lists(WORDS, max_size=2)),
    "o": (of_input("object"), st.dictionaries(st.sampled_from("km"), SCALARS, max_size=2)),
    "a": (ANYTHING, SCALARS | st.lists(SCALARS, max_size=2)),
}
ATOMS = st.sampled_from([*VALUES, "0", "1", "'x'", "'k'", "[]", "[1, 'y']", "{'k': 1}", "true"])


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(
        ["+", "-", "*", "/", "//", "%", "~", "<", "==", "!=", "in", "not in", "and", "or"]
    )
    after = st.sampled_from(
        [
            " | stem",
            " | join('-')",
            " | tojson",
            " is none",
            " is defined",
            "[0]",
            "[1:]",
            ".k",
            "['k']",
        ]
    )
    return st.one_of(
        st.tuples(inner, binary, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, after).map(lambda p: f"({p[0]}{p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} | default({p[1]}))"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}[{p[1]}]"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(st.sampled_from(["not ", "-"]), inner).map(lambda p: f"({p[0]}{p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"[{p[0]}, {p[1]}]"),
    )


EXPRESSIONS = st.recursive(ATOMS, larger, max_leaves=6)


def tried(text: str, scope: dict[str, object]) -> tuple[str, object]:
    try:
        return "value", evaluate(text, scope)
    except TemplateError as error:
        return "error", str(error)


def covers(said: object, value: object) -> bool:
    """Whether what is said of a value is true of it."""
    if isinstance(said, Unknown):
        return said.part or kinds_of(value) <= said.kinds
    if isinstance(said, list) and holds_unknown(said):
        return isinstance(value, list) and len(value) == len(said) and all(map(covers, said, value))
    return holds_unknown(said) or (type(said) is type(value) and said == value)


@settings(max_examples=600, deadline=None)
@given(EXPRESSIONS, st.fixed_dictionaries({n: v for n, (_, v) in VALUES.items()}), st.data())
def test_what_is_said_of_an_unknown_value_is_true_of_every_value(
    text: str, values: dict[str, object], data: st.DataObject
) -> None:
    open = data.draw(st.sets(st.sampled_from([*VALUES])))
    scene = {name: VALUES[name][0] if name in open else value for name, value in values.items()}
    for leaf in (f"{{{{ {text} }}}}", f"a{{{{ {text} }}}}b"):
        said, real = tried(leaf, scene), tried(leaf, values)
        if said[0] == "error":
            assert real[0] == "error", (leaf, scene, values, said, real)
        elif real[0] == "value":
            assert covers(said[1], real[1]), (leaf, scene, values, said, real)
        for use in (
            lambda names, leaf=leaf: argv([leaf], names),
            lambda n, leaf=leaf: script(f"echo {leaf} $(({leaf}))", n),
        ):
            try:
                use(scene)
            except TemplateError as error:
                with pytest.raises(TemplateError):
                    use(values)
                assert str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a{{ i }}", A_TEXT),
        ("{{ i + 1 }}", AN_INTEGER),
        ("{{ i / 2 }}", unknown(FRACTION)),
        ("{{ 10 // (i - 1) }}", AN_INTEGER),
        ("{{ l + l }}", unknown(LIST)),
        ("{{ b and false }}", False),
        ("{{ b or true }}", True),
        ("{{ 1 if b else 1 }}", 1),
        ("{{ 1 if b else 'x' }}", unknown(INTEGER, TEXT)),
        ("{{ 1 if b else [][0] }}", 1),
        ("{{ n | default('x') }}", unknown(INTEGER, TEXT)),
        ("{{ n is none }}", A_BOOLEAN),
        ("{{ i is none }}", False),
        ("{{ [i, 2][1] }}", 2),
    ],
)
def test_an_operation_on_an_unknown_value_is_unknown(text: str, expected: object) -> None:
    assert evaluate(text, {name: value for name, (value, _) in VALUES.items()}) == expected


def test_a_part_of_null_is_missing_at_an_unknown_place_too() -> None:
    assert evaluate("{{ n[i] | default(2) }}", {"n": None, "i": AN_INTEGER}) == 2
    with pytest.raises(TemplateError, match="`n` is null"):
        evaluate("{{ n[i] }}", {"n": None, "i": AN_INTEGER})


@pytest.mark.parametrize(
    "text",
    [
        "a{{ l }}",
        "a{{ o }}",
        "{{ i // 0 }}",
        "{{ t - 1 }}",
        "{{ l | stem }}",
        "{{ t < 1 }}",
        "{{ i.k }}",
        "{{ [][i] }}",
        "{{ [1][t] }}",
        "{{ l ~ 'x' }}",
        "{{ [0][1] if b else 1 // 0 }}",
        "{{ t | join(l) }}",
    ],
)
def test_an_operation_that_fails_for_every_value_is_an_error(text: str) -> None:
    with pytest.raises(TemplateError):
        evaluate(text, {name: value for name, (value, _) in VALUES.items()})


def test_a_value_that_may_be_null_fails_only_where_null_and_a_value_do() -> None:
    scene = {"n": of_input("list", required=False), "m": unknown(NULL)}
    with pytest.raises(TemplateError, match="a list cannot be inserted into text"):
        evaluate("x{{ n }}", scene)
    with pytest.raises(TemplateError, match="null cannot be inserted into text"):
        evaluate("x{{ m }}", scene)
    assert argv(["{{ n }}", "{{ m }}"], scene) != []
