"""Dataset archives (packs) in a directory: write, read, verify and compare.

`<shard name>.tar` is one shard, as written by `tar.tar_stream`.

`SHA256SUMS` lists the shards for `sha256sum -c`.

`manifest.json` lists the contents. It is written last, so a directory without it is incomplete.

`docs/packs.md` documents the format for other readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...agent.tree_hash import sort_rows
from ...errors import Corrupt, Infrastructure, NotFound
from ..crew import Crew
from .disk import pour
from .files import Content, Entry, Progress, tree_id
from .manifests import unsafe
from .pack import Shard, shard_name, shards
from .tar import END, member_header, member_size, tar_stream

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
_SHARD = re.compile(r"[0-9a-f]{64}\.tar")
_WORKERS = 2
_CHUNK = 1 << 20
_KEYS = re.compile(
    r"(\.env(\..*)?|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|kdbx|ppk|jks)|\.netrc|\.npmrc|\.pypirc|\.htpasswd|\.git-credentials"
    r"|credentials(\.json)?|service[-_]account.*\.json|\.aws|\.ssh|\.gnupg|\.kube|\.git|\.hg|\.svn)"
)
_HARMLESS = re.compile(r"\.env\.(example|sample|template|dist)")


class Pack(NamedTuple):
    """Contents of a dataset archive.

    `sums` are the SHA-256 of the shards' tars.
    """

    content: Content
    manifest: list[Entry]
    shards: list[Shard]
    sums: list[str]


def file_manifest(name: str, content: Content, size: int) -> list[Entry]:
    """Return the manifest of a dataset archive with a single file."""
    return [Entry(name, content[0], size, content[2:])]


def content_of(manifest: Sequence[Entry], kind: str) -> Content:
    """Return the content id of a manifest: of the tree for `kind` t, otherwise of its only file."""
    return tree_id(manifest) if kind == "t" else Content(f"{manifest[0].kind}:{manifest[0].value}")


# -- writing


def write(
    root: str,
    content: Content,
    manifest: Sequence[Entry],
    folder: Path,
    progress: Progress | None = None,
) -> Pack:
    """Write the dataset archive of the file or tree at `root` into `folder`.

    The folder is new, empty, or has an earlier archive. Unchanged shards are kept.

    Raises Changed if a file differs from the manifest, and NotFound if the directory has other
    files.
    """
    cut = shards(manifest)
    before = _earlier(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        sums = _write_shards(root, cut, folder, before, progress)
        for name in os.listdir(folder):
            if name.endswith(".part") or (_SHARD.fullmatch(name) and name[:-4] not in sums):
                os.unlink(folder / name)
        _replace(folder / SUMS, "".join(f"{sums[shard.name]}  {shard.name}.tar\n" for shard in cut))
        _replace(folder / MANIFEST, _json(content, manifest, cut, sums))
    except OSError as error:
        raise Infrastructure(f"{error.filename or folder}: {error.strerror}") from error
    return Pack(content, list(manifest), cut, [sums[shard.name] for shard in cut])


def _earlier(folder: Path) -> dict[str, str]:
    """Return the tar digests of an earlier archive's shards, by shard name."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a directory", fix="choose a new directory")
    foreign = [name for name in os.listdir(folder) if not _is_of_pack(name)]
    if foreign:
        raise NotFound(
            f"{folder} contains other files: {min(foreign)}",
            fix="choose a new or empty directory, or a directory with a pack",
        )
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except (OSError, ValueError):
        return {}
    return {line[66:130]: line[:64] for line in lines if _SHARD.fullmatch(line[66:])}


def _is_of_pack(name: str) -> bool:
    """Return True if a file name is one that `recipe pack` writes, finished or not."""
    if name in (MANIFEST, SUMS) or name.endswith(".tar.part"):
        return True
    return _SHARD.fullmatch(name) is not None


def _write_shards(
    root: str, cut: Sequence[Shard], folder: Path, before: dict[str, str], progress: Progress | None
) -> dict[str, str]:
    """Write the shards, two at a time, and return the SHA-256 of each tar by shard name."""
    crew = Crew(_WORKERS, progress, sum(shard.size for shard in cut))

    def one(shard: Shard) -> tuple[str, str]:
        target = f"{folder}/{shard.name}.tar"
        if shard.name in before and _sum(target, shard.size) == before[shard.name]:
            crew.done(shard.size)
            return shard.name, before[shard.name]
        return shard.name, _write_shard(root, shard, target, crew.done)

    return dict(crew.map(one, cut))


