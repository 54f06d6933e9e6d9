"""What all who follow runs share: how many may follow, what waits for each, and the lines of a text that grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner.server import feed as module
from runner.server.answers import Refused
from runner.server.feed import Feed, Follower
from runner.server.messages import Message, event_by_subject, event_of_run, log_text
from runner.server.room import Room
from runner.server.run_reader import LONGEST_LINE, NewLines
from runner.server.sending import StreamResponse
from runner.server.tickets import Tickets
from runner.server.tokens import Token, Tokens
from runner.storage.locks import Locks


def test_streams_are_counted_also_of_many_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMS", 3)
    room = Room(tmp_path, {}, Tokens(tmp_path / "server", Locks(tmp_path)))
    token, _ = room.tokens.create("read", "test")
    started: list[str] = []
    full = asyncio.Event()

    async def follow(feed: Feed, over: asyncio.Event) -> None:
        async def lines(_follower: Follower) -> AsyncIterator[list[bytes]]:
            await over.wait()
            yield [b"over\n"]

        async def receive() -> dict[str, Any]:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                started.append("")
            if len(started) == 3:
                full.set()

        stream = StreamResponse(feed, token, log_text, frozenset(), lines)
        await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    async def sixty() -> list[object]:
        feed, over = Feed(room), asyncio.Event()
        tasks = [asyncio.create_task(follow(feed, over)) for _ in range(60)]
        await full.wait()
        over.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert feed.streams == 0, "a stream that is closed does not count any more"
        return list(found)

    refused = [each for each in asyncio.run(sixty()) if isinstance(each, Refused)]
    assert len(refused) == 57 and len(started) == 3
    room.close()


TOKEN = Token("t", "", "read")


def log(text: str) -> Message:
    return Message("log", "r", {"lines": [text]})


def test_a_reader_that_is_too_slow_gets_a_sentence_in_place_of_what_waits() -> None:
    async def slow() -> list[bytes]:
        follower = Follower(TOKEN, event_of_run, frozenset({"log"}), lambda: None)
        for _ in range(3):
            follower.put([log("x" * (module.BUFFER // 2))])
        follower.put([log("after the end")])
        found = await follower.take()
        assert await follower.take() == [], "it is over"
        follower.leave()
        return found

    (said,) = asyncio.run(slow())
    assert said.startswith(b"event: end\ndata: ") and b'"too-slow"' in said
    assert b"Last-Event-ID" in said, "what to do"


def test_a_connection_is_cut_whose_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)

    async def cut() -> None:
        was_cut = asyncio.Event()
        follower = Follower(TOKEN, event_of_run, frozenset(), was_cut.set)
        follower.end(module.STOPS)
        await asyncio.wait_for(was_cut.wait(), 10)

    asyncio.run(cut())


def test_a_quiet_stream_says_that_it_is_alive() -> None:
    async def quiet() -> list[bytes]:
        follower = Follower(TOKEN, event_of_run, frozenset(), lambda: None)
        now = asyncio.get_running_loop().time()
        follower.send_alive(now + module.QUIET - 1)
        follower.send_alive(now + module.QUIET + 1)
        return await follower.take()

    (said,) = asyncio.run(quiet())
    assert said.startswith(b"event: alive\n")
    assert event_by_subject(Message("alive", "", {})) == b": alive\n\n", "as it always was"


def test_only_kinds_that_are_followed_are_sent() -> None:
    async def moves() -> list[bytes]:
        follower = Follower(TOKEN, event_of_run, frozenset({"move"}), lambda: None)
        follower.known["r"] = 4
        follower.put([log("no"), *(Message("move", "r", {}, seq=seq) for seq in (4, 5))])
        return await follower.take()

    assert asyncio.run(moves()) == [b"id: 5\nevent: move\ndata: {}\n\n"]


def test_a_ticket_opens_once_soon_and_while_its_token_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(tmp_path / "server", Locks(tmp_path))
    token, _ = tokens.create("read", run="r")
    tickets = Tickets(tokens)
    first = tickets.create(token)
    assert tickets.use(first) == token
    assert tickets.use(first) is None, "it was used"
    monkeypatch.setattr("runner.server.tickets.LIFE", -1.0)
    assert tickets.use(tickets.create(token)) is None, "it has expired"
    monkeypatch.undo()
    last = tickets.create(token)
    tokens.remove(token.id)
    assert tickets.use(last) is None, "its token is gone"


class Text:
    """A text that grows, as a tail reads it."""

    def __init__(self) -> None:
        self.data = b""

    def read(self) -> bytes:
        data, self.data = self.data, b""
        return data

    def rest(self, write: Any) -> None:
        write(self.read())

    def close(self) -> None:
        self.data = b""


def test_lines_begin_where_they_are_followed_and_are_whole() -> None:
    text = Text()
    lines = NewLines(text, from_start=False)
    text.data = b"before\nbeg"
    assert lines.read(ended=False) == [] and lines.offset == len(b"before\n")
    text.data = b"un\nnext\nla"
    assert lines.read(ended=False) == [b"begun\n", b"next\n"]
    text.data = b"st"
    assert lines.read(ended=True) == [b"last"] and lines.done


def test_a_line_without_an_end_is_given_out_all_the_same() -> None:
    text = Text()
    lines = NewLines(text, from_start=True)
    text.data = b"x" * (LONGEST_LINE + 1)
    assert lines.read(ended=False) == [b"x" * (LONGEST_LINE + 1)]
