"""Remote models and datasets: resolve a URL to an identity, and download it.

A moving revision is resolved once and stored in the workspace's `recipe.lock` (JSON, address to
identity), so that a no-op run needs no network. On the Hugging Face Hub, the identity is the
commit. For a bucket, the identity is a digest of the path, size and version or ETag of every
object. For https, the identity is derived from the ETag or from length and date. A file without any
of these cannot be an input, because no change of it could be noticed. Buckets and https servers do
not serve earlier content, so a download is valid only if the identity is the same before and after.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivers import install_line

from ..digest import of_value
from ..errors import CannotRun
from ..paths import heads, temporary_name
from ..planning.secret_values import secrets_of_addresses
from ..reading import parse_json, whole
from ..secrets import Masker
from .bound import DownloadLimit
from .buckets.bucket import client_options
from .buckets.hub import offline
from .content.digest_cache import DigestCache
from .content.disk import delete
from .workspace import Workspace

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem

LONGEST_NAME = 255
"""Maximum length of a file name in bytes."""
ORIGIN = ".origin.json"
_CARD = "README.md"  # contains the license
_CLOSED = (400, 401, 403)  # statuses for an expired signature
_VERSION_FIELDS = ("VersionId", "ETag", "etag", "generation", "mtime", "LastModified", "updated")
"""Fields of a client's file information that identify a version, the most exact one first."""
_RANGE = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]+)")
_EMPTY = 416
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ForbiddenAddress(CannotRun):
    """An address that a run may not read.

    Its signature has expired, or the server's `allow` list excludes it.
    """


def resolve(ws: Workspace, kind: str, address: str, *, update: bool) -> str | None:
    """Return the identity of a remote input, such as a commit; None if it cannot be resolved now.

    The reason may be no network, or a client that is not installed.
    """
    if kind == "hf":
        _, revision = _split_hub_address(address)
        if _COMMIT.fullmatch(revision):
            return f"{kind}:{revision}"
    if kind == "stream" and not update and "://" not in address:
        return f"name:{address}"
    known = read_lock(ws)
    if not update and _is_resolved(ws, address, known):
        return known[address]
    try:
        identity = ask_identity(ws, kind, address)
    except ForbiddenAddress:
        raise
    except CannotRun:
        return None  # planning continues without the identity; the run reports the error
    # A query may also select one of many files.
    if not update and known.get(address, identity) != identity:
        raise changed_error(address)
    known[address] = identity
    if not ws.read_only:
        ws.write(
            ws.root / "recipe.lock",
            (json.dumps(dict(sorted(known.items())), indent=2) + "\n").encode(),
        )
        if address in ws.addresses:
            ws.write(_marker_path(ws, address, identity), b"")
    return identity


def _is_resolved(ws: Workspace, address: str, known: Mapping[str, str]) -> bool:
    """Return True if `recipe.lock` has the identity, asked with the current credentials."""
    if address not in known:
        return False
    return address not in ws.addresses or _marker_path(ws, address, known[address]).exists()


def _marker_path(ws: Workspace, address: str, identity: str) -> Path:
    """Return the marker file of a resolved identity.

    The file records the identity for the address with its current credentials.
    """
    return ws.home / "cache" / f"asked-{of_value('asked', [ws.addresses[address], identity])[:32]}"


def ask_identity(ws: Workspace, kind: str, address: str) -> str:
    """Ask the server for the current identity of an input, ignoring `recipe.lock`.

    Raises CannotRun.
    """
    if kind == "hf" and _COMMIT.fullmatch(_split_hub_address(address)[1]):
        return f"hf:{_split_hub_address(address)[1]}"
    try:
        return _ask_hub(address) if kind == "hf" else _ask_store(ws, address)
    except CannotRun:
        raise
    except Exception as error:  # each client has its own connection errors
        raise _convert_error(ws, f"cannot read {address}", error, address) from None


def match_files(folder: str, only: Sequence[str]) -> list[str]:
    """List the files below a directory that match any of the globs, sorted.

    As on the Hub, `*` also matches `/`.
    """
    wanted = []
    for at, _, files in os.walk(folder, followlinks=True):
        for file in files:
            name = os.path.relpath(os.path.join(at, file), folder)
            if _wants(only, name):
                wanted.append(name)
    return sorted(wanted)


def identify_files(
    cache: DigestCache, folder: str, only: Sequence[str]
) -> tuple[str, dict[str, str | None]]:
    """Return the identity of the matching files in a directory, and the content id of each."""
    names = match_files(folder, only)
    contents = cache.contents(f"{folder}/{name}" for name in names)
    found: dict[str, str | None] = {name: contents[f"{folder}/{name}"] for name in names}
    return of_value("only/1", [[name, content] for name, content in found.items()]), found


