"""Promise: what is typed often starts fast.  Facts about what is imported, not timings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "yaml",
    "jinja2",
    "jsonschema",
    "networkx",
    "asyncio",
    "logging",
    "regex",
    "torch",
    "importlib.metadata",
    "psycopg",
    "fastapi",
    "runner.server",
    "runner.reports",
    "runner.storage.records.letters",
    "runner.storage.records.outbox",
}
RECIPE = """\
recipe: two@1
inputs: {word: {type: string, default: hello}}
steps:
  a: {run: "echo '' {{ inputs.word }} > {{ outputs.o }}", outputs: {o: a.txt}}
  b: {run: [cp, "{{ steps.a.o }}", "{{ outputs.o }}"], outputs: {o: b.txt}}
"""


def imported(root: Path, *words: str) -> set[str]:
    """The modules that a command line imports, from the first line to the last."""
    program = (
        "import json, sys\n"
        "from runner.interface.cli.main import main\n"
        f"code = main({list(words)!r})\n"
        "print('\\n' + json.dumps([code, sorted(sys.modules)]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("space")
    (root / "two.yaml").write_text(RECIPE)
    (root / "auto.yaml").write_text(
        RECIPE.replace("two@1", "auto@1")
        .replace("[cp,", "[python, taker.py,")
        .replace("outputs: {o: b", "code: auto, outputs: {o: b")
    )
    (root / "taker.py").write_text("import shutil, sys, taker_aid\nshutil.copy(*sys.argv[1:])\n")
    (root / "taker_aid.py").touch()
    first = imported(root, "run", "./two.yaml")
    assert {"yaml", "asyncio"} <= first, (
        "a run that does something shows that this test can see imports"
    )
    return root


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        (),
        ("list",),
        ("list", "--json"),
        ("schema",),
        ("completion", "bash"),
    ],
    ids=lambda words: " ".join(words) or "alone",
)
def test_what_only_lists_imports_no_engine(space: Path, words: tuple[str, ...]) -> None:
    assert (
        imported(space, *words)
        & (HEAVY | {"sqlite3", "runner.survey.survey", "runner.language.document"})
        == set()
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "./two.yaml"),
        ("plan", "-q", "./two.yaml"),
        ("run", "./two.yaml", "word=hello"),
        ("run", "./two.yaml", "--until", "b"),
    ],
    ids=" ".join,
)
def test_a_run_in_which_nothing_is_to_be_done_imports_nothing_heavy(
    space: Path, words: tuple[str, ...]
) -> None:
    imported(space, *words)  # inputs spelled otherwise are planned once
    assert imported(space, *words) & HEAVY == set()


def test_a_run_in_which_nothing_is_to_be_done_reads_no_python(space: Path) -> None:
    """What files import is remembered by their content."""
    assert "runner.language.python_reader" in imported(space, "run", "auto")
    assert imported(space, "run", "auto") & (HEAVY | {"runner.language.python_reader"}) == set()


def test_a_run_of_a_plan_that_is_kept_imports_no_graphs(space: Path) -> None:
    """Its steps are kept in order: what comes after one, and which to start first, is one pass along them."""
    found = imported(space, "run", "./two.yaml", "--from", "a")
    assert "asyncio" in found and "networkx" not in found


def test_a_recipe_is_held_against_the_schema_once_and_again_when_it_was_edited(space: Path) -> None:
    recipe = space / "checked.yaml"
    recipe.write_text(RECIPE.replace("two@1", "checked@1"))
    assert "jsonschema" in imported(space, "run", "checked")
    found = imported(space, "run", "checked", "word=other")
    assert "asyncio" in found and not found & {
        "jsonschema",
        "referencing",
        "runner.advice.estimates",
    }
    recipe.write_text(recipe.read_text() + "outptus: {}\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from runner.interface.cli.main import main; sys.exit(main(['run', 'checked', 'word=third']))",
        ],
        cwd=space,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "outptus" in done.stderr


def test_completing_an_input_imports_only_what_reads_its_recipe(space: Path) -> None:
    assert imported(space, "__complete", "run", "./two.yaml", "wo") & (HEAVY - {"yaml"}) == set()


def test_a_run_without_receivers_imports_nothing_of_reports(space: Path) -> None:
    found = imported(space, "run", "./two.yaml", "word=untold")
    assert "asyncio" in found and not found & {
        "runner.reports",
        "runner.storage.records.letters",
        "runner.storage.records.outbox",
        "http.client",
    }


def test_a_run_of_a_plan_that_is_kept_imports_no_recipe_checkpoints_or_store(space: Path) -> None:
    """Only a plan that is made, a step with a state, and a shared store need them."""
    found = imported(space, "run", "./two.yaml", "--from", "a")
    assert "asyncio" in found and not found & {
        "runner.language.inputs",
        "runner.language.recipe",
        "runner.storage.buckets.opening",
        "runner.storage.checkpoints",
        "runner.storage.remote.cache",
    }


def test_a_process_ends_without_a_collection_of_its_garbage(space: Path) -> None:
    program = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count(), file=sys.stderr))\n"
        "from runner.interface.cli.main import main\n"
        "main(['list'])\n"
        "assert not gc.get_freeze_count(), 'only the end of the process freezes'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=space,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr) > 10_000


def test_importing_the_package_imports_nothing_of_handles_and_networks() -> None:
    program = "import runner, sys; print(*sys.modules); assert callable(runner.submit) and callable(runner.run_of)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        set(done.stdout.split())
        & (HEAVY | {"httpx", "sqlite3", "runner.interface", "runner.execution"})
        == set()
    )
