"""Write the reference of the commands as Markdown, from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Final

from runner.interface.cli.flags import GLOBAL
from runner.interface.cli.verbs import GROUPS, VERBS, parser_of

BEGIN: Final = "<!-- verbs:begin -->"
END: Final = "<!-- verbs:end -->"
SHARED: Final = ("run", "status")
"""Verbs that describe options for others, which refer to their sections instead of repeating them."""


def markdown() -> str:
    """Return one section for each verb: its usage, description and options by subject."""
    lines = _contents()
    for verb in VERBS:
        parser, _ = parser_of(verb)
        own = _sections(parser)
        del own[GLOBAL]
        owner, shared = _owner(verb, own)
        lines += ["", f"### recipe {verb}", "", "```text", str(parser.usage), "```", ""]
        lines += [str(parser.description)]
        for title, rows in own.items():
            if described := [row for row in rows if row not in shared]:
                lines += ["", f"**{title}**", "", *_table(described)]
        if owner:
            names = " · ".join(row.split(" | ")[0].removeprefix("| ") for row in shared)
            names = names.replace("\\|", "|")
            lines += [
                "",
                f"`recipe {verb}` also takes the following options of [recipe {owner}](#recipe-{owner}): {names}",
            ]
    parser, _ = parser_of("list")
    return "\n".join([*lines, "", f"### {GLOBAL}", "", *_table(_sections(parser)[GLOBAL])])


def refreshed(text: str) -> str:
    """Return `text` with the part between its markers written again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def _contents() -> list[str]:
    """Return the verbs by task, as `recipe --help` shows them."""
    lines = []
    for title, verbs in GROUPS.items():
        links = [f"| [`{verb}`](#recipe-{verb}) | {says} |" for verb, (_, says) in verbs.items()]
        lines += ["", f"**{title}**", "", "| command | purpose |", "|---|---|", *links]
    return lines[1:]


def _sections(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return a table row for each option of a parser, by subject."""
    found = {
        str(group.title): [
            _row(action) for action in group._group_actions if action.help != argparse.SUPPRESS
        ]
        for group in parser._action_groups
    }
    return {title: rows for title, rows in found.items() if rows}


def _owner(verb: str, own: dict[str, list[str]]) -> tuple[str, list[str]]:
    """Return the verb that describes most of these options, and the rows it describes; nothing for up to three."""
    owner, shared = "", []
    rows = [row for section in own.values() for row in section]
    for other in SHARED if verb not in SHARED else ():
        described = {row for section in _sections(parser_of(other)[0]).values() for row in section}
        common = [row for row in rows if row in described]
        if len(common) > max(3, len(shared)):
            owner, shared = other, common
    return owner, shared


def _table(rows: Iterable[str]) -> list[str]:
    return ["| option | meaning |", "|---|---|", *rows]


def _row(action: argparse.Action) -> str:
    return f"| {_cell(_spelling(action))} | {_cell((action.help or '').strip())} |"


def _spelling(action: argparse.Action) -> str:
    """Return how an option is typed, in Markdown."""
    value = str(action.metavar or action.dest).upper()
    if action.nargs == 0:
        value = ""
    elif action.choices:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        name = str(action.metavar or value)
        return f"`{name}`" + (" …" if action.nargs in ("*", "+") else "")
    return ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
