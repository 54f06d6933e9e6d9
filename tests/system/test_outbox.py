"""The outbox: what runs have to tell reaches its receivers at least once, in order, and holds up no run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from runner.errors import Invalid
from runner.reports.addresses import Endpoint, public_endpoint
from runner.reports.delivery import BACKOFF, Delivery, DeliveryOutcome, deliver, judge_answer
from runner.reports.rules import RunCondition, Watch, find_alerts
from runner.reports.sending import ReceiverResponse, send
from runner.storage.records.outbox import PendingDelivery
from runner.storage.records.runs import RunRow, RunState, StepRow
from runner.storage.workspace import Workspace
from tests.contract.store_contract import Move
from tests.servers.platform_examples import FIXTURES
from tests.servers.platforms import wrong
from tests.servers.receiver import Got, Receiver
from tests.support import Space, until

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEXT = "whsec_" + "C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
ONE = "recipe: one@1\nsteps: {a: {run: 'echo x > {{ outputs.o }}', outputs: {o: a.txt}}}\n"
PAGE = (Path(__file__).parents[2] / "docs" / "webhooks.md").read_text("utf-8")
EVENTS = int(os.environ.get("RECIPE_REPORTS", "30"))


def told(root: Path, url: str, **more: Any) -> None:
    """Settings with one webhook."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in ({"url": url} | more).items()]
    with (root / "recipe.toml").open("a") as file:
        file.write("\n".join(["[[webhooks]]", *lines, ""]))


def moved(ws: Workspace, count: int, runs: int = 1) -> None:
    """Runs that are paused and resumed until each has `count` moves."""
    for n in range(runs):
        ws.store.runs.submit(RunRow(f"r{n}", "tool@1", "plan", {}, str(ws.root)))
        before = "QUEUED"
        for _ in range(count - 1):
            after, fence = (
                "PAUSED" if before == "ACTIVE" else "ACTIVE",
                ws.store.runs.claim(f"r{n}", "w") or 0,
            )
            ws.store.runs.group(
                f"r{n}", fence, [Move("run", f"r{n}", before, after)], run_state=(after, "")
            )
            before = after


def quick(
    answer: ReceiverResponse, letter: PendingDelivery, now: float, chance: float
) -> DeliveryOutcome:
    """The rule with its waits shortened."""
    found = judge_answer(answer, letter, now, chance)
    return found._replace(wait=min(found.wait, 0.01)) if found.wait is not None else found


