"""Read what a Python file imports, from its syntax alone, and which Python files a command starts.  Runs nothing, looks at no disk.

What stands below `if TYPE_CHECKING:` is never imported, and is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from .values import Tree

_CHANGES: Final = frozenset({"append", "insert", "extend", "remove", "pop", "clear", "reverse"})
_EXPRESSION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_WORD: Final = re.compile(r"(?<![\w./@+\0-])(?:-m[ \t]+([A-Za-z_][\w.]*)|([\w./@+-]+\.(?:py|sh)))(?![\w./@+\0-])")


class Import(NamedTuple):
    """One import: `from ..module import names` has level 2; `import module` has no names."""

    level: int
    module: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "." * self.level + (self.module or "".join(self.names[:1]))


class Imports(NamedTuple):
    """What a file imports, what it names in `__all__`, and where that cannot be read: sentences without a subject."""

    found: tuple[Import, ...] = ()
    exported: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def dotted(self) -> tuple[str, ...]:
        """Every name that may be a module of another package, such as `a`, `a.b`."""
        names = ((each.module, *(f"{each.module}.{name}" for name in each.names)) for each in self.found if not each.level)
        return tuple(dict.fromkeys(name for group in names for name in group))


class Start(NamedTuple):
    """A file that a command starts by its path, or a module that it starts by its name."""

    kind: Literal["script", "module"]
    name: str


def read(source: str | bytes) -> Imports:
    """What a file imports.  Raises SyntaxError; ValueError for a NUL; RecursionError."""
    return of_tree(ast.parse(source))


def of_tree(tree: ast.AST) -> Imports:
    """The same of a file that is parsed already."""
    reader = _Reader()
    reader.visit(tree)
    return Imports(tuple(dict.fromkeys(reader.found)), tuple(reader.exported), tuple(dict.fromkeys(reader.doubts)))


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []
        self.exported: list[str] = []
        self.doubts: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(0, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found.append(Import(node.level, node.module or "", tuple(alias.name for alias in node.names)))

    def visit_If(self, node: ast.If) -> None:
        test, inverse = node.test, isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        if isinstance(test, ast.UnaryOp) and inverse:
            test = test.operand
        if _name(test) != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        for each in node.body if inverse else node.orelse:
            self.visit(each)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        word = _name(node.func)
        if word in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                module = first.value.lstrip(".")
                self.found.append(Import(len(first.value) - len(module), module))
            else:
                self.doubts.append(f"line {node.lineno} imports a module that a value names")
        elif (word in _CHANGES and isinstance(node.func, ast.Attribute) and _is_path(node.func.value)) or word == "addsitedir":
            self.doubts.append(f"line {node.lineno} changes sys.path")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node, node.targets)
        if any(_name(target) == "__all__" for target in node.targets) and isinstance(node.value, (ast.List, ast.Tuple)):
            self.exported += [each.value for each in node.value.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node, [node.target])

    def _assigned(self, node: ast.stmt, targets: Sequence[ast.expr]) -> None:
        self.generic_visit(node)
        bare = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
        if any(_is_path(target) for target in bare):
            self.doubts.append(f"line {node.lineno} changes sys.path")


def _name(node: ast.expr) -> str:
    """The last name of an expression: `b` of `a.b`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "path" and _name(node.value) == "sys"


# -- commands --------------------------------------------------------------------------------------------------------------------------------------


def started(run: Sequence[Tree] | str | None, accelerate: Mapping[str, Tree] | None) -> list[Start]:
    """The scripts and modules that a command names, as they are written; a word with a value in it is none."""
    found: list[Start] = []
    if isinstance(run, str):
        for module, script in _WORD.findall(_EXPRESSION.sub("\0", run)):
            found.append(Start("module", module) if module else Start("script", script))
    elif run:
        before = ""
        for word in _leaves(run):
            if "{{" not in word:
                if before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", word):
                    found.append(Start("module", word))
                elif word.endswith((".py", ".sh")) and word[0] != "-":
                    found.append(Start("script", word))
            before = word
    for key in ("script", "module"):
        value = (accelerate or {}).get(key)
        if isinstance(value, str) and "{{" not in value:
            found.append(Start("script" if key == "script" else "module", value))
    return list(dict.fromkeys(found))


def _leaves(run: Sequence[Tree]) -> Iterator[str]:
    for each in run:
        if isinstance(each, list):
            yield from _leaves(each)
        elif isinstance(each, str):
            yield each
