"""Entry point of a login on a host. Its standard input and output are the stream to the client.

As `jobs`, relay frames between the client and the agent of the root, and start the agent if needed.
As `files`, answer file requests in this process, so that hashing does not delay the ends of jobs.
"""

from __future__ import annotations

import os
import select
import sys
import time

from . import files
from .frames import BadFrame, FrameParser, frame
from .reach import reach
from .trees import put

PATIENCE = 10.0  # seconds to wait for the agent
RETRY = 0.01
SILENCE = 60.0  # seconds without data from the client after which it counts as gone
ROOM = 1 << 16


def main(root: str, part: str) -> None:
    """Greet the client with the path of the existing directory `root`, and serve it until it
    disconnects.
    """
    os.umask(0o077)
    # Mark this program as used, see `objects.sweep`.
    os.utime(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
                    f"the agent of {root} does not respond; see agent/agent.log in this directory"
                )
            time.sleep(RETRY)
    _relay(connection.detach())


def _relay(agent: int) -> None:
    os.set_blocking(agent, True)
    frames = FrameParser()
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
            except BadFrame:
                return
            for payload in payloads:
                if payload[:1] == b"d":
                    put(agent, payload[1:])
                else:
                    put(1, frame(payload))  # answer the client's sign of life
            if frames.broken:
                return
