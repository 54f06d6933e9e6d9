"""Version of the protocol between clients and the agent.

The agent sends its version first. A client supports this version and the previous one.
"""

from __future__ import annotations

NUMBER = 1
"""Increase it when a message changes its meaning or is added."""


def greeting() -> bytes:
    """Return the first line sent by an agent."""
    return b'{"agent": %d}' % NUMBER