def _wants(only: Sequence[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in only)


def fetch(ws: Workspace, kind: str, address: str, identity: str, only: Sequence[str]) -> Path:
    """Download a resolved remote input to the cache, and return the local path.

    Files in the Hub's own cache are hard-linked if possible. Raises CannotRun.
    """
    target = cache_path(ws, address, identity, only)
    try:
        if not target.exists():
            if kind == "hf":
                _download_hub(ws, address, identity.partition(":")[2], target, only)
            else:
                _download(ws, address, identity, target, only)
        os.utime(target.parent)  # last use, read by `recipe gc`
        return target
    except CannotRun:
        raise
    except Exception as error:
        raise _convert_error(ws, f"cannot download {address}", error, address) from None


def cache_path(ws: Workspace, address: str, identity: str, only: Sequence[str]) -> Path:
    """Return the cache path of a resolved remote input.

    The path may not exist.
    """
    folder = ws.home / "cache" / of_value("address", [address, identity, *only])[:32]
    return folder / (os.path.basename(address.rstrip("/").partition("?")[0]) or "data")


def _convert_error(ws: Workspace, what: str, error: Exception, address: str) -> CannotRun:
    """Convert a client's error to CannotRun, with secrets masked.

    Clients quote the full address with its credentials.
    """
    status = getattr(error, "status", 0)
    if address in ws.addresses and status in _CLOSED:
        return ForbiddenAddress(
            f"expired input: the server answered {address} with {status}",
            fix="submit the run again with a newly signed URL",
        )
    # The https client is part of the s3 extra.
    extra = {"hf": "hub", "gs": "gcs"}.get(address.partition("://")[0], "s3")
    fix = install_line(extra) if isinstance(error, ImportError) else ""
    masker = Masker(secrets_of_addresses(ws.addresses.values()))
    return CannotRun(f"{what}: {masker.text(_error_text(error))}", fix=fix)


def changed_error(address: str) -> CannotRun:
    return CannotRun(
        f"{address} has changed since it was resolved",
        fix="accept the new version with `recipe run --update`",
    )


def _error_text(error: Exception) -> str:
    """Return the first line of a client's error, or the error's name if its text is empty."""
    if isinstance(error, FileNotFoundError):
        if error.__cause__ is None:
            return "the object does not exist"
        # fsspec also raises FileNotFoundError for an unreachable https server.
        if isinstance(error.__cause__, Exception):
            error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__


def read_lock(ws: Workspace) -> dict[str, str]:
    """Read the resolved identities in `recipe.lock`, by address.

    Raises CannotRun for invalid content.
    """
    path = ws.root / "recipe.lock"
    try:
        known = parse_json(whole(path))
        if not isinstance(known, dict) or not all(
            isinstance(identity, str) for identity in known.values()
        ):
            raise ValueError("not a mapping of addresses to identities")
        return known
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise CannotRun(
            f"cannot read {path}: {why}",
            fix="restore the file from version control, or delete it to resolve all addresses again",
        ) from error


def _split_hub_address(address: str) -> tuple[str, str]:
    name, _, revision = address.removeprefix("hf://").removeprefix("datasets/").partition("@")
    return name, revision or "main"


def _ask_hub(address: str) -> str:
    if offline(os.environ):
        raise ConnectionError("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi

    name, revision = _split_hub_address(address)
    info: Any = HfApi().repo_info(
        name,
        revision=revision,
        repo_type="dataset" if address.startswith("hf://datasets/") else "model",
    )
    return f"hf:{info.sha}"


def open_client(ws: Workspace, address: str) -> tuple[Any, str]:
    """Return the fsspec client for a URL, and the path in that client.

    Buckets of a configured store use that store's options. Allowed https hosts cannot redirect to
    other hosts.
    """
    import fsspec

    from .reach import Reach

    store = ws.config.store_of(address) if address.startswith(("s3:", "gs:")) else None
    options: Mapping[str, object] = {}
    reach = ws.reach or Reach(ws.config.lists.get("data.allow", ()))
    if ws.reach is not None and not reach.allows(address):
        words = f"the host or bucket of {address} is not in `allow` under [data] of the server"
        raise ForbiddenAddress(
            words, fix="add it to `allow` in the server's recipe.toml, then submit the run again"
        )
    if address.startswith("https:") and reach.allows(address):
        options = {"get_client": reach.session, "skip_instance_cache": True}
    if store is not None:
        options = client_options(address[:2], store)
    client, name = fsspec.core.url_to_fs(ws.addresses.get(address, address), **options)
    return client, name


class Object(NamedTuple):
    """Remote file of a bucket or https input."""

    name: str
    size: int | None
    version: str
    """Version of the content by the server, in S3 the ETag in double quotes."""


def objects_at(ws: Workspace, address: str) -> list[Object]:
    """List the current files at a bucket or https URL."""
    store, path = open_client(ws, address)
    if address.startswith("https:"):
        # An https address is one file. fsspec would read the page and follow its links.
        return [first_byte(store, path, address)]
    found: dict[str, Any] = store.find(path, detail=True) or {path: store.info(path)}
    if path not in found and "/" in path and not address.endswith("/"):
        _demand_no_object(store, path, address)
    return [_bucket_object(address, name, info) for name, info in sorted(found.items())]


def _bucket_object(address: str, name: str, info: Mapping[str, Any]) -> Object:
    """Return an object by a client's file information. Raises CannotRun without a version."""
    size = info.get("size")
    version = next((info[field] for field in _VERSION_FIELDS if info.get(field)), None)
    if not version and size != 0:
        raise _unversioned_error(address)
    return Object(name, size, str(version))


def _unversioned_error(address: str) -> CannotRun:
    """Return the error for a file of which no change could be noticed.

    An empty file needs no version: its size says all.
    """
    return CannotRun(
        f"{address} has no version: the server sends neither an ETag nor a date of modification",
        fix="download the data, and use the path of the copy as the input",
    )


def _demand_no_object(store: Any, path: str, address: str) -> None:
    """Raise CannotRun if a bucket URL is a prefix and also an object."""
    store.invalidate_cache()
    try:
        kind = store.info(path)["type"]
    except PermissionError:
        return  # credentials that can read only the objects below the prefix
    if kind == "file":
        raise CannotRun(
            f"{address} is ambiguous: an object, and also a prefix of other objects",
            fix=f"write {address}/ for the objects below it; to use the object itself, copy it to another key",
        )


def first_byte(store: HTTPFileSystem, path: str, name: str) -> Object:
    """Read the metadata of an https file by requesting its first byte.

    A presigned URL allows only GET.

    Raises CannotRun for a file without a version, and the client's errors.
    `aiohttp.ClientResponseError` has the `status`.
    """
    from fsspec.asyn import sync

    async def ask() -> Object:
        session = await store.set_session()
        async with session.get(
            store.encode_url(path), headers={"Range": "bytes=0-0", "Accept-Encoding": "identity"}
        ) as answer:
            if answer.status != _EMPTY:
                answer.raise_for_status()
            headers = answer.headers
            size = _whole_size(answer.status, headers)
            version = headers.get("ETag") or headers.get("Last-Modified")
            # A file without a first byte is empty, even if the server does not send its size.
            is_empty = size == 0 or answer.status == _EMPTY
            if not version and not is_empty:
                raise _unversioned_error(name)
            return Object(name, size, str(version))

    found: Object = sync(store.loop, ask)
    return found


def _whole_size(status: int, headers: Mapping[str, str]) -> int | None:
    """Return the size of the file in bytes from the response to a range request, or None."""
    whole = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if whole:
        return int(whole[1])
    # Without a range, the length is that of the response, which may be compressed.
    if status != 200 or headers.get("Content-Encoding"):
        return None
    length = headers.get("Content-Length")
    return int(length) if length is not None else None


def identity_of(there: Sequence[Object]) -> str:
    return f"etag:{of_value('bucket/1', [list(each) for each in there])}"


def _ask_store(ws: Workspace, address: str) -> str:
    return identity_of(objects_at(ws, address))


def _download_hub(
    ws: Workspace, address: str, revision: str, target: Path, only: Sequence[str]
) -> None:
    """Download a Hub snapshot as regular files instead of links into the Hub's cache.

    A model gets an origin file with its repository and revision, so that models trained from it can
    name their base.
    """
    from huggingface_hub import snapshot_download

    name, _ = _split_hub_address(address)
    model = not address.startswith("hf://datasets/")
    kind = "model" if model else "dataset"
    patterns = list(only) or None
    if patterns is not None and model:
        patterns.append(_CARD)
    size = _hub_size(name, revision, kind, patterns)
    DownloadLimit.of(ws, address).check(size)
    snapshot = snapshot_download(name, revision=revision, repo_type=kind, allow_patterns=patterns)
    partial = target.with_name(temporary_name(target.name, "part"))
    try:
        partial.mkdir(parents=True)
        if model:
            (partial / ORIGIN).write_text(json.dumps({"repo": name, "revision": revision}) + "\n")
        _link_snapshot(snapshot, partial)
        partial.rename(target)
    finally:
        delete(partial)


def _hub_size(name: str, revision: str, kind: str, patterns: Sequence[str] | None) -> int:
    """Return the size of the selected files of a Hub repository in bytes; 0 if it is unknown."""
    from huggingface_hub import HfApi

    try:
        info: Any = HfApi().repo_info(name, revision=revision, repo_type=kind, files_metadata=True)
        size = 0
        for each in info.siblings:
            if patterns is None or _wants(patterns, each.rfilename):
                size += each.size or 0
        return size
    # any client error: offline, the snapshot comes from the Hub's cache, or its download fails
    except Exception:
        return 0


def _link_snapshot(snapshot: str, target: Path) -> None:
    """Make the files of a Hub snapshot in the directory `target`, as hard links if possible."""
    for at, _, names in os.walk(snapshot):
        below = target / os.path.relpath(at, snapshot)
        below.mkdir(exist_ok=True)
        for file in names:
            source = os.path.realpath(f"{at}/{file}")
            try:
                os.link(source, below / file)
            except OSError:  # another file system, or no hard link support
                shutil.copyfile(source, below / file)


def select_objects(
    ws: Workspace, address: str, identity: str, only: Sequence[str]
) -> tuple[bool, list[Object]]:
    """Return whether a resolved remote input is a directory, and its selected files.

    Raises CannotRun if the input changed.
    """
    there = objects_at(ws, address)
    if identity_of(there) != identity:
        raise changed_error(address)
    _, path = open_client(ws, address)
    folder = [each.name for each in there] not in ([path], [address])
    if not only or not folder:
        return folder, there
    return folder, [each for each in there if _wants(only, below(path, each))]


def below(path: str, file: Object) -> str:
    """Return the path of a remote file relative to the client's directory `path`."""
    return file.name[len(path.rstrip("/")) + 1 :]


def list_prefix_files(address: str, path: str, there: Sequence[Object]) -> dict[str, Object]:
    """Return the files of a bucket prefix by relative path.

    Empty keys that end in a slash are directory markers.

    Raises CannotRun for keys that cannot be files of one directory.
    """
    files: dict[str, Object] = {}
    for each in there:
        name = below(path, each)
        if not _is_marker(name, each):
            files[name] = each
    faults = _name_faults(files)
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CannotRun(
            f"{address} has keys that cannot be file names in one directory: {'; '.join(faults[:3])}{more}",
            fix="copy these objects to other keys, or exclude them with the input's `only`",
        )
    return files


def _is_marker(name: str, file: Object) -> bool:
    """Return True for the marker of the bucket prefix, or of a directory below the prefix."""
    return not name or (name.endswith("/") and not file.size)


def _name_faults(names: Collection[str]) -> list[str]:
    """Describe the bucket keys that cannot be file names in one directory."""
    folders: set[str] = set()
    for name in names:
        folders.update(heads(name)[1:])
    faults = []
    for name in sorted(names):
        why = _why_no_file(name, folders)
        if why:
            faults.append(f"{json.dumps(name)} {why}")
    return faults


def _why_no_file(name: str, folders: Collection[str]) -> str:
    """Explain why a bucket key cannot be a file name in the directory; return "" if it can."""
    parts = name.split("/")
    if name in folders:
        return "is both an object and a prefix of other objects"
    if "" in parts:
        return "contains an empty name (//, or / at the end)"
    if {".", ".."} & {*parts}:
        return 'contains "." or ".."'
    if "\0" in name or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
        return f"contains a name over {LONGEST_NAME} bytes, or a NUL"
    return ""


def _download(
    ws: Workspace, address: str, identity: str, target: Path, only: Sequence[str]
) -> None:
    partial = target.with_name(temporary_name(target.name, "part"))
    target.parent.mkdir(parents=True, exist_ok=True)
    store, path = open_client(ws, address)
    folder, wants = select_objects(ws, address, identity, only)
    bound = DownloadLimit.of(ws, address)
    bound.check(sum(each.size or 0 for each in wants))
    counted = bound.counter()
    try:
        if folder:
            partial.mkdir()
            files = list_prefix_files(address, path, wants)
            if not files and not only:
                raise FileNotFoundError(path)
            targets = {str(partial / name): each for name, each in files.items()}
            if targets:
                there = [each.name for each in targets.values()]
                store.get(there, list(targets), callback=counted)
            _demand_all(partial, targets)
        else:
            store.get_file(path, str(partial), callback=counted)
        store.invalidate_cache()
        if _ask_store(ws, address) != identity:
            raise changed_error(address)
        partial.rename(target)
    finally:
        delete(partial)


def _demand_all(folder: Path, targets: Mapping[str, Object]) -> None:
    """Raise CannotRun if the downloaded files differ from the bucket's objects.

    A file system may treat two keys as one name.
    """
    arrived: set[str] = set()
    for at, _, names in os.walk(folder):
        arrived.update(os.path.join(at, name) for name in names)
    short = []
    for path, each in targets.items():
        if path not in arrived or each.size not in (None, os.path.getsize(path)):
            short.append(path)
    if short or len(arrived) != len(targets):
        some = ", ".join(sorted(short)[:3]) or "two keys have the same file name on this disk"
        raise CannotRun(
            f"{len(targets)} objects became {len(arrived)} files: {some}",
            fix="copy these objects to other keys, or exclude them with the input's `only`",
        )
