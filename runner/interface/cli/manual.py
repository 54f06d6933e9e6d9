"""Write the reference of the verbs, as Markdown, from their parsers.

python -m runner.interface.cli.manual docs/cli.md       # writes what stands between the markers anew
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from .parser import VERBS, parser_of

BEGIN: Final = "<!-- verbs:begin -->"
END: Final = "<!-- verbs:end -->"
EVERYWHERE: Final = ("help", "workspace", "quiet", "verbose")  # flags of every verb, described once


def markdown() -> str:
    """One section for each verb: what it does, then its words and flags."""
    lines = ["### Flags of every verb", "", *_rows([action for action in _actions("list") if action.dest in EVERYWHERE])]
    for verb, (_, says) in VERBS.items():
        own = [action for action in _actions(verb) if action.dest not in EVERYWHERE]
        lines += ["", f"### recipe {verb}", "", f"{says[:1].upper()}{says[1:]}.", *(["", *_rows(own)] if own else [])]
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def _actions(verb: str) -> list[argparse.Action]:
    parser, _ = parser_of(verb)
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _rows(actions: Sequence[argparse.Action]) -> Iterator[str]:
    yield "| flag | meaning |"
    yield "|---|---|"
    for action in actions:
        yield f"| {_cell(_spelling(action))} | {_cell((action.help or '').strip())} |"


def _spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest).upper()
    if not action.option_strings:
        name = str(action.metavar) if action.metavar else value if action.choices else action.dest.upper()
        return f"`{name}`" + (" …" if action.nargs in ("*", "+") else "")
    return ", ".join(f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(refreshed(file.read_text("utf-8")), "utf-8")
