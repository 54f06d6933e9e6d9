"""Followers of one run: how long the event loop of `recipe serve` keeps others waiting, and whether each follower gets each move once.

    python benchmarks/followers.py [--followers 1000] [--tokens 50] [--seconds 20] [--websockets] [--nice -15]

The server runs in a process of its own, the followers in another. A run gets 20 moves, 5 log lines and 2 metric points a second, by commits
to the store as a worker makes them. The loop's lateness is measured inside the server: how much later than asked a timer of 5 ms
rings, from when all have connected to the end; also of a server that no client follows. Each token then asks for one stream more than it may have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from runner.planning.schedule import Move
from runner.server import serving
from runner.server.app import application
from runner.server.serving import ServerAddress
from runner.server.tokens import Tokens
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace

RUN = "followed"
TIMER = 0.005
"""Seconds of the timer whose lateness is measured."""
STREAMS = 20
"""Streams that one token may have."""
TICK = 0.05
"""Seconds between two moves."""


class Late:
    """An application beside which a timer rings; FOLDER/late gets `at late` lines, in seconds."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app, self._path = app, folder / "late"
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._tasks.append(asyncio.create_task(self._measure()))
        await self._app(scope, receive, send)

    async def _measure(self) -> None:
        with self._path.open("w", buffering=1 << 12) as file:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(TIMER)
                late = time.monotonic() - begun - TIMER
                file.write(f"{time.time():.4f} {late:.6f}\n")


def serve(folder: Path) -> None:
    """Be the server that is measured."""
    serving.application = lambda *given: Late(application(*given), folder)  # type: ignore[assignment]
    serving.serve(
        folder,
        ServerAddress("127.0.0.1", 0),
        lambda address, _: print(address, flush=True),
        with_worker=False,
    )


class Got(NamedTuple):
    """What one follower got: numbers of moves, and seconds from the store to here of each."""

    moves: list[int]
    delays: list[float]


