"""The queue worker: claim submitted runs one after another and execute them."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ..errors import CannotRun, Infrastructure, NotFound, RecipeError, StoreBusy, StoreUnavailable
from ..failures import of_step
from ..hosts.link import client
from ..reports import sealing
from ..storage.content.files import Content
from ..storage.reach import Reach
from ..storage.records.runs import ALONE, ClaimCriteria, RunRow, RunState, Stale, settle
from ..storage.records.store import hold_inode
from ..storage.workspace import Workspace
from ..survey import bundles, run_graph
from ..survey.request import Request
from ..survey.skipped_steps import add_skipped_steps, list_skipped_steps
from ..survey.survey import Survey
from . import presence, uploading
from .presence import Presence
from .refusals import check, preflight
from .reporting import LAST_WORDS, reserve_points, start_delivery
from .results import count_steps, deliver, show_warnings
from .resume import ClaimedRun, fail_if_poisoned, find_failed_step, recover
from .session import preview
from .steps.control import Handover
from .terms import (
    Listener,
    Overview,
    Settings,
    Since,
    Summary,
    apply_stack,
    choice_of_run,
    request_of_run,
    settings_of_run,
)
from .unattended import end_claimed
from .worker import Assignment, failed_state, work

if TYPE_CHECKING:
    from ..reports.delivery import Delivery
    from ..storage.remote.cache import RemoteCache

LOOK: Final = 1.0
"""Interval between checks for changes in the run database, in seconds."""
SAFETY: Final = 4.0
"""Maximum time between attempts to claim a run, in seconds, if the run database does not change.

A run may have become due, or its worker may have died.
"""


COLLECT: Final = 1.0
"""Minimum interval between garbage collections, in seconds.

