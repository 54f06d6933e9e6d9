"""Read names, texts and calls from the syntax tree of a training script."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node


def classes_in(tree: ast.AST) -> dict[str, ast.ClassDef]:
    """Return the classes by name; the last of several classes with the same name."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call, without those of `**arguments`."""
    return {each.arg: each.value for each in call.keywords if each.arg is not None}


def name_of(node: ast.AST | None) -> str:
    """Return the name of a variable, or the last name of `module.name`; empty for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST | None) -> str:
    """Return a text literal, or the concatenation of literals joined by `+`; otherwise empty."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""
