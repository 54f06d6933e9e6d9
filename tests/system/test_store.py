"""The store on a disk: damage is refused, crashes leave nothing half done, formats only go forward."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.errors import Busy, RecipeError, Unusable
from runner.interface.cli.main import main
from runner.storage.content import files
from runner.storage.content.digest_cache import DigestCache
from runner.storage.content.disk import delete
from runner.storage.content.files import Content, scan
from runner.storage.content.objects import Objects
from runner.storage.garbage import collect, find_garbage
from runner.storage.records import database
from runner.storage.records import store as module
from runner.storage.records.database import Kind
from runner.storage.records.index import CachedOutput, Changes, PublishedFile, Trace
from runner.storage.records.runs import AttemptRow, RunRow, StepRow
from runner.storage.records.store import Store, home
from tests.contract.store_contract import *  # noqa: F403
from tests.contract.store_contract import RUN, Move, trace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / ".recipe"


@pytest.fixture
def fresh(root: Path) -> Iterator[Callable[[], Store]]:
    opened: list[Store] = []

    def another() -> Store:
        opened.append(Store.open(root))
        return opened[-1]

    yield another
    for one in opened:
        one.close()


@pytest.fixture
def store(fresh: Callable[[], Store]) -> Store:
    return fresh()


def migrated(statements: tuple[str, ...]) -> Kind:
    """The store's kind with one version more."""
    return module.STORE._replace(migrations=(*module.STORE.migrations, statements))


def test_reading_makes_nothing(root: Path) -> None:
    with Store.open(root, read_only=True) as store:
        assert (
            store.runs.latest() == []
            and store.index.traces(["k"]) == {}
            and store.index.files() == []
            and not store.runs.live("r")
        )
    assert not root.exists()


def test_a_reader_sees_what_a_writer_wrote_and_cannot_write(root: Path, store: Store) -> None:
    store.runs.submit(RUN)
    with Store.open(root, read_only=True) as reader:
        assert reader.runs.latest()[0].id == "r1" and reader.database.check() == ""
        with pytest.raises(Unusable):
            reader.runs.submit(RUN._replace(id="r2"))


