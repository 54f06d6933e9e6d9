"""Objects by name in a folder, in S3 and what speaks like it, or in Google Cloud Storage.  Knows requests, retries and errors, not what is stored.

A `Bucket` is asked from several threads at once.  What it raises is `Infrastructure` with what to do about it; what went wrong on the way and may go
right next time is tried again here, a few times, later each time.  s3fs and gcsfs bring credentials, sessions and their event loop; the requests are
made below their caches, their own retries and their guesses at folders.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from ..errors import Infrastructure, Invalid, Problem
from .objects import SYNCED

ATTEMPTS: Final = 6
FIRST_WAIT: Final = 0.2  # seconds; doubled each time, up to
LONGEST_WAIT: Final = 8.0
TIMEOUT: Final = 60.0  # seconds without a byte
CONNECT: Final = 5.0
_PART: Final = 16 << 20
_MOST_PARTS: Final = 9_000
_HTTP_WIDTH: Final = 32
_count = itertools.count(1)
_A = TypeVar("_A")
_B = TypeVar("_B")

Crew: TypeAlias = "Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]"


class Stat(NamedTuple):
    """An object that is there: its bytes, and when it was last written, by the server's clock."""

    name: str
    size: int
    at: float


class Trouble(Infrastructure):
    """The store cannot be used as it is: a person has to do something."""


class Unreachable(Trouble):
    """The store does not answer, or answers with errors that may pass."""