async def follow(address: str, token: str, websocket: bool) -> Got:
    """Follow the run over a plain socket until it is over."""
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    shake = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    writer.write(
        f"GET /v1/runs/{RUN}/stream HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {token}\r\n{shake if websocket else ''}\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head and b" 101 " not in head:
        writer.close()
        raise ConnectionRefusedError(head.decode())
    got = Got([], [])
    rest = b""
    while data := await reader.read(1 << 16):
        now = time.time()
        rest += data
        while (begin := rest.find(b'"subject":"step"')) >= 0:
            start = rest.rfind(b'"seq":', 0, begin)
            got.moves.append(int(rest[start + 6 : rest.find(b",", start)]))
            reason = rest.find(b'"reason":"', begin)
            end = rest.find(b'"', reason + 10)
            if end < 0:
                got.moves.pop()
                break
            got.delays.append(now - float(rest[reason + 10 : end]))
            rest = rest[end:]
        if b'"code":"over"' in rest:
            break
        rest = rest[-2000:]
    writer.close()
    return got


async def follow_all(address: str, tokens: Sequence[str], count: int, websocket: bool) -> None:
    """Be all followers: a line when all are connected, and at the end what they got."""
    waiting = [
        asyncio.create_task(follow(address, tokens[n % len(tokens)], websocket))
        for n in range(count)
    ]
    print("followed", flush=True)
    found = await asyncio.gather(*waiting)
    moves = {tuple(each.moves) for each in found}
    delays = [delay for each in found for delay in each.delays]
    print(json.dumps({"same": len(moves), "moves": list(moves.pop()), "delays": delays[::97]}))


async def refused(address: str, tokens: Sequence[str], websocket: bool) -> int:
    """How many of the tokens are refused one stream more."""
    found = await asyncio.gather(
        *(asyncio.wait_for(follow(address, each, websocket), 10) for each in tokens),
        return_exceptions=True,
    )
    return sum(isinstance(each, ConnectionRefusedError) and " 429 " in str(each) for each in found)


def work(ws: Workspace, folder: Path, fence: int, seconds: float) -> int:
    """Be the worker of the run; answers how many moves it made."""
    log, metrics = folder / "a.1.log", folder / "a.1.metrics"
    end, moves, last = time.monotonic() + seconds, 0, 0
    with log.open("ab", 0) as lines, metrics.open("ab", 0) as points:
        while time.monotonic() < end:
            moves += 1
            move = Move("step", f"s{moves}", "READY", "QUEUED", f"{time.time():.6f}")
            last = ws.store.runs.group(RUN, fence, [move])
            if moves % 4 == 0:
                lines.write(b"step %d of many, and what else a trainer prints on a line\n" % moves)
            if moves % 10 == 0:
                points.write(b'{"step": %d, "loss": 2.5, "lr": 0.0001}\n' % moves)
            time.sleep(TICK)
    over = Move("run", RUN, "ACTIVE", "COMPLETED")
    ws.store.runs.group(RUN, fence, [over], run_state=("COMPLETED", ""))
    return moves + (last < 0)


def lateness(folder: Path, begin: float, end: float) -> str:
    """How late the timer rang in a span of time."""
    found = []
    for line in (folder / "late").read_text().splitlines():
        at, _, late = line.partition(" ")
        if late and begin <= float(at) <= end:
            found.append(float(late) * 1000)
    if len(found) < 2:
        return "too few to tell"
    cuts = quantiles(found, n=1000)
    return f"p50 {median(found):.1f}, p99 {cuts[989]:.1f}, p99.9 {cuts[998]:.1f}, most {max(found):.1f} ms of {len(found)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--websockets", action="store_true")
    parser.add_argument("--nice", type=int, default=0, help="of the server, on a busy machine")
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--follow", nargs=2)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if args.follow:
        address, file = args.follow
        tokens = Path(file).read_text().split()
        return asyncio.run(follow_all(address, tokens, args.followers, args.websockets))
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Print what is measured in a new workspace."""
    me = [sys.executable, __file__, "--followers", str(args.followers)]
    me += ["--websockets"] if args.websockets else []
    with Workspace.open(folder) as ws:
        known = Tokens(ws.home / "server", ws.locks)
        tokens = [known.create("read", f"t{n}")[1] for n in range(args.tokens)]
        (folder / "tokens").write_text("\n".join(tokens))
        ws.store.runs.submit(RunRow(RUN, "t@1", "p", {}, str(ws.root)))
        fence = ws.store.runs.claim(RUN, "benchmark")
        assert fence is not None
        began = {"log": str(folder / "a.1.log"), "attempt": 1}
        (folder / "a.1.log").touch()
        moves = [
            Move("run", RUN, "QUEUED", "ACTIVE"),
            Move("step", "a", "QUEUED", "RUNNING", "0", began),
        ]
        ws.store.runs.group(RUN, fence, moves, run_state=("ACTIVE", ""))
        server = subprocess.Popen(
            ["nice", "-n", str(args.nice), *me, "--serve", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            while not (folder / "late").exists() or not (folder / "late").stat().st_size:
                time.sleep(0.1)
            idle = time.time()
            time.sleep(5)
            print(f"no followers: {lateness(folder, idle, time.time())}")
            connecting = time.time()
            followers = subprocess.Popen(
                [*me, "--follow", address, str(folder / "tokens")],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert followers.stdout is not None
            followers.stdout.readline()
            time.sleep(8)
            print(f"while they connect: {lateness(folder, connecting, time.time())}")
            if args.followers >= STREAMS * args.tokens:
                one_more = asyncio.run(refused(address, tokens, args.websockets))
                print(f"one stream more: {one_more} of {args.tokens} tokens refused with 429")
            begin, cpu = time.time(), cpu_of(server.pid)
            made = work(ws, folder, fence, args.seconds)
            end = time.time()
            print(f"{args.followers} followers: {lateness(folder, begin, end)}")
            print(f"processor of the server: {(cpu_of(server.pid) - cpu) / (end - begin):.0%}")
            found = json.loads(followers.communicate(timeout=60)[0])
            delays = quantiles([each for each in found["delays"] if each < 1e6], n=100)
            is_whole = found["moves"] == list(range(3, 4 + made))
            print(
                f"each follower got each of {made} moves once: {is_whole and found['same'] == 1};"
                f" after p50 {delays[49] * 1000:.0f}, p99 {delays[98] * 1000:.0f} ms"
            )
        finally:
            server.terminate()
            server.wait()


def cpu_of(process: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
