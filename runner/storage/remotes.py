"""Keep contents and traces where several machines reach them: a bucket or a folder.  Knows names and bytes, not steps, plans or when to ask.

Below the store's URL, with the names of the local store:

    objects/ab/<sha256>[.x]       the bytes of a plain or executable file
    objects/ab/<sha256>.t.json    the manifest of a tree
    objects/ab/<sha256>.t.parts   which objects its files are in: large ones each in its own, small ones laid end to end in bundles
    states/ab/<state key>.json    the newest checkpoint of a state: see `remote_states`
    traces/ab/<key>.json          "this key gave these outputs"; the first one stays
    recipe-store.json             the format; unreferenced.json: what a gc has seen nobody need

Everything is written in this order: files and bundles, parts, manifest, trace; so whatever a kill leaves is whole or not there.  Nothing that is read
is believed: every byte is hashed before it gets its name here, paths of a manifest may not leave their tree, and names in a listing that are not ours
are not there.  An object's age tells collectors and writers from each other: see `Remote.collect`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from .. import digest
from ..errors import Corrupt, Infrastructure, Unusable
from . import files
from .bucket import crew, lock
from .crash import crashpoint
from .disk import delete
from .files import Content, Entry
from .index import Made, Trace

if TYPE_CHECKING:
    from .bucket import Bucket, Stat
    from .objects import Objects

FORMAT: Final = 1
SMALL: Final = 256 << 10
"""Files of a tree up to this size travel in bundles: bytes."""
BUNDLE: Final = 4 << 20
"""A bundle ends after this many bytes, at the next file whose digest says so, ..."""
BUNDLE_MOST: Final = 16 << 20
"""... or at the latest here."""
PART: Final = 16 << 20
"""What one request for a large object carries: bytes."""
WIDTH: Final = 32
"""Requests in flight."""
MANY: Final = 256
"""More keys than this are looked for by listing."""
GRACE: Final = 86_400.0
"""Seconds that an object stays after a collector has first seen that nobody needs it."""

_MARKER = "recipe-store.json"
_UNREFERENCED = "unreferenced.json"
_OBJECT = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})(|\.x|\.t\.json|\.t\.parts)")
_NOTE = re.compile(r"states/([0-9a-f]{2})/(\1[0-9a-f]{30})\.json")
_TRACE = re.compile(r"traces/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")
_HEX = re.compile(r"[0-9a-f]{64}")
_A = TypeVar("_A")
_B = TypeVar("_B")


class Gone(Corrupt):
    """A content that was told of is not in the store, or its bytes are not what its name says."""


class Source(Protocol):
    """Where contents lie that are put into a store."""

    def path(self, content: Content) -> Path: ...
    def entries(self, content: Content) -> list[Entry]: ...
    def size(self, content: Content) -> int: ...


class Found(NamedTuple):
    """A trace of the store, and the bytes of each of its outputs by name."""

    trace: Trace
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Garbage:
    """What a collection would do.  `waiting` are objects that nobody needs, but that were not seen so for long enough."""

    traces: tuple[str, ...]
    objects: tuple[str, ...]
    size: int
    waiting: int
    uploads: int


class Remote:
    """One store.  Made of what `buckets.open` gives; its methods may be called from several threads."""

    def __init__(self, bucket: Bucket, *, now: Callable[[], float] = time.time) -> None:
        self._bucket = bucket
        self._now = now
        self._checked = False
        self._known: dict[str, int] = {}  # contents that were seen to be there, and their bytes
        self._bad: set[str] = set()  # names whose bytes were wrong: their presence proves nothing
        self._counting = lock()
        self.sent = 0  # bytes of content, so far
        self.received = 0

    @property
    def url(self) -> str:
        return self._bucket.url

    # -- asking

    def check(self) -> None:
        """Raise Infrastructure with what to do when the store cannot be used: no bucket, no permission, no network, a newer format."""
        if self._checked:
            return
        data = self._bucket.check(_MARKER)
        if data is not None:
            try:
                version = json.loads(data)["recipe-store"]
            except (ValueError, KeyError, TypeError) as error:
                raise Unusable(f"{self.url}/{_MARKER} is not what this program writes", fix="give the store a folder of its own") from error
            if not isinstance(version, int) or version > FORMAT:
                raise Unusable(f"{self.url}: format {version} is newer than this program's", fix="install a newer version of recipe")
        self._checked = True

    def address(self, content: Content) -> str:
        """The object that holds a content, or that says which do."""
        return f"{self.url}/{_name(content)}"

    def lookup(self, keys: Iterable[str], *, patience: float | None = None) -> dict[str, Found]:
        """The traces of those keys that have one; a damaged one is none.  Raises Infrastructure after `patience` seconds."""
        wanted = list(dict.fromkeys(keys))
        deadline = self._begin(patience)
        if len(wanted) > MANY:
            there = {stat.name for part in self._map(self._listed, sorted({f"traces/{key[:2]}/" for key in wanted}), deadline) for stat in part}
            wanted = [key for key in wanted if _trace_name(key) in there]
        found = self._map(self._trace, wanted, deadline)
        return {key: one for key, one in zip(wanted, found, strict=True) if one is not None}

    def holds(self, contents: Iterable[Content], *, patience: float | None = None) -> set[Content]:
        """Which of `contents` are there, by their names."""
        wanted = list(dict.fromkeys(contents))
        deadline = self._begin(patience)
        missing = [content for content in wanted if content not in self._known]
        for content, stat in zip(missing, self._map(lambda c: self._bucket.head(_name(c)), missing, deadline), strict=True):
            if stat is not None and _name(content) not in self._bad:
                self._known[content] = stat.size
        return {content for content in wanted if content in self._known}

    # -- putting

    def put(self, content: Content, objects: Source) -> int:
        """Send a content that the local store holds, as far as it is not there; answers the bytes sent.  Raises Corrupt, Infrastructure.

        What is sent is hashed first, whatever the local store believes of it.
        """
        self.check()
        before = self.sent
        try:
            if content[0] == "t":
                if not self._there(_name(content)):
                    self._put_tree(content, objects)
            else:
                path = str(objects.path(content))
                self._put_file(_name(content), path, os.path.getsize(path), content[2:])
        except FileNotFoundError as error:
            raise Corrupt(f"{error.filename} is not stored here any more", fix="run again: the step that makes it will be run") from error
        except OSError as error:
            raise Infrastructure(f"{error.filename or objects.path(content)}: {error.strerror}") from error
        self._known[content] = objects.size(content)
        return self.sent - before

    def tell(self, trace: Trace, sizes: Mapping[str, int]) -> Trace:
        """Say what a key gave; its outputs must be there.  Answers the trace that stands: another's, if that was first and is sound."""
        self.check()
        name = _trace_name(trace.key)
        data = _trace_text(trace, sizes)
        crashpoint("remote-trace")
        if self._bucket.create(name, data):
            return trace
        first = self._trace(trace.key)
        if first is not None and not any(_name(made.content) in self._bad for made in first.trace.outputs):
            return first.trace
        self._bucket.write(name, data)
        return trace

    def mark(self) -> None:
        """Say in the store what it is, if nobody has; and end uploads that somebody began long ago and never ended."""
        self.check()
        self._bucket.create(_MARKER, json.dumps({"recipe-store": FORMAT}).encode())
        self._bucket.abandon(self._now() - GRACE)

    def write_note(self, key: str, data: bytes) -> None:
        """Say which checkpoint a state has: see `remote_states`."""
        self._bucket.write(_note_name(key), data)

    def read_note(self, key: str) -> bytes | None:
        return self._bucket.read(_note_name(key))

    # -- getting

    def fetch(self, content: Content, objects: Objects) -> int:
        """Bring a content into the local store, verified; answers its bytes.  Raises Gone when it is not there or not what its name says."""
        self.check()
        temporary = objects.disk.temporary()
        before = self.received
        try:
            if content[0] == "t":
                self._get_tree(content, temporary)
            else:
                stat = self._bucket.head(_name(content))
                if stat is None:
                    raise self._gone(_name(content), "is not there")
                self._get_file(_name(content), temporary, stat.size, content[2:])
                if content[0] == "x":
                    os.chmod(temporary, 0o755)  # noqa: S103  (what an executable output is; the umask had its say when it was put away)
            objects.put(Path(temporary), content, move=True)
        except OSError as error:
            raise _disk(error, temporary) from error
        except Gone:
            self._known.pop(content, None)
            self._bad.add(_name(content))  # a tree of which something is missing is written anew as a whole
            raise
        finally:
            delete(Path(temporary))
        return self.received - before

    def manifest(self, content: Content) -> list[Entry]:
        """What a tree holds, without its files.  Raises Gone."""
        self.check()
        name = _name(content)
        text = self._bucket.read(name)
        if text is None:
            raise self._gone(name, "is not there")
        return self._entries(name, content, text)

    # -- throwing away

    def garbage(self, *, keep_days: float) -> Garbage:
        """What `collect` would do now."""
        return self._collect(keep_days, dry=True)

    def collect(self, *, keep_days: float) -> Garbage:
        """Delete traces older than `keep_days`, and objects that no trace has needed for a day.

        An object goes only when a collection has seen it unneeded, it was not written since, and `GRACE` later another finds it so still.  Whoever
        puts an output that is there already writes it anew when it is older than half of that: so what a writer relies on is too young to be taken.
        """
        return self._collect(keep_days, dry=False)

    def _begin(self, patience: float | None) -> float | None:
        """The time until which something may take, once the store was found to be one."""
        self._bucket.load()  # which may take as long as it likes: it is done here
        deadline = None if patience is None else time.monotonic() + patience
        if not self._checked:
            self._map(lambda _: self.check(), [None], deadline)
        return deadline

    # -- below: traces

    def _trace(self, key: str) -> Found | None:
        data = self._bucket.read(_trace_name(key))
        return None if data is None else _trace_of(data, key)

    # -- below: sending

    def _there(self, name: str, size: int | None = None) -> bool:
        """Whether an object is there and need not be written: neither wrong, nor so old that a collector may be about to take it."""
        if name in self._bad:
            return False
        stat = self._bucket.head(name)
        return stat is not None and (size is None or stat.size == size) and self._now() - stat.at < GRACE / 2

    def _put_file(self, name: str, path: str, size: int, sha256: str) -> None:
        if self._there(name, size):
            return
        if size <= PART:
            with open(path, "rb") as file:
                data = file.read()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise _damaged(path)
            self._bucket.write(name, data)
        else:
            if files.scan(path)[2:] != sha256:
                raise _damaged(path)
            self._bucket.write_file(name, path, size, lambda do, items: self._map(do, items))
        self._moved(sent=size)
        self._bad.discard(name)

    def _put_tree(self, content: Content, objects: Source) -> None:
        manifest = objects.entries(content)
        top = str(objects.path(content))
        small, large = _split(manifest, SMALL)
        bundles = _bundled(small)

        def one(entry: Entry) -> None:
            self._put_file(_name(Content(f"{entry.kind}:{entry.value}")), f"{top}/{entry.path}", entry.size, entry.value)

        def many(group: list[Entry]) -> tuple[str, int]:
            data = b"".join(_bytes_of(f"{top}/{entry.path}", entry) for entry in group)
            sha256 = hashlib.sha256(data).hexdigest()
            name = _name(Content(f"f:{sha256}"))
            if not self._there(name, len(data)):
                self._bucket.write(name, data)
                self._moved(sent=len(data))
                self._bad.discard(name)
            return sha256, len(group)

        # A large file has a crew of its own for its parts, so these go one after the other.
        for entry in [entry for entry in large if entry.size > PART]:
            one(entry)
        self._map(one, [entry for entry in large if entry.size <= PART])
        packed = self._map(many, bundles, width=WIDTH // 2)
        blobs = [entry.value + (".x" if entry.kind == "x" else "") for entry in large]
        parts = {"small": SMALL, "bundles": packed, "blobs": blobs}
        crashpoint("remote-blobs")
        name = _name(content)
        self._bucket.write(name[: -len("json")] + "parts", json.dumps(parts, separators=(",", ":")).encode())
        text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
        crashpoint("remote-parts")
        self._bucket.write(name, text)
        self._moved(sent=len(text))
        self._bad -= {name, name[: -len("json")] + "parts"}

    # -- below: receiving

    def _get_file(self, name: str, path: str, size: int, sha256: str) -> None:
        """Write an object to `path`, in parts, and demand that it has this digest; once more when it has not: bytes are lost on the way, too."""
        for last in (False, True):
            self._pour(name, path, size)
            if files.scan(path)[2:] == sha256:
                return
            if last:
                raise self._gone(name, "is not what its name says")
            os.unlink(path)

    def _pour(self, name: str, path: str, size: int) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:

            def part(start: int) -> None:
                length = min(PART, size - start)
                data = self._bucket.read(name, start, length)
                if data is None or len(data) != length:
                    raise self._gone(name, "is not there" if data is None else "is shorter than it was")
                view, at = memoryview(data), start
                while view:
                    done = os.pwrite(handle, view, at)
                    view, at = view[done:], at + done
                self._moved(received=length)

            self._map(part, range(0, size, PART), width=8)
        finally:
            os.close(handle)

    def _get_tree(self, content: Content, top: str) -> None:
        name = _name(content)
        text, told = self._map(self._bucket.read, [name, name[: -len("json")] + "parts"])
        if text is None or told is None:
            raise self._gone(name if text is None else name[: -len("json")] + "parts", "is not there")
        manifest = self._entries(name, content, text)
        parts = _parts_of(told)
        small, large = _split(manifest, parts.small if parts else 0)
        if parts is None or sum(count for _, count in parts.bundles) != len(small):
            raise self._gone(name[: -len("json")] + "parts", "does not fit its manifest")
        self._moved(received=len(text))
        os.makedirs(top)
        copies: dict[str, list[Entry]] = {}  # the same bytes may lie at several paths
        made = {""}
        for entry in manifest:
            folder = entry.path if entry.kind == "d" else posixpath.dirname(entry.path)
            if folder not in made:
                os.makedirs(f"{top}/{folder}", exist_ok=True)
                made.add(folder)
            if entry.kind in "fx":
                copies.setdefault(entry.value, []).append(entry)
        rest = iter(small)
        groups = [(sha256, list(itertools.islice(rest, count))) for sha256, count in parts.bundles]

        def many(group: tuple[str, list[Entry]]) -> None:
            sha256, held = group
            name = _name(Content(f"f:{sha256}"))
            view = memoryview(self._whole(name, sum(entry.size for entry in held), sha256))
            at = 0
            for entry in held:
                data = view[at : at + entry.size]
                at += entry.size
                if hashlib.sha256(data).hexdigest() != entry.value:
                    raise self._gone(name, f"does not hold {entry.path}")
                for copy in copies[entry.value]:
                    _write(f"{top}/{copy.path}", data, copy.kind)

        def one(entry: Entry) -> None:
            path = f"{top}/{entry.path}"
            self._get_file(_name(Content(f"{entry.kind}:{entry.value}")), path, entry.size, entry.value)
            for copy in copies[entry.value]:
                if copy is not entry:
                    shutil.copyfile(path, f"{top}/{copy.path}")
                os.chmod(f"{top}/{copy.path}", 0o755 if copy.kind == "x" else 0o644)

        self._map(many, groups, width=WIDTH // 2)
        for entry in [entry for entry in large if entry.size > PART]:
            one(entry)
        self._map(one, [entry for entry in large if entry.size <= PART])
        for entry in manifest:
            if entry.kind == "l":
                os.symlink(entry.value, f"{top}/{entry.path}")

    def _entries(self, name: str, content: Content, text: bytes) -> list[Entry]:
        manifest = _manifest_of(text)
        if manifest is None or files.tree_id(manifest) != content:
            raise self._gone(name, "is not what its name says")
        if (why := _unsafe(manifest)) is not None:
            raise self._gone(name, why)
        return manifest

    def _whole(self, name: str, size: int, sha256: str) -> bytes:
        for _ in range(2):
            data = self._bucket.read(name)
            if data is None:
                raise self._gone(name, "is not there")
            if len(data) == size and hashlib.sha256(data).hexdigest() == sha256:
                self._moved(received=len(data))
                return data
        raise self._gone(name, "is not what its name says")

    def _gone(self, name: str, why: str) -> Gone:
        self._bad.add(name)
        return Gone(f"{self.url}/{name} {why}", fix="the step that makes it will be run, and what it makes put there anew")

    # -- below: collecting

    def _collect(self, keep_days: float, *, dry: bool) -> Garbage:
        self.check()
        now = self._now()
        # Objects first: a trace that is told while we look names objects younger than any that may go.
        there = {stat.name: stat for stat in self._listed("objects/")}
        kept: list[str] = []
        going: list[str] = []
        for stat in self._listed("traces/"):
            (kept if now - stat.at < keep_days * 86_400 else going).append(stat.name)
        notes = [stat.name for stat in self._listed("states/") if now - stat.at >= keep_days * 86_400]
        needed = self._needed([name[-69:-5] for name in kept], self._noted(now - keep_days * 86_400))
        seen = self._seen()
        idle = {name: seen.get(name, now) for name in there if name not in needed}
        # Written since it was first seen idle: somebody has put it again.
        idle = {name: since if there[name].at < since else now for name, since in idle.items()}
        doomed = [name for name, since in idle.items() if now - since >= GRACE]
        if not dry:
            self._bucket.delete([*going, *notes])
            # The young are looked at once more: what was written while we looked stays.
            doomed = [
                name for name, stat in zip(doomed, self._map(self._bucket.head, doomed), strict=True) if stat is not None and stat.at < idle[name]
            ]
            self._bucket.delete([name for name in doomed if name.endswith(".t.json")])  # a tree without its manifest is none
            self._bucket.delete([name for name in doomed if not name.endswith(".t.json")])
            left = {name: since for name, since in idle.items() if name not in set(doomed)}
            self._bucket.write(_UNREFERENCED, json.dumps(left, separators=(",", ":")).encode())
        uploads = self._bucket.abandon(now - GRACE, dry=dry)
        return Garbage(
            tuple(name[-69:-5] for name in going), tuple(doomed), sum(there[name].size for name in doomed), len(idle) - len(doomed), uploads
        )

    def _noted(self, since: float) -> set[str]:
        """The objects that notes of checkpoints name which were written since then."""
        names: set[str] = set()
        for data in self._map(self._bucket.read, [stat.name for stat in self._listed("states/") if stat.at >= since]):
            with suppress(ValueError, TypeError, AttributeError, KeyError):  # a damaged one is none
                names |= {_name(Content(content)) for _, content in json.loads(data or b"")["states"].values()}
        return names

    def _needed(self, keys: Sequence[str], noted: set[str]) -> set[str]:
        """The names of all objects that these traces rely on, and those of `noted`.  Raises Corrupt rather than to guess."""
        names = set(noted)
        for key, found in zip(keys, self._map(self._trace, keys), strict=True):
            if found is None:
                if self._bucket.head(_trace_name(key)) is not None:
                    raise Corrupt(
                        f"{self.url}/{_trace_name(key)} cannot be read, so that nobody can say what it needs",
                        fix="delete that object, and collect again",
                    )
                continue
            names |= {_name(made.content) for made in found.trace.outputs}
        trees = [name for name in names if name.endswith(".t.json")]
        for name, told in zip(trees, self._map(self._bucket.read, [name[: -len("json")] + "parts" for name in trees]), strict=True):
            names.add(name[: -len("json")] + "parts")
            parts = _parts_of(told) if told is not None else None
            if parts is not None:
                names |= {_name(Content(f"f:{sha256}")) for sha256, _ in parts.bundles}
                names |= {f"objects/{blob[:2]}/{blob}" for blob in parts.blobs}
            elif told is not None:
                raise Corrupt(
                    f"{self.url}/{name[:-4]}parts cannot be read, so that nobody can say what it needs", fix="delete that object, and collect again"
                )
        return names

    def _seen(self) -> dict[str, float]:
        """Objects that an earlier collection saw nobody need, and since when."""
        try:
            seen = json.loads(self._bucket.read(_UNREFERENCED) or b"{}")
            return {str(name): float(since) for name, since in seen.items()}
        except (ValueError, TypeError, AttributeError):
            return {}

    def _listed(self, prefix: str) -> list[Stat]:
        shape = {"traces": _TRACE, "states": _NOTE}.get(prefix.partition("/")[0], _OBJECT)
        return [stat for stat in self._bucket.names(prefix) if shape.fullmatch(stat.name)]

    def _moved(self, *, sent: int = 0, received: int = 0) -> None:
        with self._counting:
            self.sent += sent
            self.received += received

    def _map(self, do: Callable[[_A], _B], items: Iterable[_A], deadline: float | None = None, *, width: int = WIDTH) -> list[_B]:
        return crew(do, list(items), width=min(width, self._bucket.width), deadline=deadline, what=self.url)


# -- names and texts


def _name(content: Content) -> str:
    return f"objects/{content[2:4]}/{content[2:]}{ {'f': '', 'x': '.x', 't': '.t.json'}[content[0]] }"


def _trace_name(key: str) -> str:
    return f"traces/{key[:2]}/{key}.json"


def _note_name(key: str) -> str:
    return f"states/{key[:2]}/{key}.json"


def _trace_text(trace: Trace, sizes: Mapping[str, int]) -> bytes:
    body = {
        "key": trace.key,
        "recipe": trace.recipe,
        "step": trace.step,
        "run": trace.run,
        "made_at": trace.made_at,
        "seconds": trace.seconds,
        "outputs": [[made.name, made.path, made.content, sizes.get(made.name, 0)] for made in trace.outputs],
        "metrics": trace.metrics_json,
        "facts": trace.facts_json,
        **({"measured": trace.measured_json} if trace.measured_json != "{}" else {}),
    }
    return json.dumps({**body, "sum": digest.of_value("trace/1", body)}, separators=(",", ":")).encode()


def _trace_of(data: bytes, key: str) -> Found | None:
    """The trace that `data` is, if it is one of this key and whole."""
    try:
        body = json.loads(data)
        told = body.pop("sum")
        if told != digest.of_value("trace/1", body) or body["key"] != key:
            return None
        outputs = [(str(name), str(path), Content(str(content)), int(size)) for name, path, content, size in body["outputs"]]
        if not all(re.fullmatch(r"[fxt]:[0-9a-f]{64}", content) for _, _, content, _ in outputs):
            return None
        made = tuple(Made(name, path, content) for name, path, content, _ in outputs)
        texts = [str(body[name]) for name in ("metrics", "facts")]
        texts.append(str(body.get("measured", "{}")))
        if not all(isinstance(json.loads(text), dict) for text in texts) or not all(isinstance(each, dict) for each in json.loads(texts[2]).values()):
            return None
        head = [str(body[name]) for name in ("recipe", "step", "run")]
        trace = Trace(key, head[0], head[1], head[2], float(body["made_at"]), float(body["seconds"]), made, *texts)
        return Found(trace, {name: size for name, _, _, size in outputs})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class _Parts(NamedTuple):
    small: int
    bundles: list[tuple[str, int]]
    blobs: list[str]


def _parts_of(data: bytes) -> _Parts | None:
    try:
        told = json.loads(data)
        bundles = [(str(sha256), int(count)) for sha256, count in told["bundles"]]
        blobs = [str(blob) for blob in told["blobs"]]
        if all(_HEX.fullmatch(sha256) and count > 0 for sha256, count in bundles) and all(_HEX.fullmatch(blob.removesuffix(".x")) for blob in blobs):
            return _Parts(int(told["small"]), bundles, blobs)
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _manifest_of(data: bytes) -> list[Entry] | None:
    try:
        rows = json.loads(data.decode("utf-8", "surrogateescape"))
        return [Entry(str(path), str(kind), int(size), str(value)) for path, kind, size, value in rows]
    except (ValueError, TypeError):
        return None


def _unsafe(manifest: Sequence[Entry]) -> str | None:
    """Why a manifest, whose digest is right but whose author may be anybody, cannot be written out; None when it can."""
    seen: set[str] = set()
    solid: set[str] = set()  # what cannot be a folder
    for entry in manifest:
        parts = entry.path.split("/")
        if "\0" in entry.path or any(part in ("", ".", "..") for part in parts):
            return f"names a path that leaves its tree: {entry.path!r}"
        if entry.path in seen:
            return f"names {entry.path!r} twice"
        if entry.kind not in "fxld" or len(entry.kind) != 1 or entry.size < 0 or (entry.kind in "fx" and not _HEX.fullmatch(entry.value)):
            return f"says nonsense about {entry.path!r}"
        if entry.kind == "l":
            target = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), entry.value))
            if not entry.value or "\0" in entry.value or entry.value.startswith("/") or target == ".." or target.startswith("../"):
                return f"holds a link that leaves its tree: {entry.path!r}"
        seen.add(entry.path)
        if entry.kind != "d":
            solid.add(entry.path)
    for entry in manifest:
        at = posixpath.dirname(entry.path)
        while at:
            if at in solid:
                return f"names {entry.path!r}, which lies below something that is no folder"
            at = posixpath.dirname(at)
    return None


