"""A repository as people have them: configs/, src/pkg with relative imports, data.  What is typed where, and which paths are meant."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.interface.cli.main import main

FILES = {
    ".git/HEAD": "ref: refs/heads/main\n",
    "src/pkg/__init__.py": "",
    "src/pkg/model.py": "def made(text):\n    return text.upper()\n",
    "src/pkg/train.py": "import sys\nfrom .model import made\nopen(sys.argv[2], 'w').write(made(open(sys.argv[1]).read()))\n",
    "src/tool.py": "import sys\nfrom pkg.model import made\nopen(sys.argv[1], 'w').write(made('tool'))\n",
    "configs/note.txt": "note",
    "data/a.txt": "a",
    "data/b.txt": "b",
    "configs/train.yaml": """\
recipe: train@1
summary: Train
inputs: {data: {type: file, default: data/a.txt}}
steps:
  train:
    run: [python, -m, pkg.train, "{{ inputs.data }}", "{{ outputs.o }}"]
    env: {PYTHONPATH: src}
    code: [../src/pkg/]
    deps: [./note.txt]
    outputs: {o: out/model.txt}
""",
    "tool.yaml": """\
recipe: tool@1
summary: Tool
steps: {tool: {run: [python, src/tool.py, "{{ outputs.o }}"], code: [src/tool.py, src/pkg/*.py], outputs: {o: out/tool.txt}}}
""",
}


class Said(NamedTuple):
    code: int
    out: str
    err: str


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def typed(folder: Path, *words: str) -> Said:
    """A command line, typed in a folder."""
    out, err = io.StringIO(), io.StringIO()
    with standing_in(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Said(code, out.getvalue(), err.getvalue())


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository, with train@1 run once from configs/."""
    root = written(tmp_path_factory.mktemp("repo"), FILES)
    assert (ran := typed(root / "configs", "run", "train.yaml")).code == 0, ran
    return root


def test_a_recipe_in_configs_reaches_src_and_makes_its_outputs_at_the_root(repo: Path) -> None:
    assert (repo / "out" / "model.txt").read_text() == "A"


def test_there_is_one_recipe_folder_and_neither_git_nor_backups_take_it(repo: Path) -> None:
    typed(repo / "src" / "pkg", "run", "nowhere.yaml")
    assert [path.parent for path in repo.rglob(".recipe")] == [repo]
    assert (repo / ".recipe" / ".gitignore").read_text() == "*\n"
    assert (
        (repo / ".recipe" / "CACHEDIR.TAG")
        .read_text()
        .startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    )


@pytest.mark.parametrize(
    ("folder", "word"),
    [
        (".", "configs/train.yaml"),
        ("configs", "train"),
        ("configs", "./train.yaml"),
        ("src/pkg", "../../configs/train.yaml"),
    ],
)
def test_it_is_the_same_recipe_wherever_it_is_typed(repo: Path, folder: str, word: str) -> None:
    assert "everything is fresh" in typed(repo / folder, "run", word).err


def test_an_input_is_typed_from_where_one_stands(repo: Path) -> None:
    plan = typed(repo / "data", "plan", "../configs/train.yaml", "data=b.txt")
    assert plan.code == 0 and "inputs.data" in plan.out, plan
    assert "fresh" in typed(repo / "data", "plan", "../configs/train.yaml", "data=a.txt").out


def test_a_name_is_the_file_here_then_the_one_at_the_root_then_a_recipe_of_the_library(
    repo: Path,
) -> None:
    assert "tool@1" in typed(repo / "src", "show", "tool").out
    assert "sft@" in typed(repo / "src", "show", "sft").out
    (repo / "sft.yaml").write_text(FILES["tool.yaml"].replace("tool@1", "mine@1"))
    assert "mine@1" in typed(repo / "src", "show", "sft").out
    (repo / "sft.yaml").unlink()


@pytest.mark.parametrize("verb", ["show", "plan", "validate", "check"])
def test_without_a_word_every_verb_means_recipe_yaml(tmp_path: Path, verb: str) -> None:
    root = written(
        tmp_path,
        {
            ".git/HEAD": "",
            "sub/x.txt": "",
            "recipe.yaml": "recipe: here@1\nsummary: Here\nsteps: {a: {run: [true], outputs: []}}\n",
        },
    )
    assert typed(root, verb).code == typed(root / "sub", verb).code == 0 or verb == "validate"
    assert not (root / "sub" / ".recipe").exists()


def test_what_cannot_be_read_makes_no_recipe_folder(tmp_path: Path) -> None:
    written(tmp_path, {"bad.yaml": "recipe: bad@1\nsteps: {a: {run: [true], depends: [b]}}\n"})
    assert [typed(tmp_path, verb, "bad.yaml").code for verb in ("plan", "run", "check")] == [
        3,
        3,
        3,
    ]
    assert typed(tmp_path, "run", "missing.yaml").code == 3
    assert [
        typed(tmp_path, *words).code
        for words in (("gc",), ("clean",), ("adopt", "a"), ("clean", "bad.yaml"))
    ] == [0, 3, 3, 3]
    assert not (tmp_path / ".recipe").exists()


def test_code_beside_a_recipe_in_a_folder_says_how_to_write_it(tmp_path: Path) -> None:
    recipe = "recipe: t@1\nsummary: T\nsteps: {a: {run: [python, t.py], code: [t.py], outputs: [o.txt]}}\n"
    root = written(tmp_path, {".git/HEAD": "", "configs/t.yaml": recipe, "configs/t.py": ""})
    said = typed(root, "run", "configs/t.yaml")
    assert (
        said.code == 2
        and "for the file next to the recipe, write ./t.py; the command then finds it at configs/t.py"
        in said.err
    )


@pytest.mark.parametrize("path", ["../../outside.py", "/etc/passwd"])
def test_code_outside_the_root_is_refused(repo: Path, path: str) -> None:
    recipe = f"recipe: t@1\nsummary: T\nsteps: {{a: {{run: [true], code: [{path}], outputs: [o.txt]}}}}\n"
    written(repo, {"configs/bad.yaml": recipe})
    said = typed(repo, "validate", "configs/bad.yaml")
    assert said.code == 3 and f'"{path}" leaves the workspace' in said.out


def test_problems_are_named_from_where_one_stands(repo: Path) -> None:
    written(
        repo,
        {
            "configs/odd.yaml": "recipe: odd@1\nsummary: Odd\nsteps: {a: {run: [true], depends: [b]}}\n"
        },
    )
    assert typed(repo / "configs", "validate", "odd.yaml").out.startswith("odd.yaml:3:")
    assert typed(repo, "validate", "configs/odd.yaml").out.startswith("configs/odd.yaml:3:")


def test_a_mistake_in_a_path_that_begins_at_the_recipe_is_shown_where_it_stands(repo: Path) -> None:
    line = '  a: {run: [true], deps: ["../data/{{ inputs.nope }}.txt"], outputs: [y]}'
    written(repo, {"configs/caret.yaml": f"recipe: caret@1\nsummary: C\nsteps:\n{line}\n"})
    assert typed(repo, "validate", "configs/caret.yaml").out.startswith(
        f"configs/caret.yaml:4:{line.index('nope') + 1}:"
    )


# -- code: auto ------------------------------------------------------------------------------------------------------------------------------------


AUTO = """\
recipe: auto@1
summary: Auto
steps: {train: {run: [python, src/main.py, "{{ outputs.o }}"], code: auto, outputs: {o: auto.txt}}}
"""
SOURCES = {
    ".git/HEAD": "",
    "auto.yaml": AUTO,
    "src/main.py": "import sys\nimport lib.util\nopen(sys.argv[1], 'w').write(lib.util.word())\n",
    "src/lib/util.py": "from . import words\ndef word(): return words.WORD\n",
    "src/lib/words.py": "WORD = 'one'\n",
    "src/unused.py": "",
}


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a recipe with `code: auto`, run once."""
    root = written(tmp_path_factory.mktemp("auto"), SOURCES)
    assert (ran := typed(root, "run", "auto")).code == 0, ran
    assert (root / "auto.txt").read_text() == "one"
    return root


@contextlib.contextmanager
def changed(root: Path, name: str, text: str) -> Iterator[None]:
    path = root / name
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    yield
    path.unlink() if before is None else path.write_text(before)


def plan_of(root: Path) -> str:
    return typed(root, "plan", "auto").out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("src/lib/words.py", "WORD = 'two'\n", "code src/lib/words.py changed"),
        ("src/lib/__init__.py", "", "code src/lib/__init__.py is new"),
        ("src/words.py", "", ""),
        ("src/unused.py", "import lib\n", ""),
        (
            "src/lib/util.py",
            "WORD = 'x'\ndef word(): return WORD\n",
            "code src/lib/words.py is gone",
        ),
    ],
)
def test_the_key_has_exactly_what_is_imported(auto: Path, name: str, text: str, words: str) -> None:
    """A module that appears and would be imported is part of the key, too."""
    with changed(auto, name, text):
        assert words in plan_of(auto) if words else "fresh" in plan_of(auto)
    assert "1 fresh" in plan_of(auto)


def test_a_shadow_of_an_installed_module_is_code(auto: Path) -> None:
    with changed(auto, "src/sys.py", ""):  # built in: never read from a file
        assert "1 fresh" in plan_of(auto)
    with (
        changed(
            auto,
            "src/lib/util.py",
            "import json\nfrom . import words\ndef word(): return words.WORD\n",
        ),
        changed(auto, "src/json.py", ""),
    ):
        assert "code src/json.py is new" in plan_of(auto)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
            "src/main.py: line 2 imports a module whose name is computed",
        ),
        ("import sys\nsys.path.insert(0, 'src/lib')\n", "src/main.py: line 2 changes sys.path"),
        ("this is no Python", "src/main.py: invalid Python"),
    ],
)
def test_what_auto_cannot_read_is_a_warning(auto: Path, text: str, words: str) -> None:
    with changed(auto, "src/main.py", text):
        said = typed(auto, "validate", "auto.yaml")
        assert said.code == 0 and words in said.out
        assert words in typed(auto, "plan", "auto").err


def test_auto_that_finds_nothing_says_so(auto: Path) -> None:
    with changed(auto, "none.yaml", AUTO.replace("src/main.py", "src/gone.py")):
        said = typed(auto, "run", "none.yaml")
        assert said.code == 2 and "finds no script of the command below" in said.err


# -- what is not listed ----------------------------------------------------------------------------------------------------------------------------


def test_an_import_that_code_does_not_list_is_a_warning_with_the_line_to_add(auto: Path) -> None:
    with changed(auto, "listed.yaml", AUTO.replace("code: auto", "code: [src/main.py]")):
        said = typed(auto, "validate", "listed.yaml")
        assert (
            said.code == 0
            and "src/main.py imports lib.util, which `code` does not list" in said.out
        )
        assert "add src/lib/util.py, or write `code: auto`" in said.out
        assert "words" not in said.out, "what is missing first comes first"


def test_a_script_that_code_does_not_list_is_a_warning(auto: Path) -> None:
    with changed(auto, "listed.yaml", AUTO.replace("code: auto, ", "")):
        assert (
            '"train" starts src/main.py, which `code` does not list'
            in typed(auto, "validate", "listed.yaml").out
        )


def test_a_module_that_is_not_there_is_named_by_its_file_when_the_step_fails(auto: Path) -> None:
    with changed(
        auto, "listed.yaml", AUTO.replace("code: auto", "code: [src/main.py, src/unused.py]")
    ):
        said = typed(auto, "run", "listed.yaml")
        assert (
            said.code == 1
            and "lib.util is src/lib/util.py, which is not in `code` of train: add it, or write `code: auto`"
            in said.err
        )


def test_a_module_in_a_folder_that_python_does_not_look_in_is_said(auto: Path) -> None:
    listed = AUTO.replace("src/main.py", "other/start.py").replace(
        "code: auto", "code: [other/start.py, src/unused.py]"
    )
    with changed(auto, "listed.yaml", listed), changed(auto, "other/start.py", "import unused"):
        said = typed(auto, "run", "listed.yaml")
        assert (
            said.code == 1
            and "unused is src/unused.py, but src is not on Python's path: add `env: {PYTHONPATH: src}` to train"
            in said.err
        )


def test_a_file_of_a_package_that_is_started_by_its_path_is_said(auto: Path) -> None:
    with (
        changed(auto, "src/lib/__init__.py", ""),
        changed(auto, "listed.yaml", AUTO.replace("src/main.py", "src/lib/util.py")),
    ):
        said = typed(auto, "run", "listed.yaml")
        assert (
            said.code == 1
            and "start it as a module with `python -m lib.util`, with `env: {PYTHONPATH: src}`"
            in said.err
        )


def test_a_large_file_in_code_is_a_warning_with_its_size(auto: Path) -> None:
    with (
        changed(auto, "listed.yaml", AUTO.replace("code: auto", "code: [src/]")),
        changed(auto, "src/weights.bin", ""),
    ):
        os.truncate(auto / "src/weights.bin", 20_000_000)
        assert (
            "src/weights.bin in `code` has 20.0 MB and is copied for every attempt"
            in typed(auto, "validate", "listed.yaml").out
        )


# -- cd --------------------------------------------------------------------------------------------------------------------------------------------


def test_an_output_that_was_made_elsewhere_is_named(auto: Path) -> None:
    recipe = AUTO.replace(
        '[python, src/main.py, "{{ outputs.o }}"]',
        '"mkdir -p src/deep; cd src/deep; echo 1 > {{ outputs.o }}"',
    ).replace("code: auto, ", "")
    with changed(auto, "cd.yaml", recipe):
        said = typed(auto, "run", "cd.yaml")
        assert (
            said.code == 1
            and "declared output auto.txt was not created; src/deep/auto.txt was created instead; check whether the script changes its directory"
            in said.err
        )
