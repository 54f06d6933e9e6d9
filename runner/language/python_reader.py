"""Read the imports of a Python file from its syntax.  Runs no code, opens no file.

Imports below `if TYPE_CHECKING:` are left out, because they never execute.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from .imports import BY_VALUE, Import, Imports

_CHANGES: Final = frozenset({"append", "insert", "extend", "remove", "pop", "clear", "reverse"})


def read(source: str | bytes) -> Imports:
    """Parse Python source and return its imports.

    Raises SyntaxError; ValueError for a NUL character; RecursionError.
    """
    return of_tree(ast.parse(source))


def of_tree(tree: ast.AST) -> Imports:
    """Return the imports in the syntax tree of a Python file."""
    reader = _ImportCollector()
    reader.visit(tree)
    return Imports(
        tuple(dict.fromkeys(reader.found)),
        tuple(reader.exported),
        tuple(dict.fromkeys(reader.doubts)),
    )


class _ImportCollector(ast.NodeVisitor):
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
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, imported = test.operand, node.body
        else:
            imported = node.orelse
        if last_name(test) != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        for statement in imported:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        word = last_name(node.func)
        if word in ("import_module", "__import__"):
            self._import_by_call(node)
        elif word == "addsitedir" or _changes_path(node.func):
            self.doubts.append(f"line {node.lineno} changes sys.path")

    def _import_by_call(self, node: ast.Call) -> None:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            module = first.value.lstrip(".")
            self.found.append(Import(len(first.value) - len(module), module))
        else:
            self.doubts.append(f"line {node.lineno} {BY_VALUE}")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._check_targets(node, node.targets)
        is_all = any(last_name(target) == "__all__" for target in node.targets)
        if is_all and isinstance(node.value, (ast.List, ast.Tuple)):
            for each in node.value.elts:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    self.exported.append(each.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._check_targets(node, [node.target])

    def _check_targets(self, node: ast.stmt, targets: Sequence[ast.expr]) -> None:
        """Record a doubt if a statement assigns to sys.path or to an item of sys.path."""
        self.generic_visit(node)
        if any(_is_in_path(target) for target in targets):
            self.doubts.append(f"line {node.lineno} changes sys.path")


def last_name(node: ast.AST) -> str:
    """Return the last name of an expression, such as `b` of `a.b`, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _changes_path(function: ast.expr) -> bool:
    """Return True if a called function changes sys.path, for example `sys.path.append`."""
    if not isinstance(function, ast.Attribute) or function.attr not in _CHANGES:
        return False
    return _is_path(function.value)


def _is_in_path(node: ast.expr) -> bool:
    """Return True if an expression is sys.path or an item of it."""
    bare = node.value if isinstance(node, ast.Subscript) else node
    return _is_path(bare)


def _is_path(node: ast.expr) -> bool:
    """Return True if an expression is sys.path."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "path" and last_name(node.value) == "sys"
