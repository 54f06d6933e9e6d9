"""Which files of a repository a command needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.language import python_reader
from runner.language.imports import EntryPoint
from runner.survey.imports import ImportedFiles, files_of_module, follow_imports

FILES = {
    "train.py": "import util, torch, json\nfrom pkg import model\n",
    "util.py": "import sys\n",
    "json.py": "",
    "sys.py": "",
    "pkg/__init__.py": "from .base import *\n",
    "pkg/base.py": "",
    "pkg/model.py": "from . import layers\nfrom .sub.deep import far\n",
    "pkg/layers.py": "from pkg.sub import *\n",
    "pkg/sub/__init__.py": "__all__ = ['listed']\n",
    "pkg/sub/listed.py": "",
    "pkg/sub/unlisted.py": "",
    "pkg/sub/deep.py": "import util\nfrom ..base import thing\n",
    "pkg/__main__.py": "from pkg import model\n",
    "space/part/inner.py": "",
    "torch/notes.txt": "",
    "src/run.py": "import helper\nimport lib.tool\n",
    "src/helper.py": "from space.part import inner\n",
    "lib/tool.py": "",
    "go.sh": "",
    "circle/a.py": "import b",
    "circle/b.py": "import a",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def files(base: Path, start: EntryPoint, *path: str) -> ImportedFiles:
    return follow_imports(
        str(base), [start], path, lambda file: python_reader.read(Path(file).read_bytes())
    )


MODEL = {
    "pkg/__init__.py",
    "pkg/base.py",
    "pkg/model.py",
    "pkg/layers.py",
    "pkg/sub/__init__.py",
    "pkg/sub/deep.py",
}


@pytest.mark.parametrize(
    ("start", "path", "found"),
    [
        (
            EntryPoint("script", "train.py"),
            (),
            {"train.py", "util.py", "json.py", "pkg/sub/listed.py", *MODEL},
        ),
        (
            EntryPoint("module", "pkg"),
            (),
            {"pkg/__main__.py", "pkg/sub/listed.py", "util.py", *MODEL},
        ),
        (
            EntryPoint("module", "pkg.sub.deep"),
            (),
            {"pkg/__init__.py", "pkg/base.py", "pkg/sub/__init__.py", "pkg/sub/deep.py", "util.py"},
        ),
        (EntryPoint("script", "src/run.py"), (), {"src/run.py", "src/helper.py"}),
        (
            EntryPoint("script", "src/run.py"),
            ("",),
            {"src/run.py", "src/helper.py", "space/part/inner.py", "lib/tool.py"},
        ),
        (EntryPoint("script", "./circle/a.py"), (), {"circle/a.py", "circle/b.py"}),
        (EntryPoint("script", "go.sh"), (), {"go.sh"}),
        (EntryPoint("script", "../outside.py"), (), set()),
        (EntryPoint("script", "nowhere.py"), (), set()),
        (EntryPoint("module", "torch.nn"), (), set()),
    ],
)
def test_a_command_needs_what_its_files_import(
    base: Path, start: EntryPoint, path: tuple[str, ...], found: set[str]
) -> None:
    assert set(files(base, start, *path).files) == found


def test_a_file_is_found_with_the_import_that_needs_it(base: Path) -> None:
    found = files(base, EntryPoint("script", "train.py")).files["pkg/layers.py"]
    assert (found.by, found.module) == ("pkg/model.py", ".layers")


def test_a_module_is_found_wherever_it_is(base: Path) -> None:
    assert list(files_of_module(str(base), "tool")) == ["lib/tool.py"]
    assert list(files_of_module(str(base), "part.inner")) == ["space/part/inner.py"]
    assert list(files_of_module(str(base), "sub")) == ["pkg/sub/__init__.py"]
    assert list(files_of_module(str(base), "absent")) == []