Runs leave reference cycles, which Python collects less and less often by itself.
"""


def _unseal_addresses(ws: Workspace, row: RunRow) -> None:
    """Decrypt a run's signed URLs and set its read permissions in the workspace.

    Raises CannotRun.
    """
    opens, reach = row.data.get("opens"), row.data.get("reach")
    sealed = opens if isinstance(opens, dict) else {}
    ws.addresses = {
        address: sealing.unseal(each, f"address {address}", ws.environ)
        for address, each in sealed.items()
    }
    if isinstance(reach, list):
        ws.reach = Reach(reach)


def serve(
    root: Path,
    offer: ClaimCriteria,
    listener: Callable[[], Listener],
    handover: Handover,
    environ: Mapping[str, str],
    *,
    once: bool,
    store: str | None = None,
) -> None:
    """Claim and execute queued runs until the process is asked to stop.

    The runs are those of the workspace at `root`. With `once`, return when no run is due.
    `environ` contains the secrets of the runs. With `store`, the name of a shared store in the
    settings, also execute runs of other workspaces that use this store; an empty name means the
    default store. Raises NotFound if the shared store is missing.
    """
    who = f"{socket.gethostname()} process {os.getpid()}"
    delivery: Delivery | None = None
    present: Presence | None = None
    collected = time.monotonic()
    try:
        while not handover.asked:
            with (
                suppress(StoreBusy),
                Workspace.open(root, environ=environ) as opened,
                hold_inode(opened.home) as there,
            ):
                while not handover.asked and there():
                    ws = opened.within(
                        opened.root
                    )  # a new one for each run, with its own file cache
                    if store is not None:
                        offer = offer._replace(store=_connect_store(ws, store).remote.url)
                    delivery = delivery or start_delivery(ws)
                    present = present or presence.register(ws.root, ws.home, environ, who, offer)
                    row = _claim_next(ws, who, offer, handover, there, once=once)
                    if row is not None:
                        delivery = delivery or start_delivery(ws, row.data)
                        if not _execute_claimed(ws, row, listener(), handover, who):
                            break  # closing releases the run for the next worker
                    elif once:
                        return
                    if time.monotonic() - collected > COLLECT:
                        gc.collect()
                        collected = time.monotonic()
    finally:
        if present is not None:
            present.end()
        if delivery is not None:
            delivery.end(LAST_WORDS)


def _claim_next(
    ws: Workspace,
    who: str,
    offer: ClaimCriteria,
    handover: Handover,
    there: Callable[[], bool],
    *,
    once: bool,
) -> RunRow | None:
    """Claim the next queued run and return its database row, waiting for a run unless `once`.

    Return None if the worker is asked to stop, or if the store was deleted.
    """
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


def _execute_claimed(
    ws: Workspace, row: RunRow, listener: Listener, handover: Handover, who: str
) -> bool:
    """Execute a claimed run; return False if the next worker has to continue it.

    An error of the run ends it. An internal error leaves the run open, as a crash does.
    """
    fence = row.fence
    try:
        _unseal_addresses(ws, row)
        ws = _open_workspace(ws, row)
        ws.hooked[row.id] = "webhooks" in row.data
        while not _execute(ws, row, fence, listener, handover):
            claimed = ws.store.runs.claim(row.id, who)
            if claimed is None:  # the run was cancelled, or another worker has claimed it
                return True
            fence, row = claimed, ws.store.runs.get(row.id)
        return True
    except Stale:
        listener.say(
            f"lost run {row.id} to another worker: this worker did not respond for too long"
        )
    except StoreUnavailable as error:
        listener.say(f"run {row.id} is back in the queue: {error}")
        with suppress(RecipeError):
            ws.store.runs.release(row.id, fence)
    except RecipeError as error:
        for line in [
            *f"run {row.id} failed: {error}".splitlines(),
            *([f"  fix: {error.fix}"] if error.fix else []),
        ]:
            listener.say(line)
        _store_end(ws, ws.store.runs.get(row.id), fence, failed_state(error))
    except Exception:
        print(f"recipe: an internal error stopped run {row.id}", file=sys.stderr)
        traceback.print_exc()
        if fail_if_poisoned(ws, ws.store.runs.get(row.id), fence):
            return True
        time.sleep(LOOK)
    return False


def _execute(
    ws: Workspace, row: RunRow, fence: int, listener: Listener, handover: Handover
) -> bool:
    """Execute a run until it ends or pauses; return False if it paused and must resume now."""
    if row.request in ("cancel", "pause"):
        state: Literal["CANCELLED", "PAUSED"] = "CANCELLED" if row.request == "cancel" else "PAUSED"
        end_claimed(ws, row.id, fence, state, listener.say)
        return True
    if fail_if_poisoned(ws, row, fence) or reserve_points(ws, row.id, fence):
        return True
    request, choice = request_of_run(row), choice_of_run(row)
    settings = apply_stack(ws, settings_of_run(row))
    if request is None:
        raise Infrastructure(
            f"run {row.id} has no stored request",
            fix="submit its recipe and inputs again with `recipe submit`",
        )

    since = Since(time.monotonic(), ws.store.database.version())
    if row.bundle:
        request = _bind_bundle(ws, row, request)
    else:
        ws.share(settings.store or None)
        request = bundles.fetch_packed_inputs(ws, request)
    found = preview(ws, request, choice)
    if not found.todo and (row.fence == 1 or not ws.store.runs.steps(row.id)):
        _complete_cached(ws, row, fence, found, settings, listener, since)
        return True
    local = client.connect_own(ws.home, ALONE if row.bundle else None)
    preflight(ws, found, settings)
    check(ws, found, settings, listener)
    if settings.upload:
        uploading.check(ws, found.plan, settings.upload)
    stood = recover(ws, found, row, fence) if row.fence > 1 else ClaimedRun(row.id, fence)
    if stood is None:
        _end_unresumable(ws, row, fence, found)
        return True
    assignment = Assignment(ws, local, found, stood, settings, listener, since, handover=handover)
    return work(assignment) is not None


def _bind_bundle(ws: Workspace, row: RunRow, request: Request) -> Request:
    """Return the request of a bundle with the inputs and the output directory of its run."""
    bound = row.data.get("bound")
    inputs = {**request.inputs, **(bound if isinstance(bound, dict) else {})}
    return replace(request, inputs=inputs, out=ws.own / "out" / row.id)


def _end_unresumable(ws: Workspace, row: RunRow, fence: int, found: Survey) -> None:
    """End a run that cannot resume with the failure of its step.

    Raises Infrastructure if no step failed, because then the recipe has changed.
    """
    failed = find_failed_step(ws, found, row.id)
    if failed is None:
        words = f"cannot resume run {row.id}: its recipe has changed"
        raise Infrastructure(words, fix=f"run it again with `recipe retry {row.id}`")
    _store_end(ws, row, fence, RunState("FAILED", failed.detail, of_step(failed.reason)))


def _complete_cached(
    ws: Workspace,
    row: RunRow,
    fence: int,
    found: Survey,
    settings: Settings,
    listener: Listener,
    since: Since,
) -> None:
    """Complete a run whose steps are all up to date."""
    total, fresh = count_steps(found)
    run_graph.store_graph(ws, row.id, found)
    listener.begin(Overview(row.id, row.recipe, total, fresh, (), {}, settings.jobs, str(ws.root)))
    show_warnings(ws, found, listener)
    deliver(ws, row.id, fence, found.plan, found.made)
    if settings.upload:
        maker = uploading.find_maker(ws, found)
        uploading.upload(ws, found.plan, found.made, settings.upload, listener, maker)
    _store_end(ws, row, fence, RunState("COMPLETED"))
    wanted = found.select_wanted(found.plan)
    counts = add_skipped_steps({"FRESH": fresh}, found.plan, wanted)
    skipped = list_skipped_steps(found.plan, (), wanted)
    listener.end(Summary("COMPLETED", counts, since.seconds, run=row.id, skipped=skipped))


def _connect_store(ws: Workspace, name: str) -> RemoteCache:
    """Connect to the shared store of a worker for several workspaces.

    Raises CannotRun, NotFound.
    """
    if not ws.store.runs.shared:
        raise CannotRun(
            "a worker for other workspaces requires a shared run database",
            fix="set RECIPE_RUNS=postgresql://…",
        )
    found = ws.share(name or None, push=True)
    if found is None:
        fix = f'pass `--store NAME`, or set `store = "NAME"` and [stores.NAME] in {ws.own}/recipe.toml'
        raise NotFound(
            "a worker for other workspaces requires the shared store of the submitters", fix=fix
        )
    return found


def _open_workspace(ws: Workspace, row: RunRow) -> Workspace:
    """Return the workspace in which a run is executed.

    This is the worker's workspace, or the unpacked directory of the run's bundle with the worker's
    cache.
    """
    if not row.bundle:
        return ws

    cache = ws.remote_cache
    assert cache is not None  # the worker's offer includes the store
    data = ws.store.runs.exchange.bundle(row.bundle)
    if data is None:
        content = Content(f"f:{row.bundle}")
        if cache.bring([content]):
            raise Infrastructure(
                f"the bundle of run {row.id} is not in the shared store", fix="submit the run again"
            )
        data = ws.objects.path(content).read_bytes()
    inside = ws.within(bundles.unpack(ws, row.bundle, data, cache.bring))
    ws.save_cache()
    inside.delivers = True
    inside.share(cache.name, push=True)
    return inside


def _store_end(ws: Workspace, row: RunRow, fence: int, end: RunState) -> None:
    """Store the final state of a run if this worker still has its claim."""
    if row.fence == fence and row.claim:
        settle(ws.store.runs, row.id, fence, end.state, end.reason, failure=end.failure)