def _write_shard(root: str, shard: Shard, target: str, done: Callable[[int], None]) -> str:
    hasher = hashlib.sha256()
    part = f"{target}.part"
    try:
        with open(part, "wb", buffering=0) as file:
            for data in tar_stream(root, shard.entries, check=True):
                hasher.update(data)
                pour(file.fileno(), data)
                done(len(data))
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return hasher.hexdigest()


def _sum(path: str, size: int) -> str | None:
    """Return the SHA-256 of a file if it has the size `size`; otherwise None."""
    try:
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _json(
    content: Content, manifest: Sequence[Entry], cut: Sequence[Shard], sums: dict[str, str]
) -> str:
    """Format the manifest with one line per shard and entry, for `grep` and `diff`."""
    tars = [
        {
            "name": shard.name,
            "entries": len(shard.entries),
            "size": shard.size,
            "sha256": sums[shard.name],
        }
        for shard in cut
    ]
    head = f'{{"pack": 1,\n"content": {json.dumps(content)},\n"shards": [\n' + ",\n".join(
        map(json.dumps, tars)
    )
    return head + '\n],\n"entries": [\n' + ",\n".join(map(json.dumps, manifest)) + "\n]}\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tar.part")
    temporary.write_text(text, "ascii")
    temporary.replace(path)


# -- reading


def read(folder: Path) -> Pack:
    """Read the manifest of the dataset archive in `folder` and check its consistency.

    Does not open the shards. Raises NotFound, Corrupt.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("pack") != 1:
            raise Corrupt(f"{path}: not a pack manifest, or a format that this version cannot read")
        content = Content(_text(found["content"]))
        manifest = [
            Entry(_text(path), _text(kind), _count(size), _text(value))
            for path, kind, size, value in found["entries"]
        ]
        why = unsafe(manifest)
        if why:
            raise ValueError(why)
        names, sums, cut, first = [], [], [], 0
        for row in found["shards"]:
            count, size = _count(row["entries"]), _count(row["size"])
            members = tuple(manifest[first : first + count])
            first += count
            names.append(_text(row["name"]))
            sums.append(_text(row["sha256"]))
            cut.append(Shard(shard_name(members), members, size))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{folder} is not a pack: {MANIFEST} is missing",
            fix="pass a directory that `recipe pack --out` created",
        ) from None
    except OSError as error:
        raise Infrastructure(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path}: a damaged manifest") from error
    is_whole = _has_content(manifest, content) and first == len(manifest)
    if not is_whole or not _has_shards(cut, names):
        raise Corrupt(f"{path}: the manifest does not match its content ID, {content[:14]}…")
    return Pack(content, manifest, cut, sums)


def _has_content(manifest: list[Entry], content: Content) -> bool:
    """Return True if a manifest is in order and has this content id."""
    kind = content[:1]
    if manifest != sort_rows(list(manifest)):
        return False
    if kind != "t" and (len(manifest) != 1 or kind not in "fx"):
        return False
    return content_of(manifest, kind) == content


def _has_shards(cut: Sequence[Shard], names: Sequence[str]) -> bool:
    """Return True if the shards have these names, and the sizes that their entries give."""
    if names != [shard.name for shard in cut]:
        return False
    return all(shard.size == len(END) + sum(map(member_size, shard.entries)) for shard in cut)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(value)
    return value


def faults(folder: Path, pack: Pack, progress: Progress | None = None) -> Iterator[str]:
    """Yield descriptions of damage in a dataset archive's shards, member by member."""
    total, done = sum(shard.size for shard in pack.shards), 0
    for shard, sha256 in zip(pack.shards, pack.sums, strict=True):
        name = f"{shard.name}.tar"
        try:
            for fault in _shard_faults(folder / name, shard, sha256):
                yield f"{name}: {fault}"
        except FileNotFoundError:
            yield f"{name}: missing"
        except OSError as error:
            yield f"{name}: {error.strerror}"
        done += shard.size
        if progress is not None:
            progress(done, total)
    lines = "".join(
        f"{sha256}  {shard.name}.tar\n"
        for shard, sha256 in zip(pack.shards, pack.sums, strict=True)
    )
    try:
        if (folder / SUMS).read_bytes() != lines.encode():
            yield f"{SUMS}: the list of files differs from {MANIFEST}"
    except OSError as error:
        yield f"{SUMS}: {error.strerror}"


