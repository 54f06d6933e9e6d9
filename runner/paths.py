"""Paths: the workspace of a directory, settings files, shipped files, and path checks.

Opens no files.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

VERSION: Final = "0.1.0"
MARKERS: Final = ("recipe.toml", ".recipe", ".git")
"""Files and directories that mark a workspace."""


BUNDLED: Final = ".library"
"""Directory in a bundle with the run's library recipes."""
TAGS: Final[Mapping[str, str]] = {
    ".gitignore": "*\n",
    "CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n# Made by recipe; backups may leave this folder out: https://bford.info/cachedir/\n",
}
"""Files in `.recipe` that tell git and backup programs to ignore it."""


def temporary_name(name: str, ending: str = "new") -> str:
    """Return a temporary file name next to `name`, unique across threads, processes and machines.

    Rename the finished file to `name`.
    """
    return f"{name}.{os.getpid()}-{os.urandom(4).hex()}.{ending}"


class CallerLocation(NamedTuple):
    """The caller's location: the workspace, and the directory for relative paths, relative to the
    workspace (empty for the workspace itself).
    """

    root: Path
    below: str = ""

    @property
    def here(self) -> Path:
        """The directory for relative paths."""
        return self.root / self.below

    def typed(self, path: str) -> str:
        """Return a typed path relative to the workspace.

        Absolute paths, `~` and addresses stay unchanged.
        """
        if not self.below or path.startswith(("/", "~")) or "://" in path:
            return path
        relative = os.path.relpath(f"{self.here}/{path}", self.root)
        return f"{relative}/" if path.endswith("/") else relative

    def folders(self, inputs: Iterable[str]) -> dict[str, str]:
        """Return the directory in which each input is typed; empty for the workspace itself."""
        return dict.fromkeys(inputs, self.below) if self.below else {}


def location(environ: Mapping[str, str], words: Iterable[str] = ()) -> CallerLocation:
    """Find the caller's workspace: the nearest marked parent directory, else the workspace of the
    first recipe path in `words`.

    Otherwise the current directory.
    """
    here = os.getcwd()
    root = _workspace_of(here, environ) or _workspace_of_paths(words, environ) or here
    below = "" if root == here else os.path.relpath(here, root)
    return CallerLocation(Path(root), below)


def _workspace_of_paths(words: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return the workspace of the first existing file in `words`; empty without one."""
    for word in words:
        if is_path(word) and os.path.isfile(word):
            return _workspace_of(os.path.dirname(os.path.abspath(word)), environ)
    return ""


def _workspace_of(folder: str, environ: Mapping[str, str]) -> str:
    """Return the nearest workspace at or above a directory; empty without one."""
    return next((each for each in heads(folder) if _is_workspace(each, environ)), "")


def _is_workspace(folder: str, environ: Mapping[str, str]) -> bool:
    """Return True if a directory contains a workspace marker.

    `/`, the home directory and shared directories such as /tmp never count.
    """
    if folder == "/" or not any(os.path.lexists(f"{folder}/{marker}") for marker in MARKERS):
        return False
    shared = stat.S_ISVTX | stat.S_IWOTH
    if os.stat(folder).st_mode & shared == shared:
        return False
    return folder != os.path.realpath(environ.get("HOME") or os.path.expanduser("~"))


def settings_files(root: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the possible settings files: the workspace's, which takes precedence, and the user's."""
    return f"{root}/recipe.toml", f"{config_folder(environ)}/config.toml"


def config_folder(environ: Mapping[str, str]) -> str:
    """Return the user's configuration directory."""
    return _of_user(environ, "XDG_CONFIG_HOME", ".config")


def data_folder(environ: Mapping[str, str]) -> str:
    """Return the user's data directory, for all workspaces."""
    return _of_user(environ, "XDG_DATA_HOME", ".local/share")


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return the user's cache directory, for files that can be downloaded again."""
    return _of_user(environ, "XDG_CACHE_HOME", ".cache")


def _of_user(environ: Mapping[str, str], variable: str, usual: str) -> str:
    return (
        environ.get(variable) or f"{environ.get('HOME') or os.path.expanduser('~')}/{usual}"
    ) + "/recipe"


@cache
def shipped() -> Path:
    """Return the directory with `recipes/`, `schemas/` and `fixtures/`, inside an installed
    package, else the repository's root.
    """
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def beside(path: str) -> str:
    """Return a path for display, relative if it is below the current directory."""
    here = os.getcwd().rstrip("/") + "/"
    return os.path.normpath(path).removeprefix(here)


def from_here(root: Path, path: str) -> str:
    """Return a workspace path relative to the current directory, if that is in the workspace."""
    here = os.getcwd()
    if path[:1] == "/" or not here.startswith(f"{root}/"):
        return path
    return os.path.relpath(f"{root}/{path}", here)


def is_path(word: str) -> bool:
    """Return True if a word names a recipe by path, not by its library name."""
    return "/" in word or word.endswith((".yaml", ".yml"))


def escapes(path: str) -> bool:
    """Return True if a relative path leads out of its directory, such as `../a`."""
    plain = posixpath.normpath(path)
    return plain == ".." or plain.startswith(("/", "~", "../")) or "\0" in path


def heads(path: str) -> list[str]:
    """Return a path and its parent paths: `a/b/c`, `a/b`, `a`."""
    found = [path]
    at = path.rfind("/")
    while at > 0:
        found.append(path[:at])
        at = path.rfind("/", 0, at)
    return found


def glob(pattern: str) -> Callable[[str], bool]:
    """Compile a glob to a function that tests paths. `*` and `?` do not match `/`; `**` does."""
    parts = []
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]/]+\]|.", pattern, re.S):
        if token == "**/":  # noqa: S105
            parts.append("(?:.*/)?")
        elif token == "**":  # noqa: S105
            parts.append(".*")
        elif token == "*":  # noqa: S105
            parts.append("[^/]*")
        elif token == "?":  # noqa: S105
            parts.append("[^/]")
        elif len(token) > 1:
            start = 2 if token[1] == "!" else 1
            letters = re.escape(token[start:-1]).replace(r"\-", "-")
            parts.append(f"[^{letters}]" if start == 2 else f"[{letters}]")
        else:
            parts.append(re.escape(token))
    compiled = re.compile("".join(parts), re.S)
    return lambda path: compiled.fullmatch(path) is not None
