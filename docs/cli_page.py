"""Write the reference of the verbs as Markdown, from their parsers."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from typing import Final

from runner.interface.cli.verbs import VERBS, parser_of

BEGIN: Final = "<!-- verbs:begin -->"
END: Final = "<!-- verbs:end -->"
EVERYWHERE: Final = ("help", "workspace", "quiet", "verbose")  # flags of every verb, described once


def markdown() -> str:
    """One section for each verb: what it does, then its words and flags.  What several verbs have alike is described once."""
    lines = [
        "### Flags of every verb",
        "",
        *_table(_row(action) for action in _actions("list") if action.dest in EVERYWHERE),
    ]
    rows = {
        verb: {_row(action): action for action in _actions(verb) if action.dest not in EVERYWHERE}
        for verb in VERBS
    }
    counts = Counter(row for own in rows.values() for row in own)
    shared = sorted(row for row, count in counts.items() if count > 1)
    lines += ["", "### Flags of several verbs", "", *_table(shared)]
    common = {
        verb: {row: _spelling(action) for row, action in own.items() if row in shared}
        for verb, own in rows.items()
    }
    listed: list[str] = []  # verbs whose flags are all named, so that another one may refer to them
    for verb, (_, says) in VERBS.items():
        lines += ["", f"### recipe {verb}", "", f"{says[:1].upper()}{says[1:]}."]
        if own := [row for row in rows[verb] if row not in shared]:
            lines += ["", *_table(own)]
        if names := common[verb]:
            alike = [
                each
                for each in listed
                if common[each].items() <= names.items() and len(names) <= len(common[each]) + 3
            ]
            if best := max(alike, key=lambda each: len(common[each]), default=""):
                more = [name for row, name in names.items() if row not in common[best]]
                text = " · ".join([f"those of [recipe {best}](#recipe-{best})", *more])
            else:
                text = " · ".join(names.values())
                listed += [verb] * (len(names) > 5)
            lines += [
                "",
                f"{'Also' if own else 'It has'} [of several verbs](#flags-of-several-verbs): {text}",
            ]
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def _actions(verb: str) -> list[argparse.Action]:
    parser, _ = parser_of(verb)
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _table(rows: Iterable[str]) -> list[str]:
    return ["| flag | meaning |", "|---|---|", *rows]


def _row(action: argparse.Action) -> str:
    return f"| {_cell(_spelling(action))} | {_cell((action.help or '').strip())} |"


def _spelling(action: argparse.Action) -> str:
    value = (
        ""
        if action.nargs == 0
        else "|".join(map(str, action.choices))
        if action.choices
        else str(action.metavar or action.dest).upper()
    )
    if not action.option_strings:
        name = (
            str(action.metavar)
            if action.metavar
            else value
            if action.choices
            else action.dest.upper()
        )
        return f"`{name}`" + (" …" if action.nargs in ("*", "+") else "")
    return ", ".join(
        f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
