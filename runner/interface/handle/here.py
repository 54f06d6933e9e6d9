"""Answers what a handle asks from a workspace of this machine, or from the database that it keeps its runs in: as a server would, without one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Literal, NoReturn
from urllib.parse import unquote

from ...errors import Busy, CannotRun, Infrastructure, Invalid, NotFound, Problem
from ...execution.queue import Ticket, again, give_back, reports_of, submit
from ...execution.signals import apart
from ...execution.terms import Choice, choice_of_run, request_of_run, settings_of_run
from ...execution.unattended import end_unattended
from ...planning.ids import names, stored
from ...storage.content.files import Content
from ...storage.records.runs import FINAL, RunRow, Wanted
from ...storage.workspace import Workspace
from ...survey.rows import Rows
from .. import views
from ..logs import POLL, Part, Tail, available, missing, parts, tail_of
from ..reported import reported
from .core import Ask, AsyncPieces, Pieces, Reply

_PIECE = 1 << 18
_PAGE = 500


class Here:
    """A workspace, opened.  Methods may be called by several threads: one asks at a time."""

    def __init__(self, ws: Workspace) -> None:
        self.ws, self.name, self._lock = ws, "", threading.RLock()

    def close(self) -> None:
        with self._lock:
            self.ws.close()

    def send(self, ask: Ask) -> tuple[Reply, Pieces]:
        """Raises RecipeError."""
        answer = self._answer(ask)
        return Reply(200), answer if isinstance(answer, Generator) else _whole(answer)

    def _answer(self, ask: Ask) -> object:
        """What is to be read piece by piece, text, or a value."""
        words = [unquote(word) for word in ask.path.split("/")[2:]]
        with self._lock:
            match ask.method, words:
                case "GET", []:
                    return self._runs(ask.query)
                case "GET", [run]:
                    return views.detail(self.ws, self.ws.store.runs.get(run))
                case "GET", [run, "events"]:
                    some = self.ws.store.runs.events(
                        self.ws.store.runs.get(run).id, int(ask.query["after"]), _PAGE
                    )
                    return {"events": [views.event(each) for each in some]}
                case "GET", [run, "logs"]:
                    return self._log(run, ask.query)
                case "GET", [run, "metrics"]:
                    return self._points(run, ask.query)
                case "GET", [run, "artifacts"]:
                    return {"artifacts": self._artifacts(run, ask.query)}
                case "GET", [run, "artifacts", *name]:
                    return self._bytes(
                        run, "/".join(name), str(ask.query.get("path", "")), ask.headers
                    )
                case "POST", [run, "cancel" | "pause" | "resume" | "retry" as what]:
                    return {"run": self._control(run, what, ask.body or {})}
        raise AssertionError(f"{ask.method} {ask.path}")

    # -- reading ---------------------------------------------------------------------------------------------------------------------------------

    def _runs(self, query: Mapping[str, str | int]) -> dict[str, object]:
        limit = int(query["limit"])
        wanted = Wanted(
            tuple(filter(None, str(query.get("state", "")).split(","))),
            str(query.get("recipe", "")),
            str(query.get("user", "")),
        )
        wanted = wanted._replace(before=str(query["after"])) if "after" in query else wanted
        rows = self.ws.store.runs.page(wanted, limit + 1)
        return {
            "runs": views.listed(self.ws, rows[:limit]),
            "next": rows[limit - 1].id if len(rows) > limit else None,
        }

    def _points(self, run: str, query: Mapping[str, str | int]) -> bytes:
        of: Literal["step", "machine"] = "machine" if query.get("of") == "machine" else "step"
        found = reported(
            self.ws,
            self.ws.store.runs.get(run).id,
            str(query.get("step", "")),
            int(query.get("attempt", 0)),
            of,
        )
        return "".join(f"{json.dumps(each._asdict())}\n" for each in found).encode()

    def _part(self, run: str, query: Mapping[str, str | int]) -> Part | None:
        with self._lock:
            every = parts(self.ws.store.runs.events(run))
        return next(
            (
                part
                for part in reversed(every)
                if query["step"] in names(part.step) and part.number == query["attempt"]
            ),
            None,
        )

    def _log(self, run: str, query: Mapping[str, str | int]) -> Pieces:
        """What an attempt printed from an offset on; where it is followed until it is over."""
        follow, skip = bool(query.get("follow")), int(query["offset"])
        tail: Tail | Rows | None = None
        try:
            while (part := self._part(run, query)) is not None:
                # In this order: what is over has printed all before.
                over = part.ended or not follow or self._left(run)
                with self._lock:
                    tail = tail if tail is not None else self._opened(run, part, follow)
                    pieces = list(available(tail, part.ended)) if tail is not None else []
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

    def _opened(self, run: str, part: Part, follow: bool) -> Tail | Rows | None:
        """Raises CannotRun for a log that is being written and cannot be masked; one that is followed is shown when it is over."""
        if unset := missing(self.ws, run, part):
            if follow:
                return None
            raise CannotRun(
                f"the log of {part.step} is shown when it is over: it could not be masked",
                fix=f"set {', '.join(unset)} here",
            )
        return tail_of(self.ws, run, part)

    def _left(self, run: str) -> bool:
        """Whether nothing works on a run any more."""
        with self._lock:
            row = self.ws.store.runs.get(run)
            return row.state in FINAL or (not self.ws.store.runs.live(run) and row.due is None)

    def _artifacts(self, run: str, query: Mapping[str, str | int]) -> list[views.Facts]:
        row = self.ws.store.runs.get(run)
        self._bring(row, str(query.get("name", "")))
        return views.artifacts(
            self.ws, row, str(query.get("name", "")), str(query.get("after", ""))
        )

    def _bring(self, row: RunRow, name: str) -> None:
        """Fetch what another machine made from the shared store."""
        absent = [
            Content(each.content)
            for each in row.outputs
            if name in ("", each.name) and not self.ws.objects.has(Content(each.content))
        ]
        if absent:
            cache = self.ws.share(row.store)
            if cache is None or cache.bring(absent):
                raise Infrastructure(
                    f"the shared store {row.store} does not give what run {row.id} made",
                    fix="`recipe config` says which it is",
                )
            self.ws.save_cache()

    def _bytes(self, run: str, name: str, path: str, headers: Mapping[str, str]) -> Pieces:
        begin = int(headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        with self._lock:
            content = next(
                (
                    each["content"]
                    for each in views.outputs(self.ws, self.ws.store.runs.get(run))
                    if each["name"] == name
                ),
                None,
            )
            if content is None or not self.ws.objects.has(Content(content)):
                raise NotFound(f"run {run} has no {name} any more", fix="run it again")
            place = self.ws.objects.path(Content(content))
        with open(f"{place}/{path}" if path else place, "rb") as file:
            file.seek(begin)
            while data := file.read(_PIECE):
                yield data

    # -- asking ----------------------------------------------------------------------------------------------------------------------------------

    def _control(self, run: str, what: str, body: Mapping[str, object]) -> str:
        """Ask a run to cancel, pause or resume: at once where it waits, else by its worker.  Answers the run that goes on."""
        row, runs = self.ws.store.runs.get(run), self.ws.store.runs
        if what == "retry":
            return self._retry(row, body.get("from"))
        state: Literal["CANCELLED", "PAUSED"] = "CANCELLED" if what == "cancel" else "PAUSED"
        if row.state in FINAL:
            raise _refused(f"run {run} is {row.state} already", "`retry` runs it anew")
        if what == "resume":
            self._resume(row)
        elif row.state == state:
            raise _refused(f"run {run} is {row.state} already", "`resume` resumes it")
        elif (
            not (runs.live(run) and runs.request(run, what))
            and not apart(lambda: end_unattended(self.ws, run, state, lambda _text: None), bool)
            and not runs.request(run, what)
        ):
            self._left_behind(run)
        return run

    def _resume(self, row: RunRow) -> None:
        runs = self.ws.store.runs
        if row.state != "PAUSED":
            if row.request != "pause":
                raise _refused(
                    f"run {row.id} is {row.state}, and no pause was asked for", "`pause` pauses it"
                )
            if not runs.request(row.id, "resume"):
                self._left_behind(row.id)
        elif row.due is None:
            raise _refused(
                f"run {row.id} was begun by `recipe run`",
                f"`recipe resume {row.id}` in its workspace resumes it",
            )
        elif not give_back(self.ws, row.id):
            self._left_behind(row.id)

    def _left_behind(self, run: str) -> NoReturn:
        """What was asked of a run came after its worker read it last."""
        row = self.ws.store.runs.get(run)
        if row.state in FINAL:
            raise _refused(f"run {run} is {row.state} already", "`retry` runs it anew")
        raise Busy(
            f"the worker of the paused run {run} has not let go of it yet",
            fix="try again in a second",
        )

    def _retry(self, row: RunRow, begin: object) -> str:
        if row.state not in FINAL:
            raise _refused(f"run {row.id} is {row.state}", "`cancel` ends it")
        choice = Choice(begin=stored(str(begin))) if begin else choice_of_run(row)
        if row.bundle:
            return again(self.ws, row, choice).id
        request = request_of_run(row)
        if request is None:
            raise NotFound(
                f"run {row.id} did not note what it was asked for",
                fix="submit its recipe and inputs",
            )
        labels = row.data.get("labels")
        ticket = Ticket(
            row.priority, None, "", labels if isinstance(labels, dict) else {}, row.user
        )
        ticket = ticket._replace(reports_to=reports_of(row), here=self.ws.store.runs.shared)
        return submit(self.ws, request, choice, settings_of_run(row), ticket).id


def _whole(value: object) -> Pieces:
    yield value if isinstance(value, bytes) else json.dumps(value, default=str).encode()


def _refused(why: str, fix: str) -> Invalid:
    return Invalid([Problem("bad-request", why, fix=fix)])


# -- by await --------------------------------------------------------------------------------------------------------------------------------------


class AsyncHere:
    """The same by `await`: threads do what would block."""

    def __init__(self, here: Here) -> None:
        self._here, self.name = here, here.name

    async def send(self, ask: Ask) -> tuple[Reply, AsyncPieces]:
        from asyncio import to_thread

        reply, pieces = await to_thread(self._here.send, ask)

        async def read() -> AsyncPieces:
            with closing(pieces):
                while data := await to_thread(next, pieces, b""):
                    yield data

        return reply, read()

    async def close(self) -> None:
        from asyncio import to_thread

        await to_thread(self._here.close)
