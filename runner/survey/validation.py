"""Validate a recipe without a workspace and without all of its inputs, for editors and continuous
integration. Runs nothing.

A file is validated as far as it can be parsed: its YAML, its schema, then its meaning, without
preset and with each preset. An input without a value gets two made-up values. A problem with both
values is the recipe's; a problem with only one may be caused by that value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..digest import of_value
from ..errors import Invalid, Problem
from ..language import document as documents
from ..language import empty_reads, inputs, parse, shell, unread
from ..language.recipe import Input, Recipe, Step
from ..language.shell_values import Doubt
from ..language.values import Tree, Where, is_number
from ..planning.assemble import drop_echoes
from ..planning.beforehand import DryRun
from ..planning.compile import compile_plan
from . import code_warnings, script_warnings
from .absent_files import find_absent_files
from .caller_files import WorkspaceGlobs
from .disk_names import as_disk
from .imports import read_imports
from .recipes import UsedRecipes, place_recipe

if TYPE_CHECKING:
    from ..language.document import Document

# The other problems may be caused by input values.
_OF_TEXT = frozenset({"template", "unknown-name", "secret", "late-name", "path-escape"})
"""Problem codes that depend only on the recipe's text."""
_OF_VALUES = frozenset({"template", "when", "matrix-axis", "two-makers", "path-escape", "output"})


def find_problems(
    document: Document, root: Path, given: Mapping[str, str], source: Path | None = None
) -> list[Problem]:
    """Return all errors and warnings of a recipe document.

    `given` are inputs as on the command line, `root` is the workspace, and `source` the file of a
    recipe given by path.
    """
    found = list(document.warnings)
    recipe, wrong = parse.try_parse(document)
    if source is not None:
        recipe = place_recipe(recipe, source, root)
    if wrong:
        return list(drop_echoes([*found, *wrong, *_check_readable_part(recipe, root, given)]))
    found += _check_scripts(recipe)
    found += unread.warnings(recipe)
    found += empty_reads.warnings(recipe)
    read = cache(read_imports)
    found += code_warnings.warnings(recipe, read)
    found += script_warnings.find_rejected_options(recipe, read)
    used = UsedRecipes(root)
    try:
        used.load(recipe)
    except Invalid as error:
        return [*found, *error.problems]
    for preset in (None, *recipe.presets):
        found += _check_preset(recipe, used.by_name, root, given, preset)
    found += find_absent_files(recipe, root)
    return list(dict.fromkeys(found))


def _check_readable_part(recipe: Recipe, root: Path, given: Mapping[str, str]) -> list[Problem]:
    """Return problems in the valid parts of an invalid recipe, without follow-up errors."""
    used = UsedRecipes(root)
    recipe = _readable_part(recipe)
    found = list(_check_scripts(recipe))
    try:
        used.load(recipe)
    except Invalid as error:
        found += error.problems
    known = {name: value for name, value in given.items() if name in recipe.inputs}
    found += _select_of_text(_check_preset(recipe, used.by_name, root, known, None))
    return list(dict.fromkeys([*found, *find_absent_files(recipe, root)]))


def _select_of_text(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.code in _OF_TEXT]


def _readable_part(recipe: Recipe) -> Recipe:
    """Return the recipe without invalid secrets and without inputs of incomplete type."""
    whole = {name: spec for name, spec in recipe.inputs.items() if _is_whole(spec)}
    secrets = {name for name, spec in whole.items() if spec.type == "secret"}
    steps = {id: _with_known_secrets(step, secrets) for id, step in recipe.steps.items()}
    kept = tuple(filter(secrets.__contains__, recipe.secrets))
    return replace(recipe, inputs=whole, secrets=kept, steps=steps)


def _with_known_secrets(step: Step, known: Collection[str]) -> Step:
    if step.secrets is None:
        return step
    return replace(step, secrets=tuple(filter(known.__contains__, step.secrets)))


