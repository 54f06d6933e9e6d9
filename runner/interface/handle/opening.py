"""Open run handles by address: None for this workspace, `postgresql://…` for a database,
`https://…` for a server.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar, cast

from ...api.values import Forecast, RecipeEntry
from ...errors import Invalid, Problem, did_you_mean
from ...execution.terms import Choice, Settings
from ...storage.workspace import Workspace
from . import core
from .http_transport import AsyncHttpTransport, HttpTransport, is_server
from .local_transport import AsyncLocalTransport, LocalTransport
from .shells import AsyncRun, Run, drive, drive_async
from .transport import AsyncTransport, New, Transport

LIMITS = ("time", "cost")
_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "priority": (int, "a whole number"),
    "key": (str, "text"),
    "user": (str, "text"),
    "labels": (Mapping, "a mapping"),
    "limits": (Mapping, "a mapping"),
}
T = TypeVar("T")


class RunOptions(TypedDict, total=False):
    """Options of `submit`."""

    to: (
        str | None
    )  # None for the workspace, postgresql://USER@HOST/DATABASE, or the https://HOST:PORT of a server
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
    labels: Mapping[str, str]  # only workers with all these labels take the run
    user: str
    limits: Mapping[str, float]  # `time` in seconds, `cost` in USD
    webhooks: Sequence[Mapping[str, object]]  # requires a server
    here: bool  # in a database: only workers of this workspace take the run


def check_options(how: Mapping[str, Any]) -> None:
    """Check the options of `submit`.

    Raises TypeError for an unknown option, Invalid for invalid values.
    """
    for name in how:
        if name not in RunOptions.__annotations__:
            message = f"submit() has no option {name!r}"
            hint = did_you_mean(name, RunOptions.__annotations__)
            if hint:
                message += f": {hint}"
            raise TypeError(message)
    problems = [
        *_check_kinds(how),
        *_check_labels(how.get("labels", {})),
        *_check_limits(how.get("limits", {})),
    ]
    if problems:
        raise Invalid(problems)


def _check_kinds(how: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, (kind, words) in _KINDS.items():
        if name in how and not isinstance(how[name], kind):
            problems.append(Problem("wrong-type", f"`{name}` is {words}, not {how[name]!r:.80}"))
    if how.get("not_before") is not None and not isinstance(how["not_before"], datetime):
        words = "`not_before` must be a datetime"
        fix = "parse the text with datetime.fromisoformat"
        problems.append(Problem("wrong-type", words, fix=fix))
    return problems


def _check_labels(labels: object) -> list[Problem]:
    if not isinstance(labels, Mapping):
        return []
    if all(isinstance(word, str) for word in (*labels, *labels.values())):
        return []
    return [Problem("wrong-type", "names and values of `labels` must be text")]


def _check_limits(limits: object) -> list[Problem]:
    if not isinstance(limits, Mapping):
        return []
    problems = []
    for name, limit in limits.items():
        if name not in LIMITS:
            fix = did_you_mean(str(name), LIMITS) or "use time or cost"
            problems.append(Problem("unknown-field", f"unknown limit {name!r}", fix=fix))
        elif not _is_limit(limit):
            words = f"`limits` of {name} must be a number above 0, not {limit!r:.80}"
            problems.append(Problem("bad-value", words))
    return problems


def _is_limit(limit: object) -> bool:
    is_real = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    return is_real and 0 < cast("float", limit) < math.inf


def open_transport(to: str | None, root: Path) -> Transport:
    """Open the transport to an address.  Raises RecipeError."""
    if to is not None and is_server(to):
        return HttpTransport(to)
    return LocalTransport(_workspace(to, root))


def _workspace(to: str | None, root: Path) -> Workspace:
    if to is None:
        return Workspace.open(root)
    if not to.startswith(("postgresql://", "postgres://")):
        fix = "use postgresql://USER@HOST/DATABASE, or https://HOST:PORT of a server"
        raise Invalid(
            [Problem("bad-address", "the address is neither a database nor a server", fix=fix)]
        )
    return Workspace.open(root, environ={**os.environ, "RECIPE_RUNS": to})


def run_of(id: str, to: str | None, root: Path) -> Run:
    """Return a handle of an existing run.  Raises NotFound."""
    run = Run(open_transport(to, root), id)
    try:
        run.status()
    except BaseException:
        run.close()
        raise
    return run


async def run_of_async(id: str, to: str | None, root: Path) -> AsyncRun:
    """Return an asynchronous handle of an existing run.  Raises NotFound."""
    run = AsyncRun(_open_transport_async(to, root), id)
    try:
        await run.status()
    except BaseException:
        await run.close()
        raise
    return run


def submit_run(new: New, to: str | None, root: Path) -> Run:
    """Store a run and return its handle.  Raises RecipeError with all problems."""
    transport = open_transport(to, root)
    try:
        return Run(transport, next(drive(transport, _submit(new))))
    except BaseException:
        transport.close()
        raise


async def submit_run_async(new: New, to: str | None, root: Path) -> AsyncRun:
    """Store a run and return its asynchronous handle.  Raises RecipeError with all problems."""
    transport = _open_transport_async(to, root)
    try:
        return AsyncRun(transport, await anext(drive_async(transport, _submit(new))))
    except BaseException:
        await transport.close()
        raise


def recipes_of(to: str | None, root: Path) -> list[RecipeEntry]:
    """Return the recipes available at an address.  Raises RecipeError."""
    return list(_ask(to, root, lambda there: there.recipes()))


async def recipes_of_async(to: str | None, root: Path) -> list[RecipeEntry]:
    """Return the recipes available at an address, asynchronously.  Raises RecipeError."""
    return list(await _ask_async(to, root, lambda there: there.recipes()))


def forecast(new: New, to: str | None, root: Path) -> Forecast:
    """Return the forecast of a run at an address.  Raises RecipeError with all problems."""
    return _ask(to, root, lambda there: there.plan(new))


async def forecast_async(new: New, to: str | None, root: Path) -> Forecast:
    """Return the forecast of a run at an address, asynchronously.

    Raises RecipeError with all problems.
    """
    return await _ask_async(to, root, lambda there: there.plan(new))


def _ask(to: str | None, root: Path, of: Callable[[Transport], T]) -> T:
    with closing(open_transport(to, root)) as transport:
        answer: T = next(drive(transport, core.ask(of)))
        return answer


async def _ask_async(to: str | None, root: Path, of: Callable[[AsyncTransport], Awaitable[T]]) -> T:
    transport = _open_transport_async(to, root)
    try:
        # AsyncTransport has the same method for each question asked here.
        asked = core.ask(cast("Callable[[Transport], object]", of))
        async with aclosing(drive_async(transport, asked)) as items:
            answer: T = await anext(items)
            return answer
    finally:
        await transport.close()


def _submit(new: New) -> core.Operation:
    # Retries after a lost answer use the same key, so the run is stored once.
    return core.submit(new, new.ticket.idempotency or uuid.uuid4().hex)


def _open_transport_async(to: str | None, root: Path) -> AsyncTransport:
    if to is not None and is_server(to):
        return AsyncHttpTransport(to)
    return AsyncLocalTransport(LocalTransport(_workspace(to, root)))
