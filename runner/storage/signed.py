"""Presigned URLs for the objects of a bucket input, for downloads by other hosts.

S3 signs with any credentials. Google Cloud Storage signs only with a service account. Public
objects have plain addresses. A presigned URL is a secret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from ..digest import of_value
from ..errors import CannotRun
from ..paths import heads
from ..secrets import Secret
from .bound import DownloadLimit
from .sources import Object, ask_identity, below, changed_error, open_client, select_objects

if TYPE_CHECKING:
    from .workspace import Workspace

HOUR: Final = 3600
SLOWEST: Final = 10_000_000
"""Minimum download rate in bytes per second.

A URL is valid for an hour plus the download time at this rate.
"""
WEEK: Final = 7 * 24 * HOUR
"""Maximum validity of a presigned URL in seconds, for S3 and Google Cloud Storage."""
LONG: Final = 32
"""Minimum length of a query value to mask. Signatures and session tokens are longer."""


class Item(NamedTuple):
    """Object of a bucket input: its path in the directory, its size in bytes, and its ETag.

    The path of a single object and an unknown ETag are empty.
    """

    path: str
    size: int
    etag: str


class SignedObjects:
    """Objects of a bucket input and their signing function.

    All methods may contact a server.
    """

    def __init__(
        self,
        ws: Workspace,
        address: str,
        identity: str,
        only: Sequence[str],
        items: Sequence[Item],
        sign: Callable[[str, int], str],
    ) -> None:
        self.address, self.items = address, items
        self.name = of_value("signed/1", [address, identity, *only])
        """Name of the input on a host."""
        self.size = sum(item.size for item in items)
        self.folder = not (len(items) == 1 and not items[0].path)
        self._ws, self._identity, self._sign = ws, identity, sign

    def addresses(self, items: Sequence[Item]) -> list[str]:
        """Return a presigned URL for each object, valid from now.

        Raises the errors of the bucket's client.
        """
        seconds = min(WEEK, HOUR + sum(item.size for item in items) // SLOWEST)
        return [self._sign(item.path, seconds) for item in items]

    def confirm(self) -> bool:
        """Check that the bucket still holds the resolved objects.

        Returns False if the bucket cannot be reached. Raises CannotRun if the objects changed.
        """
        store, _ = open_client(self._ws, self.address)
        store.invalidate_cache()
        try:
            now = ask_identity(self._ws, self.address.partition(":")[0], self.address)
        except CannotRun:
            return False
        if now != self._identity:
            raise changed_error(self.address)
        return True


def opens(addresses: Sequence[str]) -> list[Secret]:
    """Return the secrets inside presigned URLs, raw and URL-decoded, most frequent first."""
    values: Counter[str] = Counter()
    for address in addresses:
        pairs = urlsplit(address).query.split("&")
        values.update(pair.partition("=")[2] for pair in pairs)
    secrets: list[Secret] = []
    for value, _ in values.most_common():
        if len(value) >= LONG:
            secrets += [Secret("address", form) for form in {value, unquote(value)}]
    return secrets


def sign_objects(
    ws: Workspace, address: str, identity: str, only: Sequence[str], *, secret: bool
) -> SignedObjects | None:
    """Return presigned URLs for a resolved bucket input; None if they cannot be signed.

    Also returns None if they need a signature and `secret` is false.

    Raises CannotRun if the input changed, is not allowed, or is too large.
    """
    try:
        store, path = open_client(ws, address)
        sign = _signer(store, address.partition(":")[0])
        if sign is None or not (secret or _public(store)):
            return None
        store.invalidate_cache()
        folder, there = select_objects(ws, address, identity, only)
    except CannotRun:
        raise
    except Exception:  # errors of the client; the ordinary download reports them
        return None
    top = path.rstrip("/")
    items = []
    for each in there:
        name = below(path, each) if folder else ""
        items.append(_item_of(name, each))
    if any(each.size is None for each in there) or not _sound(items, folder=folder):
        return None
    DownloadLimit.of(ws, address, here=False).check(sum(item.size for item in items))

    def sign_item(name: str, seconds: int) -> str:
        return sign(f"{top}/{name}" if name else path, seconds)

    return SignedObjects(ws, address, identity, only, items, sign_item)


def _item_of(name: str, file: Object) -> Item:
    # Of the versions that servers give, only an ETag is in quotes.
    etag = file.version if file.version.startswith('"') else ""
    return Item(name, file.size or 0, etag)


def _public(store: Any) -> bool:
    """Return True if the bucket client works without credentials."""
    return bool(store.anon) if hasattr(store, "anon") else store.credentials.credentials is None


def _signer(store: Any, kind: str) -> Callable[[str, int], str] | None:
    """Return a function that presigns a path for a number of seconds, or None.

    Returns None if signing is not possible.
    """
    if kind == "s3":
        # A presigned address is bound to the bucket's region, and newer regions reject signature
        # version 2, botocore's default for presigned addresses.
        options = store.storage_options
        config = {**(options.get("config_kwargs") or {}), "signature_version": "s3v4"}
        signing = type(store)(**{**options, "config_kwargs": config, "cache_regions": True})
        # Without credentials, `sign` returns the plain address.
        return lambda path, seconds: str(signing.sign(path, expiration=seconds))
    if _public(store):
        return lambda path, _seconds: str(store.url(path))
    from google.oauth2.service_account import Credentials

    if isinstance(store.credentials.credentials, Credentials):
        return lambda path, seconds: str(store.sign(path, expiration=seconds, version="v4"))
    return None


def _sound(items: Sequence[Item], *, folder: bool) -> bool:
    """Return True if these paths can be the files of one directory on any disk.

    Buckets also allow other names.
    """
    if not folder:
        return len(items) == 1
    names = {item.path for item in items}
    if not names:
        return False
    return all(_plain(name) and not _is_below_file(name, names) for name in names)


def _plain(name: str) -> bool:
    if not name.isprintable():
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)


def _is_below_file(name: str, files: Collection[str]) -> bool:
    return any(parent in files for parent in heads(name)[1:])
