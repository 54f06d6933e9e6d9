"""Shared store in a bucket or directory: objects, traces and checkpoint notes.

Objects below the store's URL, named as in the local store:

- `objects/ab/<sha256>[.x]`: the bytes of a plain or executable file

- `objects/ab/<sha256>.t.json`: the manifest of a tree

- `objects/ab/<sha256>.t.parts`: the objects with the tree's files; large files alone, small files
concatenated in bundles

- `states/ab/<state key>.json`: the newest checkpoint of a state, see `remote.states`

- `traces/ab/<key>.json`: the outputs of a key; the first trace wins

- `recipe-store.json`: the format version

- `unreferenced.json`: unreferenced objects found by garbage collection

The write order is files and bundles, parts, manifest, trace, so that an interrupted upload leaves
only complete or missing results. Nothing is trusted on read: all bytes are hashed before use,
manifest paths must stay within their tree, and unknown names in listings are ignored. Object ages
separate collectors from writers, see `Remote.collect`.
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
from .collecting import CollectionResult, collect
from .layout import RemoteResult
from .receiving import entries, get_file, get_tree
from .sending import ContentSource, put_file, put_tree
from .session import GRACE, MissingObject, Session

if TYPE_CHECKING:
    from ..buckets.bucket import Bucket
    from ..content.objects import Objects

FORMAT: Final = 1
MANY: Final = 256
"""Number of cache keys above which lookups list the bucket."""
MARKER = "recipe-store.json"


class Remote(Session):
    """Shared store on a bucket from `buckets.open`.

    Thread-safe.
    """

    def __init__(self, bucket: Bucket, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(bucket, now)
        self._checked = False
        self._known: dict[str, int] = {}  # sizes of contents known to exist

    # -- lookup

    def check(self) -> None:
        """Raise Infrastructure with a fix if the store is unusable.

        Reasons are a missing bucket, permission or network, or a newer format.
        """
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
        """Return the URL of a content's object; for a tree, of its manifest."""
        return f"{self.url}/{layout.object_name(content)}"

    def lookup(
        self, keys: Iterable[str], *, patience: float | None = None
    ) -> dict[str, RemoteResult]:
        """Return the store's cached results of the given cache keys.

        Damaged traces are ignored. Raises Infrastructure after `patience` seconds.
        """
        wanted = list(dict.fromkeys(keys))
        deadline = self._begin(patience)
        if len(wanted) > MANY:
            folders = sorted({f"traces/{key[:2]}/" for key in wanted})
            there: set[str] = set()
            for listed in self.map(self.list_objects, folders, deadline):
                there.update(stat.name for stat in listed)
            wanted = [key for key in wanted if layout.trace_name(key) in there]
        found = self.map(self.trace, wanted, deadline)
        return {key: one for key, one in zip(wanted, found, strict=True) if one is not None}

    def holds(self, contents: Iterable[Content], *, patience: float | None = None) -> set[Content]:
        """Return the given contents that exist in the store."""
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

    # -- uploads

    def put(self, content: Content, objects: ContentSource) -> int:
        """Upload a local object if it is missing in the store, and return the number of sent bytes.

        Raises Corrupt, Infrastructure.

        The content is always hashed before the upload.
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
                fix="run the recipe again: recipe reruns the step that creates this output",
            ) from error
        except OSError as error:
            raise Infrastructure(
                f"{error.filename or objects.path(content)}: {error.strerror}"
            ) from error
        self._known[content] = objects.size(content)
        return self.sent - before

    def tell(self, trace: Trace, sizes: Mapping[str, int]) -> Trace:
        """Write the cached result of a key after its outputs, and return the store's result.

        This is another's if that came first and is intact.
        """
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
        """Create the store's format marker if missing, and abort abandoned uploads."""
        self.check()
        self.bucket.create(MARKER, json.dumps({"recipe-store": FORMAT}).encode())
        self.bucket.abandon(self.now() - GRACE)

    def write_note(self, key: str, data: bytes) -> None:
        """Write the note about a step's newest checkpoints.

        See `remote.states`.
        """
        self.bucket.write(layout.note_name(key), data)

    def read_note(self, key: str) -> bytes | None:
        return self.bucket.read(layout.note_name(key))

    # -- downloads

    def fetch(self, content: Content, objects: Objects) -> int:
        """Download and verify an object into the local store, and return the received bytes.

        Raises MissingObject if missing or damaged.
        """
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
            )  # the next upload of an incomplete tree writes it completely
            raise
        finally:
            delete(Path(temporary))
        return self.received - before

    def manifest(self, content: Content) -> list[Entry]:
        """Return the manifest of a tree without its files.

        Raises MissingObject.
        """
        self.check()
        name = layout.object_name(content)
        text = self.bucket.read(name)
        if text is None:
            raise self.missing_error(name, "does not exist")
        return entries(self, name, content, text)

    # -- deletion

    def collect(self, *, keep_days: float, dry: bool = False) -> CollectionResult:
        """Delete traces older than `keep_days`, and objects unreferenced for a day.

        With `dry`, only report them.

        An object is deleted only if one collection found it unreferenced, it was not rewritten, and
        a second collection at least `GRACE` seconds later finds it unreferenced again. Writers
        rewrite existing objects older than half of `GRACE`, so the objects they rely on are too
        young for deletion.
        """
        self.check()
        return collect(self, keep_days, dry=dry)

    def _begin(self, patience: float | None) -> float | None:
        """Check the store on first use, and return the deadline for a request."""
        self.bucket.load()  # without a deadline: imports may take long
        deadline = None if patience is None else time.monotonic() + patience
        if not self._checked:
            self.map(lambda _: self.check(), [None], deadline)
        return deadline