def test_a_reader_undoes_what_a_killed_writer_had_begun(root: Path, store: Store) -> None:
    store.runs.submit(RUN)
    killed = f"""
import os, sqlite3
db = sqlite3.connect({str(root / "recipe.db")!r}, isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE runs SET reason = 'half done'")
db.executemany("INSERT INTO meta VALUES (?, ?)", [(str(n), "x" * 900) for n in range(100)])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    assert (root / "recipe.db-journal").stat().st_size > 0
    with Store.open(root, read_only=True) as reader:
        assert reader.runs.get(RUN.id).reason == RUN.reason


NOW = module.STORE.migrations


def test_a_newer_format_is_refused_and_an_older_one_migrated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(root).close()
    monkeypatch.setattr(
        module, "STORE", migrated(("CREATE TABLE later (x)", "INSERT INTO meta VALUES ('a', 'b')"))
    )
    with pytest.raises(Unusable, match="older"):
        Store.open(root, read_only=True)
    with Store.open(root) as store:
        assert store.database.connection.execute("SELECT * FROM meta").fetchall() == [("a", "b")]
    monkeypatch.setattr(
        module, "STORE", module.STORE._replace(migrations=module.STORE.migrations[:-1])
    )
    for read_only in (True, False):
        with pytest.raises(Unusable, match=f"format {len(NOW) + 1} was written by a newer recipe"):
            Store.open(root, read_only=read_only)


def test_the_page_about_the_format_names_its_version() -> None:
    page = Path(__file__).parents[2] / "docs" / "workspace-format.md"
    assert f"version {len(NOW)} of the format." in page.read_text()


def test_a_migration_that_fails_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(root).close()
    before = (root / "recipe.db").read_bytes()
    monkeypatch.setattr(
        module, "STORE", migrated(("CREATE TABLE later (x)", "INSERT INTO nowhere VALUES (1)"))
    )
    with pytest.raises(Unusable, match="nowhere"):
        Store.open(root)
    monkeypatch.undo()
    Store.open(root).close()
    assert sqlite3.connect(root / "recipe.db").execute("PRAGMA user_version").fetchone() == (
        len(NOW),
    ) and len(before)


def test_another_program_s_database_is_refused(root: Path) -> None:
    root.mkdir()
    with sqlite3.connect(root / "recipe.db") as db:
        db.execute("CREATE TABLE x (y)")
    with pytest.raises(Unusable, match="not a recipe store"):
        Store.open(root)


@pytest.mark.parametrize("length", [0, 1, 50, 99, 100, 4096, 8191, 20000])
def test_a_database_that_was_cut_short_is_refused_and_never_looks_empty(
    root: Path, length: int
) -> None:
    Store.open(root).close()
    os.truncate(root / "recipe.db", length)
    for read_only in (True, False):
        with pytest.raises(Unusable, match="the file is truncated"):
            Store.open(root, read_only=read_only)


def test_a_flipped_bit_is_refused_or_harmless_and_never_a_wrong_result(root: Path) -> None:
    keys = [f"{n:064x}" for n in range(300)]
    truth = {key: [("out", f"o/{n}", "f:" + "ab" * 32)] for n, key in enumerate(keys)}
    with Store.open(root) as store:
        store.runs.submit(RUN)
        fence = store.runs.claim("r1", "w")
        assert fence is not None
        traces = [
            Trace(
                key, "t@1", "s", "r1", 1.0, 1.0, tuple(CachedOutput(*made) for made in truth[key])
            )
            for key in keys
        ]  # type: ignore[arg-type]
        store.runs.group(
            "r1",
            fence,
            steps=[StepRow("r1", f"s{n}", "DONE") for n in range(300)],
            changes=Changes(traces=traces),
        )
    good = (root / "recipe.db").read_bytes()
    refused = 0
    for n in range(250):
        at = (n * 7919 * 13) % (len(good) * 8)
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        (root / "recipe.db").write_bytes(bad)
        try:
            with Store.open(root) as store:
                for key, (made, _) in store.index.outputs("tool@1").items():
                    assert [tuple(one) for one in made] == truth[key]
                for key, whole in store.index.traces(keys[:50]).items():
                    assert [tuple(one) for one in whole.outputs] == truth[key]
                store.runs.latest(), store.runs.steps("r1"), store.runs.events("r1")
        except RecipeError:
            refused += 1
    assert 0 < refused < 250


def test_a_store_that_is_opened_twice_in_a_process_stays_locked_for_its_writer(
    root: Path, store: Store
) -> None:
    store.database.connection.execute("BEGIN IMMEDIATE")
    for read_only in (True, False):
        Store.open(root, read_only=read_only).close()
    another = f"import sqlite3; sqlite3.connect({str(root / 'recipe.db')!r}, timeout=0, isolation_level=None).execute('BEGIN IMMEDIATE')"
    assert (
        b"database is locked"
        in subprocess.run([sys.executable, "-c", another], capture_output=True).stderr
    )


def test_a_busy_database_is_said_after_a_while(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.01)
    with Store.open(root) as other:
        store.database.connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(Busy, match="another process"):
            other.runs.submit(RUN)
        store.database.connection.execute("ROLLBACK")
        other.runs.submit(RUN)


@pytest.mark.parametrize("kind", ["nfs4", "afs", "fuse.sshfs"])
def test_a_network_file_system_is_refused_by_name_and_by_doctor(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    Store.open(root).close()
    mounts = f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:9 / {root.parent} rw - {kind} server:/x rw\n3 1 8:2 / /elsewhere rw - ext4 /dev/y rw\n"
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args, **named: (
            mounts if path.name == "mountinfo" else read(path, *args, **named)
        ),
    )
    with pytest.raises(Unusable, match=kind) as caught:
        Store.open(root)
    assert "RECIPE_HOME" in caught.value.fix
    assert main(["doctor", "-C", str(root.parent)]) == 2
    assert f"{kind}, a network file system" in capsys.readouterr().out


def test_two_workspaces_below_one_recipe_home_do_not_meet(tmp_path: Path) -> None:
    assert home(tmp_path, {}) == tmp_path / ".recipe"
    one, other = (home(tmp_path / name / "w", {"RECIPE_HOME": "/h"}) for name in "ab")
    assert one.parent == other.parent == Path("/h") and one != other


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / ".recipe").write_text("")
    with pytest.raises(Unusable, match=r"\.recipe"):
        Store.open(tmp_path / ".recipe")


WORKER = """
import sys
from pathlib import Path
from runner.storage.content import files
from runner.storage.records import database
from runner.storage.content.objects import Objects
from runner.storage.content.digest_cache import DigestCache
from runner.storage.records.index import *
from runner.storage.records.runs import *
from runner.storage.records.store import *
class Move(NamedTuple):
    subject: str; id: str; before: str; after: str; reason: str = ""; data: dict = {}
