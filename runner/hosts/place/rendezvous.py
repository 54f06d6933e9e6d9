"""Check the nodes of a multi-node step before it starts.

This finds a port on node 0, tests the connections, and compares package versions.

A program listens on every node and reports its port, its clock and its versions.  Then each node
dials all others.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from drivers.base import NOTHING, Argv, Rejected

from ...errors import CannotRun

_T = TypeVar("_T")
SKEW: Final = 1.0
"""Clock difference in seconds below which clocks count as equal.

The measurement itself takes part of it.
"""
AWAY: Final = 1.0
"""Seconds to detect that a host disappeared after a failed dial."""
ALIKE: Final = {"torch": "torch", "cuda": "CUDA for torch"}
"""Packages with equal versions on all nodes, with their display names."""

# Listens until its input ends.  Prints one line first: the port, the time, and the versions of
# torch and its CUDA. torch is not imported, because that takes seconds.
LISTEN: Final = r"""
import importlib.util, json, os, random, re, socket, sys, threading, time
from importlib.metadata import PackageNotFoundError, version
listening = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
def ports(): # below those that the kernel gives to connecting programs: one of them may be taken again before the command listens there
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            most = min(int(file.read().split()[0]), 30000)
    except (OSError, ValueError):
        most = 0
    if most > 20100:
        yield from random.sample(range(20000, most), 50)
    yield 0
for port in [int(sys.argv[2])] if int(sys.argv[2]) else ports():
    try:
        listening.bind(("", port))
        break
    except OSError:
        if port in (0, int(sys.argv[2])):
            raise
listening.listen(64)
def accept():
    kept = []
    while True:
        kept.append(listening.accept())
threading.Thread(target=accept, daemon=True).start()
have = {}
try:
    have["torch"] = version("torch")
    where = importlib.util.find_spec("torch")
    with open(os.path.join(os.path.dirname(where.origin), "version.py")) as file:
        built = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]*)['\"]", file.read(), re.MULTILINE)
    have["cuda"] = built.group(1) if built else ""
except (PackageNotFoundError, OSError, AttributeError, TypeError):
    pass
print(json.dumps([listening.getsockname()[1], time.time(), have]), flush=True)
sys.stdin.buffer.read()
os._exit(0)
"""

# Dials all [address, port] pairs in parallel, with a timeout of one second, and prints an error or
# "" for each.
DIAL: Final = r"""
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def dial(pair):
    try:
        socket.create_connection(tuple(pair), 1).close()
    except OSError as error:
        return str(error) or "no answer in 1 s"
    return ""
pairs = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(pairs)) as pool:
    print(json.dumps(list(pool.map(dial, pairs))))
