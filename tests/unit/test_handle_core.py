"""What a handle asks and reads, without a network: a server of values, whose answers are lost where the test says so."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from runner.api.values import File, Status, StepStatus
from runner.errors import Busy, CannotRun, Corrupt, Infrastructure, Invalid, NotFound
from runner.interface.handle import core
from runner.interface.handle.core import Ask, Clock, Give, Heard, Lost, More, Nap, Reply, TimedOut
from runner.interface.handle.files import Download
from runner.interface.handle.notebook import html

PRINTED = {("a", 1): b"one\ntwo\r\n\xc3\xa4 three\n", ("a", 2): b"", ("b", 1): b"no end"}


class Server:
    """A run that prints; each answer may be lost, break off, be refused for now, or end early, by `luck`."""

    def __init__(self, seed: int, printed: dict[tuple[str, int], bytes] = PRINTED) -> None:
        self._luck = random.Random(seed)
        self._printed = printed
        self.now = 0.0
        self._stream: list[bytes | Lost] = []
        self.events: list[dict[str, Any]] = []
        self._add("run", "r", "QUEUED", "ACTIVE")
        self._rest = [(key, kind) for key in printed for kind in ("begin", "end")]

    def _add(self, subject: str, id: str, before: str, after: str, **data: object) -> None:
        at = "2026-11-23T05:00:00.000Z"
        event = {
            "run": "r",
            "seq": len(self.events) + 1,
            "at": at,
            "subject": subject,
            "id": id,
            "before": before,
            "after": after,
        }
        self.events.append({**event, "reason": "", "data": data, "newer": 1})

    def _go_on(self) -> None:
        if self._rest and self._luck.random() < 0.5:
            (step, number), kind = self._rest.pop(0)
            self._add(
                "step",
                step,
                *(("QUEUED", "RUNNING") if kind == "begin" else ("RUNNING", "DONE")),
                attempt=number,
            )
            if not self._rest:
                self._add("run", "r", "ACTIVE", "COMPLETED")

    def _over(self, step: str, number: int) -> bool:
        return ((step, number), "end") not in self._rest

    def answer(self, step: core.Step) -> Heard:
        self._go_on()
        if isinstance(step, Nap):
            self.now += step.seconds
            return None
        if isinstance(step, More):
            piece = self._stream.pop(0) if self._stream else b""
            return piece
        assert isinstance(step, Ask)
        if self._luck.random() < 0.2:
            return self._luck.choice([Lost("cut"), Reply(503, b"gone"), Reply(429, b"", 2.0)])
        if step.path == "v1/runs/r":
            state = "COMPLETED" if not self._rest else "ACTIVE"
            return Reply(
                200,
                json.dumps(
                    {
                        "id": "r",
                        "state": state,
                        "seq": len(self.events),
                        "progress": {"step": 1, "new": 2},
                    }
                ).encode(),
            )
        if step.path.endswith("events"):
            after = int(step.query["after"])
            if step.streams:  # cut anywhere, and ended by a server that stops
                some = self.events[after : after + self._luck.randint(0, 3)]
                text = "".join(f"id: {each['seq']}\ndata: {json.dumps(each)}\n\n" for each in some)
                data = f": alive\n\n{text}".encode()
                cut = self._luck.choice([len(data), self._luck.randint(0, len(data))])
                lost = [Lost("reset")] if cut < len(data) else []
                self._stream = [*self._pieces(data[:cut]), *lost]
                return Reply(200)
            return Reply(
                200,
                json.dumps(
                    {"events": self.events[after : after + self._luck.randint(1, 3)]}
                ).encode(),
            )
        return self._log(step)

    def _log(self, ask: Ask) -> Reply:
        key = (str(ask.query["step"]), int(ask.query["attempt"]))
        data = self._printed[key][int(ask.query["offset"]) :]
        if not self._over(*key) or self._luck.random() < 0.2:  # the server ends in the middle of it
            if self._over(*key):
                data, self._stream = data[: self._luck.randint(0, len(data))], []
                self._stream = [*self._pieces(data), Lost("reset")]
                return Reply(200)
            data = data[: self._luck.randint(0, len(data))]
        self._stream = list(self._pieces(data))
        return Reply(200)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = self._luck.randint(1, 4)
            yield data[:size]
            data = data[size:]


def given(talk: core.Talk, server: Server) -> list[Any]:
    found, heard = [], None
    for _ in range(10_000):
        try:
            step = talk.send(heard)
        except StopIteration:
            return found
        if isinstance(step, Give):
            found.append(step.item)
            heard = None
        else:
            heard = server.answer(step)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(60))
def test_what_is_followed_comes_once_and_whole_whatever_is_lost(seed: int) -> None:
    server = Server(seed)
    lines = given(core.lines("r", "", 0, True), server)
    assert [(line.step, line.attempt, line.text) for line in lines] == [
        ("a", 1, "one"),
        ("a", 1, "two"),
        ("a", 1, "ä three"),
        ("b", 1, "no end"),
    ]
    server = Server(seed)
    assert [event.seq for event in given(core.events("r", 0, True), server)] == list(
        range(1, len(server.events) + 1)
    )
    server = Server(seed)
    (ended,) = given(core.wait("r", Clock(lambda: server.now, 500.0)), server)
    assert ended.state == "COMPLETED" and ended.progress.step == 1


def test_a_wait_ends_in_time_also_where_nothing_answers() -> None:
    now = 0.0
    talk = core.wait("r", Clock(lambda: now, 30.0))
    heard: Heard = None
    with pytest.raises(TimedOut) as found:
        while True:
            step = talk.send(heard)
            if isinstance(step, Nap):
                now += step.seconds
            heard = Lost("refused") if isinstance(step, Ask) else None
    assert now == 30.0 and isinstance(found.value, TimeoutError)


def test_a_submit_whose_answer_was_lost_is_asked_for_again_under_its_key() -> None:
    talk = core.submit({"recipe": "x"}, "key")
    first = next(talk)
    assert isinstance(talk.send(Lost("reset")), Nap)
    assert (
        talk.send(None) == first
        and isinstance(first, Ask)
        and first.headers == {"Idempotency-Key": "key"}
    )
    assert talk.send(Reply(200, b'{"id": "r"}')) == Give("r")


def test_a_cancel_whose_answer_was_lost_is_not_asked_for_again() -> None:
    talk = core.control("r", "cancel", {})
    next(talk)
    with pytest.raises(Infrastructure, match="does not answer"):
        talk.send(Lost("reset"))


def body(code: str, problems: Sequence[dict[str, str]] = ()) -> bytes:
    return json.dumps(
        {"error": {"code": code, "message": "no", "fix": "do", "problems": problems}}
    ).encode()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(404, body("not-found")), NotFound),
        (Reply(409, body("busy")), Busy),
        (Reply(409, body("final")), Invalid),
        (Reply(403, body("forbidden")), Invalid),
        (Reply(429, body("too-many")), Busy),
        (Reply(503, body("infrastructure")), Infrastructure),
        (Reply(500, b"<html>"), Infrastructure),
        (Reply(404, b"[]"), Infrastructure),
        (Reply(422, b'{"error": {"code": 1}}'), Infrastructure),
    ],
)
def test_a_refusal_is_the_error_of_the_command_line(reply: Reply, kind: type[Exception]) -> None:
    assert type(core.error_of(reply)) is kind


def test_every_problem_of_a_request_is_in_the_error() -> None:
    problems = [
        {"code": "a", "message": "first", "fix": "x"},
        {"code": "b", "message": "second", "fix": ""},
    ]
    found = core.error_of(Reply(422, body("invalid", problems)))
    assert isinstance(found, Invalid) and [
        (each.code, each.message, each.fix) for each in found.problems
    ] == [
        ("a", "first", "x"),
        ("b", "second", ""),
    ]


def test_a_download_goes_on_behind_what_came() -> None:
    talk = core.download("r", ())
    next(talk)
    listing = {
        "artifacts": [
            {
                "name": "s.o",
                "content": "f:00",
                "bytes": 6,
                "folder": False,
                "stored": True,
                "files": [],
            }
        ]
    }
    assert isinstance(talk.send(Reply(200, json.dumps(listing).encode())), Give)
    ask = talk.send(None)
    assert isinstance(ask, Ask) and "Range" not in ask.headers
    assert isinstance(talk.send(Reply(200)), More)
    assert talk.send(b"abc") == Give(b"abc")
    assert isinstance(talk.send(None), More)
    assert isinstance(talk.send(Lost("reset")), Nap)
    again = talk.send(None)
    assert isinstance(again, Ask) and again.headers == {"Range": "bytes=3-"}


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_a_download_stays_below_its_folder(path: str, tmp_path: Any) -> None:
    with pytest.raises(Corrupt), Download(tmp_path / "d", False) as files:
        files.take(File(path, "", None))
    assert not (tmp_path / "x").exists()


def test_a_download_that_follows_a_link_out_of_its_folder_is_refused(tmp_path: Any) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "out").symlink_to(tmp_path)
    with pytest.raises(Corrupt, match="by a link"), Download(tmp_path / "d", False) as files:
        files.take(File("out/x", "", None))


@pytest.mark.parametrize("where", ["/etc/passwd", "../x", "a/../../../x"])
def test_a_link_that_leads_out_of_its_output_is_not_made(where: str, tmp_path: Any) -> None:
    with pytest.raises(Corrupt, match="leads out"), Download(tmp_path, False) as files:
        files.take(File("s.all/link", f"l:{where}", 0))
    assert list((tmp_path / "s.all").iterdir()) == []


def test_a_download_replaces_no_link_that_leads_elsewhere(tmp_path: Any) -> None:
    (tmp_path / "link").symlink_to("mine")
    with Download(tmp_path, False) as files, pytest.raises(CannotRun, match="is another file"):
        files.take(File("link", "l:theirs", 0))
    with Download(tmp_path, True) as files:
        files.take(File("link", "l:theirs", 0))
    assert os.readlink(tmp_path / "link") == "theirs"


def test_a_download_that_came_damaged_has_no_name(tmp_path: Any) -> None:
    with pytest.raises(Corrupt, match="came damaged"), Download(tmp_path, False) as files:
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
