"""Dependencies of routes: the served workspace, the caller and permission checks."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends
from fastapi.security import HTTPBearer
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Strict
from starlette.requests import HTTPConnection

from ..errors import NotFound, Problem, did_you_mean
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from .answers import NoSuchRun, Refused
from .tokens import Scope, Token, Tokens

_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


class ServedWorkspace:
    """The directory and environment of a served workspace, also usable in child processes.

    `for_owner` is set for `recipe ui`, which listens on loopback and provides all recipes in the
    directory.
    """

    def __init__(self, root: Path, environ: Mapping[str, str], *, for_owner: bool = False) -> None:
        self.root, self.environ = Path(os.path.abspath(root)), environ
        self.for_owner = for_owner

    def open_workspace(self) -> Workspace:
        """Open the workspace for planning. The caller must close it."""
        return Workspace.open(self.root, environ=self.environ)


class Room(ServedWorkspace):
    """The workspace of a server, with its access tokens. Thread-safe."""

    def __init__(
        self, root: Path, environ: Mapping[str, str], tokens: Tokens, *, for_owner: bool = False
    ) -> None:
        super().__init__(root, environ, for_owner=for_owner)
        self.tokens = tokens
        self._idle: deque[Workspace] = deque()

    @contextmanager
    def borrow_workspace(self) -> Iterator[Workspace]:
        """Provide an open workspace for reading runs.

        It is reused by later requests, and not used for planning.
        """
        try:
            ws = self._idle.pop()
        except IndexError:
            ws = self.open_workspace()
        try:
            yield ws
        except (Refused, GeneratorExit):
            self._idle.append(ws)
            raise
        except BaseException:
            ws.close()
            raise
        self._idle.append(ws)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


async def _get_room(request: HTTPConnection) -> Room:
    return cast("Room", request.app.state.room)


def caller_of(request: HTTPConnection) -> Token:
    """Return the access token of a request. Raises Refused without a token."""
    caller = request.scope["state"]["caller"]
    if caller is None:
        raise Refused(
            401,
            "unauthorized",
            "a token is required",
            "send the header `Authorization: Bearer TOKEN`",
        )
    return cast("Token", caller)


async def _get_caller(request: HTTPConnection) -> Token:
    return caller_of(request)


def _check_query(request: HTTPConnection) -> None:
    """Raise Refused for unknown or repeated query parameters.

    A misspelled filter would otherwise return all runs.
    """
    if not request.url.path.startswith("/v1/"):
        return
    known = {
        each.alias: each.field_info.annotation
        for each in request.scope["route"].dependant.query_params
    }
    problems = []
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            problems.append(
                Problem(
                    "unknown-parameter",
                    f'unknown parameter "{name[:80]}"',
                    None,
                    did_you_mean(name[:80], known),
                )
            )
        elif times > 1 and "list" not in str(known[name]):
            problems.append(Problem("bad-value", f'the parameter "{name}" appears twice'))
    if problems:
        message = problems[0].message if len(problems) == 1 else f"{len(problems)} problems"
        raise Refused(422, "invalid", message, problems[0].fix, problems)


class RequiresScope:
    """Dependency that checks whether the caller's token has a scope.

    A token of one run may only use paths with this run, and with `any_run` also paths that hide
    other runs.
    """

    def __init__(self, scope: Scope, *, run: bool = False, any_run: bool = False) -> None:
        self.scope, self.run, self.any_run = scope, run, any_run

    async def __call__(self, request: HTTPConnection) -> None:
        # Async like all dependencies, because FastAPI runs plain functions in a thread.
        _check_query(request)
        caller = caller_of(request)
        is_other = not self.run or request.path_params.get("run") != caller.run
        if caller.run and is_other and not self.any_run:
            if self.run:
                raise NoSuchRun()
            raise Refused(
                403,
                "forbidden",
                f"this token gives access only to run {caller.run}",
                f"GET /v1/runs/{caller.run}",
            )
        if not caller.allows(self.scope):
            raise Refused(
                403,
                "forbidden",
                f"this request requires the scope `{self.scope}`, but the token has `{caller.scope}`",
                "create another token with POST /v1/tokens",
            )


InRoom = Annotated[Room, Depends(_get_room)]
Caller = Annotated[Token, Depends(_get_caller)]
BEARER = Depends(
    HTTPBearer(
        auto_error=False,
        description="A token from the first `recipe serve`, or from POST /v1/tokens.",
    )
)
READ = [BEARER, Depends(RequiresScope("read"))]
OPERATE = [BEARER, Depends(RequiresScope("operate"))]
ADMIN = [BEARER, Depends(RequiresScope("admin"))]
READ_ANY = [BEARER, Depends(RequiresScope("read", any_run=True))]
READ_RUN = [BEARER, Depends(RequiresScope("read", run=True))]
OPERATE_RUN = [BEARER, Depends(RequiresScope("operate", run=True))]


class RequestBody(BaseModel):
    """A request body with these fields only, without type conversion."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Nothing(RequestBody):
    """An empty body: {}, or no body."""


def _rfc_3339(value: object) -> object:
    if not isinstance(value, str) or not _MOMENT.fullmatch(value):
        raise ValueError("a time must be RFC 3339 text, for example 2026-12-01T20:00:00Z")
    return value


Moment = Annotated[AwareDatetime, Strict(False), BeforeValidator(_rfc_3339)]
"""A time in a request."""


def integer(value: object) -> object:
    """Convert a whole float such as 1.0 to int, because JSON Schema accepts it as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(integer)]
"""An integer in a request, also written as 1.0."""


def run_of(ws: Workspace, id: str) -> RunRow:
    """Return a run of this workspace by ID. Raises Refused."""
    try:
        row = ws.store.runs.get(id)
    except NotFound:
        raise NoSuchRun() from None
    if row.workspace != str(ws.root):
        raise NoSuchRun()
    return row
