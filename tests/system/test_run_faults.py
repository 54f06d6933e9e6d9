"""Faults that runs survive: replies that are cut, clocks that jump, disks that are full, programs that are older than the schema."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sqlite3
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from runner.api.submitting import QueueSettings
from runner.errors import Unusable
from runner.execution import queue
from runner.planning.schedule import Move
from runner.reports.delivery import deliver
from runner.storage.records import postgres_runs, sqlite_runs
from runner.storage.records.runs import SILENT, ClaimCriteria
from runner.storage.records.sqlite_runs import SqliteRuns
from runner.storage.records.store import Store
from runner.storage.workspace import Workspace
from tests.contract.store_contract import DONE, RECEIVERS, RUN
from tests.servers.receiver import Receiver
from tests.support import Space, until
from tests.system.test_outbox import moved, told
from tests.system.test_worker import TWO, begun, row, submitted, work

pytestmark = pytest.mark.xdist_group("postgres")
KILLS = int(os.environ.get("RECIPE_KILLS", "3"))


class Cut:
    """A way to a server on loopback that loses the answer to the next request in which `after` stands, and ends the connection."""

    def __init__(self, port: int) -> None:
        self.after = b""
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        server, lost = socket.create_connection(("127.0.0.1", self._to)), False
        with client, server:
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for one in ready:
                    data = one.recv(1 << 16)
                    if not data or (lost and one is server):
                        return
                    if one is client and self.after and self.after in data:
                        self.after, lost = b"", True
                    (server if one is client else client).sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def cut(url: str) -> Iterator[tuple[Cut, str]]:
    """The way, and the address of the database by it."""
    port = psycopg.conninfo.conninfo_to_dict(url)["port"]
    proxy = Cut(int(str(port)))
    yield proxy, url.replace(f":{port}/", f":{proxy.port}/")
    proxy.close()


@pytest.mark.parametrize("told", [False, True])
def test_whatever_reply_is_lost_a_run_is_stored_once_claimed_once_and_its_events_have_no_gap(
    tmp_path: Path, cut: tuple[Cut, str], told: bool
) -> None:
    proxy, by = cut

    def losing(reply: bytes) -> None:
        assert not proxy.after, f"no reply to {proxy.after!r} was lost"
        proxy.after = reply

    with Store.open(tmp_path / ".recipe", shared=by, workspace="here") as store:
        store.runs.reporter = RECEIVERS if told else SILENT
        losing(b"COMMIT" if told else b"WITH new AS")
        store.runs.submit(RUN._replace(due=1.0))
        losing(b"UPDATE runs SET claim")
        claimed = store.runs.claim_next("w", ClaimCriteria())
        assert claimed is not None and claimed.id == "r1", "a claim whose answer was lost is ours"
        losing(b"COMMIT" if told else b"WITH ours AS")
        assert (
            store.runs.group("r1", claimed.fence, [Move("run", "r1", "QUEUED", "ACTIVE"), DONE])
            == 3
        )
        losing(b"")
        assert [event.seq for event in store.runs.events("r1")] == [1, 2, 3]
        assert store.runs.get("r1").fence == claimed.fence
        assert [each.id for each in store.runs.outbox.list_letters()] == (
            ["r1-1", "r1-1", "r1-2", "r1-2"] if told else []
        )


def test_a_run_that_is_claimed_as_it_is_stored_is_ours_though_the_reply_is_lost(
    tmp_path: Path, cut: tuple[Cut, str]
) -> None:
    proxy, by = cut
    with Store.open(tmp_path / ".recipe", shared=by, workspace="here") as store:
        store.runs.latest()
        proxy.after = b"WITH new AS"
        mine = store.runs.submit(RUN, "w")
        assert not proxy.after
        assert mine.fence == 1 and store.runs.group("r1", mine.fence, [DONE]) == 2


def test_a_program_that_is_older_than_the_schema_takes_no_run_and_says_so(
    tmp_path: Path, url: str
) -> None:
    with Store.open(tmp_path / ".recipe", shared=url, workspace="here") as store:
        store.runs.submit(RUN._replace(due=1.0))
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("INSERT INTO recipe_schema VALUES (99)")
    with pytest.raises(
        Unusable, match="the run database has format 99; this version of recipe supports"
    ) as caught:
        Store.open(tmp_path / ".recipe", shared=url, workspace="here")
    assert "update recipe" in caught.value.fix


@pytest.mark.parametrize("days", [-1, 1])
@pytest.mark.parametrize("shared", [False, True])
def test_a_clock_that_is_a_day_off_delays_no_run_that_is_due_at_once(
    space: Space, url: str, days: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    if shared:
        monkeypatch.setenv("RECIPE_RUNS", url)
    space.recipe("steps: {a: {run: echo one > a.txt, outputs: {o: a.txt}}}")
    real = time.time
    with monkeypatch.context() as clock:
        for module in (queue, sqlite_runs, postgres_runs):
            clock.setattr(module, "time", _Clock(real, days * 86400))
        run = submitted(space, QueueSettings(here=True))
    work(space)
    with Workspace.open(space.root) as ws:
        assert ws.store.runs.get(run).state == "COMPLETED"


class _Clock:
    """The module `time`, off by so many seconds."""

    def __init__(self, real: object, off: float) -> None:
        self._real, self._off = real, off

    def time(self) -> float:
        return float(self._real()) + self._off  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        import time

        return getattr(time, name)


def test_a_disk_that_is_full_at_any_write_of_a_run_starts_nothing_twice_and_forgets_nothing(
    space: Space, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space.recipe(TWO.format(root=space.root))
    monkeypatch.setattr(queue, "LOOK", 0.0)
    whole, at, faults = SqliteRuns.group, 1, 0
    while True:
        for name in ("a.txt", "b.txt", "starts"):
            (space.root / name).unlink(missing_ok=True)
        (space.root / "recipe.yaml").write_text(
            (space.root / "recipe.yaml").read_text() + f"# {at}\n"
        )
        space.command("gc", "--all", "-q")
        run, calls = submitted(space), [0]

        def full(
            self: SqliteRuns,
            *words: object,
            _calls: list[int] = calls,
            _at: int = at,
            **more: object,
        ) -> int:
            _calls[0] += 1
            if _calls[0] == _at:
                raise sqlite3.OperationalError("database or disk is full")
            return whole(self, *words, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(SqliteRuns, "group", full)
        work(space)
        monkeypatch.setattr(SqliteRuns, "group", whole)
        work(space)
        assert row(space, run).state == "COMPLETED", (at, row(space, run))
        assert begun(space) <= 1, at
        with Store.open(space.root / ".recipe") as store:
            events = store.runs.events(run)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
        faults += calls[0] >= at
        if calls[0] < at:
            break
        at += 1
    assert faults >= 2 and "disk is full" in capsys.readouterr().err


def test_a_receiver_behind_tls_gets_its_messages_once_its_certificate_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        f"{tmp_path}/key.pem",
    ]
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", f"{tmp_path}/chain.pem", "-days", "2", *name],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{tmp_path}/chain.pem", f"{tmp_path}/key.pem")
    with Receiver(tls=context) as receiver:
        told(tmp_path, receiver.url)
        with Workspace.open(tmp_path) as ws:
            moved(ws, 1)
            deliver(tmp_path, os.environ)
            (letter,) = ws.store.runs.outbox.list_letters()
            assert letter.state == "waiting" and "certificate" in letter.reason and not receiver.got
            monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/chain.pem")
            ws.store.runs.outbox._ask("UPDATE outbox SET due = 0, held_until = 0 RETURNING 1", {})
            deliver(tmp_path, os.environ)
            assert len(receiver.got) == 1, ws.store.runs.outbox.list_letters()
            assert not ws.store.runs.outbox.list_letters()


@pytest.mark.proof
@pytest.mark.parametrize("what", ["cancel", "pause", "resume"])
def test_a_request_is_honoured_once_though_its_worker_is_killed_within_a_second_of_it(
    space: Space, what: str
) -> None:
    """RECIPE_KILLS: how often, of each, at a moment of that second."""
    for n in range(KILLS):
        slow = space.root / f"slow{n}"
        slow.touch()
        space.recipe(
            f"steps: {{a: {{run: 'touch {slow}.on; while [ -e {slow} ]; do sleep 0.02; done; echo {n} > a.txt', outputs: {{o: a.txt}}}}}}"
        )
        run = submitted(space)
        worker = space.start("worker", "-q")
        until(lambda slow=slow: Path(f"{slow}.on").exists(), seconds=30)
        assert space.command("pause" if what == "resume" else what, run)[0] == 0
        resumer = (
            space.start("resume", run) if what == "resume" else None
        )  # it takes the pause back, or works on the run that is paused already
        if resumer is not None:
            until(
                lambda run=run, by=resumer: (
                    by.poll() is not None
                    or (row(space, run).state, row(space, run).request) == ("ACTIVE", "")
                ),
                seconds=60,
            )
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # it may have honoured the request by then, and waits for another run
            worker.communicate(timeout=random.Random(n).uniform(0, 1))
        for each in (worker, resumer):
            if each is not None:
                each.kill()
                each.communicate(timeout=30)
        slow.unlink()
        work(space)
        found = row(space, run)
        assert (
            found.state == {"cancel": "CANCELLED", "pause": "PAUSED", "resume": "COMPLETED"}[what]
            and not found.request
        ), (n, found)
        with Store.open(space.root / ".recipe") as store:
            events = store.runs.events(run)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert (
                sum(
                    event.subject == "run" and event.after in ("CANCELLED", "PAUSED")
                    for event in events
                )
                <= 1
            )
        if what == "pause":
            space.command("cancel", run)
