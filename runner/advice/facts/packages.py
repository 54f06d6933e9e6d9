"""Find the packages of a step and their versions, from its lock or its Python environment."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

_PINNED: Final = re.compile(
    r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)", re.MULTILINE
)


def read_lock(path: Path) -> dict[str, object]:
    """Return the packages in a lock file by name, each version as a list of numbers."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return {}
    if path.suffix == ".toml" or path.name == "uv.lock":
        table = "package" if path.name == "uv.lock" else "packages"
        try:
            listed = tomllib.loads(text).get(table, ())
            rows = [(str(each.get("name", "")), str(each.get("version", ""))) for each in listed]
        except (tomllib.TOMLDecodeError, AttributeError):
            return {}
    else:
        rows = [(found[1], found[2]) for found in _PINNED.finditer(text)]
    return _packages(rows)


def find_folders(python: str) -> Sequence[str] | None:
    """Return the package folders of a Python interpreter.

    None if finding them requires running it.
    """
    if os.path.dirname(os.path.dirname(python)) == sys.prefix:
        return sys.path
    prefix = Path(python).parent.parent
    found = [str(path) for path in sorted(prefix.glob("lib/python*/site-packages"))]
    if not found or not (prefix / "pyvenv.cfg").is_file():
        return None
    return found


class InstalledPackages(Mapping[str, object]):
    """Installed packages in some folders. Each package is looked up on first use, for speed."""

    def __init__(self, where: Sequence[str]) -> None:
        self._where = list(where)

    def __getitem__(self, name: str) -> object:
        asked = "torch" if name == "cuda" else name
        found = next(iter(distributions(name=asked.replace("_", "-"), path=self._where)), None)
        if found is None:
            return None
        return _packages([(asked, found.version)])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _packages(rows: Iterable[tuple[str, str]]) -> dict[str, object]:
    found: dict[str, object] = {}
    cuda: float | None = None
    for name, version in rows:
        plain = re.sub(r"[-.]+", "_", name).lower()
        if plain in found:
            continue  # Python imports the first of two installed versions
        found[plain] = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
        built = re.search(r"\+cu(\d+)(\d)", version) if plain == "torch" else None
        if built:
            cuda = float(f"{built[1]}.{built[2]}")
        elif plain.startswith("nvidia_cuda_runtime") and cuda is None:
            numbers = re.findall(r"\d+", version)
            cuda = float(f"{numbers[0]}.{numbers[1]}") if len(numbers) > 1 else None
    return {**found, "cuda": cuda}
