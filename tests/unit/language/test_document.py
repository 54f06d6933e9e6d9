"""A document's values are YAML 1.2 core, its mistakes are worded, and every place it reports is the true one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import Invalid, NotFound, Problem
from runner.language.document import parse, read

CASES = Path(__file__).parents[3] / "fixtures" / "documents"
MARK = "Qq7"


def problems(text: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(Invalid) as caught:
        parse(text, "r.yaml")
    return caught.value.problems


@pytest.mark.parametrize("case", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_mistake_is_reported_where_it_is_with_its_remedy(case: Path) -> None:
    expected = json.loads(case.with_suffix(".json").read_text())
    try:
        found = parse(case.read_bytes(), case.name).warnings
    except Invalid as error:
        found = error.problems
    seen = [
        {
            "severity": p.severity,
            "code": p.code,
            "at": f"{p.where.line}:{p.where.column}",
            "fix": p.fix,
        }
        for p in found
        if p.where
    ]
    assert seen == expected


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", None), ("~", None), ("null", None), ("NULL", None), ("nUll", "nUll"),
        ("true", True), ("False", False), ("TRUE", True), ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("0", 0), ("-7", -7), ("+7", 7), ("012", 12), ("0o17", 15), ("0x1F", 31), ("0b1", "0b1"), ("1_000", "1_000"), ("22:22", "22:22"),
        ("1e3", 1000.0), ("1e-4", 0.0001), (".5", 0.5), ("5.", 5.0), ("-1.5E+2", -150.0), (".", "."), ("1.2.3", "1.2.3"),
        ("2001-01-01", "2001-01-01"),
        ("=", "="), ("24GB", "24GB"), ("5 USD", "5 USD"), ("0x", "0x"), ("-", [None]), ("+", "+"), ("e3", "e3"),
    ],
)  # fmt: skip
def test_a_plain_scalar_means_what_yaml_1_2_core_says(written: str, meant: object) -> None:
    value = parse(f"{written}\n" if written else "a:\n", "r.yaml").value
    value = value if written else value["a"]  # type: ignore[index, call-overload]
    assert value == meant
    assert type(value) is type(meant)


def test_on_and_yes_are_plain_keys() -> None:
    assert parse("on: 1\nyes: 2\nno: 3\n", "r.yaml").value == {"on": 1, "yes": 2, "no": 3}


def test_a_byte_order_mark_is_not_part_of_the_text() -> None:
    document = parse(b"\xef\xbb\xbfa: 1\n", "r.yaml")
    assert document.value == {"a": 1}
    assert str(document.locate(("a",))) == "r.yaml:1:4"


def test_bytes_that_are_not_utf8_are_reported_with_their_offset() -> None:
    (problem,) = problems("a: é\nb: ".encode() + b"\xff\n")
    assert "offset 9 (line 2)" in problem.message
    assert problem.where is not None and (problem.where.line, problem.where.column) == (2, 4)


def test_all_duplicate_keys_are_reported_at_once() -> None:
    found = problems("a: 1\nb: {c: 1, c: 2}\na: 2\nd:\n  - e: 1\n    e: 2\n")
    assert [(p.code, p.where and p.where.line) for p in found] == [
        ("duplicate-key", 2),
        ("duplicate-key", 3),
        ("duplicate-key", 6),
    ]


def test_an_alias_is_a_copy_and_is_located_where_its_text_is() -> None:
    document = parse("a: &x {deep: [1, two]}\nb: *x\n", "r.yaml")
    assert document.value == {"a": {"deep": [1, "two"]}, "b": {"deep": [1, "two"]}}
    assert document.value["a"] is not document.value["b"]
    assert document.locate(("b", "deep", 1)) == document.locate(("a", "deep", 1))
    assert document.locate(("b",)).line == 2


def test_an_alias_means_the_last_anchor_of_its_name_that_began_before_it() -> None:
    document = parse("a: &x 1\nb: *x\nc: &x [&x 2]\nd: *x\n", "r.yaml")
    assert document.value == {"a": 1, "b": 1, "c": [2], "d": 2}
    assert document.locate(("d",)).line == 4


def test_a_list_of_lists_may_not_be_longer_than_a_list_of_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.language.yaml_reader.MAX_WIDTH", 2)
    for text in (
        "[a, b, c]",
        "[[], [], []]",
        "{a: 1, b: 2, c: 3}",
        "{a: [], b: [], c: {}}",
        "[&a x, *a, *a]",
    ):
        (problem,) = problems(text)
        assert "more than 2 entries" in problem.message and problem.where is not None


def test_a_key_that_is_refused_is_one_problem_whatever_is_in_it() -> None:
    assert [p.code for p in problems("? [!!x a, *b, {c: 1, c: 2}]\n: 1\n? \n*b : 1\n")] == [
        "key",
        "key",
        "alias",
    ]


def test_a_missing_part_is_reported_at_the_deepest_part_there_is() -> None:
    document = parse("steps:\n  train:\n    run: x\n  list: [1]\n", "r.yaml")
    assert document.locate(("steps", "train", "outputs", "lora")) == document.locate(
        ("steps", "train"), key=True
    )
    assert document.locate(("steps", "list", 7)) == document.locate(("steps", "list"), key=True)
    assert (document.locate(("nothing",)).line, document.locate(("nothing",)).column) == (1, 1)


def test_a_problem_carries_its_place_and_underlines_what_it_is_about() -> None:
    problem = parse('a:\n  - "{{ inptus.x }}"\n', "r.yaml").problem(
        "name", "no such name", ("a", 0), offset=3, length=6, fix="inputs"
    )
    assert problem.where is not None
    assert str(problem) == "r.yaml:2:9: error: no such name (inputs)"
    assert problem.where.text[problem.where.column - 1 :][: problem.where.length] == "inptus"


def test_an_escape_is_underlined_whole() -> None:
    where = parse(r'a: "x\u00e9y\\z"', "r.yaml").locate(("a",), offset=1, length=3)
    assert where.text[where.column - 1 :][: where.length] == r"\u00e9y\\"


def test_a_place_past_the_end_of_a_value_is_its_end() -> None:
    assert parse("a: xyz\n", "r.yaml").locate(("a",), offset=99).column == 7


def test_the_pure_parser_agrees_with_the_c_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: &x\n  - 1e-4\n  - |\n    two\n  - 'it''s'\nb: *x\nc: {d: , e: [~]}\n"
    fast = parse(text, "r.yaml")
    place = fast.locate(("a", 1), offset=1)
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    pure = parse(text, "r.yaml")
    assert pure.value == fast.value
    assert pure.locate(("a", 1), offset=1) == place


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read(tmp_path / "absent.yaml")
    with pytest.raises(Invalid):
        read(tmp_path)


# Generated YAML with one marker in it: the only oracle for its place is a search of the text.

WORDS = st.text(st.sampled_from("abz é𝄞'\"\\#:-,{}[]!&*%@`|>\t\n"), max_size=12)


def double(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("é", "\\u00e9").replace("𝄞", "\\U0001d11e")


def single(value: str, indent: str) -> str:
    # A line feed in single quotes is a blank line; white space around it would be lost.
    return "'" + value.replace("'", "''").replace("\n", "\n\n" + indent) + "'"


def flows(value: str) -> bool:
    return "\t" not in value and all(part == part.strip() for part in value.split("\n"))


@st.composite
def scalar(draw: st.DrawFn, indent: str) -> tuple[str, str]:
    """(as written, as meant), with the marker inside."""
    value = draw(WORDS) + MARK + draw(WORDS)
    style = draw(st.sampled_from(["plain", "single", "double", "folding", "literal", "folded"]))
    if (
        style == "single"
        and flows(value)
        and "\n\n" not in value
        and not value.startswith("\n")
        and not value.endswith("\n")
    ):
        return single(value, indent), value
    if style == "folding":
        left, right = value.split(MARK)
        return (
            f"{double(left)[:-1]}\\\n{indent}{MARK} {draw(st.sampled_from(['', chr(10) + indent]))}{double('.' + right)[1:]}",
            left + MARK + " ." + right,
        )
    if style == "plain":
        words = draw(
            st.lists(st.sampled_from(["a", "é", "b-c", "x#", "{{z", "it's", "𝄞"]), max_size=4)
        )
        breaks = draw(st.sampled_from([" ", "\n" + indent, "  \n" + indent + " "]))
        return breaks.join(["w", *words, MARK, "end"]), " ".join(["w", *words, MARK, "end"])
    if style in ("literal", "folded"):
        lines = draw(
            st.lists(
                st.sampled_from(["a", "b c", "", "  deep", "é # no comment", "'x\\"]), max_size=5
            )
        )
        lines = [
            "first",
            *lines,
            f"x {MARK} y",
            *draw(st.lists(st.sampled_from(["z", "", " w"]), max_size=3)),
        ]
        chomp = draw(st.sampled_from(["", "-", "+"]))
        head = ("|" if style == "literal" else ">") + chomp
        written = head + "".join("\n" + (indent + line if line else "") for line in lines)
        return written, str(
            yaml.safe_load(
                f"{head}\n" + "\n".join("  " + line if line else "" for line in lines) + "\n"
            )
        )
    return double(value), value


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, tuple[str | int, ...], str]:
    """(text, path, value): a marker in a scalar at a random depth among other things."""
    text, indent = "", ""
    where: list[str | int] = []
    for _ in range(draw(st.integers(0, 5))):
        filler = draw(
            st.sampled_from(
                [
                    "",
                    "pad: [1, {a: b}]\n",
                    "pad: |\n  text\n",
                    "# é𝄞\n",
                    'pad: "\\u00e9"\n',
                    "pad: &anchor\n  - x\n",
                ]
            )
        )
        if draw(st.booleans()):
            text += (
                "".join(indent + line + "\n" for line in filler.splitlines()) + f"{indent}key:\n"
            )
            where.append("key")
        else:
            before = draw(st.integers(0, 2))
            text += f"{indent}- x\n" * before + f"{indent}-\n"
            where.append(before)
        indent += draw(st.sampled_from([" ", "  ", "    "]))
    written, value = draw(scalar(indent + "  "))
    properties = draw(st.sampled_from(["", "&name "]))
    text += f"{indent}last: {properties}{written}\n"
    if draw(st.booleans()):
        text += f"{indent}more: 1\n"
    return text, (*where, "last"), value


@settings(max_examples=400, deadline=None)
@given(planted(), st.sampled_from(["\n", "\r\n"]))
def test_the_reported_place_in_a_scalar_is_the_planted_one(
    plant: tuple[str, tuple[str | int, ...], str], line_break: str
) -> None:
    text, path, meant = plant
    text = text.replace("\n", line_break)
    document = parse(text, "r.yaml")
    value: object = document.value
    for part in path:
        value = value[part]  # type: ignore[index]
    assert value == meant
    where = document.locate(path, offset=meant.index(MARK), length=len(MARK))
    at = text.index(MARK)
    assert (where.line, where.column) == (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
    assert where.length == len(MARK)


@settings(max_examples=100, deadline=None)
@given(planted(), st.booleans())
def test_the_reported_place_of_a_key_is_the_planted_one(
    plant: tuple[str, tuple[str | int, ...], str], quoted: bool
) -> None:
    text, path, _ = plant
    text = text.replace(MARK, "other")
    name = "Key" + MARK
    at = text.rindex("last:")
    text = text[:at] + (f'"{name}":' if quoted else f"{name}:") + text[at + len("last:") :]
    where = parse(text, "r.yaml").locate((*path[:-1], name), key=True)
    assert (where.line, where.column) == (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
    assert where.length == len(name) + 2 * quoted


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab:-,{}[]'\"\\#&*!|>?%@\t\n 1.~<"), max_size=40))
def test_any_text_is_a_document_or_has_problems_with_places(text: str) -> None:
    try:
        document = parse(text, "r.yaml")
    except Invalid as error:
        assert error.problems and all(problem.where for problem in error.problems)
    else:
        assert all(warning.where for warning in document.warnings)
