"""Parse and format sizes, durations and money, and format counts with their noun.

`GB` is 10⁹ bytes and `GiB` is 2³⁰. A number without a unit is refused, because its meaning is
ambiguous.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_SIZES = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "PB": 1000**5,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
    "PiB": 1024**5,
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kKMGTP]?i?B)")
_DURATION = re.compile(
    r"".join(rf"(?:([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?){unit})?" for unit in "dhms")
)
_SECONDS = (86400, 3600, 60, 1)
_MONEY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,4})?) USD")


def size(text: str) -> int:
    """Parse a size such as `24GB`, `16GiB` or `1.5TB`, and return the bytes.

    Raises ValueError with a message for the author.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _SIZES:
        raise ValueError(
            f'"{text}" is not a size; write a number and a unit, such as 24GB or 16GiB'
        )
    return int(Fraction(found[1]) * _SIZES[found[2]])


def duration(text: str) -> float:
    """Parse a duration such as `30s`, `5m`, `1h30m` or `2d`, and return the seconds.

    Raises ValueError with a message for the author.
    """
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        fix = "write numbers with units from large to small, such as 30s, 5m or 1h30m"
        raise ValueError(f'"{text}" is not a duration; {fix}')
    total = Fraction()
    for number, seconds in zip(found.groups(), _SECONDS, strict=True):
        if number:
            total += Fraction(number) * seconds
    if not total:
        raise ValueError(f'"{text}" is not a duration; remove the key instead')
    return float(total)


class Interval(NamedTuple):
    """An interval in seconds or in training steps."""

    seconds: float | None = None
    steps: int | None = None


def interval(text: str) -> Interval:
    """Parse an interval such as `5m` or `500 steps`.

    Raises ValueError with a message for the author.
    """
    number, _, unit = text.partition(" ")
    if unit in ("step", "steps") and number.isdecimal():
        return Interval(steps=int(number))
    return Interval(seconds=duration(text))


def money(text: str) -> float:
    """Parse an amount such as `5 USD` into US dollars.  Raises ValueError with a message."""
    found = _MONEY.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is not an amount; write US dollars, such as 5 USD or 0.50 USD')
    return float(found[1])


def size_text(size: int) -> str:
    """Format `size` bytes as the shortest exact text, such as `24GB`, `16GiB` or `1001B`."""
    for unit, factor in sorted(_SIZES.items(), key=lambda item: -item[1]):
        if unit == "KB":
            continue  # sizes are written with the SI prefix, kB
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return "0B"


def about(size: float) -> str:
    """Format bytes with about three digits, such as `812 B`, `1.5 MB` or `24.0 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            is_whole = unit == "B" or size >= 100
            return f"{size:.0f} {unit}" if is_whole else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} PB"


def count_text(number: float, noun: str, plural: str = "", *, form: str = "") -> str:
    """Format a count with its noun, such as `1 step` or `2 steps`.

    `plural` is the plural of a noun that does not take an s, `form` the format of the number.
    """
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:{form}} {noun}"


def duration_text(seconds: float) -> str:
    """Format seconds as a duration, such as `1h30m` for 5400."""
    rest = round(Fraction(seconds).limit_denominator(10**6), 6)
    parts: list[str] = []
    for unit, factor in zip("dhm", _SECONDS, strict=False):
        whole, rest = divmod(rest, factor)
        if whole:
            parts.append(f"{whole}{unit}")
    if rest or not parts:
        parts.append(f"{float(rest):.6f}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


def money_text(dollars: float) -> str:
    """Format an amount such as `5 USD` or `0.50 USD`, including fractions of a cent."""
    if dollars == int(dollars):
        return f"{int(dollars)} USD"
    text = f"{dollars:.4f}"
    text = text[:-2] if text.endswith("00") else text.rstrip("0")
    return f"{text} USD"
