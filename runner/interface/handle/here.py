"""Answers what a handle asks from a workspace of this machine, or from the database that it keeps its runs in: as a server would, without one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Literal
from urllib.parse import unquote

from ...api import requests
from ...api.artifacts import find_file, list_artifacts
from ...api.events import event_facts, read_events
from ...api.logs import POLL, Part, Tail, available, missing, parts, tail_of
from ...api.metrics import read_points
from ...api.runs import list_runs, read_run
from ...api.values import Facts
from ...errors import CannotAsk, CannotRun, Infrastructure
from ...planning.ids import names
from ...storage.content.files import Content
from ...storage.records.runs import FINAL, RunRow, Wanted
from ...storage.workspace import Workspace
from ...survey.rows import StoredStream
from .core import EVENTS, Ask, AsyncPieces, Pieces, Reply, in_python

_PIECE = 1 << 18


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
                    return read_run(self.ws, self.ws.store.runs.get(run), numbers=False)
                case "GET", [run, "events"] if ask.headers.get("Accept") == EVENTS:
                    return self._events(self.ws.store.runs.get(run).id, int(ask.query["after"]))
                case "GET", [run, "events"]:
                    some = read_events(self.ws, run, int(ask.query["after"]))
                    return {"events": [event_facts(each) for each in some]}
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
                    return self._ask(run, what, ask.body or {})
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
        return list_runs(self.ws, wanted, limit, numbers=False)._asdict()

    def _events(self, run: str, after: int) -> Pieces:
        """The events of a run as a stream, until it is over."""
        while True:
            # In this order: what is over has stored all before.
            with self._lock:
                over = self.ws.store.runs.get(run).state in FINAL
                some = read_events(self.ws, run, after)
            for event in some:
                after = event.seq
                yield f"data: {json.dumps(event_facts(event), default=str)}\n\n".encode()
            if over and not some:
                return
            if not some:
                time.sleep(POLL)
                yield b":\n\n"  # who waits for this in a thread can be cancelled

    def _points(self, run: str, query: Mapping[str, str | int]) -> bytes:
        of: Literal["step", "machine"] = "machine" if query.get("of") == "machine" else "step"
        found = read_points(
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
        tail: Tail | StoredStream | None = None
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

    def _opened(self, run: str, part: Part, follow: bool) -> Tail | StoredStream | None:
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

    def _artifacts(self, run: str, query: Mapping[str, str | int]) -> list[Facts]:
        row = self.ws.store.runs.get(run)
        self._bring(row, str(query.get("name", "")))
        return list_artifacts(self.ws, row, str(query.get("name", "")), str(query.get("after", "")))

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
            found = find_file(self.ws, self.ws.store.runs.get(run), name, path)
        with open(found.place, "rb") as file:
            file.seek(begin)
            while data := file.read(_PIECE):
                yield data

    # -- asking ----------------------------------------------------------------------------------------------------------------------------------

    def _ask(self, run: str, what: str, body: Mapping[str, object]) -> dict[str, object]:
        """Ask something of a run.  Raises NotFound, CannotAsk, Busy, Infrastructure."""
        try:
            match what:
                case "cancel":
                    outcome = requests.cancel(self.ws, run)
                case "pause":
                    outcome = requests.pause(self.ws, run)
                case "resume":
                    outcome = requests.resume(self.ws, run)
                case _:
                    begin = body.get("from")
                    outcome = requests.retry(self.ws, run, None if begin is None else str(begin))
        except CannotAsk as error:
            raise in_python(error) from None
        return outcome._asdict()


def _whole(value: object) -> Pieces:
    yield value if isinstance(value, bytes) else json.dumps(value, default=str).encode()


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
