"""What a handle asks and reads, without a network: a server of values, whose answers are lost where the test says so."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from runner.api.values import Artifact, File, Progress, Status, StepStatus
from runner.errors import Busy, CannotAsk, CannotRun, Corrupt, Infrastructure, Invalid, NotFound
from runner.interface.handle import core, questions
from runner.interface.handle.core import Answer, Clock, Give, More, Nap, TimedOut, TransportRequest
from runner.interface.handle.files import Download
from runner.interface.handle.notebook import html
from runner.interface.handle.transport import LogPart, New, RequestLost, Transport
from runner.storage.records.runs import Event
from runner.survey.request import Request

PRINTED = {("a", 1): b"one\ntwo\r\n\xc3\xa4 three\n", ("a", 2): b"", ("b", 1): b"no end"}


class Place:
    """A run that prints; each answer may be lost, break off, or end early, by `luck`."""

    name = "https://recipes.example"

    def __init__(self, seed: int, printed: dict[tuple[str, int], bytes] = PRINTED) -> None:
        self._luck = random.Random(seed)
        self._printed = printed
        self.now = 0.0
        self._lost = 0  # one after the other
        self.known: list[Event] = []
        self._add("run", "r", "QUEUED", "ACTIVE")
        self._rest = [(key, kind) for key in printed for kind in ("begin", "end")]

    def _add(self, subject: str, id: str, before: str, after: str, **data: object) -> None:
        number = len(self.known) + 1
        self.known.append(Event("r", number, 0.0, subject, id, before, after, "", data))

    def go_on(self) -> None:
        if self._rest and self._luck.random() < 0.5:
            (step, number), kind = self._rest.pop(0)
            before, after = ("QUEUED", "RUNNING") if kind == "begin" else ("RUNNING", "DONE")
            self._add("step", step, before, after, attempt=number)
            if not self._rest:
                self._add("run", "r", "ACTIVE", "COMPLETED")

    def _may_be_lost(self) -> None:
        if self._luck.random() < 0.2 and self._lost < core.FEW - 1:
            self._lost += 1
            raise self._luck.choice([RequestLost("cut"), RequestLost("busy", 2.0)])
        self._lost = 0

    def run(self, _run: str) -> Status:
        self._may_be_lost()
        state = "ACTIVE" if self._rest else "COMPLETED"
        return Status("r", state=state, seq=len(self.known), progress=Progress(1))

    def events(self, _run: str, after: int) -> Sequence[Event]:
        self._may_be_lost()
        return self.known[after : after + self._luck.randint(1, 3)]

    def follow(self, _run: str, after: int) -> Iterator[Sequence[Event]]:
        self._may_be_lost()
        yield []
        for event in self.known[after : after + self._luck.randint(0, 3)]:
            if self._luck.random() < 0.2:
                raise RequestLost("reset")
            yield [event]

    def log(self, _run: str, part: LogPart) -> Iterator[bytes]:
        self._may_be_lost()
        key = (part.step, part.attempt)
        data = self._printed[key][part.offset :]
        is_over = (key, "end") not in self._rest
        breaks = is_over and bool(data) and self._luck.random() < 0.2
        if breaks or not is_over:  # the place ends in the middle of it
            data = data[: self._luck.randint(0, len(data))]
        while data:
            size = self._luck.randint(1, 4)
            yield data[:size]
            data = data[size:]
        if breaks:
            raise RequestLost("reset")


def given(talk: core.Operation, place: Place) -> list[Any]:
    """What a conversation gives, while the run goes on."""
    found: list[Any] = []
    heard: Answer = None
    pieces: Iterator[object] = iter(())
    for _ in range(10_000):
        try:
            step = talk.send(heard)
        except StopIteration:
            return found
        place.go_on()
        heard = None
        try:
            match step:
                case Give(item):
                    found.append(item)
                case Nap(seconds):
                    place.now += seconds
                case More():
                    heard = next(pieces, None)
                case TransportRequest(of, streams=True):
                    pieces = iter(cast("Iterator[object]", of(cast("Transport", place))))
                case TransportRequest(of):
                    heard = of(cast("Transport", place))
        except RequestLost as lost:
            heard = lost
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(60))
def test_what_is_followed_comes_once_and_whole_whatever_is_lost(seed: int) -> None:
    place = Place(seed)
    lines = given(core.lines("r", "", 0, True), place)
    assert [(line.step, line.attempt, line.text) for line in lines] == [
        ("a", 1, "one"),
        ("a", 1, "two"),
        ("a", 1, "ä three"),
        ("b", 1, "no end"),
    ]
    place = Place(seed)
    assert [event.seq for event in given(core.events("r", 0, True), place)] == list(
        range(1, len(place.known) + 1)
    )
    place = Place(seed)
    (ended,) = given(core.wait("r", Clock(lambda: place.now, 500.0)), place)
    assert ended.state == "COMPLETED" and ended.progress.step == 1


def test_a_wait_ends_in_time_also_where_nothing_answers() -> None:
    now = 0.0
    talk = core.wait("r", Clock(lambda: now, 30.0))
    heard: Answer = None
    with pytest.raises(TimedOut) as found:
        while True:
            step = talk.send(heard)
            if isinstance(step, Nap):
                now += step.seconds
            heard = RequestLost("refused") if isinstance(step, TransportRequest) else None
    assert now == 30.0 and isinstance(found.value, TimeoutError)


def test_a_submit_whose_answer_was_lost_is_asked_for_again_under_its_key() -> None:
    keys: list[str] = []

    class Loses:
        def submit(self, _new: New, key: str) -> str:
            keys.append(key)
            return "r"

    talk = core.submit(New(Request("x")), "key")
    first = next(talk)
    assert isinstance(first, TransportRequest) and isinstance(talk.send(RequestLost("reset")), Nap)
    second = talk.send(None)
    assert isinstance(second, TransportRequest)
    for ask in (first, second):
        ask.of(cast("Transport", Loses()))
    assert keys == ["key", "key"] and talk.send("r") == Give("r")


def test_a_request_whose_answer_was_lost_is_not_asked_for_again() -> None:
    talk = core.ask(lambda there: there.request("r", "cancel"), core.ONCE)
    next(talk)
    with pytest.raises(Infrastructure, match="cannot reach the server"):
        talk.send(RequestLost("reset"))


def body(code: str, problems: Sequence[dict[str, str]] = ()) -> bytes:
    return json.dumps(
        {"error": {"code": code, "message": "no", "fix": "do", "problems": problems}}
    ).encode()


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (404, body("not-found"), NotFound),
        (409, body("busy"), Busy),
        (409, body("final"), CannotAsk),
        (403, body("forbidden"), Invalid),
        (429, body("too-many"), RequestLost),
        (503, body("infrastructure"), RequestLost),
        (500, b"<html>", Infrastructure),
        (404, b"[]", Infrastructure),
        (422, b'{"error": {"code": 1}}', Infrastructure),
    ],
)
def test_a_refusal_is_the_error_of_the_command_line(
    status: int, said: bytes, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as found:
        questions.refuse(status, said, 2.0, "r")
    assert type(found.value) is kind
    if isinstance(found.value, RequestLost):
        assert found.value.wait == 2.0
        assert type(found.value.failure) is (Busy if status == 429 else Infrastructure)


def test_every_problem_of_a_request_is_in_the_error() -> None:
    problems = [
        {"code": "a", "message": "first", "fix": "x"},
        {"code": "b", "message": "second", "fix": ""},
    ]
    found = questions.error_of(422, body("invalid", problems))
    assert isinstance(found, Invalid) and [
        (each.code, each.message, each.fix) for each in found.problems
    ] == [
        ("a", "first", "x"),
        ("b", "second", ""),
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_of_events_may_be_cut_anywhere(size: int) -> None:
    event = {"run": "r", "at": "2026-11-23T05:00:00.000Z", "subject": "run", "id": "r", "newer": 1}
    event |= {"before": "", "after": "QUEUED", "reason": "", "data": {}}
    blocks = [f"id: {seq}\ndata: {json.dumps({**event, 'seq': seq})}\n\n" for seq in (1, 2)]
    data = f": alive\n\n{''.join(blocks)}".encode()
    stream = questions.EventStream()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [each.seq for piece in pieces for each in stream.take(piece)] == [1, 2]


def test_a_download_goes_on_behind_what_came() -> None:
    talk = core.download("r", ())
    next(talk)
    assert isinstance(talk.send([Artifact("s.o", "f:00", 6, stored=True)]), Give)

    def asked_from(step: object) -> int:
        """From which byte on the file is asked for."""
        begins: list[int] = []

        class Files:
            def file(self, _run: str, _name: str, _path: str, begin: int) -> None:
                begins.append(begin)

        assert isinstance(step, TransportRequest) and step.streams
        step.of(cast("Transport", Files()))
        return begins[0]

    assert asked_from(talk.send(None)) == 0
    assert isinstance(talk.send(None), More)
    assert talk.send(b"abc") == Give(b"abc")
    assert isinstance(talk.send(None), More)
    assert isinstance(talk.send(RequestLost("reset")), Nap)
    assert asked_from(talk.send(None)) == 3
    assert questions.file("r", "s.o", "", 3).headers == {"Range": "bytes=3-"}


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_a_download_stays_below_its_folder(path: str, tmp_path: Any) -> None:
    with pytest.raises(Corrupt), Download(tmp_path / "d", False) as files:
        files.take(File(path, "", None))
    assert not (tmp_path / "x").exists()


def test_a_download_that_follows_a_link_out_of_its_folder_is_refused(tmp_path: Any) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "out").symlink_to(tmp_path)
    with pytest.raises(Corrupt, match="points outside"), Download(tmp_path / "d", False) as files:
        files.take(File("out/x", "", None))


@pytest.mark.parametrize("where", ["/etc/passwd", "../x", "a/../../../x"])
def test_a_link_that_leads_out_of_its_output_is_not_made(where: str, tmp_path: Any) -> None:
    with pytest.raises(Corrupt, match="outside its output"), Download(tmp_path, False) as files:
        files.take(File("s.all/link", f"l:{where}", 0))
    assert list((tmp_path / "s.all").iterdir()) == []


def test_a_download_replaces_no_link_that_leads_elsewhere(tmp_path: Any) -> None:
    (tmp_path / "link").symlink_to("mine")
    with (
        Download(tmp_path, False) as files,
        pytest.raises(CannotRun, match="already exists with other content"),
    ):
        files.take(File("link", "l:theirs", 0))
    with Download(tmp_path, True) as files:
        files.take(File("link", "l:theirs", 0))
    assert os.readlink(tmp_path / "link") == "theirs"


def test_a_download_that_came_damaged_has_no_name(tmp_path: Any) -> None:
    with (
        pytest.raises(Corrupt, match="was damaged in transfer"),
        Download(tmp_path, False) as files,
    ):
        files.take(File("x", "f:00", None))
        files.take(b"abc")
    assert list(tmp_path.iterdir()) == []


def test_what_a_notebook_shows_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    shown = html(
        Status(
            evil,
            recipe=evil,
            state="FAILED",
            reason=evil,
            inputs={evil: evil},
            steps=[StepStatus(evil, evil, evil)],
        )
    )
    assert "<script" not in shown and shown.count("&lt;script&gt;") == 8
