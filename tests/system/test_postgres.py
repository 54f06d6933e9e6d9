"""Runs in PostgreSQL: the contract of the store, and what only many machines can do."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psycopg
import pytest

from runner.api.submitting import QueueSettings, submit
from runner.errors import Infrastructure, Unusable
from runner.execution.queue import serve
from runner.execution.steps.control import Handover, Stopper
from runner.execution.terms import Choice, Settings
from runner.reports.delivery import deliver
from runner.storage.records import postgres_claims, postgres_database, processes
from runner.storage.records.exchange import Chunk
from runner.storage.records.index import Changes
from runner.storage.records.runs import ELSEWHERE, ClaimCriteria, Stale, StepRow
from runner.storage.records.store import Store
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.contract.store_contract import *  # noqa: F403
from tests.contract.store_contract import DONE, RUN, taken
from tests.servers.postgres import Postgres
from tests.servers.receiver import Receiver
from tests.support import Space, until
from tests.system.test_outbox import moved, told
from tests.system.test_worker import TWO, Silent, begun

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
def fresh(tmp_path: Path, url: str) -> Iterator[Callable[[], Store]]:
    opened: list[Store] = []

    def another() -> Store:
        opened.append(Store.open(tmp_path / ".recipe", shared=url, workspace="here"))
        return opened[-1]

    yield another
    for one in opened:
        one.close()


@pytest.fixture
def store(fresh: Callable[[], Store]) -> Store:
    return fresh()


def test_another_workspace_does_not_see_a_run_and_its_workers_do_not_take_it(
    store: Store, tmp_path: Path, url: str
) -> None:
    store.runs.submit(RUN._replace(due=1.0))
    with Store.open(tmp_path / "other", shared=url, workspace="there") as other:
        assert other.runs.latest() == [] and other.runs.claim_next("w", ClaimCriteria()) is None
    assert store.runs.claim_next("w", ClaimCriteria()) is not None


def test_a_claim_that_is_not_kept_ends_and_its_zombie_writes_nothing(
    store: Store, fresh: Callable[[], Store], url: str
) -> None:
    store.runs.submit(RUN._replace(due=1.0))
    mine = store.runs.claim_next("w", ClaimCriteria())
    assert mine is not None and fresh().runs.claim_next("w2", ClaimCriteria()) is None
    with psycopg.connect(url, autocommit=True) as db:  # as if 30 seconds had passed
        db.execute("UPDATE runs SET held_until = now() - interval '1 second'")
    assert (
        store.runs.take_request("r1", mine.fence) == ""
    )  # nobody took it meanwhile: the beat keeps it
    assert fresh().runs.claim_next("w2", ClaimCriteria()) is None
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE runs SET held_until = now() - interval '1 second'")
    later = taken(fresh())
    assert later == ("r1", mine.fence + 1)
    for write in (
        lambda: store.runs.group("r1", mine.fence, [DONE]),
        lambda: store.runs.take_request("r1", mine.fence),
    ):
        with pytest.raises(Stale):
            write()
    assert len(store.runs.events("r1")) == 1


def test_a_group_that_changes_nothing_of_this_disk_does_not_write_to_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = store.runs.submit(RUN, "w")
    monkeypatch.setattr(store.database, "transaction", lambda *_: pytest.fail("written"))
    last = store.runs.group("r1", claimed.fence, [DONE], changes=Changes([], set(), [], [], {}, []))
    assert [event.seq for event in store.runs.events("r1")][-1] == last


def test_another_machine_takes_a_run_whose_jobs_may_go_on_here_only_when_they_have_ended(
    store: Store, url: str
) -> None:
    run = RUN._replace(due=1.0, bundle="b", store="s3://x", data={"settings": {"driver": "local"}})
    mine = store.runs.submit(run, "w")
    store.runs.group("r1", mine.fence, [DONE], steps=[StepRow("r1", "a", "RUNNING")])
    with psycopg.connect(url, autocommit=True) as db:

        def silent(seconds: float, holder: str) -> object:
            db.execute(
                "UPDATE runs SET holder = %s, held_until = now() - %s * interval '1 second'",
                (holder, seconds),
            )
            return store.runs.claim_next("w2", ClaimCriteria(store="s3://x"))

        assert silent(60, "other/boot 1 1 x") is None
        assert silent(ELSEWHERE - postgres_claims.CLAIM + 1, "other/boot 1 1 x") is not None
        assert (
            silent(1, f"{processes.machine()} 1 1 x") is not None
        )  # a worker of that machine finds the jobs
        db.execute("UPDATE steps SET state = 'QUEUED'")
        assert silent(1, "other/boot 1 1 x") is not None


def test_a_key_is_held_by_one_run_until_its_claim_is_over(
    store: Store, fresh: Callable[[], Store]
) -> None:
    one, two = store.runs, fresh().runs
    mine, _ = one.submit(RUN, "w"), two.submit(RUN._replace(id="r2"), "w")
    assert (
        one.exchange.hold_key("k", "r1")
        and one.exchange.hold_key("k", "r1")
        and not two.exchange.hold_key("k", "r2")
    )
    one.exchange.release_keys(["k"], "r1")
    assert two.exchange.hold_key("k", "r2") and not one.exchange.hold_key("k", "r1")
    two.exchange.release_keys(["k"], "r2")
    assert one.exchange.hold_key("k", "r1")
    one.group("r1", mine.fence, [DONE], run_state=("COMPLETED", ""))
    assert two.exchange.hold_key("k", "r2")


def test_chunks_are_read_from_an_offset_in_order_and_are_one_when_folded(
    store: Store, fresh: Callable[[], Store]
) -> None:
    mine = store.runs.submit(RUN, "w")
    store.runs.exchange.add_chunks(
        "r1",
        mine.fence,
        [
            Chunk("a.1", "log", 3, b"def"),
            Chunk("a.1", "log", 0, b"abc"),
            Chunk("b.1", "log", 0, b"x"),
        ],
    )
    assert [each.data for each in fresh().runs.exchange.chunks("r1", "a.1", "log", 2)] == [
        b"abc",
        b"def",
    ]
    assert [each.data for each in fresh().runs.exchange.chunks("r1", "a.1", "log", 3)] == [b"def"]
    store.runs.exchange.fold("r1", mine.fence, Chunk("a.1", "log", 0, b"", "f:0"))
    assert store.runs.exchange.chunks("r1", "a.1", "log", 3) == [Chunk("a.1", "log", 0, b"", "f:0")]
    with pytest.raises(Stale):
        store.runs.exchange.add_chunks("r1", mine.fence + 1, [Chunk("a.1", "log", 6, b"g")])


def test_a_claim_is_kept_while_its_worker_does_other_things(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_claims, "BEAT", 0.02)
    store.runs.submit(RUN, "w")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE runs SET held_until = now() - interval '1 second'")
        until(
            lambda: db.execute("SELECT held_until > now() FROM runs").fetchone() == (True,),
            seconds=10,
        )


def test_a_request_is_news_at_once(store: Store, fresh: Callable[[], Store]) -> None:
    mine = store.runs.submit(RUN, "w")
    before = store.runs.news()
    assert store.runs.news() == before
    assert fresh().runs.request("r1", "cancel")
    until(lambda: store.runs.news() != before, seconds=5)
    assert store.runs.take_request("r1", mine.fence) == "cancel"


def test_a_database_that_is_restarted_is_waited_for_and_nothing_is_stored_twice(
    store: Store, server: Postgres
) -> None:
    mine = store.runs.submit(RUN, "w")
    assert store.runs.group("r1", mine.fence, [DONE]) == 2
    server.stop()
    server.start()
    assert store.runs.group("r1", mine.fence, [DONE]) == 3
    assert [event.seq for event in store.runs.events("r1")] == [1, 2, 3]


def lose_reply(monkeypatch: pytest.MonkeyPatch, to: Callable[[object], bool]) -> list[object]:
    """Lose the connection after the first answer that `to` accepts, and return what was lost."""
    whole = postgres_database.PostgresDatabase.do
    lost: list[object] = []

    def cut(database: postgres_database.PostgresDatabase, what: Callable[..., object]) -> object:
        def then(db: object) -> object:
            answer = what(db)
            if to(answer) and not lost:
                lost.append(answer)
                raise psycopg.OperationalError("the reply was lost")
            return answer

        return whole(database, then)

    monkeypatch.setattr(postgres_database.PostgresDatabase, "do", cut)
    return lost


def test_a_group_whose_commit_got_no_answer_is_stored_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = store.runs.submit(RUN, "w")
    lost = lose_reply(monkeypatch, lambda answer: isinstance(answer, int))
    assert store.runs.group("r1", mine.fence, [DONE, DONE]) == 3 and lost == [3]
    assert [event.seq for event in store.runs.events("r1")] == [1, 2, 3]


@pytest.mark.parametrize("at_most", [{}, {"user": 1}])
def test_a_claim_that_got_no_answer_is_found_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, at_most: Mapping[str, int]
) -> None:
    store.runs.submit(RUN._replace(due=1.0))
    lost = lose_reply(
        monkeypatch, lambda answer: isinstance(answer, list) and "r1" in {row[0] for row in answer}
    )
    claimed = store.runs.claim_next("w", ClaimCriteria(at_most=at_most))
    assert claimed is not None and claimed.id == "r1" and len(lost) == 1
    assert store.runs.live("r1")


def test_a_newer_schema_is_refused(store: Store, fresh: Callable[[], Store], url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("INSERT INTO recipe_schema VALUES (99)")
    with pytest.raises(Unusable, match="format 99"):
        fresh()


def test_the_claim_of_a_dead_process_of_this_machine_counts_for_nothing_and_the_file_of_the_workspace_has_no_runs(
    store: Store, tmp_path: Path, url: str
) -> None:
    store.runs.submit(RUN._replace(due=1.0), "w")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "UPDATE runs SET holder = %s",
            (f"{processes.machine()} {os.getpid()} another-start x",),
        )
    assert taken(store) == ("r1", 2) and store.runs.get("r1").recoveries == 1
    with Store.open(tmp_path / ".recipe") as alone:
        assert alone.runs.latest() == []


def test_an_address_that_is_none_is_refused_with_what_to_write(space: Space) -> None:
    with pytest.raises(Unusable, match="PostgreSQL"):
        Workspace.open(space.root, environ={"RECIPE_RUNS": "mysql://x"})


def test_a_killed_worker_that_its_parent_did_not_wait_for_holds_no_run(
    store: Store, url: str
) -> None:
    store.runs.submit(RUN._replace(due=1.0), "w")
    with subprocess.Popen(["sleep", "60"]) as dead, psycopg.connect(url, autocommit=True) as db:
        holder = f"{processes.machine()} {dead.pid} {processes.began(dead.pid)} x"
        db.execute("UPDATE runs SET holder = %s", (holder,))
        assert store.runs.claim_next("w2", ClaimCriteria()) is None
        dead.kill()
        until(lambda: not processes.lives(holder))
        assert taken(store) == ("r1", 2)


def test_a_worker_that_was_silent_for_too_long_leaves_its_run_to_the_one_that_took_it_over(
    space: Space, url: str
) -> None:
    space.recipe(TWO.format(root=space.root))
    space.write("slow", "")
    env = {**os.environ, "RECIPE_RUNS": url}
    with Workspace.open(space.root, environ=env) as ws, psycopg.connect(url, autocommit=True) as db:
        run = submit(
            ws, Request("./recipe.yaml"), Choice(), Settings(), QueueSettings(here=True)
        ).id
        silent = space.start("worker", "-q", env={"RECIPE_RUNS": url})
        until(lambda: begun(space))
        silent.send_signal(signal.SIGSTOP)
        db.execute("UPDATE runs SET held_until = now() - interval '1 second'")
        other = threading.Thread(
            target=serve,
            args=(space.root, ClaimCriteria(), Silent, Handover(), env),
            kwargs={"once": True},
        )
        other.start()
        until(lambda: ws.store.runs.get(run).fence == 2)
        silent.send_signal(signal.SIGCONT)
        (space.root / "slow").unlink()
        other.join(30)
        assert silent.stderr is not None and any(
            "to another worker" in line for line in silent.stderr
        ), "it ended, and did not say it"
        silent.terminate()
        silent.communicate(timeout=30)
        found = ws.store.runs.get(run)
        assert (found.state, found.fence, begun(space)) == ("COMPLETED", 2, 1)
        assert [event.seq for event in ws.store.runs.events(run)] == list(
            range(1, found.next_event)
        )


def test_a_database_that_was_silent_for_long_is_heard_again(
    space: Space, url: str, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Infrastructure] = []

    poll = Stopper.poll_requests

    def heard(stopper: Stopper) -> None:
        try:
            poll(stopper)
        except Infrastructure as error:
            failed.append(error)
            raise

    monkeypatch.setattr(postgres_database, "PATIENCE", 0.1)
    monkeypatch.setattr(Stopper, "poll_requests", heard)
    space.recipe(TWO.format(root=space.root))
    space.write("slow", "")
    env = {**os.environ, "RECIPE_RUNS": url}
    with Workspace.open(space.root, environ=env) as ws:
        run = submit(
            ws, Request("./recipe.yaml"), Choice(), Settings(), QueueSettings(here=True)
        ).id
        worker = threading.Thread(
            target=serve,
            args=(space.root, ClaimCriteria(), Silent, Handover(), env),
            kwargs={"once": True},
        )
        worker.start()
        until(lambda: begun(space))
        server.stop()
        until(lambda: failed)
        server.start()
        until(lambda: ws.store.runs.request(run, "cancel"))
        worker.join(60)
        assert not worker.is_alive() and ws.store.runs.get(run).state == "CANCELLED"


def test_no_step_begins_while_nobody_can_say_whose_run_it_is(
    space: Space, url: str, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def silent(holder: postgres_claims.Holder, run: str, fence: int) -> None:
        asked.append(run)
        if len(asked) < 3:
            assert not begun(space)
            raise Infrastructure("the database of runs does not answer")

    monkeypatch.setattr(postgres_claims.Holder, "confirm", silent)
    space.recipe(TWO.format(root=space.root))
    env = {**os.environ, "RECIPE_RUNS": url}
    with Workspace.open(space.root, environ=env) as ws:
        run = submit(
            ws, Request("./recipe.yaml"), Choice(), Settings(), QueueSettings(here=True)
        ).id
        serve(space.root, ClaimCriteria(), Silent, Handover(), env, once=True)
        assert (ws.store.runs.get(run).state, begun(space), len(asked)) == ("COMPLETED", 1, 4)


def test_what_one_process_stores_is_delivered_by_two_that_share_the_database_once_and_in_order(
    tmp_path: Path, url: str
) -> None:
    with Receiver() as receiver:
        told(tmp_path, receiver.url)
        environ = {**os.environ, "RECIPE_RUNS": url}
        with Workspace.open(tmp_path, environ=environ) as ws:
            moved(ws, 4, runs=4)
            senders = [threading.Thread(target=deliver, args=(tmp_path, environ)) for _ in range(2)]
            for each in senders:
                each.start()
            for each in senders:
                each.join()
            assert ws.store.runs.outbox.list_letters() == []
    got = [(each.json["data"]["run"], each.json["data"]["seq"]) for each in receiver.got]
    assert len(got) == 16 and all(
        [seq for run, seq in got if run == f"r{n}"] == [1, 2, 3, 4] for n in range(4)
    )
