"""list, validate, schema, doctor and completion, as somebody at a prompt, an editor or a CI meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import needs

ROOT = Path(__file__).parents[2]
RECIPE = (sys.executable, "-m", "runner.interface.cli.main")


def recipe(root: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RECIPE_HOME", None)
    return subprocess.run(
        [*RECIPE, *words],
        cwd=root,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_list_shows_the_library_and_the_recipes_of_this_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "recipe: mine@3\nsummary: Do mine\x1b[31m things\nsteps: [broken\n"
    )
    (tmp_path / "other.yaml").write_text("services: {}\n")
    shown = told(recipe(tmp_path))
    assert "sft@1" in shown
    assert re.search(r"\./mine\.yaml +Do mine", shown)
    assert "other" not in shown
    assert "\x1b" not in shown
    assert shown == told(recipe(tmp_path, "list"))
    entries = json.loads(told(recipe(tmp_path, "list", "--json")))
    assert {"recipe": "mine@3", "name": "./mine.yaml", "from": "folder"}.items() <= entries[
        -1
    ].items()


WRONG = """\
recipe: wrong@1
inputs:
  n: {type: integer, minimum: 3}
  name: {type: string, pattern: "^[A-Z]{3}-[0-9]$"}
steps:
  first: {run: "cat x | wc > {{ outputs.o }}", outputs: {o: "{{ inputs.n }}.txt"}}
  second: {run: [echo, "{{ inputs.nn }}", "{{ steps.frist.o }}"]}
  third: {run: "true", outputs: {o: ../x, p: same}}
  fourth: {run: "true", outputs: {q: same}}
