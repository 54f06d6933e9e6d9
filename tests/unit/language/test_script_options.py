"""Claims about what is said of a script's options before it runs: nothing that argparse takes is refused, and what it surely refuses is named."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.language.script_options import ScriptOptions, options_of
from runner.language.script_words import GivenWord, find_faults, words_of_mapping, words_of_script

PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--lr", "-l", type=float, default=0.1)
parser.add_argument("--steps", type=int)
parser.add_argument("--mode", choices=["fast", "slow"])
parser.add_argument("--amp", action="store_true")
parser.add_argument("--files", nargs="*")
args = parser.parse_args()
"""


def read(source: str, **more: str) -> ScriptOptions | None:
    files = {"train.py": source, **{f"{name}.py": text for name, text in more.items()}}
    return options_of(
        "train.py", {name: ast.parse(textwrap.dedent(text)) for name, text in files.items()}
    )


def said(source: str, *words: str, **more: str) -> list[str]:
    """What is said of these words; one that begins with {{ may become any number of them."""
    takes = read(source, **more)
    assert takes is not None
    given = [GivenWord(word, (), word.startswith("{{")) for word in words]
    return [fault.message for fault in find_faults("train.py", takes, given, ())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "x", "--dta", "y"], "train.py has no option --dta"),
        (["--lr", "0.1"], "train.py needs the option --data, which is not given"),
        (["--data", "--lr", "0.1"], "--data of train.py needs a value"),
        (["--data"], "--data of train.py needs a value"),
        (["--data", "x", "stray"], 'train.py takes no argument "stray"'),
        (["--data", "x", "--amp=1"], "--amp of train.py takes no value"),
        (["--data", "x", "--mode", "quick"], '--mode of train.py takes fast or slow, not "quick"'),
        (["--data", "x", "--steps", "1e3"], '--steps of train.py takes a whole number, not "1e3"'),
        (["--data", "x", "--lr=high"], '--lr of train.py takes a number, not "high"'),
    ],
)
def test_what_argparse_will_refuse_is_said(words: list[str], message: str) -> None:
    assert said(PARSER, *words) == [message]


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "x", "-l", "1", "--amp"],
        ["--da", "x", "-l0.5"],
        ["--data=x", "--files", "a", "b", "--steps", "-3"],
        ["--data", "{{ inputs.data }}", "--mode", "{{ inputs.mode }}"],
        ["{{ inputs.more }}"],
        ["--data", "x", "{{ '--amp' if inputs.amp else none }}"],
        ["--files", "{{ inputs.files }}", "--data", "x"],
    ],
)
def test_what_argparse_may_take_is_not_refused(words: list[str]) -> None:
    assert said(PARSER, *words) == []


def test_options_that_other_files_add_in_loops_are_known() -> None:
    common = """
    import argparse
    def parser():
        made = argparse.ArgumentParser()
        for name in ("data", "out"):
            made.add_argument(f"--{name}", required=True)
        for flag, kind in (("--lr", float), ("--rank", int)):
            made.add_argument(flag, type=kind)
        return made
    """
    script = """
    import common
    def main():
        made = common.parser()
        add(made)
        made.parse_args()
    def add(parser):
        group = parser.add_argument_group("more")
        group.add_argument("--seed", type=int)
    if __name__ == "__main__":
        main()
    """
    assert (
        said(script, "--data", "x", "--out", "y", "--seed", "1", "--rank", "2", common=common) == []
    )
    assert said(script, "--out", "y", "--sed", "1", common=common) == [
        "train.py has no option --sed",
        "train.py needs the option --data, which is not given",
    ]


def test_an_option_that_is_added_on_a_condition_is_known_and_not_needed() -> None:
    script = """
    import argparse, os
    parser = argparse.ArgumentParser()
    if os.name == "posix":
        parser.add_argument("--fork", required=True)
    parser.parse_args()
    """
    assert said(script) == said(script, "--fork", "1") == []


