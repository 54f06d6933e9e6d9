"""Nodes look for each other before their command begins: who cannot listen, cannot be reached or has other packages is named in a sentence."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivers import calls
from drivers.base import NOTHING, Argv, Exit, Rejected, Unreachable
from runner.errors import CannotRun
from runner.execution.refusals import _report_uneven_hosts
from runner.hosts.place import rendezvous
from runner.hosts.place.group import _find_first_failed
from runner.hosts.place.rendezvous import Rendezvous, RendezvousNode, check_nodes
from runner.planning.step import ResourceSpec, StepSpec


class Here:
    """A host that can be asked something, and no more."""

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        return calls.call(argv, stdin, {})


def node(name: str, python: str = sys.executable, *, compared: bool = False) -> RendezvousNode:
    return RendezvousNode(name, Here(), "127.0.0.1", python, compared)


def python(folder: Path, torch: str, cuda: str) -> str:
    """A Python that seems to have a torch."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('it takes seconds to import')")
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\n"
    )
    (folder / f"torch-{torch}.dist-info").mkdir()
    (folder / f"torch-{torch}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    )
    (folder / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n'
    )
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def test_nodes_that_reach_each_other_have_a_port_on_the_first_that_is_free() -> None:
    met = asyncio.run(check_nodes([node("a"), node("b"), node("c")]))
    assert met.ahead == [0.0, 0.0, 0.0]
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert met.port < handed_out, "nobody who connects is given it before the command listens there"
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", met.port))


class Restarting(Here):
    """A host on which nothing listens any more as soon as it has said at which port.  Its connection breaks after `dialled`."""

    def __init__(self, dialled: asyncio.Event) -> None:
        self.dialled = dialled

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        async with aclosing(calls.call(argv, NOTHING, {})) as said:
            async for data in said:
                yield data
        if rendezvous.LISTEN in argv:
            await self.dialled.wait()
            raise Unreachable("the connection broke")


def test_a_host_that_restarts_before_another_has_said_its_port_is_not_waited_for() -> None:
    class Slow(Here):
        async def call(
            self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
        ) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

    dialled = asyncio.Event()
    dialled.set()  # it breaks at once
    with pytest.raises(Unreachable):
        asyncio.run(
            check_nodes(
                [node("a")._replace(host=Restarting(dialled)), node("b")._replace(host=Slow())]
            )
        )


def test_a_host_that_restarts_while_it_is_dialled_is_asked_again_and_not_taken_for_one_that_cannot_be_reached() -> (
    None
):
    dialled = asyncio.Event()

    class Dialling(Here):
        async def call(
            self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING
        ) -> AsyncIterator[bytes]:
            async with aclosing(calls.call(argv, stdin, {})) as said:
                async for data in said:
                    yield data
            if rendezvous.DIAL in argv:
                dialled.set()

    with pytest.raises(Unreachable):
        asyncio.run(
            check_nodes(
                [node("a")._replace(host=Restarting(dialled)), node("b")._replace(host=Dialling())]
            )
        )


def test_nodes_with_different_torch_or_cuda_are_refused_without_importing_it(
    tmp_path: Path,
) -> None:
    old, new, built = (
        python(tmp_path / str(n), *versions)
        for n, versions in enumerate([("2.4.1", "12.1"), ("2.5.0", "12.1"), ("2.4.1", "12.4")])
    )
    with pytest.raises(
        CannotRun,
        match=r"different versions of torch: 2\.4\.1 on node 0 \(a\), 2\.5\.0 on node 1 \(b\)",
    ):
        asyncio.run(check_nodes([node("a", old, compared=True), node("b", new, compared=True)]))
    with pytest.raises(CannotRun, match=r"CUDA for torch: 12\.1 on node 0 \(a\), 12\.4 on node 1"):
        asyncio.run(check_nodes([node("a", old, compared=True), node("b", built, compared=True)]))
    asyncio.run(check_nodes([node("a", old), node("b", new)]))


def test_a_node_that_cannot_listen_is_named(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="/no/python"):
        asyncio.run(check_nodes([node("a"), node("b", "/no/python")]))
    with pytest.raises(CannotRun, match="/bin/echo on b cannot listen on a port: b'-c"):
        asyncio.run(check_nodes([node("a"), node("b", "/bin/echo")]))


def test_the_first_to_fail_is_reported_by_our_clock_and_is_not_one_that_we_stopped() -> None:
    stopped, early, late = (
        Exit(None, reason="stopped", ended=1.0),
        Exit(1, ended=50.0),
        Exit(1, ended=60.0),
    )
    assert _find_first_failed({0: stopped, 1: late, 2: early}, Rendezvous(0, ())) == 2
    assert _find_first_failed({1: late, 2: early}, Rendezvous(0, (0.0, 3600.0, 0.0))) == 1
    assert (
        _find_first_failed(
            {1: early, 2: late._replace(code=None, reason="lost")}, Rendezvous(0, ())
        )
        == 2
    ), "what the others ended with came of that"


def test_hosts_with_different_numbers_of_gpus_are_refused_unless_the_step_says_how_many() -> None:
    pool = SimpleNamespace(
        places=[
            SimpleNamespace(
                name=f"h{n}", capacity=SimpleNamespace(total_of=lambda _name, n=n: float(n))
            )
            for n in (8, 4)
        ]
    )
    (problem,) = _report_uneven_hosts("train", StepSpec("r", "s", {}, nodes=2), pool)  # type: ignore[arg-type]
    assert (
        problem.message
        == "train runs on 2 nodes, but the hosts have different numbers of GPUs (8 on h8, 4 on h4)"
    )
    assert (
        _report_uneven_hosts("train", StepSpec("r", "s", {}, ResourceSpec(gpus=4), nodes=2), pool)
        == []
    )  # type: ignore[arg-type]
