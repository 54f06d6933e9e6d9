"""Generated recipes of sweeps: one instance for each combination of input values. Text only."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..digest import of_bytes
from ..errors import Invalid, Problem, did_you_mean
from ..language import inputs, unread
from ..language.presets import split
from ..language.recipe import Input, Recipe
from ..language.values import Tree
from ..language.yaml_text import flow

MOST: Final = 1000
"""Maximum number of combinations in a sweep."""
_RANGE: Final = re.compile(r"\s*([-+.\deE]+?)\s*\.\.\s*([-+.\deE]+?)\s*(:log)?\s*")
_TRIAL: Final = "[matrix.trial]"
_GROUP: Final = re.compile(r"\(\?P<([A-Za-z_]\w*)>")


class Range(NamedTuple):
    """A numeric search range, both ends included.

    With `log`, values are distributed logarithmically.
    """

    low: float
    high: float
    log: bool
    whole: bool


class Space(NamedTuple):
    """A search space: the axes of the varied inputs, and the values of the fixed inputs."""

    axes: Mapping[str, Range | Sequence[Tree]]
    fixed: dict[str, object]

    @property
    def size(self) -> float:
        """Maximum number of different trials."""
        return math.prod(_size(axis) for axis in self.axes.values())


class Sweep(NamedTuple):
    """A generated sweep: recipe text, values of the fixed inputs, and number of instances."""

    text: str
    fixed: dict[str, object]
    instances: int
    recipe: str
    """Name of the swept recipe."""

    @property
    def stem(self) -> str:
        """File name of the generated recipe, without `.yaml`."""
        return f"{self.recipe}-{of_bytes(self.text.encode())[:8]}"


def draft(
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
    """Generate the sweep recipe over all inputs with several values.

    `uses` names the swept recipe in the generated recipe. `several` holds the values of the swept
    inputs. If None, the texts in `given` hold them, separated by commas. With `draws`, only this
    number of random combinations is used. With the same seed, a larger number includes all
    combinations of a smaller number. Raises Invalid with all problems.
    """
    words = find_varied_inputs(recipe, given) if several is None else several
    found, problems = _gather_space(recipe, {**given, **words}, words, preset, origins, metric)
    axes = {name: axis for name, axis in found.axes.items() if not isinstance(axis, Range)}
    problems += _report_ranges(found)
    problems += _report_size(axes)
    if problems:
        raise Invalid(problems)
    chosen = list(itertools.product(*axes.values()))
    when = ""
    if draws is not None and draws < len(chosen):
        random.Random(seed).shuffle(chosen)  # noqa: S311 - selects combinations, no secret
        chosen = chosen[:draws]
        when = _match_combinations(axes, chosen)
    handed = {each: f"{{{{ matrix.{each} }}}}" for each in axes}
    text = _text(recipe, uses, axes, handed, found.fixed, preset, when)
    return Sweep(text, found.fixed, len(chosen), recipe.id.partition("@")[0])


def _report_ranges(found: Space) -> list[Problem]:
    """Return a problem for each axis that is a range: a sweep needs listed values."""
    problems = []
    for name, axis in found.axes.items():
        if isinstance(axis, Range):
            words = f'"{name}" is a range, which requires a search'
            fix = "add `--tpe 30`, or list the values"
            problems.append(Problem("bad-input", words, fix=fix, input=name))
    return problems


def _report_size(axes: Mapping[str, Sequence[Tree]]) -> list[Problem]:
    """Return a problem if a sweep has more than `MOST` combinations."""
    sizes = [len(values) for values in axes.values()]
    count = math.prod(sizes)
    if count <= MOST:
        return []
    product = " × ".join(f"{size:,}" for size in sizes)
    words = f"the sweep has {count:,} combinations ({product}), more than {MOST:,}"
    return [Problem("too-many-steps", words, fix="use fewer values")]


def _match_combinations(axes: Iterable[str], chosen: Sequence[Sequence[Tree]]) -> str:
    """Return a `when` that is true for the chosen combinations only."""
    instance = ", ".join(f"matrix.{each}" for each in axes)
    return f"{{{{ [{instance}] in {_expression(chosen)} }}}}"


def search_space(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    several: Mapping[str, str | Sequence[object]] | None = None,
    preset: str | None = None,
    origins: Mapping[str, str] = inputs.NOWHERE,
    metric: str,
) -> Space:
    """Return the search space for optimizing `metric`. Raises Invalid with all problems.

    `several` holds the values or the range text of the varied inputs. If None, the texts in `given`
    hold them.
    """
    words = find_varied_inputs(recipe, given) if several is None else several
    found, problems = _gather_space(recipe, {**given, **words}, words, preset, origins, metric)
    if problems:
        raise Invalid(problems)
    return found


def write_search(
    recipe: Recipe, uses: str, where: Space, points: Sequence[Sequence[Tree]], preset: str | None
) -> str:
    """Return the recipe text of a search, with one instance for each trial in `points`.

    The values of a point are in the order of the axes.
    """
    handed: dict[str, str] = {}
    for n, name in enumerate(where.axes):
        column = [point[n] for point in points]
        handed[name] = f"{{{{ {_expression(column)}{_TRIAL} }}}}"
    return _text(recipe, uses, {"trial": list(range(len(points)))}, handed, where.fixed, preset, "")


class SweepRecipe(NamedTuple):
    """A parsed sweep recipe: the swept recipe as named in it, and the values of the swept inputs."""

    uses: str
    axes: Mapping[str, list[Tree]]


def read_sweep(written: Tree) -> SweepRecipe | None:
    """Parse a sweep recipe written by `draft`. None for a search or any other recipe."""
    steps = list(_mapping(_mapping(written).get("steps")).values())
    step = _mapping(steps[0]) if len(steps) == 1 else {}
    matrix, handed = _mapping(step.get("matrix")), _mapping(step.get("with"))
    uses = step.get("uses")
    if not isinstance(uses, str) or not matrix:
        return None
    if any(handed.get(name) != f"{{{{ matrix.{name} }}}}" for name in matrix):
        return None
    axes = {name: values for name, values in matrix.items() if isinstance(values, list)}
    return SweepRecipe(uses, axes)


def read_trials(written: Tree, axes: Collection[str]) -> list[list[Tree]]:
    """Read the trials of a search recipe written by `write_search`."""
    (step,) = _mapping(_mapping(written)["steps"]).values()
    handed = _mapping(_mapping(step)["with"])
    columns = []
    for name in axes:
        text = str(handed[name]).removeprefix("{{ ").removesuffix(f"{_TRIAL} }}}}")
        columns.append(json.loads(text))
    return [list(point) for point in zip(*columns, strict=True)]


def find_varied_inputs(
    recipe: Recipe, given: Mapping[str, object]
) -> dict[str, str | Sequence[object]]:
    """Return the varied inputs with their values, or with the text of a range."""
    found: dict[str, str | Sequence[object]] = {}
    for name, value in given.items():
        spec = recipe.inputs.get(name)
        if spec is None or spec.type == "secret":
            continue
        if isinstance(value, str) and _is_range(spec, value):
            found[name] = value
            continue
        texts = _several(spec, value)
        if texts is not None:
            found[name] = texts
    return found


def _is_range(spec: Input, text: str) -> bool:
    return spec.type in ("number", "integer") and ".." in text


def _gather_space(
    recipe: Recipe,
    given: Mapping[str, object],
    several: Mapping[str, str | Sequence[object]],
    preset: str | None,
    origins: Mapping[str, str],
    metric: str | None,
) -> tuple[Space, list[Problem]]:
    """Return the search space of the given inputs, and all problems."""
    reader = _AxisReader()
    axes = reader.read(recipe, several)
    fixed = {name: value for name, value in given.items() if name not in axes}
    instance: dict[str, object] = {**fixed}
    for name, axis in axes.items():
        instance[name] = axis.low if isinstance(axis, Range) else axis[0]
    bound, wrong = inputs.try_bind(recipe, instance, preset=preset, origins=origins)
    problems = [*reader.problems, *unread.find_refused(recipe, given, preset, origins)]
    for problem in wrong:
        # The reader has reported the values of an axis already.
        if problem.input not in axes or problem.where is not None:
            problems.append(problem)
    if not axes and not problems:
        words, fix = (
            "no input has several values",
            "separate them by commas: learning_rate=1e-4,3e-4",
        )
        problems.append(Problem("bad-input", words, fix=fix))
    if metric is not None:
        problems += _check_metric(recipe, metric)
    if not problems:
        fixed = _join_parts(fixed, bound)
    return Space(axes, fixed), problems


def _join_parts(fixed: Mapping[str, object], bound: Mapping[str, object]) -> dict[str, object]:
    """Replace values of parts of an object, such as `a.b`, by the whole object `a`.

    An input of a generated recipe is a whole object.
    """
    whole = {name.partition(".")[0] for name in fixed if "." in name}
    joined = {name: value for name, value in fixed.items() if "." not in name}
    return joined | {name: bound[name] for name in whole}


class _AxisReader:
    """Converts the values of varied inputs to the axes of a search space, and collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def read(
        self, recipe: Recipe, several: Mapping[str, str | Sequence[object]]
    ) -> dict[str, Range | Sequence[Tree]]:
        """Return the axis of each varied input. An invalid range has the axis [None]."""
        axes: dict[str, Range | Sequence[Tree]] = {}
        for name, values in several.items():
            spec = recipe.inputs.get(name)
            if spec is None or spec.type == "secret":
                continue
            if isinstance(values, str):
                axes[name] = self._read_range(spec, values)
            else:
                axes[name] = self._read_values(spec, values)
        return axes

    def _read_range(self, spec: Input, text: str) -> Range | Sequence[Tree]:
        match = _RANGE.fullmatch(text)
        if match is None:
            words = f'has an invalid range: "{text}"'
            self._report(spec, words, f"use {spec.name}=LOW..HIGH or LOW..HIGH:log")
            return [None]
        ends: list[float] = []
        for value in self._convert(spec, match.group(1, 2)):
            ends.append(float(str(value)))
        if len(ends) < 2:
            return [None]
        low, high = ends
        is_log = match[3] is not None
        if low >= high:
            words = f"has an empty range: {low:g} is not below {high:g}"
            self._report(spec, words, f"write {spec.name}={high:g}..{low:g}")
        elif is_log and low <= 0:
            words = f"has no logarithmic range from {low:g}"
            self._report(spec, words, "start above 0, or remove `:log`")
        return Range(low, high, is_log, spec.type == "integer")

    def _read_values(self, spec: Input, texts: Sequence[object]) -> list[Tree]:
        if not texts or any(text == "" for text in texts):
            words = "has an empty value in its list" if texts else "has no values"
            self._report(spec, words, f"write {spec.name}=A,B")
            return [None]
        found = self._convert(spec, texts)
        if len({json.dumps(value, sort_keys=True) for value in found}) < len(found):
            self._report(spec, "has the same value twice", "remove the duplicate", "twice")
        return found or [None]

    def _convert(self, spec: Input, texts: Iterable[object]) -> list[Tree]:
        """Convert values to the type of an input, without invalid values."""
        found: list[Tree] = []
        for text in texts:
            try:
                found.append(inputs.convert(spec, text))
            except inputs.BadValue as wrong:
                self._report(spec, wrong.message, wrong.fix, wrong.code)
        return found

    def _report(self, spec: Input, words: str, fix: str, code: str = "bad-input") -> None:
        problem = Problem(code, f'"{spec.name}" {words}', fix=fix, input=spec.name)
        self.problems.append(problem)


