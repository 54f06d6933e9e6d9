"""The HTML display of a run in a notebook.

All text of the run is untrusted, so it is escaped and never becomes a link or script.
"""

from __future__ import annotations

from html import escape

from ...api.values import Status
from ...planning.ids import readable

STEPS = 50


def html(run: Status) -> str:
    """Return an HTML table with the status of a run and its first `STEPS` steps."""
    rows = []
    for name, value in _facts(run):
        rows.append(f"<tr><th>{name}</th><td colspan=2>{_text(value)}</td></tr>")
    for each in run.steps[:STEPS]:
        texts = map(_text, (readable(each.id), each.state, each.reason))
        cells = "".join(f"<td>{text}</td>" for text in texts)
        rows.append(f"<tr>{cells}</tr>")
    if len(run.steps) > STEPS:
        rows.append(f"<tr><td colspan=3>… and {len(run.steps) - STEPS} more steps</td></tr>")
    return f"<table><caption>run {_text(run.id)}</caption>{''.join(rows)}</table>"


def _facts(run: Status) -> list[tuple[str, str]]:
    """Return the recipe, state, cost and inputs of a run, as label and text."""
    preset = f" (preset {run.preset})" if run.preset else ""
    percent = f" {run.progress.percent:.0f} %" if run.progress.percent is not None else ""
    reason = f": {run.reason}" if run.reason else ""
    facts = [
        ("recipe", f"{run.recipe}{preset}"),
        ("state", f"{run.word or run.state}{percent}{reason}"),
    ]
    if run.cost:
        facts.append(("cost", f"${run.cost:.2f}"))
    if run.inputs:
        inputs = ", ".join(f"{name}={value}" for name, value in run.inputs.items())
        facts.append(("inputs", inputs))
    return facts


def _text(value: str) -> str:
    if len(value) > 300:
        value = f"{value[:299]}…"
    return escape(value)
