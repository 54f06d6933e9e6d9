"""What followers of runs get, and how it is written: as events of a stream, or as frames of a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, Field

Kind: TypeAlias = Literal["move", "progress", "metrics", "log", "warning"]
KINDS: Final[frozenset[str]] = frozenset({"move", "progress", "metrics", "log", "warning"})
"""What may be followed."""
Form: TypeAlias = Callable[["Message"], bytes]
"""How a message is written."""


class Message:
    """One message.  Its text is made once for each form, however many get it."""

    __slots__ = ("_forms", "_json", "data", "kind", "place", "run", "seq")

    def __init__(self, kind: str, run: str, data: Mapping[str, Any], *, seq: int = 0) -> None:
        self.kind, self.run, self.data = kind, run, data
        self.seq = seq
        """The number of a move in its run."""
        self.place = ""
        """The place of a move in the stream of all runs, by which that stream continues."""
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
    """Event `log`: lines that an attempt printed since the message before."""

    run: str
    step: str
    attempt: int
    offset: int = Field(description="Bytes of the log before the first of these lines.")
    skipped: int = Field(description="Bytes before them that no message has: GET …/logs has all.")
    lines: list[str]


class LastMetrics(BaseModel):
    """Event `metrics`: the last value of every name that an attempt reported."""

    run: str
    step: str
    attempt: int
    points: int = Field(description="How many lines it has reported: GET …/metrics has them.")
    values: dict[str, Any]
    new: list[dict[str, Any]] = Field(
        description="The points since the message before: at most 64, of more evenly spaced ones."
    )


class Warned(BaseModel):
    """Event `warning`: what a step wants people to know, each text once."""

    run: str
    step: str
    attempt: int
    text: str


class ProgressNow(BaseModel):
    """Event `progress`: how far a run is, and its state as people see it."""

    run: str
    state: str
    word: str
    step: int
    total: int | None
    percent: float | None
    eta: float | None


class Begin(BaseModel):
    """Event `begin`: the first of a stream of all runs; its id is where the stream begins."""

    at: str


class Alive(BaseModel):
    """Event `alive`: nothing happened for 15 seconds."""

    at: str


class Gap(BaseModel):
    """Event `gap`: what may have come twice, or is missing, in a stream of all runs that continues."""

    message: str
    fix: str


class Ended(BaseModel):
    """Event `end`, the last of each stream: why it ends."""

    code: Literal["over", "too-slow", "server-stops", "token-gone", "failed"]
    message: str
    fix: str


class End(NamedTuple):
    """Why a stream ends."""

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
    """A message in the event stream of one run: its id is the number of the move."""
    return _event(message.kind, message.json, _number(message))


def event_of_all(message: Message) -> bytes:
    """A message in the event stream of all runs."""
    return _event(message.kind, message.json, message.place)


def frame_of_run(message: Message) -> bytes:
    """The same in a WebSocket."""
    return _frame(message.kind, message.json, _number(message))


def frame_of_all(message: Message) -> bytes:
    """The same in a WebSocket."""
    return _frame(message.kind, message.json, message.place)


def event_by_subject(message: Message) -> bytes:
    """A message in `…/events`: only moves, called by what moved; of the rest a comment."""
    match message.kind:
        case "move":
            return _event(str(message.data["subject"]), message.json, _number(message))
        case "alive":
            return b": alive\n\n"
        case "end" if message.data["code"] != OVER.code:
            return f": {message.data['message']}; {message.data['fix']}\n\n".encode()
    return b""


def log_text(message: Message) -> bytes:
    """Nothing: the text of a log has no place for other words."""
    return b""
