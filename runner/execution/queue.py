"""What `recipe submit` stores and `recipe worker` takes: a run of a request, carried out by whichever worker of the workspace claims it first."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..digest import of_value
from ..errors import CannotRun, Infrastructure, Invalid, NotFound, Problem, RecipeError, StoreBusy
from ..hosts.link import client
from ..planning.ids import bare
from ..reports import sealing
from ..storage.content.disk import delete
from ..storage.content.files import Content
from ..storage.reach import Reach
from ..storage.records.runs import ALONE, Offer, RunRow, Stale, Submitted, settle
from ..storage.records.store import held
from ..storage.remote.states import Lying
from ..storage.workspace import Workspace
from ..survey import run_graph
from ..survey.survey import Request, compiled, storable
from . import uploading
from .refusals import check, preflight
from .reporting import LAST_WORDS, begin, no_points, refused
from .results import deliver, sizes
from .resume import Claimed, as_it_stood, poisoned
from .session import check_ids, look
from .steps.work import Handover
from .terms import (
    Choice,
    Listener,
    Overview,
    Settings,
    Since,
    Summary,
    asked,
    choice_of_run,
    limits_asked,
    limits_of,
    login,
    lower,
    new_id,
    noted,
    placed,
    request_of_run,
    settings_of_run,
)
from .unattended import end_claimed
from .worker import Assignment, work

if TYPE_CHECKING:
    from ..reports.delivery import Delivery
    from ..storage.remote.cache import RemoteCache

LOOK: Final = 1.0
"""Seconds between two looks whether something was stored."""
SAFETY: Final = 4.0
"""Seconds after which a worker looks for runs though nothing was stored: one is due by now, or its worker died."""


PRIORITY: Final = 1_000_000
"""How high the priority of a run may be, and how low below 0."""
COLLECT: Final = 1.0
"""Seconds between two collections of garbage, at least: runs leave circles, which Python by itself looks for ever more seldom."""


class Ticket(NamedTuple):
    """When and where a submitted run is carried out."""

    priority: int = 0
    not_before: float | None = None  # seconds since the epoch
    idempotency: str = (
        ""  # the submitter's own name for the request: the same one again is the same run
    )
    labels: Mapping[str, str] = {}
    user: str = ""  # for whom it is; empty: the login that submits it
    run: str = ""  # the id of the new run; empty: one that is made now
    reports_to: Mapping[
        str, object
    ] = {}  # who gets reports of the run beside the receivers of the settings: `webhooks`, `job`
    reach: Sequence[str] | None = (
        None  # hosts and buckets that the run may read, for one that a server took; None: whatever its address says
    )
    here: bool = False  # in a shared database: only a worker of this very workspace takes it, with the files as they are then


def submit(
    ws: Workspace, request: Request, choice: Choice, settings: Settings, ticket: Ticket
) -> Submitted:
    """Store a run for workers: of this workspace where its runs are in its own file, else of any machine.

    Raises NotFound, Invalid with every problem of its inputs, Infrastructure where the shared store cannot take what the workers need.
    """
    from ..language.library import find

    _storable(ticket)
    travels = ws.store.runs.shared and not ticket.here
    if travels:
        ws = ws.within(ws.root)
        ws.asks_secrets = False
    source = find(request.recipe, ws.root)
    plan = compiled(ws, source, request, {})
    check_ids(plan, choice, bare)  # which instances there are may be known only when it runs
    limits = lower(plan.settings.limits, limits_asked(ws, settings))
    data = {
        "source": str(source),
        "asked": asked(storable(ws, plan, request)),
        **noted(choice, settings),
        **limits_of(limits),
    }
    parcel = _parcel(ws, request, settings) if travels else HERE
    data |= {"bound": dict(parcel.bound), "bundle": parcel.digest} if parcel.digest else {}
    receivers = [sealing.without(ticket.reports_to)] if ticket.reports_to else []
    body = of_value(
        "body",
        [data, *receivers, ticket.user, ticket.priority, ticket.not_before, dict(ticket.labels)],
    )
    data |= {"labels": dict(ticket.labels), "body": body}
    data |= ticket.reports_to
    if opens := _sealed(ws):
        data["opens"] = opens
    if ticket.reach is not None:
        data["reach"] = list(ticket.reach)
    now = time.time()
    row = RunRow(
        ticket.run or new_id(),
        plan.recipe,
        plan.digest,
        plan.inputs,
        str(ws.root),
        created=now,
        data=data,
    )
    row = row._replace(
        priority=ticket.priority,
        due=max(now, ticket.not_before or now),
        idempotency=ticket.idempotency,
    )
    row = row._replace(
        user=ticket.user or login(ws.environ), bundle=parcel.digest, store=parcel.store
    )
    done = ws.store.runs.submit(row, bundle=parcel.data)
    if words := no_points(ws, done.id):
        raise refused(done.id, words)
    return done


def _storable(ticket: Ticket) -> None:
    """Raises Invalid for what no database has a place for."""
    words = (("user", ticket.user), ("key", ticket.idempotency))
    problems = [
        Problem("bad-value", f"the {name} of a run is text in UTF-8, without NUL")
        for name, word in words
        if not _is_text(word)
    ]
    if not -PRIORITY <= ticket.priority <= PRIORITY:
        problems.append(
            Problem(
                "bad-value", f"the priority of a run is at least {-PRIORITY} and at most {PRIORITY}"
            )
        )
    if problems:
        raise Invalid(problems)


def _is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


def again(ws: Workspace, row: RunRow, choice: Choice) -> Submitted:
    """Store a run that is over as a new one, with the same bundle."""
    now = time.time()
    data = {**row.data, "choice": asdict(choice)}
    return ws.store.runs.submit(
        row._replace(id=new_id(), data=data, created=now, due=now, idempotency="")
    )


def reports_of(row: RunRow) -> Mapping[str, object]:
    """Who got reports of a run, and gets those of its retry."""
    return {name: row.data[name] for name in ("webhooks", "job") if name in row.data}


def give_back(ws: Workspace, run: str) -> bool:
    """Let workers continue a paused run.  False: a worker has it already, or it is over."""
    fence = ws.store.runs.claim(run, f"process {os.getpid()}")
    if fence is None:
        return False
    if (
        ws.store.runs.get(run).state != "PAUSED"
        or settle(ws.store.runs, run, fence, "QUEUED", "resumed") == "QUEUED"
    ):
        ws.store.runs.release(run, fence)
    return True


def _sealed(ws: Workspace) -> dict[str, str]:
    """What opens the addresses of a request, as it is stored with the run.  Raises CannotRun without a key."""
    if ws.addresses and not sealing.can_seal(ws.environ):
        words = (
            f"what opens {next(iter(ws.addresses))} is a secret, which is not stored without a key"
        )
        fix = f"give an address that the worker's own login opens (s3:// gs:// hf://), or make a key: {sealing.HOW}"
        raise CannotRun(words, fix=fix)
    return {
        address: sealing.seal(opening, f"address {address}", ws.environ)
        for address, opening in ws.addresses.items()
    }


def _unsealed(ws: Workspace, row: RunRow) -> None:
    """Have the workspace know what opens the addresses of a run, and what the run may read.  Raises CannotRun."""
    opens, reach = row.data.get("opens"), row.data.get("reach")
    sealed = opens if isinstance(opens, dict) else {}
    ws.addresses = {
        address: sealing.unseal(each, f"address {address}", ws.environ)
        for address, each in sealed.items()
    }
    if isinstance(reach, list):
        ws.reach = Reach(reach)


class Parcel(NamedTuple):
    """What a run takes along: its bundle, and the store that has the rest.  `data` is empty where the store has the bundle, too."""

    digest: str = ""
    data: bytes = b""
    bound: Mapping[str, object] = {}
    store: str = ""


HERE: Final = Parcel()
"""Of a run that is carried out in its own workspace."""


def _parcel(ws: Workspace, request: Request, settings: Settings) -> Parcel:
    """Pack what the plan reads, and put into the shared store what is large.  Raises Invalid, Infrastructure."""
    from ..survey import bundles

    cache = ws.share(settings.store or None)
    if cache is None:
        raise Invalid([*_faults(ws, request), _NO_STORE])
    packed = bundles.pack(ws, request, cache.remote.holds)
    ws.save_cache()
    cache.remote.mark()
    lying = Lying(packed.contents)
    for content in packed.contents:
        cache.remote.put(content, lying)
    if len(packed.data) <= bundles.MOST:
        return Parcel(packed.digest, packed.data, packed.bound, cache.remote.url)
    place = ws.home / "partial" / packed.digest
    ws.write(place, packed.data)
    try:
        cache.remote.put(
            Content(f"f:{packed.digest}"), Lying({Content(f"f:{packed.digest}"): str(place)})
        )
    finally:
        delete(place)
    return Parcel(packed.digest, b"", packed.bound, cache.remote.url)


_NO_STORE: Final = Problem(
    "no-store",
    "workers of other machines get inputs and give results by a shared store, and none is named",
    fix='name one: --store NAME, or `store = "NAME"` in recipe.toml; or give --here for a worker of this very folder',
)


def _faults(ws: Workspace, request: Request) -> Sequence[Problem]:
    """What is wrong with a request for another machine, whatever the store has."""
    from ..survey import bundles

    try:
        bundles.pack(ws, request)
    except Invalid as error:
        return error.problems
    return ()


def serve(
    root: Path,
    offer: Offer,
    listener: Callable[[], Listener],
    handover: Handover,
    environ: Mapping[str, str],
    *,
    once: bool,
    store: str | None = None,
) -> None:
    """Carry out runs of the workspace at `root` until the process is asked to end; `once`: until no run is due.  `environ` has their secrets.

    `store`: runs of all workspaces that use this shared store, by its name in the settings; empty for the default one.  Raises NotFound without one.
    """
    who = f"{socket.gethostname()} process {os.getpid()}"
    delivery: Delivery | None = None
    collected = time.monotonic()
    try:
        while not handover.asked:
            with (
                suppress(StoreBusy),
                Workspace.open(root, environ=environ) as opened,
                held(opened.home) as there,
            ):
                while not handover.asked and there():
                    ws = opened.within(
                        opened.root
                    )  # one for each run: what it learned of files is that run's
                    if store is not None:
                        offer = offer._replace(store=_shared(ws, store).remote.url)
                    delivery = delivery or begin(ws)
                    row = _next(ws, who, offer, handover, there, once=once)
                    if row is not None:
                        delivery = delivery or begin(ws, row.data)
                        if not _carry_out(ws, row, listener(), handover):
                            break  # closing lets go of the run, for the next worker
                    elif once:
                        return
                    if time.monotonic() - collected > COLLECT:
                        gc.collect()
                        collected = time.monotonic()
    finally:
        if delivery is not None:
            delivery.end(LAST_WORDS)


def _next(
    ws: Workspace,
    who: str,
    offer: Offer,
    handover: Handover,
    there: Callable[[], bool],
    *,
    once: bool,
) -> RunRow | None:
    """The next run, claimed: waits for one, but not `once`.  None also when somebody deleted the store."""
    while not handover.asked and there():
        seen = ws.store.runs.news()
        claimed = ws.store.runs.claim_next(who, offer)
        if claimed is not None or once:
            return claimed
        deadline = time.monotonic() + SAFETY
        while not handover.asked and time.monotonic() < deadline and ws.store.runs.news() == seen:
            until = time.monotonic() + LOOK
            while not handover.asked and time.monotonic() < until:
                time.sleep(LOOK / 5)  # a signal does not end a sleep
    return None


def _carry_out(ws: Workspace, row: RunRow, listener: Listener, handover: Handover) -> bool:
    """Work on a claimed run.  What is wrong with the run ends it; an error of ours leaves it to the next worker, as a death would: False."""
    fence = row.fence
    try:
        _unsealed(ws, row)
        ws = _unpacked(ws, row)
        ws.hooked[row.id] = "webhooks" in row.data
        while not _worked(ws, row, fence, listener, handover):
            claimed = ws.store.runs.claim(row.id, f"process {os.getpid()}")
            if claimed is None:  # it was cancelled meanwhile, or another works on it
                return True
            fence, row = claimed, ws.store.runs.get(row.id)
        return True
    except Stale:
        listener.say(
            f"run {row.id} was taken over by another worker, because this one was silent for too long"
        )
    except StoreBusy as error:
        listener.say(f"run {row.id} waits for a worker again: {error}")
        with suppress(RecipeError):
            ws.store.runs.release(row.id, fence)
    except RecipeError as error:
        for line in [
            *f"run {row.id} failed: {error}".splitlines(),
            *([f"  fix: {error.fix}"] if error.fix else []),
        ]:
            listener.say(line)
        _ended(ws, ws.store.runs.get(row.id), fence, "FAILED", str(error))
    except Exception:
        print(f"recipe: an internal error ended the work on run {row.id}", file=sys.stderr)
        traceback.print_exc()
        time.sleep(LOOK)
    return False


def _worked(ws: Workspace, row: RunRow, fence: int, listener: Listener, handover: Handover) -> bool:
    """False: the run paused and is to be resumed at once."""
    if row.request in ("cancel", "pause"):
        end_claimed(
            ws, row.id, fence, "CANCELLED" if row.request == "cancel" else "PAUSED", listener.say
        )
        return True
    if poisoned(ws, row, fence) or no_points(ws, row.id, fence):
        return True
    request, choice, settings = (
        request_of_run(row),
        choice_of_run(row),
        placed(ws, settings_of_run(row)),
    )
    if request is None:
        raise Infrastructure(
            f"run {row.id} did not note what it was asked for",
            fix="`recipe submit` with its recipe and inputs",
        )
    from ..survey import bundles

    since = Since(time.monotonic(), ws.store.database.version())
    if row.bundle:
        bound = row.data.get("bound")
        inputs = {**request.inputs, **(bound if isinstance(bound, dict) else {})}
        request = replace(request, inputs=inputs, out=ws.own / "out" / row.id)
    else:
        ws.share(settings.store or None)
        request = bundles.brought(ws, request)
    found = look(ws, request, choice)
    if not found.todo and (row.fence == 1 or not ws.store.runs.steps(row.id)):
        total, fresh = sizes(found)
        run_graph.remember(ws, row.id, found)
        listener.begin(
            Overview(row.id, row.recipe, total, fresh, (), {}, settings.jobs, str(ws.root))
        )
        deliver(ws, row.id, fence, found.plan, found.made)
        if settings.upload:
            uploading.upload(
                ws, found.plan, found.made, settings.upload, listener, uploading.maker(ws, found)
            )
        _ended(ws, row, fence, "COMPLETED", "")
        listener.end(Summary("COMPLETED", {"FRESH": fresh}, since.seconds, run=row.id))
        return True
    local = client.own(ws.home, ALONE if row.bundle else None)
    preflight(ws, found, settings)
    check(ws, found, settings, listener)
    if settings.upload:
        uploading.check(ws, found.plan, settings.upload)
    stood = as_it_stood(ws, found, row, fence) if row.fence > 1 else Claimed(row.id, fence)
    if stood is None:
        words = f"run {row.id} cannot be resumed: a step of it failed, or its recipe has changed"
        raise Infrastructure(words, fix=f"`recipe retry {row.id}` runs it anew")
    return (
        work(Assignment(ws, local, found, stood, settings, listener, since, handover=handover))
        is not None
    )


def _shared(ws: Workspace, name: str) -> RemoteCache:
    """The shared store that a worker of many workspaces uses.  Raises NotFound."""
    if not ws.store.runs.shared:
        raise CannotRun(
            "runs of other workspaces are in a database that several machines share",
            fix="set RECIPE_RUNS=postgresql://…",
        )
    found = ws.share(name or None, push=True)
    if found is None:
        fix = f'--store NAME, or `store = "NAME"` and a [stores.NAME] in {ws.own}/recipe.toml'
        raise NotFound(
            "a worker for other workspaces needs the shared store of those who submit", fix=fix
        )
    return found


def _unpacked(ws: Workspace, row: RunRow) -> Workspace:
    """Where a run is carried out: its own workspace, or the folder of its bundle, with the memory of the worker's."""
    if not row.bundle:
        return ws
    from ..survey import bundles

    cache = ws.remote_cache
    assert cache is not None  # the offer named its store
    data = ws.store.runs.exchange.bundle(row.bundle)
    if data is None:
        content = Content(f"f:{row.bundle}")
        if cache.bring([content]):
            raise Infrastructure(
                f"the shared store does not have the bundle of run {row.id}", fix="submit it again"
            )
        data = ws.objects.path(content).read_bytes()
    inside = ws.within(bundles.unpack(ws, row.bundle, data, cache.bring))
    ws.save_cache()
    inside.delivers = True
    inside.share(cache.name, push=True)
    return inside


def _ended(ws: Workspace, row: RunRow, fence: int, state: str, reason: str) -> None:
    """Store the end of a run that is still open."""
    if row.fence == fence and row.claim:
        settle(ws.store.runs, row.id, fence, state, reason)
