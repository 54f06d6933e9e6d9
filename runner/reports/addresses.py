"""Which addresses a stranger may have us connect to: public ones, looked up once, with no other way to write them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

from ..errors import Invalid, Problem

_IP: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""The addresses of a name."""
_NAME: Final = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]\.?", re.IGNORECASE)
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")

_NEVER: Final = [
    ipaddress.ip_network(each) for each in ("192.0.0.0/24", "100.64.0.0/10", "198.18.0.0/15", "192.88.99.0/24", "64:ff9b:1::/48", "fec0::/10")
]
"""Networks that are no part of the internet, whatever this version of Python thinks of them."""


class Place(NamedTuple):
    """What is connected to: `address` is an IP address, `host` the name that the certificate has to show."""

    host: str
    port: int
    address: str


def resolved(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, by the resolver of this machine.  Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def public_place(url: str, resolve: Resolve = resolved) -> Place:
    """Where a request to a stranger's URL goes.  Raises Invalid for one that is not https, or that is not on the public internet alone."""
    parts = _split(url)
    if parts.scheme != "https":
        raise _bad("is not https://")
    if parts.username is not None or parts.password is not None:
        raise _bad("has a login in it")
    host, port = parts.hostname or "", parts.port or 443
    literal = _literal(host)
    if literal is None and not _NAME.fullmatch(host):
        raise _bad("names no host of the internet")
    try:
        found = [str(literal)] if literal is not None else list(resolve(host, port))
    except OSError as error:
        raise _bad("has a host that cannot be found") from error
    if not found or not all(_is_public(ipaddress.ip_address(each.partition("%")[0])) for each in found):
        raise _bad("leads to a private address")
    return Place(host, port, found[0])


def _split(url: str) -> SplitResult:
    if any(ord(letter) < 33 or ord(letter) > 126 or letter == "\\" for letter in url):
        raise _bad("has characters that no address has")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise _bad("is not written as an address") from error
    return parts


def _literal(host: str) -> _IP | None:
    """An address that is written out, in its usual form; decimal, octal and short ones are none."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(address: _IP) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64 or int(address) >> 32 == 0:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not address.is_multicast and not any(address in network for network in _NEVER)


def _bad(words: str) -> Invalid:
    return Invalid([Problem("bad-webhook", f"the address of a webhook {words}", fix="give an https:// address of a public host")])
