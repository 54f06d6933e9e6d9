"""Handles of runs by the address of what keeps them: nothing for this workspace, `postgresql://…` for a database, `https://…` for a server."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from ...api.submitting import Ticket, submit
from ...errors import Invalid, Problem, did_you_mean
from ...execution.terms import Choice, Settings
from ...paths import is_path
from ...storage.workspace import Workspace
from ...survey.request import Request
from . import core
from .far import AsyncServer, Server, is_server
from .here import AsyncHere, Here
from .shells import AsyncRun, Run, Transport, given, given_async

LIMITS = ("time", "cost")


class How(TypedDict, total=False):
    """How a run is submitted."""

    to: (
        str | None
    )  # where runs are kept: None: the workspace; postgresql://USER@HOST/DATABASE; https://HOST:PORT of a server
    driver: str
    workspace: str | Path | None
    preset: str | None
    out: str | Path | None
    python: str | None
    choice: Choice | None
    settings: Settings | None  # instead of driver, store and limits
    store: str  # a shared store, as on the command line
    nodes: int
    priority: int
    not_before: datetime | None
    key: str  # the same key with the same request is the same run
    labels: Mapping[str, str]  # only a worker with all of these takes it
    user: str
    limits: Mapping[str, float]  # `time` in seconds, `cost` in USD
    webhooks: Sequence[Mapping[str, object]]  # for a server
    here: bool  # in a database: only a worker of this workspace takes it


def checked(how: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that there is not, Invalid for values that a run cannot have: one that is misspelt would be left out."""
    for name in how:
        if name not in How.__annotations__:
            raise TypeError(
                f"submit() has no option {name!r}{f': {fix}' if (fix := did_you_mean(name, How.__annotations__)) else ''}"
            )
    labels, limits, problems = how.get("labels", {}), how.get("limits", {}), []
    kinds: dict[str, tuple[type, str]] = {
        "priority": (int, "a whole number"),
        "key": (str, "text"),
        "user": (str, "text"),
    }
    for name, (kind, words) in {
        **kinds,
        "labels": (Mapping, "a mapping"),
        "limits": (Mapping, "a mapping"),
    }.items():
        if name in how and not isinstance(how[name], kind):
            problems.append(Problem("wrong-type", f"`{name}` is {words}, not {how[name]!r:.80}"))
    if how.get("not_before") is not None and not isinstance(how["not_before"], datetime):
        problems.append(
            Problem(
                "wrong-type", "`not_before` is a datetime", fix="datetime.fromisoformat reads one"
            )
        )
    if isinstance(labels, Mapping) and not all(
        isinstance(word, str) for pair in labels.items() for word in pair
    ):
        problems.append(Problem("wrong-type", "names and values of `labels` are text"))
    for name, limit in limits.items() if isinstance(limits, Mapping) else ():
        if name not in LIMITS:
            problems.append(
                Problem(
                    "unknown-field",
                    f"there is no limit {name!r}",
                    fix=did_you_mean(str(name), LIMITS) or "there are time and cost",
                )
            )
        elif (
            isinstance(limit, bool)
            or not isinstance(limit, (int, float))
            or not 0 < limit < math.inf
        ):
            problems.append(
                Problem("bad-value", f"`limits` of {name} is a number above 0, not {limit!r:.80}")
            )
    if problems:
        raise Invalid(problems)


class New(NamedTuple):
    """A run that is asked for."""

    request: Request
    choice: Choice = Choice()
    settings: Settings = Settings()
    ticket: Ticket = Ticket()
    webhooks: Sequence[Mapping[str, object]] = ()


def opened(to: str | None, root: Path) -> Transport:
    """What keeps runs at an address.  Raises RecipeError."""
    return Server(to) if to is not None and is_server(to) else Here(_workspace(to, root))


def _workspace(to: str | None, root: Path) -> Workspace:
    if to is None:
        return Workspace.open(root)
    if not to.startswith(("postgresql://", "postgres://")):
        fix = "write postgresql://USER@HOST/DATABASE, or https://HOST:PORT of a server"
        raise Invalid(
            [
                Problem(
                    "bad-address", "what keeps the runs is neither a database nor a server", fix=fix
                )
            ]
        )
    return Workspace.open(root, environ={**os.environ, "RECIPE_RUNS": to})