def _is_whole(spec: Input) -> bool:
    """Return True if an input has all settings that its type requires."""
    if "choice" in (spec.type, spec.items):
        return bool(spec.limits.get("choices"))
    return spec.type != "secret" or bool(spec.env)


def check_bytes(data: bytes, name: str, root: Path, given: Mapping[str, str]) -> list[Problem]:
    """Return all errors and warnings of a recipe given as bytes."""
    try:
        document = documents.parse(data, name)
    except Invalid as error:
        return list(error.problems)
    return find_problems(document, root, given, root / name)


def check_file(
    path: Path, root: Path, given: Mapping[str, str], *, own: bool = True
) -> list[Problem]:
    """Return all errors and warnings of a workspace or library recipe file.

    Raises NotFound.
    """
    try:
        document = documents.read(path)
    except Invalid as error:
        return list(error.problems)
    source = path if own else None
    return find_problems(document, root, given, source)


def _check_scripts(recipe: Recipe) -> Iterator[Problem]:
    """Yield warnings about probable shell syntax mistakes in a recipe's commands."""
    for where, command, bash in _list_commands(recipe):
        doubts: list[tuple[Where, Doubt]] = []
        if isinstance(command, str):
            for error in shell.errors(command, bash=bash):
                yield inputs.template_problem(recipe.document, where, error)
            doubts = [(where, doubt) for doubt in shell.warnings(command, bash)]
        elif isinstance(command, list):
            doubts = _doubts_of_arguments(command, where)
        for place, doubt in doubts:
            yield recipe.document.problem(
                doubt.code,
                doubt.message,
                place,
                fix=doubt.fix,
                offset=doubt.offset,
                length=doubt.length,
                severity="warning",
            )


def _list_commands(recipe: Recipe) -> list[tuple[Where, object, bool]]:
    """Return all commands of a recipe with their locations, and whether bash runs them."""
    commands: list[tuple[Where, object, bool]] = []
    for step in recipe.steps.values():
        commands.append(((*step.origin, "run"), step.run, step.shell == "bash"))
    for key, listed in (("setup", recipe.setup), ("cleanup", recipe.cleanup)):
        commands += [((key, n), command, False) for n, command in enumerate(listed)]
    if recipe.health is not None:
        commands.append((("health", "run"), recipe.health.run, False))
    return commands


def _doubts_of_arguments(command: list[Tree], where: Where) -> list[tuple[Where, Doubt]]:
    words = list(_words(command))
    doubts = []
    for n, doubt in shell.doubts_of_arguments([word for _, word in words]):
        path, _ = words[n]
        doubts.append(((*where, *path), doubt))
    return doubts


def _words(command: list[Tree]) -> Iterator[tuple[Where, str]]:
    """Yield the arguments of a command with their locations, including nested lists."""
    for n, item in enumerate(command):
        if isinstance(item, list):
            for path, word in _words(item):
                yield (n, *path), word
        else:
            yield (n,), str(item)


def _check_preset(
    recipe: Recipe,
    used: Mapping[str, Recipe],
    root: Path,
    given: Mapping[str, str],
    preset: str | None,
) -> list[Problem]:
    first = _check_values(recipe, used, root, given, preset, 0)
    if not first.missing:
        return list(drop_echoes([*first.found, *first.certain]))
    second = _check_values(recipe, used, root, given, preset, 1)
    places = {(problem.code, problem.where) for problem in second.found}
    found = []
    for problem in first.found:
        # A problem with only one of the values may be caused by that value.
        if problem.code not in _OF_VALUES or (problem.code, problem.where) in places:
            found.append(problem)
    return list(drop_echoes([*found, *first.certain, *second.certain]))


class _Checked(NamedTuple):
    """Problems found when checking with partly made-up input values."""

    found: list[Problem]
    certain: list[Problem]  # independent of the made-up values
    missing: list[str]


