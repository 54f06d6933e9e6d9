"""Objects by name: what a store's bucket can do, its errors, and how its requests are retried.

A `Bucket` is asked from several threads at once.  What it raises is `Infrastructure` with what to do about it; a request that may succeed
later is retried, a few times, after longer and longer pauses.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from ...errors import Infrastructure
from ...retry import Policy, backoff, retry

if TYPE_CHECKING:
    from ...settings import StoreSettings

ATTEMPTS: Final = 6
FIRST_WAIT: Final = 0.2  # seconds; doubled each time, up to
LONGEST_WAIT: Final = 8.0
TIMEOUT: Final = 60.0  # seconds without a byte
CONNECT: Final = 5.0
PART: Final = 16 << 20
HTTP_WIDTH: Final = 32
COUNT = itertools.count(1)
T = TypeVar("T")
Spread: TypeAlias = "Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]"


class Stat(NamedTuple):
    """An object that is there: its bytes, and when it was last written, by the server's clock."""

    name: str
    size: int
    at: float


class StoreError(Infrastructure):
    """The store cannot be used as it is: a person has to do something."""


class Unreachable(StoreError):
    """The store does not answer, or answers with errors that may pass."""


class Bucket(Protocol):
    """Whole objects by name.  Names are relative to the store's folder."""

    url: str
    width: int  # requests at once that are worth it

    def load(self) -> None:
        """Import what it takes to ask.  Raises StoreError when that is not installed."""
        ...

    def check(self, marker: str) -> bytes | None:
        """The bytes of `marker`, None when there is none; raises StoreError when that is not all that is missing."""
        ...

    def make(self) -> bool:
        """Make the bucket or folder where there is none.  False: it was there."""
        ...

    def head(self, name: str) -> Stat | None: ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """All or a part of an object, None when there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there; False when there is one already."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all, over any other."""
        ...

    def write_file(self, name: str, path: str, size: int, crew: Spread) -> None:
        """The same from a large file, in parts, several at a time by `crew`."""
        ...

    def names(self, prefix: str) -> Iterator[Stat]: ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is gone is deleted."""
        ...

    def abandon(self, before: float, *, dry: bool = False) -> int:
        """End uploads that began before then and were never ended; answers how many."""
        ...


class CloudBucket:
    """What the clients of two clouds have alike."""

    width = HTTP_WIDTH
    page = 1000  # names of one answer, the most that a server gives

    def __init__(self, url: str, bucket: str, prefix: str, settings: StoreSettings) -> None:
        self.url = url
        self._bucket, self._prefix, self._settings = bucket, prefix, settings
        self._where = f"{url} at {settings.endpoint}" if settings.endpoint else url
        self._opening = lock()
        self._opened: Any = None

    def _client(self) -> Any:
        """What requests are made with, opened once."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        raise NotImplementedError


def client_options(scheme: str, store: StoreSettings) -> dict[str, Any]:
    """What fsspec's client of a scheme, `s3` or `gs`, is made with for a place with these settings.  A change to it is the caller's own."""
    endpoint, region, profile = store.endpoint, store.region, store.profile
    if scheme == "gs":
        # An endpoint from settings is never shown a token.
        return {
            "token": "anon" if endpoint or store.anonymous else None,
            "endpoint_url": endpoint or None,
        }
    config: dict[str, object] = {}
    client: dict[str, str] = {"region_name": region} if region else {}
    if endpoint:
        # Servers other than Amazon's do not all know its newer checksums; ours are SHA-256 and MD5 anyhow.
        config |= {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        if (
            not region
            and not any(os.environ.get(name) for name in ("AWS_DEFAULT_REGION", "AWS_REGION"))
            and not profile
        ):
            client["region_name"] = "us-east-1"
    more = {"profile": profile} if profile else {}
    return {
        "anon": store.anonymous,
        "endpoint_url": endpoint or None,
        "client_kwargs": client,
        "config_kwargs": config,
        **more,
    }


class Again(Exception):
    """Something that may go right next time; `__cause__` is what went wrong."""


def tries(count: int = ATTEMPTS) -> Policy:
    """A request is made so often, with longer and longer pauses, each of a random part."""
    from random import random

    return backoff(Again, count, FIRST_WAIT, LONGEST_WAIT, random)


def retry_request(do: Callable[[], T], policy: Policy, where: str) -> T:
    """The answer to a request, which is made again as long as it raises Again and the policy says so.  Raises Unreachable."""
    try:
        return retry(do, policy)
    except Again as error:
        why = error.__cause__ or error
        raise Unreachable(
            f"cannot reach {where}: {words_of(why)}",
            fix="check the network and the URL, then try again",
        ) from why


class Exists(Exception):
    """There is such an object already."""


class Short(Exception):
    """The object ends before the part that was asked for."""


async def await_result(asked: Any) -> Any:
    return await asked


def base64_of(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def words_of(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def module_of_extra(name: str, url: str, extra: str) -> Any:
    """A module of an extra that is imported only for a store of its kind."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        from drivers import install_line

        raise StoreError(f"{url} needs {error.name}", fix=install_line(extra)) from error


def lock() -> Any:
    """Something that one thread holds at a time."""
    import threading

    return threading.Lock()