@pytest.fixture
def ws(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(tmp_path) as found:
        yield found


def waiting(ws: Workspace) -> list[PendingDelivery]:
    return ws.store.runs.outbox.list_letters()


def test_a_run_tells_its_webhook_how_it_goes_signed_for_the_librarys_verifier(
    tmp_path: Path,
) -> None:
    space = Space(tmp_path)
    (tmp_path / "one.yaml").write_text(ONE)
    with Receiver() as receiver:
        told(tmp_path, f"{receiver.url}/hook", secret="HOOK", events=["run.*"])
        assert space.command("run", "./one.yaml", "-q", env={"HOOK": f"{SECRET} {NEXT}"})[0] == 0
        assert (
            space.command("outbox", "deliver", env={"HOOK": f"{SECRET} {NEXT}"})[1] == ""
        )  # on a busy machine three seconds may be too few
        got = receiver.got
    assert [each.json["type"] for each in got] == ["run.queued", "run.active", "run.completed"]
    for each in got:
        for secret in (SECRET, NEXT):
            assert (
                Webhook(secret).verify(each.body, dict(each.headers))["data"]["recipe"] == "one@1"
            )
    assert len({each.id for each in got}) == 3 and got[0].path == "/hook"
    assert space.command("outbox")[1] == ""


def test_a_receiver_that_is_down_holds_up_no_run_and_gets_its_messages_when_it_is_back(
    tmp_path: Path,
) -> None:
    space = Space(tmp_path)
    (tmp_path / "one.yaml").write_text(ONE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told(tmp_path, f"http://127.0.0.1:{port}/")
    begun = time.monotonic()
    assert space.command("run", "./one.yaml", "-q")[0] == 0
    assert time.monotonic() - begun < 5
    code, listed, _ = space.command("outbox", "--json")
    rows = json.loads(listed)
    assert code == 0 and [each["type"] for each in rows] == [
        "run.queued",
        "run.active",
        "run.completed",
    ]
    assert [each["tries"] for each in rows] == [1, 0, 0] and "cannot connect" in rows[0]["reason"]
    assert "run.queued" in space.command("outbox")[1]


def test_letters_of_a_move_that_is_not_stored_are_not_stored(ws: Workspace) -> None:
    told(ws.root, "http://127.0.0.1:9/")
    moved(ws, 2)
    with pytest.raises(ZeroDivisionError):
        ws.store.runs.group(
            "r0", 1, [Move("run", "r0", "ACTIVE", "FAILED")], attempts=(1 / 0 for _ in "x")
        )  # type: ignore[misc]
    assert [each.type for each in waiting(ws)] == ["run.queued", "run.active"]


def test_a_run_without_receivers_writes_nothing(ws: Workspace) -> None:
    moved(ws, 3)
    assert waiting(ws) == [] and ws.letters is None


@pytest.mark.longer
@pytest.mark.parametrize("fault", ["500", "drops after accepting", "slow", "down", "410"])
def test_each_message_arrives_in_order_with_one_id_whatever_the_receiver_does(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    runs = max(1, EVENTS // 6)
    seen: dict[str, int] = {}
    monkeypatch.setattr("runner.reports.sending.PATIENCE", 0.3)
    monkeypatch.setattr("runner.reports.sending.send.__defaults__", (None, 0.05))

    def answer(got: Got) -> int | None:
        tries = seen[got.id] = seen.get(got.id, 0) + 1
        bad = (tries + sum(got.id.encode())) % 3 == 0
        if fault == "down":
            return 200
        if fault == "slow" and bad:
            until(
                lambda: seen[got.id] > tries, seconds=5
            )  # the sender has given it up, and asks again
        return (
            {"500": 500, "drops after accepting": None, "410": 410}.get(fault, 200) if bad else 200
        )

    with Receiver(answer) as receiver:
        told(ws.root, receiver.url)
        if fault == "down":
            real = send

            def unreachable(
                method: str, url: str, headers: Mapping[str, str], body: bytes, *rest: Any
            ) -> ReceiverResponse:
                tries = seen[headers["webhook-id"]] = seen.get(headers["webhook-id"], 0) + 1
                return (
                    ReceiverResponse(0, "it cannot be reached")
                    if tries % 3
                    else real(method, url, headers, body)
                )

            monkeypatch.setattr("runner.reports.receivers.send", unreachable)
        moved(ws, 6, runs)
        delivery = Delivery(ws.root, ws.environ, quick)
        delivery.start()
        until(
            lambda: not any(each.state == "waiting" for each in waiting(ws)),
            seconds=20 + EVENTS / 10,
        )
        delivery.end(5.0)
        got = receiver.got
    first: dict[str, list[int]] = {}
    for each in got:
        data = each.json["data"]
        if data["seq"] not in first.setdefault(data["run"], []):
            first[data["run"]].append(data["seq"])
            assert each.id == f"{data['run']}-{data['seq']}"
    if fault == "410":
        assert waiting(ws) and {each.state for each in waiting(ws)} == {"dead"}
        return
    assert waiting(ws) == [] and first == {f"r{n}": list(range(1, 7)) for n in range(runs)}


def letter(tries: int = 0, created: float = 0.0) -> PendingDelivery:
    return PendingDelivery(
        1,
        "r",
        "webhook POST https://x.example/",
        "i",
        "run.failed",
        "{}",
        "waiting",
        tries,
        created,
        0.0,
        "",
        "",
    )


def test_a_receiver_that_fails_is_tried_after_the_times_that_are_promised_and_then_given_up() -> (
    None
):
    assert [judge_answer(ReceiverResponse(500), letter(n), 0.0, 0.5).wait for n in range(8)] == [
        *BACKOFF,
        None,
    ]
    assert [
        judge_answer(ReceiverResponse(0), letter(), 0.0, chance).wait for chance in (0.0, 1.0)
    ] == [
        4.5,
        5.5,
    ]
    assert judge_answer(ReceiverResponse(302), letter(), 0.0, 0.5).wait == 5.0
    assert judge_answer(ReceiverResponse(204), letter(), 0.0, 0.5).delivered
    gone = judge_answer(ReceiverResponse(410), letter(), 0.0, 0.5)
    assert gone.stops and gone.wait is None


def test_a_receiver_that_asks_for_time_gets_it_and_not_for_ever() -> None:
    for status in (429, 503):
        assert judge_answer(
            ReceiverResponse(status, retry_after=77.0), letter(7), 1.0, 0.5
        ) == DeliveryOutcome(
            wait=77.0, counts=False, reason=f"HTTP {status}", failure="server-error"
        )
        assert judge_answer(ReceiverResponse(status), letter(), 1.0, 0.5).wait == 5.0
        assert (
            judge_answer(
                ReceiverResponse(status, retry_after=77.0), letter(7), sum(BACKOFF) + 1, 0.5
            ).wait
            is None
        )


def test_retry_after_is_read_as_seconds_and_as_a_date() -> None:
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    for value, least, most in (("7", 7, 7), (when, 95, 101), ("soon", None, None)):
        with Receiver(lambda got, value=value: (503, {"Retry-After": value})) as receiver:
            found = send("POST", receiver.url, {}, b"{}").retry_after
        assert found == least if least is None or most is None else least <= (found or 0) <= most


def test_dead_letters_are_listed_and_tried_again_when_asked(tmp_path: Path) -> None:
    space, gone = Space(tmp_path), [True]
    with Receiver(lambda got: 410 if gone[0] else 200) as receiver, Workspace.open(tmp_path) as ws:
        told(tmp_path, receiver.url)
        moved(ws, 3)
        deliver(ws.root, ws.environ)
        assert [each.state for each in waiting(ws)] == ["dead"] * 3 and len(receiver.got) == 1
        assert space.command("outbox")[1].count("dead") == 3
        gone[0] = False
        assert "3 deliveries will be retried" in space.command("outbox", "retry")[2]
        assert space.command("outbox", "deliver")[0] == 0
        assert [each.json["data"]["seq"] for each in receiver.got] == [1, 1, 2, 3] and waiting(
            ws
        ) == []


def test_a_redirect_is_not_followed_and_an_endless_answer_not_read(tmp_path: Path) -> None:
    with Receiver() as other, Receiver(lambda got: (302, {"Location": other.url})) as receiver:
        assert send("POST", receiver.url, {}, b"{}").status == 302 and other.got == []


def test_an_answer_that_comes_byte_by_byte_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def drip() -> None:
            wire, _ = listener.accept()
            with wire:
                try:
                    while True:
                        wire.sendall(b"x")
                        time.sleep(0.02)
                except OSError:
                    pass

        threading.Thread(target=drip, daemon=True).start()
        begun = time.monotonic()
        answer = send(
            "POST", f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, b"{}", patience=0.3
        )
        assert answer.status == 0 and time.monotonic() - begun < 2


PRIVATE = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "198.18.0.1", "192.0.0.8", "224.0.0.1", "255.255.255.255", "240.0.0.1", "[::1]", "[::]", "[fe80::1]", "[fc00::1]",
    "[fd12:3456::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:10.0.0.1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::a9fe:a9fe]",
    "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[ff02::1]", "[fec0::1]", "[100::1]", "[2001:db8::1]", "localhost", "localhost.", "①②⑦.0.0.1", "127。0。0。1",
    "%31%32%37.0.0.1", "127.0.0.1.", "metadata", "user@8.8.8.8", "8.8.8.8:99999", "[8.8.8.8]", "", " 8.8.8.8", "8.8.8.8\\@10.0.0.1", "::1", "0x08080808",
]  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE)
def test_an_address_of_a_stranger_that_is_private_is_refused_however_it_is_written(
    host: str,
) -> None:
    with pytest.raises(Invalid):
        public_endpoint(f"https://{host}/hook", lambda host, port: ["127.0.0.1"])


def test_a_name_is_looked_up_once_and_that_very_address_is_used() -> None:
    answers = iter([["93.184.215.14"], ["127.0.0.1"]])
    assert public_endpoint("https://hooks.example.com/x", lambda host, port: next(answers)) == (
        "hooks.example.com",
        443,
        "93.184.215.14",
    )
    for found in (["93.184.215.14", "10.0.0.1"], []):  # one private address among several is enough
        with pytest.raises(Invalid):
            public_endpoint("https://hooks.example.com/x", lambda host, port, found=found: found)
    with pytest.raises(Invalid):
        public_endpoint("http://hooks.example.com/x", lambda host, port: ["93.184.215.14"])
    assert public_endpoint("https://8.8.8.8:8443/").port == 8443


def test_the_address_that_was_looked_up_is_what_is_connected_to() -> None:
    with Receiver() as receiver:
        port = int(receiver.url.rpartition(":")[2])
        assert (
            send(
                "POST",
                f"http://no-such-host.invalid:{port}/x",
                {},
                b"{}",
                Endpoint("no-such-host.invalid", port, "127.0.0.1"),
            ).status
            == 200
        )
        assert receiver.got[0].headers["host"] == f"no-such-host.invalid:{port}"


def test_what_the_page_has_a_newcomer_type_works(tmp_path: Path) -> None:
    space, files = (
        Space(tmp_path),
        dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    (tmp_path / "paid").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("8799", port))
    variable = re.search(r"export (HOOK_SECRET)=(\S+)", PAGE)
    assert variable is not None
    env = {**os.environ, variable[1]: variable[2]}
    with subprocess.Popen(
        [sys.executable, "receiver.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            until(lambda: reachable(int(port)))
            for typed, printed in re.findall(
                r"^\$ recipe (run .*|outbox.*)\n((?:[^$`].*\n)*)", PAGE, re.MULTILINE
            ):
                code, out, err = space.command(*typed.split(), env=env)
                assert code == 0 and printed in (out + err, ""), (typed, out, err)
                assert (
                    space.command(
                        "outbox", "deliver", "-C", "paid" if " -C paid" in typed else ".", env=env
                    )[0]
                    == 0
                )
        finally:
            receiver.terminate()
        assert receiver.stdout is not None
        heard = receiver.stdout.read()
    assert f"$ cat paid/points.log\n{(tmp_path / 'paid/points.log').read_text()}```" in PAGE
    assert f"$ cat heard.txt\n{heard}```" in PAGE


def test_a_chat_is_reported_in_a_sentence_by_apprise_and_its_address_is_stored_nowhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "recipe.toml").write_text('[[notify]]\nurl = "CHAT"\nevents = ["run.failed"]\n')
    with Receiver() as receiver:
        environ = {**os.environ, "CHAT": receiver.url.replace("http://", "json://") + "/canary"}
        with Workspace.open(tmp_path, environ=environ) as ws:
            fence = ws.store.runs.submit(
                RunRow("r1", "tool@1", "plan", {}, str(ws.root)), "w"
            ).fence
            ws.store.runs.group(
                "r1",
                fence,
                [Move("run", "r1", "QUEUED", "FAILED", "its host is gone")],
                run_state=("FAILED", "its host is gone"),
            )
            stored = (ws.home / "recipe.db").read_bytes()
            deliver(ws.root, environ)
            assert waiting(ws) == []
        (got,) = receiver.got
    assert (got.path, got.json["title"], got.json["message"]) == (
        "/canary",
        "run.failed",
        "tool@1 r1: FAILED (its host is gone)",
    )
    assert b"canary" not in stored


def reachable(port: int) -> bool:
    with socket.socket() as wire:
        return wire.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("seen", "names"),
    [
        (RunCondition(), set()),
        (RunCondition(coming=9.9, silent=4.9, hours=0.8, cost=0.8, full=0.9, waits=60), set()),
        (RunCondition(coming=10.1), {"provisioning"}),
        (RunCondition(silent=5.1, full=0.95), {"no_beat", "disk_low"}),
        (RunCondition(hours=0.81), {"timeout_warning"}),
        (RunCondition(cost=0.81, hours=0.9, waits=61), {"timeout_warning", "outbox_stuck"}),
    ],
)
def test_an_alert_is_what_is_above_its_limit(seen: RunCondition, names: set[str]) -> None:
    assert find_alerts(seen).keys() == names


@pytest.mark.usefixtures("room")
def test_a_rule_is_reported_once_a_run_to_webhooks_and_the_platform(tmp_path: Path) -> None:
    with Receiver() as receiver:
        told(tmp_path, receiver.url, events=["alert.*"])
        environ = {
            **os.environ,
            "ALERT_API_URL": f"{receiver.url}/alerts",
            "JOB_ID": "j",
            "USER_ID": "u",
            "MODEL_NAME": "acme/tiny",
        }
        with Workspace.open(tmp_path, environ=environ) as ws:
            row = RunRow("r1", "tool@1", "plan", {}, str(ws.root), data={"limits": {"time": 100.0}})
            fence = ws.store.runs.submit(row, "w").fence
            trains = StepRow("r1", "train", "RUNNING", numbers='{"step": 30, "total": 60}')
            move = Move("run", "r1", "QUEUED", "ACTIVE")
            ws.store.runs.group("r1", fence, [move], steps=[trains], run_state=("ACTIVE", ""))
            watch = Watch(ws)
            for after in (10, 85, 90):
                watch.judge(time.time() + after)
                deliver(ws.root, environ)
            ws.store.runs.group(
                "r1",
                fence,
                [Move("run", "r1", "ACTIVE", "FAILED", "4 workers died", {"failure": "poison"})],
                run_state=RunState("FAILED", "4 workers died", "poison"),
            )
            deliver(ws.root, environ)
            assert waiting(ws) == []
        got = [each.json for each in receiver.got]
    assert [each["type"] for each in got if "data" in each] == [
        "alert.timeout_warning",
        "alert.poison",
    ]
    assert (
        next(each["data"]["message"] for each in got if "data" in each)
        == "85% of the time limit is used"
    )
    alerts = [each for each in got if "job_id" in each]
    assert [each["type"] for each in alerts] == ["job_started", "timeout_warning", "job_failed"]
    assert [wrong("alert", each) for each in alerts] == [""] * 3
    example = json.loads((FIXTURES / "alert_timeout_warning.json").read_text())
    assert alerts[1] | {"progress": 50.0} == example | {"job_id": "j", "user_id": "u"}


def test_an_end_waits_for_no_receiver_that_hangs(ws: Workspace) -> None:
    let_go = threading.Event()

    def hangs(got: Got) -> int:
        let_go.wait(20)
        return 200

    with Receiver(hangs) as receiver:
        told(ws.root, receiver.url)
        moved(ws, 1)
        delivery = Delivery(ws.root, ws.environ)
        delivery.start()
        until(lambda: bool(delivery._busy))
        begun = time.monotonic()
        delivery.end(0.1)
        assert time.monotonic() - begun < 1 and not delivery.is_alive()
        assert all(each.daemon for each in threading.enumerate() if each.name == "delivery")
        let_go.set()


def test_a_message_whose_sender_was_killed_is_sent_again_under_its_id(tmp_path: Path) -> None:
    space = Space(tmp_path)
    with Receiver() as receiver, Workspace.open(tmp_path) as ws:
        told(tmp_path, receiver.url)
        moved(ws, 2)
        assert space.command("outbox", "deliver", env={"RECIPE_CRASH_AT": "letter-sent"})[0] == -9
        assert len(waiting(ws)) == 2
        deliver(ws.root, ws.environ)
        assert len(receiver.got) == 1, "for a minute it is the dead one's"
        ws.store.runs.outbox.put_off(waiting(ws)[0], 0.0, "")
        deliver(ws.root, ws.environ)
        assert [each.id for each in receiver.got] == ["r0-1", "r0-1", "r0-2"] and waiting(ws) == []
