"""What an input in a bucket consists of, with an address for each object that anybody can GET for a while: so it need not pass through this machine.

S3 signs where there are credentials.  Google Cloud Storage does where they are a service account's; other logins of Google cannot sign by themselves.
What anybody may read has plain addresses.  A signed address is a secret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from ..digest import of_value
from ..errors import CannotRun
from ..secrets import Secret
from .bound import Bound
from .sources import among, ask, below, changed_error, open_client

if TYPE_CHECKING:
    from .workspace import Workspace

HOUR: Final = 3600
SLOWEST: Final = 10_000_000
"""Bytes a second: an address is good for an hour, and for as long as its bytes take at this rate."""
WEEK: Final = 7 * 24 * HOUR
"""The longest that S3 and Google Cloud Storage sign for."""
LONG: Final = 32
"""Letters of a value in a signed address from which on it is kept from being shown: signatures and session tokens have more."""


class Item(NamedTuple):
    """One object: its path in the folder, empty where the address is one object; its bytes; its ETag, empty where it is not known."""

    path: str
    size: int
    etag: str


class Signed:
    """The objects of an input, and who signs for them.  Every method but `opens` asks a server, or may."""

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
        """What this is called among what arrives at a host."""
        self.size = sum(item.size for item in items)
        self.folder = not (len(items) == 1 and not items[0].path)
        self._ws, self._identity, self._sign = ws, identity, sign

    def addresses(self, items: Sequence[Item]) -> list[str]:
        """An address for each of these, which are now to be had.  Raises what the bucket's client raises."""
        seconds = min(WEEK, HOUR + sum(item.size for item in items) // SLOWEST)
        return [self._sign(item.path, seconds) for item in items]

    def confirm(self) -> bool:
        """The bucket holds what it held when the input was resolved; False where it cannot be asked now.  Raises CannotRun when it does not."""
        store, _ = open_client(self._ws, self.address)
        store.invalidate_cache()
        try:
            now = ask(self._ws, self.address.partition(":")[0], self.address)
        except CannotRun:
            return False
        if now != self._identity:
            raise changed_error(self.address)
        return True


def opens(addresses: Sequence[str]) -> list[Secret]:
    """What opens signed addresses, in both ways that it may be written: what they have in common first."""
    values = Counter(
        pair.partition("=")[2]
        for address in addresses
        for pair in urlsplit(address).query.split("&")
    )
    return [
        Secret("address", each)
        for value, _ in values.most_common()
        if len(value) >= LONG
        for each in {value, unquote(value)}
    ]


def sign_objects(
    ws: Workspace, address: str, identity: str, only: Sequence[str], *, secret: bool
) -> Signed | None:
    """What was resolved, object by object; None where that cannot be signed for, or `secret` is false and only a signature opens it.

    Raises CannotRun for what is something else by now, may not be read, or is larger than allowed.
    """
    try:
        store, path = open_client(ws, address)
        sign = _signer(store, address.partition(":")[0])
        if sign is None or not (secret or _public(store)):
            return None
        store.invalidate_cache()
        folder, there = among(ws, address, identity, only)
    except CannotRun:
        raise
    except Exception:  # what its client raises, the usual way says in words
        return None
    top = path.rstrip("/")
    items = [
        Item(
            below(path, each) if folder else "",
            each.size or 0,
            each.version if each.version[:1] == '"' else "",
        )
        for each in there
    ]
    if any(each.size is None for each in there) or not _sound(items, folder=folder):
        return None
    Bound.of(ws, address, here=False).check(sum(item.size for item in items))
    return Signed(
        ws,
        address,
        identity,
        only,
        items,
        lambda name, seconds: sign(f"{top}/{name}" if name else path, seconds),
    )


def _public(store: Any) -> bool:
    """Whether a client asks without a login."""
    return bool(store.anon) if hasattr(store, "anon") else store.credentials.credentials is None


def _signer(store: Any, kind: str) -> Callable[[str, int], str] | None:
    """What makes an address of a client's path, good for so many seconds."""
    if kind == "s3":
        # An address is bound to the bucket's region, and newer regions take no signature of version 2, which is botocore's default for addresses.
        options = store.storage_options
        config = {**(options.get("config_kwargs") or {}), "signature_version": "s3v4"}
        signing = type(store)(**{**options, "config_kwargs": config, "cache_regions": True})
        return lambda path, seconds: str(
            signing.sign(path, expiration=seconds)
        )  # without a login it is the plain address
    if _public(store):
        return lambda path, _seconds: str(store.url(path))
    from google.oauth2.service_account import Credentials

    if isinstance(store.credentials.credentials, Credentials):
        return lambda path, seconds: str(store.sign(path, expiration=seconds, version="v4"))
    return None


def _sound(items: Sequence[Item], *, folder: bool) -> bool:
    """Whether these can be the files of one folder on any disk: a bucket allows other names, too."""
    if not folder:
        return len(items) == 1
    names = {item.path for item in items}
    return bool(items) and all(
        _plain(name)
        and not any(name[:at] in names for at, letter in enumerate(name) if letter == "/")
        for name in names
    )


def _plain(name: str) -> bool:
    return name.isprintable() and not any(
        part in ("", ".", "..") or len(part.encode()) > 255 for part in name.split("/")
    )