def _check_values(
    recipe: Recipe,
    used: Mapping[str, Recipe],
    root: Path,
    given: Mapping[str, str],
    preset: str | None,
    turn: int,
) -> _Checked:
    """Check a recipe with these input values, and with made-up values for missing inputs."""
    chosen = recipe.presets[preset].inputs if preset is not None else {}
    known = {*given, *chosen}
    needed = filter(_needs_value, recipe.inputs.values())
    missing = [spec for spec in needed if spec.name not in known]
    values: dict[str, Tree] = dict(given)
    for n, spec in enumerate(missing):
        values[spec.name] = _invent_value(spec, n, turn)
    # Made-up values may not match a pattern, which is not the recipe's fault.
    free = {spec.name: _without_limits(spec) for spec in missing}
    recipe = replace(recipe, inputs={**recipe.inputs, **free})
    bound, wrong = inputs.try_bind(recipe, values, preset=preset)
    names = [spec.name for spec in missing]
    for n, spec in enumerate(recipe.inputs.values()):
        # an invalid secret must not hide other problems
        if spec.type != "secret" and spec.name not in bound:
            bound[spec.name] = _invent_value(spec, n, turn)
            names.append(spec.name)
    trial = DryRun(made_up=names, given=known - {*names}, all_values=preset is None)
    found: list[Problem] = []
    try:
        compile_plan(
            recipe,
            bound,
            digest=of_value("validate", [recipe.id]),
            used=used,
            globs=WorkspaceGlobs(root, {}),
            bind=inputs.bind,
            kind_of=inputs.kind_of,
            preset=preset,
            trial=trial,
            as_disk=as_disk(root),
        )
    except Invalid as error:
        found = list(error.problems)
    if wrong:
        found = [*wrong, *_select_of_text(found)]
    return _Checked(found, trial.problems + unread.find_refused(recipe, given, preset), names)


def _needs_value(spec: Input) -> bool:
    """Return True if a request must have a value for an input. A secret is a variable's value."""
    if spec.type == "secret":
        return False
    return spec.required and not spec.has_default


def _without_limits(spec: Input) -> Input:
    """Return an input without limits of its values, other than the choices."""
    limits = {}
    if "choices" in spec.limits:
        limits["choices"] = spec.limits["choices"]
    return replace(spec, limits=limits)


def _invent_value(spec: Input, n: int, turn: int) -> Tree:
    """Return a made-up value for an input, different for each input and turn if possible."""
    candidates = _candidates(spec, n, turn)
    for value in candidates:
        try:
            return inputs.convert(spec, value)
        except inputs.BadValue:
            continue
    unfit: Tree = candidates[0]
    return unfit


def _candidates(spec: Input, n: int, turn: int) -> list[Any]:
    word = spec.name if turn == 0 else f"another_{spec.name}"
    low = spec.limits.get("minimum", spec.limits.get("exclusiveMinimum", 1))
    high = spec.limits.get("maximum", spec.limits.get("exclusiveMaximum"))
    count = int(low) if isinstance(low, (int, float)) else 1
    numbers: list[Any] = [count + n + 1 + turn, count + 1, count, low, high]
    step = spec.limits.get("multipleOf")
    if isinstance(step, (int, float)):
        numbers += [step * (turn + 1), step]
    choices = spec.limits.get("choices")
    options = list(choices) if isinstance(choices, list) else []
    if turn > 0:
        options.reverse()
    middle = []
    if is_number(low) and is_number(high):
        middle = [low + (high - low) / (turn + 2)]
    # Of several lengths and forms, because a pattern may ask for one of them.
    texts = [word, word * 8, word[:1], str(n + 1), "1.0", "A", "2024-01-01"]
    made: dict[str, list[Any]] = {
        "string": texts,
        "integer": numbers,
        "number": [*middle, *numbers],
        "boolean": [turn == 0],
        "choice": options,
        "object": [{}],
        "file": [f"{word}.txt", f"{word}.py:{word}"],
        "dataset": [word],
        "model": [f"./{word}"],
    }
    if spec.type != "list":
        return made.get(spec.type, [])
    items = made.get(spec.items or "string", [])
    return [items[: turn + 1], items[:1], items[:2], items[:3], []]
