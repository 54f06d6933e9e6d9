"""Local index of one disk: file digests, object seals, tiny files, traces and published paths.

Always in the local SQLite file.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from ..content.files import Content, FileRow
from ..content.seals import Seal
from .database import Data, Database, Row, mapping, text


class CachedOutput(NamedTuple):
    """Output of a cached result."""

    name: str
    path: str
    content: Content


class Trace(NamedTuple):
    """Cached result of a step: its outputs and metrics under a cache key.

    Metrics and facts are parsed on access. `metrics` were read by the metrics rule in the key,
    `measured` by other rules, keyed by the rule's digest, the newest last.
    """

    key: str
    recipe: str
    step: str
    run: str
    made_at: float
    seconds: float
    outputs: tuple[CachedOutput, ...] = ()
    metrics_json: str = "{}"
    facts_json: str = "{}"
    measured_json: str = "{}"

    @property
    def metrics(self) -> Data:
        return mapping(self.metrics_json)

    @property
    def measured(self) -> Mapping[str, Data]:
        return cast("Mapping[str, Data]", mapping(self.measured_json))

    @property
    def numbers(self) -> Data:
        """Metrics read by the metrics rule in the cache key, or else by the last other rule."""
        return self.metrics or next(reversed(list(self.measured.values())), {})

    @property
    def facts(self) -> Data:
        return mapping(self.facts_json)


class PublishedFile(NamedTuple):
    """File or tree that recipe published in the workspace, with its file identity at that time."""

    path: str
    content: Content
    identity: str
    run: str
    step: str
    recipe: str


class Changes(NamedTuple):
    """Changes of the index that are stored in one transaction.

    A key keeps its first trace, except keys in `again`, whose step ran again.
    """

    traces: Sequence[Trace] = ()
    again: Collection[str] = ()
    files: Collection[FileRow] = ()
    objects: Collection[Seal] = ()
    tiny: Mapping[Content, bytes] = MappingProxyType({})
    published: Collection[PublishedFile] = ()


NOTHING: Final = Changes()


def warnings_in(trace: Trace) -> list[str]:
    """Return the step's warnings in a cached result."""
    said = trace.facts.get("warnings")
    if not isinstance(said, list):
        return []
    return [str(text) for text in said]


