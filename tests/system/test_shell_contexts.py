"""The shell that runs a script never parses a value as source; what the script hands to another interpreter is warned of.

Every place of `fixtures/shell-contexts.txt` is refused, or warned of, or a hostile value there runs nothing in a real shell.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runner.language.shell import errors, script, warnings
from runner.language.template import TemplateError

_, *LINES = (Path(__file__).parents[2] / "fixtures" / "shell-contexts.txt").read_text().splitlines()
CONTEXTS = [line.replace("⏎", "\n") for line in LINES if not line.startswith("# -- ")]
EVALUATED = "PATH[$(touch PWNED)]"  # a set variable: with `-u` bash would stop at another one before the subscript
PAYLOADS: list[object] = [
    EVALUATED,
    "touch PWNED",
    ";touch PWNED;",
    "x'\";touch PWNED;\"'",
    "x\nE\ntouch PWNED\n",
    "x);touch PWNED;(",
    f"-v{EVALUATED}",
    f"-p{EVALUATED}",
    "-ctouch PWNED",
    "PS4=$(touch PWNED)",
    ["-v", EVALUATED],
    "($(touch PWNED))",  # elements, to `declare -a`
    "([$(touch PWNED)]=1)",
]
# Each script is read in a process of its own; the names of those that ran their value are printed.
HARNESS = """
for each in ../scripts/*; do
  ( set -eu; FLAGS . "$each" ) </dev/null >/dev/null 2>&1
  if [ -e PWNED ]; then rm PWNED; echo "${each##*/}"; fi
done
wait
if [ -e PWNED ]; then echo late; fi
"""


FEW = [EVALUATED, "touch PWNED", "PS4=$(touch PWNED)", ["-v", EVALUATED], PAYLOADS[-2]]


class Shell(NamedTuple):
    """A program that runs scripts: what starts it, whether it is what `shell: bash` means, and the values to try in it."""

    argv: tuple[str, ...]
    bash: bool
    payloads: list[object]


SHELLS = {
    "dash": Shell(("dash",), False, PAYLOADS),
    "bash": Shell(("bash",), True, PAYLOADS),
    "bash as sh": Shell(("bash", "--posix"), False, FEW),
    "busybox": Shell(("busybox", "ash"), False, FEW),
}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Shell:
    found = SHELLS[request.param]
    if not shutil.which(found.argv[0]):
        pytest.skip(f"there is no {found.argv[0]} here")
    return found


@pytest.fixture
def room() -> Iterator[Path]:
    """An empty folder of a user who may do nothing."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def text_of(context: str) -> str:
    return context.replace("X", "{{ x }}")


def doubted(text: str) -> bool:
    return any(each.code == "template-in-code" for each in warnings(text))


class Case(NamedTuple):
    """A script that would run, from a text and a value."""

    text: str
    value: object
    script: str


def rendered(texts: Iterable[str], shell: Shell) -> Iterator[Case]:
    """Every script that is neither refused nor warned of."""
    for text in texts:
        if errors(text, bash=shell.bash) or doubted(text):
            continue
        for value in shell.payloads:
            try:
                yield Case(text, value, script(text, {"x": value}, bash=shell.bash))
            except TemplateError:
                continue


