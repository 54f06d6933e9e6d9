"""Whatever is wrong with what a caller gives, or with the machine: one clear message, the documented exit code, and earlier results as they were."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.tools import needs

RECIPE = (sys.executable, "-m", "runner.interface.cli.main")
FIXTURES = Path(__file__).parents[2] / "fixtures"
GOOD = 'recipe: good@1\nsteps: {a: {run: "echo good > {{ outputs.o }}", outputs: {o: good.txt}}}\n'
HEAD = "recipe: t@1\n"


@dataclass(frozen=True)
class Case:
    """A command line that must fail: its exit code, and what its one message says."""

    code: int
    says: str
    steps: str = ""
    words: tuple[str, ...] = ("run", "./t.yaml")
    more: Mapping[str, str] = field(default_factory=dict)


def step(body: str) -> str:
    return f"{HEAD}steps: {{s: {body}}}\n"


CASES = {
    "no such recipe in the library": Case(
        3, r'no recipe "stf@1".*did you mean "sft@1"', words=("run", "stf@1")
    ),
    "no such version": Case(3, r'no version "9".*sft@1', words=("run", "sft@9")),
    "no such file": Case(
        3, r'no file \./good\.yml.*did you mean "good.yaml"', words=("run", "./good.yml")
    ),
    "no such verb": Case(3, 'unknown verb "rnu"; did you mean "run"', words=("rnu",)),
    "unknown flag": Case(
        3,
        'unknown flag "--prset"; did you mean "--preset"',
        words=("run", "./good.yaml", "--prset", "x"),
    ),
    "an input as a flag": Case(
        3,
        r"max_steps is an input of t@1: write max_steps=3\s*$",
        f"{HEAD}inputs: {{max_steps: {{type: integer}}}}\nsteps: {{s: {{run: echo}}}}\n",
        words=("run", "./t.yaml", "--max-steps", "3"),
    ),
    "no input as a flag": Case(
        3,
        r't@1 has no input "dataset" \(it has: max_steps\); inputs are given as NAME=VALUE',
        f"{HEAD}inputs: {{max_steps: {{type: integer}}}}\nsteps: {{s: {{run: echo}}}}\n",
        words=("run", "t", "--dataset=x"),
    ),
    "a branch as a commit": Case(
        3,
        "`git ls-remote https://x.org/y main`",
        step("{run: echo, code: [{git: 'https://x.org/y', commit: main, at: v}]}"),
    ),
    "unknown flag before the verb": Case(3, 'unknown flag "--frob"', words=("--frob",)),
    "unknown driver": Case(
        3,
        r'unknown driver "locla".*did you mean "local"',
        words=("run", "./good.yaml", "--driver", "locla"),
    ),
    "unknown preset": Case(
        3, 'no preset "smkoe".*did you mean "smoke"', words=("run", "sft@1", "--preset", "smkoe")
    ),
    "unknown input": Case(
        3,
        'no input "tims".*did you mean "times"',
        f"{HEAD}inputs: {{times: {{type: integer, default: 1}}}}\nsteps: {{s: {{run: echo}}}}\n",
        words=("run", "./t.yaml", "tims=3"),
    ),
    "unknown step": Case(3, 'no step "b"', words=("run", "./good.yaml", "--until", "b")),
    "missing input": Case(
        3,
        'the input "n" has no value.*n=…',
        f"{HEAD}inputs: {{n: {{type: integer}}}}\nsteps: {{s: {{run: echo}}}}\n",
    ),
    "wrong type": Case(
        3,
        '"n" must be a whole number, not "x"',
        f"{HEAD}inputs: {{n: {{type: integer}}}}\nsteps: {{s: {{run: echo}}}}\n",
        words=("run", "./t.yaml", "n=x"),
    ),
    "a word for which there is no place": Case(
        3, 'unexpected argument "show"', words=("runs", "show")
    ),
    "a run where none is expected": Case(
        3,
        "recipe show 20260101-000000-abcdef` shows a run",
        words=("runs", "20260101-000000-abcdef"),
    ),
    "a word that is no input": Case(
        3, '"whatever" is not INPUT=VALUE', words=("run", "./good.yaml", "whatever")
    ),
    "secret not set": Case(
        3,
        'secret "token" is not set.*export T_TOKEN_OF_TEST',
        f"{HEAD}inputs: {{token: {{type: secret, env: T_TOKEN_OF_TEST}}}}\nsteps: {{s: {{run: echo, secrets: [token]}}}}\n",
    ),
    "secret empty": Case(
        3,
        'secret "token" is empty: T_EMPTY_OF_TEST is set, but to an empty text.*export T_EMPTY_OF_TEST',
        f"{HEAD}inputs: {{token: {{type: secret, env: T_EMPTY_OF_TEST}}}}\nsteps: {{s: {{run: echo, secrets: [token]}}}}\n",
    ),
    "secret too short": Case(
        3,
        'secret "token" is too short: T_SHORT_OF_TEST has 5 characters',
        f"{HEAD}inputs: {{token: {{type: secret, env: T_SHORT_OF_TEST, required: false}}}}\nsteps: {{s: {{run: echo, secrets: [token]}}}}\n",
    ),
    "output outside": Case(
        3, "leaves the attempt directory", step('{run: "true", outputs: {o: ../o}}')
    ),
    "rendered output outside": Case(
        3,
        "leaves the attempt directory",
        f'{HEAD}inputs: {{n: {{type: string}}}}\nsteps: {{s: {{run: "true", outputs: {{o: "{{{{ inputs.n }}}}/o"}}}}}}\n',
        words=("run", "./t.yaml", "n=../.."),
    ),
    "two makers": Case(
        3,
        'an output of both "s" and "t"',
        f'{HEAD}steps: {{s: {{run: "true", outputs: {{o: x}}}}, t: {{run: "true", outputs: {{p: x}}}}}}\n',
    ),
    "cycle": Case(
        3,
        "s -> t -> s|t -> s -> t",
        f"{HEAD}steps: {{s: {{run: echo, needs: [t]}}, t: {{run: echo, needs: [s]}}}}\n",
    ),
    "not a recipe": Case(3, "must be a mapping", "just words\n"),
    "not text": Case(3, "UTF-8", "recipe: t@1\nsummary: \udcff\udcfe\n"),
    "a folder as recipe": Case(3, r"\./sub is a directory", words=("run", "./sub")),
    "missing file input": Case(
        2,
        "s requires gone.txt, which does not exist",
        f'{HEAD}inputs: {{d: {{type: file}}}}\nsteps: {{s: {{run: [cat, "{{{{ inputs.d }}}}"]}}}}\n',
        words=("run", "./t.yaml", "d=gone.txt"),
    ),
    "missing dep": Case(
        2, "s requires gone.txt, which does not exist", step('{run: "true", deps: [gone.txt]}')
    ),
    "missing code": Case(
        2, "s requires gone.py, which matches no file", step('{run: "true", code: [gone.py]}')
    ),
    "workspace is not a folder": Case(
        3, "nowhere is not a directory", words=("run", "-C", "nowhere", "./good.yaml")
    ),
    "jobs below one": Case(3, "must be at least 1", words=("run", "./good.yaml", "-j", "0")),
    "jobs no number": Case(3, "-j", words=("run", "./good.yaml", "-j", "many")),
    "pool no number": Case(
        3, "api=x.*is not NAME=N", words=("run", "./good.yaml", "--pool", "api=x")
    ),
    "pool of memory no size": Case(
        3, "memory=lots.*is not NAME=N", words=("run", "./good.yaml", "--pool", "memory=lots")
    ),
    "more than this machine has": Case(
        2,
        "s requires 99,999 processors(.|\n)*reduce the `resources` of the step",
        step('{run: "true", resources: {cpus: 99999}}'),
    ),
    "an image here": Case(2, "image", step('{run: "true", image: "a/b:1"}')),
    "fails": Case(1, "s.*(exit|3)", step('{run: "exit 3"}')),
    "no such program": Case(1, "(?i)not found|no such", step("{run: [no-such-program-at-all]}")),
    "output not made": Case(1, "(?i)out.txt", step('{run: "true", outputs: {o: out.txt}}')),
    "output empty": Case(
        1,
        "(?i)out.txt.*empty|empty.*out.txt",
        step('{run: ": > out.txt", outputs: {o: {path: out.txt, nonempty: true}}}'),
    ),
    "empty folder": Case(
        1, "(?i)d.*empty|empty.*d", step('{run: "true", outputs: {o: {path: d/, nonempty: true}}}')
    ),
    "killed": Case(1, "(?i)kill", step('{run: "kill -9 $$"}')),
    "timeout": Case(1, "ran longer than 0.2 s", step('{run: "exec sleep 60", timeout: 0.2s}')),
    "empty dataset": Case(
        2,
        "s requires ./sub, which is an empty directory",
        f'{HEAD}inputs: {{d: {{type: dataset}}}}\nsteps: {{s: {{run: [ls, "{{{{ inputs.d }}}}"]}}}}\n',
        words=("run", "./t.yaml", "d=./sub"),
    ),
}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace where something has been made, and where everything then goes wrong."""
    root = tmp_path_factory.mktemp("space")
    (root / "good.yaml").write_text(GOOD)
    (root / "sub").mkdir()
    done = call(root, "run", "./good.yaml")
    assert done.returncode == 0, done.stderr
    return root


