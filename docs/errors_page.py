"""Write the table of docs/errors.md from fixtures/recipes/problems: what `recipe validate` says of recipes with a mistake, and its fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from runner.language import library

BEGIN: Final = "<!-- errors:begin -->"
END: Final = "<!-- errors:end -->"
_LINE: Final = re.compile(r"^\S+?:\d+:\d+: \w+: (?P<message>.*?)(?: \((?P<fix>[^()]*(?:\([^()]*\)[^()]*)*)\))?$")


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(["| message | fix |", "|---|---|", *_rows()]) + f"\n{END}{rest.partition(END)[2]}"


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
