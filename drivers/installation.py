"""The identity of this installation at providers and clusters: its secret, and the name prefix of
its machines.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Self

from .base import Denied


class Installation:
    """The secret of this installation, created at first use. It identifies machines by a tag."""

    def __init__(self, secret: bytes, folder: Path = Path()) -> None:
        self.folder = folder
        self._secret = hmac.digest(b"recipe", secret, "sha256")  # HKDF (RFC 5869): extract
        self.name = self.derive_key("name")[:4].hex()

    @classmethod
    def of(cls, path: str | None = None) -> Self:
        """Read the installation's secret from a file, by default the user's, or create it.

        Raises Denied if the file cannot be read or created.
        """
        folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(
            os.path.expanduser("~"), ".config"
        )
        file = Path(path or os.path.join(folder, "recipe", "installation"))
        try:
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
                new.touch(0o600)
                new.write_text(secrets.token_hex(32) + "\n", "ascii")
                with suppress(FileExistsError):  # another process was faster, so use its secret
                    os.link(new, file)
                new.unlink()
            return cls(bytes.fromhex(file.read_text("ascii").strip()), file.parent)
        except (OSError, ValueError) as error:
            way = (
                "delete the file if no machine is rented"
                if isinstance(error, ValueError)
                else "set XDG_CONFIG_HOME to a writable directory"
            )
            raise Denied(
                f"cannot use the secret of this installation, {file}: {error}; {way}"
            ) from error

    def with_name(self, name: str) -> Self:
        """Return another installation of this name.

        Use the result only to compute tags: it still has this installation's secret.
        """
        other = copy(self)
        other.name = name
        return other

    def mark(self, key: str) -> str:
        """Return the tag of a lease's machine, its name at the provider."""
        return f"recipe-{self.name}-{key}"

    def key(self, mark: str) -> str | None:
        """Return the lease key in a machine's tag, or None if another installation rented it."""
        ours = self.mark("")
        if not mark.startswith(ours) or mark == ours:
            return None
        return mark.removeprefix(ours)

    def derive_key(self, what: str) -> bytes:
        """Derive a 32-byte key for one purpose, equal in all processes of this installation."""
        # The expand step of HKDF, for one block.
        return hmac.digest(self._secret, f"recipe {what}\x01".encode(), "sha256")
