"""Upload of results to a bucket under their own names (`--out s3://BUCKET/FOLDER`).

`_RECIPE.json` lists the uploaded files and is written last. While it says `"complete": false`, the
upload continues, and the listed files are complete, so an interrupted upload resumes on any
machine. Nothing is ever deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import Corrupt, Infrastructure
from ..content import files
from ..content.files import Entry
from ..crew import Crew
from .bucket import PART, Bucket

MANIFEST: Final = "_RECIPE.json"
FORMAT: Final = 1
_NOTED: Final = 256 << 20
"""Maximum bytes between two updates of the manifest, which an interrupted upload repeats."""
_TOGETHER: Final = 200
"""Maximum number of files between two updates of the manifest."""


class UploadFile(NamedTuple):
    """File to upload: name in the bucket's directory, local path, size in bytes, and SHA-256."""

    name: str
    path: str
    size: int
    sha256: str


def upload(
    bucket: Bucket,
    wanted: Sequence[UploadFile],
    facts: Mapping[str, object],
    progress: Callable[[int], object],
) -> int:
    """Upload missing files and a manifest with `facts`, and return the number of sent bytes.

    `progress` receives the bytes of each file.

    Raises Infrastructure if the bucket rejects the files, and Corrupt if a file has changed.
    """
    complete, known = _read_manifest(bucket.read(MANIFEST))
    missing = _find_missing(bucket, wanted, known)
    missing.sort(key=lambda each: (each.size > PART, each.name))
    changed = {each.name for each in missing}
    held = [each for each in wanted if each.name not in changed]
    if missing and complete:
        bucket.write(MANIFEST, manifest(held, {}, complete=False))
    sent = 0
    while missing:
        batch, missing = _some(missing)
        # A large file uses parallel parts, so large files are sent one by one.
        width = bucket.width if batch[0].size <= PART else 1
        for size in Crew(width).map(lambda each: _put(bucket, each), batch):
            sent += size
            progress(size)
        held += batch
        if missing:
            bucket.write(MANIFEST, manifest(held, {}, complete=False))
    bucket.write(MANIFEST, manifest(wanted, facts, complete=True))
    return sent


def _find_missing(
    bucket: Bucket, wanted: Sequence[UploadFile], known: Mapping[str, tuple[int, str]]
) -> list[UploadFile]:
    """Return the files that the bucket lacks, or that its manifest `known` does not list."""
    there: dict[str, int] = {}
    if known:
        there = {stat.name: stat.size for stat in bucket.names("")}
    missing = []
    for each in wanted:
        is_noted = known.get(each.name) == (each.size, each.sha256)
        if not is_noted or there.get(each.name) != each.size:
            missing.append(each)
    return missing


def point(bucket: Bucket, name: str, folder: str, facts: Mapping[str, object]) -> None:
    """Write the name of the latest results directory into the object `name`."""
    listing = {
        "recipe-results": FORMAT,
        "folder": folder,
        "run": facts.get("run"),
        "recipe": facts.get("recipe"),
    }
    bucket.write(name, (json.dumps(listing) + "\n").encode())


def files_at(
    name: str, path: Path, content: str, entries: Callable[[], Sequence[Entry]]
) -> list[UploadFile]:
    """Return the files of an output as upload entries below `name`, with links resolved.

    Links to missing files, to directories or out of the tree are omitted.
    """
    if content[0] != "t":
        return [UploadFile(name, str(path), os.path.getsize(path), content[2:])]
    by_path = {entry.path: entry for entry in entries()}
    found = []
    for entry in by_path.values():
        if entry.kind == "l":
            target = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.value))
            entry = by_path.get(target, entry)._replace(path=entry.path)
        if entry.kind in "fx":
            found.append(
                UploadFile(f"{name}/{entry.path}", f"{path}/{entry.path}", entry.size, entry.value)
            )
    return found


def of_path(name: str, path: Path) -> UploadFile:
    """Return a local file as an upload entry with its current digest.

    Raises OSError.
    """
    data = path.read_bytes()
    return UploadFile(name, str(path), len(data), hashlib.sha256(data).hexdigest())


def _put(bucket: Bucket, each: UploadFile) -> int:
    try:
        if each.size <= PART:
            data = Path(each.path).read_bytes()
            if hashlib.sha256(data).hexdigest() != each.sha256:
                raise _damage_error(each)
            bucket.write(each.name, data)
        else:
            if files.scan(each.path)[2:] != each.sha256:
                raise _damage_error(each)
            bucket.write_file(each.name, each.path, each.size, Crew(bucket.width).map)
    except OSError as error:
        raise Infrastructure(f"cannot read {each.path}: {error.strerror}") from error
    return each.size


def _damage_error(each: UploadFile) -> Corrupt:
    return Corrupt(
        f"{each.path} has changed since the step created it",
        fix="run the step again with `-R STEP`",
    )


def _some(missing: Sequence[UploadFile]) -> tuple[list[UploadFile], list[UploadFile]]:
    """Split off the next batch of files to upload, which are all small or all large."""
    size = count = 0
    for each in missing:
        if count and (
            size >= _NOTED or count >= _TOGETHER or (each.size > PART) != (missing[0].size > PART)
        ):
            break
        size, count = size + each.size, count + 1
    return list(missing[:count]), list(missing[count:])


def manifest(held: Sequence[UploadFile], facts: Mapping[str, object], *, complete: bool) -> bytes:
    """Return the content of `_RECIPE.json` for the uploaded files."""
    listed = {each.name: {"size": each.size, "sha256": each.sha256} for each in sorted(held)}
    return (
        json.dumps(
            {"recipe-results": FORMAT, "complete": complete, **facts, "files": listed}, indent=1
        )
        + "\n"
    ).encode()


def _read_manifest(data: bytes | None) -> tuple[bool, dict[str, tuple[int, str]]]:
    """Parse `_RECIPE.json`: completeness of the upload, and size and digest of each file.

    An invalid manifest counts as empty.
    """
    try:
        parsed = json.loads(data or b"{}")
        listed = {
            str(name): (int(each["size"]), str(each["sha256"]))
            for name, each in parsed.get("files", {}).items()
        }
        return bool(parsed.get("complete")), listed
    except (ValueError, TypeError, KeyError, AttributeError):
        return False, {}
