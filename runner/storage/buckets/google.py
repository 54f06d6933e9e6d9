"""Google Cloud Storage buckets.

gcsfs provides credentials and retries; requests bypass its caches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from ..crew import Crew
from .bucket import (
    PART,
    TIMEOUT,
    Again,
    CloudBucket,
    Exists,
    Short,
    Spread,
    Stat,
    StoreError,
    await_result,
    client_options,
    module_of_extra,
    retry_request,
    tries,
    words_of,
)


class Google(CloudBucket):
    """Google Cloud Storage bucket, accessed with gcsfs and its own retries."""

    def load(self) -> None:
        self._client()

    def check(self, marker: str) -> bytes | None:
        # A 404 for an object does not tell whether the bucket exists, but a listing does.
        if (
            self._ask(
                lambda fs: fs._call(
                    "GET", "b/{}/o", self._bucket, maxResults=1, prefix=self._prefix, json_out=True
                )
            )
            is None
        ):
            raise StoreError(
                f"{self._where}: the bucket does not exist",
                fix="create the bucket, or correct the store's `url`; recipe never creates a bucket",
            )
        return self.read(marker)

    def make(self) -> bool:
        if self._ask(lambda fs: fs._call("GET", "b/{}", self._bucket, json_out=True)) is not None:
            return False
        self._ask(
            lambda fs: fs._call(
                "POST", "b", project=fs.project, json={"name": self._bucket}, json_out=True
            ),
            missing=False,
        )
        return True

    def head(self, name: str) -> Stat | None:
        found = self._ask(
            lambda fs: fs._call(
                "GET", "b/{}/o/{}", self._bucket, self._prefix + name, json_out=True
            )
        )
        return None if found is None else Stat(name, int(found["size"]), _moment(found["updated"]))

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if length == 0:
            return b""
        limits = (start, start + length) if length is not None else (None, None)
        try:
            found = self._ask(
                lambda fs: fs._cat_file(
                    f"{self._bucket}/{self._prefix}{name}", start=limits[0], end=limits[1]
                )
            )
        except Short:
            return b""
        return None if found is None else bytes(found)

    def create(self, name: str, data: bytes) -> bool:
        def once(fs: Any) -> Any:
            return fs._pipe_file(
                f"{self._bucket}/{self._prefix}{name}",
                data,
                mode="create",
                consistency="md5",
                chunksize=_chunk(data),
            )

        try:
            self._ask(once, missing=False)
        except Exists:
            # gcsfs retries after a lost response, so the existing object may be this one.
            return self.read(name) == data
        return True

    def write(self, name: str, data: bytes) -> None:
        self._ask(
            lambda fs: fs._pipe_file(
                f"{self._bucket}/{self._prefix}{name}",
                data,
                consistency="md5",
                chunksize=_chunk(data),
            ),
            missing=False,
        )

    def write_file(self, name: str, path: str, size: int, crew: Spread) -> None:
        """Upload a large file with one resumable upload, whose parts must be sent in order.

        An interrupted upload expires after a week.
        """
        self._ask(
            lambda fs: fs._put_file(
                path, f"{self._bucket}/{self._prefix}{name}", consistency="md5", chunksize=PART
            ),
            missing=False,
        )

    def names(self, prefix: str) -> Iterator[Stat]:
        token: dict[str, str] = {}
        while True:
            words = {"prefix": self._prefix + prefix, "maxResults": self.page, **token}
            answer = self._ask(partial(self._page, words)) or {}
            for found in answer.get("items", ()):
                yield Stat(
                    found["name"][len(self._prefix) :],
                    int(found["size"]),
                    _moment(found["updated"]),
                )
            if not answer.get("nextPageToken"):
                return
            token = {"pageToken": answer["nextPageToken"]}

    def _page(self, words: Mapping[str, object], fs: Any) -> Any:
        return fs._call("GET", "b/{}/o", self._bucket, json_out=True, **words)

    def delete(self, names: Sequence[str]) -> None:
        def one(name: str) -> None:
            self._ask(lambda fs: fs._call("DELETE", "b/{}/o/{}", self._bucket, self._prefix + name))

        Crew(self.width).map(one, names)

    def abandon(self, before: float, *, dry: bool = False) -> int:
        return 0  # unfinished uploads cannot be listed, are not billed, and expire after a week

    def _ask(self, do: Callable[[Any], Any], *, missing: bool = True) -> Any:
        """Return the result of a request; None for a 404 response if `missing` allows that."""
        from fsspec.asyn import sync

        fs = self._client()

        def once() -> Any:
            try:
                return sync(fs.loop, await_result, do(fs))
            except FileNotFoundError as error:
                if missing:
                    return None
                raise StoreError(
                    f"{self._where}: the bucket does not exist",
                    fix="create the bucket, or correct the store's `url`",
                ) from error
            except FileExistsError as error:
                raise Exists from error
            except Exception as error:
                self._raise(error)

        return retry_request(once, tries(3), self._where)

    def _raise(self, error: Exception) -> NoReturn:
        import aiohttp
        import google.auth.exceptions as auth
        import requests

        wrong = module_of_extra("gcsfs.retry", self.url, "gcs")
        code = getattr(error, "code", None)
        if isinstance(error, auth.TransportError):
            raise Again from error
        if str(code) == "416" or "not satisfiable" in str(error):
            raise Short from error
        denied = isinstance(error, (auth.GoogleAuthError, PermissionError)) or (
            isinstance(error, OSError) and str(error).startswith("Forbidden")
        )
        if denied or code in (401, 403, "401", "403"):
            raise StoreError(
                f"{self._where}: refused ({words_of(error)})", fix=_GOOGLE_LOGIN
            ) from error
        if isinstance(
            error,
            (
                wrong.ChecksumError,
                aiohttp.ClientError,
                TimeoutError,
                ConnectionError,
                requests.RequestException,
            ),
        ):
            raise Again from error
        if str(code)[:1] == "5" or str(code) in ("408", "429"):
            raise Again from error
        if isinstance(error, (OSError, ValueError, RuntimeError, wrong.HttpError)):
            raise StoreError(
                f"{self._where}: {words_of(error)}",
                fix="check the store's settings with `recipe config`",
            ) from error
        raise error

    def _open(self) -> Any:
        endpoint = self._settings.endpoint or os.environ.get("STORAGE_EMULATOR_HOST", "")
        if endpoint:
            # Before the import: gcsfs queries the bucket type over gRPC, which hangs for a minute
            # with an emulator.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        gcsfs = module_of_extra("gcsfs", self.url, "gcs")

        # gcsfs logs retries with tracebacks, while relevant errors are raised anyway.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
        options = client_options("gs", self._settings._replace(endpoint=endpoint))
        return gcsfs.GCSFileSystem(requests_timeout=TIMEOUT, skip_instance_cache=True, **options)


_GOOGLE_LOGIN = (
    "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
    "the account requires storage.objects.list, get and create"
)


def _chunk(data: bytes) -> int:
    """Return an upload chunk size that avoids MIME messages for data with gcsfs's MIME boundary."""
    return len(data) if b"--==0==" in data else PART


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