@pytest.mark.parametrize(
    "script",
    [
        "import argparse\np = argparse.ArgumentParser()\np.add_argument(name)\np.parse_args()",
        "import argparse, deepspeed\np = argparse.ArgumentParser()\ndeepspeed.add_config_arguments(p)\np.parse_args()",
        "import argparse\np = argparse.ArgumentParser()\ns = p.add_subparsers()\np.parse_args()",
        "import argparse, other\np = argparse.ArgumentParser(parents=[other.parser])\np.parse_args()",
        "import argparse, sys\np = argparse.ArgumentParser()\nsys.argv[1:] = []\np.parse_args()",
        "import argparse\np = argparse.ArgumentParser()\np.parse_args([])",
        "from transformers import HfArgumentParser\nHfArgumentParser(A).parse_args_into_dataclasses()",
        "import configargparse\np = configargparse.ArgumentParser()\np.parse_args()",
        "import argparse\np = argparse.ArgumentParser(fromfile_prefix_chars='@')\np.parse_args()",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('rest', nargs='...')\np.parse_args()",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('')\np.parse_args()",
        "import click",
        "",
    ],
)
def test_of_what_is_not_certain_nothing_is_said(script: str) -> None:
    assert read(script) is None


def test_what_is_not_known_is_left_to_a_script_that_reads_known_options_alone() -> None:
    script = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    known, rest = parser.parse_known_args()
    """
    assert said(script, "--other", "1", "--data", "x", "y") == []
    assert said(script, "--other", "1") == ["train.py needs the option --data, which is not given"]


def test_a_mapping_of_options_gives_their_words() -> None:
    words = words_of_mapping(
        {"data": "{{ x }}", "amp": True, "no": False, "n": 3, "of": [1, 2]}, ()
    )
    assert [word.text for word in words] == [
        "--data", "{{ x }}", "--amp", "--n", "3", "--of", "1", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python train.py --data x > log", ["--data", "x"]),
        ("set -e\npython train.py \\\n  --data 'a b' && echo done", ["--data", "a b"]),
        ("cd a\npython train.py --data x", None),
        ("python train.py --data x # --other", ["--data", "x"]),
        ("python train.py --a\npython train.py --b", None),
        ("python -m train.py --data x", ["--data", "x"]),
        ("python other.py --run train.py --data x", None),
        ("./train.py --data x", None),
        ("cat <<E\npython train.py --a\nE", None),
        ("python train.py --a 'open", None),
    ],
)
def test_the_words_behind_a_file_in_a_script_are_read(script: str, words: list[str] | None) -> None:
    found = words_of_script(script, "train.py", (), re.compile("python"))
    assert (None if found is None else [word.text for word in found]) == words


# -- against argparse itself -----------------------------------------------------------------------------------------------------------------------

_KINDS: dict[str, dict[str, Any]] = {
    "value": {},
    "needed": {"required": True},
    "number": {"type": int},
    "rate": {"type": float},
    "choice": {"choices": ["a", "b"]},
    "flag": {"action": "store_true"},
    "counted": {"action": "count"},
    "repeated": {"action": "append"},
    "many": {"nargs": "*"},
    "some": {"nargs": "+"},
    "maybe": {"nargs": "?"},
    "pair": {"nargs": 2},
}
_NAMES = ["--alpha", "--alphabet", "--beta", "-g", "--gamma-ray", "operand"]
_WORDS = [
    *_NAMES,
    "--alp",
    "--be",
    "-g1",
    "--delta",
    "a",
    "b",
    "3",
    "-3",
    "0.5",
    "--beta=a",
    "--gamma-ray=3",
    "-x",
    "-",
]


def _source(options: list[tuple[str, str]], abbreviations: bool) -> str:
    lines = ["import argparse", f"parser = argparse.ArgumentParser(allow_abbrev={abbreviations})"]
    for name, kind in options:
        given = {**_KINDS[kind]}
        if not name.startswith("-"):
            given.pop("required", None)
            if given.get("action"):
                given = {}
        words = [repr(name)]
        for key, value in given.items():
            words.append(f"{key}={value.__name__ if isinstance(value, type) else repr(value)}")
        lines.append(f"parser.add_argument({', '.join(words)})")
    return "\n".join(lines)


def _refuses(source: str, words: list[str]) -> bool:
    scope: dict[str, Any] = {}
    exec(source, scope)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            scope["parser"].parse_args(words)
        except SystemExit:
            return True
    return False


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(_NAMES), st.sampled_from(sorted(_KINDS))),
        max_size=4,
        unique_by=lambda each: each[0],
    ),
    st.booleans(),
    st.lists(st.sampled_from(_WORDS), max_size=6),
)
def test_what_is_said_is_refused_by_argparse(
    options: list[tuple[str, str]], abbreviations: bool, words: list[str]
) -> None:
    source = _source(options, abbreviations)
    if said(source + "\nparser.parse_args()", *words):
        assert _refuses(source, words)
