"""Ways to a test's sshd: links, hosts and settings, let go of at the end.  Knows the ssh driver and the servers of the tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from drivers.base import Command, Offer, Order, Wish
from drivers.ssh import Ssh
from drivers.sshlink import Route, SshLink
from runner.hosts.link.client import Client, connect_remote
from runner.hosts.link.wire import Wire

from .proxy import Proxy
from .sshd import Sshd

T = TypeVar("T")


def run(doing: Coroutine[Any, Any, T], limit: float = 60) -> T:
    """What `doing` gives, or TimeoutError."""

    async def limited() -> T:
        async with asyncio.timeout(limit):
            return await doing

    return asyncio.run(limited())


def route(server: Sshd, **others: Any) -> Route:
    given = {
        "known_hosts": (str(server.known_hosts),),
        "identity": (str(server.identity),),
        **others,
    }
    return Route(server.user, "127.0.0.1", given.pop("port", server.port), **given)


def through(server: Sshd, proxy: Proxy, **others: Any) -> dict[str, Any]:
    """Settings that reach the server by way of the proxy."""
    return server.settings(
        hosts=[f"{server.user}@127.0.0.1:{proxy.port}"],
        known_hosts=known_through(server, proxy),
        **others,
    )


def known_through(server: Sshd, proxy: Proxy) -> str:
    """A file that says the server's key is also that of the proxy."""
    known = server.place / f"known_through_{proxy.port}"
    known.write_text(server.known_hosts.read_text().replace(f":{server.port}", f":{proxy.port}"))
    return str(known)


@asynccontextmanager
async def linked(way: Route) -> AsyncIterator[SshLink]:
    link = SshLink(way)
    try:
        yield link
    finally:
        await link.aclose()


@asynccontextmanager
async def hosted(settings: dict[str, Any], key: str = "key") -> AsyncIterator[Client]:
    """A host that was leased under `key`."""
    driver = Ssh(**settings)
    host: Client | None = None
    try:
        host = await leased(driver, key)
        yield host
    finally:
        if host is not None:
            await host.aclose()
        await driver.aclose()


async def leased(driver: Ssh, key: str) -> Client:
    lease = await driver.acquire(order(await driver.offers(Wish()), key))
    hosts = await driver.hosts(lease)
    assert hosts is not None
    return connect_remote(Wire(hosts[0], hosts[0].root))


def order(offers: Sequence[Offer], key: str, hours: float = 1) -> Order:
    """The first offer, for so long."""
    return Order(offers[0], key, datetime.now(UTC) + timedelta(hours=hours))


def script(text: str, place: Path, **others: Any) -> Command:
    return Command(
        ("/bin/sh", "-euc", text), cwd=str(place), env={"PATH": os.environ["PATH"]}, **others
    )


async def said(by: SshLink | Client, *argv: str) -> str:
    return b"".join([data async for data in by.call(argv)]).decode()
