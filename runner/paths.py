"""Paths: the workspace of a folder, settings files, what ships with the program, and whether a path stays below its folder.  Opens none of them."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

VERSION: Final = "0.1.0"
MARKERS: Final = ("recipe.toml", ".recipe", ".git")
"""What makes a folder a workspace."""


BUNDLED: Final = ".library"
"""The folder of a bundle that has the recipes of the library which its run was submitted with."""
TAGS: Final[Mapping[str, str]] = {
    ".gitignore": "*\n",
    "CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55\n# Made by recipe; backups may leave this folder out: https://bford.info/cachedir/\n",
}
"""What `.recipe` says to git, and to programs that make backups: files by name."""


def temporary_name(name: str, ending: str = "new") -> str:
    """Return a name beside `name` that no other thread, process or machine takes at the same time.

    What is written there is renamed to `name` when it is whole.
    """
    return f"{name}.{os.getpid()}-{os.urandom(4).hex()}.{ending}"


class Location(NamedTuple):
    """Where a caller stands: the workspace, and the folder in which the paths that are typed begin, relative to it (empty: the workspace)."""

    root: Path
    below: str = ""

    @property
    def here(self) -> Path:
        """The folder in which typed paths begin."""
        return self.root / self.below

    def typed(self, path: str) -> str:
        """A path as it was typed, from the workspace.  One that is absolute, begins with `~`, or is an address stays as it is."""
        if not self.below or path.startswith(("/", "~")) or "://" in path:
            return path
        return os.path.relpath(f"{self.here}/{path}", self.root) + (
            "/" if path.endswith("/") else ""
        )

    def folders(self, inputs: Iterable[str]) -> dict[str, str]:
        """In which folder of the workspace each of these inputs is typed; nothing where that is the workspace itself."""
        return dict.fromkeys(inputs, self.below) if self.below else {}


def location(environ: Mapping[str, str], words: Iterable[str] = ()) -> Location:
    """Where the caller stands: the workspace is the nearest folder upwards that is one, else that of the first recipe that `words` name by path.

    Where neither is found it is the current folder.
    """
    here = os.getcwd()
    root = _workspace_of(here, environ)
    for word in words if not root else ():
        if is_path(word) and os.path.isfile(word):
            root = _workspace_of(os.path.dirname(os.path.abspath(word)), environ)
            break
    root = root or here
    return Location(Path(root), "" if root == here else os.path.relpath(here, root))


def _workspace_of(folder: str, environ: Mapping[str, str]) -> str:
    """The nearest workspace upwards; empty where there is none."""
    return next((each for each in heads(folder) if _is_workspace(each, environ)), "")


def _is_workspace(folder: str, environ: Mapping[str, str]) -> bool:
    """Whether a folder bears a marker.  `/`, the user's home and a folder in which all users may write, such as /tmp, are none by that alone."""
    if folder == "/" or not any(os.path.lexists(f"{folder}/{marker}") for marker in MARKERS):
        return False
    if (
        stat.S_IMODE(os.stat(folder).st_mode) & (stat.S_ISVTX | stat.S_IWOTH)
        == stat.S_ISVTX | stat.S_IWOTH
    ):
        return False
    return folder != os.path.realpath(environ.get("HOME") or os.path.expanduser("~"))


def settings_files(root: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The settings files that may exist: the workspace's, which wins, and the user's."""
    return f"{root}/recipe.toml", f"{config_folder(environ)}/config.toml"


def config_folder(environ: Mapping[str, str]) -> str:
    """Where a user's own files for all workspaces lie."""
    return _of_user(environ, "XDG_CONFIG_HOME", ".config")


def data_folder(environ: Mapping[str, str]) -> str:
    """Where what `recipe` remembers for a user is, over all workspaces."""
    return _of_user(environ, "XDG_DATA_HOME", ".local/share")


def cache_folder(environ: Mapping[str, str]) -> str:
    """Where what `recipe` can fetch again is for a user."""
    return _of_user(environ, "XDG_CACHE_HOME", ".cache")


def _of_user(environ: Mapping[str, str], variable: str, usual: str) -> str:
    return (
        environ.get(variable) or f"{environ.get('HOME') or os.path.expanduser('~')}/{usual}"
    ) + "/recipe"


@cache
def shipped() -> Path:
    """The directory that holds `recipes/`, `schemas/` and `fixtures/`: inside an installed package, else the repository's root."""
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def beside(path: str) -> str:
    """A path as it is shown, and can be typed: from the current folder where it is below it, else as it is."""
    here = os.getcwd().rstrip("/") + "/"
    return os.path.normpath(path).removeprefix(here)


def from_here(root: Path, path: str) -> str:
    """A path of a workspace as it can be typed: from the current folder, where that is in the workspace."""
    here = os.getcwd()
    return (
        os.path.relpath(f"{root}/{path}", here)
        if here.startswith(f"{root}/") and path[:1] != "/"
        else path
    )


def is_path(word: str) -> bool:
    """Whether a word names a recipe by its path, and not by its name in the library."""
    return "/" in word or word.endswith((".yaml", ".yml"))


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


def glob(pattern: str) -> Callable[[str], bool]:
    """Whether a path matches: `*` and `?` stay within a name, `**` does not."""
    import re

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
            parts.append(
                "["
                + ("^" if token[1] == "!" else "")
                + re.escape(token[2 if token[1] == "!" else 1 : -1]).replace(r"\-", "-")
                + "]"
            )
        else:
            parts.append(re.escape(token))
    compiled = re.compile("".join(parts), re.S)
    return lambda path: compiled.fullmatch(path) is not None
