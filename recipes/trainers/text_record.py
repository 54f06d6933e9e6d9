"""How weights were made: the settings of their training, in a file beside them.  Knows neither weights nor training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "training.json"


def write(folder: Path, settings: Mapping[str, object]) -> None:
    (folder / NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def read(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / NAME).read_text())
    return made
