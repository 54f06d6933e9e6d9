"""Retries with smaller inputs after a step runs out of memory.

An example is `retries: {oom: {micro_batch: "/2"}}`. The result is cached under the key that ran
and, with a note, under the requested key. Otherwise every later run would run out of memory again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...digest import Digest
from ...errors import RecipeError
from ...storage.records.index import Trace
from ...storage.records.runs import AttemptRow
from ...storage.workspace import Workspace
from ...survey.plan_cache import compile_request
from .commit import GroupCommit
from .run_plan import RunPlan


def divide_value(value: object, by: int) -> int | None:
    """Return the greatest divisor of `value` that is at most `value / by`, or None.

    The result is a divisor so that a batch remains a whole number of smaller batches.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        return None
    for divisor in range(max(1, value // by), 0, -1):
        if value % divisor == 0:
            return divisor
    return None


def count_out_of_memory(attempts: Iterable[AttemptRow]) -> Counter[str]:
    """Count the attempts of each step that ran out of memory."""
    return Counter(
        each.step for each in attempts if (each.outcome, each.reason) == ("failed", "oom")
    )


class SmallerInputs:
    """Reduced inputs of a run's steps that ran out of memory."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        earlier: Mapping[str, int],
    ) -> None:
        """Start from `earlier`, the out-of-memory failures by step under earlier workers."""
        self._ws, self._steps, self._commits = ws, steps, commits
        self._earlier = Counter(earlier)
        self._values: dict[str, dict[str, int]] = {}  # step -> input -> present value
        self._asked: dict[str, Digest | None] = {}  # step -> requested key

    def are_used_by(self, id: str) -> bool:
        """Return True if the step runs with smaller inputs than requested."""
        return id in self._asked

    def take_earlier(self, id: str) -> int:
        """Return a step's out-of-memory failures under earlier workers, and reset the count."""
        return self._earlier.pop(id, 0)

    def divide(self, id: str) -> str:
        """Reduce the inputs of a step after an out-of-memory failure, and describe the new values.

        Returns "" if the step names no inputs to reduce, or if they cannot be smaller.
        """
        spec = self._steps.spec(id)
        before = self._values.get(id, {})
        known = {**spec.names.inputs, **before}
        smaller: dict[str, int] = {}
        for name, by in spec.options.oom.items():
            value = divide_value(known.get(name), by)
            if value is not None:
                smaller[name] = value
        if not smaller or not self._apply(id, {**before, **smaller}):
            return ""
        return _words_of(smaller)

    def note_result(self, id: str, trace: Trace) -> None:
        """Cache the result of a step with smaller inputs under the requested cache key, too."""
        asked = self._asked.get(id)
        if asked is None or asked == trace.key:
            return
        inputs = _words_of(self._values[id])
        words = f"out of memory with the requested inputs; the step ran with {inputs}"
        self._commits.stand_for(asked, trace, {"stands_for": words})

    def _apply(self, id: str, values: dict[str, int]) -> bool:
        """Replace a step in the plan by the same step with other input values.

        Return False if the recipe rejects the values, or if the step does not change.
        """
        survey, plan, n = self._steps.survey, self._steps.plan, self._steps.number(id)
        request = replace(survey.request, inputs={**survey.request.inputs, **values})
        other = None
        with contextlib.suppress(RecipeError):  # the recipe rejects so small a value
            other = compile_request(self._ws, survey.source, request, survey.globs)
        if (
            other is None
            or other.index != plan.index
            or other.nodes[n].author == plan.nodes[n].author
        ):
            return False
        self._asked.setdefault(id, self._steps.verdicts[id].key)
        self._values[id] = values
        plan.swap(n, other.nodes[n], other.specs()[n])
        return True


def _words_of(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
