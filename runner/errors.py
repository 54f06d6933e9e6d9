"""The intentional errors of `recipe`, each with a message and an exit code.

    RecipeError                     shown without a traceback
    ├── Invalid(problems)      3    bad recipe or inputs; nothing started; has all problems
    │   └── CannotAsk               the state of a run forbids the request
    ├── CannotRun              2    a step could not run
    ├── Busy                   4    another process holds a resource
    ├── Infrastructure         5    driver, disk or store failure
    │   ├── StoreUnavailable        the store or the run database does not answer; no step or run fails
    │   │   └── StoreBusy    4      another process has written to the store for too long; also Busy
    │   ├── NoHost                  no host is available for a step
    │   ├── Unusable                unusable workspace or store (read-only, newer format, damaged)
    │   └── Corrupt                 stored bytes do not match their digest
    └── NotFound               3    no such run, step or recipe

A failed step is no exception: the run's summary has its failure, and the exit code is 1.
`drivers.base.DriverError` is the only other base class. `runner.execution` converts its errors.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, NamedTuple


class Location(NamedTuple):
    """A position in a file: line and column (from 1, in characters), the length to underline, and
    the text of the line.
    """

    path: str
    line: int
    column: int
    length: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


class Problem(NamedTuple):
    """A problem: a stable code (`unknown-key`), a location, a message, and a fix.

    `input` is the name of the input concerned, if any.
    """

    code: str
    message: str
    where: Location | None = None
    fix: str = ""
    severity: str = "error"
    input: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{head}{self.severity}: {self.message}{fix}"


class RecipeError(Exception):
    """Something went wrong that the person at the keyboard can act on."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str = "", *, fix: str = "") -> None:
        super().__init__(message or type(self).__doc__)
        self.fix = fix


class Invalid(RecipeError):
    """The recipe or its inputs are wrong."""

    exit_code = 3

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


HELPS: Final[Mapping[str, str]] = {
    "final": "retry",
    "already": "resume",
    "not-paused": "pause",
    "not-final": "cancel",
}
"""For each CannotAsk code, the request that the run would accept."""
NOT_NOTED: Final = "not-noted"
"""CannotAsk code for a run of an early version that did not store its request."""


class CannotAsk(Invalid):
    """The state of a run forbids this request.  The fix is worded for the command line; other fronts word it from `helps`."""

    def __init__(self, code: str, message: str, run: str, fix: str = "") -> None:
        self.code, self.message, self.run = code, message, run
        self.helps = HELPS.get(code, "")
        if not fix and self.helps:
            fix = f"run `recipe {self.helps} {run}`"
        super().__init__([Problem(code, message, fix=fix)])


class CannotRun(RecipeError):
    """A step could not be run."""

    exit_code = 2


class Busy(RecipeError):
    """Somebody else is using this."""

    exit_code = 4


class Infrastructure(RecipeError):
    """The machinery below failed."""

    exit_code = 5


class StoreUnavailable(Infrastructure):
    """The store or the run database does not answer now; nothing is wrong with what was asked, and no run or step fails for it."""


class StoreBusy(Busy, StoreUnavailable):
    """Another process has been writing to the store for too long."""


class DiskFull(Infrastructure):
    """A disk has no room, here or on a host."""


class NoHost(Infrastructure):
    """No host can be had for the steps of a run."""


class Unusable(Infrastructure):
    """The workspace or its store cannot be used."""


class Corrupt(Infrastructure):
    """Stored bytes are not what their name says."""


class NotFound(RecipeError):
    """There is no such thing."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "x"?` for the known word nearest to `word`, or an empty string."""
    near = nearest(word, known)
    return f'did you mean "{near}"?' if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` may be a misspelling of, or an empty string."""
    from difflib import get_close_matches

    candidates = list(known)
    found = get_close_matches(word, candidates, n=3, cutoff=0.6)
    return next((each for each in found if _are_similar(word, each)), "")


def _are_similar(word: str, other: str) -> bool:
    """Return True if two words are similar apart from common parts: `steps.trian` and `steps.e` are
    not, and neither are `./nope.yaml` and `./p2.yaml`.
    """
    from difflib import SequenceMatcher

    separators = re.compile(r"[./@\[\]]+")
    ours, theirs = separators.split(word), separators.split(other)
    _drop_common_parts(ours, theirs, 0)
    _drop_common_parts(ours, theirs, -1)
    left, right = ".".join(ours), ".".join(theirs)
    if not left or not right:  # one word is an extension of the other
        return True
    return SequenceMatcher(None, left, right).ratio() >= 0.6


def _drop_common_parts(ours: list[str], theirs: list[str], end: int) -> None:
    """Remove the equal parts at one end of both lists: 0 is the start, -1 the end."""
    while ours and theirs and ours[end] == theirs[end]:
        del ours[end], theirs[end]
