"""The number of what clients and the agent say to each other.  An agent begins with it; a client speaks this one and the one before."""

from __future__ import annotations

NUMBER = 1
"""Raised where a message means something else, or a new one is needed."""


def greeting() -> bytes:
    """The first line of an agent."""
    return b'{"agent": %d}' % NUMBER
