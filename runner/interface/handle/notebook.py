"""The HTML display of a run in a notebook.  All text of the run is untrusted, so it is escaped and never becomes a link or script."""

from __future__ import annotations

from html import escape

from ...api.values import Status
from ...planning.ids import readable

STEPS = 50


def html(run: Status) -> str:
    """Return an HTML table with the status of a run and its first `STEPS` steps."""
    percent = f" {run.progress.percent:.0f} %" if run.progress.percent is not None else ""
    facts = [
        ("recipe", f"{run.recipe}{f' (preset {run.preset})' if run.preset else ''}"),
        ("state", f"{run.word or run.state}{percent}{f': {run.reason}' if run.reason else ''}"),
        *([("cost", f"${run.cost:.2f}")] if run.cost else []),
        *(
            [("inputs", ", ".join(f"{name}={value}" for name, value in run.inputs.items()))]
            if run.inputs
            else []
        ),
    ]
    rows = "".join(
        f"<tr><th>{name}</th><td colspan=2>{_text(value)}</td></tr>" for name, value in facts
    )
    rows += "".join(
        f"<tr><td>{_text(readable(each.id))}</td><td>{_text(each.state)}</td><td>{_text(each.reason)}</td></tr>"
        for each in run.steps[:STEPS]
    )
    if len(run.steps) > STEPS:
        rows += f"<tr><td colspan=3>… and {len(run.steps) - STEPS} more steps</td></tr>"
    return f"<table><caption>run {_text(run.id)}</caption>{rows}</table>"


def _text(value: str) -> str:
    return escape(value if len(value) <= 300 else f"{value[:299]}…")
