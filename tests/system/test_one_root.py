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
    assert (repo / ".recipe" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


@pytest.mark.parametrize(
    ("folder", "word"),
    [(".", "configs/train.yaml"), ("configs", "train"), ("configs", "./train.yaml"), ("src/pkg", "../../configs/train.yaml")],
)
def test_it_is_the_same_recipe_wherever_it_is_typed(repo: Path, folder: str, word: str) -> None:
    assert "everything is fresh" in typed(repo / folder, "run", word).err


def test_an_input_is_typed_from_where_one_stands(repo: Path) -> None:
    plan = typed(repo / "data", "plan", "../configs/train.yaml", "data=b.txt")
    assert plan.code == 0 and "inputs.data" in plan.out, plan
    assert "fresh" in typed(repo / "data", "plan", "../configs/train.yaml", "data=a.txt").out


def test_a_name_is_the_file_here_then_the_one_at_the_root_then_a_recipe_of_the_library(repo: Path) -> None:
    assert "tool@1" in typed(repo / "src", "show", "tool").out
    assert "sft@" in typed(repo / "src", "show", "sft").out
    (repo / "sft.yaml").write_text(FILES["tool.yaml"].replace("tool@1", "mine@1"))
    assert "mine@1" in typed(repo / "src", "show", "sft").out
    (repo / "sft.yaml").unlink()


@pytest.mark.parametrize("verb", ["show", "plan", "validate", "check"])
def test_without_a_word_every_verb_means_recipe_yaml(tmp_path: Path, verb: str) -> None:
    root = written(
        tmp_path, {".git/HEAD": "", "sub/x.txt": "", "recipe.yaml": "recipe: here@1\nsummary: Here\nsteps: {a: {run: [true], outputs: []}}\n"}
    )
    assert typed(root, verb).code == typed(root / "sub", verb).code == 0 or verb == "validate"
    assert not (root / "sub" / ".recipe").exists()


def test_what_cannot_be_read_makes_no_recipe_folder(tmp_path: Path) -> None:
    written(tmp_path, {"bad.yaml": "recipe: bad@1\nsteps: {a: {run: [true], depends: [b]}}\n"})
    assert [typed(tmp_path, verb, "bad.yaml").code for verb in ("plan", "run", "check")] == [3, 3, 3]
    assert typed(tmp_path, "run", "missing.yaml").code == 3
    assert not (tmp_path / ".recipe").exists()


def test_code_beside_a_recipe_in_a_folder_says_how_to_write_it(tmp_path: Path) -> None:
    recipe = "recipe: t@1\nsummary: T\nsteps: {a: {run: [python, t.py], code: [t.py], outputs: [o.txt]}}\n"
    root = written(tmp_path, {".git/HEAD": "", "configs/t.yaml": recipe, "configs/t.py": ""})
    said = typed(root, "run", "configs/t.yaml")
    assert said.code == 2 and "for the one beside the recipe write ./t.py, which its command finds as configs/t.py" in said.err


@pytest.mark.parametrize("path", ["../../outside.py", "/etc/passwd"])
def test_code_outside_the_root_is_refused(repo: Path, path: str) -> None:
    recipe = f"recipe: t@1\nsummary: T\nsteps: {{a: {{run: [true], code: [{path}], outputs: [o.txt]}}}}\n"
    written(repo, {"configs/bad.yaml": recipe})
    said = typed(repo, "validate", "configs/bad.yaml")
    assert said.code == 3 and f'"{path}" leaves the workspace' in said.out


def test_problems_are_named_from_where_one_stands(repo: Path) -> None:
    written(repo, {"configs/odd.yaml": "recipe: odd@1\nsummary: Odd\nsteps: {a: {run: [true], depends: [b]}}\n"})
    assert typed(repo / "configs", "validate", "odd.yaml").out.startswith("odd.yaml:3:")
    assert typed(repo, "validate", "configs/odd.yaml").out.startswith("configs/odd.yaml:3:")