"""


def test_validate_finds_problems_of_meaning_though_required_inputs_are_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "wrong.yaml").write_text(WRONG)
    (tmp_path / "broken.yaml").write_text("recipe: broken@1\nstpes: {}\n")
    done = recipe(
        tmp_path, "validate", "wrong.yaml", "broken.yaml", "gone.yaml", "--format", "json"
    )
    found = json.loads(told(done, 3))
    seen = {
        (Path(problem["path"]).name if problem["path"] else None, problem["line"], problem["code"])
        for problem in found
    }
    assert {
        ("wrong.yaml", 7, "unknown-name"),
        ("wrong.yaml", 8, "path-escape"),
        ("wrong.yaml", 6, "pipe"),
    } <= seen
    assert ("wrong.yaml", 9, "two-makers") in seen
    assert ("broken.yaml", 2, "unknown-key") in seen
    assert (None, None, "not-found") in seen
    assert sum(problem["code"] == "unknown-name" for problem in found) == 2
    assert not any("has no value" in problem["message"] for problem in found)


def test_a_value_that_was_made_up_is_no_reason_to_complain(tmp_path: Path) -> None:
    (tmp_path / "fine.yaml").write_text(
        "recipe: fine@1\n"
        "inputs: {a: {type: integer}, b: {type: integer}, s: {type: object}, p: {type: string, pattern: '^[0-9]{4}x$'}, l: {type: list}}\n"
        "steps:\n"
        '  one: {run: [echo, "{{ 6 // (inputs.a - 2) }}", "{{ inputs.p }}", "{{ inputs.s | tojson }}"], outputs: {o: "{{ inputs.a }}.txt"}, when: "{{ inputs.a > 0 }}"}\n'
        '  two: {run: "true", matrix: {x: "{{ inputs.l }}"}, outputs: {o: "b{{ inputs.b }}/{{ matrix.x }}"}}\n'
    )
    done = recipe(tmp_path, "validate", "./fine.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "./fine.yaml: valid\n")
    assert recipe(tmp_path, "validate", "./fine.yaml", "a=x").returncode == 3
    (tmp_path / "fine.yaml").rename(tmp_path / "recipe.yaml")
    assert recipe(tmp_path, "validate").stderr == "./recipe.yaml: valid\n"


def test_a_value_that_another_interpreter_reads_is_a_warning_of_validate_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "recipe: r@1\ninputs: {x: {type: string, default: a}}\nsetup: [[sh, -c, 'echo {{ inputs.x }}']]\ncleanup: ['echo {{ inputs.x }} | sh']\n"
        "steps:\n  s: {shell: bash, run: 'bash -ce \"echo {{ inputs.x }}\"'}\n  t: {run: [python, -c, '{{ inputs.x }}', [b]]}\n"
    )
    found = json.loads(told(recipe(tmp_path, "validate", "--format", "json")))
    assert [
        (each["line"], each["severity"]) for each in found if each["code"] == "template-in-code"
    ] == [
        (3, "warning"),
        (4, "warning"),
        *[(6, "warning"), (7, "warning")],
    ]
    assert "::warning " in told(recipe(tmp_path, "validate", "--format", "github"))
    planned = recipe(tmp_path, "plan")
    assert planned.returncode == 0 and "as source" not in planned.stdout + planned.stderr


@pytest.mark.parametrize(
    "where",
    [
        "env: {BASH_ENV: '{{ inputs.x }}'}",
        "steps: {s: {run: 'true', env: {PS4: '{{ inputs.x }}'}}}",
    ],
)
def test_a_variable_whose_text_a_shell_expands_takes_no_value(where: str, tmp_path: Path) -> None:
    steps = "" if "steps" in where else "steps: {s: {run: 'true'}}\n"
    text = f"recipe: r@1\ninputs: {{x: {{type: string, default: a}}}}\n{where}\n{steps}"
    (tmp_path / "recipe.yaml").write_text(text)
    for verb in ("validate", "plan"):
        done = recipe(tmp_path, verb)
        assert done.returncode == 3 and "cannot contain a template" in done.stdout + done.stderr


def test_validate_reads_standard_input_and_tries_every_preset(tmp_path: Path) -> None:
    text = 'recipe: r@1\ninputs: {n: {type: string, default: a}}\npresets: {p: {n: ../b}}\nsteps: {s: {run: "true", outputs: {o: "{{ inputs.n }}"}}}\n'
    done = recipe(tmp_path, "validate", "-", "--format", "github", stdin=text)
    assert told(done, 3).startswith("::error file=<stdin>,line=4,")
    assert (
        json.loads(
            told(
                recipe(
                    tmp_path,
                    "validate",
                    "-",
                    "--format",
                    "sarif",
                    stdin="recipe: r@1\nsteps: {s: {run: echo}}\n",
                )
            )
        )["version"]
        == "2.1.0"
    )


def test_every_library_recipe_validates(tmp_path: Path) -> None:
    names = [path.name.removesuffix(".yaml") for path in (ROOT / "recipes").glob("*@*.yaml")]
    assert names
    assert recipe(tmp_path, "validate", "-q", *names).stdout == ""


def test_schema_prints_the_schema_or_the_reference(tmp_path: Path) -> None:
    assert json.loads(told(recipe(tmp_path, "schema"))) == json.loads(
        (ROOT / "schemas" / "recipe.schema.json").read_text()
    )
    assert told(recipe(tmp_path, "schema", "--markdown")).startswith("### Recipe\n")


def test_an_answer_that_cannot_be_written_is_reported_without_a_traceback(tmp_path: Path) -> None:
    for words, closed, code in (
        ("schema", ">/dev/full", 5),
        ("list", ">/dev/full", 5),
        ("list", ">&-", 0),
        ("list", ">&- 2>&-", 0),
        ("schema", "| :", 0),
        ("run nowhere.yaml", "2>/dev/full", 3),
    ):
        line = f"{sys.executable} -m runner.interface.cli.main {words} {closed}"
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        assert ("No space left" in done.stderr) == (code == 5)


def test_doctor_says_what_is_there_and_fails_only_for_what_is_needed(tmp_path: Path) -> None:
    shown = told(recipe(tmp_path, "doctor"))
    for word in (
        "python",
        "sqlite",
        "cores",
        "memory",
        "gpus",
        "disk",
        "file system",
        "workspace",
        "torch",
    ):
        assert word in shown
    assert list(tmp_path.iterdir()) == []
    done = recipe(tmp_path, "doctor", "--json", "-C", str(tmp_path / "gone"))
    assert {"missing"} == {
        finding["state"] for finding in json.loads(told(done, 2)) if finding["what"] == "workspace"
    }


# -- completion ------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(
        "recipe: mine@1\nsummary: Mine\n"
        "inputs: {size: {type: choice, choices: [small, large]}, fast: {type: boolean}, data: {type: dataset}, token: {type: secret, env: T}}\n"
        "presets: {smoke: {size: small}}\nsteps: {clean: {run: echo}, train: {run: echo, needs: [clean]}}\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data.csv").write_text("1\n")
    return tmp_path


LINES = {
    "recipe va": {"validate"},
    "recipe run ./mi": {"./mine.yaml"},
    "recipe run --pres": {"--preset"},
    "recipe run ./mine.yaml si": {"size="},
    "recipe run ./mine.yaml to": set[str](),
    "recipe run ./mine.yaml size=": {"small", "large"},
    "recipe run ./mine.yaml size=l": {"large"},
    "recipe run ./mine.yaml fast=": {"true", "false"},
    "recipe run ./mine.yaml data=da": {"data", "data.csv"},
    "recipe run ./mine.yaml --preset ": {"smoke"},
    "recipe run ./mine.yaml --until ": {"clean", "train"},
    "recipe plan -f mine.yaml --only tr": {"train"},
    "recipe run sft@1": {"1"},
    "recipe completion ": {"bash", "zsh", "fish"},
    "recipe -C data li": {"list"},
}


def bash_replies(space: Path, lines: list[str]) -> list[set[str]]:
    """What bash would offer: words broken as readline breaks them."""
    script = f"""
    recipe() {{ {" ".join(RECIPE)} "$@"; }}
    compopt() {{ :; }}
    eval "$(recipe completion bash)"
    while IFS= read -r COMP_LINE; do
        COMP_POINT=${{#COMP_LINE}}
        read -ra COMP_WORDS <<< "$(sed 's/[=:@]/ & /g' <<< "$COMP_LINE")"
        [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _recipe
        printf '%s\\t' "${{COMPREPLY[@]}}"
        echo
    done
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=space,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [{word for word in line.split("\t") if word} for line in done.stdout.splitlines()]


def test_bash_completes_verbs_flags_recipes_inputs_presets_and_steps(space: Path) -> None:
    needs("bash")
    assert dict(zip(LINES, bash_replies(space, list(LINES)), strict=True)) == LINES


def test_bash_replaces_only_what_stands_after_a_break_in_the_word(space: Path) -> None:
    needs("bash")
    assert bash_replies(space, ["recipe run sft@1", "recipe show sft@1"]) == [{"1"}, {"1"}]


def test_fish_completes_verbs_inputs_and_files(space: Path) -> None:
    needs("fish")
    setup = f"function recipe; {' '.join(RECIPE)} $argv; end; recipe completion fish | source; "
    for line, expected in (
        ("recipe va", {"validate"}),
        ("recipe run ./mine.yaml size=", {"size=small", "size=large", "size="}),
        ("recipe run ./mine.yaml --until ", {"clean", "train"}),
    ):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f'{setup}complete -C "{line}"'],
            cwd=space,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert {word.split("\t")[0] for word in done.stdout.splitlines()} <= expected, done.stdout
        assert len(done.stdout.splitlines()) >= len(expected - {"size="}), done.stdout


def test_what_zsh_is_given_is_zsh(space: Path) -> None:
    needs("zsh")
    script = f'compdef() {{ :; }}; eval "$({" ".join(RECIPE)} completion zsh)"; whence -w _recipe'
    done = subprocess.run(
        ["zsh", "-f", "-c", script],
        cwd=space,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "_recipe: function\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        [""],
        ["run"],
        ["run", "nope@7", ""],
        ["run", "./gone.yaml", "--until", ""],
        ["--", ""],
        ["show", "./data.csv", ""],
        ["run", "x=", "=", ""],
        ["nope", ""],
    ],
)
def test_completion_is_silent_about_whatever_is_wrong(space: Path, words: list[str]) -> None:
    done = recipe(space, "__complete", *words)
    assert (done.returncode, done.stderr) == (0, "")