def _shard_faults(path: Path, shard: Shard, sha256: str) -> Iterator[str]:
    """Yield descriptions of damage in one shard. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != shard.size:
            yield f"{found} bytes instead of {shard.size}"
        hasher = hashlib.sha256()
        wrong = list(_find_damage(file, shard, hasher))
        yield from wrong
        if found == shard.size and not wrong and hasher.hexdigest() != sha256:
            yield f"SHA-256 differs from {MANIFEST}"


def _find_damage(file: BinaryIO, shard: Shard, hasher: Any) -> Iterator[str]:
    """Yield descriptions of the damaged members of a shard.

    Member offsets are known, so one damaged member does not hide the next.
    """
    for entry in shard.entries:
        head = member_header(entry)
        data = file.read(len(head))
        hasher.update(data)
        right = data == head
        if entry.kind in "fx":
            member, left = hashlib.sha256(), entry.size
            while left and (data := file.read(min(left, _CHUNK))):
                member.update(data)
                hasher.update(data)
                left -= len(data)
            padding = file.read(-entry.size % 512)
            hasher.update(padding)
            right = right and not left and member.hexdigest() == entry.value and not any(padding)
        if not right:
            yield f"{entry.path!r} is damaged"
    data = file.read(len(END) + 1)
    hasher.update(data)
    if data != END:
        yield "the end of the archive is damaged"


# -- comparing


def differences(before: Iterable[Entry], now: Iterable[Entry]) -> list[tuple[str, str]]:
    """Return the differences between two manifests as pairs of kind and path, in path order.

    Kinds are `missing`, `new`, `changed`, `mode` and `link`.
    """
    old = {entry.path: entry for entry in before}
    new = {entry.path: entry for entry in now}
    found: list[tuple[str, str]] = []
    for path in sorted(
        old.keys() | new.keys(), key=lambda path: path.encode("utf-8", "surrogateescape")
    ):
        was, entry = old.get(path), new.get(path)
        if was is None:
            found.append(("new", path))
        elif entry is None:
            found.append(("missing", path))
        elif was != entry:
            found.append((_kind_of_change(was, entry), path))
    return found


def _kind_of_change(was: Entry, now: Entry) -> str:
    if was.value == now.value and {was.kind, now.kind} == {"f", "x"}:
        return "mode"
    return "link" if was.kind == now.kind == "l" else "changed"


def doubts(manifest: Sequence[Entry]) -> list[str]:
    """Return warnings to show before a dataset is shared.

    These are likely secret files, and names that collide on other file systems.
    """
    found: list[str] = []
    folders = {"": ""}
    secrets: dict[str, None] = {}
    for entry in manifest:
        parent, _, name = entry.path.rpartition("/")
        above = folders.get(parent)
        if above is None:
            above = folders[parent] = _find_secret_folder(parent)
        if above or _is_secret(name):
            secrets[above or entry.path] = None
    found += [f"{path!r} looks like a secret or private file" for path in secrets]
    seen: dict[str, str] = {}
    for path in _every(manifest):
        other = seen.setdefault(_fold_case(path), path)
        if other != path:
            found.append(
                f"{other!r} and {path!r} are the same name on file systems that ignore case or accents"
            )
    return found


def _find_secret_folder(path: str) -> str:
    """Return the topmost directory in a path whose name is secret; "" without one."""
    for folder in _prefixes(path):
        if _is_secret(folder.rpartition("/")[2]):
            return folder
    return ""


def _prefixes(path: str) -> Iterator[str]:
    """Return all parent prefixes of a directory path, from the top."""
    parts = path.split("/")
    return ("/".join(parts[: n + 1]) for n in range(len(parts)))


def _is_secret(name: str) -> bool:
    return _KEYS.fullmatch(name) is not None and _HARMLESS.fullmatch(name) is None


def _every(manifest: Sequence[Entry]) -> Iterator[str]:
    """Yield every path in a manifest once, including parent directories."""
    folders: set[str] = set()
    for entry in manifest:
        yield entry.path
        parent = entry.path.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            yield parent
            parent = parent.rpartition("/")[0]


def _fold_case(path: str) -> str:
    if path.isascii():
        return path.lower()

    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
