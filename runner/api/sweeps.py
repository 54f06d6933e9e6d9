"""A recipe around another: one instance for each combination of values of its inputs.  Writes text and decides nothing about running."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from ..digest import of_bytes
from ..errors import Invalid, Problem, did_you_mean
from ..language import inputs, unread
from ..language.presets import split
from ..language.recipe import Input, Recipe
from ..language.values import Tree
from ..language.yaml_text import flow

MOST: Final = 1000
"""Combinations of one sweep."""
_RANGE: Final = re.compile(r"\s*([-+.\deE]+?)\s*\.\.\s*([-+.\deE]+?)\s*(:log)?\s*")
_TRIAL: Final = "[matrix.trial]"
_GROUP: Final = re.compile(r"\(\?P<([A-Za-z_]\w*)>")


class Range(NamedTuple):
    """All numbers between two, both among them; `log`: as many below ten as above it, of 1 to 100."""

    low: float
    high: float
    log: bool
    whole: bool


class Space(NamedTuple):
    """Where trials are looked for: the inputs that differ, and what the others are."""

    axes: Mapping[str, Range | Sequence[Tree]]
    fixed: dict[str, object]

    @property
    def size(self) -> float:
        """How many trials there are at most."""
        return math.prod(_size(axis) for axis in self.axes.values())


class Sweep(NamedTuple):
    """What is tried: the text of its recipe, the values of inputs that do not differ, and how many instances there are."""

    text: str
    fixed: dict[str, object]
    instances: int
    recipe: str
    """The name of the recipe that is tried."""

    @property
    def stem(self) -> str:
        """What the file of its recipe is called, without `.yaml`."""
        return f"{self.recipe}-{of_bytes(self.text.encode())[:8]}"


def drafted(
    recipe: Recipe,
    uses: str,
    given: Mapping[str, object],
    *,
    several: Mapping[str, Sequence[object]] | None = None,
    preset: str | None = None,
    origins: Mapping[str, str] = inputs.NOWHERE,
    metric: str | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> Sweep:
    """The sweep over the inputs that are given several values; `uses` is how its recipe names the one that is tried.

    `several`: the values of these inputs; None: words of `given` have them, separated by commas.
    With `draws` so many of the combinations, by chance; more of them, with the same seed, hold those of fewer.  Raises Invalid with every problem.
    """
    words = in_words(recipe, given) if several is None else several
    found, problems = _gathered(recipe, {**given, **words}, words, preset, origins, metric)
    axes: dict[str, Sequence[Tree]] = {}
    for name, axis in found.axes.items():
        if isinstance(axis, Range):
            problems.append(
                Problem(
                    "bad-input",
                    f'"{name}" is a range, which requires a search',
                    fix="add `--tpe 30`, or list the values",
                    input=name,
                )
            )
        else:
            axes[name] = axis
    count = math.prod(len(values) for values in axes.values())
    if count > MOST:
        product = " × ".join(f"{len(values):,}" for values in axes.values())
        problems.append(
            Problem(
                "too-many-steps",
                f"the sweep has {count:,} combinations ({product}), more than {MOST:,}",
                fix="use fewer values",
            )
        )
    if problems:
        raise Invalid(problems)
    chosen = list(itertools.product(*axes.values()))
    if draws is not None:
        random.Random(seed).shuffle(chosen)  # noqa: S311 - which are tried, not a secret
        chosen = chosen[:draws]
    one = ", ".join(f"matrix.{each}" for each in axes)
    when = f"{{{{ [{one}] in {_expression(chosen)} }}}}" if len(chosen) < count else ""
    handed = {each: f"{{{{ matrix.{each} }}}}" for each in axes}
    text = _text(recipe, uses, axes, handed, found.fixed, preset, when)
    return Sweep(text, found.fixed, len(chosen), recipe.id.partition("@")[0])


def space(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    several: Mapping[str, str | Sequence[object]] | None = None,
    preset: str | None = None,
    origins: Mapping[str, str] = inputs.NOWHERE,
    metric: str,
) -> Space:
    """Where a search looks for the best of `metric`.  Raises Invalid with every problem.

    `several`: the values of the inputs that differ, or the text of a range; None: words of `given` have them.
    """
    words = in_words(recipe, given) if several is None else several
    found, problems = _gathered(recipe, {**given, **words}, words, preset, origins, metric)
    if problems:
        raise Invalid(problems)
    return found


def searched(
    recipe: Recipe, uses: str, where: Space, points: Sequence[Sequence[Tree]], preset: str | None
) -> str:
    """The recipe of a search: an instance for each trial, whose values are in the order of the axes."""
    handed = {
        name: f"{{{{ {_expression([point[n] for point in points])}{_TRIAL} }}}}"
        for n, name in enumerate(where.axes)
    }
    return _text(recipe, uses, {"trial": list(range(len(points)))}, handed, where.fixed, preset, "")


class Written(NamedTuple):
    """What the recipe of a sweep tries: a recipe, as it names it, and the values of the inputs that differ."""

    uses: str
    axes: Mapping[str, list[Tree]]


def read(written: Tree) -> Written | None:
    """Read a recipe that `drafted` wrote; None for one of a search, and for any other."""
    steps = list(_mapping(_mapping(written).get("steps")).values())
    step = _mapping(steps[0]) if len(steps) == 1 else {}
    matrix, handed = _mapping(step.get("matrix")), _mapping(step.get("with"))
    uses = step.get("uses")
    if not isinstance(uses, str) or not matrix:
        return None
    if any(handed.get(name) != f"{{{{ matrix.{name} }}}}" for name in matrix):
        return None
    return Written(
        uses, {name: values for name, values in matrix.items() if isinstance(values, list)}
    )


def trials(written: Tree, axes: Collection[str]) -> list[list[Tree]]:
    """The trials that a recipe of a search has, as `searched` wrote it."""
    (step,) = _mapping(_mapping(written)["steps"]).values()
    handed = _mapping(_mapping(step)["with"])
    columns = [
        json.loads(str(handed[name]).removeprefix("{{ ").removesuffix(f"{_TRIAL} }}}}"))
        for name in axes
    ]
    return [list(point) for point in zip(*columns, strict=True)]


def in_words(recipe: Recipe, given: Mapping[str, object]) -> dict[str, str | Sequence[object]]:
    """Return the inputs that words give several values: the values of each, or the text of a range."""
    found: dict[str, str | Sequence[object]] = {}
    for name, value in given.items():
        spec = recipe.inputs.get(name)
        if spec is None or spec.type == "secret":
            continue
        if spec.type in ("number", "integer") and isinstance(value, str) and ".." in value:
            found[name] = value
        elif (texts := _several(spec, value)) is not None:
            found[name] = texts
    return found


def _gathered(
    recipe: Recipe,
    given: Mapping[str, object],
    several: Mapping[str, str | Sequence[object]],
    preset: str | None,
    origins: Mapping[str, str],
    metric: str | None,
) -> tuple[Space, list[Problem]]:
    """The axes of what is given and the values of the other inputs, and every problem."""
    problems: list[Problem] = []
    axes: dict[str, Range | Sequence[Tree]] = {}
    for name, values in several.items():
        spec = recipe.inputs.get(name)
        if spec is None or spec.type == "secret":
            continue
        axes[name] = (
            _range(spec, values, problems)
            if isinstance(values, str)
            else _axis(spec, values, problems)
        )
    fixed = {name: value for name, value in given.items() if name not in axes}
    one = {name: axis.low if isinstance(axis, Range) else axis[0] for name, axis in axes.items()}
    bound, wrong = inputs.try_bind(recipe, {**fixed, **one}, preset=preset, origins=origins)
    problems += unread.find_refused(recipe, given, preset, origins)
    problems += [
        problem for problem in wrong if problem.input not in axes or problem.where is not None
    ]
    if not axes and not problems:
        problems.append(
            Problem(
                "bad-input",
                "no input has several values",
                fix="separate them by commas: learning_rate=1e-4,3e-4",
            )
        )
    if metric is not None:
        problems += _unreported(recipe, metric)
    whole = {name.partition(".")[0] for name in fixed if "." in name}
    if not problems:
        fixed = {name: value for name, value in fixed.items() if "." not in name} | {
            name: bound[name] for name in whole
        }
    return Space(axes, fixed), problems


def _size(axis: Range | Sequence[Tree]) -> float:
    if not isinstance(axis, Range):
        return len(axis)
    return axis.high - axis.low + 1 if axis.whole else math.inf


def lowest(axis: Range) -> float | int:
    """The least value of a range."""
    return int(axis.low) if axis.whole else axis.low


def _range(spec: Input, text: str, problems: list[Problem]) -> Range | Sequence[Tree]:
    """The range that a text gives; what is wrong with it is added to the problems."""
    match = _RANGE.fullmatch(text)
    if match is None:
        problems.append(
            Problem(
                "bad-input",
                f'"{spec.name}" has an invalid range: "{text}"',
                fix=f"use {spec.name}=LOW..HIGH or LOW..HIGH:log",
                input=spec.name,
            )
        )
        return [None]
    ends: list[float] = []
    for each in match.group(1, 2):
        try:
            ends.append(float(str(inputs.convert(spec, each))))
        except inputs.BadValue as wrong:
            problems.append(
                Problem(
                    wrong.code,
                    f'"{spec.name}" {wrong.message}',
                    None,
                    wrong.fix,
                    input=spec.name,
                )
            )
    if len(ends) < 2:
        return [None]
    low, high = ends
    if low >= high:
        problems.append(
            Problem(
                "bad-input",
                f'"{spec.name}" has an empty range: {low:g} is not below {high:g}',
                fix=f"write {spec.name}={high:g}..{low:g}",
                input=spec.name,
            )
        )
    elif match[3] and low <= 0:
        problems.append(
            Problem(
                "bad-input",
                f'"{spec.name}" has no logarithmic range from {low:g}',
                fix="start above 0, or remove `:log`",
                input=spec.name,
            )
        )
    return Range(low, high, match[3] is not None, spec.type == "integer")


def _several(spec: Input, value: object) -> list[object] | None:
    """The values that one word gives; None where it is one value.  An empty one has none."""
    if isinstance(value, list):  # of a file
        return (
            value
            if spec.type != "list" or (value and all(isinstance(item, list) for item in value))
            else None
        )
    if not isinstance(value, str):
        return None
    if spec.type in ("list", "object"):
        try:
            read = json.loads(f"[{value}]")
        except ValueError:
            return None
        return (
            read if len(read) > 1 and all(isinstance(item, (list, dict)) for item in read) else None
        )
    if value.startswith("["):
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if isinstance(read, list):
            return read
    if not value.strip() and spec.type != "string":
        return []
    return _parts(value) if "," in value else None


_PART: Final = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"\s*(?=,|$)|((?:\\,|[^,])*))', re.DOTALL)


def _parts(text: str) -> list[object]:
    """The values between commas: one in quotes is whole, and `\\,` is no comma between two."""
    found: list[object] = []
    at = 0
    while at <= len(text) and (match := _PART.match(text, at)) is not None:
        quoted, plain = match.groups()
        found.append(
            plain.strip().replace("\\,", ",")
            if quoted is None
            else re.sub(r'\\([,"\\])', r"\1", quoted)
        )
        at = match.end() + 1
    return found


def _axis(spec: Input, texts: Sequence[object], problems: list[Problem]) -> list[Tree]:
    """The typed values of an axis; what is wrong with it is added to the problems."""
    if not texts or any(text == "" for text in texts):
        what = "has an empty value in its list" if texts else "has no values"
        problems.append(
            Problem(
                "bad-input", f'"{spec.name}" {what}', fix=f"write {spec.name}=A,B", input=spec.name
            )
        )
        return [None]
    found: list[Tree] = []
    for text in texts:
        try:
            found.append(inputs.convert(spec, text))
        except inputs.BadValue as wrong:
            problems.append(
                Problem(
                    wrong.code,
                    f'"{spec.name}" {wrong.message}',
                    None,
                    wrong.fix,
                    input=spec.name,
                )
            )
    if len({json.dumps(value, sort_keys=True) for value in found}) < len(found):
        problems.append(
            Problem(
                "twice",
                f'"{spec.name}" has the same value twice',
                fix="remove the duplicate",
                input=spec.name,
            )
        )
    return found or [None]


def _unreported(recipe: Recipe, metric: str) -> list[Problem]:
    """That no step can report a metric, as far as the recipe says which it reports."""
    if any(step.uses is not None for step in recipe.steps.values()):
        return []
    reporting = [step.metrics for step in recipe.steps.values() if step.metrics is not None]
    if not reporting:
        fix = "set `metrics: true` and append JSON lines to $RECIPE_METRICS, or set `metrics: {pattern: …}`"
        return [
            Problem(
                "unknown-metric",
                f'cannot sort by "{metric}": no step of {recipe.id} reports metrics',
                None,
                fix,
            )
        ]
    names = [name for each in reporting for name in _GROUP.findall(each.pattern or "")]
    if all(each.pattern for each in reporting) and metric not in names:
        fix = did_you_mean(metric, names) or f"use one of the reported metrics: {', '.join(names)}"
        return [
            Problem(
                "unknown-metric", f'no step of {recipe.id} reports the metric "{metric}"', None, fix
            )
        ]
    return []


def _text(
    recipe: Recipe,
    uses: str,
    matrix: Mapping[str, Sequence[Tree]],
    differ: Mapping[str, str],
    fixed: Mapping[str, object],
    preset: str | None,
    when: str,
) -> str:
    """The recipe of a sweep; what is handed on are inputs of its own, so that paths and secrets stay what they are."""
    name, _, version = recipe.id.partition("@")
    written = _mapping(recipe.document.value)
    specs = {each: _mapping(spec) for each, spec in _mapping(written.get("inputs")).items()}
    own = {
        each: {
            key: value for key, value in specs[each].items() if key not in ("default", "required")
        }
        for each in fixed
    }
    own |= {
        spec.name: dict(specs[spec.name])
        for spec in recipe.inputs.values()
        if spec.type == "secret"
    }
    handed = {each: f"{{{{ inputs.{each} }}}}" for each in own} | dict(differ)
    lines = [
        f"# Written by `recipe sweep`: {recipe.id} once for each combination.",
        f"recipe: {name}-sweep@{version}",
        f"summary: A sweep over {', '.join(differ)} of {recipe.id}",
        *([f"inputs: {flow(own)}"] if own else []),
        *([f"presets: {flow({each: {} for each in split(preset)})}"] if preset else []),
        "steps:",
        f"  {name}:",
        f"    uses: {flow(uses)}",
        f"    matrix: {flow(matrix)}",
        f"    with: {flow(handed)}",
    ]
    if when:
        lines.append(f"    when: {flow(when)}")
    if recipe.outputs:
        lines.append(
            f"outputs: {flow({each: f'{{{{ steps.{name}.{each} }}}}' for each in recipe.outputs})}"
        )
    if "cost" in (limits := _mapping(written.get("limits"))):
        lines.append(f"limits: {flow({'cost': limits['cost']})}")
    return "\n".join(lines) + "\n"


def _mapping(value: Tree) -> Mapping[str, Tree]:
    return value if isinstance(value, dict) else {}


def _expression(value: object) -> str:
    """A value as an expression of templates spells it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_expression(item) for item in value)}]"
    return json.dumps(value)
