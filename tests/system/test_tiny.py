"""Contents of a few bytes: rows instead of files, and never less than files."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import Corrupt
from runner.storage.content.digest_cache import DigestCache
from runner.storage.content.files import Content, scan
from runner.storage.content.objects import Objects
from runner.storage.content.tiny import TINY
from runner.storage.garbage import collect, find_garbage
from runner.storage.records.index import Changes
from runner.storage.records.runs import RunRow
from runner.storage.records.store import Store
from runner.storage.workspace import Workspace
from tests.support import Space

DEAD = "999999999"
"""No process has this number."""


_numbers = itertools.count()


@pytest.fixture
def ws(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(tmp_path) as ws:
        yield ws


def remember(ws: Workspace, data: bytes, name: str = "made", mode: int = 0o644) -> Content:
    path = ws.root / name
    path.write_bytes(data)
    path.chmod(mode)
    content = ws.objects.tiny.remember(str(path), path.lstat())
    assert content is not None
    return content


def stored(ws: Workspace) -> None:
    """What a ledger does with what has come."""
    run = f"r{next(_numbers)}"
    ws.store.runs.submit(RunRow(run, "t@1", "p", {}, ""))
    fence = ws.store.runs.claim(run, "w")
    assert fence is not None
    tiny, logs = ws.objects.tiny.take_unstored()
    ws.store.runs.group(run, fence, changes=Changes(tiny=tiny))
    for log in logs:
        os.unlink(log)
    ws.store.runs.group(run, fence, run_state=("COMPLETED", ""))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.one_of(st.binary(max_size=60), st.sampled_from([b"x" * TINY, b"f:00 3\nabc\n"])),
    executable=st.booleans(),
    late=st.booleans(),
)
def test_what_is_remembered_comes_back_as_it_was_before_and_after_it_is_stored(
    ws: Workspace, data: bytes, executable: bool, late: bool
) -> None:
    content = remember(ws, data, mode=0o755 if executable else 0o644)
    assert content == scan(ws.root / "made")
    objects = ws.objects
    if late:
        stored(ws)
        objects = Objects(ws.home, ws.store.index.seal, ws.store.index)
    assert (
        objects.has(content)
        and objects.intact(content)
        and objects.verify(content)
        and objects.size(content) == len(data)
    )
    assert objects.small(content) == data
    for name, link in (("copy", False), ("linked", True)):
        objects.copy_to(content, ws.root / name, link=link)
        assert scan(ws.root / name) == content
        (ws.root / name).unlink()
    assert objects.path(content).read_bytes() == data and stat.S_IMODE(
        objects.path(content).stat().st_mode
    ) == (0o555 if executable else 0o444)
    objects.remove(content)
    objects.path(content).unlink(missing_ok=True)
    assert late != objects.has(content)  # what is not stored yet is still to be


@pytest.mark.parametrize("why", ["large", "two names", "read-only"])
def test_what_is_large_shared_or_read_only_is_not_remembered(ws: Workspace, why: str) -> None:
    path = ws.root / "made"
    path.write_bytes(b"x" * (TINY + 1 if why == "large" else 1))
    if why == "two names":
        os.link(path, ws.root / "other")
    elif why == "read-only":
        path.chmod(0o444)
    assert ws.objects.tiny.remember(str(path), path.lstat()) is None


@pytest.mark.parametrize("old", [b"", b"longer than what comes"])
def test_what_is_written_over_a_spare_file_has_its_mode_and_is_known_unread(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, old: bytes
) -> None:
    content = remember(ws, b"secret", mode=0o600)
    spare = ws.root / "spare"
    spare.write_bytes(old)
    spare.chmod(0o600)
    ws.publish(content, "deep/out.txt", link=False, spare=lambda path: bool(spare.rename(path)))
    target = ws.root / "deep/out.txt"
    (ws.root / "ordinary").touch()
    assert (
        target.read_bytes() == b"secret"
        and (ws.root / "made").read_bytes() == b"secret"
        and not spare.exists()
    )
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(
        (ws.root / "ordinary").stat().st_mode
    )
    ws.save_cache()
    monkeypatch.setattr("runner.storage.content.files._hash", None)
    assert DigestCache(ws.root, ws.store.index.files()).content_of("deep/out.txt") == content
    monkeypatch.undo()
    target.write_bytes(b"edited")
    assert ws.cache.content_of("deep/out.txt") == scan(target) != content


def as_of_a_dead_process(ws: Workspace) -> Path:
    (log,) = (ws.home / "partial").glob("*.tiny")
    return log.rename(log.with_name(f"{DEAD}-1-1.tiny"))


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_what_a_killed_process_had_not_stored_is_known_and_taken_over_as_far_as_it_is_whole(
    tmp_path: Path, torn: int
) -> None:
    with Workspace.open(tmp_path) as ws:
        first, last = remember(ws, b"one\n"), remember(ws, b"two\n")
        log = as_of_a_dead_process(ws)
        os.truncate(log, log.stat().st_size - torn)
    with Workspace.open(tmp_path) as ws:
        assert ws.objects.has(first) and ws.objects.has(last) == (torn == 0)
        ws.objects.tiny.inherit()
        stored(ws)
        assert not log.exists()
    with Workspace.open(tmp_path) as ws:
        assert ws.objects.small(first) == b"one\n" and ws.objects.has(last) == (torn == 0)


def test_what_a_living_process_has_not_stored_is_known_and_not_taken_over(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as ws, Workspace.open(tmp_path) as other:
        content = remember(ws, b"one\n")
        assert other.objects.has(content)
        other.objects.tiny.inherit()
        assert other.objects.tiny.take_unstored() == ({}, [])


@pytest.mark.parametrize("data", [b"made by another", b""])
def test_what_another_process_stores_while_we_look_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    with Workspace.open(tmp_path) as ours, Workspace.open(tmp_path) as other:
        content = remember(other, data)
        look = ours.store.index.tiny

        def look_and_be_late(contents: Sequence[Content]) -> dict[Content, bytes]:
            monkeypatch.setattr(ours.store.index, "tiny", look)
            found = look(contents)
            stored(other)
            return found

        monkeypatch.setattr(ours.store.index, "tiny", look_and_be_late)
        assert ours.objects.has(content)
        assert ours.objects.small(content) == data


def test_a_damaged_row_is_not_given_out(ws: Workspace) -> None:
    content = remember(ws, b"one\n")
    stored(ws)
    ws.store.database.connection.execute("UPDATE tiny SET data = 'two'")
    objects = Objects(ws.home, ws.store.index.seal, ws.store.index)
    objects.tiny.expect([content])
    assert not objects.has(content) and not objects.intact(content) and not objects.verify(content)
    with pytest.raises(Corrupt, match="is not in the store"):
        objects.copy_to(content, ws.root / "out")


def test_rows_are_garbage_when_nothing_refers_to_them(ws: Workspace) -> None:
    old = remember(ws, b"old")
    stored(ws)
    plan = find_garbage(ws.store, ws.objects, keep_days=0, keep_runs=0)
    assert plan.objects == (old,) and plan.size == 3 and set(ws.objects.all()) == {old}
    again = remember(ws, b"old")
    assert collect(ws.store, ws.objects, plan, ws.root) == 3 and again == old
    assert ws.objects.has(old)  # it was made again, and is still to be stored
    stored(ws)
    assert collect(ws.store, ws.objects, plan, ws.root) == 0 and set(ws.objects.all()) == {old}


def test_a_store_of_the_first_format_is_taken_over_with_all_that_it_holds(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.write("in.txt", "1\n")
    space.recipe(
        "steps:\n  a: {run: cp in.txt a.txt, deps: [in.txt], outputs: {o: a.txt}}\n  b: {run: 'cp {{ steps.a.o }} b.txt', outputs: {o: b.txt}}\n"
    )
    monkeypatch.setattr("runner.storage.content.tiny.TINY", -1)
    assert space.run() == ["a", "b"]
    with Store.open(space.root / ".recipe") as store:
        later = "DROP TABLE outbox; DROP INDEX runs_by_state; DROP INDEX runs_by_user; DROP INDEX runs_by_age; DROP INDEX attempts_by_step;"
        later += (
            "DROP INDEX traces_by_step; CREATE INDEX traces_by_recipe ON traces (recipe, made_at);"
        )
        later += "DROP INDEX runs_due; DROP INDEX runs_by_idempotency;" + "".join(
            f"ALTER TABLE runs DROP COLUMN {name};"
            for name in ("priority", "due", "idempotency", "recoveries", "user", "failure")
        )
        later += "".join(
            f"ALTER TABLE steps DROP COLUMN {name};" for name in ("detail", "numbers", "began")
        )
        store.database.connection.executescript(
            f"{later} DROP TABLE workers; DROP TABLE summaries; DROP INDEX attempts_by_key; DROP TABLE tiny; DROP TABLE measured; PRAGMA user_version = 1"
        )
    monkeypatch.undo()
    (space.root / "a.txt").unlink()
    assert space.run() == [] and space.read("a.txt") == "1\n"
    space.write("in.txt", "2\n")
    assert space.run() == ["a", "b"] and space.read("b.txt") == "2\n"


def test_tiny_outputs_taken_in_threads_are_all_stored(ws: Workspace) -> None:
    paths = []
    for n in range(400):
        paths.append(ws.root / f"made{n}")
        paths[-1].write_text(f"{n}\n")
    kept: dict[Content, bytes] = {}
    logs: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(ws.objects.tiny.remember, str(path), path.lstat()) for path in paths]
        while not all(each.done() for each in taken):
            tiny, written = ws.objects.tiny.take_unstored()
            kept |= tiny
            logs += written
    tiny, written = ws.objects.tiny.take_unstored()
    assert {each.result() for each in taken} == (kept | tiny).keys()
    assert sum(Path(log).read_bytes().count(b"f:") for log in [*logs, *written]) == len(paths)