class Bucket(Protocol):
    """Whole objects by name.  Names are relative to the store's folder."""

    url: str
    width: int  # requests at once that are worth it

    def load(self) -> None:
        """Import what it takes to ask.  Raises Trouble when that is not installed."""
        ...

    def check(self, marker: str) -> bytes | None:
        """The bytes of `marker`, None when there is none; raises Trouble when that is not all that is missing."""
        ...

    def head(self, name: str) -> Stat | None: ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """All or a part of an object, None when there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there; False when there is one, whoever was first."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all, over any other."""
        ...

    def write_file(self, name: str, path: str, size: int, crew: Crew) -> None:
        """The same from a large file, in parts, several at a time by `crew`."""
        ...

    def names(self, prefix: str) -> Iterator[Stat]: ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is gone is deleted."""
        ...

    def abandon(self, before: float, *, dry: bool = False) -> int:
        """End uploads that began before then and were never ended; answers how many."""
        ...


def open(url: str, *, root: Path, endpoint: str = "", region: str = "", profile: str = "", owner: str = "", anonymous: bool = False) -> Bucket:
    """The bucket or folder at `url`; a relative folder is below `root`.  Nothing is asked yet.  Raises Invalid for an address that is none."""
    if "::" in url:
        raise Invalid([Problem("bad-store", f"{url}: chained addresses are not followed", fix="name the bucket itself")])
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        folder = Path(os.path.normpath(root / Path(rest if separator else url).expanduser()))
        return Folder(str(folder))
    if scheme not in ("s3", "gs"):
        raise Invalid([Problem("bad-store", f"{url}: there is no store of this kind", fix="known: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, a folder")])
    name, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", name) or any(part in (".", "..", "") for part in prefix.split("/") if prefix):
        raise Invalid([Problem("bad-store", f"{url} names no bucket", fix=f"write {scheme}://BUCKET/FOLDER")])
    head = f"{prefix}/" if prefix else ""
    if scheme == "s3":
        return S3(f"s3://{name}/{prefix}".rstrip("/"), name, head, endpoint, region, profile, owner, anonymous=anonymous)
    return Google(f"gs://{name}/{prefix}".rstrip("/"), name, head, endpoint, anonymous=anonymous)


def client_options(scheme: str, endpoint: str, region: str, profile: str, anonymous: bool) -> dict[str, Any]:
    """What fsspec's client of a scheme, `s3` or `gs`, is made with for a place with these settings.  A change to it is the caller's own."""
    if scheme == "gs":
        # An endpoint from settings is never shown a token.
        return {"token": "anon" if endpoint or anonymous else None, "endpoint_url": endpoint or None}
    config: dict[str, Any] = {}
    client: dict[str, Any] = {"region_name": region} if region else {}
    if endpoint:
        # Servers other than Amazon's do not all know its newer checksums; ours are SHA-256 and MD5 anyhow.
        config |= {
            "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        if not region and not any(os.environ.get(name) for name in ("AWS_DEFAULT_REGION", "AWS_REGION")) and not profile:
            client["region_name"] = "us-east-1"
    more = {"profile": profile} if profile else {}
    return {"anon": anonymous, "endpoint_url": endpoint or None, "client_kwargs": client, "config_kwargs": config, **more}


# -- trying again


class _Again(Exception):
    """Something that may go right next time; `__cause__` is what went wrong."""


class Retry:
    """Do something until it works or has failed too often, waiting longer each time, and never as long as anybody else."""

    def __init__(self, attempts: int = ATTEMPTS, sleep: Callable[[float], object] = time.sleep, chance: Callable[[], float] = random.random) -> None:
        self._attempts, self._sleep, self._chance = attempts, sleep, chance

    def __call__(self, do: Callable[[], _A]) -> _A:
        """The answer of `do`.  Raises the last _Again that it raised."""
        for attempt in range(1, self._attempts + 1):
            try:
                return do()
            except _Again:
                if attempt == self._attempts:
                    raise
            self._sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)) * (0.5 + self._chance() / 2))
        raise AssertionError("BUG: no attempt was made")


# -- a folder


class Folder:
    """A folder of this machine, or one that several mount.  Objects appear by one rename or link; `partial/` holds what is being written."""

    width = 8

    def __init__(self, path: str) -> None:
        self.url = path
        self._folders: set[str] = set()

    def load(self) -> None:
        pass

    def check(self, marker: str) -> bytes | None:
        self._demand()
        return self.read(marker)

    def head(self, name: str) -> Stat | None:
        try:
            found = os.lstat(f"{self.url}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._fail(error)
        return Stat(name, found.st_size, found.st_mtime)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        try:
            handle = os.open(f"{self.url}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._fail(error)
        with os.fdopen(handle, "rb", buffering=0) as file:
            if length is None:
                return file.readall()
            found = []
            while length and (data := os.pread(handle, length, start)):
                found.append(data)
                start, length = start + len(data), length - len(data)
            return b"".join(found)

    def create(self, name: str, data: bytes) -> bool:
        temporary = self._temporary()
        try:
            self._pour(temporary, (data,), sync=True)
            target = self._place(name)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP):
                    raise
                # A file system without links: O_EXCL decides who is first, and what a reader finds half written is no trace.
                return self._create_plain(target, data)
            return True
        except OSError as error:
            self._fail(error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _create_plain(self, target: str, data: bytes) -> bool:
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return True

    def write(self, name: str, data: bytes) -> None:
        self._write(name, (data,), sync=len(data) >= SYNCED)

    def write_file(self, name: str, path: str, size: int, crew: Crew) -> None:
        def parts() -> Iterator[bytes]:
            with Path(path).open("rb", buffering=0) as file:
                while data := file.read(4 << 20):
                    yield data

        self._write(name, parts(), sync=True)

    def names(self, prefix: str) -> Iterator[Stat]:
        top = f"{self.url}/{prefix}"
        for at, _, listed in os.walk(top.rstrip("/")):
            for file in listed:
                name = os.path.relpath(f"{at}/{file}", self.url)
                if (stat := self.head(name)) is not None:
                    yield stat

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                os.unlink(f"{self.url}/{name}")
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail(error)

    def abandon(self, before: float, *, dry: bool = False) -> int:
        old = [stat.name for stat in self.names("partial/") if stat.at < before]
        if not dry:
            self.delete(old)
        return len(old)

    def _write(self, name: str, parts: Iterable[bytes], *, sync: bool) -> None:
        temporary = self._temporary()
        try:
            self._pour(temporary, parts, sync=sync)
            os.rename(temporary, self._place(name))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._fail(error)

    def _pour(self, path: str, parts: Iterable[bytes], *, sync: bool) -> None:
        # Readable for the group: a store is shared, and the umask has the last word.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(handle, rest) :]
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)

    def _place(self, name: str) -> str:
        target = f"{self.url}/{name}"
        self._made(os.path.dirname(target))
        return target

    def _temporary(self) -> str:
        self._made(f"{self.url}/partial")
        return f"{self.url}/partial/{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}-{next(_count)}"

    def _demand(self) -> None:
        if not os.path.isdir(self.url):
            raise Trouble(f"{self.url} is not a directory", fix="make it, or mount what it should be; a store is never made by itself")

    def _made(self, folder: str) -> None:
        if folder not in self._folders:
            self._demand()  # it may have been unmounted since
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                self._fail(error)
            self._folders.add(folder)

    def _fail(self, error: OSError) -> NoReturn:
        where = error.filename or self.url
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Trouble(f"{where}: {error.strerror}", fix="free some space there (`recipe gc --store` helps), and push again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise Trouble(f"{where}: {error.strerror}", fix="ask whoever owns the folder for the right to write there") from error
        raise Unreachable(f"{where}: {error.strerror}") from error


# -- S3

_DENIED = frozenset(
    {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401", "Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
    | {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed", "InvalidClientTokenId", "AuthorizationHeaderMalformed"}
)
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchUpload"})
_PASSING = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BadDigest"}
    | {"TooManyRequests", "OperationAborted", "ConditionalRequestConflict", "XAmzContentSHA256Mismatch", "InvalidDigest", "RequestTimeoutException"}
)
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class S3:
    """A bucket of S3 or of a server that speaks its language."""

    width = _HTTP_WIDTH

    def __init__(
        self,
        url: str,
        bucket: str,
        prefix: str,
        endpoint: str = "",
        region: str = "",
        profile: str = "",
        owner: str = "",
        *,
        anonymous: bool = False,
        retry: Retry | None = None,
    ) -> None:
        self.url = url
        self._bucket, self._prefix = bucket, prefix
        self._settings = endpoint, region, profile, anonymous
        self._where = f"{url} at {endpoint}" if endpoint else url
        self._common: dict[str, str] = {"Bucket": bucket, **({"ExpectedBucketOwner": owner} if owner else {})}
        self._retry = retry or Retry()
        self._opened: tuple[Any, Any] | None = None
        self._opening = lock()

    def load(self) -> None:
        _module("s3fs", self.url, "s3")

    def check(self, marker: str) -> bytes | None:
        # Whether anybody is there is found out sooner than what to do when somebody is busy.
        return self._read(marker, 0, None, Retry(attempts=2))

    def head(self, name: str) -> Stat | None:
        found = self._ask("head_object", Key=self._prefix + name, absent=True)
        return None if found is None else Stat(name, int(found["ContentLength"]), found["LastModified"].timestamp())

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """A body that breaks off is asked for again from where it did."""
        return self._read(name, start, length, self._retry)

    def _read(self, name: str, start: int, length: int | None, retry: Retry) -> bytes | None:
        if length == 0:
            return b""
        found = bytearray()

        def ask() -> bool:
            at = start + len(found)
            limits: dict[str, Any] = {}
            if length is not None:
                limits = {"Range": f"bytes={at}-{start + length - 1}"}
            elif found:
                limits = {"Range": f"bytes={at}-"}
            try:
                answer = self._once("get_object", Key=self._prefix + name, absent=True, **limits)
            except _Short:
                return True
            if answer is None:
                return False
            if limits and not str(answer.get("ContentRange", "")).startswith(f"bytes {at}-"):
                raise _Again(f"{name}: another part than the one that was asked for")
            due = int(answer["ContentLength"])
            begun = len(found)
            try:
                self._run(_drain(answer["Body"], found))
            except Exception as error:
                raise _Again(f"{name} broke off") from error
            if len(found) - begun != due:
                raise _Again(f"{name} broke off after {len(found) - begun} of {due} bytes")
            return True

        there = self._patiently(ask, retry)
        return bytes(found) if there else None

    def create(self, name: str, data: bytes) -> bool:
        tried = False

        def once() -> bool:
            nonlocal tried
            again, tried = tried, True
            try:
                self._put(name, data, IfNoneMatch="*")
            except _Exists:
                # Of a first try whose answer was lost: it may have been ours.
                return again and self.read(name) == data
            return True

        return self._patiently(once)

    def write(self, name: str, data: bytes) -> None:
        self._patiently(lambda: self._put(name, data))

    def _put(self, name: str, data: bytes, **condition: Any) -> None:
        md5 = hashlib.md5(data, usedforsecurity=False)
        answer = self._once("put_object", Key=self._prefix + name, Body=data, ContentMD5=_base64(md5.digest()), **condition)
        assert answer is not None
        _demand_etag(name, answer, md5.hexdigest())

    def write_file(self, name: str, path: str, size: int, crew: Crew) -> None:
        """In parts.  Those that a killed writer of the same bytes has sent are not sent again; an upload that fails is taken back.

        Two who write the same at once may share an upload: whoever is late finds it ended and the object there, or begins anew.
        """
        before = self.head(name)
        for last in (False, True):
            try:
                return self._write_file(self._prefix + name, path, size, crew)
            except (_Absent, Infrastructure) as error:
                with contextlib.suppress(Infrastructure):
                    if (there := self.head(name)) is not None and there.size == size and there != before:
                        return None
                if isinstance(error, Infrastructure):
                    raise
                if last:
                    raise Unreachable(f"{self._where}: the upload of {name} was ended by somebody else", fix="push again") from None
        raise AssertionError("BUG: neither written nor failed")

    def _write_file(self, key: str, path: str, size: int, crew: Crew) -> None:
        length = max(_PART, -(-size // _MOST_PARTS))
        upload, there = self._unfinished(key)
        if upload is None:
            begun = self._ask("create_multipart_upload", Key=key)
            assert begun is not None
            upload = str(begun["UploadId"])

        def part(number: int) -> dict[str, Any]:
            with Path(path).open("rb") as file:
                file.seek((number - 1) * length)
                data = file.read(length)
            md5 = hashlib.md5(data, usedforsecurity=False)
            if there.get(number) == (len(data), md5.hexdigest()):
                return {"PartNumber": number, "ETag": f'"{md5.hexdigest()}"'}

            def once() -> str:
                answer = self._once("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_base64(md5.digest()))
                assert answer is not None
                _demand_etag(key, answer, md5.hexdigest())
                return str(answer["ETag"])

            return {"PartNumber": number, "ETag": self._patiently(once)}

        try:
            parts = crew(part, range(1, -(-size // length) + 1))
            self._ask("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        except _Absent:
            raise
        except BaseException:
            with contextlib.suppress(Infrastructure):
                self._ask("abort_multipart_upload", Key=key, UploadId=upload, absent=True)
            raise

    def _unfinished(self, key: str) -> tuple[str | None, dict[int, tuple[int, str]]]:
        """The newest upload of this object that nobody ended, and its parts: number -> (bytes, MD5)."""
        begun = [(found["Initiated"], found["UploadId"]) for found in self._uploads(key) if found["Key"] == key]
        if not begun:
            return None, {}
        upload = max(begun)[1]
        parts: dict[int, tuple[int, str]] = {}
        marker = 0
        while True:
            answer = self._ask("list_parts", Key=key, UploadId=upload, PartNumberMarker=marker, absent=True)
            if answer is None:
                return None, {}
            for part in answer.get("Parts", ()):
                if etag := _MD5.fullmatch(part["ETag"]):
                    parts[part["PartNumber"]] = part["Size"], etag[1]
            if not answer.get("IsTruncated"):
                return upload, parts
            marker = answer["NextPartNumberMarker"]

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        marks: dict[str, Any] = {}
        while True:
            answer = self._ask("list_multipart_uploads", Prefix=prefix, **marks)
            assert answer is not None
            yield from answer.get("Uploads", ())
            if not answer.get("IsTruncated"):
                return
            marks = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def names(self, prefix: str) -> Iterator[Stat]:
        token: dict[str, Any] = {}
        while True:
            answer = self._ask("list_objects_v2", Prefix=self._prefix + prefix, **token)
            assert answer is not None
            for found in answer.get("Contents", ()):
                yield Stat(found["Key"][len(self._prefix) :], int(found["Size"]), found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), 1000):
            listed = [{"Key": self._prefix + name} for name in names[start : start + 1000]]
            answer = self._ask("delete_objects", Delete={"Objects": listed, "Quiet": True})
            for problem in (answer or {}).get("Errors", ()):
                raise Trouble(f"{self._where}: {problem.get('Key')} cannot be deleted: {problem.get('Message') or problem.get('Code')}")

    def abandon(self, before: float, *, dry: bool = False) -> int:
        old = [found for found in self._uploads(self._prefix + "objects/") if found["Initiated"].timestamp() < before]
        for found in () if dry else old:
            self._ask("abort_multipart_upload", Key=found["Key"], UploadId=found["UploadId"], absent=True)
        return len(old)

    # -- one request

    def _ask(self, method: str, *, absent: bool = False, **words: Any) -> dict[str, Any] | None:
        """The answer to one request, tried again where that helps.  With `absent`, None when there is no such thing."""
        return self._patiently(lambda: self._once(method, absent=absent, **words))

    def _patiently(self, do: Callable[[], _A], retry: Retry | None = None) -> _A:
        try:
            return (retry or self._retry)(do)
        except _Again as error:
            why = error.__cause__ or error
            raise Unreachable(
                f"{self._where} does not answer as it should: {_words(why)}", fix="look at the network and the address, and try again"
            ) from why

    def _once(self, method: str, *, absent: bool = False, **words: Any) -> dict[str, Any] | None:
        wrong = _module("botocore.exceptions", self.url, "s3")

        try:
            client, _ = self._client()
            found: dict[str, Any] = self._run(getattr(client, method)(**self._common, **words))
            return found
        except wrong.ClientError as error:
            self._told(error, method, absent=absent)
            return None
        except (wrong.NoCredentialsError, wrong.PartialCredentialsError, wrong.CredentialRetrievalError, wrong.TokenRetrievalError) as error:
            raise Trouble(f"{self._where}: no credentials: {_words(error)}", fix=_LOGIN) from error
        except (wrong.UnauthorizedSSOTokenError, wrong.SSOError) as error:
            raise Trouble(f"{self._where}: {_words(error)}", fix="log in again: `aws sso login`") from error
        except (wrong.ProfileNotFound, wrong.InvalidConfigError) as error:
            raise Trouble(
                f"{self._where}: {_words(error)}", fix="add the profile to ~/.aws/config, or name another in the store's settings"
            ) from error
        except (wrong.EndpointConnectionError, wrong.HTTPClientError, wrong.ResponseStreamingError, wrong.IncompleteReadError) as error:
            raise _Again from error
        except (
            TimeoutError,
            ConnectionError,
            _module("aiohttp", self.url, "s3").ClientError,
            _module("botocore.parsers", self.url, "s3").ResponseParserError,
        ) as error:
            raise _Again from error
        except wrong.BotoCoreError as error:
            raise Trouble(f"{self._where}: {_words(error)}", fix="look at the store's settings: `recipe config`") from error

    def _told(self, error: Any, method: str, *, absent: bool) -> None:
        """Raise what an error of the server means; nothing when it says that there is no such thing, and that may be."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in ("PreconditionFailed", "412") or status == 412:
            raise _Exists from error
        if code == "NoSuchBucket":
            raise Trouble(
                f"{self._where}: there is no such bucket", fix="make it, or correct the url of the store; a store is never made by itself"
            ) from error
        if code in _ABSENT:
            if absent:
                return
            raise _Absent from error
        if code == "InvalidRange" or status == 416:
            raise _Short from error
        if code in ("PermanentRedirect", "301", "IllegalLocationConstraintException"):
            region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            raise Trouble(
                f"{self._where}: the bucket is in another region{f', {region}' if region else ''}", fix="name its region in the store's settings"
            ) from error
        if code in _DENIED or status in (401, 403):
            words = error.response.get("Error", {}).get("Message") or code
            raise Trouble(f"{self._where}: refused ({code}: {words})", fix=_LOGIN if code != "AccessDenied" else _RIGHTS) from error
        if code in _PASSING or status >= 500 or status in (408, 429):
            raise _Again from error
        raise Trouble(f"{self._where}: {method} failed: {_words(error)}", fix="look at the store's settings: `recipe config`") from error

    def _run(self, asked: Any) -> Any:
        from fsspec.asyn import sync

        _, system = self._client()
        return sync(system.loop, _awaited, asked)

    def _client(self) -> tuple[Any, Any]:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        return self._opened

    def _open(self) -> tuple[Any, Any]:
        s3fs = _module("s3fs", self.url, "s3")
        from fsspec.asyn import sync

        options = client_options("s3", *self._settings)
        options["config_kwargs"] |= {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT,
            "read_timeout": TIMEOUT,
            "max_pool_connections": self.width,
        }
        system = s3fs.S3FileSystem(skip_instance_cache=True, **options)
        return sync(system.loop, system.set_session), system  # which ends the session when nobody holds it any more


