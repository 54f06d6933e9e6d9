"""The ASGI application: routes and error handlers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from typing import Literal, get_args

from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import (
    RequestValidationError,
    ValidationException,
    WebSocketRequestValidationError,
)
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp

from ..api.queue import LOOKED_AT
from ..errors import Problem, RecipeError, did_you_mean
from ..paths import VERSION
from ..storage.records.runs import RunFilter
from . import (
    answers,
    artifacts,
    checkpoints,
    environments,
    live,
    log_search,
    me,
    page,
    platform,
    reasons,
    recipes,
    runs,
    service,
    shares,
    streams,
)
from .answers import ErrorView, Refused
from .asking import BackgroundRequests
from .feed import Feed
from .guard import Guard
from .market import Market
from .openapi import document_of
from .planner import PREVIEWS, Planner
from .room import InRoom, Room
from .tickets import Tickets

AT_ONCE = 8
"""Maximum number of requests that read or plan in threads at once.

Each has a database connection.
"""
WARM_UP = 1.0
"""Seconds after startup at which the planner's fork server is started."""
PREVIEW_SECONDS = 10.0
PREVIEW_MEMORY = 512 << 20
_CODES = {404: "not-found", 405: "no-such-method"}

router = APIRouter(tags=["server"])


class Health(BaseModel):
    status: Literal["ok"]
    version: str | None = None
    gpu: platform.Gpu | None = None
    active_jobs: int | None = None


@router.get(
    "/health",
    summary="Health of the server; details require a token",
    response_model_exclude_unset=True,
)
def health(request: Request, room: InRoom) -> Health:
    if request.scope["state"]["caller"] is None:
        return Health(status="ok")
    with room.borrow_workspace() as ws:
        active = len(ws.store.runs.page(RunFilter(states=["ACTIVE"]), LOOKED_AT))
    return Health(status="ok", version=VERSION, gpu=platform.gpu(), active_jobs=active)


def application(room: Room, hosts: Set[str], feed: Feed | None = None) -> ASGIApp:
    """Return the guarded ASGI application for requests to these `hosts` (with ports)."""
    tickets = Tickets(room.tokens)
    app = routes(room, feed or Feed(room), tickets)
    return Guard(app, room.root, room.tokens, tickets, hosts)


def routes(room: Room, feed: Feed, tickets: Tickets) -> FastAPI:
    """Return the FastAPI application with all routes, for requests that passed the guard."""
    planner = Planner()
    previewer = Planner(PREVIEW_SECONDS, PREVIEW_MEMORY, PREVIEWS)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = AT_ONCE
        # Let the server answer its first requests before it starts the fork server.
        asyncio.get_running_loop().call_later(WARM_UP, planner.start)
        yield
        await feed.close()
        planner.close()
        previewer.close()
        room.close()

    errors: dict[int | str, dict[str, object]] = {
        status: {"model": ErrorView, "description": words}
        for status, words in (
            (400, "The request is malformed."), (401, "The token is missing or unknown."), (403, "The token does not allow it."),
            (404, "The resource does not exist."), (409, "It conflicts with the state of the resource."), (413, "The body is too large."),
            (415, "The body is not application/json."), (422, "The request is invalid; see `problems`."),
            (431, "The URL and headers are too large."), (503, "The workspace cannot be used."),
        )
    }  # fmt: skip
    app = FastAPI(
        title="recipe",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=errors,
    )
    app.openapi = document_of(app)  # type: ignore[method-assign]
    app.state.room, app.state.planner, app.state.previewer = room, planner, previewer
    app.state.feed, app.state.tickets, app.state.asking = feed, tickets, BackgroundRequests()
    app.state.market = Market()
    for part in (
        router,
        recipes.router,
        runs.router,
        reasons.router,
        streams.router,
        log_search.router,
        live.router,
        artifacts.router,
        artifacts.previews,
        checkpoints.router,
        environments.router,
        shares.router,
        service.router,
        me.router,
        platform.router,
        page.router,
    ):
        app.include_router(part)

    async def answer(request: HTTPConnection, error: Exception) -> Response:
        refused = _refusal_of(error, request)
        if refused.status == 405:
            refused.headers = {"allow": ", ".join(_methods(app, request.url.path))}
        text = answers.error_body(
            room.root, refused.code, refused.message, refused.fix, refused.problems
        )
        return Response(text, refused.status, refused.headers, media_type="application/json")

    for kind in (
        Refused,
        RecipeError,
        RequestValidationError,
        WebSocketRequestValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)
    return app


def _methods(app: FastAPI, path: str) -> list[str]:
    """Return the HTTP methods allowed for a path."""
    found: dict[str, object] = {}
    for template, methods in app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            found |= methods
    return sorted(map(str.upper, found)) or ["GET"]


def _refusal_of(error: Exception, request: HTTPConnection) -> Refused:
    """Convert an exception to an error response. Details of unexpected errors are only logged."""
    match error:
        case Refused():
            return error
        case RecipeError():
            return answers.refusal_of(error)
        case ValidationException():
            return _validation_refusal(error, _fields(request))
        case HTTPException():
            words = {404: "there is no such address", 405: "this address has no such method"}.get(
                error.status_code, str(error.detail)
            )
            return Refused(
                error.status_code,
                _CODES.get(error.status_code, "refused"),
                words,
                "see the list of paths in GET /openapi.json",
            )
    return Refused(
        500,
        "internal",
        "an internal error ended the request",
        "see the traceback in the server's log",
    )


def _fields(request: HTTPConnection) -> list[str]:
    """Return the field names accepted in a request's body."""
    kinds = [each.field_info.annotation for each in request.scope["route"].dependant.body_params]
    names = []
    for kind in kinds:
        for model in get_args(kind) or (kind,):  # the models of a union
            if hasattr(model, "model_fields"):
                for name, field in model.model_fields.items():
                    names.append(field.alias or name)
    return names


_WORDS = {
    "Input should be a valid dictionary or object to extract fields from": " must be a JSON object",
    "Input should be a valid dictionary": " must be a JSON object",
    "Input should be a valid list": " must be a list",
    "Input should be a valid string": " must be text",
    "Input should be a valid integer, unable to parse string as an integer": " must be a whole number",
    "Input should be": " must be",
    "Field required": " is missing",
    "Value error, ": "",
}
"""Replacements for pydantic's messages."""


def _validation_refusal(error: ValidationException, fields: Sequence[str]) -> Refused:
    """Return an error response with all validation problems of a request.

    It never repeats the values in the request.

    `fields` are the known field names, for suggestions.
    """
    problems = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"][1:]) or str(each["loc"][0])
        if each["type"] == "extra_forbidden":
            fix = did_you_mean(str(each["loc"][-1])[:80], fields)
            problems.append(Problem("unknown-field", f'unknown field "{place[:200]}"', None, fix))
        else:
            words = each["msg"][:400]
            for theirs, ours in _WORDS.items():
                words = words.replace(theirs, ours)
            if not words.startswith(" "):
                words = f": {words}"
            problems.append(Problem(each["type"].replace("_", "-"), f"{place[:200]}{words}"))
    message = problems[0].message if len(problems) == 1 else f"{len(problems)} problems"
    return Refused(422, "invalid", message, problems[0].fix, problems)
