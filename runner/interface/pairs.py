"""Parse command-line words of the form NAME=VALUE."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Invalid, Problem


def filters(words: Sequence[str]) -> dict[str, str]:
    """Parse the filters of `--where`.  Raises Invalid."""
    return parse_pairs(
        words, 'invalid --where "{}": expected NAME=VALUE', "for example `--where gpu=4090`"
    )


def parse_pairs(
    words: Sequence[str],
    wrong: str = '"{}" is not INPUT=VALUE',
    fix: str = "write inputs as name=value",
) -> dict[str, str]:
    """Parse NAME=VALUE words into a mapping.

    Raises Invalid with a problem for each invalid word.
    """
    bad = [word for word in words if "=" not in word]
    if bad:
        raise Invalid(Problem("bad-input", wrong.format(word), fix=fix) for word in bad)
    return dict(word.split("=", 1) for word in words)
