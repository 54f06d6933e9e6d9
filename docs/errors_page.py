"""Write the tables of docs/errors.md: causes of failed steps, and what `recipe validate` says of the mistakes in fixtures/recipes/problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from runner.language import library
from runner.planning import causes

_LINE: Final = re.compile(
    r"^\S+?:\d+:\d+: \w+: (?P<message>.*?)(?: \((?P<fix>[^()]*(?:\([^()]*\)[^()]*)*)\))?$"
)


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    known = [f"| `{cause}` | {_cell(remedy)} |" for cause, remedy in causes.REMEDIES.items()]
    for name, lines in (
        ("causes", ["| cause | fix |", "|---|---|", *known]),
        ("errors", ["| message | fix |", "|---|---|", *_rows()]),
    ):
        before, begin, rest = text.partition(f"<!-- {name}:begin -->\n")
        text = (
            before
            + begin
            + "\n".join(lines)
            + f"\n<!-- {name}:end -->"
            + rest.partition(f"<!-- {name}:end -->")[2]
        )
    return text


def _rows() -> Iterator[str]:
    """Each message once, in the order of the files, with its fix."""
    seen = set()
    for file in sorted((library.fixtures() / "recipes" / "problems").glob("*.txt")):
        for line in file.read_text("utf-8").splitlines():
            found = _LINE.match(line)
            assert found, line
            if found["message"] not in seen:
                seen.add(found["message"])
                yield f"| {_cell(found['message'])} | {_cell(found['fix'] or '')} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
