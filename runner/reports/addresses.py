"""Address checks for users' webhooks: only public IP addresses, resolved once."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

from ..errors import Invalid, Problem
from ..storage.reach import is_public

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Resolves a host name to IP addresses."""
_NAME: Final = re.compile(
    r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]\.?",
    re.IGNORECASE,
)


class Endpoint(NamedTuple):
    """The target of a connection: `address` is an IP address, `host` the certificate's name."""

    host: str
    port: int
    address: str


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve a host name with the system resolver. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def public_endpoint(url: str, resolve: Resolve = resolve_host) -> Endpoint:
    """Return the endpoint of a user's webhook URL.

    Raises Invalid unless the URL is https and resolves only to public addresses.
    """
    parts = _split_url(url)
    if parts.scheme != "https":
        raise _bad_address("does not start with https://")
    if parts.username is not None or parts.password is not None:
        raise _bad_address("contains a user name or password")
    host, port = parts.hostname or "", parts.port or 443
    try:
        found: Sequence[str] = [
            str(ipaddress.ip_address(host))
        ]  # only the usual notation; decimal, octal and short forms are rejected
    except ValueError:
        if not _NAME.fullmatch(host):
            raise _bad_address("has no public host name") from None
        try:
            found = resolve(host, port)
        except OSError as error:
            raise _bad_address("has a host that cannot be resolved") from error
    if not found or not all(map(is_public, found)):
        raise _bad_address("resolves to a private address")
    return Endpoint(host, port, found[0])


def _split_url(url: str) -> SplitResult:
    # Programs disagree on the meaning of a backslash in a URL.
    if "\\" in url or any(not "!" <= letter <= "~" for letter in url):
        raise _bad_address("contains invalid characters")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise _bad_address("is not a valid URL") from error
    return parts


def _bad_address(words: str) -> Invalid:
    return Invalid(
        [
            Problem(
                "bad-webhook",
                f"the webhook URL {words}",
                fix="use an https:// URL of a public host",
            )
        ]
    )
