"""Claims about live streams: one run or all of them, as events over HTTP or in a WebSocket, from a real server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from runner.planning.schedule import Move
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace
from tests.servers.rest import Rest, Sent
from tests.support import until

LEARN = """\
recipe: learn@1
inputs: {key: {type: secret, env: LEARN_KEY}}
steps:
  learn:
    secrets: [key]
    metrics: true
    run: |
      touch ROOT/begun
      while [ ! -e ROOT/go ]; do sleep 0.02; done
      echo '{"step": 1, "max_steps": 4, "loss": 2.5, "rate": NaN}' >> $RECIPE_METRICS
      echo '{"warning": "rows were cut"}' >> $RECIPE_METRICS
      echo "learning $LEARN_KEY"
      printf 'no end'
    outputs: {o: {path: o.txt, optional: true}}
"""
CANARY = "canary-0123456789"


class Worked:
    """A run that this process works on, move by move."""

    def __init__(self, ws: Workspace, id: str) -> None:
        self.ws, self.id = ws, id
        ws.store.runs.submit(RunRow(id, "t@1", "p", {}, str(ws.root)))
        fence = ws.store.runs.claim(id, "test")
        assert fence is not None
        self.fence = fence

    def move(self, count: int = 1, size: int = 0, **more: Any) -> None:
        moves = [Move("step", f"s{n}", "READY", "QUEUED", "x" * size) for n in range(count)]
        self.ws.store.runs.group(self.id, self.fence, moves, **more)

    def end(self) -> None:
        last = Move("run", self.id, "QUEUED", "COMPLETED")
        self.ws.store.runs.group(self.id, self.fence, [last], run_state=("COMPLETED", ""))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("live") / "space"
    root.mkdir()
    (root / "learn.yaml").write_text(LEARN.replace("ROOT", str(root)))
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./learn.yaml"]\n')
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("LEARN_KEY", CANARY)
        server = Rest(root, "--with-worker")
    with server:
        yield server
        assert server.end() == 0
    said = server.said()
    assert "Traceback" not in said and "ERROR" not in said, said


@pytest.fixture(scope="module")
def ws(rest: Rest) -> Iterator[Workspace]:
    with Workspace.open(rest.root) as found:
        yield found


def opened(rest: Rest, path: str, token: str = "", **more: Any) -> ClientConnection:
    """A WebSocket of a program, which sends its token."""
    headers = {"Authorization": f"Bearer {token or rest.token}"} if token != "-" else {}
    return connect(f"ws{rest.url[4:]}{path}", additional_headers=headers, proxy=None, **more)


def framed(connection: ClientConnection) -> Iterator[Sent]:
    """What comes until the server closes the connection."""
    with suppress(ConnectionClosed):
        while True:
            yield Sent(**json.loads(connection.recv(timeout=30)))


def new_token(rest: Rest, **asked: Any) -> str:
    return str(rest.ask("POST", "/v1/tokens", {"scope": "read", **asked}).json()["token"])


def test_a_run_is_followed_with_moves_progress_metrics_lines_and_warnings(rest: Rest) -> None:
    run = rest.submit("learn")
    until((rest.root / "begun").exists)
    with rest.follow("/v1/stream?kind=progress&kind=move") as every:
        every.until("begin")
        with rest.follow(f"/v1/runs/{run}/stream") as stream:
            found = stream.until("progress")
            (rest.root / "go").touch()
            found += list(stream)
        of_all = [each for each in every.until("move") if each.data.get("run") == run]
    moves = [each for each in found if each.event == "move"]
    known = rest.get(f"/v1/runs/{run}/events")["events"]
    assert [each.data for each in moves] == known
    assert [each.id for each in moves] == [str(each["seq"]) for each in known]
    assert found[-1].event == "end" and found[-1].data["code"] == "over"
    said = {each.event: each.data for each in found}
    name = {"run": run, "step": "learn", "attempt": 1}
    values = {"step": 1, "max_steps": 4, "loss": 2.5, "rate": "nan"}
    assert said["metrics"] == {**name, "points": 1, "values": values, "new": [values]}
    assert said["warning"] == {**name, "text": "rows were cut"}
    lines = [line for each in found if each.event == "log" for line in each.data["lines"]]
    assert lines == ["learning ***", "no end"]
    assert said["progress"]["state"] == "COMPLETED" and said["progress"]["percent"] == 100.0
    assert of_all and all(each.event in ("move", "progress") for each in of_all)


def test_a_log_message_says_where_in_the_log_its_lines_are(rest: Rest) -> None:
    (run,) = (each["id"] for each in rest.get("/v1/runs?recipe=learn@1")["runs"])
    log = rest.ask("GET", f"/v1/runs/{run}/logs").content
    assert log == b"learning ***\nno end"


@pytest.mark.parametrize("kind", ["run", "all"])
def test_who_connects_again_and_again_gets_each_move_once(
    rest: Rest, ws: Workspace, kind: str
) -> None:
    run = Worked(ws, f"again-{kind}")

    def work() -> None:
        for _ in range(40):
            run.move(5)
            time.sleep(0.01)
        run.end()

    path = "/v1/stream" if kind == "all" else f"/v1/runs/{run.id}/stream"
    worker = threading.Thread(target=work)
    seen: list[int] = []
    with rest.follow(f"{path}?kind=move") as stream:
        if kind == "all":
            (begin,) = stream.until("begin")
            last = begin.id
        else:
            (first,) = stream.until("move")
            last, seen = first.id, [first.data["seq"]]
        worker.start()
    while not seen or seen[-1] < 202:
        with rest.follow(f"{path}?kind=move", **{"Last-Event-ID": last}) as stream:
            for taken, each in enumerate(stream):
                if each.event == "move" and each.data["run"] == run.id:
                    seen.append(each.data["seq"])
                    last = each.id
                if taken > len(seen) % 37 or seen[-1:] == [202]:
                    break
    worker.join()
    assert seen[0] <= 2 and seen == list(range(seen[0], 203))


def test_moves_of_another_server_are_sent_again_rather_than_lost(rest: Rest, ws: Workspace) -> None:
    run = Worked(ws, "elsewhere")
    run.move(3)
    place = f"deadbeef-7-{int(time.time() * 1000)}"
    with rest.follow("/v1/stream?kind=move", **{"Last-Event-ID": place}) as stream:
        found = stream.until("begin")
        run.end()
        found += stream.until("move")
    assert found[0].event == "gap" and "may repeat" in found[0].data["message"]
    mine = [each.data["seq"] for each in found if each.data.get("run") == run.id]
    assert mine == [1, 2, 3, 4, 5]


def test_the_stream_of_all_runs_goes_on_exactly_with_the_next_server(tmp_path: Path) -> None:
    """Moves before the stop, unread ones, those while no server ran, and those after it: each comes once, without a gap."""
    root = tmp_path / "space"
    root.mkdir()
    with Rest(root) as server, Workspace.open(root) as ws:
        token, old, quiet = server.token, Worked(ws, "old"), Worked(ws, "quiet")
        with server.follow("/v1/stream?kind=move") as stream:
            stream.until("begin")
            old.move(5)
            quiet.move()
            (first, *_) = [each for each in stream.until("move") if each.event == "move"]
        assert server.end() == 0
        old.move(3)
        new = Worked(ws, "new")
        new.move(2)
        new.end()
        with Rest(root) as after:
            after.token = token
            last = {"Last-Event-ID": first.id}
            with after.follow("/v1/stream?kind=move", **last) as stream:
                quiet.end()
                found, missing = [first], {("old", 9), ("quiet", 3), ("new", 4)}
                while missing:
                    found += stream.until("move")
                    missing -= {(found[-1].data["run"], found[-1].data["seq"])}
            assert after.end() == 0
        old.end()
        assert {each.event for each in found} == {"move"}
        for run, begins, stored in ((old, first.data["seq"], 9), (quiet, 0, 3), (new, 1, 4)):
            got = [each.data["seq"] for each in found if each.data["run"] == run.id]
            assert got == list(range(begins or got[0], stored + 1)), run.id


def test_after_a_killed_server_a_run_is_followed_exactly_and_all_runs_with_a_gap(
    tmp_path: Path,
) -> None:
    """Moves before the kill, those while no server ran, and those after it: the stream of all runs may repeat some, and loses none."""
    root = tmp_path / "space"
    root.mkdir()
    last = dict[str, str]()
    with Rest(root) as server, Workspace.open(root) as ws:
        run, token = Worked(ws, "killed"), server.token
        paths = {"run": f"/v1/runs/{run.id}/stream?kind=move", "all": "/v1/stream?kind=move"}
        with server.follow(paths["run"]) as one, server.follow(paths["all"]) as every:
            every.until("begin")
            run.move(5)
            for name, stream in (("run", one), ("all", every)):
                while (read := stream.until("move")[-1]).data["seq"] < 4:
                    pass
                last[name] = read.id
            server.process.kill()
            server.end()
        run.move(3)
        with Rest(root) as after:
            after.token = token
            run.end()
            with after.follow(paths["run"], **{"Last-Event-ID": last["run"]}) as stream:
                found = [each for each in stream if each.event == "move"]
            assert [each.data["seq"] for each in found] == [5, 6, 7, 8, 9, 10]
            with after.follow(paths["all"], **{"Last-Event-ID": last["all"]}) as stream:
                first, *rest = stream.until("begin")
            assert first.event == "gap" and "may repeat" in first.data["message"]
            assert [each.data["seq"] for each in rest if each.event == "move"] == list(range(1, 11))
            assert after.end() == 0


def test_a_token_of_one_run_sees_no_other(rest: Rest, ws: Workspace) -> None:
    mine, other = Worked(ws, "mine"), Worked(ws, "other")
    token = new_token(rest, run=mine.id)
    with rest.follow("/v1/stream", token=token) as stream, opened(rest, "/v1/stream", token) as web:
        stream.until("begin")
        frames = framed(web)
        assert next(frames).event == "begin"
        other.move(3)
        mine.move()
        for found in (
            stream.until("move"),
            [next(each for each in frames if each.event == "move")],
        ):
            assert {each.data.get("run", mine.id) for each in found} == {mine.id}
    for path in (f"/v1/runs/{other.id}/stream", "/v1/runs/none/stream"):
        assert rest.ask("GET", path, token=token).status_code == 404
        with pytest.raises(InvalidStatus) as refused, opened(rest, path, token):
            pass
        assert refused.value.response.status_code == 404
    assert rest.ask("GET", "/v1/runs", token=token).status_code == 403
    # What came in the meantime, too, who connects again.
    place = f"deadbeef-1-{int(time.time() * 1000)}"
    with rest.follow("/v1/stream", token=token, **{"Last-Event-ID": place}) as stream:
        assert {each.data.get("run", mine.id) for each in stream.until("begin")} == {mine.id}
    mine.end()
    other.end()


def test_a_websocket_sends_the_same_as_the_stream(rest: Rest, ws: Workspace) -> None:
    run = Worked(ws, "frames")
    run.move(2)
    with opened(rest, f"/v1/runs/{run.id}/stream?after=1") as web:
        frames = framed(web)
        first = next(frames)
        run.end()
        found = [first, *frames]
    moves = [each for each in found if each.event == "move"]
    assert [(each.id, each.data["seq"]) for each in moves] == [("2", 2), ("3", 3), ("4", 4)]
    assert found[-1].event == "end" and web.close_code == 1000
    with rest.follow(f"/v1/runs/{run.id}/stream?after=1") as stream:
        assert [each for each in stream if each.event == "move"] == moves


def test_a_browser_opens_a_websocket_with_a_ticket_once(rest: Rest, ws: Workspace) -> None:
    mine, other = Worked(ws, "ticket-mine"), Worked(ws, "ticket-other")
    token = new_token(rest, run=mine.id)

    def ticket() -> str:
        found = rest.ask("POST", "/v1/tickets", token=token)
        assert found.status_code == 201, found.text
        return str(found.json()["ticket"])

    first = ticket()
    with opened(rest, f"/v1/runs/{mine.id}/stream?kind=move&ticket={first}", "-") as web:
        assert next(framed(web)).data["run"] == mine.id
    for path, status in (
        (f"/v1/runs/{mine.id}/stream?ticket={first}", 401),
        (f"/v1/runs/{mine.id}/stream", 401),
        (f"/v1/runs/{other.id}/stream?ticket={ticket()}", 404),
        (f"/v1/stream?knd=move&ticket={ticket()}", 422),
        (f"/v1/runs/{mine.id}/stream?after=x&ticket={ticket()}", 422),
    ):
        with pytest.raises(InvalidStatus) as refused, opened(rest, path, "-"):
            pass
        answer = refused.value.response
        assert answer.status_code == status, path
        assert answer.body is not None
        assert set(json.loads(answer.body)["error"]) == {"code", "message", "fix", "problems"}
    with pytest.raises(InvalidStatus) as refused:
        opened(rest, f"/v1/stream?ticket={ticket()}", "-", origin="https://evil.example")
    assert refused.value.response.status_code == 403
    assert rest.ask("GET", f"/v1/stream?ticket={ticket()}", token="").status_code == 401
    mine.end()
    other.end()


def test_a_token_has_twenty_streams_of_whatever_kind_and_no_more(rest: Rest, ws: Workspace) -> None:
    run = Worked(ws, "twenty")
    token = new_token(rest)
    path = f"/v1/runs/{run.id}/stream?kind=move"
    with ExitStack() as stack:
        streams = [stack.enter_context(rest.follow(path, token=token)) for _ in range(10)]
        webs = [stack.enter_context(opened(rest, path, token)) for _ in range(10)]
        for stream in streams:
            stream.until("move")
        for web in webs:
            next(framed(web))
        for _ in range(2):
            with rest.follow(path, token=token) as refused:
                assert refused.answer.status_code == 429
            with pytest.raises(InvalidStatus) as denied:
                opened(rest, path, token)
            assert denied.value.response.status_code == 429
        streams[0].close()
        webs[0].close()

        def is_free() -> bool:
            with rest.follow(path, token=token) as stream:
                return stream.answer.status_code == 200

        until(is_free)
    run.end()


def test_the_streams_of_a_token_that_is_removed_end(rest: Rest, ws: Workspace) -> None:
    run = Worked(ws, "removed")
    made = rest.ask("POST", "/v1/tokens", {"scope": "read"}).json()
    with (
        rest.follow(f"/v1/runs/{run.id}/stream?kind=move", token=made["token"]) as stream,
        opened(rest, f"/v1/runs/{run.id}/stream?kind=move", made["token"]) as web,
    ):
        stream.until("move")
        rest.ask("DELETE", f"/v1/tokens/{made['id']}")
        assert [each.data["code"] for each in stream] == ["token-gone"]
        assert [each.event for each in framed(web)] == ["move", "end"]
        assert web.close_code == 1008
    run.end()


def test_a_reader_that_does_not_read_is_dropped_and_told_and_loses_nothing(
    rest: Rest, ws: Workspace
) -> None:
    run = Worked(ws, "slow")
    host, port = rest.url.removeprefix("http://").split(":")
    ask = (
        f"GET /v1/runs/{run.id}/stream?kind=move HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {rest.token}\r\n\r\n"
    )
    with closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(ask.encode())
        data = b""
        while b"event: move" not in data:
            data += slow.recv(4096)
        with rest.follow(f"/v1/runs/{run.id}/stream?kind=move") as fast:
            for _ in range(5):
                run.move(100, size=4000)
            seen = 0
            for each in fast:
                seen = each.data["seq"]
                if seen == 501:
                    break
        slow.settimeout(30)
        while piece := slow.recv(1 << 16):
            data += piece
    *_, last = data.replace(b"\r\n", b"\n").partition(b"event: end\n")
    assert b'"too-slow"' in last and b"Last-Event-ID" in last
    number = int(data.rpartition(b"id: ")[2].split()[0])
    assert number < 501
    with rest.follow(f"/v1/runs/{run.id}/stream?kind=move&after={number}") as again:
        run.end()
        rest_of_it = [each.data["seq"] for each in again if each.event == "move"]
    assert rest_of_it == list(range(number + 1, 503))


def test_what_machines_receive_and_send_is_a_figure(rest: Rest, ws: Workspace) -> None:
    run = Worked(ws, "0-wires")  # lists are in the order of ids, which begin with a day
    log = rest.root / "wires.1.log"
    log.with_suffix(".host").write_text(
        '{"net_received_mb_per_s": 9.0, "net_sent_mb_per_s": 9.0}\n'
        '{"net_received_mb_per_s": 2.5, "net_sent_mb_per_s": 0.5}\n{"torn'
    )
    began = Move("step", "s", "QUEUED", "RUNNING", "", {"log": str(log), "attempt": 1})
    ws.store.runs.group(run.id, run.fence, [began], run_state=("ACTIVE", ""))
    figures = rest.ask("GET", "/metrics").text
    name = "recipe_network_bytes_per_second"
    assert f'{name}{{direction="received",run="{run.id}"}} 2.5e+06' in figures
    assert f'{name}{{direction="sent",run="{run.id}"}} 500000.0' in figures
    run.end()


def test_streams_are_told_that_the_server_stops(tmp_path: Path) -> None:
    root = tmp_path / "space"
    root.mkdir()
    with Rest(root) as server, Workspace.open(root) as ws:
        run = Worked(ws, "stops")
        path = f"/v1/runs/{run.id}/stream?kind=move"
        with server.follow(path) as stream, opened(server, path) as web:
            stream.until("move")
            frames = framed(web)
            next(frames)
            assert server.end() == 0
            assert [each.data["code"] for each in stream] == ["server-stops"]
            assert [each.data["code"] for each in frames] == ["server-stops"]
            assert web.close_code == 1012
        with pytest.raises((ConnectionClosed, OSError)):
            opened(server, path)
        said = server.said()
        assert "Traceback" not in said and "Cancel" not in said, "no stream held the server up"