def ran(scripts: Iterable[str], shell: Shell) -> list[str]:
    """The numbers of those scripts that ran their value, each in an empty folder; as nobody when the tests are root's."""
    room = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        (room / "scripts").mkdir()
        (room / "work").mkdir()
        for number, each in enumerate(scripts):
            (room / "scripts" / f"{number:05}").write_text(each + "\n")
        room.chmod(0o755)
        (room / "work").chmod(0o777)
        user = (
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            if os.geteuid() == 0
            else []
        )
        harness = HARNESS.replace("FLAGS", "set -o pipefail;" if shell.bash else "")
        argv = [*user, *shell.argv, "-c", harness]
        environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(room)}
        done = subprocess.run(
            argv,
            cwd=room / "work",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        return done.stdout.decode().split()
    finally:
        shutil.rmtree(room)


def told(cases: list[Case], shell: Shell) -> list[object]:
    """The texts and values that ran."""
    return [
        cases[int(each)][:2] if each.isdigit() else each
        for each in ran((case.script for case in cases), shell)
    ]


def test_a_value_is_refused_or_warned_of_or_never_run(shell: Shell) -> None:
    assert told(list(rendered(map(text_of, CONTEXTS), shell)), shell) == []


def test_a_value_that_is_source_is_seen_to_run(shell: Shell) -> None:
    assert ran(["true", "eval 'touch PWNED'", "echo PWNED"], shell) == ["00001"]


def test_there_are_many_places_and_each_once() -> None:
    assert len(CONTEXTS) == len(set(CONTEXTS)) > 500


def fits(text: str, value: object) -> bool:
    try:
        script(text, {"x": value})
    except TemplateError:
        return False
    return not doubted(text)


def test_a_number_stands_where_a_shell_computes_and_text_where_it_does_not() -> None:
    computed = [
        "echo $((X))",
        "a[X]=1",
        "[[ 1 -lt X ]]",
        "n=X; (( n > 1 ))",
        "echo a 2>&X",
        "declare -i n=X",
        "echo ${HOME:X}",
        "A=([X]=1)",
    ]
    assert [(fits(text_of(each), "2"), fits(text_of(each), "a b")) for each in computed] == [
        (True, False)
    ] * len(computed)
    texts = [
        "n=X; echo $n",
        "[[ -f X && 1 -eq 1 ]]",
        "k=X; echo $(( $(wc -l < $k) ))",
        "declare -A m; k=X; echo ${m[$k]}",
        "printf '%s' X",
        "a=(X)",
    ]
    assert [each for each in texts if not fits(text_of(each), "-a b")] == []


AROUND = [
    '"%"',
    "a%",
    "$(echo %)",
    '"$(echo %)"',
    "`echo %`",
    "${A:-%}",
    '"${A:-%}"',
    "${HOME#%}",
    "$((%))",
    "${a[%]}",
    "<(echo %)",
    "[%]=1",
    "n=%",
    "a[%]=1",
    "(%)",
    "$((%) )",
    "-v %",
    "% -eq 1",
    ">&%",
    "<<< %",
    "<<E\n%\nE\n",
    "<<-E | cat\n\t%\n\tE\n",
]
COMMANDS = [
    "echo %",
    "%",
    "if %; then :; fi",
    "( % )",
    "{ %; }",
    "case % in %) %;; esac",
    "[[ % ]]",
    "[[ a && % ]]",
    "[ % ]",
    "a=(%)",
    "let %",
    "((%))",
    "a[1 + %]=1",
    "a=([(%)]=1)",
    "for((i=0;i<(%);i++)); do break; done",
]
COMMANDS += [
    "unset %",
    "read %",
    "printf %",
    "for n in %; do echo $n; done",
    "f() { %; }; f",
    "% && %",
    "%; %",
    "% | cat",
    "eval %",
    "declare %",
    "declare -a a=%",
    'declare -a "a=(%)"',
    "# %\n%",
]
words = st.recursive(
    st.just("X"),
    lambda inner: st.builds(
        lambda form, word: form.replace("%", word), st.sampled_from(AROUND), inner
    ),
    max_leaves=4,
)
commands = st.builds(
    lambda outer, inner, word: outer.replace("%", inner.replace("%", word)),
    st.sampled_from(COMMANDS),
    st.sampled_from(COMMANDS),
    words,
)


@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(texts=st.lists(commands, min_size=40, max_size=40))
def test_no_nesting_runs_a_value(texts: list[str]) -> None:
    # Not "touch PWNED": `$(echo {{ x }})` may name a command, and no shell has parsed it.
    shell = SHELLS["bash"]._replace(
        payloads=[each for each in (*PAYLOADS[:7], *PAYLOADS[-2:]) if each != "touch PWNED"]
    )
    assert told(list(rendered(map(text_of, texts), shell)), shell) == []