def run_of(id: str, to: str | None, root: Path) -> Run:
    """A handle of a run that exists.  Raises NotFound."""
    run = Run(opened(to, root), id)
    try:
        run.status()
    except BaseException:
        run.close()
        raise
    return run


async def run_of_async(id: str, to: str | None, root: Path) -> AsyncRun:
    """The same by `await`."""
    run = AsyncRun(
        AsyncServer(to)
        if to is not None and is_server(to)
        else AsyncHere(Here(_workspace(to, root))),
        id,
    )
    try:
        await run.status()
    except BaseException:
        await run.close()
        raise
    return run


def submitted(new: New, to: str | None, root: Path) -> Run:
    """Store a run, and answer its handle.  Raises RecipeError with every problem."""
    if to is not None and is_server(to):
        server = Server(to)
        try:
            return Run(server, next(given(server, _submit(new))))
        except BaseException:
            server.close()
            raise
    return _stored(new, to, root)


async def submitted_async(new: New, to: str | None, root: Path) -> AsyncRun:
    """The same by `await`."""
    if to is not None and is_server(to):
        server = AsyncServer(to)
        try:
            return AsyncRun(server, await anext(given_async(server, _submit(new))))
        except BaseException:
            await server.close()
            raise
    from asyncio import to_thread

    run = await to_thread(_stored, new, to, root)
    assert isinstance(run.transport, Here)
    return AsyncRun(AsyncHere(run.transport), run.id)


def _stored(new: New, to: str | None, root: Path) -> Run:
    """Store a run in a workspace or a database."""
    if new.webhooks:
        fix = "name receivers in recipe.toml (docs/webhooks.md)"
        raise Invalid([Problem("bad-request", "webhooks of one run are for a server", fix=fix)])
    ws = _workspace(to, root)
    try:
        ws.asks_secrets = new.ticket.here or not ws.store.runs.shared
        return Run(Here(ws), submit(ws, new.request, new.choice, new.settings, new.ticket).id)
    except BaseException:
        ws.close()
        raise


def _submit(new: New) -> core.Talk:
    return core.submit(body_of(new), new.ticket.idempotency or uuid.uuid4().hex)


def body_of(new: New) -> dict[str, Any]:
    """The body of `POST /v1/runs`.  Raises Invalid where the server could not do what is asked."""
    request, ticket, settings = new.request, new.ticket, new.settings
    problems = []
    if is_path(request.recipe) or request.recipe.endswith((".yaml", ".yml")):
        fix = "name it in `allow` under [recipes] of the server's recipe.toml, and submit its name; or submit to the database of the workers"
        problems.append(
            Problem(
                "recipe-is-a-file",
                f"{request.recipe} is a file here, and a server runs recipes of its own by their names",
                fix=fix,
            )
        )
    plain = Settings(settings.driver, limits=settings.limits)
    if (
        new.choice != Choice()
        or replace(settings, label=plain.label) != plain
        or settings.label != plain.label
        or ticket.here
    ):
        problems.append(
            _only_here(
                "some of what was asked is for a run of this machine: a server takes inputs, a preset, a driver and limits"
            )
        )
    if request.out is not None or request.current_python or request.update or request.nodes:
        problems.append(
            _only_here(
                "`out`, `python`, `update` and `nodes` are for runs of this machine's workspace or database"
            )
        )
    if problems:
        raise Invalid(problems)
    due = (
        datetime.fromtimestamp(ticket.not_before, UTC).isoformat()
        if ticket.not_before is not None
        else None
    )
    return {
        "recipe": request.recipe, "inputs": dict(request.inputs), "preset": request.preset, "driver": settings.driver, "priority": ticket.priority,
        **({"not_before": due} if due else {}), "user": ticket.user, "labels": dict(ticket.labels),
        **({"limits": dict(settings.limits)} if settings.limits else {}), **({"webhooks": list(new.webhooks)} if new.webhooks else {}),
    }  # fmt: skip


def _only_here(words: str) -> Problem:
    return Problem("only-here", words, fix="leave it out; `download` brings the results")
