"""Where the bytes of a tiny file come from: memory first, then the table and the logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runner.storage.content.disk import Disk
from runner.storage.content.files import Content
from runner.storage.content.tiny import RECENT, TinyContents


class EmptyTable:
    """A table without contents that counts its queries."""

    def __init__(self) -> None:
        self.queries = 0

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        self.queries += 1
        return {}

    def tinies(self) -> dict[Content, float]:
        return {}

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        return set()


def test_an_empty_file_is_known_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "store" / "partial").mkdir(parents=True)
    root, table = str(tmp_path / "store"), EmptyTable()
    tiny = TinyContents(root, Disk(root), table)
    for name, data in (("full", b"x"), ("empty", b"")):
        path = tmp_path / name
        path.write_bytes(data)
        content = tiny.remember(str(path), os.stat(path))
        assert content is not None
        # Enough other contents drive it out of the cache of recent ones.
        tiny.keep_recent(Content("f:other"), bytes(RECENT))
        tiny.keep_recent(Content("f:another"), b"")
        assert tiny.recent(content) is None
        assert (tiny.row(content), table.queries) == (data, 0)
