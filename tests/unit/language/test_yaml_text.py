"""What is written as YAML is read back equal and of its type: by our reader (YAML 1.2), and by PyYAML (1.1)."""

import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from runner.language import document, yaml_text

LOOK_ALIKES = (
    "1e-5", "12e4", "0o17", "08", "010", "0x1F", "3.10", "1_000", "1:30", "yes", "No", "on", "null", "~", "", "True", ".inf", "-.NaN", "=", "<<",
    "12e4567", "1e5", "2024-01-01", "+5", "-", "- a", "a: b", "a #b", "#a", "&a", "*a", "!a", "{{ x }}", "[", "'", '"', "\\", " a", "a ", "a\nb",
    "a\n\nb\n", "\n", "\r", "\t", "a\tb", "\x85", "\u2028", "\x7f", "\ufeff", "\ufeffa", "\U0001f600", "---", "...", "%a", "@a", "`a", "? a", "0b1",
)  # fmt: skip
texts = st.sampled_from(LOOK_ALIKES) | st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    texts
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none()
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8
)


def typed(value: object) -> str:
    """A value with its types: `1`, `1.0` and `"1"` differ."""
    return json.dumps(value)


def both(text: str) -> list[str]:
    return [typed(document.parse(text, "x.yaml").value), typed(yaml.safe_load(text))]


@given(trees, st.booleans())
@example("1e-5", False)
@example(1e-05, False)
@example({"a": ["08"]}, True)
def test_what_is_written_is_read_back_equal_and_of_its_type(value: object, indented: bool) -> None:
    text = yaml_text.block({"value": value, "list": [value]}, indented=indented)
    assert both(text) == [typed({"value": value, "list": [value]})] * 2


@given(trees)
@example("\U0001f600")
@example(1e22)
def test_one_line_is_read_back_equal_and_of_its_type(value: object) -> None:
    for text in (yaml_text.flow(value), yaml_text.scalar(value)):
        assert "\n" not in text
        assert both(f"value: {text}\n") == [typed({"value": value})] * 2


@given(trees)
def test_one_line_is_json(value: object) -> None:
    assert typed(json.loads(yaml_text.flow(value))) == typed(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("010", 10), ("yes", "yes"), ("1_000", "1_000"), ("'1'", "1"), ("~", None), (".inf", ".inf")],
)  # fmt: skip
def test_yaml_of_other_tools_is_read_as_version_1_2(text: str, value: object) -> None:
    assert yaml_text.load(f"a: &x\n  b: {text}\nc:\n  <<: *x\n")["c"] == {"b": value}
