"""A step that ran out of memory is tried again under smaller values of the inputs that it names: `retries: {oom: {micro_batch: "/2"}}`.

The result is remembered under the key that ran, and with a note under the one that was asked for: else every later run would run out of memory again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from ...errors import RecipeError
from ...storage.records.index import Trace
from ...survey.plan_cache import compile_request
from .work import Work


def divided(value: object, by: int) -> int | None:
    """The greatest divisor of `value` that is at most a `by`th of it, for a batch has to stay a whole number of these.  None: there is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        return None
    return next((each for each in range(max(1, value // by), 0, -1) if value % each == 0), None)


def smaller(work: Work, id: str) -> str:
    """Have a step that ran out of memory be another one from now on; in words, how.  Empty: it can be no smaller, or says nothing about it."""
    n = work.plan.index[id]
    spec = work.plan.specs()[n]
    known = {**spec.names.inputs, **work.smaller.get(id, {})}
    given = {
        name: value
        for name, by in spec.oom.items()
        if (value := divided(known.get(name), by)) is not None
    }
    if not given or not _adjust(work, id, {**work.smaller.get(id, {}), **given}):
        return ""
    return _words(given)


def stand_for(work: Work, id: str, trace: Trace) -> None:
    """Remember what was made under divided inputs as the result of what was asked for, too."""
    asked = work.asked.get(id)
    if asked is not None and asked != trace.key:
        words = f"what was asked for, which took too much memory: it was made with {_words(work.smaller[id])}"
        work.commits.stand_for(asked, trace, {"stands_for": words})


def _adjust(work: Work, id: str, given: Mapping[str, int]) -> bool:
    n = work.plan.index[id]
    request = replace(work.survey.request, inputs={**work.survey.request.inputs, **given})
    other = None
    with contextlib.suppress(RecipeError):  # the recipe does not take so small a value
        other = compile_request(work.ws, work.survey.source, request, work.survey.globs)
    if (
        other is None
        or other.index != work.plan.index
        or other.nodes[n].author == work.plan.nodes[n].author
    ):
        return False
    work.asked.setdefault(id, work.verdicts[id].key)
    work.smaller[id] = dict(given)
    work.plan.swap(n, other.nodes[n], other.specs()[n])
    return True


def _words(given: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in given.items())
