"""Results by their own names in a bucket: what `--out s3://BUCKET/FOLDER` leaves there.

`_RECIPE.json` is written last and says what is beside it.  While it says `"complete": false`, files are still being uploaded; what it lists then is
there already, so an upload that was cut off resumes from there, on any machine.  Nothing is ever deleted.
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
"""Bytes that are uploaded between two notes of what is there: what an upload that is cut off may cost."""
_TOGETHER: Final = 200
"""Files, likewise."""


class File(NamedTuple):
    """A file to upload: its name in the folder, where it is here, its bytes, and their SHA-256 in hex."""

    name: str
    path: str
    size: int
    sha256: str


def upload(
    bucket: Bucket,
    wanted: Sequence[File],
    facts: Mapping[str, object],
    progress: Callable[[int], object],
) -> int:
    """Bring the folder to hold these files and a manifest with `facts`; answers the bytes sent, which `progress` hears of as they go.

    Raises Infrastructure when the bucket does not take them, Corrupt when a file is not what its digest says.
    """
    complete, known = _read_manifest(bucket.read(MANIFEST))
    there = {stat.name: stat.size for stat in bucket.names("")} if known else {}
    missing = [
        each
        for each in wanted
        if known.get(each.name) != (each.size, each.sha256) or there.get(each.name) != each.size
    ]
    missing.sort(key=lambda each: (each.size > PART, each.name))
    changed = {each.name for each in missing}
    held = [each for each in wanted if each.name not in changed]
    if missing and complete:
        bucket.write(MANIFEST, manifest(held, {}, complete=False))
    sent = 0
    while missing:
        batch, missing = _some(missing)
        # A large file has a crew of its own, for its parts.
        for size in Crew(bucket.width if batch[0].size <= PART else 1).map(
            lambda each: _put(bucket, each), batch
        ):
            sent += size
            progress(size)
        held += batch
        if missing:
            bucket.write(MANIFEST, manifest(held, {}, complete=False))
    bucket.write(MANIFEST, manifest(wanted, facts, complete=True))
    return sent


def point(bucket: Bucket, name: str, folder: str, facts: Mapping[str, object]) -> None:
    """Write into the object `name` which folder beside it was uploaded last."""
    listing = {
        "recipe-results": FORMAT,
        "folder": folder,
        "run": facts.get("run"),
        "recipe": facts.get("recipe"),
    }
    bucket.write(name, (json.dumps(listing) + "\n").encode())


def files_at(
    name: str, path: Path, content: str, entries: Callable[[], Sequence[Entry]]
) -> list[File]:
    """The files of an output that is at `path`, under `name`: itself, or all that a tree holds, with links followed.

    A link that leads nowhere, to a folder or out of the tree has no bytes of its own and is left out.
    """
    if content[0] != "t":
        return [File(name, str(path), os.path.getsize(path), content[2:])]
    by_path = {entry.path: entry for entry in entries()}
    found = []
    for entry in by_path.values():
        if entry.kind == "l":
            target = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.value))
            entry = by_path.get(target, entry)._replace(path=entry.path)
        if entry.kind in "fx":
            found.append(
                File(f"{name}/{entry.path}", f"{path}/{entry.path}", entry.size, entry.value)
            )
    return found


def of_path(name: str, path: Path) -> File:
    """A file as it is now.  Raises OSError."""
    data = path.read_bytes()
    return File(name, str(path), len(data), hashlib.sha256(data).hexdigest())


def _put(bucket: Bucket, each: File) -> int:
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


def _damage_error(each: File) -> Corrupt:
    return Corrupt(
        f"{each.path} has changed since the step created it",
        fix="run the step again with `-R STEP`",
    )


def _some(missing: Sequence[File]) -> tuple[list[File], list[File]]:
    """The first few files, of one kind: small or large; and the rest."""
    size = count = 0
    for each in missing:
        if count and (
            size >= _NOTED or count >= _TOGETHER or (each.size > PART) != (missing[0].size > PART)
        ):
            break
        size, count = size + each.size, count + 1
    return list(missing[:count]), list(missing[count:])


def manifest(held: Sequence[File], facts: Mapping[str, object], *, complete: bool) -> bytes:
    """What `_RECIPE.json` says."""
    listed = {each.name: {"size": each.size, "sha256": each.sha256} for each in sorted(held)}
    return (
        json.dumps(
            {"recipe-results": FORMAT, "complete": complete, **facts, "files": listed}, indent=1
        )
        + "\n"
    ).encode()


def _read_manifest(data: bytes | None) -> tuple[bool, dict[str, tuple[int, str]]]:
    """Whether a manifest says that all is there, and the sizes and digests that it lists; nothing of one that is not ours."""
    try:
        parsed = json.loads(data or b"{}")
        listed = {
            str(name): (int(each["size"]), str(each["sha256"]))
            for name, each in parsed.get("files", {}).items()
        }
        return bool(parsed.get("complete")), listed
    except (ValueError, TypeError, KeyError, AttributeError):
        return False, {}