# -- bundles


def _split(manifest: Sequence[Entry], small: int) -> tuple[list[Entry], list[Entry]]:
    """The files that travel in bundles, and those that travel alone; each content once, in the manifest's order."""
    seen: set[str] = set()
    parts: tuple[list[Entry], list[Entry]] = ([], [])
    for entry in manifest:
        if entry.kind in "fx" and entry.value not in seen:
            seen.add(entry.value)
            parts[entry.size > small].append(entry)
    return parts


def _bundled(small: Sequence[Entry]) -> list[list[Entry]]:
    """Files laid together so that one that comes, goes or changes leaves all but one bundle as it was."""
    bundles: list[list[Entry]] = []
    group: list[Entry] = []
    size = 0
    for entry in small:
        group.append(entry)
        size += entry.size
        if size >= BUNDLE_MOST or (size >= BUNDLE and int(entry.value[:2], 16) < 8):
            bundles.append(group)
            group, size = [], 0
    return [*bundles, group] if group else bundles


def _bytes_of(path: str, entry: Entry) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != entry.value:
        raise _damaged(path)
    return data


def _damaged(path: str) -> Corrupt:
    return Corrupt(f"{path}: the stored bytes are not what their name says", fix="run again: the step that makes them will be run")


def _write(path: str, data: memoryview, kind: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o755 if kind == "x" else 0o644)
    try:
        while data:
            data = data[os.write(handle, data) :]
    finally:
        os.close(handle)


def _disk(error: OSError, path: str) -> Infrastructure:
    free = 0
    with suppress(OSError):
        found = os.statvfs(os.path.dirname(path))
        free = found.f_bavail * found.f_frsize
    return Infrastructure(
        f"{error.filename or path}: {error.strerror}, {free} bytes are free", fix="free some space (`recipe gc` helps), and try again"
    )
