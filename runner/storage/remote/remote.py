"""Keep contents and traces where several machines reach them: a bucket or a folder.

Below the store's URL, with the names of the local store:

    objects/ab/<sha256>[.x]       the bytes of a plain or executable file
    objects/ab/<sha256>.t.json    the manifest of a tree
    objects/ab/<sha256>.t.parts   which objects its files are in: large ones each in its own, small ones laid end to end in bundles
    states/ab/<state key>.json    the newest checkpoint of a state: see `remote_states`
    traces/ab/<key>.json          "this key gave these outputs"; the first one stays
    recipe-store.json             the format; unreferenced.json: what a gc has seen unreferenced

Everything is written in this order: files and bundles, parts, manifest, trace; so whatever a kill leaves is whole or not there.  Nothing that is read
is believed: every byte is hashed before it gets its name here, paths of a manifest may not leave their tree, and names in a listing that are not ours
are not there.  An object's age tells collectors and writers from each other: see `Remote.collect`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import Corrupt, Infrastructure, Unusable
from ...reading import parse_json
from ..content.disk import delete, fail
from ..content.files import Content, Entry
from ..crash import crashpoint
from ..records.index import Trace
from . import layout
from .collecting import Garbage, collect
from .layout import Found
from .receiving import entries, get_file, get_tree
from .sending import Source, put_file, put_tree
from .session import GRACE, MissingObject, Session

if TYPE_CHECKING:
    from ..buckets.bucket import Bucket
    from ..content.objects import Objects

FORMAT: Final = 1
MANY: Final = 256
"""More keys than this are looked for by listing."""
MARKER = "recipe-store.json"


class Remote(Session):
    """One store.  Made of what `buckets.open` gives; its methods may be called from several threads."""

    def __init__(self, bucket: Bucket, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(bucket, now)
        self._checked = False
        self._known: dict[str, int] = {}  # contents that were seen to be there, and their bytes

    # -- asking

    def check(self) -> None:
        """Raise Infrastructure with what to do when the store cannot be used: no bucket, no permission, no network, a newer format."""
        if self._checked:
            return
        data = self.bucket.check(MARKER)
        if data is not None:
            try:
                version = parse_json(data)["recipe-store"]
            except (ValueError, KeyError, TypeError) as error:
                raise Unusable(
                    f"{self.url}/{MARKER} was not written by recipe",
                    fix="use a separate directory for the store",
                ) from error
            if not isinstance(version, int) or version > FORMAT:
                raise Unusable(
                    f"{self.url}: format {version} is newer than this version of recipe",
                    fix="install a newer version of recipe",
                )
        self._checked = True

    def address(self, content: Content) -> str:
        """The object that holds a content, or that says which do."""
        return f"{self.url}/{layout.object_name(content)}"

    def lookup(self, keys: Iterable[str], *, patience: float | None = None) -> dict[str, Found]:
        """The traces of those keys that have one; a damaged one is none.  Raises Infrastructure after `patience` seconds."""
        wanted = list(dict.fromkeys(keys))
        deadline = self._begin(patience)
        if len(wanted) > MANY:
            there = {
                stat.name
                for part in self.map(
                    self.list_objects, sorted({f"traces/{key[:2]}/" for key in wanted}), deadline
                )
                for stat in part
            }
            wanted = [key for key in wanted if layout.trace_name(key) in there]
        found = self.map(self.trace, wanted, deadline)
        return {key: one for key, one in zip(wanted, found, strict=True) if one is not None}

    def holds(self, contents: Iterable[Content], *, patience: float | None = None) -> set[Content]:
        """Which of `contents` are there, by their names."""
        wanted = list(dict.fromkeys(contents))
        deadline = self._begin(patience)
        missing = [content for content in wanted if content not in self._known]
        for content, stat in zip(
            missing,
            self.map(lambda c: self.bucket.head(layout.object_name(c)), missing, deadline),
            strict=True,
        ):
            if stat is not None and layout.object_name(content) not in self.bad:
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
                if not self.there(layout.object_name(content)):
                    put_tree(self, content, objects)
            else:
                path = str(objects.path(content))
                put_file(
                    self, layout.object_name(content), path, os.path.getsize(path), content[2:]
                )
        except FileNotFoundError as error:
            raise Corrupt(
                f"{error.filename} is no longer stored in this workspace",
                fix="run again to recreate it: its step will run",
            ) from error
        except OSError as error:
            raise Infrastructure(
                f"{error.filename or objects.path(content)}: {error.strerror}"
            ) from error
        self._known[content] = objects.size(content)
        return self.sent - before

    def tell(self, trace: Trace, sizes: Mapping[str, int]) -> Trace:
        """Say what a key gave; its outputs must be there.  Answers the trace that stands: another's, if that was first and is sound."""
        self.check()
        name = layout.trace_name(trace.key)
        data = layout.trace_text(trace, sizes)
        crashpoint("remote-trace")
        if self.bucket.create(name, data):
            return trace
        first = self.trace(trace.key)
        if first is not None and not any(
            layout.object_name(made.content) in self.bad for made in first.trace.outputs
        ):
            return first.trace
        self.bucket.write(name, data)
        return trace

    def mark(self) -> None:
        """Say in the store what it is, if that is missing; and end uploads that somebody began long ago and never ended."""
        self.check()
        self.bucket.create(MARKER, json.dumps({"recipe-store": FORMAT}).encode())
        self.bucket.abandon(self.now() - GRACE)

    def write_note(self, key: str, data: bytes) -> None:
        """Say which checkpoint a state has: see `remote_states`."""
        self.bucket.write(layout.note_name(key), data)

    def read_note(self, key: str) -> bytes | None:
        return self.bucket.read(layout.note_name(key))

    # -- getting

    def fetch(self, content: Content, objects: Objects) -> int:
        """Bring a content into the local store, verified; answers its bytes.  Raises MissingObject when it is not there or not what its name says."""
        self.check()
        temporary = objects.disk.temporary()
        before = self.received
        try:
            if content[0] == "t":
                get_tree(self, content, temporary)
            else:
                stat = self.bucket.head(layout.object_name(content))
                if stat is None:
                    raise self.missing_error(layout.object_name(content), "does not exist")
                get_file(self, layout.object_name(content), temporary, stat.size, content[2:])
                if content[0] == "x":
                    os.chmod(temporary, 0o755)  # noqa: S103  (what an executable output is; the umask had its say when it was put away)
            objects.put(Path(temporary), content, move=True)
        except OSError as error:
            fail(temporary, error)
        except MissingObject:
            self._known.pop(content, None)
            self.bad.add(
                layout.object_name(content)
            )  # a tree of which something is missing is written anew as a whole
            raise
        finally:
            delete(Path(temporary))
        return self.received - before

    def manifest(self, content: Content) -> list[Entry]:
        """What a tree holds, without its files.  Raises MissingObject."""
        self.check()
        name = layout.object_name(content)
        text = self.bucket.read(name)
        if text is None:
            raise self.missing_error(name, "does not exist")
        return entries(self, name, content, text)

    # -- throwing away

    def collect(self, *, keep_days: float, dry: bool = False) -> Garbage:
        """Delete traces older than `keep_days`, and objects that no trace has needed for a day.  `dry`: only say what that is.

        An object goes only when a collection has seen it unneeded, it was not written since, and `GRACE` later another finds it so still.  A writer
        writes an output that is there already anew when it is older than half of that: so what a writer relies on is too young to be taken.
        """
        self.check()
        return collect(self, keep_days, dry=dry)

    def _begin(self, patience: float | None) -> float | None:
        """The time until which something may take, once the store was found to be one."""
        self.bucket.load()  # which may take as long as it likes: it is done here
        deadline = None if patience is None else time.monotonic() + patience
        if not self._checked:
            self.map(lambda _: self.check(), [None], deadline)
        return deadline
