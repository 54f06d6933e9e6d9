"""The recipes of the library as plain data, read once for all tests that look at their text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPES: dict[str, dict[str, Any]] = {
    path.stem: yaml.load(path.read_bytes(), yaml.CSafeLoader)
    for path in sorted((ROOT / "recipes").glob("*@*.yaml"))
}
"""By name and version; libyaml reads them in a tenth of the time."""
