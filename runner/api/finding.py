"""Find a run by its name, its ID or a part of its ID."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..errors import NotFound, did_you_mean
from ..storage.records.runs import RunFilter, RunRow

if TYPE_CHECKING:
    from ..storage.records.store import Store

NEAR: Final = 1000
"""Number of latest runs that are searched for similar IDs."""
SHOWN: Final = 3
"""Number of matching runs that an error message names."""


def _find_last(store: Store, number: int, word: str) -> RunRow:
    """Return the latest run, or the run `number` before it. Raises NotFound."""
    rows = store.runs.latest(last=number + 1)
    if number >= len(rows):
        raise NotFound(
            f"{word}: the oldest run in this workspace is last~{len(rows) - 1}",
            fix="list the runs with `recipe runs`",
        )
    return rows[number]


def _find_matches(store: Store, word: str) -> list[RunRow]:
    """Return the latest run with this name, or else the runs with this part of an ID."""
    if not word:
        return []  # every ID contains the empty text
    named = store.runs.page(RunFilter(name=word), 1)
    return named or store.runs.page(RunFilter(part=word), SHOWN + 1)


def find_run(store: Store, word: str) -> RunRow:
    """Find a run by name, ID or unique part of an ID; `last~1` is the second latest run.

    Raises NotFound.
    """
    runs = store.runs
    if not runs.latest(last=1):
        raise NotFound(
            "no runs in this workspace",
            fix="start a run with `recipe run`, or select another workspace with `-C`",
        )
    name, tilde, back = word.partition("~")
    counts_back = back.isdecimal() or not tilde
    if name == "last" and counts_back:
        number = int(back) if tilde else 0
        return _find_last(store, number, word)
    found = _find_matches(store, word)
    if len(found) == 1:
        return found[0]
    if found:
        shown = [row.id for row in found[:SHOWN]]
        if len(found) > SHOWN:
            shown.append("…")
        raise NotFound(
            f'"{word}" matches several runs: {", ".join(shown)}',
            fix="use a longer part of the run ID",
        )
    near = [row.id for row in runs.latest(last=NEAR)]
    raise NotFound(
        f'no run "{word}"',
        fix=did_you_mean(word, [*near, "last"]) or "list the runs with `recipe runs`",
    )