class _Exists(Exception):
    """There is such an object already."""


class _Short(Exception):
    """The object ends before the part that was asked for."""


class _Absent(Exception):
    """There is no such object or upload."""


_LOGIN = (
    "log in as usual: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile of ~/.aws, or `aws sso login`; `recipe config` shows the store's profile"
)
_RIGHTS = "the login needs s3:ListBucket on the bucket, and s3:GetObject and s3:PutObject below its folder; to collect garbage also s3:DeleteObject"


def _demand_etag(name: str, answer: dict[str, Any], md5: str) -> None:
    """An ETag that is an MD5 must be that of what was sent.  With keys of a KMS, or of the caller's, it is not one of the plain bytes."""
    if answer.get("ServerSideEncryption", "AES256") != "AES256" or answer.get("SSECustomerAlgorithm"):
        return
    told = _MD5.fullmatch(str(answer.get("ETag", "")))
    if told and told[1] != md5:
        raise _Again(f"{name} arrived as other bytes: its ETag is {told[1]}, not {md5}")


async def _awaited(asked: Any) -> Any:
    return await asked


async def _drain(body: Any, into: bytearray) -> None:
    async with body as stream:
        while data := await stream.read(1 << 20):
            into += data


# -- Google Cloud Storage


class Google:
    """A bucket of Google Cloud Storage.  gcsfs tries requests again by itself."""

    width = _HTTP_WIDTH

    def __init__(self, url: str, bucket: str, prefix: str, endpoint: str = "", *, anonymous: bool = False, retry: Retry | None = None) -> None:
        self.url = url
        self._bucket, self._prefix = bucket, prefix
        self._endpoint, self._anonymous = endpoint, anonymous
        self._where = f"{url} at {endpoint}" if endpoint else url
        self._retry = retry or Retry(attempts=3)
        self._system: Any = None
        self._opening = lock()

    def load(self) -> None:
        self._client()

    def check(self, marker: str) -> bytes | None:
        # Its 404 does not say what is not there; a listing is of the bucket.
        if self._ask(lambda fs: fs._call("GET", "b/{}/o", self._bucket, maxResults=1, prefix=self._prefix, json_out=True)) is None:
            raise Trouble(f"{self._where}: there is no such bucket", fix="make it, or correct the url of the store; a store is never made by itself")
        return self.read(marker)

    def head(self, name: str) -> Stat | None:
        found = self._ask(lambda fs: fs._call("GET", "b/{}/o/{}", self._bucket, self._prefix + name, json_out=True))
        return None if found is None else Stat(name, int(found["size"]), _moment(found["updated"]))

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if length == 0:
            return b""
        limits = (start, start + length) if length is not None else (None, None)
        try:
            found = self._ask(lambda fs: fs._cat_file(f"{self._bucket}/{self._prefix}{name}", start=limits[0], end=limits[1]))
        except _Short:
            return b""
        return None if found is None else bytes(found)

    def create(self, name: str, data: bytes) -> bool:
        def once(fs: Any) -> Any:
            return fs._pipe_file(f"{self._bucket}/{self._prefix}{name}", data, mode="create", consistency="md5", chunksize=_chunk(data))

        try:
            self._ask(once, missing=False)
        except _Exists:
            # gcsfs tries again when an answer is lost: what is there may be ours.
            return self.read(name) == data
        return True

    def write(self, name: str, data: bytes) -> None:
        self._ask(lambda fs: fs._pipe_file(f"{self._bucket}/{self._prefix}{name}", data, consistency="md5", chunksize=_chunk(data)), missing=False)

    def write_file(self, name: str, path: str, size: int, crew: Crew) -> None:
        """In one resumable upload, whose parts have to come in order; one that breaks off is not there and vanishes after a week."""
        self._ask(lambda fs: fs._put_file(path, f"{self._bucket}/{self._prefix}{name}", consistency="md5", chunksize=_PART), missing=False)

    def names(self, prefix: str) -> Iterator[Stat]:
        token: dict[str, Any] = {}
        while True:
            words = {"prefix": self._prefix + prefix, "maxResults": 1000, **token}
            answer = self._ask(partial(self._page, words)) or {}
            for found in answer.get("items", ()):
                yield Stat(found["name"][len(self._prefix) :], int(found["size"]), _moment(found["updated"]))
            if not answer.get("nextPageToken"):
                return
            token = {"pageToken": answer["nextPageToken"]}

    def _page(self, words: dict[str, Any], fs: Any) -> Any:
        return fs._call("GET", "b/{}/o", self._bucket, json_out=True, **words)

    def delete(self, names: Sequence[str]) -> None:
        def one(name: str) -> None:
            self._ask(lambda fs: fs._call("DELETE", "b/{}/o/{}", self._bucket, self._prefix + name))

        crew(one, names, width=self.width)

    def abandon(self, before: float, *, dry: bool = False) -> int:
        return 0  # uploads that were never ended cannot be listed there, are not billed, and go after a week

    def _ask(self, do: Callable[[Any], Any], *, missing: bool = True) -> Any:
        """The answer to one request; None when there is no such thing, if that may be."""
        from fsspec.asyn import sync

        fs = self._client()

        def once() -> Any:
            try:
                return sync(fs.loop, _awaited, do(fs))
            except FileNotFoundError as error:
                if missing:
                    return None
                raise Trouble(f"{self._where}: there is no such bucket", fix="make it, or correct the url of the store") from error
            except FileExistsError as error:
                raise _Exists from error
            except Exception as error:
                self._told(error)

        try:
            return self._retry(once)
        except _Again as error:
            why = error.__cause__ or error
            raise Unreachable(
                f"{self._where} does not answer as it should: {_words(why)}", fix="look at the network and the address, and try again"
            ) from why

    def _told(self, error: Exception) -> NoReturn:
        import aiohttp
        import google.auth.exceptions as auth
        import requests

        wrong = _module("gcsfs.retry", self.url, "gcs")
        code = getattr(error, "code", None)
        if isinstance(error, auth.TransportError):
            raise _Again from error
        if str(code) == "416" or "not satisfiable" in str(error):
            raise _Short from error
        denied = isinstance(error, (auth.GoogleAuthError, PermissionError)) or (isinstance(error, OSError) and str(error).startswith("Forbidden"))
        if denied or code in (401, 403, "401", "403"):
            raise Trouble(f"{self._where}: refused ({_words(error)})", fix=_GOOGLE_LOGIN) from error
        if isinstance(error, (wrong.ChecksumError, aiohttp.ClientError, TimeoutError, ConnectionError, requests.RequestException)):
            raise _Again from error
        if str(code)[:1] == "5" or str(code) in ("408", "429"):
            raise _Again from error
        if isinstance(error, (OSError, ValueError, RuntimeError, wrong.HttpError)):
            raise Trouble(f"{self._where}: {_words(error)}", fix="look at the store's settings: `recipe config`") from error
        raise error

    def _client(self) -> Any:
        with self._opening:
            if self._system is None:
                self._system = self._open()
        return self._system

    def _open(self) -> Any:
        endpoint = self._endpoint or os.environ.get("STORAGE_EMULATOR_HOST", "")
        if endpoint:
            # Before its import: gcsfs asks over gRPC what kind of bucket this is, which an emulator leaves without an answer for a minute.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        gcsfs = _module("gcsfs", self.url, "gcs")
        import logging

        # It logs what it tries again, with tracebacks; what is worth telling is raised.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
        options = client_options("gs", endpoint, "", "", self._anonymous)
        return gcsfs.GCSFileSystem(requests_timeout=TIMEOUT, skip_instance_cache=True, **options)


