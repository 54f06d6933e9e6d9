"""A step that ran out of memory is tried again under smaller values of the inputs that it names.

`retries: {oom: {micro_batch: "/2"}}`. The result is remembered under the key that ran, and with a
note under the one that was asked for: else every later run would run out of memory again.
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


def divided(value: object, by: int) -> int | None:
    """The greatest divisor of `value` that is at most a `by`th of it.  None: there is none.

    A batch has to stay a whole number of the smaller ones.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        return None
    for divisor in range(max(1, value // by), 0, -1):
        if value % divisor == 0:
            return divisor
    return None


def count_out_of_memory(attempts: Iterable[AttemptRow]) -> Counter[str]:
    """How many attempts of each step ran out of memory."""
    return Counter(
        each.step for each in attempts if (each.outcome, each.reason) == ("failed", "oom")
    )


class SmallerInputs:
    """The steps of one run that ran out of memory, and the inputs that were divided for them."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        earlier: Mapping[str, int],
    ) -> None:
        """`earlier`: how often each step ran out of memory under earlier workers of the run."""
        self._ws, self._steps, self._commits = ws, steps, commits
        self._earlier = Counter(earlier)
        self._values: dict[str, dict[str, int]] = {}  # step -> input -> its value by now
        self._asked: dict[str, Digest | None] = {}  # step -> the key that it had at first

    def are_used_by(self, id: str) -> bool:
        """Whether a step is another one than it was asked to be."""
        return id in self._asked

    def take_earlier(self, id: str) -> int:
        """How often a step ran out of memory under earlier workers; 0 when asked again."""
        return self._earlier.pop(id, 0)

    def divide(self, id: str) -> str:
        """Give a step smaller inputs from now on.  Returns them in words.

        Empty: they can be no smaller, or the step names none.
        """
        spec = self._steps.spec(id)
        before = self._values.get(id, {})
        known = {**spec.names.inputs, **before}
        smaller: dict[str, int] = {}
        for name, by in spec.options.oom.items():
            value = divided(known.get(name), by)
            if value is not None:
                smaller[name] = value
        if not smaller or not self._apply(id, {**before, **smaller}):
            return ""
        return _words_of(smaller)

    def note_result(self, id: str, trace: Trace) -> None:
        """Remember what a step made with smaller inputs as the result of what was asked for, too."""
        asked = self._asked.get(id)
        if asked is None or asked == trace.key:
            return
        inputs = _words_of(self._values[id])
        words = f"what was asked for, which took too much memory: it was made with {inputs}"
        self._commits.stand_for(asked, trace, {"stands_for": words})

    def _apply(self, id: str, values: dict[str, int]) -> bool:
        """Put the step that these inputs make into the plan.  False: there is no other one."""
        survey, plan, n = self._steps.survey, self._steps.plan, self._steps.number(id)
        request = replace(survey.request, inputs={**survey.request.inputs, **values})
        other = None
        with contextlib.suppress(RecipeError):  # the recipe does not take so small a value
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
