"""Which addresses may be read for somebody else: hosts and buckets that `allow` under [data] names, and no machine of a private network by a detour.

An entry is `https://HOST`, with a port or not, `https://*.DOMAIN`, `https://*`, `s3://BUCKET` or `gs://BUCKET`.  A host that is named is trusted,
wherever it is.  One that only a star stands for has to have a public address.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    import aiohttp


class Reach(NamedTuple):
    """What may be reached, as the settings have it."""

    allow: Sequence[str]

    def allows(self, address: str) -> bool:
        """Whether an address is among those that are named, by its words alone: its host is not looked up, a literal one is judged."""
        asked = _split(address)
        if asked is None:
            return False
        return self.trusts(address) or (
            any(_covers(entry, asked) for entry in self.allow)
            and _host_may_be_public(asked.hostname or "")
        )

    def trusts(self, address: str) -> bool:
        """Whether the address has a host or bucket that is named in full."""
        asked = _split(address)
        return asked is not None and any(
            "*" not in entry and _covers(entry, asked) for entry in self.allow
        )

    def names(self, host: str) -> bool:
        """Whether a host is named in full, with any port."""
        return any(
            "*" not in entry and (found := _split(entry)) is not None and found.hostname == host
            for entry in self.allow
        )

    async def session(self, loop: Any = None, **more: Any) -> aiohttp.ClientSession:
        """A client that asks these hosts alone, also where a host of them sends it elsewhere, and connects to the address that it has judged."""
        import ssl

        import aiohttp
        from aiohttp.abc import AbstractResolver, ResolveResult
        from aiohttp.resolver import ThreadedResolver

        reach, plain = self, ThreadedResolver()

        class Judged(AbstractResolver):
            async def resolve(
                self, host: str, port: int = 0, family: Any = 0
            ) -> list[ResolveResult]:
                found = await plain.resolve(host, port, family)
                if not reach.names(host) and not all(public(each["host"]) for each in found):
                    raise PermissionError(errno.EACCES, f"{host} is a machine of a private network")
                return found

            async def close(self) -> None:
                await plain.close()

        async def redirected(
            _session: object, _context: object, asked: aiohttp.TraceRequestRedirectParams
        ) -> None:
            where = str(asked.url.join(type(asked.url)(asked.response.headers.get("Location", ""))))
            if not reach.allows(where):
                raise PermissionError(
                    f"it leads to {urlsplit(where).hostname}, which `allow` under [data] does not name"
                )

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(redirected)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=Judged(), ssl=ssl.create_default_context()),
            trace_configs=[trace],
            **more,
        )


def public(address: str) -> bool:
    """Whether an IP address is one of the internet, also where it is written as another: mapped, compatible, 6to4, NAT64."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.teredo is not None:
            return False
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and (found in _NAT64 or int(found) >> 32 == 0):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return public(str(inner))
    return (
        found.is_global
        and not found.is_multicast
        and not any(found in network for network in _NEVER)
    )


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NEVER: Final = [
    ipaddress.ip_network(each)
    for each in (
        "192.0.0.0/24",
        "100.64.0.0/10",
        "198.18.0.0/15",
        "192.88.99.0/24",
        "64:ff9b:1::/48",
        "fec0::/10",
    )
]
"""Networks that are no part of the internet, whatever this version of Python thinks of them."""


def _host_may_be_public(host: str) -> bool:
    """False for a literal address that is not public, and for a number, which some programs take for an address."""
    try:
        return public(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        return not (
            last.isdigit()
            or last[:2] == "0x"
            or host.rstrip(".") == "localhost"
            or host.rstrip(".").endswith(".localhost")
        )


def _split(address: str) -> SplitResult | None:
    try:
        found = urlsplit(address)
        return (
            found
            if found.hostname and found.scheme in ("https", "s3", "gs") and found.port != 0
            else None
        )
    except ValueError:
        return None


def _covers(entry: str, asked: SplitResult) -> bool:
    found = _split(entry)
    if found is None or found.scheme != asked.scheme:
        return False
    if asked.scheme != "https":
        return found.netloc == asked.netloc
    if (found.port or 443) != (asked.port or 443):
        return False
    name, host = found.hostname or "", asked.hostname or ""
    return host == name or name == "*" or (name.startswith("*.") and host.endswith(name[1:]))
