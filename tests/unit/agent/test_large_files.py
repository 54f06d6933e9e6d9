"""A large file is what its blocks were: the digest of a file that arrives in parts tells if it is not."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.agent import objects

GRAIN = 4096
HOLES = ((1, 2), (4, 1))


def sent(data: bytes) -> Any:
    """Return a request with these received bytes, which come in pieces of any size."""
    rest, draw = [data], random.Random(1)

    def into(view: memoryview) -> int:
        count = min(len(view), len(rest[0]), draw.randint(1, GRAIN))
        view[:count] = rest[0][:count]
        rest[0] = rest[0][count:]
        return count

    return Of(into=into, make_arriving=lambda folder: os.makedirs(folder, exist_ok=True))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pieces").mkdir()
    (tmp_path / "partial").mkdir()
    return tmp_path / "partial" / "file"


def parts_of(data: bytes) -> list[bytes]:
    return [data[first * GRAIN : (first + count) * GRAIN] for first, count in HOLES]


def finish(size: int, received: bytes) -> str:
    digest, _ = objects.write(sent(received), "partial", "file", GRAIN, size, 0o444, HOLES, (), "")
    return digest


@pytest.mark.parametrize("size", [5 * GRAIN - 7, 5 * GRAIN])
def test_missing_blocks_are_filled_and_the_whole_file_is_hashed(file: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    holed = bytearray(data)
    holed[GRAIN : 3 * GRAIN] = bytes(2 * GRAIN)
    file.write_bytes(holed[: 4 * GRAIN])
    assert finish(size, b"".join(parts_of(data))) == hashlib.sha256(data).hexdigest()
    assert file.read_bytes() == data and file.stat().st_mode & 0o777 == 0o444


def test_received_blocks_are_hashed_one_by_one(file: Path) -> None:
    data = random.Random(2).randbytes(5 * GRAIN - 7)
    received = b"".join(parts_of(data))
    digest, digests = objects.write(
        sent(received), "partial", "file", GRAIN, len(data), 0, HOLES, (), ""
    )
    blocks = [data[at : at + GRAIN] for at in range(0, len(data), GRAIN)]
    expected = [hashlib.sha256(blocks[number]).hexdigest() for number in (1, 2, 4)]
    assert digest == "" and digests == expected


def test_bytes_after_the_last_block_that_was_here_change_the_digest(file: Path) -> None:
    data = random.Random(3).randbytes(5 * GRAIN - 7)
    file.write_bytes(data + b"more")
    digest, _ = objects.write(sent(b""), "partial", "file", GRAIN, len(data), 0o444, (), (), "")
    assert digest == hashlib.sha256(data + b"more").hexdigest()
