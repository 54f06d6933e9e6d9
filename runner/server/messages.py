"""Messages of live streams, and their encoding as server-sent events or WebSocket frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, Field

Kind: TypeAlias = Literal["move", "progress", "metrics", "log", "warning"]
KINDS: Final[frozenset[str]] = frozenset({"move", "progress", "metrics", "log", "warning"})
"""Kinds of messages that a client can select."""
Form: TypeAlias = Callable[["Message"], bytes]
"""An encoding of messages."""


class Message:
    """A message of a live stream, encoded once per form for all clients."""

    __slots__ = ("_forms", "_json", "data", "kind", "position", "run", "seq")

    def __init__(self, kind: str, run: str, data: Mapping[str, Any], *, seq: int = 0) -> None:
        self.kind, self.run, self.data = kind, run, data
        self.seq = seq
        """Number of an event in its run."""
        self.position = ""
        """Position of an event in the stream of all runs, at which the stream can be resumed."""
        self._json = ""
        self._forms: dict[Form, bytes] = {}

    @property
    def json(self) -> str:
        if not self._json:
            self._json = json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))
        return self._json

    def text(self, form: Form) -> bytes:
        known = self._forms.get(form)
        if known is None:
            known = self._forms[form] = form(self)
        return known


class LogLines(BaseModel):
    """Event `log`: new lines of an attempt's log."""

    run: str
    step: str
    attempt: int
    offset: int = Field(description="Offset in bytes of the first line in the log.")
    skipped: int = Field(
        description="Number of skipped bytes before these lines. GET …/logs returns the full log."
    )
    lines: list[str]


class LastMetrics(BaseModel):
    """Event `metrics`: the last value of each metric of an attempt."""

    run: str
    step: str
    attempt: int
    points: int = Field(description="Number of points reported so far. GET …/metrics returns all.")
    values: dict[str, Any]
    new: list[dict[str, Any]] = Field(
        description="New points since the last message, at most 64, evenly spaced."
    )


class Warned(BaseModel):
    """Event `warning`: a warning of a step, sent once per text."""

    run: str
    step: str
    attempt: int
    text: str


class ProgressNow(BaseModel):
    """Event `progress`: the progress and state of a run."""

    run: str
    state: str
    word: str
    step: int
    total: int | None
    percent: float | None
    eta: float | None


class Begin(BaseModel):
    """Event `begin`, the first event in a stream of all runs. Its ID is the start position."""

    at: str


class Alive(BaseModel):
    """Event `alive`, sent after 15 seconds without other events."""

    at: str


class Gap(BaseModel):
    """Event `gap`: events may be repeated or missing in a resumed stream of all runs."""

    message: str
    fix: str


class Ended(BaseModel):
    """Event `end`, the last event of each stream, with the reason for the end."""

    code: Literal["over", "too-slow", "server-stops", "token-gone", "failed"]
    message: str
    fix: str


class End(NamedTuple):
    """The reason for the end of a live stream."""

    code: str
    message: str
    fix: str = ""


OVER: Final = End("over", "the run has finished; the stream is complete")
TOO_SLOW: Final = End(
    "too-slow",
    "the client read too slowly: 1 MiB was waiting",
    "reconnect with the Last-Event-ID of the last received move, and read faster or request fewer kinds: ?kind=move",
)
STOPS: Final = End(
    "server-stops",
    "the server stops",
    "reconnect with the Last-Event-ID of the last received move",
)
TOKEN_GONE: Final = End(
    "token-gone", "the token was removed or has expired", "connect with another token"
)


def _event(kind: str, data: str, id: str) -> bytes:
    number = f"id: {id}\n" if id else ""
    return f"{number}event: {kind}\ndata: {data}\n\n".encode("utf-8", "replace")


def _frame(kind: str, data: str, id: str) -> bytes:
    return f'{{"event":"{kind}","id":"{id}","data":{data}}}'.encode("utf-8", "replace")


def _number(message: Message) -> str:
    return str(message.seq) if message.seq else ""


def event_of_run(message: Message) -> bytes:
    """Encode a message for the event stream of one run. Its ID is the event number."""
    return _event(message.kind, message.json, _number(message))


def event_of_all(message: Message) -> bytes:
    """Encode a message for the event stream of all runs."""
    return _event(message.kind, message.json, message.position)


def frame_of_run(message: Message) -> bytes:
    """Encode a message for the WebSocket of one run."""
    return _frame(message.kind, message.json, _number(message))


def frame_of_all(message: Message) -> bytes:
    """Encode a message for the WebSocket of all runs."""
    return _frame(message.kind, message.json, message.position)


def event_by_subject(message: Message) -> bytes:
    """Encode a message for an `…/events` stream, as an event named by subject or as a comment."""
    match message.kind:
        case "move":
            return _event(str(message.data["subject"]), message.json, _number(message))
        case "alive":
            return b": alive\n\n"
        case "end" if message.data["code"] != OVER.code:
            return f": {message.data['message']}; {message.data['fix']}\n\n".encode()
    return b""


def log_text(message: Message) -> bytes:
    """Return b"", because a log stream contains only log text."""
    return b""
