"""Expand the matrix of a step: axis values and instance ids.

An axis over files that another step creates stays pending until that step is done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..language.unknowns import A_TEXT, ANYTHING, LIST, Unknown, one_of
from ..paths import escapes, heads
from .choices import choose_branches
from .drafts import Draft, PathValue, Results, Scope, Sketch, plain_value
from .ids import encode_value
from .path_rules import WORKSPACE
from .patterns import is_excluded
from .plan import SKIP, Pending
from .trial import Scene, never

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step
    from ..language.values import Where

MOST_STEPS: Final = 100_000
"""Maximum number of steps in a plan."""


class Found(NamedTuple):
    """Origin of a glob match: the recipe, the axis, and the location of its pattern."""

    recipe: Recipe
    axis: str
    where: Where


class Axes:
    """Matrix axes of one plan.

    `globs` maps each pattern to its known matches.  Matches in `left_out` are ignored.
    """

    def __init__(
        self, sketch: Sketch, globs: Mapping[str, tuple[str, ...]], left_out: Collection[str]
    ) -> None:
        self.sketch, self.globs, self.left_out = sketch, globs, left_out
        self.samples: dict[tuple[str, str], dict[str, Any]] = {}
        """Type or common value of each axis, by prefix and step."""
        self.lost: dict[tuple[str, str], Draft] = {}
        """The skipped producer of an axis's files, by prefix and step."""
        self.full = False  # there are more steps than a plan may have
        self.found: dict[str, Found] = {}  # workspace paths that became values of an axis

    def combinations(self, scope: Scope, step: Step) -> list[dict[str, Any]] | None:
        """Return all combinations of axis values: one empty combination for a step without a matrix.

        Return None if an axis is unknown or the plan would be too large.
        """
        axes = self._axes(scope, step)
        return (
            None
            if axes is None
            else [
                dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
            ]
        )

    def _axes(self, scope: Scope, step: Step) -> Mapping[str, Sequence[Any]] | None:
        """Return the values of each axis, or None if one is unknown.  An axis with a problem has no values."""
        axes: dict[str, list[Any]] = {}
        samples: dict[str, Any] = {}
        self.samples[scope.prefix, step.id] = samples
        for name, axis in (step.matrix or {}).items():
            where = (*step.origin, "matrix", name)
            if isinstance(axis, dict):
                values = self._glob(scope, step, name, axis, where)
                if values is None:
                    samples[name] = A_TEXT
                    continue
            else:
                choice = choose_branches(
                    self.sketch, scope, axis, {"inputs": scope.inputs, "steps": Results(scope)}
                )
                names = choice.names
                if choice.late:
                    message = f'the values of the axis "{name}" depend on a step that is not known before the run'
                    fix = "choose in a step with a command, and use its output as the axis"
                    self.sketch.problem(scope.recipe, "late-name", message, where, fix=fix)
                value, sound = (
                    self.sketch.try_render(scope, axis, names, where)
                    if isinstance(axis, str)
                    else (self.sketch.evaluate(scope, axis, names, where), True)
                )
                if isinstance(value, Unknown) and LIST in value.kinds:
                    samples[name] = value.items or ANYTHING
                    continue
                if not isinstance(value, list):
                    if not sound:
                        return {name: []}
                    self.sketch.problem(
                        scope.recipe,
                        "matrix-axis",
                        f'axis "{name}" of "{step.id}" is not a list',
                        where,
                        fix="use a list, or an expression with a list as its value",
                    )
                    return {name: []}
                values = value
            if len({encode_value(v) for v in values}) < len(values):
                self.sketch.problem(
                    scope.recipe,
                    "matrix-axis",
                    f'axis "{name}" of "{step.id}" has the same value twice',
                    where,
                    fix="remove the duplicate; values that look the same as text are equal",
                )
                return {name: []}
            axes[name] = values
            samples[name] = one_of(map(plain_value, values))
        waits = len(axes) < len(samples)
        return axes if not waits and self._fits(scope, step, axes) else None

    def _fits(self, scope: Scope, step: Step, axes: Mapping[str, Sequence[Any]]) -> bool:
        """Return whether the plan has room for all instances of a step.  The first failure is reported as a problem."""
        if len(self.sketch.drafts) + math.prod(map(len, axes.values())) <= MOST_STEPS:
            return True
        if not self.full:
            self.full = True
            product = " × ".join(f"{len(values):,}" for values in axes.values())
            message = f"the plan would have more than {MOST_STEPS:,} steps" + (
                f': the matrix of "{step.id}" has {product}' if axes else ""
            )
            where = (*step.origin, "matrix") if axes else step.origin
            fix = "use fewer values, or process many of them in one step"
            self.sketch.problem(scope.recipe, "too-many-steps", message, where, fix=fix, key=True)
        return False

    def _glob(
        self, scope: Scope, step: Step, axis: str, given: Mapping[str, Any], where: Where
    ) -> list[Any] | None:
        maker = None
        names = {"inputs": scope.inputs, "steps": Results(scope)}
        exclude = [
            str(each)
            for each in self.sketch.evaluate(
                scope, given.get("exclude", []), names, (*where, "exclude")
            )
        ]
        where = (*where, "glob")
        value = self.sketch.evaluate(scope, given["glob"], names, where)
        text = str(value) if value is not None else ""
        for path in heads(text)[1:]:
            if path in scope.makers:
                maker = (*scope.makers[path], text[len(path) + 1 :], path)
                break
        if maker is None:
            if escapes(text):
                if text != given["glob"]:
                    self.sketch.problem(
                        scope.recipe,
                        "path-escape",
                        f'"{text}" leaves the workspace',
                        where,
                        fix=WORKSPACE,
                    )
                return []
            matches = [
                match
                for match in self.globs.get(text, ())
                if match not in self.left_out and not is_excluded(match, exclude)
            ]
            self.found |= dict.fromkeys(matches, Found(scope.recipe, axis, where))
            if not matches:
                self._empty(scope, step, given, text, where)
            return [PathValue(match, "dep", match) for match in matches]
        id, output, below, path = maker
        if id in scope.pending and scope.recipe.steps[id].matrix is None:
            return None  # where it will lie is known only when its maker is a node
        if id in scope.pending or len(scope.groups.get(id, ())) != 1:
            self.sketch.problem(
                scope.recipe,
                "matrix-axis",
                f'the glob of the axis "{axis}" is below an output of "{id}", which has a `matrix` itself',
                where,
                fix="point the glob below an output of a step without `matrix`",
            )
            return []
        producer = scope.groups[id][0]
        if producer.flags & SKIP:
            self.lost[scope.prefix, step.id] = producer
            return []
        known = self.globs.get(f"{producer.id}/{output}:{below}")
        if known is None:
            self.sketch.pending.append(
                Pending(f"{scope.prefix}{step.id}", producer.id, output, below)
            )
            return None
        below_it = [match for match in known if not is_excluded(f"{path}/{match}", exclude)]
        if not below_it:
            self._empty(scope, step, given, text, where)
        return [
            PathValue(f"{path}/{match}", "below", (producer, output, match)) for match in below_it
        ]

    def _empty(
        self, scope: Scope, step: Step, given: Mapping[str, Any], pattern: str, where: Where
    ) -> None:
        """Record an axis without values, or report a problem if `allow_empty` is false."""
        if never(step.when, Scene({"inputs": scope.inputs})):
            return
        allowed = given.get("allow_empty")
        id = f"{scope.prefix}{step.id}"
        if allowed is False:
            message = f'nothing matches "{pattern}": {id} would have no instance'
            fix = "correct the pattern, or set `allow_empty: true`"
            self.sketch.problem(scope.recipe, "empty-glob", message, where, fix=fix)
        elif allowed is None and (id, pattern) not in self.sketch.empty:
            self.sketch.empty.append((id, pattern))


def instance_id(scope: Scope, id: str, combination: Mapping[str, Any]) -> str:
    """Return the id of a step instance.  An id without a matrix has no brackets."""
    return f"{scope.prefix}{id}" + (
        f"[{','.join(f'{k}={encode_value(v)}' for k, v in combination.items())}]"
        if combination
        else ""
    )
