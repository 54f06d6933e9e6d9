"""Buckets of Amazon S3 and S3-compatible servers.

s3fs provides credentials, sessions and an event loop. Requests bypass its caches and retries.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...errors import Infrastructure
from ...retry import Policy
from .bucket import (
    CONNECT,
    PART,
    TIMEOUT,
    Again,
    BucketUnreachable,
    CloudBucket,
    Exists,
    Short,
    Spread,
    Stat,
    StoreError,
    await_result,
    base64_of,
    client_options,
    module_of_extra,
    retry_request,
    tries,
    words_of,
)

if TYPE_CHECKING:
    from ...settings import StoreSettings

_MOST_PARTS: Final = 9_000
_DENIED = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "AccountProblem",
        "Forbidden",
        "403",
        "401",
        "Unauthorized",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
    }
    | {
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "RequestTimeTooSkewed",
        "InvalidClientTokenId",
        "AuthorizationHeaderMalformed",
    }
)
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchUpload"})
_PASSING = frozenset(
    {
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BadDigest",
    }
    | {
        "TooManyRequests",
        "OperationAborted",
        "ConditionalRequestConflict",
        "XAmzContentSHA256Mismatch",
        "InvalidDigest",
        "RequestTimeoutException",
    }
)
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class _Upload(NamedTuple):
    """Unfinished multipart upload."""

    key: str
    id: str
    begun: datetime


class S3(CloudBucket):
    """Bucket of Amazon S3 or an S3-compatible server."""

    def __init__(self, url: str, bucket: str, prefix: str, settings: StoreSettings) -> None:
        super().__init__(url, bucket, prefix, settings)
        self._common: dict[str, str] = {"Bucket": bucket}
        if settings.owner:
            self._common["ExpectedBucketOwner"] = settings.owner
        self._policy = tries()

    def load(self) -> None:
        module_of_extra("s3fs", self.url, "s3")

    def check(self, marker: str) -> bytes | None:
        # Fewer attempts, to report an unreachable server sooner.
        return self._read(marker, 0, None, tries(2))

    def make(self) -> bool:
        if self._ask("head_bucket", absent=True) is not None:
            return False
        region = self._settings.region
        words: dict[str, Any] = {}
        if region not in ("", "auto", "us-east-1"):
            words["CreateBucketConfiguration"] = {"LocationConstraint": region}
        self._ask("create_bucket", **words)
        return True

    def head(self, name: str) -> Stat | None:
        found = self._ask("head_object", Key=self._prefix + name, absent=True)
        if found is None:
            return None
        return Stat(name, int(found["ContentLength"]), found["LastModified"].timestamp())

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Read an object or a byte range, resuming an interrupted response."""
        return self._read(name, start, length, self._policy)

    def _read(self, name: str, start: int, length: int | None, policy: Policy) -> bytes | None:
        if length == 0:
            return b""
        found = bytearray()

        def ask() -> bool:
            at = start + len(found)
            limits: dict[str, str] = {}
            if length is not None:
                limits = {"Range": f"bytes={at}-{start + length - 1}"}
            elif found:
                limits = {"Range": f"bytes={at}-"}
            try:
                answer = self._once("get_object", Key=self._prefix + name, absent=True, **limits)
            except Short:
                return True
            if answer is None:
                return False
            if limits and not str(answer.get("ContentRange", "")).startswith(f"bytes {at}-"):
                raise Again(f"{name}: the server sent another part than requested")
            due = int(answer["ContentLength"])
            begun = len(found)
            try:
                self._run(_drain(answer["Body"], found))
            except Exception as error:
                raise Again(f"{name}: the connection was lost") from error
            if len(found) - begun != due:
                raise Again(
                    f"{name}: the connection was lost after {len(found) - begun} of {due} bytes"
                )
            return True

        there = retry_request(ask, policy, self._where)
        return bytes(found) if there else None

    def create(self, name: str, data: bytes) -> bool:
        tried = False

        def once() -> bool:
            nonlocal tried
            again, tried = tried, True
            try:
                self._put(name, data, IfNoneMatch="*")
            except Exists:
                # The response of the first attempt was lost: that attempt may have created the
                # object.
                return again and self.read(name) == data
            return True

        return retry_request(once, self._policy, self._where)

    def write(self, name: str, data: bytes) -> None:
        retry_request(lambda: self._put(name, data), self._policy, self._where)

    def _put(self, name: str, data: bytes, **condition: Any) -> None:
        md5 = hashlib.md5(data, usedforsecurity=False)
        answer = self._once(
            "put_object",
            Key=self._prefix + name,
            Body=data,
            ContentMD5=base64_of(md5.digest()),
            **condition,
        )
        assert answer is not None
        _demand_etag(name, answer, md5.hexdigest())

    def write_file(self, name: str, path: str, size: int, crew: Spread) -> None:
        """Upload a large file in parts.

        Parts from an earlier interrupted upload of the same bytes are reused, and a failed upload
        is aborted.

        Two concurrent writers of the same file may share an upload. The later one finds the
        finished object, or starts over.
        """
        before = self.head(name)
        for last in (False, True):
            try:
                return self._write_file(self._prefix + name, path, size, crew)
            except Infrastructure as error:
                with contextlib.suppress(Infrastructure):
                    # Another writer of the same bytes may have finished the upload.
                    there = self.head(name)
                    has_size = there is not None and there.size == size
                    if has_size and there != before:
                        return None
                if not isinstance(error, _Absent):
                    raise
                if last:
                    raise BucketUnreachable(
                        f"{self._where}: another process aborted the upload of {name}",
                        fix="run `recipe push` again",
                    ) from None
        raise AssertionError("BUG: neither written nor failed")

    def _write_file(self, key: str, path: str, size: int, crew: Spread) -> None:
        length = max(PART, -(-size // _MOST_PARTS))
        upload, there = self._find_unfinished(key)
        if upload is None:
            begun = self._ask("create_multipart_upload", Key=key)
            assert begun is not None
            upload = str(begun["UploadId"])

        def part(number: int) -> Mapping[str, int | str]:
            with Path(path).open("rb") as file:
                file.seek((number - 1) * length)
                data = file.read(length)
            md5 = hashlib.md5(data, usedforsecurity=False)
            if there.get(number) == (len(data), md5.hexdigest()):
                return {"PartNumber": number, "ETag": f'"{md5.hexdigest()}"'}

            def once() -> str:
                answer = self._once(
                    "upload_part",
                    Key=key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=data,
                    ContentMD5=base64_of(md5.digest()),
                )
                assert answer is not None
                _demand_etag(key, answer, md5.hexdigest())
                return str(answer["ETag"])

            return {"PartNumber": number, "ETag": retry_request(once, self._policy, self._where)}

        try:
            parts = crew(part, range(1, -(-size // length) + 1))
            self._ask(
                "complete_multipart_upload",
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except _Absent:
            raise
        except BaseException:
            with contextlib.suppress(Infrastructure):
                self._ask("abort_multipart_upload", Key=key, UploadId=upload, absent=True)
            raise

    def _find_unfinished(self, key: str) -> tuple[str | None, dict[int, tuple[int, str]]]:
        """Return the newest unfinished upload of an object, and its parts.

        The parts map numbers to size and MD5.
        """
        begun = [(found.begun, found.id) for found in self._uploads(key) if found.key == key]
        if not begun:
            return None, {}
        upload = max(begun)[1]
        parts: dict[int, tuple[int, str]] = {}
        marker = 0
        while True:
            answer = self._ask(
                "list_parts", Key=key, UploadId=upload, PartNumberMarker=marker, absent=True
            )
            if answer is None:
                return None, {}
            for part in answer.get("Parts", ()):
                if etag := _MD5.fullmatch(part["ETag"]):
                    parts[part["PartNumber"]] = part["Size"], etag[1]
            if not answer.get("IsTruncated"):
                return upload, parts
            marker = answer["NextPartNumberMarker"]

    def _uploads(self, prefix: str) -> Iterator[_Upload]:
        marks: dict[str, str] = {}
        while True:
            answer = self._ask("list_multipart_uploads", absent=False, Prefix=prefix, **marks)
            assert answer is not None
            yield from (
                _Upload(each["Key"], each["UploadId"], each["Initiated"])
                for each in answer.get("Uploads", ())
            )
            if not answer.get("IsTruncated"):
                return
            marks = {
                "KeyMarker": answer["NextKeyMarker"],
                "UploadIdMarker": answer["NextUploadIdMarker"],
            }

    def names(self, prefix: str) -> Iterator[Stat]:
        token: dict[str, str] = {}
        while True:
            answer = self._ask(
                "list_objects_v2",
                absent=False,
                Prefix=self._prefix + prefix,
                MaxKeys=self.page,
                **token,
            )
            assert answer is not None
            for found in answer.get("Contents", ()):
                yield Stat(
                    found["Key"][len(self._prefix) :],
                    int(found["Size"]),
                    found["LastModified"].timestamp(),
                )
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), 1000):
            listed = [{"Key": self._prefix + name} for name in names[start : start + 1000]]
            answer = self._ask("delete_objects", Delete={"Objects": listed, "Quiet": True})
            for problem in (answer or {}).get("Errors", ()):
                raise StoreError(
                    f"{self._where}: {problem.get('Key')} cannot be deleted: {problem.get('Message') or problem.get('Code')}"
                )

    def abandon(self, before: float, *, dry: bool = False) -> int:
        uploads = self._uploads(self._prefix + "objects/")
        old = [found for found in uploads if found.begun.timestamp() < before]
        if not dry:
            for found in old:
                self._ask("abort_multipart_upload", Key=found.key, UploadId=found.id, absent=True)
        return len(old)

    # -- single requests

    def _ask(self, method: str, *, absent: bool = False, **words: Any) -> Mapping[str, Any] | None:
        """Return the result of a request, with retries.

        With `absent`, return None for a missing object.
        """
        return retry_request(
            lambda: self._once(method, absent=absent, **words), self._policy, self._where
        )

    def _once(self, method: str, *, absent: bool = False, **words: Any) -> Mapping[str, Any] | None:
        wrong = module_of_extra("botocore.exceptions", self.url, "s3")

        try:
            client, _ = self._client()
            common = {"Bucket": self._bucket} if method == "create_bucket" else self._common
            found: Mapping[str, Any] = self._run(getattr(client, method)(**common, **words))
            return found
        except wrong.ClientError as error:
            self._raise(error, method, absent=absent)
            return None
        except (
            wrong.NoCredentialsError,
            wrong.PartialCredentialsError,
            wrong.CredentialRetrievalError,
            wrong.TokenRetrievalError,
        ) as error:
            raise StoreError(
                f"{self._where}: no credentials: {words_of(error)}", fix=_LOGIN
            ) from error
        except (wrong.UnauthorizedSSOTokenError, wrong.SSOError) as error:
            raise StoreError(
                f"{self._where}: {words_of(error)}", fix="log in again with `aws sso login`"
            ) from error
        except (wrong.ProfileNotFound, wrong.InvalidConfigError) as error:
            raise StoreError(
                f"{self._where}: {words_of(error)}",
                fix="add the profile to ~/.aws/config, or set another `profile` in the store's settings",
            ) from error
        except (
            wrong.EndpointConnectionError,
            wrong.HTTPClientError,
            wrong.ResponseStreamingError,
            wrong.IncompleteReadError,
        ) as error:
            raise Again from error
        except (
            TimeoutError,
            ConnectionError,
            module_of_extra("aiohttp", self.url, "s3").ClientError,
            module_of_extra("botocore.parsers", self.url, "s3").ResponseParserError,
        ) as error:
            raise Again from error
        except wrong.BotoCoreError as error:
            raise StoreError(
                f"{self._where}: {words_of(error)}",
                fix="check the store's settings with `recipe config`",
            ) from error

    def _raise(self, error: Any, method: str, *, absent: bool) -> None:
        """Raise the exception for an error response of the server.

        Returns if the object is missing and `absent` allows that.
        """
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in ("PreconditionFailed", "412") or status == 412:
            raise Exists from error
        if code == "NoSuchBucket":
            raise StoreError(
                f"{self._where}: the bucket does not exist",
                fix="create the bucket, or correct the store's `url`; recipe never creates a bucket",
            ) from error
        if code in _ABSENT:
            if absent:
                return
            raise _Absent(
                f"{self._where}: {method} failed: {words_of(error)}",
                fix="check that the server accepts this object name and that no other program deletes objects",
            ) from error
        if code == "InvalidRange" or status == 416:
            raise Short from error
        if code in ("PermanentRedirect", "301", "IllegalLocationConstraintException"):
            region = (
                error.response.get("ResponseMetadata", {})
                .get("HTTPHeaders", {})
                .get("x-amz-bucket-region", "")
            )
            named = f", {region}" if region else ""
            raise StoreError(
                f"{self._where}: the bucket is in another region{named}",
                fix="set `region` in the store's settings",
            ) from error
        if code in _DENIED or status in (401, 403):
            words = error.response.get("Error", {}).get("Message") or code
            fix = _RIGHTS if code == "AccessDenied" else _LOGIN
            raise StoreError(f"{self._where}: refused ({code}: {words})", fix=fix) from error
        if code in _PASSING or status >= 500 or status in (408, 429):
            raise Again from error
        raise StoreError(
            f"{self._where}: {method} failed: {words_of(error)}",
            fix="check the store's settings with `recipe config`",
        ) from error

    def _run(self, asked: Any) -> Any:
        from fsspec.asyn import sync

        _, system = self._client()
        return sync(system.loop, await_result, asked)

    def _open(self) -> tuple[Any, Any]:
        s3fs = module_of_extra("s3fs", self.url, "s3")
        from fsspec.asyn import sync

        options = client_options("s3", self._settings)
        options["config_kwargs"] |= {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT,
            "read_timeout": TIMEOUT,
            "max_pool_connections": self.width,
        }
        system = s3fs.S3FileSystem(skip_instance_cache=True, **options)
        return sync(
            system.loop, system.set_session
        ), system  # the file system closes the session when it is garbage collected


class _Absent(StoreError):
    """The object or upload does not exist."""


_LOGIN = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, use a profile in ~/.aws, or run `aws sso login`; "
    "`recipe config` shows the store's profile"
)
_RIGHTS = "the login requires s3:ListBucket on the bucket, and s3:GetObject and s3:PutObject below it; `recipe gc --store` also s3:DeleteObject"


def _demand_etag(name: str, answer: Mapping[str, object], md5: str) -> None:
    """Raise Again if the ETag is an MD5 that differs from that of the sent bytes.

    With KMS or customer keys, an ETag is not the MD5 of the plain bytes.
    """
    if answer.get("ServerSideEncryption", "AES256") != "AES256" or answer.get(
        "SSECustomerAlgorithm"
    ):
        return
    etag = _MD5.fullmatch(str(answer.get("ETag", "")))
    if etag and etag[1] != md5:
        raise Again(f"{name} was damaged in transfer: its ETag is {etag[1]}, not {md5}")


async def _drain(body: Any, into: bytearray) -> None:
    async with body as stream:
        while data := await stream.read(1 << 20):
            into += data
