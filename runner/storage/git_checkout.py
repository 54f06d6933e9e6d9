"""Checkout of code pinned by git commit: `{git: URL, commit: 40 hex, at: DIR}`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from ..digest import of_value
from ..errors import CannotRun
from ..paths import temporary_name
from .workspace import Workspace

_OTHERS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
"""Environment variables of git hooks that would redirect git to the caller's repository."""

_UNREACHED = re.compile(
    r"resolve host|unable to connect|failed to connect|timed out|unreachable", re.I
)
"""Pattern for git messages about an unreachable server."""


def locate(url: str, home: str) -> str:
    """Return the URL or absolute path from which git fetches.

    A path is relative to the recipe's directory, like any `code` path.
    """
    if "://" in url or ":" in url.partition("/")[0]:  # git's own rule for HOST:PATH
        return url
    return os.path.normpath(os.path.join(home, os.path.expanduser(url)))


def is_fetched(ws: Workspace, url: str, commit: str) -> bool:
    """Return True if the commit can be checked out without network access."""
    mirror = _mirror(ws, url)
    return (mirror / "HEAD").exists() and _has(mirror, commit)


def checkout(ws: Workspace, url: str, commit: str, target: Path) -> None:
    """Write the files of a git commit into `target`.

    Each commit is fetched once per workspace. Raises CannotRun with git's message.
    """
    mirror = _mirror(ws, url)
    with ws.locks.hold(f"git-{mirror.name}"):
        if not (mirror / "HEAD").exists():
            _git("init", "--quiet", "--bare", str(mirror))
        if not _has(mirror, commit):
            try:
                _git("-C", str(mirror), "fetch", "--quiet", "--depth", "1", "--", url, commit)
            except CannotRun:
                # Some servers refuse to serve a single commit. Fetch all refs instead.
                _git("-C", str(mirror), "fetch", "--quiet", "--", url, "+refs/*:refs/recipe/*")
            if not _has(mirror, commit):
                raise CannotRun(f"{url} has no commit {commit}")
        os.utime(mirror / "HEAD")  # last use, read by `recipe gc`
        target.mkdir(parents=True, exist_ok=True)
        index = str(ws.home / "git" / temporary_name(mirror.name, "index"))
        _git(
            "-C",
            str(mirror),
            "--work-tree",
            str(target),
            "checkout",
            "--quiet",
            "--force",
            commit,
            "--",
            ".",
            index=index,
        )


def _mirror(ws: Workspace, url: str) -> Path:
    return ws.home / "git" / of_value("git", url)[:32]


def _has(mirror: Path, commit: str) -> bool:
    return (
        subprocess.run(
            ["git", "-C", str(mirror), "cat-file", "-e", f"{commit}^{{commit}}"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


def environment() -> dict[str, str]:
    """Return the caller's environment for git, without the variables of a git hook.

    Access to private repositories may need the ssh agent, a credential helper or a proxy.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}


def _git(*words: str, index: str | None = None) -> None:
    env = environment()
    if index:
        env["GIT_INDEX_FILE"] = index
    try:
        done = subprocess.run(
            ["git", *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise CannotRun(
            "a step pins code by git commit, but git is not installed", fix="install git"
        ) from error
    finally:
        if index:
            Path(index).unlink(missing_ok=True)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split("\n")[:2]).strip()
        command = words[2] if words[0] == "-C" else words[0]
        if _UNREACHED.search(said):
            fix = "check the network connection of this machine, then try again"
        else:
            fix = "correct the address or the commit under `code`"
        raise CannotRun(f"git {command} failed: {said}", fix=fix)
