"""Find a training script's Hydra overrides, such as `a.b=1`, without running the script.

Reads the script's syntax tree and the values and groups of its YAML configuration.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeGuard

from .script_declared import DeclaredOption, fields
from .script_syntax import calls_in, classes_in, keywords_of, text_of

if TYPE_CHECKING:
    from ..language.values import Tree

_MISSING: Final = "???"


class HydraConfig(NamedTuple):
    """A Hydra configuration.

    `folder` is its directory relative to the workspace root, `values` has the contents of its file,
    and `groups` has the members of each config group.
    """

    folder: str
    values: Mapping[str, Tree]
    groups: Mapping[str, Sequence[str]]
    targets: Sequence[str] = ()  # values of `_target_` in all files below `folder`


Find: TypeAlias = Callable[[str, str], "HydraConfig | None"]
"""Function that loads a configuration, or returns None if there is none.

Its arguments are the directory, relative to the script's, and the configuration's name.
"""


class HydraOptions(NamedTuple):
    """The Hydra options of a script and its configuration directory.

    `folder` is empty if the script has no configuration directory.
    """

    options: Sequence[DeclaredOption]
    folder: str
    targets: tuple[str, ...] = ()


def find_hydra(tree: ast.Module, find: Find, notes: list[str]) -> HydraOptions | None:
    """Return the options of the `@hydra.main` function; None without such a function."""
    main = _find_main(tree)
    if not isinstance(main, ast.Call):
        return None
    given = keywords_of(main)
    name = text_of(given.get("config_name")).removesuffix(".yaml")
    if not name:
        notes.append(
            "the script uses hydra without a config_name: add the options that you set as NAME=VALUE"
        )
        return HydraOptions((), "")
    stored = _class_in_store(tree, name)
    if stored is not None:
        declared = fields(stored, classes_in(tree), notes, dashes=False)
        return HydraOptions(list(map(_as_override, declared)), "")
    found = find(text_of(given.get("config_path")), name)
    if found is None:
        notes.append(
            f"its configuration {name}.yaml was not found: add the options that you set as NAME=VALUE"
        )
        return HydraOptions((), "")
    return HydraOptions(
        [*_groups(found, notes), *_leaves(found.values, "", notes)],
        found.folder,
        tuple(found.targets),
    )


def _find_main(tree: ast.Module) -> ast.expr | None:
    """Return the first decorator `hydra.main` of a function; None without any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if _is_main(decorator):
                    return decorator
    return None


def _is_main(node: ast.expr) -> bool:
    func = node.func if isinstance(node, ast.Call) else node
    if not isinstance(func, ast.Attribute) or func.attr != "main":
        return False
    return isinstance(func.value, ast.Name) and func.value.id == "hydra"


def _class_in_store(tree: ast.Module, name: str) -> str | None:
    """Return the class that the script registers in the ConfigStore as `name`; otherwise None."""
    for node in _nodes_in_store(tree, name):
        if isinstance(node, (ast.Name, ast.Call)):
            stored = node.func if isinstance(node, ast.Call) else node
            return stored.id if isinstance(stored, ast.Name) else None
    return None


def _nodes_in_store(tree: ast.Module, name: str) -> Iterator[ast.expr | None]:
    """Yield the `node` of each call `store(name=…, node=…)` without a group."""
    for call in calls_in(tree):
        if _is_store(call.func):
            given = keywords_of(call)
            if text_of(given.get("name")) == name and "group" not in given:
                yield given.get("node")


def _is_store(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "store"


def _as_override(each: DeclaredOption) -> DeclaredOption:
    override = each._replace(flag=f"{each.name}=", negative="", alone=False)
    # omegaconf's MISSING marks a value that the command line must set.
    if isinstance(each.default, ast.Name) and each.default.id == "MISSING":
        return override._replace(required=True, default=None)
    return override


def _groups(found: HydraConfig, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield a choice option for each config group in the defaults list."""
    defaults = found.values.get("defaults")
    if not isinstance(defaults, list):
        return
    for entry in defaults:
        if not isinstance(entry, dict):  # an entry without a group, such as `_self_`
            continue
        for group, chosen in entry.items():
            members = tuple(found.groups.get(group, ()))
            if isinstance(chosen, str) and chosen in members:
                yield DeclaredOption(
                    _name(group), f"{group}=", "str", ast.Constant(chosen), "", False, members
                )
                notes.append(
                    f"the values of {group}/{chosen}.yaml are not inputs: to set a value, add {group}.NAME=VALUE"
                )


def _leaves(values: Mapping[str, Tree], above: str, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield an option for each scalar value of a configuration, named after its dotted path."""
    for key, value in values.items():
        path = f"{above}{key}"
        if path in ("defaults", "hydra") or key == "_target_":
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.", notes)
        elif value == _MISSING:
            yield DeclaredOption(_name(path), f"{path}=", "str", None, "", True)
        elif _is_plain(value):
            yield DeclaredOption(
                _name(path), f"{path}=", type(value).__name__, ast.Constant(value), "", False
            )
        else:
            notes.append(
                f"{path} keeps its value from the configuration, because it is not a single value"
            )


def _is_plain(value: Tree) -> TypeGuard[str | float]:
    """Return True for a single value, except an empty text or one with an interpolation."""
    if isinstance(value, str):
        return value != "" and "${" not in value
    return isinstance(value, (bool, int, float))


def targets_of(value: Tree) -> Iterator[str]:
    """Yield all values of `_target_` keys in a configuration."""
    if isinstance(value, list):
        for each in value:
            yield from targets_of(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "_target_" and isinstance(each, str):
                yield each
            else:
                yield from targets_of(each)


def _name(path: str) -> str:
    return path.replace(".", "_").replace("/", "_")
