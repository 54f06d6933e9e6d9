"""The key and its explanation come from one pre-image: equal keys have no changes to tell, different ones always have some."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.planning.fingerprint import author_digest, explain, key

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2, allow_nan=False)
    | st.text(max_size=3)
)
NAMES = st.sampled_from(["run", "env", "outputs", "reads", "files"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
AUTHORS = st.dictionaries(st.sampled_from(["run", "script", "image"]), TREES, max_size=2).flatmap(
    lambda rest: st.dictionaries(st.text("ab", min_size=1, max_size=2), TREES, max_size=2).map(
        lambda reads: {**rest, "reads": reads}
    )
)
WORLDS = st.lists(
    st.tuples(
        st.sampled_from(["file", "code", "value"]), st.text("ab", min_size=1, max_size=2), LEAVES
    ),
    max_size=3,
    unique_by=lambda e: e[:2],
)


def image(author: dict[str, Any], world: list[list[object]]) -> dict[str, object]:
    return {"author": author, "world": world}


@given(AUTHORS, WORLDS, AUTHORS, WORLDS)
@example({"reads": {}}, [("value", "a", False)], {"reads": {"a": None}}, [("value", "a", False)])
def test_what_differs_is_reported_and_what_is_reported_differs(
    one: dict[str, Any], here: Any, other: dict[str, Any], there: Any
) -> None:
    first, second = [list(e) for e in here], [list(e) for e in there]
    same = key(author_digest(one), first) == key(author_digest(other), second)
    told = explain(image(one, first), image(other, second))
    assert same == (told == [])


@given(WORLDS, st.randoms())
def test_the_order_in_which_the_world_was_looked_at_does_not_count(world: Any, chance: Any) -> None:
    entries = [list(e) for e in world]
    turned = list(entries)
    chance.shuffle(turned)
    author = author_digest({"run": "x"})
    assert key(author, entries) == key(author, turned)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            [["file", "a", "f:1"], ["file", "b", "f:2"]],
            [["file", "a", "f:2"], ["file", "b", "f:1"]],
        ),
        ([["file", "a", "f:1"]], [["code", "a", "f:1"]]),
        ([["file", "a", "f:1"]], [["absent", "a", ""]]),
        ([["file", "a", "f:1"]], [["file", "a", "x:1"]]),
        ([["value", "steps.a.metrics.x", 1]], [["value", "steps.a.metrics.x", 1.0]]),
        ([["value", "steps.a.metrics.x", None]], []),
    ],
)
def test_worlds_that_differ_have_different_keys(
    one: list[list[object]], other: list[list[object]]
) -> None:
    author = author_digest({"run": "x"})
    assert key(author, one) != key(author, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"bytes"])
def test_what_has_no_canonical_form_has_no_key(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        key(author_digest({"run": "x"}), [["value", "v", value]])
    with pytest.raises((TypeError, ValueError)):
        author_digest({"run": value})


def test_changes_are_reported_in_words() -> None:
    before = image(
        {"run": ["a"], "reads": {"inputs.lr": 1}, "env": {"A": "1"}},
        [["file", "d", "f:1"], ["file", "gone", "f:1"]],
    )
    after = image(
        {"run": ["b"], "reads": {"inputs.lr": 2}, "env": {"A": "1", "B": "x" * 99}},
        [["file", "d", "f:2"]],
    )
    told = [str(change) for change in explain(before, after)]
    assert "inputs.lr changed: 1 -> 2" in told and "run changed: ['a'] -> ['b']" in told
    assert "file d changed" in told and any(text.startswith("file gone is gone") for text in told)
    assert any(text.startswith("env.B is new: xxx") and len(text) < 90 for text in told)
    assert explain(before, before) == []


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0, False), (None, "None"), ([], {}), ({}, None)]
)
def test_values_that_look_alike_are_distinguished(one: object, other: object) -> None:
    (change,) = explain(
        image({"reads": {"inputs.x": one}}, []), image({"reads": {"inputs.x": other}}, [])
    )
    assert change.part == "inputs.x"


def test_what_an_output_is_declared_as_is_not_hidden_by_its_name_being_read() -> None:
    before, after = (
        {"outputs": {"o": ["m.bin", flags]}, "reads": {"outputs.o": "m.bin"}} for flags in (0, 1)
    )
    assert [change.part for change in explain(image(before, []), image(after, []))] == ["output o"]
