"""Read what a Python file imports from its syntax alone.  Runs nothing of it, and opens no file.

What stands below `if TYPE_CHECKING:` is never imported, and is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from .imports import Import, Imports

_CHANGES: Final = frozenset({"append", "insert", "extend", "remove", "pop", "clear", "reverse"})


def read(source: str | bytes) -> Imports:
    """What a file imports.  Raises SyntaxError; ValueError for a NUL; RecursionError."""
    return of_tree(ast.parse(source))


def of_tree(tree: ast.AST) -> Imports:
    """The same of a file that is parsed already."""
    reader = _Reader()
    reader.visit(tree)
    return Imports(
        tuple(dict.fromkeys(reader.found)),
        tuple(reader.exported),
        tuple(dict.fromkeys(reader.doubts)),
    )


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []
        self.exported: list[str] = []
        self.doubts: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(0, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found.append(
            Import(node.level, node.module or "", tuple(alias.name for alias in node.names))
        )

    def visit_If(self, node: ast.If) -> None:
        test, inverse = (
            node.test,
            isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not),
        )
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
        elif (
            word in _CHANGES and isinstance(node.func, ast.Attribute) and _is_path(node.func.value)
        ) or word == "addsitedir":
            self.doubts.append(f"line {node.lineno} changes sys.path")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node, node.targets)
        if any(_name(target) == "__all__" for target in node.targets) and isinstance(
            node.value, (ast.List, ast.Tuple)
        ):
            self.exported += [
                each.value
                for each in node.value.elts
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node, [node.target])

    def _assigned(self, node: ast.stmt, targets: Sequence[ast.expr]) -> None:
        self.generic_visit(node)
        bare = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
        if any(_is_path(target) for target in bare):
            self.doubts.append(f"line {node.lineno} changes sys.path")


def _name(node: ast.expr) -> str:
    """The last name of an expression: `b` of `a.b`."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "path" and _name(node.value) == "sys"
