"""How this copy of recipe was installed, and the command that adds an extra to it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

NAME: Final = "recipe-runner"
"""Name of the distribution.  `recipe` on PyPI is another project."""
UNKNOWN_SOURCE: Final = "  # in a checkout of recipe"
"""Comment in the install command if the source of this copy was deleted."""


def install_command(extras: Iterable[str]) -> str:
    """Return the command that adds `extras` to recipe, matching how recipe was installed."""
    receipt = Path(sys.prefix, "uv-receipt.toml")
    wanted = list(dict.fromkeys(extras))
    if receipt.is_file():  # `uv tool install` replaces the environment, so repeat the old extras
        before = _extras_of_tool(tomllib.loads(receipt.read_text("utf-8")))
        wanted = list(dict.fromkeys([*before, *wanted]))
    source = _source(_direct_url(), Path.cwd(), Path(__file__).resolve().parents[1])
    return f"{_program(receipt.is_file())} {requirement(source, wanted)}"


def requirement(source: tuple[str, bool], extras: Iterable[str]) -> str:
    """Return the quoted pip requirement of a source with extras: name, URL or directory."""
    place, editable = source
    brackets = f"[{','.join(extras)}]"
    if not place:
        return f"'.{brackets}'{UNKNOWN_SOURCE}"
    if place == NAME:
        return f"'{NAME}{brackets}'"
    if "://" in place:
        return shlex.quote(f"{NAME}{brackets} @ {place}")
    quoted = shlex.quote(f"{place}{brackets}")
    return f"-e {quoted}" if editable else quoted


def _source(direct: Mapping[str, Any] | None, here: Path, checkout: Path) -> tuple[str, bool]:
    """Return the source of this installation for pip, and whether it is editable.

    The source is empty if it was deleted. `direct` is the installed direct_url.json: None if recipe
    is not installed, empty if it was installed from an index.
    """
    if direct is None:
        return _directory(checkout, here), False
    if not direct:
        return NAME, False
    url = str(direct["url"])
    if "vcs_info" in direct:
        vcs = direct["vcs_info"]
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return f"{vcs['vcs']}+{url}@{revision}", False
    path = Path(unquote(urlsplit(url).path))
    if not url.startswith("file:"):
        return url, False
    if path.is_file():
        return url, False
    return _directory(path, here), bool(direct.get("dir_info", {}).get("editable"))


def _directory(path: Path, here: Path) -> str:
    """Return a checkout's path for a command, or "" if it no longer exists."""
    if not (path / "pyproject.toml").is_file():
        return ""
    return "." if path == here else str(path)


def _direct_url() -> Mapping[str, Any] | None:
    """Return the origin of the installed copy (PEP 610).

    Empty for an index, None if recipe is not installed.
    """
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return json.loads(text) if text else {}


def _program(is_tool: bool) -> str:
    """Return the install command of this environment, without the requirement."""
    if is_tool:
        return "uv tool install"
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return f"pipx runpip {NAME} install"
    own = Path(sys.executable).parent
    if find_spec("pip") is None:
        if os.environ.get("VIRTUAL_ENV") == sys.prefix:
            return "uv pip install"
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    found = shutil.which("pip")
    if found and Path(found).parent == own:
        return "pip install"
    return f"{shlex.quote(sys.executable)} -m pip install"


def _extras_of_tool(receipt: Mapping[str, Any]) -> list[str]:
    """Return the extras with which `uv tool install` installed recipe."""
    extras: list[str] = []
    for each in receipt.get("tool", {}).get("requirements", []):
        if each.get("name") == NAME:
            extras += each.get("extras", [])
    return extras
