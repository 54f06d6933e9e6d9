"""Write what each request does to a run as Markdown, from the table that the contract suite holds all fronts to."""

from __future__ import annotations

from typing import Final

from runner.errors import HELPS
from tests.contract.api.outcomes import STANDINGS, VERBS, Asked, Done, NewRun, Outcome, Stays

BEGIN: Final = "<!-- requests:begin -->"
END: Final = "<!-- requests:end -->"


def refreshed(text: str) -> str:
    """Return `text` with the table between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    lines = [
        f"| the run is | {' | '.join(f'`{verb}`' for verb in VERBS)} |",
        f"|---|{'---|' * len(VERBS)}",
    ]
    for standing in STANDINGS.values():
        cells = [_cell(standing.outcomes[verb]) for verb in VERBS]
        lines.append(f"| {standing.words} | {' | '.join(cells)} |")
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{rest.partition(END)[2]}"])


def _cell(outcome: Outcome) -> str:
    match outcome:
        case Done(state):
            return state
        case Asked("ACTIVE"):
            return "request stored, then the run continues"
        case Asked(state):
            return f"request stored, then {state}"
        case Stays():
            return "only the priority changes"
        case NewRun():
            return "a new run, QUEUED"
    return f"refused: `{outcome.code}` (use `{HELPS[outcome.code]}`)"
