"""The transport to a local workspace and its database: answers requests without a server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from typing import ParamSpec, TypeVar

from ...api import queue, requests
from ...api.artifacts import find_file, list_artifacts
from ...api.differences import Differences, compare_runs
from ...api.events import event_facts, read_events
from ...api.finding import find_run
from ...api.forecasts import ForecastRequest, forecast_run
from ...api.logs import (
    POLL,
    AttemptLog,
    Tail,
    apply_event,
    find_missing_secrets,
    open_tail,
    read_available,
)
from ...api.metrics import read_points
from ...api.outcomes import Outcome
from ...api.plans import plan_run
from ...api.recipes import last_used, list_recipes, summary_facts
from ...api.runs import list_runs, read_run
from ...api.starting import Start
from ...api.submitting import submit
from ...api.values import (
    Artifact,
    Forecast,
    Point,
    QueuedRun,
    RecipeEntry,
    Status,
    WorkerStatus,
)
from ...errors import CannotRun, Infrastructure, Invalid, Problem
from ...hosts.renting.any_driver import driver_names
from ...hosts.renting.offering import Shelf
from ...language import parse
from ...language.library import find
from ...planning.ids import names
from ...storage.content.files import Content
from ...storage.records.runs import FINAL, Event, RunFilter, RunRow
from ...storage.workspace import Workspace
from ...survey.bundles import fetch_packed_inputs
from ...survey.rows import StoredStream
from ..shelves import offers_of_driver
from .answers import (
    artifact_of,
    event_of,
    forecast_of,
    queued_of,
    recipe_of,
    status_of,
    worker_of,
)
from .transport import (
    AsyncEvents,
    AsyncPieces,
    Events,
    Listing,
    LogPart,
    New,
    Of,
    Pieces,
    RunPage,
    Verb,
)

_PIECE = 1 << 18
P = ParamSpec("P")
T = TypeVar("T")


class LocalTransport:
    """An open workspace.  Methods are thread-safe: a lock admits one thread at a time."""

    def __init__(self, ws: Workspace) -> None:
        self.ws, self.name, self._lock = ws, "", threading.RLock()

    def close(self) -> None:
        with self._lock:
            self.ws.close()

    # -- recipes -----------------------------------------------------------------------------------

    def recipes(self) -> Sequence[RecipeEntry]:
        with self._lock:
            used = last_used(self.ws)
            known = list_recipes(self.ws.root, self.ws.environ, in_folder=True)
        return [recipe_of(summary_facts(each, used.get(each.entry.id))) for each in known]

    def plan(self, new: New) -> Forecast:
        settings = new.settings
        with self._lock:
            self.ws.share(settings.store or None)
            request = fetch_packed_inputs(self.ws, new.request)
            found = plan_run(self.ws, request, new.choice)
            names = driver_names(self.ws.config, settings.driver) if found.todo else ()
            shelves: dict[str, list[Shelf]] = {}
            for name in names:
                for step, shelf in offers_of_driver(self.ws, found, name).items():
                    shelves.setdefault(step, []).append(shelf)
            recipe = parse.load(find(new.request.recipe, self.ws.root))
            asked = ForecastRequest(recipe, Start(new.request), settings.driver, settings.limits)
            facts = forecast_run(self.ws, found, asked, shelves)
        return forecast_of(facts)

    # -- runs --------------------------------------------------------------------------------------

    def find(self, word: str) -> str:
        with self._lock:
            return find_run(self.ws.store, word).id

    def list_runs(self, listing: Listing) -> RunPage:
        wanted = RunFilter(tuple(listing.states), listing.recipe, listing.user, tag=listing.tag)
        wanted = wanted._replace(worked=True)
        with self._lock:
            page = list_runs(self.ws, wanted, listing.limit, listing.after, numbers=False)
        return RunPage([status_of(each) for each in page.runs], page.next or "")

    def run(self, run: str) -> Status:
        with self._lock:
            return status_of(read_run(self.ws, self.ws.store.runs.get(run), numbers=False))

    def submit(self, new: New, key: str) -> str:
        # A local request cannot get lost, so the generated `key` is not needed: only the caller's
        # own key is stored, in the ticket.
        if new.webhooks:
            fix = "set webhook endpoints in recipe.toml (see docs/webhooks.md)"
            raise Invalid([Problem("bad-request", "webhooks per run require a server", fix=fix)])
        with self._lock:
            self.ws.asks_secrets = new.ticket.here or not self.ws.store.runs.shared
            return submit(self.ws, new.request, new.choice, new.settings, new.ticket).id

    def events(self, run: str, after: int) -> Sequence[Event]:
        with self._lock:
            return _public_events(read_events(self.ws, run, after))

    def follow(self, run: str, after: int) -> Events:
        while True:
            # Read the state before the events: a finished run has stored all its events.
            with self._lock:
                over = self.ws.store.runs.get(run).state in FINAL
                some = read_events(self.ws, run, after)
            if some:
                after = some[-1].seq
                yield _public_events(some)
            elif over:
                return
            else:
                time.sleep(POLL)
                yield []  # lets an asynchronous caller be cancelled between polls

    def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]:
        with self._lock:
            return list(read_points(self.ws, self.ws.store.runs.get(run).id, step, attempt, of))

    def differences(self, a: str, b: str) -> Differences:
        with self._lock:
            runs = self.ws.store.runs
            return compare_runs(self.ws, runs.get(a), runs.get(b))

    # -- logs --------------------------------------------------------------------------------------

    def log(self, run: str, part: LogPart) -> Pieces:
        skip = part.offset
        tail: Tail | StoredStream | None = None
        heard = _AttemptTracker(part)
        try:
            while (attempt := self._attempt(run, heard)) is not None:
                # Check the end before reading: a finished attempt has printed everything.
                over = attempt.ended or not part.follow or self._left(run)
                with self._lock:
                    tail = tail if tail is not None else self._tail(run, attempt, part.follow)
                    pieces = list(read_available(tail, attempt.ended)) if tail is not None else []
                for data in pieces:
                    if data[skip:]:
                        yield data[skip:]
                    skip = max(0, skip - len(data))
                if over:
                    return
                time.sleep(POLL)
        finally:
            if tail is not None:
                tail.close()

    def _attempt(self, run: str, heard: _AttemptTracker) -> AttemptLog | None:
        with self._lock:
            return heard.attempt(self.ws.store.runs.events(run, heard.after))

    def _tail(self, run: str, part: AttemptLog, follow: bool) -> Tail | StoredStream | None:
        """Open the log of an attempt; None if a followed log must wait.

        A running log without a value for each of its secrets cannot be masked.  Then returns None
        if `follow`, else raises CannotRun.
        """
        unset = find_missing_secrets(self.ws, run, part)
        if unset:
            if follow:
                return None
            absent = ", ".join(unset)
            raise CannotRun(
                f"the log of {part.step} is hidden until the step finishes: {absent} is not set here, so the secret cannot be masked",
                fix=f"set {absent} here",
            )
        return open_tail(self.ws, run, part)

    def _left(self, run: str) -> bool:
        """Return True if the run has finished, or is neither queued nor claimed by a worker."""
        with self._lock:
            row = self.ws.store.runs.get(run)
            if row.state in FINAL:
                return True
            is_queued = row.due is not None
            return not is_queued and not self.ws.store.runs.live(run)

    # -- outputs -----------------------------------------------------------------------------------

    def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        with self._lock:
            row = self.ws.store.runs.get(run)
            self._bring(row, name)
            return [artifact_of(each) for each in list_artifacts(self.ws, row, name, after)]

    def _bring(self, row: RunRow, name: str) -> None:
        """Download missing outputs from the shared store.  Raises Infrastructure."""
        wanted = [Content(each.content) for each in row.outputs if name in ("", each.name)]
        absent = [content for content in wanted if not self.ws.objects.has(content)]
        if absent:
            cache = self.ws.share(row.store)
            if cache is None or cache.bring(absent):
                raise Infrastructure(
                    f"cannot download the results of run {row.id} from the shared store {row.store}",
                    fix="check the store that `recipe config` shows",
                )
            self.ws.save_cache()

    def file(self, run: str, name: str, path: str, begin: int) -> Pieces:
        with self._lock:
            found = find_file(self.ws, self.ws.store.runs.get(run), name, path)
        with open(found.place, "rb") as file:
            file.seek(begin)
            while data := file.read(_PIECE):
                yield data

    # -- asking ------------------------------------------------------------------------------------

    def request(self, run: str, what: Verb, *, keep_hosts: bool = False) -> Outcome:
        match what:
            case "cancel":
                return requests.cancel(self.ws, run)
            case "pause":
                return requests.pause(self.ws, run, keep_hosts=keep_hosts)
            case "resume":
                return requests.resume(self.ws, run)

    def retry(self, run: str, begin: str | None) -> Outcome:
        return requests.retry(self.ws, run, begin)

    def prioritize(self, run: str, priority: int) -> Outcome:
        with self._lock:
            return requests.prioritize(self.ws, run, priority)

    # -- the queue ---------------------------------------------------------------------------------

    def workers(self) -> Sequence[WorkerStatus]:
        with self._lock:
            return [worker_of(each) for each in queue.list_workers(self.ws)]

    def queue(self) -> Sequence[QueuedRun]:
        with self._lock:
            return [queued_of(each) for each in queue.list_queue(self.ws)]


class _AttemptTracker:
    """The state of one attempt, updated from the events of its run."""

    def __init__(self, part: LogPart) -> None:
        self._part, self.after = part, 0
        self._found: list[AttemptLog] = []
        self._going: dict[str, AttemptLog] = {}

    def attempt(self, events: Sequence[Event]) -> AttemptLog | None:
        """Apply `events` and return the attempt; None if the attempt has not started."""
        for event in events:
            self.after = event.seq
            apply_event(event, self._found, self._going, self._part.node)
        for each in reversed(self._found):
            if self._part.step in names(each.step) and each.number == self._part.attempt:
                return each
        return None


def _public_events(events: Sequence[Event]) -> list[Event]:
    """Return the events without their private fields, which only workers read."""
    return [event_of(event_facts(each)) for each in events]


# -- by await --------------------------------------------------------------------------------------


class AsyncLocalTransport:
    """An asynchronous version of `LocalTransport`: blocking calls run in threads."""

    def __init__(self, here: LocalTransport) -> None:
        self._here, self.name = here, here.name

    async def recipes(self) -> Sequence[RecipeEntry]:
        return await _in_thread(self._here.recipes)

    async def plan(self, new: New) -> Forecast:
        return await _in_thread(self._here.plan, new)

    async def run(self, run: str) -> Status:
        return await _in_thread(self._here.run, run)

    async def submit(self, new: New, key: str) -> str:
        return await _in_thread(self._here.submit, new, key)

    async def events(self, run: str, after: int) -> Sequence[Event]:
        return await _in_thread(self._here.events, run, after)

    def follow(self, run: str, after: int) -> AsyncEvents:
        return _pieces(self._here.follow(run, after))

    def log(self, run: str, part: LogPart) -> AsyncPieces:
        return _pieces(self._here.log(run, part))

    async def points(self, run: str, step: str, attempt: int, of: Of) -> Sequence[Point]:
        return await _in_thread(self._here.points, run, step, attempt, of)

    async def artifacts(self, run: str, name: str, after: str) -> Sequence[Artifact]:
        return await _in_thread(self._here.artifacts, run, name, after)

    def file(self, run: str, name: str, path: str, begin: int) -> AsyncPieces:
        return _pieces(self._here.file(run, name, path, begin))

    async def request(self, run: str, what: Verb) -> Outcome:
        return await _in_thread(self._here.request, run, what)

    async def retry(self, run: str, begin: str | None) -> Outcome:
        return await _in_thread(self._here.retry, run, begin)

    async def prioritize(self, run: str, priority: int) -> Outcome:
        return await _in_thread(self._here.prioritize, run, priority)

    async def close(self) -> None:
        await _in_thread(self._here.close)


async def _in_thread(call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    return await asyncio.to_thread(call, *given, **named)


async def _pieces(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield the pieces of a generator that runs in threads."""
    with closing(pieces):
        while (piece := await _in_thread(next, pieces, None)) is not None:
            yield piece
