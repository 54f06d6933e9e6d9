"""Match instances of two matrix steps: `steps.train.same.model` has the same axis values.

Axes are matched by name.  If the other matrix has more axes, the value is a list over all matching
instances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..language.unknowns import ANYTHING, holds_unknown, unknown
from .drafts import Instance, NodeDraft, Scope
from .ids import encode_value
from .plan import SKIP

if TYPE_CHECKING:
    from ..language.recipe import Step

SAME: Final = "same"
_OUTPUT: Final = unknown("text", "list", items=unknown("text"))


class Pair(NamedTuple):
    """Instances of another step with the same axis values.

    `one` is set if at most one can match.
    """

    instances: list[Instance]
    drafts: list[NodeDraft]
    one: bool

    def output(self, name: str) -> Any:
        """Return the path of an output, or a list of paths for several matching instances.

        A list omits skipped instances.  Raises KeyError.
        """
        if self.one:
            return self.instances[0].outputs[name]
        return [each.outputs[name] for each in self.instances if not _is_skipped(each)]


def is_same(path: tuple[str, ...]) -> bool:
    """Return whether a reference has the form `steps.ID.same.NAME`."""
    return path[0] == "steps" and path[2:3] == (SAME,) and len(path) > 3


def shared_axes(step: Step, other: Step) -> list[str]:
    """Return the matrix axes that two steps have in common."""
    own = step.matrix or {}
    return [axis for axis in other.matrix or {} if axis in own]


def find_pair(scope: Scope, id: str, matrix: Mapping[str, Any]) -> Pair | None:
    """Return the instances of step `id` that match the axis values in `matrix`, or None."""
    others = scope.recipe.steps[id].matrix or {}
    axes = [axis for axis in others if axis in matrix]
    by_values = scope.pairs.get((id, tuple(axes)))
    if by_values is None:
        by_values = scope.pairs[id, tuple(axes)] = _group_instances(scope, id, axes)
    return by_values.get(tuple(encode_value(matrix[axis]) for axis in axes))


def _group_instances(scope: Scope, id: str, axes: list[str]) -> dict[tuple[str, ...], Pair]:
    """Group the instances of a step by their values of the given axes."""
    one = len(axes) == len(scope.recipe.steps[id].matrix or {})
    found: dict[tuple[str, ...], Pair] = {}
    for instance in scope.made.get(id, ()):
        values = tuple(encode_value(instance.matrix[axis]) for axis in axes)
        same = found.setdefault(values, Pair([], [], one))
        same.instances.append(instance)
        same.drafts.extend(instance.drafts)
    return found


class SameResults(Mapping[str, Any]):
    """Mapping of the matching instance's outputs for templates, the `steps.ID.same` namespace."""

    def __init__(self, scope: Scope, id: str, matrix: Mapping[str, Any]) -> None:
        self._scope, self._id, self._matrix = scope, id, matrix

    def __getitem__(self, name: str) -> Any:
        if name == "metrics":
            return _Metrics()
        if self._id in self._scope.pending or any(map(holds_unknown, self._matrix.values())):
            return _OUTPUT
        found = find_pair(self._scope, self._id, self._matrix)
        if found is None:
            raise KeyError(name)
        if found.one and _is_skipped(found.instances[0]):
            return None
        return found.output(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._scope.results.get(self._id, ()))

    def __len__(self) -> int:
        return len(self._scope.results.get(self._id, ()))


class _Metrics(Mapping[str, Any]):
    """Mapping of metrics that returns an unknown value for every name."""

    def __getitem__(self, name: str) -> Any:
        return ANYTHING

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_skipped(instance: Instance) -> bool:
    return bool(instance.drafts) and all(draft.flags & SKIP for draft in instance.drafts)
