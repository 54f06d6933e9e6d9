"""Tickets: what a browser opens a WebSocket with, since it cannot send a header there.  Each works once, and soon."""

from __future__ import annotations

import time
from secrets import token_urlsafe
from typing import Final

from .answers import Refused
from .tokens import Token, Tokens

LIFE: Final = 30.0
"""Seconds in which a ticket is to be used."""
MOST: Final = 100
"""Tickets of one token that wait for their use."""
HEAD: Final = "rct_"


class Tickets:
    """The tickets of one server, in its memory alone.  Used by its event loop alone."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._open: dict[str, tuple[Token, float]] = {}

    def make(self, token: Token) -> str:
        """A ticket that opens what the token opens.  Raises Refused for too many that were not used."""
        now = time.monotonic()
        self._open = {secret: each for secret, each in self._open.items() if each[1] > now}
        if sum(owner.id == token.id for owner, _ in self._open.values()) >= MOST:
            words = f"{MOST} tickets of this token are unused"
            raise Refused(429, "too-many-tickets", words, f"they expire after {LIFE:.0f} seconds")
        secret = HEAD + token_urlsafe(24)
        self._open[secret] = token, now + LIFE
        return secret

    def use(self, secret: str) -> Token | None:
        """The token of a ticket, once; None for one that was used, has expired, or whose token is gone."""
        token, until = self._open.pop(secret, (None, 0.0))
        if token is None or until <= time.monotonic() or not self._tokens.stands(token.id):
            return None
        return token
