"""Access control for URLs that the server reads on behalf of others.

Only hosts and buckets in `allow` under [data] may be read, and no private network through redirects
or DNS.

An entry is `https://HOST`, optionally with a port, `https://*.DOMAIN`, `https://*`, `s3://BUCKET`
or `gs://BUCKET`. A host with its full name is trusted at any IP address. A host that only matches a
wildcard must have a public IP address.
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
    """Allowed hosts and buckets from the settings."""

    allow: Sequence[str]

    def allows(self, address: str) -> bool:
        """Return True if a URL matches an allowed host or bucket.

        Host names are not resolved; literal IP addresses must be public.
        """
        asked = _split(address)
        if asked is None:
            return False
        if self.trusts(address):
            return True
        if not any(_matches(entry, asked) for entry in self.allow):
            return False
        return _host_may_be_public(asked.hostname or "")

    def trusts(self, address: str) -> bool:
        """Return True if an allowed entry without a wildcard matches the URL."""
        asked = _split(address)
        if asked is None:
            return False
        return any(_matches(entry, asked) for entry in self._exact_entries())

    def names(self, host: str) -> bool:
        """Return True if an allowed entry without a wildcard names the host, at any port."""
        for entry in self._exact_entries():
            found = _split(entry)
            if found is not None and found.hostname == host:
                return True
        return False

    def _exact_entries(self) -> list[str]:
        return [entry for entry in self.allow if "*" not in entry]

    async def session(self, loop: Any = None, **more: Any) -> aiohttp.ClientSession:
        """Return an HTTP client that contacts only allowed hosts, redirects included.

        The client connects to exactly the IP address that was checked.
        """
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
                if not reach.names(host) and not all(is_public(each["host"]) for each in found):
                    raise PermissionError(errno.EACCES, f"{host} has a private address")
                return found

            async def close(self) -> None:
                await plain.close()

        async def redirected(
            _session: object, _context: object, asked: aiohttp.TraceRequestRedirectParams
        ) -> None:
            where = str(asked.url.join(type(asked.url)(asked.response.headers.get("Location", ""))))
            if not reach.allows(where):
                raise PermissionError(
                    f"the server redirects to {urlsplit(where).hostname}, which is not in `allow` under [data]"
                )

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(redirected)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=Judged(), ssl=ssl.create_default_context()),
            trace_configs=[trace],
            **more,
        )


def is_public(address: str) -> bool:
    """Return True if an IP address is public.

    IPv4 addresses inside IPv6 (mapped, compatible, 6to4, NAT64) are checked too.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.teredo is not None:
            return False
        inner = _embedded_ipv4(found)
        if inner is not None:
            return is_public(str(inner))
    if not found.is_global or found.is_multicast:
        return False
    return not any(found in network for network in _NEVER)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address inside an IPv6 address; None if there is none."""
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and (address in _NAT64 or int(address) >> 32 == 0):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inner


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
"""Networks that never count as public, regardless of the Python version."""


def _host_may_be_public(host: str) -> bool:
    """Return False for host names that are surely not public.

    These are literal non-public addresses, localhost, and numbers that some programs parse as
    addresses.
    """
    try:
        return is_public(host)
    except ValueError:
        name = host.rstrip(".")
        last = name.rpartition(".")[2]
        if last.isdigit() or last[:2] == "0x":
            return False
        return name != "localhost" and not name.endswith(".localhost")


def _split(address: str) -> SplitResult | None:
    try:
        found = urlsplit(address)
        if not found.hostname or found.scheme not in ("https", "s3", "gs"):
            return None
        return found if found.port != 0 else None
    except ValueError:
        return None


def _matches(entry: str, asked: SplitResult) -> bool:
    """Return True if a URL matches an entry of the allowed hosts and buckets."""
    found = _split(entry)
    if found is None or found.scheme != asked.scheme:
        return False
    if asked.scheme != "https":
        return found.netloc == asked.netloc
    if (found.port or 443) != (asked.port or 443):
        return False
    return _matches_host(found.hostname or "", asked.hostname or "")


def _matches_host(pattern: str, host: str) -> bool:
    if pattern in ("*", host):
        return True
    return pattern.startswith("*.") and host.endswith(pattern[1:])
