"""Encrypted secrets for later delivery: AES-GCM with the key in RECIPE_KEY_FILE, which is never in
the database.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import CannotRun

VARIABLE: Final = "RECIPE_KEY_FILE"
LEAST: Final = 32
"""Minimum bytes of a key file."""
HOW: Final = f"openssl rand -out key 32; chmod 600 key; export {VARIABLE}=$PWD/key"
_MARK: Final = "aesgcm:"
_NONCE: Final = 12


def can_seal(environ: Mapping[str, str]) -> bool:
    """Return True if a key file is configured."""
    return bool(environ.get(VARIABLE))


def seal(secret: str, purpose: str, environ: Mapping[str, str]) -> str:
    """Encrypt a secret for one `purpose`. Raises CannotRun without a key."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(_NONCE)
    return (
        _MARK
        + base64.b64encode(
            nonce + AESGCM(_key(environ)).encrypt(nonce, secret.encode(), purpose.encode())
        ).decode()
    )


def unseal(sealed: str, purpose: str, environ: Mapping[str, str]) -> str:
    """Decrypt a secret. Raises CannotRun for another key or damaged data."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        data = base64.b64decode(sealed.removeprefix(_MARK), validate=True)
        return (
            AESGCM(_key(environ)).decrypt(data[:_NONCE], data[_NONCE:], purpose.encode()).decode()
        )
    except (InvalidTag, ValueError) as error:
        raise CannotRun(
            "cannot decrypt a stored secret with this key",
            fix=f"set {VARIABLE} to the key file that was used when the secret was stored",
        ) from error


def without(value: object) -> object:
    """Remove encrypted secrets from a value, because each encryption differs."""
    if isinstance(value, Mapping):
        kept = {}
        for name, inner in value.items():
            if isinstance(inner, str) and inner.startswith(_MARK):
                continue
            kept[name] = without(inner)
        return kept
    if isinstance(value, (list, tuple)):
        return [without(inner) for inner in value]
    return value


def _key(environ: Mapping[str, str]) -> bytes:
    name = environ.get(VARIABLE, "")
    if not name:
        raise CannotRun(
            f"storing webhook secrets and signed input URLs requires {VARIABLE}", fix=HOW
        )
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise CannotRun(f"{VARIABLE}: {error.strerror}", fix=HOW) from error
    if len(data) < LEAST:
        raise CannotRun(f"the key file in {VARIABLE} is shorter than {LEAST} bytes", fix=HOW)
    return hashlib.sha256(data).digest()
