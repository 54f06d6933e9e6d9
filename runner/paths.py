"""Paths: settings files, what ships with the program, and whether a path stays below its folder.  Reads none of them."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"


def settings_files(root: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The settings files that may exist: the workspace's, which wins, and the user's."""
    return f"{root}/recipe.toml", f"{config_folder(environ)}/config.toml"


def config_folder(environ: Mapping[str, str]) -> str:
    """Where a user's own files for all workspaces lie."""
    base = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or os.path.expanduser('~')}/.config"
    return f"{base}/recipe"


@cache
def shipped() -> Path:
    """The directory that holds `recipes/`, `schemas/` and `fixtures/`: inside an installed package, else the repository's root."""
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def escapes(path: str) -> bool:
    """Whether a path leads out of the folder that it is relative to."""
    plain = posixpath.normpath(path)
    return plain.startswith(("/", "~")) or plain == ".." or plain.startswith("../") or "\0" in path


def heads(path: str) -> list[str]:
    """`a/b/c`, `a/b`, `a`."""
    found = [path]
    at = path.rfind("/")
    while at > 0:
        found.append(path[:at])
        at = path.rfind("/", 0, at)
    return found
