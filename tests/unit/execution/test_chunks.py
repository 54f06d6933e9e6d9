"""What running attempts print goes to the database: what is new, masked, once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.errors import Infrastructure
from runner.execution.steps import chunks
from runner.execution.steps.chunks import ROW, Chunks
from runner.secrets import Masker, Secret
from runner.storage.records.exchange import Chunk
from runner.storage.records.runs import Stale

SECRET = "hunter2-hunter2"


class Exchange:
    """The rows of one run; `is_taken` once another worker has the run."""

    def __init__(self) -> None:
        self.rows: list[Chunk] = []
        self.is_taken = False
        self.calls = 0

    def add_chunks(self, run: str, fence: int, rows: list[Chunk]) -> None:
        assert (run, fence) == ("run", 3)
        self.calls += 1
        if self.is_taken:
            raise Stale("r1")
        self.rows += rows


class World:
    """A run whose one attempt prints into a log of this disk."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.exchange, self.folded = 100.0, Exchange(), 0
        monkeypatch.setattr(chunks, "time", Of(monotonic=lambda: self.now))
        self.log, self.kept = root / "a.log", root / "runs/run/a%2Fb.1.log"
        self.kept.parent.mkdir(parents=True)
        self.ws = Of(delivers=True, home=root, store=Of(runs=Of(exchange=self.exchange)))
        self.masker = Masker()
        self.attempt = Of(logs=[str(self.log)], directory=Of(path=str(root / "a")))
        self.running: dict[str, Any] = {"a/b": self.attempt}
        self.tries, self.told, self.finished = 1, list[Chunk](), list[str]()
        commits = Of(run="run", fence=3, masker=self.masker, tries=lambda _id: self.tries)
        texts: Callable[..., Any] = partial(Chunks, self.ws, commits, self.running, self._fold)  # type: ignore[arg-type]
        telemetry: Any = Of(feed=self.told.extend, finish=self.finished.append)
        self.chunks: Any = texts()
        self.with_telemetry: Any = texts(telemetry=telemetry)

    def _fold(self, work: Any) -> None:
        work.close()
        self.folded += 1

    def prints(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def tick(self, *, after: float = 1.0) -> list[tuple[int, bytes]]:
        """What was sent, with offsets."""
        self.exchange.rows.clear()
        self.now += after
        self.chunks.tick()
        return [(row.offset, row.data) for row in self.exchange.rows]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_what_is_new_is_sent_once_with_where_it_begins(world: World) -> None:
    world.prints("one\n")
    assert world.tick() == [(0, b"one\n")]
    assert world.tick() == [] and world.exchange.calls == 1
    world.prints("two\n")
    assert world.tick() == [(4, b"two\n")]
    assert {(row.attempt, row.stream) for row in world.exchange.rows} == {("a%2Fb.1", "log")}


def test_files_are_looked_at_once_a_second(world: World) -> None:
    world.prints("one\n")
    assert world.tick() and world.tick(after=0.0) == []
    world.prints("two\n")
    assert world.tick(after=0.5) == []
    assert world.tick(after=0.6) == [(4, b"two\n")]


def test_a_row_has_a_bounded_size(world: World) -> None:
    world.prints("x" * (ROW + 5))
    assert [(at, len(data)) for at, data in world.tick()] == [(0, ROW), (ROW, 5)]


def test_a_secret_is_masked_also_when_it_is_printed_in_two_halves(world: World) -> None:
    world.masker.learn([Secret("TOKEN", SECRET)])
    world.prints("a " + SECRET[:6])
    first = world.tick()
    world.prints(SECRET[6:] + " b\n")
    sent = first + world.tick()
    text = b"".join(data for _, data in sent)
    assert SECRET.encode() not in text and text.startswith(b"a ") and text.endswith(b" b\n")
    assert all(at == len(b"".join(data for _, data in sent[:n])) for n, (at, _) in enumerate(sent))


def test_the_first_half_of_a_long_log_is_sent_and_the_rest_when_it_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LOG_CAP", 20)
    world.prints("0123456789abcdef")
    assert world.tick() == [(0, b"0123456789")]
    assert world.tick() == []


def test_the_rest_of_a_kept_log_is_sent_at_the_end_and_then_folded(world: World) -> None:
    world.prints("one\n")
    world.tick()
    world.log.unlink()
    world.kept.write_text("one\ntwo\n")
    world.exchange.rows.clear()
    world.chunks.finish("a/b", world.attempt)
    assert [(row.offset, row.data) for row in world.exchange.rows] == [(4, b"two\n")]
    assert world.folded == 1
    del world.running["a/b"]
    assert world.tick() == []


def test_the_rest_of_a_masked_log_begins_where_its_masked_text_ended(world: World) -> None:
    world.masker.learn([Secret("TOKEN", SECRET)])
    world.prints(f"{SECRET}\n")
    ((_, shown),) = world.tick()
    world.kept.write_bytes(shown + b"two\n")
    world.exchange.rows.clear()
    world.chunks.finish("a/b", world.attempt)
    assert [(row.offset, row.data) for row in world.exchange.rows] == [(len(shown), b"two\n")]


def test_the_next_attempt_of_a_step_has_texts_of_its_own(world: World) -> None:
    world.prints("one\n")
    world.tick()
    world.kept.write_text("one\n")
    world.chunks.finish("a/b", world.attempt)
    world.tries = 2
    assert world.tick() == [(0, b"one\n")]
    assert world.exchange.rows[0].attempt == "a%2Fb.2"


def test_each_node_has_a_log_and_the_first_has_metrics_and_machine(
    world: World, tmp_path: Path
) -> None:
    world.attempt.logs.append(str(tmp_path / "a.1.log"))
    for name in ("a.log", "a.1.log", "a.metrics", "a.host"):
        (tmp_path / name).write_text(name)
    world.tick()
    assert [(row.attempt, row.stream, row.data) for row in world.exchange.rows] == [
        ("a%2Fb.1", "log", b"a.log"),
        ("a%2Fb.1.1", "log", b"a.1.log"),
        ("a%2Fb.1", "metrics", b"a.metrics"),
        ("a%2Fb.1", "host", b"a.host"),
    ]


@pytest.mark.parametrize("delivers", [True, False])
def test_a_platform_gets_the_text_whether_or_not_the_database_does(
    world: World, delivers: bool
) -> None:
    world.ws.delivers, world.chunks = delivers, world.with_telemetry
    world.prints("one\n")
    assert world.tick() == ([(0, b"one\n")] if delivers else [])
    assert [row.data for row in world.told] == [b"one\n"] and world.finished == []
    world.kept.write_text("one\ntwo\n")
    world.chunks.finish("a/b", world.attempt)
    assert [row.data for row in world.told] == [b"one\n", b"two\n"]
    assert world.finished == ["a%2Fb.1"] and world.folded == delivers


@pytest.mark.parametrize("fails", [False, True])
def test_each_kept_text_becomes_one_object_of_the_shared_store(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    works, kept, folded, said = list[Any](), list[Any](), list[Any](), list[str]()

    def keep(remote: object, name: list[str], files: dict[str, str]) -> None:
        if fails:
            raise Infrastructure("no answer")
        kept.append((remote, name, [*files.values()]))

    monkeypatch.setattr("runner.storage.remote.states.keep", keep)
    world.ws.remote_cache = Of(remote="bucket", name="team")
    world.chunks._beside, world.chunks._commits.say = works.append, said.append
    world.exchange.fold = lambda *words: folded.append(words)  # type: ignore[attr-defined]
    world.kept.write_text("one\n")
    world.chunks.finish("a/b", world.attempt)
    asyncio.run(works[0])
    if fails:
        assert folded == [] and "a%2Fb.1" in said[0] and "team: no answer" in said[0]
        return
    assert kept == [("bucket", ["run", "a%2Fb.1", "log"], [str(world.kept)])] and said == []
    ((run, fence, row),) = folded
    assert (run, fence, row.attempt, row.stream) == ("run", 3, "a%2Fb.1", "log") and row.content


def test_a_run_that_another_worker_has_sends_nothing_and_says_nothing(world: World) -> None:
    world.exchange.is_taken = True
    world.prints("one\n")
    assert world.tick() == []


def test_a_run_whose_files_are_read_where_they_are_sends_nothing(world: World) -> None:
    world.ws.delivers = False
    world.prints("one\n")
    assert world.tick() == []
    world.chunks.finish("a/b", world.attempt)
    assert world.exchange.rows == [] and world.folded == 0