_GOOGLE_LOGIN = (
    "log in as usual: `gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS; the login needs storage.objects.list, get, create"
)


def _chunk(data: bytes) -> int:
    """From how many bytes on gcsfs sends them alone instead of in a MIME message, which bytes that look like its boundary would break."""
    return len(data) if b"--==0==" in data else _PART


def _moment(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def _words(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def _module(name: str, url: str, extra: str) -> Any:
    """A module of an extra that is imported only for a store of its kind."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        from drivers import install_line

        raise Trouble(f"{url} needs {error.name}", fix=install_line(extra)) from error


def lock() -> Any:
    """Something that one thread holds at a time."""
    import threading

    return threading.Lock()


def crew(do: Callable[[_A], _B], items: Sequence[_A], *, width: int, deadline: float | None = None, what: str = "") -> list[_B]:
    """`do` for every item, `width` at a time, in order; the first error ends all.  After `deadline` (monotonic) nobody is waited for."""
    if (len(items) <= 1 or width <= 1) and deadline is None:
        return [do(item) for item in items]
    import threading

    answers: list[Any] = [None] * len(items)
    failures: list[BaseException] = []
    queue = iter(range(len(items)))
    turn = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with turn:
                    index = next(queue, None)
                if index is None:
                    return
                answers[index] = do(items[index])
        except BaseException as error:
            failures.append(error)

    # Not a pool: its threads are waited for when the program ends, even those that wait for a server which says nothing.
    helpers = [threading.Thread(target=work, name="store", daemon=True) for _ in range(min(width, len(items)))]
    for helper in helpers:
        helper.start()
    try:
        for helper in helpers:
            helper.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if helper.is_alive():
                raise Unreachable(f"{what} does not answer", fix="look at the network, or do without the store: `--store none`")
    except BaseException as error:
        failures.append(error)
        raise
    if failures:
        raise failures[0]
    return answers