def _size(axis: Range | Sequence[Tree]) -> float:
    if not isinstance(axis, Range):
        return len(axis)
    return axis.high - axis.low + 1 if axis.whole else math.inf


def first_value(axis: Range | Sequence[Tree]) -> Tree:
    """Return the lowest value of a range, or the first listed value."""
    if not isinstance(axis, Range):
        return axis[0]
    return int(axis.low) if axis.whole else axis.low


def _several(spec: Input, value: object) -> list[object] | None:
    """Return the list of values for an input, or None for a single value."""
    if isinstance(value, list):  # from a file
        return _several_in_list(spec, value)
    if not isinstance(value, str):
        return None
    if spec.type in ("list", "object"):
        return _several_collections(value)
    if value.startswith("["):
        read = _parse_list(value)
        if read is not None:
            return read
    if not value.strip() and spec.type != "string":
        return []
    return _parts(value) if "," in value else None


def _several_in_list(spec: Input, values: list[object]) -> list[object] | None:
    """Return the sweep values in a list, or None if the list is a single value of a list input."""
    if spec.type != "list":
        return values
    is_list_of_lists = bool(values) and all(isinstance(item, list) for item in values)
    return values if is_list_of_lists else None


def _several_collections(text: str) -> list[object] | None:
    """Split a text such as `[1],[2]` into its lists or objects, or return None for a single one."""
    read = _parse_list(f"[{text}]")
    if read is None or len(read) < 2:
        return None
    if all(isinstance(item, (list, dict)) for item in read):
        return read
    return None


