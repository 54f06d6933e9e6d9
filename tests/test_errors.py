"""Promise: no error of somebody else's reaches the caller.  Every hostile recipe and value ends in one of our exit codes, without a traceback."""

from __future__ import annotations

import contextlib
import inspect
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import errors
from runner.interface.cli.main import main

FIXTURES = Path(__file__).parents[1] / "fixtures"
HOSTILE = [
    *sorted(FIXTURES.glob("documents/*.yaml")),
    *sorted(FIXTURES.glob("recipes/problems/*.yaml")),
]
PATHS = "fdm"  # inputs that are read from the disk
ENDS = {0, 1, 2, 3, 4, 5}

EVERY_TYPE = """\
recipe: every@1
inputs:
  s: {type: string, default: a, pattern: "^(a|b)*"}
  i: {type: integer, default: 1, minimum: 0}
  n: {type: number, default: 1, multipleOf: 0.1}
  b: {type: boolean, default: true}
  c: {type: choice, default: x, choices: [x, y]}
  l: {type: list, items: integer, default: []}
  o: {type: object, default: {}}
  f: {type: file, required: false}
  d: {type: dataset, required: false}
  m: {type: model, required: false}
  k: {type: secret, env: HTOK, required: false}
steps:
  a:
    run: [echo, "{{ inputs.s }}", "{{ inputs.i }}", "{{ inputs.l }}", "{{ inputs.f }}", "{{ inputs.d }}", "{{ inputs.b }}"]
    outputs: {o: "out/{{ inputs.s }}.txt"}
    when: "{{ inputs.i > 0 }}"
"""
VALUES = [
    "", "null", "[", "{}", '"', "\udcff", "\n", "\x1b[31m", "{{ inputs.x }}", "../..", "/", "~", "~nobody", "hf://", "hf://a/b@", "s3://", "-1",
    "1e999", "NaN", "0x10", "9" * 400, "[" * 100_000, "a" * 200_000, "true", "\u202e", "*", "a/b", "http://x/y", "https://[", ".",
]  # fmt: skip


def ending(*words: str) -> tuple[int, str]:
    """The exit code and everything that was said; anything that escapes fails the test by itself."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said = out.getvalue() + err.getvalue()
    assert code in ENDS, (words, code)
    assert "Traceback" not in said
    return code, said


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("space")
    (root / "every.yaml").write_text(EVERY_TYPE)
    return root


@pytest.mark.parametrize("file", HOSTILE, ids=lambda path: path.stem)
def test_a_hostile_recipe_ends_in_an_exit_code_of_ours(space: Path, file: Path) -> None:
    for words in (("validate", "--format", "sarif"), ("show",), ("plan",)):
        code, said = ending(*words, "-C", str(space), str(file))
        assert "\x1b" not in said
        if code == 3:
            assert said


def test_a_format_without_its_value_leaves_the_errors_of_a_recipe_as_text(space: Path) -> None:
    code, said = ending("show", "-C", str(space), "./every.yaml", "--", "--format")
    assert code == 3
    assert '"--format" is not INPUT=VALUE' in said


@pytest.mark.parametrize("name", "sinbclofdmk")
def test_a_hostile_value_of_any_type_ends_in_an_exit_code_of_ours(space: Path, name: str) -> None:
    for value in VALUES:
        if name in PATHS and value in ("../..", "/", "~", "."):
            continue  # that is a whole file system to read, and no mistake
        ending("plan", "-C", str(space), "./every.yaml", f"{name}={value}")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from("sinbclofdmkz"),
    st.text(st.characters(exclude_characters="\0")),
    st.sampled_from(["plan", "validate"]),
)
def test_an_arbitrary_value_ends_in_an_exit_code_of_ours(
    space: Path, name: str, value: str, verb: str
) -> None:
    ending(
        "validate" if name in PATHS else verb, "-C", str(space), "./every.yaml", f"{name}={value}"
    )


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(st.characters(exclude_characters="\0"), max_size=60))
def test_an_arbitrary_file_ends_in_an_exit_code_of_ours(space: Path, text: str) -> None:
    (space / "any.yaml").write_text(
        "recipe: any@1\nsteps: {a: {run: " + text + "}}\n", "utf-8", errors="surrogatepass"
    )
    for verb in ("validate", "plan"):
        ending(verb, "-C", str(space), "./any.yaml")


def test_every_error_of_ours_has_words_and_a_documented_exit_code() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.RecipeError)
    ]
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind.exit_code in ENDS - {0}
        assert kind.__doc__


def test_a_bug_is_loud(monkeypatch: pytest.MonkeyPatch, space: Path) -> None:
    def broken(*_: object) -> int:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("runner.interface.cli.catalog.run", broken)
    with pytest.raises(KeyError):
        main(["list", "-C", str(space)])
