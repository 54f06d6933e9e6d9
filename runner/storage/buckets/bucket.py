"""Bucket interface of shared stores, its errors, and its retry policy.

A `Bucket` is used from several threads. Its errors are `Infrastructure` with a fix. Requests with
temporary errors are retried with increasing waits.
"""

from __future__ import annotations

import base64
import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from ...errors import Infrastructure
from ...retry import Policy, backoff, retry

if TYPE_CHECKING:
    from ...settings import StoreSettings

ATTEMPTS: Final = 6
FIRST_WAIT: Final = 0.2  # seconds; doubled after each attempt, up to
LONGEST_WAIT: Final = 8.0
TIMEOUT: Final = 60.0  # seconds without data
CONNECT: Final = 5.0
PART: Final = 16 << 20
HTTP_WIDTH: Final = 32
COUNT = itertools.count(1)
T = TypeVar("T")
Spread: TypeAlias = "Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]"


class Stat(NamedTuple):
    """Status of an existing object: name, size in bytes, and modification time.

    The time is by the server's clock.
    """

    name: str
    size: int
    at: float


class StoreError(Infrastructure):
    """The store is unusable until someone fixes it."""


class BucketUnreachable(StoreError):
    """The store does not respond, or has temporary errors."""


class Bucket(Protocol):
    """Interface of object storage, with object names relative to the store's prefix."""

    url: str
    width: int  # useful number of concurrent requests

    def load(self) -> None:
        """Import the client library.

        Raises StoreError if it is not installed.
        """
        ...

    def check(self, marker: str) -> bytes | None:
        """Read the object `marker`; return None if it does not exist.

        Raises StoreError if the bucket is unusable.
        """
        ...

    def make(self) -> bool:
        """Create the bucket or directory; return False if it exists."""
        ...

    def head(self, name: str) -> Stat | None: ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Read an object or a byte range of it; return None if it does not exist."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; return False if it already exists."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object atomically."""
        ...

    def write_file(self, name: str, path: str, size: int, crew: Spread) -> None:
        """Write or replace an object from a large file, in parallel parts run by `crew`."""
        ...

    def names(self, prefix: str) -> Iterator[Stat]: ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, ignoring missing ones."""
        ...

    def abandon(self, before: float, *, dry: bool = False) -> int:
        """Abort unfinished uploads started before the time `before`; return their number."""
        ...


class CloudBucket:
    """Common base class of the S3 and Google Cloud Storage clients."""

    width = HTTP_WIDTH
    page = 1000  # names per listing request, the servers' maximum

    def __init__(self, url: str, bucket: str, prefix: str, settings: StoreSettings) -> None:
        self.url = url
        self._bucket, self._prefix, self._settings = bucket, prefix, settings
        self._where = f"{url} at {settings.endpoint}" if settings.endpoint else url
        self._opening = threading.Lock()
        self._opened: Any = None

    def _client(self) -> Any:
        """Return the bucket's client, opened on first use."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        raise NotImplementedError


def _region_in_environment() -> bool:
    return any(os.environ.get(name) for name in ("AWS_DEFAULT_REGION", "AWS_REGION"))


def client_options(scheme: str, store: StoreSettings) -> dict[str, Any]:
    """Return the options of the fsspec client for a URL scheme, `s3` or `gs`.

    The caller may modify the result.
    """
    endpoint, region, profile = store.endpoint, store.region, store.profile
    if scheme == "gs":
        # Never send a token to an endpoint from the settings.
        token = "anon" if endpoint or store.anonymous else None
        return {"token": token, "endpoint_url": endpoint or None}
    config: dict[str, object] = {}
    client: dict[str, str] = {"region_name": region} if region else {}
    if endpoint:
        # Other servers than Amazon's may not support its newer checksums. SHA-256 and MD5 are
        # checked anyway.
        config |= {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        # The client requires a region, also for a server that has none.
        if not (region or profile) and not _region_in_environment():
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
    """Retryable error; `__cause__` holds the original exception."""


def tries(count: int = ATTEMPTS) -> Policy:
    """Return the retry policy for requests: `count` attempts with exponential, randomized waits."""
    return backoff(Again, count, FIRST_WAIT, LONGEST_WAIT, random.random)


def retry_request(do: Callable[[], T], policy: Policy, where: str) -> T:
    """Return the result of a request, retrying temporary errors by the policy.

    Raises Unreachable.
    """
    try:
        return retry(do, policy)
    except Again as error:
        why = error.__cause__ or error
        raise BucketUnreachable(
            f"cannot reach {where}: {words_of(why)}",
            fix="check the network and the URL, then try again",
        ) from why


class Exists(Exception):
    """Error for an object that already exists."""


class Short(Exception):
    """Error for an object that ends before the requested range."""


async def await_result(asked: Any) -> Any:
    return await asked


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def words_of(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def module_of_extra(name: str, url: str, extra: str) -> Any:
    """Import the client module of an optional extra.

    Raises StoreError if it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        from drivers import install_line

        raise StoreError(f"{url} needs {error.name}", fix=install_line(extra)) from error
