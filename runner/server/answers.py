"""Error responses: one JSON format for all errors, without local paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field

from ..api.artifacts import NotStored
from ..api.values import whole
from ..errors import Busy, CannotAsk, Infrastructure, Invalid, NotFound, Problem, RecipeError
from ..paths import shipped
from ..storage.records.runs import KEY_IN_USE


class ProblemView(BaseModel):
    """One problem of a request."""

    code: str
    message: str
    fix: str = ""
    input: str = Field(default="", description="The input with the problem, or empty.")


class Fault(BaseModel):
    """The reason for an error response, and a fix."""

    code: str
    message: str
    fix: str = ""
    problems: list[ProblemView] = []


class ErrorView(BaseModel):
    """The body of every error response."""

    error: Fault


class Refused(Exception):
    """An exception that becomes an error response with this HTTP status."""

    def __init__(
        self, status: int, code: str, message: str, fix: str = "", problems: Sequence[Problem] = ()
    ) -> None:
        super().__init__(message)
        self.headers: Mapping[str, str] = {}
        self.status, self.code, self.message, self.fix, self.problems = (
            status,
            code,
            message,
            fix,
            problems,
        )


class NoSuchRun(Refused):
    """Error response for a run that does not exist, or that the token may not access."""

    def __init__(self) -> None:
        super().__init__(404, "not-found", "unknown run", "list the runs with GET /v1/runs")


LONGEST: Final = 1000
"""Maximum number of characters in a message."""
MOST: Final = 100
"""Maximum number of problems in one response."""
_PATH = re.compile(r"(?<![\w:/.~-])(?:~|(?!/v1/))(?:/[\w.@+%=-]+)+/([\w.@+%=-]*)")
STATUS: Final[Mapping[type[RecipeError], tuple[int, str]]] = {
    Invalid: (422, "invalid"),
    NotStored: (404, "not-stored"),
    NotFound: (404, "not-found"),
    Busy: (409, "busy"),
    Infrastructure: (503, "infrastructure"),
}


def hide_local_paths(text: str, root: Path) -> str:
    """Remove local directories from a text for clients.

    Paths in the workspace become relative. Other absolute paths are reduced to their last
    component.
    """
    text = whole(text)
    for folder in (str(root), str(shipped())):
        text = text.replace(f"{folder}/", "").replace(folder, ".")
    return _PATH.sub(lambda found: f"…/{found[1]}", text)


def hide_paths_in_value(value: object, root: Path) -> object:
    """Remove local directories from all texts in a JSON value."""
    if isinstance(value, str):
        return hide_local_paths(value, root)
    if isinstance(value, Mapping):
        return {
            hide_local_paths(str(name), root): hide_paths_in_value(inner, root)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [hide_paths_in_value(inner, root) for inner in value]
    return value


def _short(text: str, root: Path) -> str:
    text = hide_local_paths(text, root)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def error_body(
    root: Path, code: str, message: str, fix: str = "", problems: Iterable[Problem] = ()
) -> bytes:
    """Return the JSON body of an error response."""
    shown = [
        ProblemView(
            code=each.code,
            message=_short(each.message, root),
            fix=_short(each.fix, root),
            input=_short(each.input, root),
        )
        for each in problems
    ]
    fault = Fault(
        code=code, message=_short(message, root), fix=_short(fix, root), problems=shown[:MOST]
    )
    return ErrorView(error=fault).model_dump_json().encode("utf-8", "replace")


def refusal_of(error: RecipeError) -> Refused:
    """Convert a RecipeError to an error response."""
    status, code = _status_of(error)
    if isinstance(error, CannotAsk):
        fix = f"POST /v1/runs/{error.run}/{error.helps}" if error.helps else error.problems[0].fix
        return Refused(409, error.code, error.message, fix)
    if not isinstance(error, Invalid):
        return Refused(status, code, str(error), error.fix)
    if any(problem.code == KEY_IN_USE for problem in error.problems):
        status, code = 409, KEY_IN_USE
    first = error.problems[0] if error.problems else Problem(code, str(error))
    count = len(error.problems)
    message = first.message if count == 1 else f"{count} problems"
    return Refused(status, code, message, first.fix, error.problems)


def _status_of(error: RecipeError) -> tuple[int, str]:
    """Return the HTTP status and the code of an error's kind."""
    for kind, found in STATUS.items():
        if isinstance(error, kind):
            return found
    return 422, "refused"
