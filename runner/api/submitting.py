"""Submit a run: check its request, bundle its files for other machines, and queue it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

from ..digest import of_value
from ..errors import CannotRun, Invalid, Problem
from ..execution.reporting import points_refused, reserve_points
from ..execution.session import check_ids
from ..execution.terms import (
    Choice,
    Settings,
    limits_asked,
    limits_data,
    login_name,
    lower_limits,
    new_id,
    options_data,
    request_data,
)
from ..language.library import find
from ..planning.ids import bare
from ..planning.plan import Plan
from ..reports import sealing
from ..storage.content.disk import delete
from ..storage.content.files import Content
from ..storage.records.database import Data
from ..storage.records.runs import RunRow, Submission
from ..storage.remote.states import LocalSource
from ..storage.workspace import Workspace
from ..survey import bundles
from ..survey.plan_cache import as_stored, compile_request
from ..survey.request import Request
from ..survey.templates import refuse_nodes

PRIORITY: Final = 1_000_000
"""Maximum absolute value of a run's priority."""


class QueueSettings(NamedTuple):
    """Queue settings of a submitted run."""

    priority: int = 0
    not_before: float | None = None  # seconds since the epoch
    # Key chosen by the submitter. A second request with the same key returns the same run.
    idempotency: str = ""
    labels: Mapping[str, str] = {}
    user: str = ""  # owner of the run; empty: the login of the submitter
    run: str = ""  # ID of the new run; empty: generate one
    # `webhooks` and `job`: recipients of reports in addition to those in the settings.
    reports_to: Mapping[str, object] = {}
    # Hosts and buckets that a run of a server may read. None: no restriction.
    reach: Sequence[str] | None = None
    # With a shared database, only workers of this workspace may take the run. They read its current
    # files.
    here: bool = False


def submit(
    ws: Workspace, request: Request, choice: Choice, settings: Settings, ticket: QueueSettings
) -> Submission:
    """Queue a run for workers of this workspace, or of any machine if the database is shared.

    Raises NotFound, Invalid with all input problems, and Infrastructure if the shared store cannot
    receive the run's files.
    """
    _check_ticket(ticket)
    travels = ws.store.runs.shared and not ticket.here
    if travels:
        ws = ws.within(ws.root)
        ws.asks_secrets = False
    source = find(request.recipe, ws.root)
    plan = compile_request(ws, source, request, {})
    check_ids(plan, choice, bare)  # the instances of a matrix may be unknown until the run
    refuse_nodes(ws, source, request, plan, plan.select_nodes(choice.only, choice.until), {})
    limits = lower_limits(plan.settings.limits, limits_asked(ws, settings))
    data = {
        "source": str(source),
        "asked": request_data(as_stored(ws, plan, request)),
        **options_data(choice, settings),
        **limits_data(limits),
    }
    parcel = _bundle(ws, request, settings) if travels else NO_BUNDLE
    if parcel.digest:
        data |= {"bound": dict(parcel.bound), "bundle": parcel.digest}
    # Each encryption of a secret differs, but a repeated request must have the same body.
    receivers = [sealing.without(ticket.reports_to)] if ticket.reports_to else []
    body = of_value(
        "body",
        [data, *receivers, ticket.user, ticket.priority, ticket.not_before, dict(ticket.labels)],
    )
    data |= {"labels": dict(ticket.labels), "body": body}
    data |= ticket.reports_to
    opens = _seal_addresses(ws)
    if opens:
        data["opens"] = opens
    if ticket.reach is not None:
        data["reach"] = list(ticket.reach)
    row = _new_row(ws, plan, ticket, parcel, data)
    done = ws.store.runs.submit(row, bundle=parcel.data)
    words = reserve_points(ws, done.id)
    if words:
        raise points_refused(done.id, words)
    return done


def _new_row(
    ws: Workspace, plan: Plan, ticket: QueueSettings, parcel: SubmittedBundle, data: Data
) -> RunRow:
    now = time.time()
    return RunRow(
        ticket.run or new_id(),
        plan.recipe,
        plan.digest,
        plan.inputs,
        str(ws.root),
        created=now,
        due=max(now, ticket.not_before or now),
        data=data,
        priority=ticket.priority,
        idempotency=ticket.idempotency,
        user=ticket.user or login_name(ws.environ),
        bundle=parcel.digest,
        store=parcel.store,
    )


