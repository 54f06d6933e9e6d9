"""One-time tickets for WebSockets, because browsers cannot send a token header with them."""

from __future__ import annotations

import time
from secrets import token_urlsafe
from typing import Final

from .answers import Refused
from .tokens import Token, Tokens

LIFE: Final = 30.0
"""Lifetime of a ticket in seconds."""
MOST: Final = 100
"""Maximum number of unused tickets per token."""
HEAD: Final = "rct_"


class Tickets:
    """Store of one-time WebSocket tickets, in memory. Use only in the event loop."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._open: dict[str, tuple[Token, float]] = {}

    def create(self, token: Token) -> str:
        """Create a ticket with the permissions of a token.

        Raises Refused for too many unused tickets.
        """
        now = time.monotonic()
        self._open = {secret: each for secret, each in self._open.items() if each[1] > now}
        if sum(owner.id == token.id for owner, _ in self._open.values()) >= MOST:
            words = f"{MOST} tickets of this token are unused"
            raise Refused(429, "too-many-tickets", words, f"they expire after {LIFE:.0f} seconds")
        secret = HEAD + token_urlsafe(24)
        self._open[secret] = token, now + LIFE
        return secret

    def use(self, secret: str) -> Token | None:
        """Redeem a ticket and return its token.

        None if the ticket is used, expired, or its token removed.
        """
        token, until = self._open.pop(secret, (None, 0.0))
        if token is None or until <= time.monotonic() or not self._tokens.is_valid(token.id):
            return None
        return token