def call(root: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "T_TOKEN_OF_TEST"}
    environment |= {"T_EMPTY_OF_TEST": "", "T_SHORT_OF_TEST": "12345"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [*before, *RECIPE, *words], cwd=root, env=environment, capture_output=True, text=True, errors="replace", timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def clear(done: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    """No traceback, the exit code, and the message on stderr."""
    told = done.stderr
    assert "Traceback" not in told, told
    assert done.returncode == code, (done.returncode, told)
    flat = " ".join(told.split())
    assert re.search(says, flat), told


def results(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (root / "good.txt", root / "good.yaml")
    }


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_bad_input_is_reported_once_and_leaves_results_alone(case: Case, space: Path) -> None:
    if case.steps:
        (space / "t.yaml").write_bytes(case.steps.encode("utf-8", "surrogateescape"))
    before = results(space)
    clear(call(space, *case.words), case.code, case.says)
    assert results(space) == before


def in_mounts(root: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a mount namespace of its own, after `script`."""
    needs("mount")
    return call(root, *words, before=("unshare", "-m", "sh", "-euc", f'{script}; exec "$@"', "sh"))


def test_a_workspace_that_cannot_be_written_is_reported(space: Path) -> None:
    (space / "t.yaml").write_text(step('{run: "echo 1 > o", outputs: {o: o}}'))
    before = results(space)
    clear(
        in_mounts(
            space,
            f"mount --bind {space} {space}; mount -o remount,ro,bind {space}; cd {space}",
            "run",
            "./t.yaml",
        ),
        5,
        "(?i)read-only|written",
    )
    assert results(space) == before


def test_a_disk_that_is_full_is_reported_as_that(space: Path) -> None:
    (space / "t.yaml").write_text(step('{run: "head -c 300000 /dev/urandom > o", outputs: {o: o}}'))
    home = space / ".recipe"
    script = f"mount -t tmpfs -o size=400k none {home}"
    done = in_mounts(space, script, "run", "./t.yaml")
    assert done.returncode in (1, 5), done.stderr
    clear(done, done.returncode, "(?i)disk is full|no space|disk full")
    assert not (space / "o").exists()
    assert (space / "good.txt").read_text() == "good\n"
