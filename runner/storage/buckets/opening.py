"""Opening of the bucket or directory of a store URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import Invalid, Problem
from .bucket import Bucket
from .folder import FolderBucket
from .google import Google
from .s3 import S3

if TYPE_CHECKING:
    from ...settings import StoreSettings


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
"""Pattern for a bucket name."""


def open(store: StoreSettings, root: Path) -> Bucket:
    """Return the bucket or directory of a store without contacting it.

    Relative directories are below `root`. Raises Invalid for an unsupported URL.
    """
    url = store.url
    if "::" in url:
        raise Invalid(
            [
                Problem(
                    "bad-store",
                    f"{url}: chained URLs are not supported",
                    fix="use the bucket's own URL",
                )
            ]
        )
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else url).expanduser()
        return FolderBucket(os.path.normpath(root / folder))
    if scheme not in ("s3", "gs"):
        raise Invalid(
            [
                Problem(
                    "bad-store",
                    f"{url}: unsupported kind of store",
                    fix="use s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a directory",
                )
            ]
        )
    name, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _NAME.fullmatch(name) or not _is_plain_prefix(prefix):
        raise Invalid(
            [
                Problem(
                    "bad-store", f"{url} has no bucket name", fix=f"write {scheme}://BUCKET/FOLDER"
                )
            ]
        )
    head = f"{prefix}/" if prefix else ""
    if scheme == "s3":
        return S3(f"s3://{name}/{prefix}".rstrip("/"), name, head, store)
    return Google(f"gs://{name}/{prefix}".rstrip("/"), name, head, store)


def _is_plain_prefix(prefix: str) -> bool:
    """Return True if the prefix of a bucket URL is empty or a path without `.` and `..`."""
    if not prefix:
        return True
    return all(part not in (".", "..", "") for part in prefix.split("/"))
