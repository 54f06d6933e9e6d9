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
from .drafts import NodeDraft, PathValue, Results, Scope, Sketch, plain_value
from .ids import encode_value
from .path_rules import WORKSPACE
from .patterns import is_excluded
from .plan import SKIP, PendingMatrix
from .trial import Scene, is_never_true

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step
    from ..language.values import Tree, Where

MOST_STEPS: Final = 100_000
"""Maximum number of steps in a plan."""


class GlobOrigin(NamedTuple):
    """Origin of a glob match: the recipe, the axis, and the location of its pattern."""

    recipe: Recipe
    axis: str
    where: Where


class _Axis(NamedTuple):
    """Values of one matrix axis, or None and a sample value if they are unknown."""

    values: list[Any] | None = None
    sample: Any = ANYTHING
    is_wrong: bool = False  # a problem was reported


_WRONG: Final = _Axis(is_wrong=True)


class _GlobAxis(NamedTuple):
    """Matrix axis over the files that a glob pattern matches."""

    name: str
    written: Mapping[str, Any]
    pattern: str
    exclude: list[str]
    where: Where


class Axes:
    """Evaluator of the matrix axes of one plan.

    `globs` maps each pattern to its known matches.  Matches in `left_out` are ignored.
    """

    def __init__(
        self, sketch: Sketch, globs: Mapping[str, tuple[str, ...]], left_out: Collection[str]
    ) -> None:
        self.sketch, self.globs, self.left_out = sketch, globs, left_out
        self.samples: dict[tuple[str, str], dict[str, Any]] = {}
        """Type or common value of each axis, by prefix and step."""
        self.lost: dict[tuple[str, str], NodeDraft] = {}
        """The skipped producer of an axis's files, by prefix and step."""
        self.full = False  # there are more steps than a plan may have
        self.found: dict[str, GlobOrigin] = {}  # workspace paths that became values of an axis

    def combinations(self, scope: Scope, step: Step) -> list[dict[str, Any]] | None:
        """Return all combinations of a step's axis values.

        A step without a matrix has one empty combination.  Return None if an axis is unknown or the
        plan would be too large.
        """
        axes = self._axes(scope, step)
        if axes is None:
            return None
        combinations = itertools.product(*axes.values())
        return [dict(zip(axes, values, strict=True)) for values in combinations]

    def _axes(self, scope: Scope, step: Step) -> Mapping[str, Sequence[Any]] | None:
        """Return the values of each matrix axis, or None if an axis has no known values yet.

        After a problem, return only the wrong axis, without values.
        """
        axes: dict[str, list[Any]] = {}
        samples: dict[str, Any] = {}
        self.samples[scope.prefix, step.id] = samples
        for name, written in (step.matrix or {}).items():
            axis = self._read_axis(scope, step, name, written)
            if axis.is_wrong:
                return {name: []}
            samples[name] = axis.sample
            if axis.values is not None:
                axes[name] = axis.values
        if len(axes) < len(samples):
            return None
        return axes if self._fits(scope, step, axes) else None

    def _read_axis(self, scope: Scope, step: Step, name: str, written: Tree) -> _Axis:
        where = (*step.origin, "matrix", name)
        if isinstance(written, dict):
            axis = _Axis(self._glob(scope, step, name, written, where), A_TEXT)
        else:
            axis = self._evaluate_axis(scope, step, name, written, where)
        if axis.values is None:
            return axis
        if len({encode_value(value) for value in axis.values}) < len(axis.values):
            message = f'axis "{name}" of "{step.id}" has the same value twice'
            fix = "remove the duplicate; values that look the same as text are equal"
            self.sketch.problem(scope.recipe, "matrix-axis", message, where, fix=fix)
            return _WRONG
        return _Axis(axis.values, one_of(map(plain_value, axis.values)))

    def _evaluate_axis(
        self, scope: Scope, step: Step, name: str, written: Tree, where: Where
    ) -> _Axis:
        """Evaluate an axis that is a list or an expression."""
        names = {"inputs": scope.inputs, "steps": Results(scope)}
        choice = choose_branches(self.sketch, scope, written, names)
        if choice.late:
            message = (
                f'the values of the axis "{name}" depend on a step that is not known before the run'
            )
            fix = "choose in a step with a command, and use its output as the axis"
            self.sketch.problem(scope.recipe, "late-name", message, where, fix=fix)
        if isinstance(written, str):
            value, sound = self.sketch.try_render(scope, written, choice.names, where)
        else:
            value, sound = self.sketch.evaluate(scope, written, choice.names, where), True
        if isinstance(value, Unknown) and LIST in value.kinds:
            return _Axis(None, value.items or ANYTHING)
        if isinstance(value, list):
            return _Axis(value)
        if sound:
            message = f'axis "{name}" of "{step.id}" is not a list'
            fix = "use a list, or an expression with a list as its value"
            self.sketch.problem(scope.recipe, "matrix-axis", message, where, fix=fix)
        return _WRONG

    def _fits(self, scope: Scope, step: Step, axes: Mapping[str, Sequence[Any]]) -> bool:
        """Return whether the plan stays below the step limit with all instances of a step.

        The first failure is reported as a problem.
        """
        if len(self.sketch.drafts) + math.prod(map(len, axes.values())) <= MOST_STEPS:
            return True
        if not self.full:
            self.full = True
            message = f"the plan would have more than {MOST_STEPS:,} steps"
            where = step.origin
            if axes:
                product = " × ".join(f"{len(values):,}" for values in axes.values())
                message += f': the matrix of "{step.id}" has {product}'
                where = (*where, "matrix")
            fix = "use fewer values, or process many of them in one step"
            self.sketch.problem(scope.recipe, "too-many-steps", message, where, fix=fix, key=True)
        return False

    def _glob(
        self, scope: Scope, step: Step, name: str, written: Mapping[str, Any], where: Where
    ) -> list[Any] | None:
        """Return the paths that a glob axis matches, or None if they are not known yet."""
        names = {"inputs": scope.inputs, "steps": Results(scope)}
        excluded = written.get("exclude", [])
        exclude = self.sketch.exclusions(scope, excluded, names, (*where, "exclude"))
        where = (*where, "glob")
        value = self.sketch.evaluate(scope, written["glob"], names, where)
        pattern = self.sketch.path_text(scope, written["glob"], value, where) or ""
        axis = _GlobAxis(name, written, pattern, exclude, where)
        output = next((path for path in heads(pattern)[1:] if path in scope.makers), None)
        if output is not None:
            return self._output_matches(scope, step, axis, output)
        return self._workspace_matches(scope, step, axis)

    def _workspace_matches(self, scope: Scope, step: Step, axis: _GlobAxis) -> list[Any]:
        """Return the workspace files that a glob axis matches."""
        if escapes(axis.pattern):
            if axis.pattern != axis.written["glob"]:  # find_misplaced_paths reports literal ones
                message = f'"{axis.pattern}" leaves the workspace'
                self.sketch.problem(scope.recipe, "path-escape", message, axis.where, fix=WORKSPACE)
            return []
        matches: list[str] = []
        for match in self.globs.get(axis.pattern, ()):
            if match not in self.left_out and not is_excluded(match, axis.exclude):
                matches.append(match)
        self.found |= dict.fromkeys(matches, GlobOrigin(scope.recipe, axis.name, axis.where))
        if not matches:
            self._record_empty(scope, step, axis)
        return [PathValue(match, "dep", match) for match in matches]

    def _output_matches(
        self, scope: Scope, step: Step, axis: _GlobAxis, path: str
    ) -> list[Any] | None:
        """Return the files in the output `path` that a glob axis matches, or None.

        Return None before the output exists.
        """
        id, output = scope.makers[path]
        if id in scope.pending and scope.recipe.steps[id].matrix is None:
            return None  # the output path is known only when its producer is a node
        if id in scope.pending or len(scope.groups.get(id, ())) != 1:
            message = f'the glob of the axis "{axis.name}" is below an output of "{id}", which has a `matrix` itself'
            fix = "point the glob below an output of a step without `matrix`"
            self.sketch.problem(scope.recipe, "matrix-axis", message, axis.where, fix=fix)
            return []
        producer = scope.groups[id][0]
        if producer.flags & SKIP:
            self.lost[scope.prefix, step.id] = producer
            return []
        below = axis.pattern[len(path) + 1 :]
        known = self.globs.get(f"{producer.id}/{output}:{below}")
        if known is None:
            pending = PendingMatrix(f"{scope.prefix}{step.id}", producer.id, output, below)
            self.sketch.pending.append(pending)
            return None
        matches = [match for match in known if not is_excluded(f"{path}/{match}", axis.exclude)]
        if not matches:
            self._record_empty(scope, step, axis)
        files: list[Any] = []
        for match in matches:
            files.append(PathValue(f"{path}/{match}", "below", (producer, output, match)))
        return files

    def _record_empty(self, scope: Scope, step: Step, axis: _GlobAxis) -> None:
        """Record an axis without values, or report a problem if `allow_empty` is false."""
        if is_never_true(step.when, Scene({"inputs": scope.inputs})):
            return
        allowed = axis.written.get("allow_empty")
        id = f"{scope.prefix}{step.id}"
        if allowed is False:
            message = f'nothing matches "{axis.pattern}": {id} would have no instance'
            fix = "correct the pattern, or set `allow_empty: true`"
            self.sketch.problem(scope.recipe, "empty-glob", message, axis.where, fix=fix)
        elif allowed is None and (id, axis.pattern) not in self.sketch.empty:
            self.sketch.empty.append((id, axis.pattern))


def instance_id(scope: Scope, id: str, combination: Mapping[str, Any]) -> str:
    """Return the id of a step instance.  An id without a matrix has no brackets."""
    if not combination:
        return f"{scope.prefix}{id}"
    axes = ",".join(f"{axis}={encode_value(value)}" for axis, value in combination.items())
    return f"{scope.prefix}{id}[{axes}]"
