"""Access tokens and their scopes. Only digests are stored, in a file readable by its owner."""

from __future__ import annotations

import hashlib
import json
import os
import time
from hmac import compare_digest
from pathlib import Path
from secrets import token_urlsafe
from typing import Final, Literal, NamedTuple, TypeAlias

from ..errors import Unusable
from ..storage.content.files import no_space
from ..storage.locks import Locks

Scope: TypeAlias = Literal["read", "operate", "admin"]

SCOPES: Final[tuple[Scope, ...]] = ("read", "operate", "admin")
"""Scopes in ascending order. Each includes the previous ones."""
_HEAD: Final = "rcp_"


class Token(NamedTuple):
    """A stored access token.

    With `run`, it gives access to this run only. Times are seconds since the epoch.
    """

    id: str
    digest: str  # SHA-256 of the token, which is 256 random bits
    scope: Scope
    name: str = ""
    run: str = ""
    created: float = 0.0
    expires: float | None = None

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()

    def allows(self, scope: Scope) -> bool:
        """Return True if the token's scope includes `scope`."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


class Tokens:
    """Access tokens of a workspace, in `FOLDER/tokens.json`.

    Changes by other processes are seen at once.
    """

    def __init__(self, folder: Path, locks: Locks) -> None:
        self._folder, self._path, self._locks = folder, folder / "tokens.json", locks
        self._read: tuple[tuple[int, ...], tuple[Token, ...]] = ((), ())
        """Version and tokens of the file at the last read. Each change replaces the file."""

    def all(self) -> tuple[Token, ...]:
        """Return all access tokens, oldest first. Raises Unusable if the file is damaged."""
        try:
            found = os.stat(self._path)
            version = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._read[0] != version:
                tokens = tuple(Token(**each) for each in json.loads(self._path.read_bytes()))
                self._read = version, tokens
            return self._read[1]
        except FileNotFoundError:
            return ()
        except (ValueError, TypeError) as error:
            raise Unusable(
                "the token file is damaged",
                fix=f"move {self._path} away; the next start creates a new token",
            ) from error

    def find(self, secret: str) -> Token | None:
        """Find the unexpired token for a secret, in constant time."""
        digest, found = _digest(secret), None
        for token in self.all():
            if compare_digest(token.digest, digest):
                found = token
        return found if found is not None and not found.is_expired else None

    def is_valid(self, id: str) -> bool:
        """Return True if a token with this ID exists and has not expired."""
        return any(token.id == id and not token.is_expired for token in self.all())

    def create(
        self, scope: Scope, name: str = "", run: str = "", expires: float | None = None
    ) -> tuple[Token, str]:
        """Create an access token. Returns the token and its secret, which is shown once."""
        secret = _HEAD + token_urlsafe(32)
        token = Token(os.urandom(6).hex(), _digest(secret), scope, name, run, time.time(), expires)
        with self._locks.hold("tokens"):
            self._write((*self.all(), token))
        return token, secret

    def first(self) -> str:
        """Return the secret of a new admin token, or "" if an admin token exists."""
        if any(token.scope == "admin" and not token.run for token in self.all()):
            return ""
        return self.create("admin", "first")[1]

    def remove(self, id: str) -> bool:
        """Delete an access token. Returns False if no such token exists."""
        with self._locks.hold("tokens"):
            left = tuple(token for token in self.all() if token.id != id)
            if len(left) == len(self.all()):
                return False
            self._write(left)
        return True

    def _write(self, tokens: tuple[Token, ...]) -> None:
        """Replace the token file. Raises Infrastructure if it cannot be written."""
        new = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            with open(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                json.dump([token._asdict() for token in tokens], file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise no_space(error, str(self._path)) from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