def _parse_list(text: str) -> list[object] | None:
    """Parse a JSON list. Return None for any other text."""
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, list) else None


_PART: Final = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"\s*(?=,|$)|((?:\\,|[^,])*))', re.DOTALL)


def _parts(text: str) -> list[object]:
    """Split a text at commas that are neither quoted nor escaped by a backslash."""
    found: list[object] = []
    at = 0
    while at <= len(text):
        match = _PART.match(text, at)
        if match is None:
            break
        quoted, plain = match.groups()
        if quoted is None:
            found.append(plain.strip().replace("\\,", ","))
        else:
            found.append(re.sub(r'\\([,"\\])', r"\1", quoted))
        at = match.end() + 1  # after the comma
    return found


def _check_metric(recipe: Recipe, metric: str) -> list[Problem]:
    """Return a problem if no step of the recipe reports the metric."""
    steps = recipe.steps.values()
    if any(step.uses is not None for step in steps):
        return []
    reporting = [step.metrics for step in steps if step.metrics is not None]
    if not reporting:
        words = f'cannot sort by "{metric}": no step of {recipe.id} reports metrics'
        fix = "set `metrics: true` and append JSON lines to $RECIPE_METRICS, or set `metrics: {pattern: …}`"
        return [Problem("unknown-metric", words, fix=fix)]
    names: list[str] = []
    for rule in reporting:
        if not rule.pattern:
            return []  # only a pattern tells the names of its metrics beforehand
        names += _GROUP.findall(rule.pattern)
    if metric in names:
        return []
    words = f'no step of {recipe.id} reports the metric "{metric}"'
    fix = did_you_mean(metric, names) or f"use one of the reported metrics: {', '.join(names)}"
    return [Problem("unknown-metric", words, fix=fix)]


