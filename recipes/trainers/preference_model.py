"""The pairs that step `data` made, and how a model judges them.  Does not know training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from datasets import Dataset

GLANCE = 256  # held-out pairs that are looked at while training; step `evaluate` reads all of them


class Pairs:
    """A folder of tokens: rows of `prompt_ids`, `chosen_ids`, `rejected_ids`, mapped and not loaded."""

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.digest = hashlib.sha256(json.dumps(self.manifest["arrays"], sort_keys=True).encode()).hexdigest()
        self.train, self.held_out = (Dataset.from_file(str(folder / f"{name}.arrow")) for name in ("train", "held_out"))

    @property
    def glance(self) -> Dataset | None:
        """The first held-out pairs, None where none are held out."""
        count = min(GLANCE, len(self.held_out))
        return self.held_out.select(range(count)) if count else None
