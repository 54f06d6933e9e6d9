"""The other end of a stream to a host: what a login there runs, with its input and output as the stream.

As `jobs` it carries a client's frames to the agent of its root, which it begins if need be, and the agent's lines back.  As `files` it answers
questions about files itself, so that hashing delays no job's end.
"""

from __future__ import annotations

import os
import select
import sys
import time

from . import files
from .frames import Broken, Frames, frame
from .reach import reach
from .trees import put

PATIENCE = 10.0  # seconds in which an agent must be there
RETRY = 0.01
SILENCE = 60.0  # seconds without a word from the client after which it is taken for gone
ROOM = 1 << 16


def main(root: str, part: str) -> None:
    """Greet one client with the path of `root`, which exists, and serve it until it is gone."""
    os.umask(0o077)
    os.utime(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )  # this program is used still: see `objects.sweep`
    os.chdir(root)
    os.chmod(".", 0o700)
    put(1, frame(b"g", os.fsencode(os.getcwd())))
    if part == "files":
        files.serve(os.getcwd())
        return
    connection = None
    give_up_at = time.monotonic() + PATIENCE
    while connection is None:
        connection = reach(f"{os.getcwd()}/agent")
        if connection is None:
            if time.monotonic() > give_up_at:
                sys.exit(
                    f"the agent of {root} does not answer; what it said is in agent/agent.log there"
                )
            time.sleep(RETRY)
    _relay(connection.detach())


def _relay(agent: int) -> None:
    os.set_blocking(agent, True)
    frames = Frames()
    while True:
        ready, _, _ = select.select([0, agent], [], [], SILENCE)
        if not ready:
            return
        if agent in ready:
            data = os.read(agent, ROOM)
            if not data:
                return
            put(1, frame(b"d", data))
        if 0 in ready:
            data = os.read(0, ROOM)
            if not data:
                return
            try:
                payloads = frames.feed(data)
            except Broken:
                return
            for payload in payloads:
                if payload[:1] == b"d":
                    put(agent, payload[1:])
                else:
                    put(1, frame(payload))  # a sign of life
            if frames.broken:
                return
