"""Data exchange between workers on several machines, in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psycopg import Connection

from .database import Row, text
from .exchange import Chunk, Exchange, SharedOutput
from .postgres_claims import FREE, Holder
from .postgres_database import PostgresDatabase
from .runs import Stale


class PostgresExchange(Exchange):
    """Data exchange between workers on several machines, through a PostgreSQL database."""

    def __init__(self, database: PostgresDatabase, holder: Holder) -> None:
        self._database, self._holder = database, holder

    def bundle(self, digest: str) -> bytes | None:
        rows = self._database.all("SELECT data FROM bundles WHERE digest = %s", (digest,))
        return bytes(rows[0][0]) if rows else None

    def store_outputs(self, run: str, fence: int, outputs: Sequence[SharedOutput]) -> None:
        ours = "id = %s AND fence = %s AND holder = %s AND claim <> ''"
        if not self._database.all(
            f"UPDATE runs SET outputs = %s WHERE {ours} RETURNING 1",  # noqa: S608
            (text(list(outputs)), run, fence, self._holder.name),
        ):
            raise Stale(run)

    def confirm(self, run: str, fence: int) -> None:
        self._holder.confirm(run, fence)

    def hold_key(self, key: str, run: str) -> bool:
        held = self._database.all(
            "INSERT INTO keys VALUES (%(key)s, %(run)s) ON CONFLICT (key) DO UPDATE SET run = excluded.run WHERE keys.run = excluded.run"  # noqa: S608
            f" OR NOT EXISTS (SELECT FROM runs WHERE runs.id = keys.run AND NOT {FREE}) RETURNING 1",
            {"key": key, "run": run} | self._holder.find_dead(),
        )
        return bool(held)

    def release_keys(self, keys: Collection[str], run: str) -> None:
        self._database.all(
            "DELETE FROM keys WHERE key = ANY(%s) AND run = %s RETURNING 1", (list(keys), run)
        )

    def add_chunks(self, run: str, fence: int, chunks: Sequence[Chunk]) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                self._guard(db, run, fence)
                with db.pipeline(), db.cursor() as many:
                    rows = [
                        (run, each.attempt, each.stream, each.offset, each.data, each.content)
                        for each in chunks
                    ]
                    many.executemany(
                        "INSERT INTO chunks VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
                        rows,
                    )

        self._database.do(store)

    def fold(self, run: str, fence: int, whole: Chunk) -> None:
        def store(db: Connection[Row]) -> None:
            with db.transaction():
                self._guard(db, run, fence)
                db.execute(
                    "DELETE FROM chunks WHERE run = %s AND attempt = %s AND stream = %s",
                    (run, whole.attempt, whole.stream),
                )
                db.execute(
                    "INSERT INTO chunks VALUES (%s, %s, %s, 0, %s, %s)",
                    (run, whole.attempt, whole.stream, whole.data, whole.content),
                )

        self._database.do(store)

    def _guard(self, db: Connection[Row], run: str, fence: int) -> None:
        """Prevent other claims on the run until the end of the transaction.

        Raises Stale.
        """
        ours = "SELECT 1 FROM runs WHERE id = %s AND fence = %s AND holder = %s FOR SHARE"
        if db.execute(ours, (run, fence, self._holder.name)).fetchone() is None:
            raise Stale(run)

    def chunks(self, run: str, attempt: str, stream: str, offset: int = 0) -> list[Chunk]:
        rows = self._database.all(
            "SELECT attempt, stream, start, data, content FROM chunks WHERE run = %s AND attempt = %s AND stream = %s"
            " AND (start + length(data) > %s OR content <> '') ORDER BY start LIMIT 16",
            (run, attempt, stream, offset),
        )
        return [Chunk(row[0], row[1], row[2], bytes(row[3]), row[4]) for row in rows]