class Index:
    """Local index in one SQLite database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def files(self) -> list[FileRow]:
        """Return all stored file digests, for `DigestCache`."""
        return cast(
            "list[FileRow]",
            self._database.all(
                "SELECT path, dev, ino, size, mtime_ns, ctime_ns, content FROM files"
            ),
        )

    def seal(self, content: Content) -> Seal | None:
        """Return the seal of a stored object, for `Objects`."""
        rows = self._database.all(
            "SELECT content, mark, boot, size, at FROM objects WHERE content = ?", (content,)
        )
        return Seal(*rows[0]) if rows else None

    def stored_bytes(self) -> int:
        """Return the total size of all sealed objects in bytes."""
        ((size,),) = self._database.all("SELECT coalesce(sum(size), 0) FROM objects")
        return int(size)

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        """Return the bytes of the given tiny files that exist, for `Objects`."""
        whole = "coalesce(CAST(data AS BLOB), x'')"  # always bytes, even in a damaged row
        query = (
            f"SELECT content, {whole} FROM tiny WHERE content IN (SELECT value FROM json_each(?))"  # noqa: S608
        )
        return dict(self._database.all(query, (json.dumps(contents),)))

    def tinies(self) -> dict[Content, float]:
        """Return the content ids of all tiny files and their storage times."""
        return dict(self._database.all("SELECT content, at FROM tiny"))

    def traces(self, keys: Sequence[str]) -> dict[str, Trace]:
        """Return the cached results of the given cache keys.

        Keys without a result and damaged rows are left out.
        """
        chosen = (json.dumps(keys),)
        rows = self._database.all(
            "SELECT * FROM traces WHERE key IN (SELECT value FROM json_each(?))", chosen
        )
        measured: dict[str, list[Row]] = {}
        for row in self._database.all(
            "SELECT * FROM measured WHERE key IN (SELECT value FROM json_each(?)) ORDER BY at",
            chosen,
        ):
            measured.setdefault(row[0], []).append(row)
        traces: dict[str, Trace] = {}
        for row in rows:
            trace = _trace(row, measured.get(row[0], ()))
            if trace is not None:
                traces[row[0]] = trace
        return traces

    def trace(self, key: str) -> Trace | None:
        """Return the cached result of a cache key; None if missing or damaged."""
        return self.traces([key]).get(key)

    def every_trace(self) -> Iterator[Trace]:
        """Yield all cached results, oldest first."""
        keys = [row[0] for row in self._database.all("SELECT key FROM traces ORDER BY made_at")]
        for start in range(0, len(keys), 10_000):
            part = keys[start : start + 10_000]
            found = self.traces(part)
            for key in part:
                if key in found:
                    yield found[key]

    def outputs(self, recipe: str) -> dict[str, tuple[list[CachedOutput], bool]]:
        """Return the outputs of every cached result of a recipe, and whether it has metrics.

        Faster than `trace` for tens of thousands of keys.

        Outputs are plain (name, path, content) triples.
        """
        rows = self._database.all(
            "SELECT key, outputs, outputs_crc, metrics <> '{}' OR key IN (SELECT key FROM measured) FROM traces WHERE recipe = ?",
            (recipe,),
        )
        crc32 = zlib.crc32
        sound = [row for row in rows if crc32(f"{row[0]}{row[1]}".encode()) == row[2]]
        made = json.loads("[" + ",".join([row[1] for row in sound]) + "]")
        return {row[0]: (items, bool(row[3])) for row, items in zip(sound, made, strict=True)}

    def warnings(self, recipe: str) -> dict[str, list[str]]:
        """Return the warnings of a recipe's cached results, by cache key."""
        rows = self._database.all(
            """SELECT key FROM traces WHERE recipe = ? AND facts LIKE '%"warnings": [%'""",
            (recipe,),
        )
        if not rows:
            return {}
        found = self.traces([row[0] for row in rows])
        return {key: warnings_in(trace) for key, trace in found.items()}

    def traces_of_others(self, recipe: str) -> bool:
        """Return True if a recipe other than `recipe` has a cached result."""
        parts = (
            "SELECT 1 FROM traces WHERE recipe < ? LIMIT 1",
            "SELECT 1 FROM traces WHERE recipe > ? LIMIT 1",
        )
        return any(self._database.all(part, (recipe,)) for part in parts)

    def more_than(self, recipe: str, most: int) -> bool:
        """Return True if a recipe has more than `most` cached results."""
        ((count,),) = self._database.all(
            "SELECT count(*) FROM (SELECT 1 FROM traces WHERE recipe = ? LIMIT ?)",
            (recipe, most + 1),
        )
        return bool(count > most)

    def expected_seconds(self, recipe: str, steps: Iterable[str]) -> dict[str, float]:
        """Return the expected duration of each step in seconds, from its recent cached results.

        Steps without results are left out. Durations are averaged with more weight on newer ones.
        """
        newest = "SELECT seconds FROM traces WHERE recipe = ? AND step = value ORDER BY made_at DESC LIMIT 8"
        query = (
            f"SELECT value, (SELECT json_group_array(seconds) FROM ({newest})) FROM json_each(?)"  # noqa: S608
        )
        answer: dict[str, float] = {}
        for step, found in self._database.all(query, (recipe, json.dumps(list(steps)))):
            for seconds in reversed(json.loads(found)):
                answer[step] = (answer[step] + seconds) / 2 if step in answer else seconds
        return answer

    def last(self, recipe: str, steps: Iterable[str]) -> dict[str, Trace]:
        """Return the newest cached result of each step.

        Steps without a result are left out.
        """
        newest = (
            "SELECT key FROM traces WHERE recipe = ? AND step = value ORDER BY made_at DESC LIMIT 1"
        )
        query = f"SELECT value, ({newest}) FROM json_each(?)"  # noqa: S608
        rows = self._database.all(query, (recipe, json.dumps(list(steps))))
        keys = {step: key for step, key in rows if key}
        traces = self.traces(list(keys.values()))
        return {step: traces[key] for step, key in keys.items() if key in traces}

    def summaries(self, attempts: Sequence[str]) -> dict[str, Mapping[str, Sequence[Any]]]:
        """Return the stored metrics summaries of attempts.

        Damaged rows are ignored.
        """
        rows = self._database.all(
            "SELECT attempt, metrics, crc FROM summaries WHERE attempt IN (SELECT value FROM json_each(?))",
            (json.dumps(attempts),),
        )
        summaries: dict[str, Mapping[str, Sequence[Any]]] = {}
        for attempt, metrics, crc in rows:
            if _crc(attempt, metrics) == crc:
                summaries[attempt] = json.loads(metrics)
        return summaries

    def summarize(self, found: Mapping[str, Mapping[str, Sequence[object]]]) -> None:
        """Store metrics summaries of finished attempts."""
        # Keeps the reported order: the first metric is the most important.
        rows = [(attempt, json.dumps(of, separators=(",", ":"))) for attempt, of in found.items()]
        with self._database.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO summaries VALUES (?, ?, ?)",
                [(attempt, of, _crc(attempt, of)) for attempt, of in rows],
            )

    def list_published(self, recipe: str | None = None) -> dict[str, PublishedFile]:
        """Return all files and trees that recipe published in the workspace, by path."""
        rows = self._database.all(
            "SELECT * FROM published WHERE ? IS NULL OR recipe = ?", (recipe, recipe)
        )
        return {row[0]: PublishedFile(*row) for row in rows}

    def write(self, db: sqlite3.Connection, changes: Changes) -> None:
        """Store changes of the index in the open transaction."""
        now = time.time()
        self._save_traces(db, changes.traces, changes.again)
        db.executemany(
            "INSERT OR REPLACE INTO tiny VALUES (?, ?, ?)",
            [(content, data, now) for content, data in changes.tiny.items()],
        )
        self._save(db, changes.files, changes.objects)
        db.executemany(
            "INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?, ?, ?)", changes.published
        )

    def remember(self, files: Iterable[FileRow], objects: Iterable[Seal] = ()) -> None:
        """Store file digests and object seals outside a run."""
        with self._database.transaction() as db:
            self._save(db, files, objects)

    def adopt(self, trace: Trace, published: Iterable[PublishedFile]) -> None:
        """Store a trace for existing files that were accepted as a step's outputs.

        It replaces any other trace of its key.
        """
        with self._database.transaction() as db:
            self._save_traces(db, [trace], [trace.key])
            db.executemany("INSERT OR REPLACE INTO published VALUES (?, ?, ?, ?, ?, ?)", published)

    def learn(self, traces: Sequence[Trace]) -> None:
        """Store cached results with unknown keys, and additional metrics of known results."""
        with self._database.transaction() as db:
            self._save_traces(db, traces)

    def unpublish(self, paths: Iterable[str]) -> None:
        """Remove paths from the list of published files."""
        with self._database.transaction() as db:
            db.executemany("DELETE FROM published WHERE path = ?", [(path,) for path in paths])

    def forget(
        self,
        *,
        traces: Iterable[str] = (),
        objects: Iterable[Content] = (),
        files: Iterable[str] = (),
    ) -> None:
        """Delete index rows of traces, objects and files for garbage collection."""
        with self._database.transaction() as db:
            self._forget_traces(db, traces)
            db.executemany(
                "DELETE FROM objects WHERE content = ?", [(content,) for content in objects]
            )
            db.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in files])

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete and return the given tiny files that were last stored before the time `before`."""
        statement = "DELETE FROM tiny WHERE at < ? AND content IN (SELECT value FROM json_each(?)) RETURNING content"
        with self._database.transaction() as db:
            return {
                row[0] for row in db.execute(statement, (before, json.dumps(contents))).fetchall()
            }

    def _save(
        self, db: sqlite3.Connection, files: Iterable[FileRow], objects: Iterable[Seal]
    ) -> None:
        db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", files)
        db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)", objects)

    def _save_traces(
        self, db: sqlite3.Connection, traces: Sequence[Trace], again: Iterable[str] = ()
    ) -> None:
        self._forget_traces(db, again)
        db.executemany(
            "INSERT OR IGNORE INTO traces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_trace_row(trace) for trace in traces],
        )
        measured: list[Row] = []
        for trace in traces:
            if trace.measured_json != "{}":
                measured += _measured_rows(trace)
        # Metrics belong to one attempt, and are not stored with another trace of the key.
        db.executemany(
            "INSERT OR REPLACE INTO measured SELECT key, ?, ?, ?, ? FROM traces WHERE key = ? AND run = ? AND step = ? AND made_at = ?",
            measured,
        )

    def _forget_traces(self, db: sqlite3.Connection, keys: Iterable[str]) -> None:
        gone = [(key,) for key in keys]
        db.executemany("DELETE FROM traces WHERE key = ?", gone)
        db.executemany("DELETE FROM measured WHERE key = ?", gone)


def _trace_row(trace: Trace) -> Row:
    outputs = json.dumps(trace.outputs, separators=(",", ":"))
    said = (trace.metrics_json, trace.facts_json)
    return (*trace[:6], outputs, _crc(trace.key, outputs), *said, _crc(trace.key, *said))


def _trace(row: Row, measured: Iterable[Row]) -> Trace | None:
    if _crc(row[0], row[6]) != row[7] or _crc(row[0], row[8], row[9]) != row[10]:
        return None
    by_rule: list[str] = []
    for key, rule, _, metrics, crc in measured:
        if _crc(key, rule, metrics) == crc:
            by_rule.append(f'"{rule}":{metrics}')
    outputs = tuple(CachedOutput(*item) for item in json.loads(row[6]))
    return Trace._make((*row[:6], outputs, row[8], row[9], "{" + ",".join(by_rule) + "}"))


def _measured_rows(trace: Trace) -> Iterator[Row]:
    """Yield a database row per metrics rule: the stored values, then the identity of the trace."""
    for n, (rule, metrics) in enumerate(trace.measured.items()):
        numbers = text(metrics)
        yield (
            rule,
            time.time() + n * 1e-3,
            numbers,
            _crc(trace.key, rule, numbers),
            trace.key,
            trace.run,
            trace.step,
            trace.made_at,
        )


def _crc(*parts: object) -> int:
    return zlib.crc32("".join(map(str, parts)).encode())
