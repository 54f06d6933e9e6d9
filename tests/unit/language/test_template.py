"""What expressions mean, what they read, where their mistakes are, and what they cannot do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.language.shell import errors, warnings
from runner.language.template import (
    StatePath,
    TemplateError,
    args,
    argv,
    evaluate,
    expressions,
    has,
    references,
    render,
    text_of,
)

SCOPE = {
    "inputs": {
        "n": 3,
        "rate": 1e-05,
        "on": True,
        "nothing": None,
        "s": "data/x.tar.gz",
        "xs": [1, "b c"],
        "items": "mine",
        "which": "n",
        "cfg": {"b": 1, "a": {"c": 2}},
    },
    "steps": {"train": {"lora": "lora.safetensors", "metrics": {}}},
}


def value(text: str) -> object:
    return evaluate(text, SCOPE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("{{ inputs.n }}", 3),
        (" {{ inputs.n }}", " 3"),
        ("{{ inputs.rate }} {{ inputs.on }}", "1e-05 true"),
        ("{{ inputs.items }}", "mine"),
        ("{{ inputs['n'] + 1 }}", 4),
        ("{{ inputs[inputs.which] }}", 3),
        ("{{ inputs.xs[1] }}{{ inputs.xs.0 }}", "b c1"),
        (
            "{{ inputs.s | stem }}|{{ inputs.s | suffix }}|{{ inputs.s | name }}|{{ inputs.s | parent }}",
            "x.tar|.gz|x.tar.gz|data",
        ),
        ("{{ inputs.xs | join('-') }}", "1-b c"),
        ("{{ inputs.cfg | tojson }}", '{"a": {"c": 2}, "b": 1}'),
        ("{{ inputs.nothing | default(7) }}", 7),
        ("{{ inputs.absent | default(7) }}", 7),
        ("{{ inputs.absent is defined }}", False),
        ("{{ inputs.nothing is none and inputs.n is not none }}", True),
        ("{{ 1 if inputs.n > 3 }}", None),
        ("{{ '{{' }} x }}", "{{ x }}"),
        ("{{ {'a': {'b': 2}} }}", {"a": {"b": 2}}),
        ("{{ 'a' ~ inputs.n ~ 2.0 }}", "a32.0"),
        ("{% if x %}{# y #}${#a}", "{% if x %}{# y #}${#a}"),
        ("{{ inputs.s[5:6] }}", "x"),
    ],
)
def test_a_leaf_has_this_value(text: str, expected: object) -> None:
    assert value(text) == expected
    assert type(value(text)) is type(expected)


def test_an_expression_is_rendered_once() -> None:
    assert evaluate("a {{ x }}", {"x": "{{ y }}", "y": 1}) == "a {{ y }}"


def test_the_text_of_a_number_comes_back_as_that_number() -> None:
    assert [text_of(each) for each in (True, False, 1, 1.0, 1e-05, 0.1, 1e22, -0.0)] == [
        "true",
        "false",
        "1",
        "1.0",
        "1e-05",
        "0.1",
        "1e+22",
        "-0.0",
    ]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_decimals_round_trip(number: float) -> None:
    assert float(text_of(number)) == number


# ---- reads ----


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        (
            "{{ inputs.n }}{{ steps.train.lora }}",
            {"inputs.n": 3, "steps.train.lora": "lora.safetensors"},
        ),
        ("{{ inputs[inputs.which] }}", {"inputs.which": "n", "inputs.n": 3}),
        ("{{ inputs.cfg | tojson }}", {"inputs.cfg.b": 1, "inputs.cfg.a.c": 2}),
        ("{{ inputs.xs[0] }}", {"inputs.xs": [1, "b c"]}),
        ("{{ inputs.gone | default(1) }}", {"inputs.gone": {"absent": True}}),
        ("{{ 'a' if inputs.gone is defined else 'b' }}", {"inputs.gone": {"absent": True}}),
        ("{{ inputs.n if inputs.on else inputs.rate }}", {"inputs.on": True, "inputs.n": 3}),
        ("{{ steps.train.metrics | tojson }}", {"steps.train.metrics": {}}),
    ],
)
def test_what_was_read_is_recorded(text: str, reads: dict[str, object]) -> None:
    seen: dict[str, object] = {}
    evaluate(text, SCOPE, seen)
    assert seen == reads


trees = st.recursive(
    st.none() | st.integers(0, 2) | st.just("x"),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b", 'a"]["b']), inner, max_size=2),
    max_leaves=4,
)
READERS = [
    "{{ x | tojson }}",
    "{{ x.a | default(9) }}",
    "{{ x.a.b | default(9) }}",
    "{{ x.a is defined }}",
    "{{ x['a.b'] | default(1) | tojson }}",
    "{{ x }}",
]


@settings(max_examples=300)
@given(one=trees, two=trees, text=st.sampled_from(READERS))
def test_the_same_reads_mean_the_same_value(one: object, two: object, text: str) -> None:
    results = []
    for tree in (one, two):
        seen: dict[str, object] = {}
        try:
            result = json.dumps(evaluate(text, {"x": tree}, seen))
        except TemplateError:
            return
        results.append((json.dumps(seen, sort_keys=True), result))
    if results[0][0] == results[1][0]:
        assert results[0][1] == results[1][1]


# ---- positions ----

word = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: name not in {"true", "false", "none", "and", "or", "not", "in", "is", "if", "else"}
)
prose = st.text(st.sampled_from("ab é😀\n$'\"{}|"), max_size=12).filter(
    lambda text: "{{" not in text and not text.endswith("{")
)
around = st.sampled_from(
    [
        "N",
        " N ",
        "'}}' ~ N",
        "1 if N else 2",
        "[N, 1][0]",
        "{'a': {'b': N}}",
        "N | default(1) ~ ''",
        "(\n N)",
        '"it\'s" ~ N',
        "N.x",
        "not N",
        "1 + N * 2",
    ]
)


@settings(max_examples=300)
@given(before=prose, name=word, form=around, after=prose)
def test_a_reference_is_exactly_where_it_stands(
    before: str, name: str, form: str, after: str
) -> None:
    text = f"{before}{{{{ {form.replace('N', 'inputs.' + name)} }}}}{after}"
    (found,) = references(text)
    assert found.path[:2] == ("inputs", name)
    assert text[found.offset : found.offset + found.length] == ".".join(found.path)
    assert [text[at : at + length] for at, length in found.names] == list(found.path)


@settings(max_examples=300)
@given(
    before=prose,
    name=word,
    form=around.filter(lambda form: "default" not in form),
    after=prose,
    good=prose,
)
def test_an_unknown_name_is_reported_where_it_was_planted(
    before: str, name: str, form: str, after: str, good: str
) -> None:
    head = f"{good}{{{{ known.n }}}}{before}{{{{ "
    text = f"{head}{form.replace('N', 'known.un' + name)} }}}}{after}"
    with pytest.raises(TemplateError) as caught:
        evaluate(text, {"known": {"n": 1}})
    assert caught.value.offset == len(head) + form.index("N") + len("known.")
    assert caught.value.length == len("un" + name)


@pytest.mark.parametrize(
    ("text", "underlined", "says"),
    [
        ("x {{ inputs.wich }}", "wich", 'did you mean "which"?'),
        ("{{ imputs.n }}", "imputs", 'did you mean "inputs"?'),
        ("{{ inputs.s | stme }}", "stme", 'did you mean "stem"?'),
        ("{{ inputs.s is defnied }}", "defnied", 'did you mean "defined"?'),
        ("{{ inputs.n", "{{", "{{ '{{' }}"),
        ("a {{ inputs.n n }}", "n", ""),
        ("{{ inputs.n.upper }}", ".", ""),
        ("v{{ inputs.nothing }}", "{{ inputs.nothing }}", "default"),
        ("v{{ inputs.xs }}", "{{ inputs.xs }}", "join"),
        ("{{- inputs.n }}", "-", "space"),
        ("{{ 'abc }}", "'", ""),
        ("{{ inputs.n ? }}", "?", ""),
        ("{{ 1 / 0 }}", "1", ""),
    ],
)
def test_a_mistake_is_underlined_and_answered(text: str, underlined: str, says: str) -> None:
    with pytest.raises(TemplateError) as caught:
        value(text)
    error = caught.value
    if underlined != ".":
        assert text[error.offset : error.offset + error.length] == underlined
    assert says in error.fix


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("{{ inputs.s | stme | default(f()) }}", "stme"),
        ("{{ (1 is nne)[2 ** 3] }}", "nne"),
        ("{{ inputs._a._b }}", "_a"),
    ],
)
def test_the_leftmost_of_several_mistakes_is_reported(text: str, first: str) -> None:
    with pytest.raises(TemplateError) as caught:
        expressions(text)
    assert text[caught.value.offset : caught.value.offset + caught.value.length] == first


# ---- nothing to escape to ----

ESCAPES = [
    "''.__class__",
    "''['__class__']",
    "inputs.__class__",
    "inputs['__class__']",
    "inputs.n.__class__.__mro__",
    "[].__class__.__base__.__subclasses__()",
    "().__class__",
    "inputs.items()",
    "inputs.keys()",
    "inputs.get('n')",
    "inputs.update({})",
    "inputs.s.upper()",
    "inputs.s.format",
    "'{0.__class__}'.format(1)",
    "'%s' % inputs",
    "'%99999999d' % 1",
    "self",
    "self._TemplateReference__context",
    "cycler",
    "cycler.__init__.__globals__",
    "joiner()",
    "namespace()",
    "lipsum()",
    "lipsum.__globals__['os']",
    "range(10)",
    "dict(a=1)",
    "config",
    "request",
    "url_for",
    "get_flashed_messages",
    "g",
    "session",
    "inputs | attr('__class__')",
    "inputs | map('upper')",
    "inputs.xs | map(attribute='x') | list",
    "inputs | list",
    "inputs | dictsort",
    "inputs.s | upper",
    "inputs.s | format(1)",
    "inputs.s | replace('a', 'b')",
    "inputs.xs | select",
    "inputs.xs | batch(2)",
    "inputs.s | safe",
    "inputs.s | xmlattr",
    "inputs.s | indent(99999999)",
    "inputs.s | center(99999999)",
    "inputs.xs | sum",
    "inputs | pprint",
    "inputs.xs | groupby('x')",
    "inputs.xs | random",
    "inputs.xs | first",
    "inputs.s | string",
    "x = 1",
    "inputs.n is callable",
    "inputs is mapping",
    "inputs.n is sameas inputs.n",
    "inputs.n is divisibleby(2)",
    "loop",
    "caller()",
    "super()",
    "varargs",
    "import os",
    "__import__('os')",
    "lambda: 1",
    "[i for i in inputs.xs]",
    "inputs.s[inputs.__class__]",
    "(inputs).__class__",
    "{}.__class__",
    "1 .real",
    "1.0.__class__",
    "true.__class__",
    "none.__class__",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_there_is_no_way_out_of_an_expression(expression: str) -> None:
    with pytest.raises(TemplateError):
        value("{{ " + expression + " }}")


BOMBS = [
    "'a' * 10 ** 9",
    "[1] * 99999999",
    "9 ** 9 ** 9",
    "9" * 2500,
    "1" + " * 99999999999" * 250,
    "(" * 900 + "1" + ")" * 900,
    "-" * 1200 + " 1",
    "not " * 900 + "1",
    "1" + " + 1" * 900,
    "[" + "big," * 600 + "] | tojson",
    "big" + " ~ big" * 1000,
    "big" + " + big" * 1000,
    "[" + "big," * 600 + "] | join",
    "many | join(big)",
    "a" * 20_000,
    "1e308 * 10",
    "1" + "[0]" * 1200,
    "{" * 250 + "}" * 250,
]


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_a_bomb_ends_in_an_error_soon_and_small(number: int) -> None:
    scope = {"big": "x" * 900_000, "many": ["x"] * 1000}
    value("{{ 1 + 1 }}")
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(TemplateError):
        evaluate("{{ " + BOMBS[number] + " }}", scope)
    took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 2 and peak < 64e6, (took, peak)


def test_a_long_text_is_refused_but_a_long_list_passes_through() -> None:
    with pytest.raises(TemplateError, match="longer"):
        evaluate("{{ x }}{{ x }}", {"x": "a" * 600_000})
    paths = ["some/path"] * 300_000
    assert evaluate("{{ x }}", {"x": paths}) is paths


def test_the_meaning_is_jinjas_where_both_have_one() -> None:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    atoms = [
        "a",
        "b",
        "s",
        "2",
        "0.5",
        "'x'",
        "m.k",
        "xs[0]",
        "xs[1:]",
        "(a - b)",
        "none",
        "true",
        "[1, 2]",
        "(1 if a else s)",
        "m.gone",
    ]
    signs = ["+", "-", "*", "/", "//", "%", "<", "==", "!=", ">=", "in", "not in", "and", "or"]
    scope = {"a": 7, "b": -2, "s": "xyz", "m": {"k": 4}, "xs": [3, "x"]}
    agreed = 0
    for left in atoms:
        for sign in signs:
            for right in atoms:
                text = f"{left} {sign} {right}"
                try:
                    ours = evaluate("{{ " + text + " }}", scope)
                except TemplateError:
                    continue
                assert ours == environment.compile_expression(text, undefined_to_none=False)(
                    **scope
                ), text
                agreed += 1
    assert agreed > 1000


def test_jinja_is_not_imported_for_plain_text_or_plain_names() -> None:
    program = (
        "import sys; from runner.language.template import evaluate, argv; from runner.language.shell import script\n"
        "s = {'inputs': {'n': 1}}; evaluate('x', s); argv(['a', '{{ inputs.n }}'], s); script('echo {{ inputs.n }}', s)\n"
        "assert not {'jinja2', 'yaml', 'asyncio', 'regex', 'jsonschema'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- argv and args ----


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a", 1, True, "{{ inputs.rate }}"], ["a", "1", "true", "1e-05"]),
        (["a", "{{ inputs.nothing }}", None, ""], ["a", ""]),
        (["{{ inputs.xs }}"], ["1", "b c"]),
        (["a", ["--resume", "{{ inputs.nothing }}"], "b"], ["a", "b"]),
        (["a", ["--n", "{{ inputs.n }}", ["--x", None]]], ["a", "--n", "3"]),
        ([["--xs", "{{ inputs.xs }}"]], ["--xs", "1", "b c"]),
    ],
)
def test_a_value_is_one_argument(items: list, expected: list[str]) -> None:  # type: ignore[type-arg]
    assert argv(items, SCOPE) == expected


def test_arguments_that_cannot_be_are_errors() -> None:
    for item in (
        "--resume={{ inputs.nothing }}",
        "x{{ inputs.xs }}",
        "{{ inputs.cfg }}",
        "\0",
        "{{ [[1]] }}",
        "{{ [none] }}",
    ):
        with pytest.raises(TemplateError):
            argv([item], SCOPE)


def test_args_are_flags() -> None:
    made = args(
        {
            "rank": "{{ inputs.n }}",
            "fast": "{{ inputs.on }}",
            "slow": False,
            "none": "{{ inputs.nothing }}",
            "xs": "{{ inputs.xs }}",
            "no": [],
        },
        SCOPE,
    )
    assert made == ["--rank", "3", "--fast", "--xs", "1", "b c"]


def test_rendering_a_tree_keeps_types() -> None:
    assert render(
        {"a": ["{{ inputs.n }}", 1.5, {"b": "{{ inputs.on }}", "c": "n={{ inputs.n }}"}]}, SCOPE
    ) == {"a": [3, 1.5, {"b": True, "c": "n=3"}]}


def test_a_leaf_knows_its_expressions() -> None:
    text = "a {{ x }} b {{ y ~ '}}' }}"
    assert has(text) and not has("a { { x } }")
    assert [text[each.offset : each.offset + each.length] for each in expressions(text)] == [
        "{{ x }}",
        "{{ y ~ '}}' }}",
    ]


def test_a_place_is_text_and_has_parts() -> None:
    scope = {"state": {"checkpoints": StatePath("ck/", {"latest": None})}}
    assert argv(
        [
            "a",
            "{{ state.checkpoints }}",
            "{{ state.checkpoints.latest }}",
            "{{ state.checkpoints }}/x",
        ],
        scope,
    ) == ["a", "ck/", "ck//x"]
    with pytest.raises(TemplateError, match="has no `newest`"):
        evaluate("{{ state.checkpoints.newest }}", scope)


@pytest.mark.parametrize(
    ("text", "words", "at"),
    [
        ("{{ [1, 2 }}", "this `[` is never closed", 3),
        ("{{ (1 + 2 }}", "this `(` is never closed", 3),
        ("a {{ inputs.xs[0 }}", "this `[` is never closed", 14),
        ("{{ [1, (2] }}", "this `(` is never closed", 7),
        ("{{ '(' ~ [ }}", "this `[` is never closed", 9),
        ("{{ inputs.n) }}", "this `)` has no opening bracket", 11),
    ],
)
def test_a_bracket_that_is_not_closed_is_pointed_at(text: str, words: str, at: int) -> None:
    with pytest.raises(TemplateError) as error:
        expressions(text)
    assert (str(error.value), error.value.offset) == (words, at)
    assert [str(each) for each in errors(text)] == [words]
    assert list(warnings(text)) == []
