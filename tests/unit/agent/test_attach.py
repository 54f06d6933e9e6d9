"""A login greets its client, and relays frames to the agent of the root."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.agent import attach, files
from runner.agent.frames import FrameParser, frame


@pytest.fixture(autouse=True)
def _kept_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The working directory, umask and program times of the test's own process stay."""
    monkeypatch.setattr(os, "utime", lambda _path: None)
    mask, here = os.umask(0), os.getcwd()
    yield
    os.umask(mask)
    os.chdir(here)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The payloads of all frames for the client."""
    payloads: list[bytes] = []
    parser = FrameParser()
    monkeypatch.setattr(attach, "put", lambda _handle, data: payloads.extend(parser.feed(data)))
    return payloads


def test_a_login_is_greeted_with_the_real_path_and_its_root_is_private(
    tmp_path: Path, told: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, used = list[str](), list[str]()
    monkeypatch.setattr(files, "serve", served.append)
    monkeypatch.setattr(os, "utime", used.append)
    (tmp_path / "root").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("root")
    attach.main(str(tmp_path / "link"), "files")
    assert told == [b"g" + os.fsencode(tmp_path / "root")] and served == [str(tmp_path / "root")]
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700 and os.umask(0) == 0o077
    assert used == [str(Path(attach.__file__).parents[1])]  # so that no sweep deletes it


def test_an_agent_that_is_just_starting_is_waited_for(
    tmp_path: Path, told: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [None, None, Of(detach=lambda: 7)]
    relayed: list[int] = []
    monkeypatch.setattr(attach, "reach", lambda _path: answers.pop(0))
    monkeypatch.setattr(attach, "RETRY", 0.0)
    monkeypatch.setattr(attach, "_relay", relayed.append)
    attach.main(str(tmp_path), "jobs")
    assert relayed == [7] and not answers


def test_an_agent_that_does_not_answer_is_said_with_its_log(
    tmp_path: Path, told: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    monkeypatch.setattr(attach, "reach", tries.append)
    monkeypatch.setattr(attach, "PATIENCE", 0.02)
    monkeypatch.setattr(attach, "RETRY", 0.0)
    with pytest.raises(SystemExit, match=r"does not respond; see agent/agent\.log"):
        attach.main(str(tmp_path), "jobs")
    assert tries and set(tries) == {f"{tmp_path}/agent"}


def test_frames_go_to_the_agent_and_its_bytes_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, ours = socket.socketpair()
    client, login = socket.socketpair()
    for each in (agent, client):
        each.settimeout(30)
    monkeypatch.setattr(attach, "put", lambda handle, data: os.write(handle, data))
    saved = [os.dup(0), os.dup(1)]
    os.dup2(login.fileno(), 0)
    os.dup2(login.fileno(), 1)
    try:
        relay = threading.Thread(target=attach._relay, args=(ours.fileno(),))
        relay.start()
        client.sendall(frame(b"d", b"start a job") + frame(b"alive?"))
        assert agent.recv(100) == b"start a job"
        agent.sendall(b"it began")
        parser, answers = FrameParser(), list[bytes]()
        while len(answers) < 2:
            answers += parser.feed(client.recv(100))
        assert sorted(answers) == [b"alive?", b"dit began"]
        client.sendall(b"these bytes are no frame")  # ends the relay
        relay.join(30)
        assert not relay.is_alive()
    finally:
        os.dup2(saved[0], 0)
        os.dup2(saved[1], 1)
        for handle in saved:
            os.close(handle)
        for each in (agent, ours, client, login):
            each.close()


def relay_once(monkeypatch: pytest.MonkeyPatch, ready: list[int], data: bytes) -> list[float]:
    """Relay `data` from the ready sides, fail if more is read, and return the waits."""
    events, waits = [ready], list[float]()

    def select(
        _reading: object, _writing: object, _failing: object, seconds: float
    ) -> tuple[list[int], list[int], list[int]]:
        waits.append(seconds)
        return events.pop(), [], []

    monkeypatch.setattr(attach, "select", Of(select=select))
    sides = Of(read=lambda _handle, _size: data, set_blocking=lambda _handle, _is_so: None)
    monkeypatch.setattr(attach, "os", sides)
    attach._relay(7)
    return waits


@pytest.mark.parametrize("ready", [[], [0], [7], [0, 7]])
def test_silence_and_the_end_of_either_side_end_the_relay(
    monkeypatch: pytest.MonkeyPatch, ready: list[int]
) -> None:
    assert relay_once(monkeypatch, ready, b"") == [attach.SILENCE]


def test_a_frame_before_a_damaged_one_is_answered_and_the_relay_ends(
    monkeypatch: pytest.MonkeyPatch, told: list[bytes]
) -> None:
    relay_once(monkeypatch, [0], frame(b"alive?") + b"these bytes are no frame")
    assert told == [b"alive?"]
