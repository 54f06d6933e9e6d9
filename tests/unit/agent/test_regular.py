"""Files that a step put there are opened only if they are files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from runner.agent.regular import NOT_REGULAR, descriptor_of, is_regular, open_regular, size_of


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """One path of each kind."""
    kinds = ("file", "link", "folder", "pipe", "socket", "gone", "loop")
    found = {name: tmp_path / name for name in kinds} | {"device": Path("/dev/zero")}
    found["file"].write_bytes(b"text")
    found["link"].symlink_to("file")
    found["folder"].mkdir()
    os.mkfifo(found["pipe"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(found["socket"]))
    found["loop"].symlink_to("loop")
    return found


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_and_a_link_to_it_are_read(places: dict[str, Path], kind: str) -> None:
    with open_regular(places[kind]) as file:
        assert file.read() == b"text"
    assert is_regular(places[kind]) and size_of(str(places[kind])) == 4


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device"])
def test_what_could_block_or_never_end_is_refused_at_once(
    places: dict[str, Path], kind: str
) -> None:
    with pytest.raises(OSError, match=NOT_REGULAR) as caught:
        open_regular(places[kind])
    assert caught.value.filename == str(places[kind])
    assert not is_regular(places[kind]) and size_of(os.fsencode(places[kind])) == -1


@pytest.mark.parametrize("kind", ["gone", "loop"])
def test_what_cannot_be_found_is_no_file(places: dict[str, Path], kind: str) -> None:
    with pytest.raises(OSError):
        descriptor_of(places[kind])
    assert not is_regular(places[kind]) and size_of(str(places[kind])) == -1


def test_a_file_that_becomes_a_pipe_meanwhile_is_refused_and_closed(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, path = os.stat(places["file"]), places["pipe"]
    monkeypatch.setattr(os, "stat", lambda _path: before)
    open_at_once = os.open

    def open_it(path: Path, flags: int) -> int:
        assert flags & os.O_NONBLOCK  # else it waits for a writer
        return open_at_once(path, flags)

    monkeypatch.setattr(os, "open", open_it)
    free = open_at_once("/dev/null", os.O_RDONLY)
    os.close(free)
    with pytest.raises(OSError, match=NOT_REGULAR):
        descriptor_of(path)
    again = open_at_once("/dev/null", os.O_RDONLY)
    os.close(again)
    assert again == free  # no descriptor was left open