"""


class ProgramHost(Protocol):
    """A host that can run programs."""

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """Run a program: see `drivers.base.Host`."""
        ...


class RendezvousNode(NamedTuple):
    """One of several hosts that work together."""

    name: str
    host: ProgramHost
    address: str
    python: str
    compared: bool
    """Whether the command uses this Python, so that its packages must be equal on all nodes."""


class Rendezvous(NamedTuple):
    """The result of the node checks."""

    port: int
    """A port on node 0 that was free a moment ago."""
    ahead: Sequence[float]
    """Seconds by which the clock of each node is ahead of the local clock; 0 if about equal."""


class _Report(NamedTuple):
    port: int
    ahead: float
    have: Mapping[str, str]


async def gather_all(doing: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Run coroutines in parallel and return their results.  The first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in doing]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def check_nodes(nodes: Sequence[RendezvousNode], port: int = 0) -> Rendezvous:
    """Check that the nodes can work together.

    With `port`, all nodes dial this port of node 0; with 0, all nodes dial all others.

    Raises CannotRun if they cannot, DriverError.
    """
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    reports: list[asyncio.Future[_Report]] = [loop.create_future() for _ in nodes]
    ports = [port, *(0 for _ in nodes[1:])]
    listening = asyncio.ensure_future(
        gather_all(
            _listen(node, report, over, own_port)
            for node, report, own_port in zip(nodes, reports, ports, strict=True)
        )
    )
    try:
        all_reports = asyncio.gather(*reports)
        either: set[asyncio.Future[Any]] = {listening, all_reports}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not all_reports.done():
            all_reports.cancel()
            listening.result()  # raises the error: a node exited before another had reported its port
        answers = await all_reports
        _compare(nodes, answers)
        dialled = range(1) if port else range(len(nodes))
        try:
            await gather_all(_dial(rank, dialled, nodes, answers) for rank in range(len(nodes)))
        except CannotRun:
            await asyncio.wait({listening}, timeout=AWAY)
            if listening.done():
                listening.result()  # raises the reason why the dialed node no longer listens
            raise
        over.set()
        await listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return Rendezvous(answers[0].port, [each.ahead for each in answers])


async def check_port_free(node: RendezvousNode, port: int) -> None:
    """Check that a program can listen on a port of a host.  Raises CannotRun, DriverError."""
    over = asyncio.Event()
    over.set()
    report: asyncio.Future[_Report] = asyncio.get_running_loop().create_future()
    await _listen(node, report, over, port)
    report.result()


async def _listen(
    node: RendezvousNode, answer: asyncio.Future[_Report], over: asyncio.Event, port: int
) -> None:
    async def input() -> AsyncIterator[bytes]:
        await over.wait()
        return
        yield b""

    line = b""
    try:
        async for data in node.host.call(
            (node.python, "-c", LISTEN, node.address, str(port)), input()
        ):
            line += data
            if line.endswith(b"\n") and not answer.done():
                # A Python may print a greeting first.
                port, now, have = json.loads(line.splitlines()[-1])
                ahead = now - time.time()
                if abs(ahead) <= SKEW:
                    ahead = 0.0
                if not node.compared:
                    have = {}
                answer.set_result(_Report(port, ahead, have))
        if not answer.done():
            raise _cannot_listen_error(node, line)
    except Exception as error:
        if answer.done():
            raise
        if port and isinstance(error, Rejected) and "OSError" in str(error):
            why = str(error).strip().rpartition("\n")[2]
            taken = CannotRun(
                f"cannot listen on port {port} of {node.name}: {why}",
                fix="stop the program that uses this port, or set another `port` in the `head` of the stack",
            )
            return answer.set_exception(taken)
        if isinstance(error, ValueError):  # an invalid report
            error = _cannot_listen_error(node, line)
        answer.set_exception(error)
    return None


def _cannot_listen_error(node: RendezvousNode, output: bytes) -> CannotRun:
    return CannotRun(
        f"rendezvous failed: {node.python} on {node.name} cannot listen on a port: {output[:200]!r}"
    )


async def _dial(
    rank: int, dialled: Iterable[int], nodes: Sequence[RendezvousNode], answers: Sequence[_Report]
) -> None:
    """Dial these nodes from the node `rank`, which does not dial itself."""
    others = [n for n in dialled if n != rank]
    if not others:
        return
    pairs = json.dumps([[nodes[n].address, answers[n].port] for n in others])
    output = b"".join(
        [data async for data in nodes[rank].host.call((nodes[rank].python, "-c", DIAL, pairs))]
    )
    for n, why in zip(others, json.loads(output), strict=True):
        if why:
            raise CannotRun(
                f"node {rank} cannot reach {nodes[n].address}:{answers[n].port} ({nodes[rank].name} dials node {n}, {nodes[n].name}: {why})",
                fix="open the ports between the nodes, or set the host's `address` to one that the other nodes can reach",
            )


def _compare(nodes: Sequence[RendezvousNode], answers: Sequence[_Report]) -> None:
    for package, called in ALIKE.items():
        for n, answer in enumerate(answers):
            first, other = (each.have.get(package, "") for each in (answers[0], answer))
            if first != other:
                raise CannotRun(
                    f"the nodes have different versions of {called}: {first or 'none'} on node 0 ({nodes[0].name}), "
                    f"{other or 'none'} on node {n} ({nodes[n].name})",
                    fix="install the same packages on all nodes, or lock the packages of the recipe with `recipe lock`",
                )
