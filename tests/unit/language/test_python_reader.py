"""The imports of a Python file, read from its text."""

from __future__ import annotations

import pytest

from runner.language.imports import Import
from runner.language.python_reader import read


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import util", [Import(0, "util")]),
        ("import a.b as c, d", [Import(0, "a.b"), Import(0, "d")]),
        ("from pkg import x, y", [Import(0, "pkg", ("x", "y"))]),
        ("from pkg.sub import *", [Import(0, "pkg.sub", ("*",))]),
        ("from . import x", [Import(1, "", ("x",))]),
        ("from ..lib.io import load", [Import(2, "lib.io", ("load",))]),
        ("def f():\n    import late", [Import(0, "late")]),
        (
            "try:\n    import fast\nexcept ImportError:\n    import slow",
            [Import(0, "fast"), Import(0, "slow")],
        ),
        ("if TYPE_CHECKING:\n    import never\nelse:\n    import real", [Import(0, "real")]),
        ("import typing\nif typing.TYPE_CHECKING:\n    import never", [Import(0, "typing")]),
        ("if not TYPE_CHECKING:\n    import real\nelse:\n    import never", [Import(0, "real")]),
        ("importlib.import_module('plugins.one')", [Import(0, "plugins.one")]),
        ("import_module('.two', __package__)", [Import(1, "two")]),
        ("__import__('three')", [Import(0, "three")]),
        ("x = 'import not_this'", []),
    ],
)
def test_every_way_to_import_is_read(source: str, found: list[Import]) -> None:
    assert list(read(source).found) == found


@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        ("import_module(name)", "line 1 imports a module whose name is computed"),
        ("__import__(f'a.{b}')", "line 1 imports a module whose name is computed"),
        ("\nsys.path.insert(0, 'lib')", "line 2 changes sys.path"),
        ("sys.path += ['lib']", "line 1 changes sys.path"),
        ("sys.path[0] = 'lib'", "line 1 changes sys.path"),
        ("sys.path = []", "line 1 changes sys.path"),
        ("site.addsitedir('lib')", "line 1 changes sys.path"),
    ],
)
def test_what_cannot_be_read_is_a_doubt(source: str, doubt: str) -> None:
    assert read(source).doubts == (doubt,)


@pytest.mark.parametrize(
    "source", ["os.path.join(a)", "print(sys.path)", "paths.append(1)", "import_module('fixed')"]
)
def test_what_can_be_read_is_none(source: str) -> None:
    assert read(source).doubts == ()


def test_names_of_other_packages_are_dotted() -> None:
    assert read("import a.b\nfrom c import d\nfrom . import e").module_names == ("a.b", "c", "c.d")
