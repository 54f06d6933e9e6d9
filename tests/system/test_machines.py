"""Runs that are submitted on one machine and carried out on another: two workspaces with nothing in common but a database and a store."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from runner.api.requests import retry
from runner.api.submitting import QueueSettings, submit
from runner.errors import CannotRun, Corrupt, Invalid
from runner.execution.queue import serve
from runner.execution.results import collect
from runner.execution.steps import attempt_result, chunks
from runner.execution.steps.control import Handover
from runner.execution.terms import Choice, Settings
from runner.execution.unattended import end_unattended
from runner.interface.cli.report import describe_run
from runner.interface.handle.local_transport import LocalTransport
from runner.interface.logs import LogFollower
from runner.paths import shipped
from runner.storage.records.runs import ClaimCriteria, RunRow
from runner.storage.remote.states import LocalSource
from runner.storage.workspace import Workspace
from runner.survey import bundles, comparison
from runner.survey.request import Request
from runner.survey.survey import survey
from tests.servers.moto import Moto
from tests.servers.rest import Rest
from tests.support import Space, until
from tests.system.test_worker import Silent
from tests.test_tutorial import BLOCK, commands, matches, ran

pytestmark = pytest.mark.xdist_group("postgres")

JOIN = """
inputs: {data: {type: file}, n: {type: integer, default: 2}}
steps:
  join:
    run: [python, src/join.py, "{{ inputs.data }}", "{{ inputs.n }}", both.txt]
    code: [src/join.py]
    deps: [words/*.txt]
    outputs: {both: both.txt, tree: tree/}
outputs: {both: "{{ steps.join.both }}", tree: "{{ steps.join.tree }}"}
"""
SCRIPT = """
import glob, os, sys
words = "".join(open(name).read() for name in sorted(glob.glob("words/*.txt")))
open(sys.argv[3], "w").write(open(sys.argv[1]).read() * int(sys.argv[2]) + words)
os.makedirs("tree", exist_ok=True); open("tree/x", "w").write(words)
"""


@dataclass(frozen=True)
class Machine:
    """A home, a workspace and an environment of its own."""

    space: Space
    env: Mapping[str, str]

    def submit(
        self,
        recipe: str = "./recipe.yaml",
        ticket: QueueSettings = QueueSettings(),  # noqa: B008
        **inputs: object,
    ) -> str:
        with Workspace.open(self.space.root, environ=self.env) as ws:
            return submit(ws, Request(recipe, inputs), Choice(), Settings(), ticket).id

    def work(self) -> None:
        serve(self.space.root, ClaimCriteria(), Silent, Handover(), self.env, once=True, store="")

    def row(self, run: str) -> RunRow:
        with Workspace.open(self.space.root, environ=self.env) as ws:
            return ws.store.runs.get(run)

    def fetch(self, run: str) -> None:
        with Workspace.open(self.space.root, environ=self.env) as ws:
            ws.share(None)
            collect(ws, ws.store.runs.get(run), self.space.root, overwrite=False)

    def command(self, *words: str) -> tuple[int, str, str]:
        return self.space.command(*words, env=self.env)


@pytest.fixture
def machines(tmp_path: Path, url: str) -> tuple[Machine, Machine, Machine]:
    """Three of them, which know the database and the store and nothing of each other's disks."""

    def machine(name: str) -> Machine:
        space = Space(tmp_path / name / "work")
        space.write("recipe.toml", f'store = "team"\n[stores.team]\nurl = "{tmp_path}/store"\n')
        return Machine(space, {**os.environ, "HOME": str(tmp_path / name), "RECIPE_RUNS": url})

    (tmp_path / "store").mkdir()
    return machine("a"), machine("b"), machine("c")


@pytest.fixture
def ready(machines: tuple[Machine, Machine, Machine]) -> tuple[Machine, Machine]:
    """The first has a recipe with code, a glob and a file from elsewhere."""
    a, b, _ = machines
    a.space.recipe(JOIN)
    a.space.write("src/join.py", SCRIPT)
    a.space.write("words/one.txt", "one\n")
    a.space.write("words/two.txt", "two\n")
    a.space.write("../elsewhere/data.txt", "data\n")
    return a, b


def test_a_worker_that_stood_still_while_another_machine_did_its_run_begins_no_step(
    machines: tuple[Machine, Machine, Machine], url: str
) -> None:
    a, b, c = machines
    starts = a.space.root / "starts"
    a.space.recipe(
        f"steps: {{s: {{run: 'echo begun >> {starts}; echo x > o', outputs: {{o: o}}}}}}"
    )
    run = a.submit()
    soon = "from runner.storage.records import postgres_claims; postgres_claims.SURE = 0.05"  # it stands still for less than a claim lasts
    argv = [
        sys.executable,
        "-c",
        f"{soon}\nfrom runner.interface.cli.main import main\nmain(['worker', '--workspace', '.'])",
    ]
    env = {**b.env, "RECIPE_CRASH_AT": "attempt-staged:1:STOP"}
    with subprocess.Popen(
        argv,
        cwd=b.space.root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as still:
        until(lambda: "State:\tT" in Path(f"/proc/{still.pid}/status").read_text())
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("UPDATE runs SET held_until = now() - interval '1 hour'")
        c.work()
        assert (a.row(run).state, a.row(run).fence, starts.read_text()) == (
            "COMPLETED",
            2,
            "begun\n",
        )
        still.send_signal(signal.SIGCONT)
        assert still.stderr is not None and any(
            "to another worker" in line for line in still.stderr
        )
        still.terminate()
        still.communicate(timeout=30)
    assert starts.read_text() == "begun\n"


def test_another_machine_carries_out_what_was_submitted_and_its_results_are_fetched(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    run = a.submit(data=str(a.space.root / "../elsewhere/data.txt"))
    a.space.write("src/join.py", "raise SystemExit('changed after the submit')")
    a.space.write("words/three.txt", "three\n")
    a.space.write("../elsewhere/data.txt", "other\n")
    b.work()
    row = a.row(run)
    assert (row.state, row.reason, [each.name for each in row.outputs]) == (
        "COMPLETED",
        "",
        ["both", "tree"],
    )
    a.fetch(run)
    assert (
        a.space.read("both.txt") == "data\ndata\none\ntwo\n"
        and a.space.read("tree/x") == "one\ntwo\n"
    )
    a.space.write("both.txt", "mine")
    with pytest.raises(CannotRun, match=r"both.txt already exists and was not created by recipe"):
        a.fetch(run)
    assert b.space.of_agents("deadman") == "540.0"  # before another machine may begin its jobs
    assert (
        not (b.space.root / "both.txt").exists()
        and (b.space.root / "out" / run / "both.txt").exists()
    )
    b.space.write("out/mine/both.txt", "of somebody else")
    code, told, said = b.command("gc", "--keep-days", "0", "--keep-runs", "0")
    assert code == 0 and "1 result" in told and os.listdir(b.space.root / "out") == ["mine"], (
        told + said
    )
    assert a.row(run).state == "COMPLETED"


def test_a_run_whose_bundle_is_too_large_for_the_database_travels_through_s3(
    ready: tuple[Machine, Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = ready
    with Moto() as moto:
        for variable, value in moto.environ.items():
            monkeypatch.setenv(variable, value)
        for machine in ready:
            toml = f'store = "team"\n[stores.team]\nurl = "s3://{moto.bucket()}/project"\nendpoint = "{moto.endpoint}"\n'
            machine.space.write(
                "recipe.toml", toml if machine is a else a.space.read("recipe.toml")
            )
        monkeypatch.setattr(bundles, "MOST", 1000)  # bytes
        run = a.submit(data=str(a.space.root / "../elsewhere/data.txt"))
        with psycopg.connect(url) as db:
            assert db.execute("SELECT count(*) FROM bundles").fetchone() == (0,)
        b.work()
        row = a.row(run)
        assert row.state == "COMPLETED" and all(
            each.address.startswith("s3://") for each in row.outputs
        ), row.reason
        a.fetch(run)
    assert (
        a.space.read("both.txt") == "data\ndata\none\ntwo\n"
        and a.space.read("tree/x") == "one\ntwo\n"
    )


def test_an_input_that_the_store_has_is_named_by_its_content(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    first = a.submit(data=str(a.space.root / "words/one.txt"))
    second = a.submit(data="pack:" + hashlib.sha256(b"one\n").hexdigest())
    with pytest.raises(Invalid, match="is not in the shared store"):
        a.submit(data=f"pack:{'0' * 64}")
    b.work()
    assert a.row(first).outputs == a.row(second).outputs != ()


def test_a_class_of_a_file_from_elsewhere_is_named_where_the_file_is_then(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    a.space.recipe(
        {
            "inputs": {"hooks": {"type": "list", "items": "file", "member": True}},
            "steps": {
                "show": {
                    "run": ["sh", "-c", 'echo "$1"; cat "${1%%:*}"', "sh", "{{ inputs.hooks }}"],
                    "outputs": [],
                    "cache": False,
                }
            },
        }
    )
    a.space.write("../elsewhere/hooks.py", "class Mine: pass\n")
    run = a.submit(hooks=[f"{a.space.root}/../elsewhere/hooks.py:Mine"])
    b.work()
    assert a.row(run).state == "COMPLETED"
    code, told, said = b.command("logs", f"{run}/show")
    assert code == 0 and "inputs/hooks/0/hooks.py:Mine" in told and "class Mine: pass" in told, (
        told + said
    )


def test_all_that_means_nothing_elsewhere_is_reported_at_once(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    a.space.write("recipe.toml", "")
    with pytest.raises(Invalid) as caught:
        a.submit(data="gone.txt")
    wrong, no_store = caught.value.problems
    assert (
        "gone.txt does not exist (the input data)" in wrong.message
        and "shared store" in no_store.message
    )
    with pytest.raises(Invalid, match="shared store") as caught:
        a.submit(data="words/one.txt")
    assert "--here" in caught.value.problems[0].fix
    run = a.submit(data="words/one.txt", ticket=QueueSettings(here=True))
    b.work()
    assert a.row(run).state == "QUEUED" and a.row(run).bundle == ""
    serve(a.space.root, ClaimCriteria(), Silent, Handover(), a.env, once=True)
    assert a.row(run).state == "COMPLETED" and a.space.read("both.txt") == "one\none\none\ntwo\n"


def test_the_same_files_make_the_same_bundle_and_a_library_recipe_brings_its_code(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    request = Request("sft@1", preset="smoke")
    with (
        Workspace.open(a.space.root, environ=a.env) as here,
        Workspace.open(b.space.root, environ=b.env) as there,
    ):
        packed, again = bundles.pack(here, request), bundles.pack(here, request)
        assert packed.digest == again.digest and len(packed.data) < bundles.MOST
        cache = here.share(None)
        assert (
            cache is not None and there.share(None) is not None and there.remote_cache is not None
        )
        for content in packed.contents:
            cache.remote.put(content, LocalSource(packed.contents))
        root = bundles.unpack(there, packed.digest, packed.data, there.remote_cache.bring)
        mine, theirs = (
            survey(here, request),
            survey(there.within(root), replace(request, inputs=packed.bound)),
        )
        assert theirs.source == root / ".library" / "sft@1.yaml"
        assert [verdict.key for verdict in theirs.verdicts] == [
            verdict.key for verdict in mine.verdicts
        ]


def test_an_archive_that_is_not_what_its_name_says_or_that_leads_out_is_not_unpacked(
    ready: tuple[Machine, Machine],
) -> None:
    def archived(*members: tarfile.TarInfo) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for member in members:
                archive.addfile(member)
        return out.getvalue()

    def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, to
        return member

    outside = (
        archived(tarfile.TarInfo("../leaves")),
        archived(tarfile.TarInfo("/tmp/leaves")),
        archived(link("a", "/etc")),
        archived(link("a/b", "../../leaves")),
        archived(link("a", "."), tarfile.TarInfo("a/b")),
        archived(link("a", "/etc/passwd", tarfile.LNKTYPE)),
        archived(link("a", "", tarfile.FIFOTYPE)),
    )
    with Workspace.open(ready[1].space.root, environ=ready[1].env) as ws:
        with pytest.raises(Corrupt):
            bundles.unpack(ws, "0" * 64, b"x", lambda contents: set())
        for data in outside:
            with pytest.raises(Corrupt, match="cannot be unpacked"):
                bundles.unpack(ws, hashlib.sha256(data).hexdigest(), data, lambda contents: set())
        assert not list((ws.home / "bundles").iterdir())


TRAIN = """
inputs: {gate: {type: string}, starts: {type: string}}
steps:
  prepare: {run: 'echo x >> {{ inputs.starts }}.prepare; echo data > data.txt', outputs: {data: data.txt}}
  train:
    deps: [data.txt]
    run: [python, train.py, "{{ inputs.gate }}", "{{ inputs.starts }}", "{{ state.kept }}", [--resume, "{{ state.kept.latest }}"]]
    code: [train.py]
    state: {kept: {checkpoint: "step-*", every: 0.1s}}
    outputs: {model: model.txt}
outputs: {model: "{{ steps.train.model }}"}
"""
TRAINER = """
import os, sys, time
gate, starts, kept = sys.argv[1:4]
done = int(open(sys.argv[5]).read()) if len(sys.argv) > 5 else 0
open(starts, "a").write(f"{done}\\n")
for step in range(done + 1, 7):
    os.makedirs(kept, exist_ok=True)
    open(f"{kept}/.new", "w").write(str(step))
    os.rename(f"{kept}/.new", f"{kept}/step-{step}")
    while step == 3 and os.path.exists(gate):
        time.sleep(0.02)
open("model.txt", "w").write("trained")
"""


def test_a_training_whose_machine_dies_goes_on_elsewhere_from_its_checkpoint(
    machines: tuple[Machine, Machine, Machine], url: str, tmp_path: Path
) -> None:
    a, b, c = machines
    a.space.recipe(TRAIN)
    a.space.write("train.py", TRAINER)
    gate, starts = a.space.write("../gate", ""), tmp_path / "starts"
    run = a.submit(gate=str(gate), starts=str(starts))
    worker = b.space.start("worker", "--workspace", ".", "-q", env=b.env)
    until(
        lambda: any(
            "step-3" in note.read_text() for note in (tmp_path / "store/states").rglob("*.json")
        ),
        seconds=30,
    )
    until(lambda: list((tmp_path / "store/traces").rglob("*.json")), seconds=30)
    worker.kill()
    worker.communicate(timeout=30)
    gate.unlink()
    with psycopg.connect(
        url, autocommit=True
    ) as db:  # as if it were another machine, and 30 seconds had passed
        db.execute("UPDATE runs SET held_until = now() - interval '1 second'")
    c.work()
    row = a.row(run)
    assert (row.state, row.fence, starts.read_text().split()) == ("COMPLETED", 2, ["0", "3"])
    assert (
        tmp_path / "starts.prepare"
    ).read_text() == "x\n"  # what was done before is not done again
    a.fetch(run)
    assert a.space.read("model.txt") == "trained"


REMOTE = """
inputs: {{data: {{type: file}}}}
steps:
  train:
    run: |
      echo x >> {starts}
      mkdir -p kept; echo 1 > kept/step-1
      echo early; while [ -e {gate} ]; do sleep 0.02; done; echo late
      cat {{{{ inputs.data }}}} > model.txt
    state: {{kept: {{path: kept/, checkpoint: "step-*", every: 0.2s}}}}
    outputs: {{model: model.txt}}
outputs: {{model: "{{{{ steps.train.model }}}}"}}
"""


def test_a_job_on_a_host_is_taken_up_by_a_worker_of_another_machine(
    machines: tuple[Machine, Machine, Machine], url: str, tmp_path: Path
) -> None:
    a, b, c = machines
    gate, starts = a.space.write("../gate", ""), tmp_path / "starts"
    a.space.recipe(REMOTE.format(gate=gate, starts=starts))
    a.space.write("data.txt", "data")
    for machine in (b, c):  # two machines that reach the same host, which has one place
        toml = (machine.space.root / "recipe.toml").read_text()
        machine.space.write(
            "recipe.toml",
            toml + f'[drivers.loopback]\nroot = "{tmp_path}/hosts"\nhosts = 1\nslots = 1\n',
        )
    with Workspace.open(a.space.root, environ=a.env) as ws:
        run = submit(
            ws,
            Request("./recipe.yaml", {"data": "data.txt"}),
            Choice(),
            Settings("loopback"),
            QueueSettings(),
        ).id
    worker = b.space.start("worker", "--workspace", ".", "-q", env=b.env)
    until(lambda: starts.exists(), seconds=30)
    with psycopg.connect(url, autocommit=True) as db:
        until(
            lambda: db.execute(
                "SELECT 1 FROM events WHERE subject = 'step' AND after = 'RUNNING'"
            ).fetchone(),
            seconds=30,
        )
        worker.kill()
        worker.communicate(timeout=30)
        db.execute(
            "UPDATE runs SET held_until = now() - interval '1 second'"
        )  # as if 30 seconds had passed
    follower = threading.Thread(target=c.work)
    follower.start()
    until(
        lambda: list((c.space.root / ".recipe/states").rglob("step-1")), seconds=30
    )  # its checkpoints come to the second machine now
    gate.unlink()
    follower.join(60)
    row = a.row(run)
    assert (row.state, row.reason, starts.read_text()) == ("COMPLETED", "", "x\n")
    a.fetch(run)
    (log,) = (c.space.root / ".recipe/runs" / run).glob("train.1.log")
    assert a.space.read("model.txt") == "data" and log.read_text() == "early\nlate\n"


def test_two_machines_do_not_run_one_key_at_once_and_the_second_takes_what_the_first_made(
    machines: tuple[Machine, Machine, Machine], url: str, tmp_path: Path
) -> None:
    a, b, c = machines
    gate, starts = a.space.write("../gate", ""), tmp_path / "starts"
    a.space.recipe(
        "inputs: {n: {type: integer}}\nsteps:\n  slow:\n"
        f"    run: 'echo x >> {starts}; while [ -e {gate} ]; do sleep 0.02; done; echo made > slow.txt'\n    outputs: {{o: slow.txt}}\n"
        "  own: {run: 'cat {{ steps.slow.o }} > {{ inputs.n }}.txt', outputs: {o: '{{ inputs.n }}.txt'}}\n"
    )
    runs = [a.submit(n=n) for n in (1, 2)]
    workers = [threading.Thread(target=each.work) for each in (b, c)]
    for worker in workers:
        worker.start()
    with psycopg.connect(url, autocommit=True) as db:
        until(
            lambda: db.execute(
                "SELECT 1 FROM events WHERE reason LIKE '%another%' OR after = 'RUNNING'"
            ).fetchone(),
            seconds=30,
        )
        until(
            lambda: (
                db.execute("SELECT count(*) FROM runs WHERE state = 'ACTIVE'").fetchone() == (2,)
            ),
            seconds=30,
        )
    gate.unlink()
    for worker in workers:
        worker.join(60)
    assert [a.row(run).state for run in runs] == [
        "COMPLETED",
        "COMPLETED",
    ] and starts.read_text().split() == ["x"]


class Heard:
    """What a follower of logs writes."""

    def __init__(self) -> None:
        self.text = b""

    def head(self, text: str) -> None: ...
    def end(self) -> None: ...
    def write(self, data: bytes) -> None:
        self.text += data


TALK = """
inputs: {{token: {{type: secret, env: A_TOKEN}}}}
steps:
  talk:
    secrets: [token]
    metrics: true
    run: |
      echo '{{"loss": 2.5}}' > $RECIPE_METRICS
      echo '{{"cpu_percent": 7}}' > ${{RECIPE_METRICS%.metrics}}.host # as the agent does after 5 seconds
      echo first $A_TOKEN
      while [ -e {gate} ]; do sleep 0.02; done
      printf %0200d 7
      printf '\\nlast\\n'
      echo made > made.txt
    outputs: {{o: made.txt}}
"""


def test_a_log_and_metrics_are_followed_from_another_machine_masked_and_kept_when_they_are_over(
    machines: tuple[Machine, Machine, Machine],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(chunks, "EVERY", 0.05)
    monkeypatch.setattr(chunks, "LOG_CAP", 100)
    monkeypatch.setattr(attempt_result, "LOG_CAP", 100)
    a, b, _ = machines
    b = Machine(b.space, {**b.env, "A_TOKEN": "a-token-of-machine-b"})
    gate = a.space.write("../gate", "")
    a.space.recipe(TALK.format(gate=gate))
    run, heard = a.submit(), Heard()
    worker = threading.Thread(target=b.work)
    worker.start()

    def follow() -> None:
        with Workspace.open(a.space.root, environ=a.env) as ws:
            LogFollower(
                LocalTransport(ws), run, lambda _step: True, heard, lambda _words: None, heads=False
            ).follow(None)

    follower = threading.Thread(target=follow)
    follower.start()
    for name, value in a.env.items():
        monkeypatch.setenv(name, value)
    rest = Rest(a.space.root)
    request.addfinalizer(rest.end)
    until(lambda: b"first" in heard.text, seconds=30)
    assert b"last" not in heard.text
    assert rest.ask("GET", f"/v1/runs/{run}/logs").text == "first ***\n"
    followed = ThreadPoolExecutor(1).submit(
        rest.ask, "GET", f"/v1/runs/{run}/logs?follow=true&offset=2"
    )

    def told() -> tuple[dict[str, object], dict[str, float | None]]:
        with Workspace.open(a.space.root, environ=a.env) as ws:
            (step,) = describe_run(ws, ws.store.runs.get(run), None)["steps"]
            numbers = {name: value["last"] for name, value in step["metrics"].items()}
            # On a slow machine the agent adds a sample of its own, with the memory in use.
            return numbers, {name: step["machine"].get(name) for name in ("cpu_percent",)}

    until(lambda: told() == ({"loss": 2.5}, {"cpu_percent": 7.0}), seconds=30)
    gate.unlink()
    worker.join(30)
    follower.join(30)
    (kept,) = (b.space.root / ".recipe/runs" / run).glob("talk.1.log")
    assert heard.text == kept.read_bytes()
    assert followed.result().content == heard.text[2:]
    assert rest.ask("GET", f"/v1/runs/{run}/logs").content == heard.text
    assert rest.ask("GET", f"/v1/runs/{run}/logs", headers={"Range": "bytes=0-4"}).text == "first"
    assert re.fullmatch(
        rb"first \*\*\*\n0+\n\xe2\x80\xa6 \d+ bytes dropped \xe2\x80\xa6\n0+7\nlast\n", heard.text
    )
    with psycopg.connect(url) as db:
        assert db.execute("SELECT count(*), max(length(data)) FROM chunks").fetchone() == (3, 0)
        stored = b" ".join(
            str(row).encode()
            for table in ("runs", "events", "attempts", "bundles", "chunks")
            for row in db.execute(f"SELECT * FROM {table}")
        )
    assert b"a-token-of-machine-b" not in stored
    heard.text = b""
    follow()
    assert heard.text == kept.read_bytes() and told() == ({"loss": 2.5}, {"cpu_percent": 7.0})
    with Workspace.open(a.space.root, environ=a.env) as ws:
        (result,) = comparison.collect_results(ws, ws.store.runs.get(run).recipe)
        assert result.metrics["loss"].last == 2.5


def test_a_paused_run_is_given_back_to_the_workers_and_an_ended_one_is_asked_for_again(
    ready: tuple[Machine, Machine],
) -> None:
    a, b = ready
    run = a.submit(data="words/one.txt")
    with Workspace.open(a.space.root, environ=a.env) as ws:
        assert end_unattended(ws, run, "PAUSED", print)
    b.work()
    assert a.row(run).state == "PAUSED"
    code, told, said = a.command("resume", run)
    assert code == 0 and "QUEUED" in told, said
    b.work()
    assert a.row(run).state == "COMPLETED" and not a.row(run).idempotency
    with Workspace.open(a.space.root, environ=a.env) as ws:
        second = retry(ws, run).run
    b.work()
    assert (
        a.row(second).outputs == a.row(run).outputs != ()
        and a.row(second).bundle == a.row(run).bundle
    )


def test_the_walk_of_two_machines_prints_what_its_page_says(
    machines: tuple[Machine, Machine, Machine], url: str, tmp_path: Path
) -> None:
    section = (
        (shipped() / "docs/workers.md")
        .read_text("utf-8")
        .split("## Two machines")[1]
        .split("\n- **The bundle")[0]
    )
    section = section.replace("/srv/recipe", f"{tmp_path}/store").replace(
        "postgresql://recipe@db.example/recipe", f"'{url}'"
    )
    blocks = BLOCK.findall(section)
    asked = iter([machines[0], machines[1], machines[0]])
    for kind, name, text in blocks:
        if kind != "console":
            for machine in machines[:2] if kind == "toml" else machines[:1]:
                machine.space.write(f"../{name}" if kind == "toml" else name, text)
            continue
        machine = next(asked)
        for command, expected in commands(text):
            env = f"unset XDG_CONFIG_HOME XDG_DATA_HOME; export RECIPE_RUNS='{url}' HOME='{machine.env['HOME']}'; "
            said = ran(env + command, machine.space.root)
            assert matches(expected, said) and "recipe:" not in said, (
                f"$ {command}\n--- it says\n{said}\n--- the page says\n{expected}"
            )
    assert [kind for kind, _, _ in blocks] == ["toml", "yaml", "console", "console", "console"]
