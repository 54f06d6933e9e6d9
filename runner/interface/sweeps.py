"""A recipe around another: one instance for each combination of values of its inputs.  Writes text and decides nothing about running."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import Invalid, Problem, did_you_mean
from ..language import inputs
from ..language.presets import split
from ..language.recipe import Input, Recipe
from ..language.values import Tree

MOST: Final = 1000
"""Combinations of one sweep."""
_PATHS: Final = {"file", "dataset", "model"}
_GROUP: Final = re.compile(r"\(\?P<([A-Za-z_]\w*)>")


class Sweep(NamedTuple):
    """What is tried: the text of its recipe, the values of inputs that do not differ, and how many instances there are."""

    text: str
    fixed: dict[str, object]
    instances: int


def drafted(
    recipe: Recipe,
    uses: str,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    origins: Mapping[str, str] = inputs.NOWHERE,
    metric: str | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> Sweep:
    """The sweep over the inputs that are given several values; `uses` is how its recipe names the one that is tried.

    With `draws` so many of the combinations, by chance; more of them, with the same seed, hold those of fewer.  Raises Invalid with every problem.
    """
    problems: list[Problem] = []
    axes: dict[str, list[Tree]] = {}
    for name, value in given.items():
        spec = recipe.inputs.get(name)
        if spec is not None and spec.type != "secret" and (texts := _several(spec, value)) is not None:
            axes[name] = _axis(spec, texts, problems)
    fixed = {name: value for name, value in given.items() if name not in axes}
    problems += _fixed_problems(recipe, fixed, axes, preset, origins)
    if not axes and not problems:
        problems.append(Problem("bad-input", "no input has several values", fix="separate them by commas: learning_rate=1e-4,3e-4"))
    if metric is not None:
        problems += _unreported(recipe, metric)
    count = math.prod(len(values) for values in axes.values())
    if count > MOST:
        product = " × ".join(f"{len(values):,}" for values in axes.values())
        problems.append(Problem("too-many-steps", f"the sweep has {count:,} combinations ({product}), more than {MOST:,}", fix="give fewer values"))
    if problems:
        raise Invalid(problems)
    chosen = list(itertools.product(*axes.values()))
    if draws is not None:
        random.Random(seed).shuffle(chosen)  # noqa: S311 - which are tried, not a secret
        chosen = chosen[:draws]
    values, _ = inputs.tried(recipe, {**fixed, **{name: of[0] for name, of in axes.items()}}, preset=preset)
    whole = {name.partition(".")[0] for name in fixed if "." in name}
    fixed = {name: value for name, value in fixed.items() if "." not in name} | {name: values[name] for name in whole}
    return Sweep(_text(recipe, uses, axes, fixed, preset, chosen if len(chosen) < count else None), fixed, len(chosen))


def _several(spec: Input, value: object) -> list[object] | None:
    """The values that one word gives; None where it is one value.  An empty one has none."""
    if isinstance(value, list):  # of a file
        return value if spec.type != "list" or (value and all(isinstance(item, list) for item in value)) else None
    if not isinstance(value, str):
        return None
    if spec.type in ("list", "object"):
        try:
            read = json.loads(f"[{value}]")
        except ValueError:
            return None
        return read if len(read) > 1 and all(isinstance(item, (list, dict)) for item in read) else None
    if value.startswith("["):
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if isinstance(read, list):
            return read
    if not value.strip() and spec.type != "string":
        return []
    return [part.strip() for part in value.split(",")] if "," in value else None


def _axis(spec: Input, texts: Sequence[object], problems: list[Problem]) -> list[Tree]:
    """The typed values of an axis; what is wrong with it is added to the problems."""
    if not texts or any(text == "" for text in texts):
        what = "has an empty value among its values" if texts else "has no values"
        problems.append(Problem("bad-input", f'"{spec.name}" {what}', fix=f"write {spec.name}=A,B"))
        return [None]
    found: list[Tree] = []
    for text in texts:
        try:
            found.append(inputs.converted(spec, text))
        except inputs.Wrong as wrong:
            problems.append(Problem(wrong.code, f'"{spec.name}" {wrong.message}', None, wrong.fix))
    if len({json.dumps(value, sort_keys=True) for value in found}) < len(found):
        problems.append(Problem("twice", f'"{spec.name}" has the same value twice', fix="write it once"))
    return found or [None]


def _fixed_problems(
    recipe: Recipe, fixed: Mapping[str, object], axes: Mapping[str, Sequence[Tree]], preset: str | None, origins: Mapping[str, str]
) -> list[Problem]:
    """What is wrong with the values that do not differ; an axis stands for whatever it holds."""
    _, problems = inputs.tried(recipe, {**fixed, **{name: values[0] for name, values in axes.items()}}, preset=preset, origins=origins)
    return [problem for problem in problems if not any(f'"{name}"' in problem.message and problem.where is None for name in axes)]


def _unreported(recipe: Recipe, metric: str) -> list[Problem]:
    """That no step can report a metric, as far as the recipe says which it reports."""
    if any(step.uses is not None for step in recipe.steps.values()):
        return []
    reporting = [step.metrics for step in recipe.steps.values() if step.metrics is not None]
    if not reporting:
        fix = "write `metrics: true` and append JSON lines to $RECIPE_METRICS, or `metrics: {pattern: …}`"
        return [Problem("unknown-metric", f'no step of {recipe.id} reports metrics, so none reports "{metric}"', None, fix)]
    names = [name for each in reporting for name in _GROUP.findall(each.pattern or "")]
    if all(each.pattern for each in reporting) and metric not in names:
        fix = did_you_mean(metric, names) or f"they report {', '.join(names)}"
        return [Problem("unknown-metric", f'no step of {recipe.id} reports "{metric}"', None, fix)]
    return []


def _text(
    recipe: Recipe,
    uses: str,
    axes: Mapping[str, Sequence[Tree]],
    fixed: Mapping[str, object],
    preset: str | None,
    chosen: Sequence[Sequence[Tree]] | None,
) -> str:
    """The recipe of a sweep; what is handed on are inputs of its own, so that paths and secrets stay what they are."""
    name, _, version = recipe.id.partition("@")
    written = _mapping(recipe.document.value)
    specs = {each: _mapping(spec) for each, spec in _mapping(written.get("inputs")).items()}
    own = {each: {key: value for key, value in specs[each].items() if key not in ("default", "required")} for each in fixed}
    own |= {spec.name: dict(specs[spec.name]) for spec in recipe.inputs.values() if spec.type == "secret"}
    handed = {each: f"{{{{ inputs.{each} }}}}" for each in own} | {each: f"{{{{ matrix.{each} }}}}" for each in axes}
    lines = [
        f"# Written by `recipe sweep`: {recipe.id} once for each combination.",
        f"recipe: {name}-sweep@{version}",
        f"summary: A sweep over {', '.join(axes)} of {recipe.id}",
        *([f"inputs: {json.dumps(own)}"] if own else []),
        *([f"presets: {json.dumps({each: {} for each in split(preset)})}"] if preset else []),
        "steps:",
        f"  {name}:",
        f"    uses: {json.dumps(uses)}",
        f"    matrix: {json.dumps(axes)}",
        f"    with: {json.dumps(handed)}",
    ]
    if chosen is not None:
        one = ", ".join(f"matrix.{each}" for each in axes)
        lines.append(f"    when: {json.dumps(f'{{{{ [{one}] in {_expression(chosen)} }}}}')}")
    if recipe.outputs:
        lines.append(f"outputs: {json.dumps({each: f'{{{{ steps.{name}.{each} }}}}' for each in recipe.outputs})}")
    if "cost" in (limits := _mapping(written.get("limits"))):
        lines.append(f"limits: {json.dumps({'cost': limits['cost']})}")
    return "\n".join(lines) + "\n"


def _mapping(value: Tree) -> Mapping[str, Tree]:
    return value if isinstance(value, dict) else {}


def _expression(value: object) -> str:
    """A value as an expression of templates spells it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_expression(item) for item in value)}]"
    return json.dumps(value)