def _check_ticket(ticket: QueueSettings) -> None:
    """Raise Invalid if a text or the priority cannot be stored in the database."""
    problems = []
    for name, word in (("user", ticket.user), ("key", ticket.idempotency)):
        if not _is_text(word):
            words = f"the {name} of a run must be UTF-8 text without NUL"
            problems.append(Problem("bad-value", words))
    problems += _problems_of_priority(ticket.priority)
    if problems:
        raise Invalid(problems)


def check_priority(priority: int) -> None:
    """Raise Invalid if a priority is out of range."""
    problems = _problems_of_priority(priority)
    if problems:
        raise Invalid(problems)


def _problems_of_priority(priority: int) -> list[Problem]:
    if -PRIORITY <= priority <= PRIORITY:
        return []
    words = f"the priority of a run must be from {-PRIORITY} to {PRIORITY}"
    return [Problem("bad-value", words)]


def _is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


def submit_again(
    ws: Workspace, row: RunRow, choice: Choice, reach: Sequence[str] | None = None
) -> Submission:
    """Queue a finished run again as a new run, with the same bundled files.

    `reach` lists the hosts and buckets that the new run may read. None keeps those of the finished
    run.
    """
    now = time.time()
    data = {**row.data, "choice": asdict(choice)}
    if reach is not None:
        data["reach"] = list(reach)
    return ws.store.runs.submit(
        row._replace(id=new_id(), data=data, created=now, due=now, idempotency="")
    )


def receivers_of(row: RunRow) -> Mapping[str, object]:
    """Return the webhooks and the platform job of a run, which a retry reuses."""
    return {name: row.data[name] for name in ("webhooks", "job") if name in row.data}


def _seal_addresses(ws: Workspace) -> dict[str, str]:
    """Encrypt the access data of the request's signed URLs. Raises CannotRun without a key."""
    if ws.addresses and not sealing.can_seal(ws.environ):
        words = f"storing the signed URL of {next(iter(ws.addresses))} requires a key file"
        fix = f"use an address that the worker can open with its own login (s3://, gs://, hf://), or create a key file: {sealing.HOW}"
        raise CannotRun(words, fix=fix)
    sealed: dict[str, str] = {}
    for address, opening in ws.addresses.items():
        sealed[address] = sealing.seal(opening, f"address {address}", ws.environ)
    return sealed


class SubmittedBundle(NamedTuple):
    """The bundled files of a run, and the shared store for its larger files.

    `data` is empty if the bundle itself is in the store.
    """

    digest: str = ""
    data: bytes = b""
    bound: Mapping[str, object] = {}
    store: str = ""


NO_BUNDLE: Final = SubmittedBundle()
"""The parcel of a run that is executed in its own workspace."""


def _bundle(ws: Workspace, request: Request, settings: Settings) -> SubmittedBundle:
    """Bundle the files of a planned run, and upload large files to the shared store.

    Raises Invalid, Infrastructure.
    """
    cache = ws.share(settings.store or None)
    if cache is None:
        raise Invalid([*_faults(ws, request), _NO_STORE])
    packed = bundles.pack(ws, request, cache.remote.holds)
    ws.save_cache()
    cache.remote.mark()
    lying = LocalSource(packed.contents)
    for content in packed.contents:
        cache.remote.put(content, lying)
    if len(packed.data) <= bundles.MOST:
        return SubmittedBundle(packed.digest, packed.data, packed.bound, cache.remote.url)
    place = ws.home / "partial" / packed.digest
    ws.write(place, packed.data)
    content = Content(f"f:{packed.digest}")
    try:
        cache.remote.put(content, LocalSource({content: str(place)}))
    finally:
        delete(place)
    return SubmittedBundle(packed.digest, b"", packed.bound, cache.remote.url)


_NO_STORE: Final = Problem(
    "no-store",
    "workers on other machines require a shared store, but none is set",
    fix='pass `--store NAME`, or set `store = "NAME"` in recipe.toml; for a worker in this directory, pass `--here`',
)


def _faults(ws: Workspace, request: Request) -> Sequence[Problem]:
    """Return the problems of bundling a run's files, regardless of a store."""
    try:
        bundles.pack(ws, request)
    except Invalid as error:
        return error.problems
    return ()
