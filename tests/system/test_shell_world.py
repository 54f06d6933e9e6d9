"""Arbitrary text goes through argv and through real shells, and arrives as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.language.shell import script
from runner.language.template import TemplateError, argv
from tests.tools import needs

EXAMPLES = int(os.environ.get("RECIPE_TEMPLATE_EXAMPLES", "200"))
BATCH = 50
MARK = "@@ between two values 6f1d @@"
SHELLS = ("/bin/sh", "dash", "bash")

# No NUL and no surrogates but those that stand for bytes which are not UTF-8.
letters = st.characters(exclude_characters="\0", exclude_categories=("Cs",)) | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF
)
hostile = st.sampled_from(
    [
        "",
        "-n",
        "--",
        "~",
        "*",
        "a b",
        " ",
        "\n",
        "\t",
        "\n\n",
        "'",
        '"',
        "''",
        "$(id)",
        "`id`",
        "$HOME",
        "${x}",
        "!",
        "!!",
        "\\",
        "\\\\",
        "\\n",
        "%s",
        "#",
        # Bytes that dash and bash use inside themselves, and bytes that are no text at all.
        "\x01",
        "\x7f",
        "\x81",
        "\udc81",
        "\udc88",
        "\r\n",
        "😀",
        "e\u0301",
        "EOF",
        "\nEOF\n",
        "{{ x }}",
        "{% x %}",
        "it's",
        "a'b\"c",
        "x=1",
        "a[$(id)]",
        "# x",
        ";",
        "|",
        "&&",
        ">",
        "<",
        "(",
        ")",
        "}",
        "{",
    ]
)
values = (
    hostile
    | st.text(letters, max_size=12)
    | st.text(st.sampled_from("'\"\\$`!(){}[]*?~#&|;<> \n\t-a1=%"), max_size=12)
)
batches = st.lists(values, min_size=BATCH, max_size=BATCH)


def names(count: int) -> list[str]:
    return [f"{{{{ inputs.v{i} }}}}" for i in range(count)]


def each(form: str) -> Callable[[int], str]:
    """One printf with an argument for each value, NUL between them."""
    return lambda count: (
        "printf '%s\\0' " + " ".join(form.replace("X", name) for name in names(count)) + "\n"
    )


def document(operator: str, indent: str) -> Callable[[int], str]:
    return lambda count: (
        f"cat {operator}EOF\n"
        + "".join(f"{indent}{name}\n{indent}{MARK}\n" for name in names(count))
        + f"{indent}EOF\n"
    )


def assignment(count: int) -> str:
    return "".join("v=X\nprintf '%s\\0' \"$v\"\n".replace("X", name) for name in names(count))


CONTEXTS: dict[str, Callable[[int], str]] = {
    "bare": each("X"),
    "double quotes": each('"X"'),
    "default in quotes": each('"${OUT:-X}"'),
    "default": each("${OUT:-X}"),
    "substitution": each('"$(printf "%s." X)"'),
    "backticks": each('"`printf "%s." X`"'),
    "assignment": assignment,
    "here-document": document("<<", ""),
    "indented here-document": document("<<-", "\t"),
}


def run(shell: str, text: str, tmp: Path) -> bytes:
    path = tmp / "script"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = subprocess.run(
        [shell, "-eu", str(path)], capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def arrived(context: str, output: bytes) -> list[bytes]:
    if "document" in context:
        return output.split(f"\n{MARK}\n".encode())[:-1]
    parts = output.split(b"\0")[:-1]
    if context in ("substitution", "backticks"):
        assert all(part.endswith(b".") for part in parts)
        return [part[:-1] for part in parts]
    return parts


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.longer
@settings(
    max_examples=max(1, EXAMPLES // BATCH),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(batch=batches)
def test_any_text_arrives_unchanged_through_every_context_of_every_shell(
    batch: list[str], tmp: Path
) -> None:
    sent = [value.encode("utf-8", "surrogateescape") for value in batch]
    scope = {"inputs": {f"v{i}": value for i, value in enumerate(batch)}}
    for context, text in CONTEXTS.items():
        for shell in filter(shutil.which, SHELLS):
            made = script(text(len(batch)), scope, bash=shell == "bash")
            assert arrived(context, run(shell, made, tmp)) == sent, (context, shell)


@pytest.mark.longer
@settings(
    max_examples=max(1, EXAMPLES // BATCH),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(batch=batches)
def test_any_text_arrives_unchanged_as_an_argument(batch: list[str]) -> None:
    scope = {"inputs": {f"v{i}": value for i, value in enumerate(batch)}}
    show = "import os, sys; sys.stdout.buffer.write(b''.join(os.fsencode(each) + b'\\0' for each in sys.argv[1:]))"
    command = argv([sys.executable, "-S", "-c", show, *names(len(batch))], scope)
    output = subprocess.run(
        [each.encode("utf-8", "surrogateescape") for each in command],
        capture_output=True,
        check=True,
    ).stdout
    assert output.split(b"\0")[:-1] == [value.encode("utf-8", "surrogateescape") for value in batch]


TRAPS = [
    "a[$(touch pwned)]",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "\ntouch pwned\n",
    "x) touch pwned;; y",
]
PLACES = [
    "echo {{ x }}",
    'echo "{{ x }}"',
    "echo '{{ x }}'",
    "echo $'{{ x }}'",
    "echo $(( {{ x }} + 1 ))",
    "(( {{ x }} )) || true",
    "let a={{ x }} || true",
    "[[ {{ x }} -eq 1 ]] || true",
    "declare -i n={{ x }}",
    "declare {{ x }}=1",
    "a[{{ x }}]=1",
    "a=(1 2); echo ${a[{{ x }}]}",
    "s=abc; echo ${s:{{ x }}}",
    "s=abc; echo ${s#{{ x }}} \"${s%'{{ x }}'}\"",
    "eval {{ x }}",
    'eval "echo {{ x }}"',
    "cat <<E\n{{ x }}\nE",
    "cat <<'E'\n{{ x }}\nE",
    "case {{ x }} in {{ x }}) echo same;; esac",
    "# {{ x }}\ntrue",
    "echo ${A:-{{ x }}} \"${A:-'{{ x }}'}\"",
    'echo "$(echo "`echo {{ x }}`")"',
    "printf -v {{ x }} %s 1",
    "unset {{ x }}",
    "echo $[ {{ x }} ]",
    "echo \\{{ x }}",
    "echo ${{ x }}",
    "for i in {{ x }}; do echo $i; done",
    "cat <<< {{ x }}",
    "echo \"a\" 'b' # don't {{ x }}",
    "test -v {{ x }} || true",
]


@pytest.mark.parametrize("bash", [False, True], ids=["sh", "bash"])
def test_no_value_is_ever_run_wherever_it_stands(bash: bool, tmp_path: Path) -> None:
    refused = 0
    for place in PLACES:
        for trap in TRAPS:
            try:
                made = script(place, {"x": trap}, bash=bash)
            except TemplateError:
                refused += 1
                continue
            (tmp_path / "script").write_text(made)
            subprocess.run(
                ["bash" if bash else "/bin/sh", "script"],
                cwd=tmp_path,
                capture_output=True,
                timeout=60,
            )
            assert not (tmp_path / "pwned").exists(), (place, trap, made)
    assert 0 < refused < len(PLACES) * len(TRAPS)


def test_the_trap_would_spring_if_values_were_source(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", "-c", "x='a[$(touch pwned)]'; echo $(( x ))"], cwd=tmp_path, capture_output=True
    )
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_list_is_several_words_and_numbers_count(shell: str, tmp_path: Path) -> None:
    text = 'for x in {{ xs }}; do echo "<$x>"; done\necho $(( 5 - {{ n }} ))\nset -- {{ empty }}; echo $#\n'
    made = script(text, {"xs": ["a b", "*"], "n": -2, "empty": []}, bash=shell == "bash")
    assert run(needs(shell), made, tmp_path) == b"<a b>\n<*>\n7\n0\n"