def _text(
    recipe: Recipe,
    uses: str,
    matrix: Mapping[str, Sequence[Tree]],
    differ: Mapping[str, str],
    fixed: Mapping[str, object],
    preset: str | None,
    when: str,
) -> str:
    """Return the text of a generated sweep recipe.

    Fixed values are passed as inputs of the recipe, so that paths and secrets keep their type.
    """
    name, _, version = recipe.id.partition("@")
    written = _mapping(recipe.document.value)
    own = _inputs_of_sweep(recipe, fixed)
    handed = {each: f"{{{{ inputs.{each} }}}}" for each in own} | dict(differ)
    lines = [
        f"# Written by `recipe sweep`: {recipe.id} once for each combination.",
        f"recipe: {name}-sweep@{version}",
        f"summary: A sweep over {', '.join(differ)} of {recipe.id}",
    ]
    if own:
        lines.append(f"inputs: {flow(own)}")
    if preset:
        presets: dict[str, dict[str, Tree]] = {each: {} for each in split(preset)}
        lines.append(f"presets: {flow(presets)}")
    lines += [
        "steps:",
        f"  {name}:",
        f"    uses: {flow(uses)}",
        f"    matrix: {flow(matrix)}",
        f"    with: {flow(handed)}",
    ]
    if when:
        lines.append(f"    when: {flow(when)}")
    if recipe.outputs:
        outputs = {each: f"{{{{ steps.{name}.{each} }}}}" for each in recipe.outputs}
        lines.append(f"outputs: {flow(outputs)}")
    limits = _mapping(written.get("limits"))
    if "cost" in limits:
        lines.append(f"limits: {flow({'cost': limits['cost']})}")
    return "\n".join(lines) + "\n"


def _inputs_of_sweep(recipe: Recipe, fixed: Collection[str]) -> dict[str, dict[str, Tree]]:
    """Return the inputs that a sweep recipe declares: those with a fixed value, and secrets."""
    specs = _mapping(_mapping(recipe.document.value).get("inputs"))
    own: dict[str, dict[str, Tree]] = {}
    for name in fixed:
        own[name] = dict(_mapping(specs[name]))
        own[name].pop("default", None)
        own[name].pop("required", None)
    for spec in recipe.inputs.values():
        if spec.type == "secret":
            own[spec.name] = dict(_mapping(specs[spec.name]))
    return own


def _mapping(value: Tree) -> Mapping[str, Tree]:
    return value if isinstance(value, dict) else {}


def _expression(value: object) -> str:
    """Format a value for use in a template expression."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_expression(item) for item in value)}]"
    return json.dumps(value)
