"""Words that the project has replaced by the field's own, and says no more: `make lint` finds them.

python -m docs.words [FILE…]       # FILE:LINE: word -> better word; ends with 1 where it finds one (default: every file of the checkout)
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPLACED = {
    r"reckon\w*": "estimate, compute",
    r"whoever": "name the one: the caller, the reader, the next writer",
    r"lies": "is",
    r"(?:go|goes|going|went|gone) on from": "resume from",
    r"told": "shown, printed, reported, sent, recorded, given",
    r"nobody(?![\"@/])": "no client, no step, unused, unknown, unreferenced",  # but a login of that name
}
"""What is said no more, as regular expressions of whole words, and what is said instead."""

EXCEPT = (
    "CHANGELOG.md",
    "docs/words.py",
    "tests/test_docs.py",
    "fixtures/datasets/",
    "fixtures/eval-tasks/LICENSE",
    "fixtures/python-topics/",
    "fixtures/tiny-",
    "fixtures/shell-contexts.txt",
)
"""Files, and beginnings of paths, that may have them: the table of old words, this list, and texts that are not ours."""

TESTS_MAY = ("nobody", "told")
"""Words that tests may have still."""

NAMES_MAY = ("told",)
"""Words that are names in Python still."""

_WORDS = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join(f"({words})" for words in REPLACED) + r")(?![A-Za-z])",
    re.IGNORECASE,
)


def found(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, word, better) of each replaced word; `_` separates words, as in the names of tests."""
    for match in _WORDS.finditer(text):
        yield (
            text.count("\n", 0, match.start()) + 1,
            match[0],
            list(REPLACED.values())[(match.lastindex or 1) - 1],
        )


def main(names: list[str]) -> int:
    tracked = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wrong = 0
    for name in [
        name for name in names or tracked if not name.startswith(EXCEPT) and Path(name).is_file()
    ]:
        for line, word, better in found(Path(name).read_bytes().decode("utf-8", "ignore")):
            if name.startswith("tests/") and word.lower() in TESTS_MAY:
                continue
            if name.endswith(".py") and word.lower() in NAMES_MAY:
                continue
            print(f"{name}:{line}: {word} -> {better}")
            wrong += 1
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