w = Path(sys.argv[1])
store = Store.open(w / ".recipe")
objects, cache = Objects(w / ".recipe", store.index.seal), DigestCache(w, store.index.files())
store.runs.submit(RunRow("r", "t@1", "p", {}, str(w)))
fence = store.runs.claim("r", "w")
done = store.index.traces([f"k{n}" for n in range(4)])
for n in range(4):
    if f"k{n}" in done:
        continue
    out = w / f"attempt{n}"
    out.write_bytes(b"%d" % n * (1 if n % 2 else 70_000))
    content = objects.take(out)
    objects.copy_to(content, w / f"out{n}")
    cache.note(f"out{n}", content)
    store.runs.group("r", fence, [Move("step", f"s{n}", "QUEUED", "RUNNING"), Move("step", f"s{n}", "RUNNING", "DONE")], steps=[StepRow("r", f"s{n}", "DONE", f"k{n}")], changes=Changes(traces=[Trace(f"k{n}", "t@1", f"s{n}", "r", 1.0, 1.0, (CachedOutput("o", f"out{n}", content),))], files=cache.changes(), objects=objects.seals.changes(), published=[PublishedFile(f"out{n}", content, "", "r", f"s{n}", "t@1")]))
store.runs.group("r", fence, [Move("run", "r", "ACTIVE", "COMPLETED")], run_state=("COMPLETED", ""))
"""

POINTS = [
    f"{name}:{k}"
    for name in ("object-put", "copy-written", "group-begun", "group-written", "group-committed")
    for k in (1, 2, 4)
]


@pytest.mark.parametrize("point", ["store-made:1", *POINTS, "group-written:5"])
def test_a_kill_at_any_instant_loses_nothing_that_was_done_and_keeps_nothing_half_done(
    tmp_path: Path, point: str
) -> None:
    def work(**extra: str) -> int:
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **extra}
        return subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path)], env=environ, check=False
        ).returncode

    def truth() -> dict[str, StepRow]:
        with Store.open(tmp_path / ".recipe") as store:
            assert store.database.check() == ""
            objects, cache = (
                Objects(tmp_path / ".recipe", store.index.seal),
                DigestCache(tmp_path, store.index.files()),
            )
            steps = store.runs.steps("r")
            assert (
                {f"k{step[1:]}" for step in steps}
                == set(store.index.traces([f"k{n}" for n in range(4)]))
                == {row.key for row in steps.values()}
            )
            for whole in store.index.traces([row.key for row in steps.values()]).values():
                for _, path, content in whole.outputs:
                    assert (
                        objects.intact(content)
                        and objects.verify(content)
                        and cache.content_of(path) == content
                    )
            for n in range(4):
                whole = b"%d" % n * (1 if n % 2 else 70_000)
                assert (
                    not (tmp_path / f"out{n}").exists()
                    or (tmp_path / f"out{n}").read_bytes() == whole
                )
            seen = [event.seq for event in store.runs.events("r")]
            assert seen == list(range(1, len(seen) + 1)) and not store.runs.live("r")
            return steps

    assert work(RECIPE_CRASH_AT=point) == -9
    kept = truth()
    assert work() == 0
    assert {**truth(), **kept} == truth() and len(truth()) == 4
    with Store.open(tmp_path / ".recipe") as store:
        assert store.runs.get("r").state == "COMPLETED"


@pytest.fixture
def objects(root: Path, store: Store) -> Objects:
    return Objects(root, store.index.seal)


def test_garbage_is_what_nothing_refers_to(tmp_path: Path, store: Store, objects: Objects) -> None:
    def put(text: str) -> Content:
        (tmp_path / "x").write_text(text)
        content = objects.take(tmp_path / "x")
        delete(tmp_path / "x")
        return content

    old, new, shown, orphan = put("old"), put("new"), put("shown"), put("orphan")
    ids = ["r1", "r2", "r3"]
    for n, run in enumerate(ids):
        store.runs.submit(RunRow(run, "t@1", "p", {}, "", created=float(n + 1)))
    fence = store.runs.claim("r1", "w")
    assert fence is not None
    named = {"old": old, "shown": shown, "new": new}
    made = [
        trace(name, content=content, recipe="t@1", made_at=at)
        for at, (name, content) in enumerate(named.items())
    ]
    store.runs.group(
        "r1",
        fence,
        changes=Changes(traces=made, published=[PublishedFile("o/a", shown, "", "r1", "a", "t@1")]),
    )
    assert (
        find_garbage(store, objects, keep_days=0, keep_runs=0).traces == ()
    )  # the recipe is running
    assert (
        find_garbage(store, objects, keep_days=0, keep_runs=0).objects == ()
    )  # and what it puts away is not yet in a trace
    for run in ids:
        mine = store.runs.claim(run, "w")
        assert mine is not None
        store.runs.group(run, mine, run_state=("COMPLETED", ""))
    assert find_garbage(store, objects, keep_days=100_000, keep_runs=0).traces == ()
    plan = find_garbage(store, objects, keep_days=0, keep_runs=1)
    assert (
        plan.traces == ("old",)
        and set(plan.objects) == {old, orphan}
        and set(plan.runs) == {"r1", "r2"}
        and plan.size == 9
    )
    assert put("orphan") == orphan  # a step made it again after the decision
    assert collect(store, objects, plan, tmp_path) == 3
    assert set(objects.all()) == {new, shown, orphan} and set(
        store.index.traces(["old", "shown", "new"])
    ) == {"shown", "new"}
    assert [run.id for run in store.runs.latest()] == ["r3"] and store.runs.events("r1") == []


def test_attempts_of_forgotten_runs_go_even_when_read_only(
    tmp_path: Path, store: Store, objects: Objects
) -> None:
    for name in ("kept", "gone"):
        (store.root / "attempts" / name / "deep").mkdir(parents=True)
        (store.root / "attempts" / name / "deep" / "f").touch()
        (store.root / "attempts" / name / "deep").chmod(0o555)
    store.runs.submit(RUN)
    fence = store.runs.claim("r1", "w")
    assert fence is not None
    store.runs.group("r1", fence, attempts=[AttemptRow("a1", "r1", "a", 1, dir="attempts/kept")])
    store.runs.group("r1", fence, run_state=("FAILED", "exit"))
    plan = find_garbage(store, objects, keep_days=-1, keep_runs=1)
    assert plan.attempts == ("gone",)
    collect(store, objects, plan, tmp_path)
    assert [path.name for path in (store.root / "attempts").iterdir()] == ["kept"]


def test_a_no_op_of_a_thousand_steps_reads_no_file(
    tmp_path: Path, store: Store, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DigestCache(tmp_path)
    store.runs.submit(RUN)
    fence = store.runs.claim("r1", "w")
    assert fence is not None
    (tmp_path / "x").write_text("x")
    content = scan(tmp_path / "x")
    objects.put(tmp_path / "x", content, move=True)
    paths = [f"o/{n}" for n in range(1000)]
    for path in paths:
        objects.copy_to(content, tmp_path / path)
        cache.note(path, content)
    store.runs.group(
        "r1",
        fence,
        [Move("run", "r1", "", "ACTIVE")],
        changes=Changes(files=cache.changes(), objects=objects.seals.changes()),
    )
    monkeypatch.setattr(files, "_hash", None)
    with Store.open(tmp_path / ".recipe", read_only=True) as reader:
        assert set(DigestCache(tmp_path, reader.index.files()).contents(paths).values()) == {
            content
        }


def test_a_group_that_a_thread_stores_is_there_for_the_next_reader(
    store: Store, root: Path
) -> None:
    store.runs.submit(RUN)
    fence = store.runs.claim("r1", "w")
    assert fence is not None
    landed = threading.Event()
    last = store.runs.group(
        "r1",
        fence,
        [Move("step", "a", "RUNNING", "DONE")],
        landed=landed.set,
        changes=Changes(traces=[trace("k")]),
    )
    assert store.index.trace("k") is not None and landed.is_set()
    store.runs.land()
    with Store.open(root, read_only=True) as reader:
        assert reader.index.trace("k") is not None and last == reader.runs.events("r1")[-1].seq


def test_a_group_that_did_not_land_is_said_to_every_reader_and_nothing_of_it_is_there(
    fresh: Callable[[], Store], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.05)
    store = fresh()
    store.runs.submit(RUN)
    fence = store.runs.claim("r1", "w")
    assert fence is not None
    reader = sqlite3.connect(root / "recipe.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM runs").fetchall()  # nobody can commit as long as this one reads
    store.runs.group(
        "r1",
        fence,
        [Move("step", "a", "RUNNING", "DONE")],
        landed=lambda: None,
        changes=Changes(traces=[trace("k")]),
    )
    with pytest.raises(Busy):
        store.runs.land()
    reader.close()
    assert store.index.trace("k") is None
    store.runs.group(
        "r1", fence, [Move("step", "a", "RUNNING", "DONE")], changes=Changes(traces=[trace("k")])
    )
    assert store.index.trace("k") is not None
