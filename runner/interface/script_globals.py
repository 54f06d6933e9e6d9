"""Read absl flags and the globals set by nanoGPT's `configurator.py` from a script's syntax tree, without running the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from .script_declared import Declared, text_of

_ABSL: Final = {
    "DEFINE_string": "str",
    "DEFINE_integer": "int",
    "DEFINE_float": "float",
    "DEFINE_bool": "bool",
    "DEFINE_boolean": "bool",
    "DEFINE_enum": "str",
}
_EXECUTED: Final = re.compile(r"open\(\s*['\"][^'\"]+\.py['\"]")


def of_globals(tree: ast.Module, notes: list[str]) -> Iterator[Declared]:
    """Yield the absl flags, then the `configurator.py` globals.  Append a note for each skipped option to `notes`."""
    yield from _flags(tree, notes)
    yield from _find_globals(tree, notes)


def _flags(tree: ast.Module, notes: list[str]) -> Iterator[Declared]:
    """Yield the absl flags of the script."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    required = {
        text_of(each)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("mark_flag_as_required", "mark_flags_as_required")
        for arg in call.args
        for each in (arg.elts if isinstance(arg, (ast.List, ast.Tuple)) else [arg])
    }
    for call in calls:
        word = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if not word.startswith("DEFINE_") or not call.args:
            continue
        name = text_of(call.args[0])
        if word not in _ABSL or not name:
            notes.append(
                f"line {call.lineno}: {name or 'a flag'} is left to its default: {word} is not read here"
            )
            continue
        given = {each.arg: each.value for each in call.keywords}
        default = given.get("default", call.args[1] if len(call.args) > 1 else None)
        if isinstance(default, ast.Constant) and default.value is None:
            default = None
        choices = given.get("enum_values", call.args[2] if len(call.args) > 2 else None)
        at = 3 if word == "DEFINE_enum" else 2
        about = given.get("help", call.args[at] if len(call.args) > at else None)
        needed = name in required or _is_true(given.get("required"))
        kind = _ABSL[word]
        if kind == "bool":
            yield Declared(
                name, f"--{name}", kind, default, text_of(about), needed, negative=f"--no{name}", alone=True
            )  # fmt: skip
            continue
        values = getattr(choices, "elts", ()) if word == "DEFINE_enum" else ()
        yield Declared(
            name, f"--{name}", kind, default, text_of(about), needed, tuple(map(text_of, values))
        )


def _find_globals(tree: ast.Module, notes: list[str]) -> Iterator[Declared]:
    """Yield the global constants above `exec(open("configurator.py").read())`, which are set with `--NAME=VALUE`."""
    at = next((n for n, node in enumerate(tree.body) if _executes(node)), None)
    if at is None:
        return
    found: dict[str, ast.expr] = {}
    for node in tree.body[:at]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                found[target.id] = node.value
    for name, value in found.items():
        if not isinstance(value, (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.Dict)):
            continue  # computed: not an option
        if (kind := _kind(value)) is None:
            notes.append(f"{name} is left as the script sets it: it is no plain value")
        else:
            yield Declared(name, f"--{name}=", kind, value, "", required=False)


def _executes(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "exec"
        and _EXECUTED.search(ast.unparse(call)) is not None
    )


def _kind(node: ast.expr) -> str | None:
    """Return the type name of a literal bool, int, float or str, or None for any other expression."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return type(value).__name__ if isinstance(value, (bool, int, float, str)) else None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
