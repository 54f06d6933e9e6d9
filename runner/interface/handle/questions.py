"""HTTP requests for each question to a server, with the parsers of their answers.  Does no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote

from ...api.differences import Differences
from ...api.outcomes import Outcome
from ...api.values import (
    Artifact,
    Forecast,
    Point,
    QueuedRun,
    RecipeEntry,
    Status,
    WorkerStatus,
)
from ...errors import (
    HELPS,
    NOT_NOTED,
    Busy,
    CannotAsk,
    Infrastructure,
    Invalid,
    NotFound,
    Problem,
    RecipeError,
)
from ...execution.terms import Choice, Settings
from ...paths import is_path
from ...storage.records.runs import Event
from . import answers
from .transport import Listing, LogPart, New, Of, RequestLost, RunPage, Verb

AGAIN: Final = frozenset({408, 429, 502, 503, 504})
"""HTTP statuses of a busy server, or of a proxy while the server restarts.

The request may be sent again.
"""
MOST: Final = 200
"""Maximum runs per page."""
_T = TypeVar("_T")


class Question(NamedTuple, Generic[_T]):
    """An HTTP request.

    `path` is relative to the server's address, `body` is sent as JSON, and `read` parses the body
    of the answer.
    """

    method: str
    path: str
    read: Callable[[bytes], _T]
    query: Mapping[str, str | int | list[str]] = {}
    body: Mapping[str, object] | None = None
    headers: Mapping[str, str] = {}
    nothing: int = 0
    """The HTTP status of an empty answer."""
    run: str = ""
    """The run to control; its state may forbid the request."""


def list_runs(listing: Listing) -> Question[RunPage]:
    """List runs, newest first."""
    query: dict[str, str | int | list[str]] = {
        "limit": min(listing.limit, MOST),
        "metrics": "false",
    }
    texts = {
        "recipe": listing.recipe,
        "user": listing.user,
        "tag": listing.tag,
        "after": listing.after,
    }
    for name, text in texts.items():
        if text:
            query[name] = text
    if listing.states:
        query["state"] = list(listing.states)

    def read(body: bytes) -> RunPage:
        found = answers.mapping_of(body)
        return RunPage(
            [answers.status_of(each) for each in found.get("runs", ())], found.get("next") or ""
        )

    return Question("GET", "v1/runs", read, query)


def run(run: str) -> Question[Status]:
    """Get the status of a run."""
    return Question("GET", _of(run), lambda body: answers.status_of(answers.mapping_of(body)))


def submit(new: New, key: str) -> Question[str]:
    """Store a run.  Raises Invalid if a server does not support an option."""

    def read(body: bytes) -> str:
        return str(answers.mapping_of(body).get("id", ""))

    return Question("POST", "v1/runs", read, {}, body_of(new), {"Idempotency-Key": key})


def events(run: str, after: int) -> Question[Sequence[Event]]:
    """Get the events with numbers above `after`."""

    def read(body: bytes) -> Sequence[Event]:
        return [answers.event_of(each) for each in answers.mapping_of(body).get("events", ())]

    return Question("GET", _of(run, "events"), read, {"after": after})


def follow(run: str, after: int) -> Question[None]:
    """Stream the events with numbers above `after`, for `EventStream`."""
    headers = {"Accept": "text/event-stream"}
    return Question("GET", _of(run, "events"), _pieces, {"after": after}, headers=headers)


class EventStream:
    """A parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Event]:
        """Add bytes and return the complete events."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        events = []
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data: "):
                    events.append(answers.event_of(json.loads(line[6:])))
        return events


def log(run: str, part: LogPart) -> Question[None]:
    """Get the log of an attempt; a missing log is empty."""
    query: dict[str, str | int | list[str]] = {
        "step": part.step,
        "attempt": part.attempt,
        "offset": part.offset,
    }
    if part.follow:
        query["follow"] = "true"
    if part.node:
        query["node"] = part.node
    return Question("GET", _of(run, "logs"), _pieces, query, nothing=404)


def points(run: str, step: str, attempt: int, of: Of) -> Question[Sequence[Point]]:
    """Get the metrics of the steps of a run."""

    def read(body: bytes) -> Sequence[Point]:
        return [answers.point_of(json.loads(line)) for line in body.splitlines()]

    query: dict[str, str | int | list[str]] = {"step": step, "attempt": attempt, "of": of}
    return Question("GET", _of(run, "metrics"), read, query)


def artifacts(run: str, name: str, after: str) -> Question[Sequence[Artifact]]:
    """List the outputs of a run, or the files of one output."""

    def read(body: bytes) -> Sequence[Artifact]:
        return [answers.artifact_of(each) for each in answers.mapping_of(body).get("artifacts", ())]

    query: dict[str, str | int | list[str]] = {"name": name, "after": after} if name else {}
    return Question("GET", _of(run, "artifacts"), read, query)


def file(run: str, name: str, path: str, begin: int) -> Question[None]:
    """Get the bytes of a file from `begin`; past the end of the file the answer is empty."""
    headers = {"Range": f"bytes={begin}-"} if begin else {}
    query: dict[str, str | int | list[str]] = {"path": path} if path else {}
    where = f"{_of(run, 'artifacts')}/{quote(name)}"
    return Question("GET", where, _pieces, query, headers=headers, nothing=416)


def request(run: str, what: Verb, *, keep_hosts: bool) -> Question[Outcome]:
    """Cancel, pause or resume a run."""
    if keep_hosts:
        raise Invalid([only_here("a server always releases the machines of a paused run")])
    return _control(run, "POST", _of(run, what), {})


def retry(run: str, begin: str | None) -> Question[Outcome]:
    """Rerun a finished run."""
    body = {} if begin is None else {"from": begin}
    return _control(run, "POST", _of(run, "retry"), body)


def prioritize(run: str, priority: int) -> Question[Outcome]:
    """Change the priority of a run."""
    return _control(run, "PATCH", _of(run), {"priority": priority})


def _control(run: str, method: str, path: str, body: Mapping[str, object]) -> Question[Outcome]:
    def read(answer: bytes) -> Outcome:
        return answers.outcome_of({"run": run, **answers.mapping_of(answer)})

    return Question(method, path, read, {}, body, run=run)


def recipes() -> Question[Sequence[RecipeEntry]]:
    """List the available recipes."""

    def read(body: bytes) -> Sequence[RecipeEntry]:
        return [answers.recipe_of(each) for each in answers.mapping_of(body).get("recipes", ())]

    return Question("GET", "v1/recipes", read)


def plan(new: New) -> Question[Forecast]:
    """Get the forecast of a run.  Raises Invalid if a server does not support an option."""

    def read(body: bytes) -> Forecast:
        return answers.forecast_of(answers.mapping_of(body))

    return Question("POST", "v1/plan", read, {}, plan_body_of(new))


def differences(a: str, b: str) -> Question[Differences]:
    """Compare two runs."""

    def read(body: bytes) -> Differences:
        return answers.differences_of(answers.mapping_of(body))

    return Question("GET", _of(b, "differences"), read, {"from": a})


def workers() -> Question[Sequence[WorkerStatus]]:
    """List the workers."""

    def read(body: bytes) -> Sequence[WorkerStatus]:
        return [answers.worker_of(each) for each in answers.mapping_of(body).get("workers", ())]

    return Question("GET", "v1/workers", read)


def queue() -> Question[Sequence[QueuedRun]]:
    """List the queued runs."""

    def read(body: bytes) -> Sequence[QueuedRun]:
        return [answers.queued_of(each) for each in answers.mapping_of(body).get("runs", ())]

    return Question("GET", "v1/queue", read)


def _of(run: str, what: str = "") -> str:
    path = f"v1/runs/{quote(run, safe='')}"
    return f"{path}/{what}" if what else path


def _pieces(_body: bytes) -> None:
    """Parse nothing: the answer is streamed."""


# -- request bodies and errors ---------------------------------------------------------------------


def body_of(new: New) -> dict[str, Any]:
    """Return the body of `POST /v1/runs`.

    Raises Invalid if a server does not support an option.
    """
    ticket = new.ticket
    body = plan_body_of(new) | {"priority": ticket.priority}
    if ticket.not_before is not None:
        body["not_before"] = datetime.fromtimestamp(ticket.not_before, UTC).isoformat()
    body |= {"user": ticket.user, "labels": dict(ticket.labels)}
    if new.webhooks:
        body["webhooks"] = list(new.webhooks)
    return body


def plan_body_of(new: New) -> dict[str, Any]:
    """Return the body of `POST /v1/plan`.

    Raises Invalid if a server does not support an option.
    """
    problems = _not_for_servers(new)
    if problems:
        raise Invalid(problems)
    request, settings = new.request, new.settings
    body: dict[str, Any] = {
        "recipe": request.recipe,
        "inputs": dict(request.inputs),
        "preset": request.preset,
        "driver": settings.driver,
    }
    if settings.limits:
        body["limits"] = dict(settings.limits)
    return body


def _not_for_servers(new: New) -> list[Problem]:
    request, ticket, settings = new.request, new.ticket, new.settings
    problems = []
    if is_path(request.recipe) or request.recipe.endswith((".yaml", ".yml")):
        fix = "add the recipe to `allow` under [recipes] in the server's recipe.toml and submit its name; or submit to the workers' database"
        words = f"{request.recipe} is a local file, but a server runs only its own recipes, by name"
        problems.append(Problem("recipe-is-a-file", words, fix=fix))
    supported = Settings(settings.driver, limits=settings.limits)
    is_plain = new.choice == Choice() and settings == supported
    if ticket.here or not is_plain:
        words = "some options apply only to local runs: a server accepts inputs, a preset, a driver and limits"
        problems.append(only_here(words))
    out = request.out is not None
    if any((out, request.current_python, request.update, request.nodes)):
        words = "remove `out`, `python`, `update` and `nodes`, which apply only to runs in this machine's workspace or database"
        problems.append(only_here(words))
    return problems


def only_here(words: str) -> Problem:
    """Return the problem for an option that servers do not support."""
    return Problem("only-here", words, fix="remove this option; get the results with `download`")


def refuse(status: int, body: bytes, wait: float, run: str) -> NoReturn:
    """Raise the error of an HTTP status of 400 or above: Lost if the request may be repeated,
    CannotAsk if the state of `run` forbids the request.
    """
    error = error_of(status, body)
    if status in AGAIN:
        raise RequestLost(str(error), wait, error)
    if run and isinstance(error, Invalid):
        first, *others = error.problems
        if not others and first.code in (*HELPS, NOT_NOTED):
            raise CannotAsk(first.code, first.message, run)
    raise error


def error_of(status: int, body: bytes) -> RecipeError:
    """Convert an HTTP error answer to the matching RecipeError."""
    try:
        error = json.loads(body)["error"]
        code, message, fix = str(error["code"]), str(error["message"]), str(error.get("fix", ""))
        problems = [
            Problem(str(each["code"]), str(each["message"]), None, str(each.get("fix", "")))
            for each in error.get("problems", ())
        ]
    except (ValueError, TypeError, LookupError):
        return answers.unexpected_reply(status)
    if status == 404:
        return NotFound(message, fix=fix)
    if status >= 500:
        return Infrastructure(message, fix=fix)
    if status in (408, 429) or code == "busy":
        return Busy(message, fix=fix)
    if status == 401:
        fix = "set RECIPE_TOKEN to a token of that server; its first start prints a token"
    return Invalid(problems or [Problem(code, message, None, fix)])
