"""A login greets its client, and relays frames to the agent of the root."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

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
    served: list[str] = []
    monkeypatch.setattr(files, "serve", served.append)
    (tmp_path / "root").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("root")
    attach.main(str(tmp_path / "link"), "files")
    assert told == [b"g" + os.fsencode(tmp_path / "root")] and served == [str(tmp_path / "root")]
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700


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
