"""Read absl flags and the globals set by nanoGPT's `configurator.py` from a script's syntax tree,
without running the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from .script_declared import DeclaredOption
from .script_syntax import calls_in, text_of

_ABSL: Final = {
    "DEFINE_string": "str",
    "DEFINE_integer": "int",
    "DEFINE_float": "float",
    "DEFINE_bool": "bool",
    "DEFINE_boolean": "bool",
    "DEFINE_enum": "str",
}
_EXECUTED: Final = re.compile(r"open\(\s*['\"][^'\"]+\.py['\"]")


def of_globals(tree: ast.Module, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the absl flags, then the `configurator.py` globals.

    Append a note for each skipped option to `notes`.
    """
    yield from _flags(tree, notes)
    yield from _find_globals(tree, notes)


def _flags(tree: ast.Module, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the absl flags of the script."""
    calls = list(calls_in(tree))
    required = _required_flags(calls)
    for call in calls:
        function = _method_name(call)
        if not function.startswith("DEFINE_") or not call.args:
            continue
        name = text_of(call.args[0])
        if function not in _ABSL or not name:
            notes.append(
                f"line {call.lineno}: {name or 'a flag'} keeps its default, because `recipe new` cannot read {function}"
            )
        else:
            yield _declare_flag(call, function, name, is_marked=name in required)


def _required_flags(calls: Sequence[ast.Call]) -> set[str]:
    """Return the names passed to `mark_flag_as_required` and `mark_flags_as_required`."""
    found = set()
    for call in calls:
        if _method_name(call) not in ("mark_flag_as_required", "mark_flags_as_required"):
            continue
        for arg in call.args:
            items = arg.elts if isinstance(arg, (ast.List, ast.Tuple)) else [arg]
            found |= {text_of(item) for item in items}
    return found


def _declare_flag(call: ast.Call, function: str, name: str, *, is_marked: bool) -> DeclaredOption:
    """Return the flag `name` that the absl function `function` defines.

    `is_marked` flags are required, even if the call does not say so.
    """
    is_enum = function == "DEFINE_enum"
    default = _argument(call, "default", 1)
    if isinstance(default, ast.Constant) and default.value is None:
        default = None
    help_position = 3 if is_enum else 2
    flag = DeclaredOption(
        name,
        f"--{name}",
        _ABSL[function],
        default,
        text_of(_argument(call, "help", help_position)),
        required=is_marked or _is_true(_argument(call, "required", None)),
    )
    if flag.type == "bool":
        return flag._replace(negative=f"--no{name}", alone=True)
    if is_enum:
        choices = getattr(_argument(call, "enum_values", 2), "elts", ())
        return flag._replace(choices=tuple(map(text_of, choices)))
    return flag


def _method_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _argument(call: ast.Call, keyword: str, position: int | None) -> ast.expr | None:
    """Return a call's argument, given by keyword or position; None if missing."""
    for each in call.keywords:
        if each.arg == keyword:
            return each.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def _find_globals(tree: ast.Module, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the global constants above `exec(open("configurator.py").read())`, which are set with
    `--NAME=VALUE`.
    """
    for name, value in _globals_before_exec(tree).items():
        if not isinstance(value, (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.Dict)):
            continue  # computed: not an option
        kind = _kind(value)
        if kind is None:
            notes.append(f"{name} keeps its value from the script, because it is not a plain value")
        else:
            yield DeclaredOption(name, f"--{name}=", kind, value, "", required=False)


def _globals_before_exec(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the public globals assigned above the `exec` call; empty without such a call."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if _executes(node):
            return found
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                found[target.id] = node.value
    return {}


def _executes(node: ast.stmt) -> bool:
    """Return True for `exec(open("FILE.py").read())`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    if not isinstance(function, ast.Name) or function.id != "exec":
        return False
    return _EXECUTED.search(ast.unparse(node.value)) is not None


def _kind(node: ast.expr) -> str | None:
    """Return the type name of a literal bool, int, float or str, or None for any other expression."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return type(value).__name__ if isinstance(value, (bool, int, float, str)) else None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
