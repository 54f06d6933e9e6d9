"""The two forms of a matrix instance's id: one for the store and the disk, one for people."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.planning.ids import encode_value, names, readable, stored_form


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
@example(["corpus/de-1.txt", "3"])
@example(["a=b", "c,d]%2F[ e"])
@example(["ü" * 80, "\x1b]0;t\x07"])
@example(["[::" + "\x80" * 4 + "\U00010000" * 4, "x" * 100])  # a long text like a list
def test_what_people_read_is_what_they_can_type(values: list[str]) -> None:
    id = f"group/train[{','.join(f'axis{n}={encode_value(value)}' for n, value in enumerate(values))}]/inner"
    seen = readable(id)
    assert stored_form(id) == id
    assert stored_form(seen) in names(id)
    assert seen.isprintable()


@pytest.mark.parametrize(
    ("id", "seen"),
    [
        ("tokenize[file=corpus%2Fde-1.txt,size=3]", "tokenize[file=corpus/de-1.txt,size=3]"),
        ("t[a=x%2Cy%3Dz%5D%20w]", "t[a=x%2Cy%3Dz%5D%20w]"),
        ("a[x=%C3%BC]/b[y=s3%3A%2F%2Fb]", "a[x=ü]/b[y=s3://b]"),
        ("needs tokenize[file=a%2Fb], which failed", "needs tokenize[file=a/b], which failed"),
        ("a file called 100%2F and a [list=%2F]", "a file called 100%2F and a [list=%2F]"),
    ],
)
def test_an_id_reads_as_its_values_do(id: str, seen: str) -> None:
    assert readable(id) == seen


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("train", {"train"}),
        ("train[lr=1]", {"train", "train[lr=1]"}),
        ("s/train", {"s", "s/train"}),
        ("s[r=4]/train[lr=1]", {"s", "s[r=4]", "s/train", "s[r=4]/train", "s[r=4]/train[lr=1]"}),
    ],
)
def test_a_step_is_meant_by_its_own_words_and_those_of_what_it_is_an_instance_or_a_part_of(
    id: str, words: set[str]
) -> None:
    assert names(id) == words


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True),
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
            st.integers(-99, 99),
            st.booleans(),
            st.none(),
            st.lists(st.integers(0, 9), max_size=2),
            st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), max_size=2),
        ),
        min_size=1,
        max_size=3,
    )
)
@example({"n": 10, "name": "rf"})
@example({"n": "10", "name": "a,b]"})
@example({"a.b": 1})
@example({"long": "x" * 100})
def test_a_mapping_is_typed_name_by_name_or_as_json(tree: dict[str, Any]) -> None:
    id = f"t[m={encode_value(tree)},fold=0]"
    seen = readable(id)
    assert stored_form(seen) in names(id)
    assert stored_form(f"t[m={json.dumps(tree)},fold=0]") == id


def test_names_of_a_mapping_come_in_any_order() -> None:
    id = f"t[m={encode_value({'name': 'rf', 'n': 10})},fold=0]"
    assert readable(id) == "t[m.n=10,m.name=rf,fold=0]"
    assert stored_form("t[m.name=rf,m.n=10,fold=0]") == id
    assert stored_form('t[m={"name": "rf", "n": 10},fold=0]') == id


def test_the_end_of_a_long_value_is_enough() -> None:
    id = f"s[m={encode_value({'text': 'x' * 100})}]/t"
    assert len(readable(id)) < 30
    assert stored_form(readable(id)) in names(id)
